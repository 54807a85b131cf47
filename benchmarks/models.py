"""What the steps of real programs move, by where their casts stand, on meshes of twelve axes.

    python benchmarks/models.py [--platforms=cpu,tpu,gpu] [--only=NAME,...]

Seven steps as people write them, with kernels where real ones have kernels: a Megatron-style
residual stream, FSDP by hand, a mixture of experts by all_to_all and as a ring, attention over a
load-balanced context, a pipeline by ppermute, ZeRO-1 with a clip by the global norm. Each is
compiled with the check off, with the check on in plain JAX, where JAX casts (late), at the minimum
cut (cheapest), and by hand: each replicated input cast by shardrules.vary as the body begins, as a
careful user would. Bytes are those of all collectives of a compiled step, on one device: operands',
and on the wire. Function calls are those of tracing and lowering, 1 with the check off.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import dataclasses
import functools
import os
import pathlib
import sys
from collections.abc import Callable, Sequence
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")
if "host_platform_device_count" not in os.environ.get("XLA_FLAGS", ""):
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} " + (
        "--xla_force_host_platform_device_count=8"
    )
sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))

import jax
import jax.numpy as jnp
import numpy as np
import paired
from jax import lax
from jax.experimental import pallas as pl
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import shardrules
from shardrules import aot, testing

# The axes of real code's meshes; a model gives the sizes of those that are not 1.
AXES = (
    "replica data stage fsdp fsdp_transpose context context_autoregressive tensor "
    "tensor_transpose tensor_sequence expert autoregressive"
).split()
NAMES = {"cpu": "8 CPU devices", "tpu": "TPU v5e:2x4", "gpu": "8xH100"}
LAYERS, WIDTH, HIDDEN, ROWS = 4, 128, 512, 64
# From each arm to how casts are placed (None: plain JAX), whether the check is on, and whether the
# body casts its inputs itself.
ARMS: dict[str, tuple[str | None, bool, bool]] = {
    "off": ("late", False, False),
    "plain": (None, True, False),
    "late": ("late", True, False),
    "cheapest": ("cheapest", True, False),
    "by hand": ("late", True, True),
}


@dataclasses.dataclass(frozen=True)
class Model:
    """One step: ``body`` is what the shard_map runs, ``around`` makes the step of it."""

    name: str
    sizes: dict[str, int]  # of the mesh axes that are not 1
    body: Callable[..., Any]
    arguments: Sequence[Any]  # pytrees of arrays
    in_specs: Sequence[Any]
    out_specs: Any
    cast: frozenset[str]  # the axes over which ``by hand`` casts what is replicated over them
    around: Callable[[Callable[..., Any]], Callable[..., Any]]
    # How arguments and results are sharded outside, where it is not as in_specs say.
    outside: Sequence[Any] | None = None

    def mesh(self, devices: Sequence[Any]) -> Mesh:
        shape = [self.sizes.get(axis, 1) for axis in AXES]
        return Mesh(np.array(devices).reshape(shape), AXES)

    def step(self, mesh: Mesh, check: bool, by_hand: bool) -> Any:
        def body(*args: Any) -> Any:
            if by_hand:
                args = jax.tree.map(self._cast, args, tuple(self.in_specs))
            return self.body(*args)

        f = jax.shard_map(
            body,
            mesh=mesh,
            in_specs=tuple(self.in_specs),
            out_specs=self.out_specs,
            check_vma=check,
        )
        if self.outside is None:
            return jax.jit(self.around(f))
        shardings = tuple(NamedSharding(mesh, spec) for spec in self.outside)
        return jax.jit(self.around(f), out_shardings=shardings)

    def _cast(self, x: jax.Array, spec: P) -> jax.Array:
        named = {axis for part in spec for axis in (part if isinstance(part, tuple) else (part,))}
        axes = [axis for axis in AXES if axis in self.cast - named]
        floats = jnp.issubdtype(x.dtype, jnp.floating)
        return shardrules.vary(x, *axes) if axes and floats else x

    def shapes(self, mesh: Mesh) -> list[Any]:
        """Give the arguments as shapes with shardings, which absent devices can be given."""
        return [
            jax.tree.map(
                lambda x, s: jax.ShapeDtypeStruct(
                    x.shape, x.dtype, sharding=NamedSharding(mesh, s)
                ),
                argument,
                spec,
            )
            for argument, spec in zip(self.arguments, self.outside or self.in_specs)
        ]


def array(*shape: int) -> np.ndarray:
    return np.random.RandomState(sum(shape)).randn(*shape).astype(np.float32) / 10


def gradient(f: Callable[..., Any]) -> Callable[..., Any]:
    return jax.grad(lambda params, x: f(params, x).sum())


# -- kernels ---------------------------------------------------------------------------------------


def kernel(body: Callable[..., None], like: Any, *args: jax.Array) -> Any:
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), like)
    return pl.pallas_call(body, shapes, interpret=_INTERPRET[0])(*args)


_INTERPRET = [True]  # on CPU and GPU; TPU compiles the kernels


def interpret(kernels: bool) -> None:
    _INTERPRET[0] = kernels


def _norm(x: Any, scale: Any, out: Any) -> None:
    root = lax.rsqrt(jnp.mean(x[...] ** 2, -1, keepdims=True) + 1e-6)
    out[...] = x[...] * root * scale[...]


def _norm_bwd(x: Any, scale: Any, g: Any, dx: Any, dscale: Any) -> None:
    root = lax.rsqrt(jnp.mean(x[...] ** 2, -1, keepdims=True) + 1e-6)
    unit, scaled = x[...] * root, g[...] * scale[...]
    dx[...] = root * (scaled - unit * jnp.mean(scaled * unit, -1, keepdims=True))
    dscale[...] = jnp.sum(g[...] * unit, 0, keepdims=True)


@jax.custom_vjp
def norm(x: jax.Array, scale: jax.Array) -> jax.Array:
    return kernel(_norm, x, x, scale)


norm.defvjp(
    lambda x, scale: (norm(x, scale), (x, scale)),
    lambda saved, g: tuple(kernel(_norm_bwd, list(saved), *saved, g)),
)


def _mlp(x: Any, up: Any, down: Any, out: Any) -> None:
    hidden = jnp.tanh(jnp.dot(x[...], up[...]))
    out[...] = jnp.dot(hidden, down[...])


def _mlp_bwd(x: Any, up: Any, down: Any, g: Any, dx: Any, dup: Any, ddown: Any) -> None:
    hidden = jnp.tanh(jnp.dot(x[...], up[...]))
    dhidden = jnp.dot(g[...], down[...].T) * (1 - hidden**2)
    dx[...] = jnp.dot(dhidden, up[...].T)
    dup[...] = jnp.dot(x[...].T, dhidden)
    ddown[...] = jnp.dot(hidden.T, g[...])


@jax.custom_vjp
def mlp(x: jax.Array, up: jax.Array, down: jax.Array) -> jax.Array:
    return kernel(_mlp, x, x, up, down)


mlp.defvjp(
    lambda x, up, down: (mlp(x, up, down), (x, up, down)),
    lambda saved, g: tuple(kernel(_mlp_bwd, list(saved), *saved, g)),
)


# -- models ----------------------------------------------------------------------------------------


def megatron() -> Model:
    def body(params: Any, x: jax.Array) -> jax.Array:
        @jax.checkpoint
        def layer(h: jax.Array, own: Any) -> tuple[jax.Array, None]:
            part = mlp(norm(h, own["scale"]), own["up"], own["down"])
            return h + lax.psum(part, "tensor"), None

        h = lax.scan(layer, x, params["layers"])[0]
        return lax.psum((norm(h, params["last"]) ** 2).sum(), "data")

    layers = {
        "scale": 1 + array(LAYERS, 1, WIDTH),
        "up": array(LAYERS, WIDTH, HIDDEN),
        "down": array(LAYERS, HIDDEN, WIDTH),
    }
    specs = {"scale": P(), "up": P(None, None, "tensor"), "down": P(None, "tensor")}
    params = {"layers": layers, "last": 1 + array(1, WIDTH)}
    return Model(
        "Megatron with kernels",
        {"data": 2, "tensor": 4},
        body,
        (params, array(2 * ROWS, WIDTH)),
        ({"layers": specs, "last": P()}, P("data")),
        P(),
        frozenset({"data"}),
        gradient,
    )


def fsdp() -> Model:
    def body(params: Any, x: jax.Array) -> jax.Array:
        gather = functools.partial(lax.all_gather, axis_name="fsdp", tiled=True)

        @jax.checkpoint
        def layer(h: jax.Array, own: Any) -> tuple[jax.Array, None]:
            up, down = gather(own["up"]), gather(own["down"])
            return h + jnp.tanh((h * own["scale"]) @ up) @ down, None

        h = lax.scan(layer, x, params)[0]
        return lax.psum((h**2).sum(), ("data", "fsdp"))

    params = {
        "scale": 1 + array(LAYERS, 1, WIDTH),
        "up": array(LAYERS, WIDTH, HIDDEN),
        "down": array(LAYERS, HIDDEN, WIDTH),
    }
    return Model(
        "FSDP by hand",
        {"data": 2, "fsdp": 4},
        body,
        (params, array(8 * ROWS, WIDTH)),
        ({"scale": P(), "up": P(None, "fsdp"), "down": P(None, "fsdp")}, P(("data", "fsdp"))),
        P(),
        frozenset({"data", "fsdp"}),
        gradient,
    )


RANKS = 4  # devices along expert, context and stage
EXPERTS = 2 * RANKS


def _experts(rows: jax.Array, own: Any, sizes: jax.Array) -> jax.Array:
    """Run the grouped products of a device's experts on rows that are sorted by expert."""
    hidden = jax.nn.silu(lax.ragged_dot(rows, own["gate"], sizes))
    return lax.ragged_dot(hidden * lax.ragged_dot(rows, own["up"], sizes), own["down"], sizes)


