"""Train a transformer of opaque kernels, with no all-reduce that it doesn't need.

    python examples/train_transformer.py [STEPS]

Flash attention, RMS norm and the grouped matmul of a mixture of experts are Pallas kernels. None
of them is declared: their own jaxprs prove what they depend on. Each runs in a shard_map of its
own, and the compiler partitions the rest. The mesh is (2 fsdp, 2 expert, 2 model). Weights are
sharded over fsdp and gathered layer by layer, heads and hidden features over model, experts over
expert, the batch over fsdp and expert. Layers are scanned and recomputed.

It trains on eight CPU devices three times: with shard_map's check off, with the check on and
casts where JAX puts them, and with casts where they cost the fewest bytes. The losses are equal;
the bytes that the gradients' all-reduces move are not. ``benchmarks/transformer.py`` compiles the
same step for TPUs and GPUs.
"""

import os

os.environ.setdefault("JAX_PLATFORMS", "cpu")
if "xla_force_host_platform_device_count" not in os.environ.get("XLA_FLAGS", ""):
    os.environ["XLA_FLAGS"] = (
        os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"
    ).strip()

import contextlib
import dataclasses
import functools
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import shardrules
from shardrules import report, testing

BATCH = ("fsdp", "expert")  # the mesh axes of the batch
ARMS = {
    "check off": (False, contextlib.nullcontext),
    "late casts": (True, functools.partial(shardrules.install, casts="late")),
    "cheapest casts": (True, shardrules.install),
}


@dataclasses.dataclass(frozen=True)
class Config:
    """The model's sizes, and how its kernels are compiled."""

    layers: int = 2
    width: int = 32
    heads: int = 4
    head_width: int = 8
    experts: int = 4
    hidden: int = 32
    vocabulary: int = 16
    length: int = 16
    batch: int = 8
    key_block: int = 8
    tile: int = 128  # of the grouped matmul
    dtype: str = "float32"
    options: tuple[tuple[str, Any], ...] = (("interpret", True),)  # pallas_call's

    @property
    def call(self):
        """pl.pallas_call with the options."""
        return functools.partial(pl.pallas_call, **dict(self.options))


# -- kernels --------------------------------------------------------------------------------------


def norm_kernel(x_ref, w_ref, y_ref):
    x = x_ref[...]
    y_ref[...] = x * lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + 1e-6) * w_ref[...]


def norm_bwd_kernel(x_ref, w_ref, g_ref, dx_ref, dw_ref):
    x, g = x_ref[...], g_ref[...]
    r = lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + 1e-6)
    gw = g * w_ref[...]
    dx_ref[...] = r * gw - x * r**3 * jnp.mean(gw * x, axis=-1, keepdims=True)
    dw_ref[...] = jnp.sum(g * x * r, axis=0, keepdims=True)


def make_rms_norm(config):
    """Return the norm of x, [rows, width], with the weights w, [1, width]."""

    def specs(x):
        rows = min(16, x.shape[0])
        block = pl.BlockSpec((rows, x.shape[1]), lambda i: (i, 0))
        return x.shape[0] // rows, block, pl.BlockSpec((1, x.shape[1]), lambda i: (0, 0))

    @jax.custom_vjp
    def rms_norm(x, w):
        count, rows, whole = specs(x)
        out = jax.ShapeDtypeStruct(x.shape, x.dtype)
        return config.call(norm_kernel, out, grid=(count,), in_specs=[rows, whole], out_specs=rows)(
            x, w
        )

    def bwd(saved, g):
        x, w = saved
        count, rows, whole = specs(x)
        dx, dw = config.call(
            norm_bwd_kernel,
            [
                jax.ShapeDtypeStruct(x.shape, x.dtype),
                jax.ShapeDtypeStruct((count, 1, x.shape[1]), x.dtype),
            ],
            grid=(count,),
            in_specs=[rows, whole, rows],
            out_specs=[rows, pl.BlockSpec((None, 1, x.shape[1]), lambda i: (i, 0, 0))],
        )(x, w, g)
        return dx, dw.sum(0)

    rms_norm.defvjp(lambda x, w: (rms_norm(x, w), (x, w)), bwd)
    return rms_norm


