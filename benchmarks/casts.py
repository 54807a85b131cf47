"""Print what a gradient's all-reduces move, by where its casts stand.

    python benchmarks/casts.py [--random=500 [--processes=2]] [--seed=0] [--kernels]
    python benchmarks/casts.py --raw --random=25 --seed=75 > 75.json  # a part of the 500
    python benchmarks/casts.py *.json

For each program, on eight CPU devices: the bytes that the gradient's all-reduces sum on each
device in one step, and below them those that a device sends, under `check_vma=False`, with the
check on in plain JAX, with the check on where JAX casts (late), and at the minimum cut (cheapest);
what the casts alone sum at that cut, and at the optimum by two solvers over the same graph: an
integer program (scipy's HiGHS) over all mesh axes at once, and, where anything is cast over one
axis only, networkx' minimum cut; how much longer tracing and lowering take with casts placed, and
how the length of the compiled text changes. Each gradient is compared with the late one's.

With --random, that many random bodies (tests/hooks/casts/bodies.py): the same, of the lowered
programs, their gradients executed and compared with one device's; what is above the optimum, the
late casts or the check off is named; --raw writes the sums, and the files that hold them make one
table. With --kernels, the kernel cases of tests/kernels that have a
gradient, traced for their accelerators and not compiled. Libraries that are not installed are left
out.
"""

from __future__ import annotations

import collections
import contextlib
import functools
import importlib.util
import itertools
import json
import os
import pathlib
import subprocess
import sys
import time
from unittest import mock

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"
if any(one.startswith("--random") for one in sys.argv):  # compiled to be executed once
    os.environ["XLA_FLAGS"] += " --xla_backend_optimization_level=0"
ROOT = pathlib.Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]


import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402
import paired  # noqa: E402
from absl import app, flags  # noqa: E402
from hooks.casts import bodies, optimum  # noqa: E402
from jax import lax  # noqa: E402
from jax.sharding import Mesh  # noqa: E402
from jax.sharding import PartitionSpec as P  # noqa: E402

import shardrules  # noqa: E402
from shardrules import testing  # noqa: E402
from shardrules.hooks.casts import linear, placing  # noqa: E402
from shardrules.hooks.casts.cheapest import cost, cost_as_traced  # noqa: E402

_RANDOM = flags.DEFINE_integer("random", 0, "random bodies to trace", lower_bound=0)
_KERNELS = flags.DEFINE_bool("kernels", False, "trace the kernel cases")
_SEED = flags.DEFINE_integer("seed", 0, "of the first of them")
_PROCESSES = flags.DEFINE_integer("processes", 1, "that trace random bodies", lower_bound=1)
_RAW = flags.DEFINE_bool("raw", False, "print the random bodies' sums as JSON, for another process")

WIDTH = 64
PLACED = ("late", "cheapest")


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


def experts(params, x):
    """A step of a mixture of experts: each row to two of four, by grouped products over blocks.

    Rows are split over data, the experts' hidden width over model.
    """
    x = jnp.tanh(x @ params["before"])
    gates, chosen = lax.top_k(jax.nn.softmax(x @ params["router"]), 2)
    order = jnp.argsort(chosen.reshape(-1))
    sizes = (chosen.reshape(-1, 1) == jnp.arange(4)).sum(0)
    rows = jnp.repeat(x, 2, axis=0)[order]
    h = jax.nn.silu(lax.ragged_dot(rows, params["gate"], sizes))
    h = h * lax.ragged_dot(rows, params["up"], sizes)
    out = lax.psum(lax.ragged_dot(h, params["down"], sizes), "model")
    out = jnp.zeros_like(out).at[order].set(out).reshape(*gates.shape, -1)
    return ((x + (out * gates[..., None]).sum(1)) ** 2).sum()


