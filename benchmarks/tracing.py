"""Time tracing 100 kernel calls: with the hooks, against hand-written annotations on plain JAX.

    python benchmarks/tracing.py [--rounds=15] [--calls=100]

The arms take turns in one process, each round traces each arm once, and what is printed is the
median of the rounds' ratios to the hand-annotated arm: two runs of a machine differ by more than
the hooks cost.
"""

from __future__ import annotations

import contextlib
import os
import statistics
import time

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ["XLA_FLAGS"] = (os.environ.get("XLA_FLAGS", "")
                           + " --xla_force_host_platform_device_count=8").strip()

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402
from absl import app, flags  # noqa: E402
from jax.experimental import pallas as pl  # noqa: E402
from jax.sharding import PartitionSpec as P  # noqa: E402

import shardrules  # noqa: E402

_ROUNDS = flags.DEFINE_integer("rounds", 15, "how often each arm is traced", lower_bound=3)
_CALLS = flags.DEFINE_integer("calls", 100, "kernel calls in the program", lower_bound=1)



def attention_kernel(x_ref, w_ref, o_ref):
    """As many equations as a small attention kernel has."""
    x, w = x_ref[...], w_ref[...]
    for _ in range(8):
        s = jnp.dot(x, w, preferred_element_type=jnp.float32)
        p = jnp.exp(s - s.max(axis=-1, keepdims=True))
        x = jnp.dot(p / p.sum(axis=-1, keepdims=True), w).astype(x.dtype)
    o_ref[...] = x


def program(kernel, annotate: bool):
    """Return a function that traces ``--calls`` calls of a kernel in shard_map."""
    mesh = jax.sharding.Mesh(np.array(jax.devices()).reshape(4, 2), ("data", "model"))

    def local(x, w):
        for _ in range(_CALLS.value):
            if annotate:
                w_ = jax.lax.pcast(w, "data", to="varying")
                out = jax.ShapeDtypeStruct(x.shape, x.dtype,
                                           manual_axis_type=jax.typeof(x).manual_axis_type)
            else:
                w_, out = w, jax.ShapeDtypeStruct(x.shape, x.dtype)
            x = pl.pallas_call(kernel, out, grid=(2,),
                               in_specs=[pl.BlockSpec((64, 128), lambda i: (i, 0)),
                                         pl.BlockSpec((128, 128), lambda i: (0, 0))],
                               out_specs=pl.BlockSpec((64, 128), lambda i: (i, 0)))(x, w_)
        return x

    def trace():
        f = jax.shard_map(lambda x, w: local(x, w), mesh=mesh, in_specs=(P("data"), P()),
                          out_specs=P("data"))
        shapes = (jax.ShapeDtypeStruct((512, 128), jnp.float32),
                  jax.ShapeDtypeStruct((128, 128), jnp.float32))
        start = time.thread_time()
        jax.jit(f).trace(*shapes)
        return time.thread_time() - start

    return trace


def mul_rows(x_ref, w_ref, o_ref):
    o_ref[...] = x_ref[...] * w_ref[:64, :]


def _main(argv) -> None:
    del argv
    print("| kernel | hooks, declared | hooks, proven by its jaxpr |\n|---|---|---|")
    for name, kernel in (("2 equations", mul_rows), ("about 100 equations", attention_kernel)):
        declared = shardrules.no_communication(kernel)
        arms = {
            "hand": (program(kernel, True), contextlib.nullcontext),
            "declared": (program(declared, False), shardrules.install),
            "proven": (program(kernel, False), shardrules.install),
        }
        seconds = {arm: [] for arm in arms}
        for number in range(_ROUNDS.value + 2):
            for arm, (trace, context) in arms.items():
                with context():
                    took = trace()
                if number >= 2:  # the first two fill caches
                    seconds[arm].append(took)
        ratios = [statistics.median(a / b for a, b in zip(seconds[arm], seconds["hand"]))
                  for arm in ("declared", "proven")]
        print(f"| {name} | {ratios[0]:.3f} | {ratios[1]:.3f} |", flush=True)
    print(f"\nTime to trace {_CALLS.value} calls, divided by that with hand-written annotations on "
          f"plain JAX; median of {_ROUNDS.value} paired rounds.")


if __name__ == "__main__":
    app.run(_main)