def _scores(q, k, first_key):
    """Scaled products of queries and keys, none for keys that come later."""
    s = jnp.dot(q, k.T) * q.shape[-1] ** -0.5
    row, column = (lax.broadcasted_iota(jnp.int32, s.shape, axis) for axis in (0, 1))
    return jnp.where(row >= column + first_key, s, -1e30)


def attention_kernel(q_ref, k_ref, v_ref, o_ref, lse_ref, *, block):
    q = q_ref[...]

    def step(i, carry):
        o, top, total = carry
        keys = pl.ds(i * block, block)
        s = _scores(q, k_ref[keys, :], i * block)
        new = jnp.maximum(top, s.max(axis=-1, keepdims=True))
        p = jnp.exp(s - new)
        scale = jnp.exp(top - new)
        return o * scale + jnp.dot(p, v_ref[keys, :]), new, total * scale + p.sum(-1, keepdims=True)

    start = jnp.zeros_like(q), jnp.full_like(q[:, :1], -1e30), jnp.zeros_like(q[:, :1])
    o, top, total = lax.fori_loop(0, k_ref.shape[0] // block, step, start)
    o_ref[...] = o / total
    lse_ref[...] = top + jnp.log(total)


def attention_bwd_kernel(q_ref, k_ref, v_ref, o_ref, lse_ref, g_ref, dq_ref, dk_ref, dv_ref):
    q, k, g = q_ref[...], k_ref[...], g_ref[...]
    p = jnp.exp(_scores(q, k, 0) - lse_ref[...])
    dv_ref[...] = jnp.dot(p.T, g)
    delta = jnp.sum(g * o_ref[...], axis=-1, keepdims=True)
    ds = p * (jnp.dot(g, v_ref[...].T) - delta) * q.shape[-1] ** -0.5
    dq_ref[...] = jnp.dot(ds, k)
    dk_ref[...] = jnp.dot(ds.T, q)


def make_attention(config):
    """Return causal attention of q, k, v, each [batch times heads, length, head width]."""

    def run(kernel, like, lse_count, *arrays):
        one = pl.BlockSpec((None, *like.shape[1:]), lambda i: (i, 0, 0))
        lse = pl.BlockSpec((None, like.shape[1], 1), lambda i: (i, 0, 0))
        outs = [one, lse] if lse_count else [one] * 3
        shapes = [
            jax.ShapeDtypeStruct(like.shape[:2] + (1,) if spec is lse else like.shape, like.dtype)
            for spec in outs
        ]
        ins = [lse if a.shape[-1] == 1 else one for a in arrays]
        return config.call(kernel, shapes, grid=like.shape[:1], in_specs=ins, out_specs=outs)(
            *arrays
        )

    def fwd(q, k, v):
        kernel = functools.partial(attention_kernel, block=min(config.key_block, k.shape[1]))
        o, lse = run(kernel, q, 1, q, k, v)
        return o, (q, k, v, o, lse)

    @jax.custom_vjp
    def attention(q, k, v):
        return fwd(q, k, v)[0]

    attention.defvjp(fwd, lambda saved, g: tuple(run(attention_bwd_kernel, g, 0, *saved, g)))
    return attention


def matmul_kernel(x_ref, w_ref, y_ref, *, tile):
    y = jnp.zeros_like(y_ref)
    for first in range(0, x_ref.shape[1], tile):
        part = slice(first, min(first + tile, x_ref.shape[1]))
        y += jnp.dot(x_ref[:, part], w_ref[part, :])
    y_ref[...] = y


def make_grouped_matmul(config):
    """Return the product of x, [groups, rows, in], and w, [groups, in, out], group by group."""

    def run(x, w):
        (groups, rows, _), columns = x.shape, w.shape[2]
        r, c = min(config.tile // 2, rows), min(config.tile, columns)
        return config.call(
            functools.partial(matmul_kernel, tile=config.tile),
            jax.ShapeDtypeStruct((groups, rows, columns), x.dtype),
            grid=(groups, rows // r, columns // c),
            in_specs=[
                pl.BlockSpec((None, r, x.shape[2]), lambda g, i, j: (g, i, 0)),
                pl.BlockSpec((None, x.shape[2], c), lambda g, i, j: (g, 0, j)),
            ],
            out_specs=pl.BlockSpec((None, r, c), lambda g, i, j: (g, i, j)),
        )(x, w)

    grouped_matmul = jax.custom_vjp(run)

    def bwd(saved, g):
        x, w = saved
        return run(g, w.swapaxes(1, 2)), run(x.swapaxes(1, 2), g)

    grouped_matmul.defvjp(lambda x, w: (run(x, w), (x, w)), bwd)
    return grouped_matmul


# -- the model ------------------------------------------------------------------------------------


def parameters(config):
    """Return (shape, spec) of each parameter; those of layers are stacked."""
    n, d, h = config.layers, config.width, config.heads * config.head_width
    e, f = config.experts, config.hidden
    return {
        "embedding": ((config.vocabulary, d), P()),
        "norm": ((1, d), P()),
        "layers": {
            "norm1": ((n, 1, d), P()),
            "norm2": ((n, 1, d), P()),
            "qkv": ((n, d, 3, h), P(None, "fsdp", None, "model")),
            "out": ((n, h, d), P(None, "model", "fsdp")),
            "router": ((n, d, e), P()),
            "up": ((n, e, d, f), P(None, "expert", "fsdp", "model")),
            "down": ((n, e, f, d), P(None, "expert", "model", "fsdp")),
        },
    }


def make_loss(config, mesh, check):
    """Return the mean loss of (parameters, tokens [batch, length], targets of the same shape)."""
    grouped_matmul = make_grouped_matmul(config)

    def sharded(function, in_specs, out_specs):
        return jax.shard_map(
            function, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=check
        )

    def by_batch(x):
        return lax.with_sharding_constraint(x, NamedSharding(mesh, P(BATCH)))

    norm = sharded(make_rms_norm(config), (P(BATCH), P()), P(BATCH))
    heads = P(None, (*BATCH, "model"))
    attention = sharded(lambda qkv: make_attention(config)(*qkv), (heads,), P(heads[1]))

    def attend(x, w):
        batch, length, _ = x.shape
        # Batch and heads become one axis, those of one device side by side.
        devices = mesh.shape["model"]
        shape = (3, batch, length, devices, -1, config.head_width)
        qkv = jnp.einsum("btd,dch->cbth", x, w["qkv"]).reshape(shape).transpose(0, 1, 3, 4, 2, 5)
        groups = mesh.shape["fsdp"] * mesh.shape["expert"]
        qkv = qkv.reshape(3, groups, batch // groups, devices, -1, length, config.head_width)
        qkv = qkv.swapaxes(2, 3)
        o = attention(qkv.reshape(3, -1, length, config.head_width))
        o = o.reshape(qkv.shape[1:]).swapaxes(1, 2).reshape(batch, -1, length, config.head_width)
        return by_batch(o.swapaxes(1, 2).reshape(batch, length, -1) @ w["out"])

    @functools.partial(
        sharded,
        in_specs=(P(BATCH), P(), P("expert", None, "model"), P("expert", "model", None)),
        out_specs=P(BATCH),
    )
    def experts(x, router, up, down):
        """Send each token to one expert, wherever it lives; each has room for twice its share."""
        room = 2 * x.shape[0] // config.experts
        gate = jax.nn.softmax(x @ router)
        chosen = jax.nn.one_hot(gate.argmax(-1), config.experts, dtype=x.dtype)
        place = (jnp.cumsum(chosen, axis=0) * chosen).sum(-1).astype(jnp.int32) - 1
        sent = chosen[:, :, None] * jax.nn.one_hot(place, room, dtype=x.dtype)[:, None, :]
        inbox = jnp.einsum("nec,nd->ecd", sent, x)  # [experts, room, width]
        inbox = lax.all_to_all(inbox, "expert", 0, 1, tiled=True)
        outbox = grouped_matmul(jax.nn.gelu(grouped_matmul(inbox, up)), down)
        outbox = lax.all_to_all(outbox, "expert", 1, 0, tiled=True)
        back = jnp.einsum("nec,ecd->nd", sent * gate.max(-1)[:, None, None], outbox)
        return lax.psum(back, "model")

    @jax.checkpoint
    def layer(x, w):
        flat = (-1, config.width)
        x = x + attend(norm(x.reshape(flat), w["norm1"]).reshape(x.shape), w)
        y = experts(norm(x.reshape(flat), w["norm2"]), w["router"], w["up"], w["down"])
        return by_batch(x + y.reshape(x.shape)), None

    def loss(weights, tokens, targets):
        x = by_batch(weights["embedding"][tokens])
        x, _ = lax.scan(layer, x, weights["layers"])
        x = norm(x.reshape(-1, config.width), weights["norm"]).reshape(x.shape)
        log_p = jax.nn.log_softmax(x @ weights["embedding"].T)
        return -jnp.take_along_axis(log_p, targets[..., None], -1).mean()

    return loss


def _is_leaf(value):
    return isinstance(value, tuple)


def make_step(config, mesh, check, rate=0.02):
    """Return a training step: from (parameters, tokens, targets) to new parameters and the loss."""
    loss = make_loss(config, mesh, check)

    def step(weights, tokens, targets):
        value, gradient = jax.value_and_grad(loss)(weights, tokens, targets)
        return jax.tree.map(lambda w, g: w - rate * g, weights, gradient), value

    return jax.jit(step, donate_argnums=0)


def shapes(config, mesh):
    """Return the step's arguments, as shapes with shardings."""
    weights = jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(
            leaf[0], config.dtype, sharding=NamedSharding(mesh, leaf[1])
        ),
        parameters(config),
        is_leaf=_is_leaf,
    )
    tokens = jax.ShapeDtypeStruct(
        (config.batch, config.length), jnp.int32, sharding=NamedSharding(mesh, P(BATCH))
    )
    return weights, tokens, tokens


# -- training -------------------------------------------------------------------------------------


def train(config, mesh, arm, steps):
    """Train from the same start on the same data; return the losses and the compiled step."""
    check, hooks = ARMS[arm]
    like, tokens_like, _ = shapes(config, mesh)
    leaves, tree = jax.tree.flatten(like)
    keys = jax.random.split(jax.random.key(0), len(leaves))
    weights = tree.unflatten(
        jax.device_put(
            jnp.ones(s.shape)
            if s.shape[-2] == 1  # a norm's weights
            else jax.random.normal(key, s.shape) * s.shape[-2] ** -0.5,
            s.sharding,
        )
        for key, s in zip(keys, leaves)
    )
    losses = []
    with hooks():
        step = make_step(config, mesh, check).lower(*shapes(config, mesh)).compile()
        for number in range(steps):
            key = jax.random.fold_in(jax.random.key(1), number)
            first = jax.random.randint(key, (config.batch, 1), 0, config.vocabulary)
            line = (first + 3 * np.arange(config.length + 1)) % config.vocabulary
            tokens, targets = (
                jax.device_put(part.astype(np.int32), tokens_like.sharding)
                for part in (line[:, :-1], line[:, 1:])
            )
            weights, loss = step(weights, tokens, targets)
            losses.append(float(loss))
    return losses, step


def moved(program):
    """Return the bytes that the backward pass's all-reduces sum on each device, and the verdicts.

    What the backward pass computes anew is part of it, in every arm the same.
    """
    account = testing.account(program)
    entries = [e for e in account.entries if e.kind == "all-reduce" and e.phase != "forward"]
    counts = {e.verdict: 0 for e in entries}
    for e in entries:
        counts[e.verdict] += 1
    return sum(e.bytes * (e.runs or 1) for e in entries), counts


def main(steps):
    # In float64: sums in another order would sooner or later make a router choose another expert.
    jax.config.update("jax_enable_x64", True)
    config = Config(dtype="float64")
    mesh = Mesh(np.array(jax.devices()).reshape(2, 2, 2), ("fsdp", "expert", "model"))
    rows = [["arm", "first loss", "last loss", "all-reduced in the gradient", "verdicts"]]
    losses = {}
    for arm in ARMS:
        losses[arm], step = train(config, mesh, arm, steps)
        total, counts = moved(step)
        said = ", ".join(f"{count} {verdict}" for verdict, count in sorted(counts.items()))
        rows.append([arm, f"{losses[arm][0]:.4f}", f"{losses[arm][-1]:.4f}", f"{total} B", said])
    print(report.table(rows))
    for arm in ARMS:
        np.testing.assert_allclose(losses[arm], losses["check off"], rtol=1e-6)
    print(f"\nThe losses of {steps} steps are the same in every arm.")


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 50)
