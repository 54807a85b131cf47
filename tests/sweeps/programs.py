"""Random programs with gradients: shard_map under the hooks against arrays of devices.

A program is data: instructions on values of eight floats, some with programs inside. It is run
twice: by ``OnDevices`` in ``shard_map`` on eight devices as 4x2, and by ``AsArrays`` on one, where
the devices are the first axis of every array, collectives are ordinary indexing and sums along it,
branches are selects and loops are unrolled. JAX differentiates the latter without knowing of any
mesh, so its values and gradients are exact whatever a custom_vjp, a kernel or a type says.

A value that is typed invariant must be equal there on all devices, each value and gradient equal.

    python -m tests.sweeps.programs 2000 [first_seed [processes]]
"""

from __future__ import annotations

import collections
import dataclasses
import json
import os
import subprocess
import sys

if __name__ == "__main__":
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    os.environ["XLA_FLAGS"] = (
        os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"
    ).strip()

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import shardrules as sr
from shardrules import hooks
from shardrules.errors import ShardrulesError

from .generator import Generator, Program
from .machines import AsArrays, OnDevices, members_of, size_of
from .operations import AXES, DEVICES, N

lax = jax.lax

# Half of a program's time is LLVM's without these.
CHEAPLY = {
    "xla_backend_optimization_level": 0,
    "xla_llvm_disable_expensive_passes": True,
    "xla_cpu_use_fusion_emitters": False,
    "xla_cpu_parallel_codegen_split_count": 1,
}


def inputs(program):
    """Return the global arguments: the floats, the integers, a value for each device."""
    rng = np.random.default_rng(program.seed)
    floats = [
        jnp.asarray(rng.uniform(-1, 1, N * size_of(spec, None)), np.float32)
        for spec in program.specs
    ]
    integers = jnp.asarray(rng.integers(0, 4, size_of(program.integer, None)), np.int32)
    return floats, integers, jnp.asarray(rng.uniform(-1, 1, N * DEVICES), np.float32)


def _spec(axes):
    return P(axes) if axes else P()


def on_devices(program, types, check=True):
    """Return the function of the global arguments to the outputs of all devices."""
    mesh = Mesh(np.array(jax.devices()[:DEVICES]).reshape(tuple(AXES.values())), tuple(AXES))

    def body(floats, integers, everywhere):
        machine = OnDevices(integers[0], everywhere)
        trace = []
        out = machine.run(program.block, floats, trace)
        types[:] = [_varying(x) for x in trace]
        return out, trace

    def gradients(floats, integers, everywhere):
        """Gradients taken inside of the shard_map."""

        def loss(*floats):
            out, trace = body(floats, integers, everywhere)
            mine = (out * _mine(out, everywhere)).sum() + 0 * everywhere.sum()
            return lax.psum(mine, tuple(AXES)), trace

        grads, trace = jax.grad(loss, argnums=tuple(range(len(floats))), has_aux=True)(*floats)
        return list(grads), trace

    inner = gradients if program.mode == "inside" else body
    everything = P(tuple(AXES))
    floats_specs = [_spec(axes) for axes in program.specs]
    return hooks.shard_map(
        inner,
        mesh,
        (floats_specs, _spec(program.integer), everything),
        (floats_specs if program.mode == "inside" else everything, everything),
        check=check,
    )


def _mine(out, everywhere):
    """Weights that differ by device, and are no constants of the program."""
    return jnp.cos(3 * everywhere)


def _varying(x):
    rep = getattr(x, "rep", None)
    return frozenset(AXES) - rep if rep is not None else hooks.varying(x)


def as_arrays(program):
    """Return the same function, on one device."""

    def run(floats, integers, everywhere):
        def spread(x, spec, size):
            members = np.zeros(DEVICES, int)
            if spec:
                _, members = members_of(spec, None)
            return x.reshape(size_of(spec, None), *size)[members]

        machine = AsArrays(spread(integers, program.integer, ()))
        trace = []
        args = [spread(x, spec, (N,)) for x, spec in zip(floats, program.specs)]
        out = machine.run(program.block, args, trace)
        return out.reshape(DEVICES * N), [x.reshape(DEVICES * N) for x in trace]

    return run


@dataclasses.dataclass
class Outcome:
    """What became of a program: ``right``, ``refused``, ``died``, ``wrong`` or JAX's (``jax``)."""

    seed: int
    what: str
    why: str = ""


def judge(seed: int) -> Outcome:
    """Run one program both ways and compare; the hooks are installed."""
    return judge_program(Generator(seed).program())


