"""Print what a gradient's all-reduces move, by where its casts stand.

    python benchmarks/casts.py [--random=500] [--seed=0] [--kernels]

For each program, on eight CPU devices: the bytes that the gradient's all-reduces sum on each
device in one step, and below them those that a device sends, under `check_vma=False`, with the
check on in plain JAX, with the check on where JAX casts (late), and at the minimum cut (cheapest);
the optimum by an integer program (scipy's HiGHS) over the same graph, all mesh axes at once, of
what the casts alone sum; how much longer tracing and lowering take with casts placed, and how the
length of the compiled text changes. Each gradient is compared with the late one's.

With --random, that many random bodies (tests/hooks/autodiff/bodies.py): the same, of the lowered
programs, their gradients executed and compared with one device's; what is above the optimum, the
late casts or the check off is named. With --kernels, the kernel cases of tests/kernels that have a
gradient, traced for their accelerators and not compiled. Libraries that are not installed are left
out.
"""

from __future__ import annotations

import collections
import contextlib
import functools
import importlib.util
import os
import pathlib
import statistics
import sys
import time
from unittest import mock

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
from shardrules.hooks.autodiff import linear, placing  # noqa: E402
from shardrules.hooks.autodiff.cheapest import cost, cost_as_traced  # noqa: E402

_RANDOM = flags.DEFINE_integer("random", 0, "random bodies to trace", lower_bound=0)
_KERNELS = flags.DEFINE_bool("kernels", False, "trace the kernel cases")
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


def summed(lowered, level="logical"):
    """Bytes of all all-reduces in one execution: operands', and on the wire."""
    found = testing.account(lowered, level=level).by("kind").get(("all-reduce",))
    return (found.bytes, found.wire_bytes) if found else (0, 0)


def gradient(body, mesh, specs, check):
    def local(*args):
        loss = body(*args)
        return lax.psum(shardrules.vary(loss, *mesh.axis_names), mesh.axis_names)

    f = jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=P(), check_vma=check)
    return jax.jit(jax.grad(f))


def lowered(function, args, casts):
    """Trace and lower with casts placed as told; with none of it, for None."""
    with shardrules.install(casts=casts) if casts else contextlib.nullcontext():
        jax.clear_caches()
        start = time.process_time()
        found = function().lower(*args)
        return found, time.process_time() - start


class Solved:
    """Both solvers' answers for each graph that is cut inside."""

    def __enter__(self):
        self.found, self._solve = [], placing.cheapest

        def both(graph):
            labels = self._solve(graph)
            costs = cost_as_traced(graph), cost(graph, labels), optimum.cheapest_bytes(graph)
            self.found.append(costs)
            return labels

        placing.cheapest = both
        return self

    def __exit__(self, *exc_info):
        placing.cheapest = self._solve

    @property
    def least_bytes(self):
        """At our cut, and of the other solver."""
        return sum(one[1].bytes for one in self.found), sum(one[2] for one in self.found)


ARMS = {"off": ("late", False), "plain": (None, True), "late": ("late", True)}
ARMS["cheapest"] = ("cheapest", True)


def within(mine, theirs):
    return all(a <= b for a, b in zip(mine, theirs))


def close(got, want, tolerance=1e-3):
    for one, other in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        one, other = np.asarray(one, np.float64), np.asarray(other, np.float64)
        np.testing.assert_allclose(one, other, atol=tolerance * (1e-6 + np.abs(other).max()))


def row(name, body, args, specs):
    mesh = Mesh(np.array(jax.devices()).reshape(4, 2), ("data", "model"))
    programs, cells = {}, []
    for arm, (casts, check) in ARMS.items():
        make = functools.partial(gradient, body, mesh, specs, check)
        try:
            programs[arm] = lowered(make, args, casts)[0].compile()
        except Exception as error:  # plain JAX refuses some
            cells.append(type(error).__name__)
            continue
        operands, wire = summed(programs[arm], "compiled")
        cells.append(f"{operands:,} / {wire:,}")
    close(programs["cheapest"](*args), programs["late"](*args))
    make = functools.partial(gradient, body, mesh, specs, True)
    with Solved() as solved:
        lowered(make, args, "cheapest")
    ratios = []
    for _ in range(5):
        late, cheap = (lowered(make, args, c)[1] for c in ("late", "cheapest"))
        ratios.append(cheap / late)
    text = len(programs["cheapest"].as_text()) / len(programs["late"].as_text())
    least, other = solved.least_bytes
    print(
        f"| {name} | {' | '.join(cells)} | {least:,} / {other:,} | "
        f"{statistics.median(ratios):.2f} | {text:.2f} |",
        flush=True,
    )