def block(dense, norm, h):
    """A transformer's layer: attention over the rows, and a feed-forward half."""
    y = norm[0](h)
    q, k, v = (dense[i](y) for i in range(3))
    h = h + dense[3](jax.nn.softmax(q @ k.T / WIDTH**0.5) @ v)
    return h + dense[5](jax.nn.relu(dense[4](norm[1](h))))


def two_axes(w, x):
    """Rows over data, columns over model; the first product's sum is over model alone."""
    h = lax.psum(jnp.tanh(x @ w[: x.shape[1]]), "model")
    return ((h @ w) * (h @ jnp.sin(w))).sum()


def programs():
    """From each name to body, arguments and their specs."""
    square, rows = array(WIDTH, WIDTH), array(16, WIDTH)
    layer = dict.fromkeys(("q", "k", "v", "up", "down"), square)
    yield "top_k of two products", top_k, (square, rows), (P(), P("data"))
    yield "RNN, 12 steps", rnn, (square, array(12, 16, WIDTH)), (P(), P(None, "data"))
    yield "12 scanned layers, remat", scanned_layers, (layer, rows), (P(), P("data"))
    mlp = array(4, WIDTH, 2 * WIDTH)
    params = {
        "before": square,
        "router": array(WIDTH, 4),
        "gate": mlp,
        "up": mlp,
        "down": array(4, 2 * WIDTH, WIDTH),
    }
    columns = P(None, None, "model")
    specs = {"before": P(), "router": P(), "gate": columns, "up": columns, "down": P(None, "model")}
    yield "mixture of experts", experts, (params, array(256, WIDTH)), (specs, P("data"))
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

        def equinox_layer(key):
            keys = jax.random.split(key, 6)
            return [eqx.nn.Linear(WIDTH, WIDTH, key=k) for k in keys], [eqx.nn.LayerNorm(WIDTH)] * 2

        layers, rest = eqx.partition(
            eqx.filter_vmap(equinox_layer)(jax.random.split(jax.random.key(0), 12)), eqx.is_array
        )

        def equinox_layers(layers, x):
            def step(h, layer):
                dense, norm = eqx.combine(layer, rest)
                return block([jax.vmap(f) for f in dense], [jax.vmap(f) for f in norm], h), None

            return (lax.scan(jax.checkpoint(step), x, layers)[0] ** 2).sum()

        yield "equinox, 12 scanned layers, remat", equinox_layers, (layers, rows), (P(), P("data"))
    if importlib.util.find_spec("flax"):
        import flax.linen as nn

        model = nn.RNN(nn.SimpleCell(WIDTH))
        variables = model.init(jax.random.key(0), jnp.zeros((1, 12, WIDTH)))

        def flax_rnn(variables, x):
            return (model.apply(variables, x) ** 2).sum()

        yield "flax RNN, 12 steps", flax_rnn, (variables, array(16, 12, WIDTH)), (P(), P("data"))

        class Layer(nn.Module):
            @nn.compact
            def __call__(self, h, _):
                dense, norm = [nn.Dense(WIDTH) for _ in range(6)], [nn.LayerNorm() for _ in "ab"]
                return block(dense, norm, h), None

        for name, axes in (("", {"params": 0}), (" that share weights", {})):
            shared = "params" if not axes else False
            layers = nn.scan(
                nn.remat(Layer, prevent_cse=False),
                variable_axes=axes,
                variable_broadcast=shared,
                split_rngs={"params": not shared},
                length=12,
            )()
            variables = layers.init(jax.random.key(0), rows, None)

            def flax_layers(variables, x, layers=layers):
                return (layers.apply(variables, x, None)[0] ** 2).sum()

            title = f"flax, 12 scanned layers{name}, remat"
            yield title, flax_layers, (variables, rows), (P(), P("data"))


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


def lowered(function, args, casts, fresh=True):
    """Trace and lower with casts placed as told; with none of it, for None."""
    with shardrules.install(casts=casts) if casts else contextlib.nullcontext():
        if fresh:
            jax.clear_caches()
        start = time.process_time()
        found = function().lower(*args)
        return found, time.process_time() - start