def _of_experts(name: str, body: Callable[..., Any]) -> Model:
    params = {
        "scale": 1 + array(1, WIDTH),
        "router": array(WIDTH, EXPERTS),
        "gate": array(EXPERTS, WIDTH, HIDDEN),
        "up": array(EXPERTS, WIDTH, HIDDEN),
        "down": array(EXPERTS, HIDDEN, WIDTH),
    }
    by_expert = P("expert")
    specs = {"scale": P(), "router": P(), "gate": by_expert, "up": by_expert, "down": by_expert}
    return Model(
        name,
        {"data": 2, "expert": 4},
        body,
        (params, array(8 * ROWS, WIDTH)),
        (specs, P(("data", "expert"))),
        P(),
        frozenset({"data", "expert"}),
        gradient,
    )


def experts_all_to_all() -> Model:
    def body(params: Any, x: jax.Array) -> jax.Array:
        h = norm(x, params["scale"])
        gates, chosen = lax.top_k(jax.nn.softmax(h @ params["router"]), 1)
        # As many rows for each expert as there are: none is dropped.
        sent = jax.nn.one_hot(chosen[:, 0], EXPERTS, dtype=h.dtype).T[:, :, None] * h
        rows = lax.all_to_all(sent, "expert", 0, 0, tiled=True)
        rows = rows.reshape(RANKS, 2, *h.shape).swapaxes(0, 1)  # by expert, not by device
        own = {name: params[name] for name in ("gate", "up", "down")}
        flat = rows.reshape(-1, WIDTH)
        made = _experts(flat, own, jnp.full(2, len(flat) // 2, jnp.int32)).reshape(rows.shape)
        made = made.swapaxes(0, 1).reshape(sent.shape)
        back = lax.all_to_all(made, "expert", 0, 0, tiled=True).sum(0)
        return lax.psum(((x + back * gates) ** 2).sum(), ("data", "expert"))

    return _of_experts("experts by all_to_all", body)


def experts_ring() -> Model:
    def body(params: Any, x: jax.Array) -> jax.Array:
        here = lax.axis_index("expert")
        h = norm(x, params["scale"])
        gates, chosen = lax.top_k(jax.nn.softmax(h @ params["router"]), 1)
        own = {name: params[name] for name in ("gate", "up", "down")}
        ring = [(i, (i + 1) % RANKS) for i in range(RANKS)]

        def turn(carry: Any, _: None) -> tuple[Any, None]:
            rows, expert, made = carry
            local = jnp.where(expert // 2 == here, expert % 2, 2)[:, 0]  # 2: another device's
            order = jnp.argsort(local)
            sizes = (local[:, None] == jnp.arange(2)).sum(0, dtype=jnp.int32)
            made = made.at[order].add(_experts(rows[order], own, sizes))
            passed = (rows, expert, made)
            return jax.tree.map(lambda a: lax.ppermute(a, "expert", ring), passed), None

        start = h, chosen, jnp.zeros_like(h)
        made = lax.scan(turn, start, None, length=RANKS)[0][2]
        return lax.psum(((x + made * gates) ** 2).sum(), ("data", "expert"))

    return _of_experts("experts as a ring", body)


def _in_order(x: jax.Array) -> jax.Array:
    """Undo load balancing, in which device i of n holds the parts i and 2n - 1 - i."""
    batch, length, *rest = x.shape
    parts = x.reshape(batch, 2 * RANKS, length // (2 * RANKS), *rest)
    return jnp.concatenate([parts[:, 0::2], parts[:, 1::2][:, ::-1]], 1).reshape(x.shape)


def context() -> Model:
    heads, width = 4, 32

    def body(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        scores = jnp.einsum("bqhd,bkhd->bhqk", q, _in_order(k)) / width**0.5
        return jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores), _in_order(v))

    def around(f: Callable[..., Any]) -> Callable[..., Any]:
        return jax.grad(lambda q, k, v: (f(q, k, v) ** 2).sum(), argnums=(0, 1, 2))

    split = P("data", "context")
    return Model(
        "load-balanced context",
        {"data": 2, "context": 4},
        body,
        tuple(array(4, 512 + n, heads, width)[:, :512] for n in range(3)),
        (split, P("data"), P("data")),
        split,
        frozenset({"context"}),
        around,
        outside=(split,) * 3,
    )


def pipeline() -> Model:
    def body(params: Any, x: jax.Array) -> jax.Array:
        stage = lax.axis_index("stage")
        count = x.shape[0]  # of microbatches
        ring = [(i, (i + 1) % RANKS) for i in range(RANKS)]
        own = jax.tree.map(lambda p: p[0], params["stages"])

        def tick(carry: Any, time: jax.Array) -> tuple[Any, None]:
            h, total = carry
            fed = x[jnp.clip(time, 0, count - 1)] * params["scale"]
            h = jnp.where(stage == 0, fed, h)
            h = h + mlp(h, own["up"], own["down"])
            ends = (stage == RANKS - 1) & (time >= RANKS - 1)
            total = total + jnp.where(ends, ((h * params["last"]) ** 2).sum(), 0.0)
            return (lax.ppermute(h, "stage", ring), total), None

        times = jnp.arange(count + RANKS - 1)
        (_, total), _ = lax.scan(tick, (jnp.zeros_like(x[0]), jnp.zeros(())), times)
        return lax.psum(total, ("data", "stage"))

    params = {
        "stages": {"up": array(RANKS, WIDTH, HIDDEN), "down": array(RANKS, HIDDEN, WIDTH)},
        "scale": 1 + array(1, WIDTH),
        "last": 1 + array(1, WIDTH),
    }
    specs = {"stages": {"up": P("stage"), "down": P("stage")}, "scale": P(), "last": P()}
    return Model(
        "pipeline by ppermute",
        {"data": 2, "stage": 4},
        body,
        (params, array(4, 2 * ROWS, WIDTH)),
        (specs, P(None, "data")),
        P(),
        frozenset({"data", "stage"}),
        gradient,
    )


def zero() -> Model:
    """Return a step that takes its gradient inside of the shard_map and updates shards of it."""

    def loss(params: Any, x: jax.Array) -> jax.Array:
        h = jnp.tanh((x * params["scale"]) @ params["up"]) @ params["down"]
        return ((x + h) ** 2).mean()

    def body(params: Any, x: jax.Array) -> Any:
        # Each device's own gradient: with the check on, that of a replicated array is summed.
        own = jax.grad(loss)(shardrules.vary(params, "data"), x)
        split = functools.partial(lax.psum_scatter, axis_name="data", tiled=True)
        shards = jax.tree.map(lambda g: split(g.reshape(-1)) / 8, own)
        squares = sum((g**2).sum() for g in jax.tree.leaves(shards))
        clip = jnp.minimum(1.0, 1.0 / jnp.sqrt(lax.psum(squares, "data")))
        here = lax.axis_index("data")

        def update(p: jax.Array, g: jax.Array) -> jax.Array:
            flat = p.reshape(-1)
            mine = lax.dynamic_slice(flat, [here * g.size], [g.size]) - 0.1 * clip * g
            whole = lax.all_gather(mine, "data", tiled=True, to="invarying")
            return whole.reshape(p.shape)

        return jax.tree.map(update, params, shards)

    params = {
        "scale": 1 + array(1, WIDTH),
        "up": array(WIDTH, HIDDEN),
        "down": array(HIDDEN, WIDTH),
    }
    specs = jax.tree.map(lambda _: P(), params)
    return Model(
        "ZeRO-1 with a clip",
        {"data": 8},
        body,
        (params, array(8 * ROWS, WIDTH)),
        (specs, P("data")),
        specs,
        frozenset(),
        lambda f: f,
    )


MODELS = (megatron, fsdp, experts_all_to_all, experts_ring, context, pipeline, zero)


# -- figures ---------------------------------------------------------------------------------------


def devices_of(platform: str) -> Sequence[Any]:
    """Give eight devices, absent ones for TPU and GPU."""
    if platform == "cpu":
        return jax.devices()[:8]
    return aot.tpu("v5e:2x4") if platform == "tpu" else aot.gpu("h100", 8)


def lowered(model: Model, mesh: Mesh, arm: str) -> Any:
    """Trace and lower the step in one arm."""
    casts, check, by_hand = ARMS[arm]
    with shardrules.install(casts=casts) if casts else contextlib.nullcontext():
        return model.step(mesh, check, by_hand).lower(*model.shapes(mesh))


def calls(model: Model, mesh: Mesh, arm: str) -> int:
    """Count the function calls of tracing and lowering, with nothing traced before."""
    jax.clear_caches()

    def run(count: Callable[[], int]) -> int:
        before = count()
        lowered(model, mesh, arm)
        return count() - before

    return paired.calls(run)


def figures(program: Any) -> tuple[int, int, dict[str, int]]:
    """Return what a compiled step's collectives move, and how many verdicts of each kind it has."""
    account = testing.account(program)
    verdicts = collections.Counter(v.verdict for v in testing.judge(program).verdicts)
    return account.total.bytes, account.total.wire_bytes, dict(verdicts)


def main() -> None:
    # Not absl's flags: a test imports this module beside others, and flags have one name space.
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--platforms", default="cpu,tpu,gpu", help="what to compile for")
    parser.add_argument("--only", default="", help="names of models, with commas between")
    given = parser.parse_args()
    only = [name for name in given.only.split(",") if name]
    paired.print_stamp()
    paired.print_head(
        ["step", "compiled for", *(f"{arm}, B / on the wire" for arm in ARMS)]
        + ["verdicts, cheapest", "calls: late, cheapest / off"]
    )
    for make in MODELS:
        model = make()
        for platform in given.platforms.split(","):
            if only and model.name not in only:
                continue
            mesh = model.mesh(devices_of(platform))
            interpret(platform != "tpu")
            cells, verdicts = [], {}
            for arm in ARMS:
                try:
                    operands, wire, verdicts[arm] = figures(lowered(model, mesh, arm).compile())
                    cells.append(f"{operands:,} / {wire:,}")
                except Exception as error:  # plain JAX refuses some
                    cells.append(type(error).__name__)
            counts = verdicts.get("cheapest", {})
            said = ", ".join(f"{n} {kind}" for kind, n in sorted(counts.items()))
            traced = ""
            if platform == "cpu":
                off, late, cheapest = (calls(model, mesh, a) for a in ("off", "late", "cheapest"))
                traced = f"{late / off:.2f}, {cheapest / off:.2f}"
            paired.print_row([model.name, NAMES[platform], *cells, said, traced])


if __name__ == "__main__":
    main()
