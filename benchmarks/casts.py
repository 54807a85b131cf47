"""Print what a gradient's all-reduces move, by where its casts stand.

    python benchmarks/casts.py [--random=500] [--seed=0]

For each program, on eight CPU devices: the bytes that the gradient's all-reduces sum on each
device in one step, under `check_vma=False`, with the check on where JAX casts (late) and at the
minimum cut (cheapest); the optimum by an integer program over the same graph, of what the casts
alone sum; and how much longer tracing and lowering take with casts placed. A program of a library
that is not installed is left out. With --random, that many random bodies
(tests/hooks/autodiff/bodies.py) are traced, and how often the cut is the optimum is printed.
"""

from __future__ import annotations

import importlib.util
import os
import pathlib
import statistics
import sys
import time

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"
ROOT = pathlib.Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402
from absl import app, flags  # noqa: E402
from hooks.autodiff import bodies, optimum  # noqa: E402
from jax import lax  # noqa: E402
from jax.sharding import Mesh  # noqa: E402
from jax.sharding import PartitionSpec as P  # noqa: E402

import shardrules  # noqa: E402
from shardrules import testing  # noqa: E402
from shardrules.hooks.autodiff import placing  # noqa: E402
from shardrules.hooks.autodiff.cheapest import cost, cost_as_traced  # noqa: E402

_RANDOM = flags.DEFINE_integer("random", 0, "random bodies to trace", lower_bound=0)
_SEED = flags.DEFINE_integer("seed", 0, "of the first of them")

WIDTH = 64


def array(*shape):
    return np.random.RandomState(len(shape)).randn(*shape).astype(np.float32) * 0.1


def top_k(w, x):
    """A weight that is repeated for the two experts of each row, and read by two products."""
    wide = jnp.repeat(w, 2, axis=0)
    return ((x @ jnp.sin(wide).T) * (x @ jnp.cos(wide).T)).sum()


def rnn(w, x):
    h, _ = lax.scan(lambda h, row: (jnp.tanh(h @ w + row), None), x[0], x)
    return (h**2).sum()


def scanned_layers(params, x):
    """Twelve layers of a transformer's feed-forward half and attention, rematerialised."""

    @jax.checkpoint
    def layer(h, _):
        q, k, v = (h @ params[name] for name in ("q", "k", "v"))
        h = h + jax.nn.softmax(q @ k.T) @ v
        return h + jax.nn.relu(h @ params["up"]) @ params["down"], None

    return (lax.scan(layer, x, None, length=12)[0] ** 2).sum()


def two_axes(w, x):
    """Rows over data, columns over model; the first product's sum is over model alone."""
    h = lax.psum(jnp.tanh(x @ w[: x.shape[1]]), "model")
    return ((h @ w) * (h @ jnp.sin(w))).sum()


def programs():
    """From each name to body, arguments and their specs."""
    square, rows = array(WIDTH, WIDTH), array(16, WIDTH)
    layer = {name: square for name in ("q", "k", "v", "up", "down")}
    yield "top_k of two products", top_k, (square, rows), (P(), P("data"))
    yield "RNN, 12 steps", rnn, (square, array(12, 16, WIDTH)), (P(), P(None, "data"))
    yield "12 scanned layers, remat", scanned_layers, (layer, rows), (P(), P("data"))
    yield "two axes", two_axes, (square, rows), (P(), P("data", "model"))
    if importlib.util.find_spec("equinox"):
        import equinox as eqx

        cell, static = eqx.partition(
            eqx.nn.GRUCell(WIDTH, WIDTH, key=jax.random.key(0)), eqx.is_array
        )

        def gru(cell, x):
            cell = eqx.combine(cell, static)
            h, _ = lax.scan(lambda h, row: (jax.vmap(cell)(row, h), None), x[0], x)
            return (h**2).sum()

        yield "equinox GRU, 12 steps", gru, (cell, array(12, 16, WIDTH)), (P(), P(None, "data"))
    if importlib.util.find_spec("flax"):
        import flax.linen as nn

        model = nn.RNN(nn.SimpleCell(WIDTH))
        variables = model.init(jax.random.key(0), jnp.zeros((1, 12, WIDTH)))

        def flax_rnn(variables, x):
            return (model.apply(variables, x) ** 2).sum()

        yield "flax RNN, 12 steps", flax_rnn, (variables, array(16, 12, WIDTH)), (P(), P("data"))