class Solved:
    """Both solvers' answers for each graph that is cut inside."""

    def __enter__(self):
        self.found, self._solve = [], placing.cheapest

        def both(limits):
            labels, graph = self._solve(limits), limits.graph
            best = optimum.cheapest_bytes(graph), optimum.cut_bytes(graph)
            self.found.append((cost_as_traced(graph), cost(graph, labels), best))
            return labels

        placing.cheapest = both
        return self

    def __exit__(self, *exc_info):
        placing.cheapest = self._solve

    @property
    def least_bytes(self):
        """At our cut, by HiGHS, and by networkx, None where casts are over several axes."""
        ours, whole, cuts = 0, 0, [0]
        for _, mine, (best, cut) in self.found:
            ours, whole = ours + mine.bytes, whole + best
            cuts.append(cut)
        return ours, whole, None if None in cuts else sum(cuts)

    @property
    def is_least(self):
        ours, whole, cut = self.least_bytes
        return ours == whole and cut in (None, whole)

    def __str__(self):
        return " / ".join("" if one is None else f"{one:,}" for one in self.least_bytes)


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
    took = paired.rounds(
        {one: functools.partial(lambda c: lowered(make, args, c)[1], one) for one in PLACED}, 7
    )
    tracing = paired.shown(paired.ratio(took["cheapest"], took["late"]))
    text = len(programs["cheapest"].as_text()) / len(programs["late"].as_text())
    print(f"| {name} | {' | '.join(cells)} | {solved} | {tracing} | {text:.2f} |", flush=True)


MESHES = (((8,), ("data",)), ((4, 2), ("data", "model")), ((2, 2, 2), ("data", "model", "expert")))


def random_bodies(count, seed):
    """Return sums by the number of mesh axes; name each body that is above what it should be."""
    totals = collections.defaultdict(collections.Counter)
    for number in range(seed, seed + count):
        shape, axes = MESHES[number % len(MESHES)]
        body = bodies.Body(number, Mesh(np.array(jax.devices()).reshape(shape), axes))
        args, found = body.arguments(), {}
        total = totals[len(axes)]
        total["bodies"] += 1
        for arm, (casts, check) in ARMS.items():
            make = lambda check=check: jax.jit(jax.grad(body.split(check), argnums=(0, 1)))  # noqa: E731
            try:
                with Solved() if arm == "cheapest" else contextlib.nullcontext() as solved:
                    program = lowered(make, args, casts, fresh=False)[0]
            except Exception:
                if arm == "cheapest":
                    raise
                total[f"{arm} refused"] += 1
                continue
            found[arm] = summed(program)
            total[f"{arm} bytes"] += found[arm][0]
            total[f"{arm} wire bytes"] += found[arm][1]
        want = jax.jit(jax.grad(body.whole(), argnums=(0, 1)))(*args)
        got = program.compile()(*args)
        strange = []
        try:
            close(got, want)
        except AssertionError:
            strange.append("another gradient than one device's")
        total["at networkx' optimum"] += solved.least_bytes[2] == solved.least_bytes[0]
        total["at HiGHS' optimum"] += solved.least_bytes[1] == solved.least_bytes[0]
        if not solved.is_least:
            strange.append(f"{solved} B: the casts' sum, the optimum by HiGHS, and by networkx")
        above = [arm for arm in ("off", "late") if not within(found["cheapest"], found[arm])]
        if above:
            # Nothing is summed after a narrowing that the late cast has behind it.
            with mock.patch.object(linear.Graph, "narrower", lambda *_, **__: []):  # noqa: PT008
                anywhere = summed(lowered(make, args, "cheapest", fresh=False)[0])
            if above == ["off"] and within(anywhere, found["off"]):
                total["above off for precision"] += 1
            else:
                strange += [f"{found['cheapest']} B for {found[arm]} {arm}" for arm in above]
        for one in strange:
            print(f"seed {number}: {one}", file=sys.stderr if _RAW.value else None, flush=True)
        total["as they should be"] += not strange
        if sys.stderr.isatty():
            print(f"\r{number - seed + 1} of {count}", end="", file=sys.stderr)
    return totals


