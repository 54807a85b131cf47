"""What runs only where a GPU is: the report's kernel, Triton ops, and loops of tiny kernels.

    python benchmarks/on_a_gpu.py [--rounds=20] [--absent]

On a mesh of axes of size one, (1 data, 1 model), with shardrules and the check on: each op
compiles, runs, and its gradients are compared with those outside of shard_map. Then the loops of
examples/loop_of_tiny_kernels.py are timed. Prints one line where there is no GPU. With --absent the
same programs are compiled for one H100 that is not here, and none is run.
"""

from __future__ import annotations

import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent / "examples"))

import jax
import jax.numpy as jnp
import numpy as np
import paired
from absl import app, flags
from jax.experimental import pallas as pl
from jax.sharding import Mesh, NamedSharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P

import shardrules
from shardrules import aot, testing

_ROUNDS = flags.DEFINE_integer("rounds", 20, "how often each is timed", lower_bound=1)
_ABSENT = flags.DEFINE_bool("absent", False, "compile for an H100 that is not here; run nothing")


def copy_kernel(x_ref, y_ref):
    """The report's."""
    y_ref[...] = x_ref[...]


def ops():
    """Yield each op's name, its function, and the shapes and dtypes of its arguments."""
    from jax.experimental.pallas import triton
    from jax.experimental.pallas.ops.gpu import attention, layer_norm, rms_norm

    @jax.custom_vjp
    def copy(x):
        return pl.pallas_call(
            copy_kernel,
            jax.ShapeDtypeStruct(x.shape, x.dtype),
            compiler_params=triton.CompilerParams(),
        )(x)

    copy.defvjp(lambda x: (copy(x), None), lambda _, g: (copy(g),))
    half, single = jnp.float16, jnp.float32
    norm = [((8, 64, 512), single), ((512,), single), ((512,), single)]
    yield "jax#21855's copy", copy, [((4, 128), single)]
    yield (
        "mha",
        lambda q, k, v: attention.mha(q, k, v, segment_ids=None),
        [((8, 256, 4, 64), half)] * 3,
    )
    yield "rms_norm", rms_norm.rms_norm, norm
    yield "layer_norm", layer_norm.layer_norm, norm


def compiled(op, shapes, mesh):
    """Compile an op's gradient in shard_map, with the check on, and outside of it.

    Returns:
      two programs, ``in`` and ``out``.
    """
    specs = tuple(P("data") if len(shape) > 1 else P() for shape, _ in shapes)
    f = jax.shard_map(op, mesh=mesh, in_specs=specs, out_specs=P("data"))
    inside = [
        jax.ShapeDtypeStruct(*shape, sharding=NamedSharding(mesh, spec))
        for shape, spec in zip(shapes, specs)
    ]
    alone = SingleDeviceSharding(mesh.devices.flat[0])
    outside = [jax.ShapeDtypeStruct(*shape, sharding=alone) for shape in shapes]
    programs = {}
    for arm, function, args in (("in", f, inside), ("out", op, outside)):

        def loss(*args, function=function):
            return (function(*args).astype(jnp.float32) ** 2).sum()

        if arm == "out" and _ABSENT.value:
            continue  # a kernel outside of a mesh is compiled for a GPU that is here
        wrt = tuple(range(len(args)))
        programs[arm] = jax.jit(jax.grad(loss, argnums=wrt)).lower(*args).compile()
    return programs


def _main(argv) -> None:
    if len(argv) > 1:
        raise app.UsageError(f"unexpected arguments: {argv[1:]}")
    if _ABSENT.value:
        absent()
        return
    try:
        device = jax.devices("gpu")[0]
    except RuntimeError:
        print("There is no GPU here: nothing was run.")
        return
    paired.print_stamp()
    print(f"on one {device.device_kind}")
    mesh = Mesh(np.array([[device]]), ("data", "model"))
    paired.print_head(["op", "collectives", "gradients", "time / outside of shard_map"])
    for name, op, shapes in ops():
        keys = jax.random.split(jax.random.key(0), len(shapes))
        args = [jax.random.normal(key, *shape) for key, shape in zip(keys, shapes)]
        with shardrules.install():
            runs = compiled(op, shapes, mesh)
        given = {
            arm: jax.device_put(args, program.input_shardings[0]) for arm, program in runs.items()
        }
        account = testing.account(runs["in"])
        pairs = zip(*(program(*given[arm]) for arm, program in runs.items()))
        same = all(np.allclose(a, b, rtol=1e-2, atol=1e-2) for a, b in pairs)
        took = paired.rounds(
            {
                arm: lambda c=c, a=given[arm]: paired.seconds(lambda: jax.block_until_ready(c(*a)))
                for arm, c in runs.items()
            },
            _ROUNDS.value,
        )
        times = paired.shown(paired.ratio(took["in"], took["out"]))
        paired.print_row([name, len(account.entries), "equal" if same else "DIFFER", times])
    loops(_ROUNDS.value)


def absent() -> None:
    """Compile each program for one H100 that is not here."""
    import loop_of_tiny_kernels as example

    devices = aot.gpu("h100", 1)
    mesh = Mesh(np.array(devices).reshape(1, 1), ("data", "model"))
    for name, op, shapes in ops():
        with shardrules.install():
            found = compiled(op, shapes, mesh)["in"]
        print(f"{name}: compiled, {len(testing.account(found).entries)} collectives", flush=True)
    for name, way in example.WAYS.items():
        example.compiled_for(devices, way)
        print(f"{name}: compiled", flush=True)


def loops(count: int) -> None:
    """Time the loops of the tiny-kernels example against its last, one kernel."""
    import loop_of_tiny_kernels as example

    paired.print_head(["loop", "time / that of the last"])
    runs = {}
    for name, way in example.WAYS.items():
        args = example.arguments(lambda shape, dtype: jnp.full(shape, 7, dtype), way)
        if way is example.while_loop:
            args = (*args[:2], jnp.int32(example.ITERATIONS))
        compiled = jax.jit(way).lower(*args).compile()
        runs[name] = lambda c=compiled, a=args: paired.seconds(lambda: jax.block_until_ready(c(*a)))
    took = paired.rounds(runs, count)
    last = list(took)[-1]
    for name in took:
        paired.print_row([name, paired.shown(paired.ratio(took[name], took[last]))])


if __name__ == "__main__":
    app.run(_main)