def judge_program(program: Program) -> Outcome:
    floats, integers, everywhere = inputs(program)
    types: list[frozenset] = []
    alone = as_arrays(program)
    rng = np.random.default_rng(program.seed + 1)
    tangents = [jnp.asarray(rng.uniform(-1, 1, x.shape), np.float32) for x in floats]

    def derivatives(f):
        def loss(floats):
            out, trace = f(floats, integers, everywhere)
            return (out * jnp.cos(3 * everywhere)).sum(), trace

        def forward(floats):
            return jax.jvp(lambda floats: loss(floats)[0], (floats,), (tangents,))[1]

        if program.mode == "forward":
            return lambda floats: ([forward(floats)], loss(floats)[1])
        if program.mode == "hessian":
            return lambda floats: (jax.grad(forward)(floats), loss(floats)[1])
        return jax.grad(loss, has_aux=True)

    def of_all(check):
        sharded = on_devices(program, types, check)
        run = derivatives(sharded)
        if program.mode == "inside":
            run = lambda floats: sharded(floats, integers, everywhere)  # noqa: E731
        return jax.block_until_ready(jax.jit(run, compiler_options=CHEAPLY)(floats))

    want, reference = jax.jit(derivatives(alone), compiler_options=CHEAPLY)(floats)
    try:
        got, trace = of_all(check=True)
    except ShardrulesError as error:
        return Outcome(program.seed, "refused", f"{type(error).__name__}: {error}"[:300])
    except Exception as error:
        what = f"{type(error).__name__}: {error}"[:300]
        try:
            of_all(check=False)
        except Exception as unchecked:  # what has nothing to do with types: JAX's own
            if type(unchecked) is type(error) and str(unchecked)[:30] == str(error)[:30]:
                return Outcome(program.seed, "jax", what)
        return Outcome(program.seed, "died", what)
    for place, (one, other) in enumerate(zip(trace, reference)):
        cube = np.asarray(other).reshape(*AXES.values(), N)
        name = name_of(program.block.steps[place])
        for number, axis in enumerate(AXES):
            if axis not in types[place] and not _close(
                cube, np.broadcast_to(cube.take([0], number), cube.shape)
            ):
                return Outcome(
                    program.seed, "wrong", f"{name} is typed invariant over {axis} and differs"
                )
        copies = one
        if not _close(copies, other):
            return Outcome(program.seed, "wrong", f"the value of {name}")
    for place, (one, other) in enumerate(zip(got, want)):
        if not _close(one, other):
            return Outcome(
                program.seed,
                "wrong",
                f"derivative {place} ({program.mode}) is {np.ravel(one)[:3]} for "
                f"{np.ravel(other)[:3]}",
            )
    return Outcome(program.seed, "right")


def name_of(step):
    return " ".join(map(str, (step.kind, *step.options)))


def _close(got, want):
    got, want = np.asarray(got), np.asarray(want)
    finite = np.abs(want[np.isfinite(want)])
    return np.allclose(
        got, want, rtol=5e-3, atol=5e-3 * max(finite.max(initial=0), 1e-2), equal_nan=True
    )


def show(block, indent=0):
    """Print a block, for a person who looks for what is wrong."""
    for place, step in enumerate(block.steps):
        print(" " * indent + f"{block.count + place}: {name_of(step)} {step.inputs}")
        for one in step.blocks:
            print(" " * indent + f"  of {one.count}:")
            show(one, indent + 4)


def main(arguments):
    count, first, jobs = (list(map(int, arguments)) + [20, 0, 1][len(arguments) :])[:3]
    if jobs > 1:
        share = -(-count // jobs)
        running = [
            subprocess.Popen(
                [
                    sys.executable,
                    "-m",
                    __spec__.name,
                    str(min(share, count - start)),
                    str(first + start),
                    "1",  # it tells, and this one judges
                ],
                stdout=subprocess.PIPE,
                text=True,
            )
            for start in range(0, count, share)
        ]
        totals: collections.Counter = collections.Counter()
        for one in running:
            out, _ = one.communicate()
            lines = out.splitlines()
            print("\n".join(lines[:-1]))
            totals.update(json.loads(lines[-1]) if lines and not one.returncode else {"lost": 1})
    else:
        totals = collections.Counter()
        with sr.install():
            for seed in range(first, first + count):
                outcome = judge(seed)
                totals[outcome.what] += 1
                if outcome.what != "right":
                    print(f"seed {seed}: {outcome.what}: {outcome.why}", flush=True)
                if seed % 50 == 49:
                    jax.clear_caches()
    print(json.dumps(totals))
    if jobs > 1 or len(arguments) < 3:
        return totals["wrong"] + totals["died"] + totals["lost"]


if __name__ == "__main__":
    sys.exit(1 if main(sys.argv[1:]) else 0)
