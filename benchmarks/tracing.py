"""Time tracing and lowering kernel calls: the hooks against hand-written annotations on plain JAX.

    python benchmarks/tracing.py [--rounds=25] [--calls=20]

The arms take turns in one process, in another order each round; each round traces each arm once and
lowers it for TPU, after a garbage collection, from another depth of Python's stack. What is printed
is the median of the rounds' ratios to the hand-annotated arm: two runs of a machine differ by more
than the hooks cost, and so do two depths. CPython 3.11 and 3.12 keep frames in chunks of 16 KB, and
a call in a loop that happens to cross from one chunk to the next maps memory each time, which can
double the time of a trace (measured: 8 to 13 ms for two kernels, from a few frames more or less).
Below stands the ratio of the function calls, Python's and C's, which no other work disturbs.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import itertools
import os
import time

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ["XLA_FLAGS"] = (
    os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"
).strip()

import jax
import jax.numpy as jnp
import numpy as np
import paired
from absl import app, flags
from jax.experimental import pallas as pl
from jax.sharding import PartitionSpec as P

import shardrules

_ROUNDS = flags.DEFINE_integer("rounds", 25, "how often each arm is traced", lower_bound=1)
_CALLS = flags.DEFINE_integer("calls", 20, "kernel calls in the program", lower_bound=2)

_X, _W = pl.BlockSpec((64, 128), lambda i: (i, 0)), pl.BlockSpec((128, 128), lambda i: (0, 0))


def mul_rows(x_ref, w_ref, o_ref):
    """Multiply by w's first rows: about as short as kernels get."""
    o_ref[...] = x_ref[...] * w_ref[:64, :]


def attend(x_ref, w_ref, o_ref):
    """Attend eight times: about 100 equations, as many as a small attention kernel has."""
    x, w = x_ref[...], w_ref[...]
    for _ in range(8):
        s = jnp.dot(x, w, preferred_element_type=jnp.float32)
        p = jnp.exp(s - s.max(axis=-1, keepdims=True))
        x = jnp.dot(p / p.sum(axis=-1, keepdims=True), w).astype(x.dtype)
    o_ref[...] = x


def attend_bwd(x_ref, w_ref, g_ref, dx_ref, dw_ref):
    """Write something of the cotangents' shapes, in about as many equations."""
    attend(x_ref, w_ref, dx_ref)
    dx_ref[...] += g_ref[...]
    dw_ref[...] = jnp.dot(x_ref[...].T, g_ref[...])


def _annotated(x: jax.Array, like: jax.Array) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(
        x.shape, x.dtype, manual_axis_type=jax.typeof(like).manual_axis_type
    )


def _call(kernel, annotate: bool, x, w):
    """Call a kernel of (x, w), annotated by hand or not at all."""
    out = jax.ShapeDtypeStruct(x.shape, x.dtype)
    if annotate:
        w, out = jax.lax.pcast(w, "data", to="varying"), _annotated(x, x)
    return pl.pallas_call(kernel, out, grid=(2,), in_specs=[_X, _W], out_specs=_X)(x, w)


def forward(kernel, bwd, annotate: bool):
    """Return a chain of kernel calls, one device's part of it."""
    del bwd

    def local(x, w):
        for _ in range(_CALLS.value):
            x = _call(kernel, annotate, x, w)
        return x

    return local