def shared_out(count, seed):
    """Return the sums of random bodies that several processes trace, each its part."""
    parts = min(_PROCESSES.value, count)
    ends = [seed + count * part // parts for part in range(parts + 1)]
    processes = [
        subprocess.Popen(
            [sys.executable, __file__, "--raw", f"--random={end - start}", f"--seed={start}"],
            stdout=subprocess.PIPE,
            text=True,
        )
        for start, end in itertools.pairwise(ends)
    ]
    texts = [process.communicate()[0] for process in processes]
    for process in processes:
        if process.returncode:
            raise SystemExit(process.returncode)
    return added(texts)


def added(texts):
    """Return the sums of several parts, each as JSON."""
    totals = collections.defaultdict(collections.Counter)
    for text in texts:
        for axes, total in json.loads(text).items():
            totals[int(axes)] += collections.Counter(total)
    return totals


def tabulate(totals):
    """Print the random bodies' sums."""
    counts = (
        "as they should be",
        "at HiGHS' optimum",
        "at networkx' optimum",
        "above off for precision",
        "plain refused",
    )
    print(
        f"| mesh axes | bodies | {' | '.join(f'{arm}, B / on the wire' for arm in ARMS)} | "
        f"{' | '.join(counts)} |"
    )
    print("|---:" * (2 + len(ARMS) + len(counts)) + "|")
    for axes, total in sorted(totals.items()):
        moved = [f"{total[f'{arm} bytes']:,} / {total[f'{arm} wire bytes']:,}" for arm in ARMS]
        numbers = [str(total[one]) for one in counts]
        print(f"| {axes} | {total['bodies']} | {' | '.join(moved + numbers)} |")


def kernels():
    """Print a row for each kernel case with a gradient."""
    from kernels import build, cases

    print(
        "\n| case | check off, B / on the wire | plain | late | cheapest | "
        "casts: cut / HiGHS / networkx, B |"
    )
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
                        program, _ = lowered(lambda: made()[0], made()[1], casts)
                    found[arm] = summed(program)
                    cells.append("{:,} / {:,}".format(*found[arm]))
                    totals[f"{arm} bytes"] += found[arm][0]
                    totals[f"{arm} wire bytes"] += found[arm][1]
                except Exception as error:
                    cells.append(type(error).__name__)
                    totals[f"{arm} refused"] += 1
        strange = [
            arm
            for arm in ("off", "late")
            if "cheapest" in found and arm in found and not within(found["cheapest"], found[arm])
        ]
        note = f" more than {' and '.join(strange)}" if strange else ""
        note += "" if solved.is_least else " not the optimum"
        print(f"| {case.name} | {' | '.join(cells)} | {solved}{note} |", flush=True)
    print("\n" + ", ".join(f"{k} {v:,}" for k, v in totals.items()))


def main(arguments):
    if _RAW.value:
        print(json.dumps(random_bodies(_RANDOM.value, _SEED.value)))
        return
    paired.print_stamp()
    print()
    if arguments[1:]:
        tabulate(added(pathlib.Path(name).read_text() for name in arguments[1:]))
        return
    if _RANDOM.value:
        several = shared_out if _PROCESSES.value > 1 else random_bodies
        tabulate(several(_RANDOM.value, _SEED.value))
        return
    if _KERNELS.value:
        kernels()
        return
    print(
        "| program | check off, B / on the wire | plain | late | cheapest | "
        "casts: cut / HiGHS / networkx, B | tracing, cheapest / late | text |\n"
        "|---|---:|---:|---:|---:|---:|---:|---:|"
    )
    for one in programs():
        row(*one)


if __name__ == "__main__":
    app.run(main)
