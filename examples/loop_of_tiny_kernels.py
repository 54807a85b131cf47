"""jax#7024: a sampler of tiny arrays in a while_loop, far slower on a GPU than on a CPU.

    python examples/loop_of_tiny_kernels.py

The report's program in five versions, compiled for an H100 (no GPU is needed): what one trip
launches, how many trips there are, and whether the host or the GPU decides on the next one. Where
there is a GPU, the five are timed too.
"""

import functools
import os
import pathlib
import time

if not pathlib.Path("/dev/nvidia0").exists():
    os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from shardrules import aot, hlo, report, testing
from shardrules.costs import launches
from shardrules.errors import AotError, CostAssertionError, ShardrulesError

HIDDEN, ITERATIONS = 16, 8000


def force(weights, x):
    """Two layers with softplus weights, as the report has them; x is one number."""
    up, down = weights
    hidden = jax.nn.sigmoid(jnp.dot(x, jax.nn.softplus(up)))
    return jax.nn.sigmoid(jnp.dot(hidden, jax.nn.softplus(down)))


def while_loop(weights, key, count):
    def body(state):
        x, key, n = state
        noise, key = jax.random.split(key)
        return force(weights, x) + jax.random.normal(noise, (1,)), key, n + 1

    state = jnp.zeros(1), key, 0
    return jax.lax.while_loop(lambda state: state[2] < count, body, state)[0]


def static_while_loop(weights, key, count=ITERATIONS):
    return while_loop(weights, key, count)


def scan(weights, key, count=ITERATIONS, unroll=1):
    """Draw the noise before the loop."""

    def body(x, noise):
        return force(weights, x) + noise, None

    noise = jax.random.normal(key, (count, 1))
    return jax.lax.scan(body, jnp.zeros(1), noise, unroll=unroll)[0]


def kernel(up_ref, down_ref, noise_ref, out_ref, *, count):
    up, down = up_ref[...], down_ref[...]

    def body(n, x):
        return jax.nn.sigmoid(jnp.sum(jax.nn.sigmoid(x * up) * down)) + noise_ref[n]

    out_ref[...] = jnp.full(out_ref.shape, jax.lax.fori_loop(0, count, body, jnp.float32(0)))


def one_kernel(weights, key, count=ITERATIONS, interpret=False):
    """Hold the loop in one Pallas kernel."""
    up, down = (jax.nn.softplus(w).reshape(HIDDEN) for w in weights)
    options = {} if interpret else {"compiler_params": plgpu.CompilerParams(num_warps=1)}
    out = pl.pallas_call(
        functools.partial(kernel, count=count),
        out_shape=jax.ShapeDtypeStruct((1,), jnp.float32),
        interpret=interpret,
        **options,
    )(up, down, jax.random.normal(key, (count,)))
    return out


WAYS = {
    "while_loop, the bound an argument": while_loop,
    "while_loop, the bound a number": static_while_loop,
    "scan, noise drawn outside": scan,
    "the same, unrolled by 8": functools.partial(scan, unroll=8),
    "one Pallas kernel": one_kernel,
}


def arguments(make, way):
    weights = make((1, HIDDEN), jnp.float32), make((HIDDEN, 1), jnp.float32)
    found = (weights, make((2,), jnp.uint32))
    return (*found, make((), jnp.int32)) if way is while_loop else found


def compiled_for(devices, way):
    mesh = Mesh(np.array(devices), ("x",))
    make = functools.partial(jax.ShapeDtypeStruct, sharding=NamedSharding(mesh, P()))
    args = arguments(make, way)
    if way is one_kernel:  # JAX 0.12 asks the mesh around a kernel which GPU it is for
        way = jax.shard_map(way, mesh=mesh, in_specs=P(), out_specs=P(), check_vma=False)
    return jax.jit(way).lower(*args).compile()


def all_are_the_same(count=5):
    """Compare the ways that draw the same noise, on CPU, the kernel interpreted."""
    key = jax.random.key(0)
    weights = tuple(jax.random.normal(key, s) for s in ((1, HIDDEN), (HIDDEN, 1)))
    expected = scan(weights, key, count)
    noise = jax.random.normal(key, (count, 1)).reshape(count)
    np.testing.assert_array_equal(noise, jax.random.normal(key, (count,)))
    for way in (functools.partial(scan, unroll=8), functools.partial(one_kernel, interpret=True)):
        np.testing.assert_allclose(way(weights, key, count), expected, rtol=1e-5)


def gpu_here():
    """Return a GPU that JAX may use in this process, or None."""
    try:
        return jax.devices("gpu")[0]
    except RuntimeError:  # there is none, or JAX_PLATFORMS names others
        return None


def milliseconds(way, device):
    """Time one call on a GPU."""
    make = lambda shape, dtype: jnp.full(shape, 7, dtype)  # noqa: E731
    args = jax.device_put(arguments(make, way), device)
    if way is while_loop:
        args = (*args[:2], jnp.int32(ITERATIONS))
    run = jax.jit(way)
    jax.block_until_ready(run(*args))
    start = time.perf_counter()
    jax.block_until_ready(run(*args))
    return f"{1e3 * (time.perf_counter() - start):.1f}"


def main():
    try:
        devices = aot.gpu("h100", 1)
    except AotError as error:
        raise SystemExit(str(error)) from error
    gpu = gpu_here()
    heading = ["the loop", "trips", "launches per trip", "launches in all", "decides"]
    rows = [heading + (["ms here"] if gpu else [])]
    messages = []
    for name, way in WAYS.items():
        compiled = compiled_for(devices, way)
        try:
            loops = testing.assert_loop(compiled, max_launches_per_iteration=2)
        except CostAssertionError as error:
            loops = error.loops
            messages.append(str(error))
        except ShardrulesError:  # no loop is left outside of the kernel
            loops = []
        loop = max(loops, key=lambda one: one.trip_count or ITERATIONS, default=None)
        total = launches.in_all(hlo.parse(compiled.as_text()))
        if loop is None:
            row = [name, "in the kernel", "0", total, "the kernel"]
        else:
            at_least = f"{ITERATIONS * loop.launches} in {ITERATIONS} trips"
            row = [
                name,
                loop.trip_count or "not static",
                loop.launches,
                at_least if total is None else total,
                "the host" if loop.host_decides else "nobody",
            ]
        rows.append(row + ([milliseconds(way, gpu)] if gpu else []))
    print(report.table(rows))
    print("\nWhat assert_loop(max_launches_per_iteration=2) says of the first:\n\n" + messages[0])
    all_are_the_same()
    print("\nThe ways that draw the same noise give the same sample.")


if __name__ == "__main__":
    main()