def gradient(kernel, bwd, annotate: bool):
    """Return the gradient of a chain of custom_vjp calls: half of the kernel calls are bwd's."""

    @jax.custom_vjp
    def op(x, w):
        return _call(kernel, annotate, x, w)

    def op_bwd(saved, g):
        x, w = saved
        outs = [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in (x, w)]
        if annotate:
            w, outs = jax.lax.pcast(w, "data", to="varying"), [_annotated(x, x), _annotated(w, x)]
        dx, dw = pl.pallas_call(bwd, outs, grid=(2,), in_specs=[_X, _W, _X], out_specs=[_X, _W])(
            x, w, g
        )
        return dx, jax.lax.psum(dw, "data") if annotate else dw

    op.defvjp(lambda x, w: (op(x, w), (x, w)), op_bwd)

    def local(x, w):
        def loss(x, w):
            for _ in range(_CALLS.value // 2):
                x = op(x, w)
            return x.sum()

        return jax.grad(loss, argnums=(0, 1))(x, w)

    return local


def _deeper(frame_count: int, function):
    """Call a function under that many frames more."""
    return _deeper(frame_count - 1, function) if frame_count else function()


def _seconds(arm, mesh, out_specs, depths, clock=time.thread_time) -> tuple[float, float]:
    """Trace a program anew and lower it; return what both took of the processor.

    Args:
      arm: one device's part, the contexts to trace it in, and whether the check is on.
      mesh: the mesh.
      out_specs: shard_map's.
      depths: under how many more frames, each time.
      clock: what is read before, between and after.
    """
    local, contexts, check = arm
    shapes = (
        jax.ShapeDtypeStruct((512, 128), jnp.float32),
        jax.ShapeDtypeStruct((128, 128), jnp.float32),
    )
    depth = next(depths)
    with contextlib.ExitStack() as stack:
        for context in contexts:
            stack.enter_context(context())
        f = jax.shard_map(
            lambda x, w: local(x, w),
            mesh=mesh,
            in_specs=(P("data"), P()),
            out_specs=out_specs,
            check_vma=check,
        )
        gc.collect()
        start = clock()
        traced = _deeper(depth, lambda: jax.jit(f).trace(*shapes))
        between = clock()
        _deeper(depth, lambda: traced.lower(lowering_platforms=("tpu",)))
        return between - start, clock() - between


def _arms(build, kernel):
    """Return, for each way to write it, the program, its contexts, and whether the check is on."""
    declared, by_name = shardrules.no_communication, {"*": shardrules.no_communication}
    plain, installed = [contextlib.nullcontext], [shardrules.install]
    registered = [*installed, functools.partial(shardrules.rules, by_name)]
    unannotated = build(kernel, attend_bwd, False)
    return {
        "by hand": (build(kernel, attend_bwd, True), plain, True),
        "declared": (build(declared(kernel), declared(attend_bwd), False), installed, True),
        "registered by name": (unannotated, registered, True),
        "proven by its jaxpr": (unannotated, installed, True),
        "check off, no hooks": (unannotated, plain, False),
    }


def _main(argv) -> None:
    if len(argv) > 1:
        raise app.UsageError(f"unexpected arguments: {argv[1:]}")
    mesh = jax.sharding.Mesh(np.array(jax.devices()).reshape(4, 2), ("data", "model"))
    paired.print_stamp()
    paired.print_head(["program", *list(_arms(forward, mul_rows))[1:]])
    for name, build, kernel, out_specs in (
        ("2 equations a kernel", forward, mul_rows, P("data")),
        ("about 100 equations a kernel", forward, attend, P("data")),
        ("the gradient, about 100 equations a kernel", gradient, attend, (P("data"), P())),
    ):
        runs = {
            arm_name: functools.partial(
                _seconds, arm, mesh, out_specs, itertools.cycle(range(0, 200, 7))
            )
            for arm_name, arm in _arms(build, kernel).items()
        }
        took = paired.rounds(runs, _ROUNDS.value, warm_count=2)  # which fill caches
        for what, total in (("traced", lambda both: both[0]), ("traced and lowered", sum)):
            seconds = {arm: [total(both) for both in found] for arm, found in took.items()}
            ratios = [paired.ratio(seconds[arm], seconds["by hand"]) for arm in list(seconds)[1:]]
            paired.print_row([f"{name}, {what}", *map(paired.shown, ratios)])
        calls = {
            arm: sum(paired.calls(lambda clock, run=run: run(clock=clock)))
            for arm, run in runs.items()
        }
        ratios = [calls[arm] / calls["by hand"] for arm in list(calls)[1:]]
        paired.print_row([f"{name}, function calls of both", *(f"{one:.3f}" for one in ratios)])
    print(
        f"\nTime for {_CALLS.value} calls, divided by that with hand-written annotations on plain "
        f"JAX: median of {_ROUNDS.value} paired rounds (quartiles)."
    )


if __name__ == "__main__":
    app.run(_main)