MESHES = (((8,), ("data",)), ((4, 2), ("data", "model")), ((2, 2, 2), ("data", "model", "expert")))


def random_bodies(count, seed):
    """Print sums by the number of mesh axes, and each body that is above what it should be."""
    totals = collections.defaultdict(collections.Counter)
    for number in range(seed, seed + count):
        shape, axes = MESHES[number % len(MESHES)]
        body = bodies.Body(number, Mesh(np.array(jax.devices()).reshape(shape), axes))
        args, found = body.arguments(), {}
        total = totals[len(axes)]
        total["bodies"] += 1
        for arm, (casts, check) in ARMS.items():
            make = lambda check=check: jax.jit(jax.grad(body.split(check), argnums=(0, 1)))  # noqa: E731, B023
            try:
                with Solved() as solved:
                    program = lowered(make, args, casts)[0]
            except Exception:
                if arm == "cheapest":
                    raise
                total[f"{arm} refused"] += 1
                continue
            found[arm] = summed(program)
            total[f"{arm} bytes"] += found[arm][0]
            total[f"{arm} wire bytes"] += found[arm][1]
        want = jax.jit(jax.grad(body.whole(), argnums=(0, 1)))(*args)
        with shardrules.install(casts="cheapest"):
            got = program.compile()(*args)
        strange = []
        try:
            close(got, want, 5e-3)
        except AssertionError:
            strange.append("another gradient than one device's")
        least, other = solved.least_bytes
        if least != other:
            strange.append(f"{least} B, and {other} B is the optimum")
        above = [arm for arm in ("off", "late") if not within(found["cheapest"], found[arm])]
        if above:
            # Nothing is summed after a narrowing that the late cast has behind it.
            with mock.patch.object(linear.Graph, "_narrower", lambda *_, **__: []):
                anywhere = summed(lowered(make, args, "cheapest")[0])
            if all(within(anywhere, found[arm]) for arm in above):
                total["above the check off for precision"] += 1
            else:
                strange += [f"{found['cheapest']} B for {found[arm]} {arm}" for arm in above]
        for one in strange:
            print(f"seed {number}: {one}", flush=True)
        total["as they should be"] += not strange
        if sys.stderr.isatty():
            print(f"\r{number - seed + 1} of {count}", end="", file=sys.stderr)
    for axes, total in sorted(totals.items()):
        print(f"{axes} mesh axes: " + ", ".join(f"{k} {v:,}" for k, v in total.items()))


def kernels():
    """Print a row for each kernel case with a gradient."""
    from kernels import build, cases

    print("\n| case | check off, B | plain, B | late, B | cheapest, B | casts: cut / optimum, B |")
    print("|---|---:|---:|---:|---:|---:|")
    totals = collections.Counter()
    for case in cases.ALL:
        if case.diff is None:
            totals["without a gradient"] += 1
            continue
        cells, found = [], {}
        for arm, (casts, check) in ARMS.items():
            with contextlib.ExitStack() as stack:
                if casts:
                    stack.enter_context(shardrules.rules(case.lines()))
                made = functools.partial(build.build, case, check_vma=check)
                try:
                    with Solved() as solved:
                        program, _ = lowered(lambda: made()[0], made()[1], casts)  # noqa: B023
                    found[arm] = summed(program)
                    cells.append("{:,} / {:,}".format(*found[arm]))
                    totals[f"{arm} bytes"] += found[arm][0]
                except Exception as error:
                    cells.append(type(error).__name__)
                    totals[f"{arm} refused"] += 1
        least, other = solved.least_bytes
        strange = [
            arm
            for arm in ("off", "late")
            if "cheapest" in found and arm in found and not within(found["cheapest"], found[arm])
        ]
        note = f" more than {' and '.join(strange)}" if strange else ""
        note += " not the optimum" if least != other else ""
        print(f"| {case.name} | {' | '.join(cells)} | {least:,} / {other:,}{note} |", flush=True)
    print("\n" + ", ".join(f"{k} {v:,}" for k, v in totals.items()))


def main(_):
    print(f"JAX {jax.__version__}\n")
    if _RANDOM.value:
        random_bodies(_RANDOM.value, _SEED.value)
        return
    if _KERNELS.value:
        kernels()
        return
    print(
        "| program | check off, B / on the wire | plain | late | cheapest | "
        "casts: cut / optimum, B | tracing, cheapest / late | text |\n"
        "|---|---:|---:|---:|---:|---:|---:|---:|"
    )
    for one in programs():
        row(*one)


if __name__ == "__main__":
    app.run(main)
