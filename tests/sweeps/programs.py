"""Random programs with gradients: shard_map under the hooks against vmap over the same body.

A program is data: instructions on values of eight floats, some with programs inside. It is run
twice: by ``OnDevices`` in ``shard_map`` on eight devices as 4x2, and by ``Mapped`` on one, under
``jax.vmap`` with the mesh axes' names: no shard_map, no types. There a custom_vjp is the function
that it computes, and a collective is array arithmetic, so its values and gradients are exact
whatever a custom_vjp, a kernel or a type says.

A value that is typed invariant must be equal there on all devices, each value and gradient equal.

    python tests/seeds.py programs 2000 [first_seed [processes]]

prints how many were ``right``, ``refused`` (by an error of shardrules), refused in plain JAX, too
(``jax``), ``wrong``, ``died`` or ``lost`` (a program whose devices wait for each other ends its
process).
"""

from __future__ import annotations

import collections
import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from seeds import cheaply

import shardrules as sr
from shardrules import hooks
from shardrules.errors import ShardrulesError

from .generator import Generator, Program
from .machines import Mapped, OnDevices, size_of
from .operations import AXES, DEVICES, N

lax = jax.lax


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


EVERYWHERE = _spec(tuple(AXES))


def on_devices(program, types, check=True):
    """Return the function of the global arguments to what is differentiated, and to all values.

    Args:
      types: the mesh axes over which each value varies; filled when it is traced. Before that, a
        ``typed`` program's values are returned from all devices.
    """
    mesh = Mesh(np.array(jax.devices()[:DEVICES]).reshape(tuple(AXES.values())), tuple(AXES))

    def body(floats, integers, everywhere):
        trace = []
        out = OnDevices(integers[0], everywhere).run(program.block, floats, trace)
        if check:  # what a body records of its types is another with the check off
            types[:] = [_varying(x) for x in trace]
        return (trace if program.mode == "typed" else [out]), trace

    def gradients(floats, integers, everywhere):
        """Gradients taken inside of the shard_map."""

        def loss(*floats):
            (out,), trace = body(floats, integers, everywhere)
            mine = (out * _weights(everywhere)).sum() + 0 * everywhere.sum()
            return lax.psum(mine, tuple(AXES)), trace

        grads, trace = jax.grad(loss, argnums=tuple(range(len(floats))), has_aux=True)(*floats)
        return list(grads), trace

    inside = program.mode == "inside"
    floats_specs = [_spec(axes) for axes in program.specs]
    outputs = floats_specs if inside else EVERYWHERE
    if program.mode == "typed" and types:
        outputs = [_spec(tuple(axis for axis in AXES if axis in one)) for one in types]
    return hooks.shard_map(
        gradients if inside else body,
        mesh,
        (floats_specs, _spec(program.integer), EVERYWHERE),
        (outputs, EVERYWHERE),
        check=check,
    )


def _weights(everywhere):
    """Weights that differ by device, and are no constants of the program."""
    return jnp.cos(3 * everywhere)


def _varying(x):
    rep = getattr(x, "rep", None)
    return frozenset(AXES) - rep if rep is not None else hooks.varying(x)


def mapped(program, types):
    """Return the same function, on one device."""
    shape = tuple(AXES.values())

    def spread(x, axes, size):
        """Each device's block of a global array; the leading axes are the mesh's."""
        blocks = x.reshape(*(AXES[axis] if axis in axes else 1 for axis in AXES), *size)
        return jnp.broadcast_to(blocks, (*shape, *size))

    def run(floats, integers, everywhere):
        def body(floats, n, everywhere):
            trace = []
            out = Mapped(n, everywhere).run(program.block, floats, trace)
            return out, trace

        for axis in reversed(AXES):
            body = jax.vmap(body, axis_name=axis, axis_size=AXES[axis])
        out, trace = body(
            [spread(x, axes, (N,)) for x, axes in zip(floats, program.specs)],
            spread(integers, program.integer, ()),
            spread(everywhere, tuple(AXES), (N,)),
        )
        outputs = [out]
        if program.mode == "typed":  # what is the same on devices counts once
            outputs = [
                one[tuple(slice(None) if axis in axes else 0 for axis in AXES)]
                for one, axes in zip(trace, types)
            ]
        return [one.ravel() for one in outputs], trace

    return run


@dataclasses.dataclass
class Outcome:
    """What became of a program, in one of the words of this module's first lines."""

    seed: int
    what: str
    why: str = ""


def judge(seed: int) -> Outcome:
    """Run one program both ways and compare."""
    return judge_program(Generator(seed).program())


def judge_program(program: Program) -> Outcome:
    """Run a program both ways and compare; the hooks are installed with its casts."""
    with sr.install(casts=program.casts):
        return _compared(program)


def _compared(program: Program) -> Outcome:
    floats, integers, everywhere = inputs(program)
    types: list[frozenset] = []
    rng = np.random.default_rng(program.seed + 1)
    tangents = [jnp.asarray(rng.uniform(-1, 1, x.shape), np.float32) for x in floats]

    def derivatives(f):
        def loss(floats):
            outputs, trace = f(floats, integers, everywhere)
            return sum((one * _weights(everywhere)[: one.size]).sum() for one in outputs), trace

        def forward(floats):
            return jax.jvp(lambda floats: loss(floats)[0], (floats,), (tangents,))[1]

        if program.mode == "forward":
            return lambda floats: ([forward(floats)], loss(floats)[1])
        if program.mode == "hessian":
            return lambda floats: (jax.grad(forward)(floats), loss(floats)[1])
        return jax.grad(loss, has_aux=True)

    def of_all(check):
        del types[:]
        if check and program.mode == "typed":
            jax.eval_shape(on_devices(program, types), floats, integers, everywhere)
        sharded = on_devices(program, types, check)
        run = derivatives(sharded)
        if program.mode == "inside":
            run = lambda floats: sharded(floats, integers, everywhere)  # noqa: E731
        return jax.block_until_ready(jax.jit(run, compiler_options=cheaply())(floats))

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
    alone = derivatives(mapped(program, types))
    try:
        want, reference = jax.jit(alone, compiler_options=cheaply())(floats)
    except Exception as error:
        return Outcome(program.seed, "died", f"under vmap: {type(error).__name__}: {error}"[:300])
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
        if not _close(np.reshape(one, cube.shape), cube):
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


def outcome(seed: int):
    """Return one program's outcome for tests/seeds.py."""
    became = judge(seed)
    note = {"note": f"{became.what}: {became.why}"} if became.what != "right" else {}
    return {"what": became.what, **note}


def summary(outcomes):
    """Count what became of programs; well if none was wrong or died."""
    totals = collections.Counter(one.get("what", "lost") for one in outcomes.values())
    return str(dict(totals)), totals.keys() <= {"right", "refused", "jax"}