def summed_bytes(program):
    found = testing.account(program).by("kind").get(("all-reduce",))
    return found.bytes if found else 0


def gradient(body, mesh, specs, check):
    def local(*args):
        loss = body(*args)
        return lax.psum(shardrules.vary(loss, *mesh.axis_names), mesh.axis_names)

    f = jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=P(), check_vma=check)
    return jax.jit(jax.grad(f))


def lowered(body, mesh, args, specs, casts, check=True):
    with shardrules.install(casts=casts):
        jax.clear_caches()
        start = time.perf_counter()
        found = gradient(body, mesh, specs, check).lower(*args)
        return found, time.perf_counter() - start


class Solved:
    """Both solvers' answers for each graph that is cut inside."""

    def __enter__(self):
        self.found, self._solve = [], placing.cheapest

        def both(graph):
            labels = self._solve(graph)
            costs = (
                cost_as_traced(graph).bytes,
                cost(graph, labels).bytes,
                optimum.cheapest_bytes(graph),
            )
            self.found.append(costs)
            return labels

        placing.cheapest = both
        return self

    def __exit__(self, *exc_info):
        placing.cheapest = self._solve


def row(name, body, args, specs):
    mesh = Mesh(np.array(jax.devices()).reshape(4, 2), ("data", "model"))
    arms = {}
    for arm, casts, check in (
        ("off", "late", False),
        ("late", "late", True),
        ("cheapest", "cheapest", True),
    ):
        arms[arm] = summed_bytes(lowered(body, mesh, args, specs, casts, check)[0].compile())
    with Solved() as solved:
        lowered(body, mesh, args, specs, "cheapest")
    ratios = []
    for _ in range(5):
        late, cheap = (lowered(body, mesh, args, specs, c)[1] for c in ("late", "cheapest"))
        ratios.append(cheap / late)
    least, other = (sum(costs[i] for costs in solved.found) for i in (1, 2))
    print(
        f"| {name} | {arms['off']:,} | {arms['late']:,} | {arms['cheapest']:,} | "
        f"{least:,} / {other:,} | {statistics.median(ratios):.2f} |",
        flush=True,
    )


def random_bodies(count, seed):
    meshes = (
        ((8,), ("data",)),
        ((4, 2), ("data", "model")),
        ((2, 2, 2), ("data", "model", "expert")),
    )
    optimal, late_bytes, least_bytes, graphs = 0, 0, 0, 0
    for number in range(seed, seed + count):
        shape, axes = meshes[number % len(meshes)]
        body = bodies.Body(number, Mesh(np.array(jax.devices()).reshape(shape), axes))
        with Solved() as solved, shardrules.install(casts="cheapest"):
            jax.make_jaxpr(jax.grad(body.split(), argnums=(0, 1)))(*body.arguments())
        for late, least, other in solved.found:
            graphs += 1
            optimal += least == other
            late_bytes += late
            least_bytes += least
        if sys.stderr.isatty():
            print(f"\r{number - seed + 1} of {count}", end="", file=sys.stderr)
    print(
        f"{count} random bodies: the cut is the optimum in {optimal} of {graphs} programs; "
        f"{late_bytes:,} B where JAX casts, {least_bytes:,} B at the cut"
    )


def main(_):
    print(f"JAX {jax.__version__}\n")
    print(
        "| program | check off, B | late, B | cheapest, B | casts: cut / optimum, B | "
        "tracing, cheapest / late |\n|---|---:|---:|---:|---:|---:|"
    )
    for one in programs():
        row(*one)
    if _RANDOM.value:
        print()
        random_bodies(_RANDOM.value, _SEED.value)


if __name__ == "__main__":
    app.run(main)
