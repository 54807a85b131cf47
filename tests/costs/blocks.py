"""A decoder in MaxText's manner: jit with shardings, shard_maps for attention and for the experts.

Layers are scanned along the weights' second dimension and recomputed. Weights are stored in f32,
sharded over fsdp and tensor, and read in a narrower type. Keys and values are gathered over
context. Each token goes to its top experts, by a grouped matmul with a custom_vjp.
"""

import dataclasses

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

BATCH = ("fsdp", "expert")


@dataclasses.dataclass(frozen=True)
class Config:
    """Sizes, which of MaxText's forms are taken, and the kinds of hints that are followed."""

    layers: int = 4
    width: int = 128
    heads: int = 8
    groups: int = 4  # of heads that share keys and values
    head_width: int = 32
    experts: int = 8
    top: int = 2
    hidden: int = 128
    vocabulary: int = 256
    length: int = 64
    batch: int = 8
    dtype: str = "bfloat16"
    sparse: bool = True  # a grouped matmul in a shard_map; else dense dispatch by einsum
    followed: frozenset[str] = frozenset()


@jax.custom_vjp
def grouped(rows, weights, sizes):
    """A grouped matmul: each group of rows by the matrix of its expert."""
    return lax.ragged_dot(rows, weights, sizes)


def _grouped_bwd(kept, g):
    rows, weights, sizes = kept
    ends = jnp.cumsum(sizes)
    groups = (jnp.arange(rows.shape[0])[:, None] >= ends[None]).sum(1)
    member = (groups[:, None] == jnp.arange(weights.shape[0])).astype(rows.dtype)
    back = lax.ragged_dot(g, weights.swapaxes(1, 2), sizes)
    return back, jnp.einsum("te,tk,tn->ekn", member, rows, g), None


grouped.defvjp(lambda *args: (grouped(*args), args), _grouped_bwd)


def parameters(c):
    """Return (shape, spec) of each parameter; those of layers are stacked along dimension 1."""
    n, d, h, k = c.layers, c.width, c.heads, c.head_width
    return {
        "embedding": ((c.vocabulary, d), P("tensor", "fsdp")),
        "norm": ((d,), P()),
        "logits": ((d, c.vocabulary), P("fsdp", "tensor")),
        "layers": {
            "norm1": ((d, n), P()),
            "norm2": ((d, n), P()),
            "q": ((d, n, h, k), P("fsdp", None, "tensor")),
            "k": ((d, n, c.groups, k), P("fsdp", None, "tensor")),
            "v": ((d, n, c.groups, k), P("fsdp", None, "tensor")),
            "out": ((h, n, k, d), P("tensor", None, None, "fsdp")),
            "router": ((d, n, c.experts), P("fsdp")),
            "gate": ((c.experts, n, d, c.hidden), P("expert", None, "fsdp", "tensor")),
            "up": ((c.experts, n, d, c.hidden), P("expert", None, "fsdp", "tensor")),
            "down": ((c.experts, n, c.hidden, d), P("expert", None, "tensor", "fsdp")),
        },
    }


def rms_norm(x, w):
    wide = x.astype(jnp.float32)
    return (wide * lax.rsqrt((wide**2).mean(-1, keepdims=True) + 1e-6) * w).astype(x.dtype)


def rotated(x, positions):
    """Rotary embeddings."""
    angles = positions[..., None] * 10000.0 ** -jnp.linspace(0, 1, x.shape[-1] // 2)
    sin, cos = (f(angles)[..., None, :].astype(x.dtype) for f in (jnp.sin, jnp.cos))
    one, other = jnp.split(x, 2, -1)
    return jnp.concatenate([one * cos - other * sin, other * cos + one * sin], -1)


def make_loss(c, mesh):
    """Return the mean loss of (parameters, tokens, targets), and the experts' load by layer."""
    dtype = jnp.dtype(c.dtype)

    def constrained(x, *spec):
        return lax.with_sharding_constraint(x, NamedSharding(mesh, P(*spec)))

    def mapped(body, in_specs, out_specs):
        return jax.shard_map(
            body, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False
        )

    def gather(x, name, axis):
        return checkpoint_name(lax.all_gather(x, name, axis=axis, tiled=True), "gathered")

    def attend(q, k, v, positions, places):
        k, v = (gather(one, "context", 1) for one in (k, v))
        if "repeated" not in c.followed:
            places = gather(places, "context", 1)
        q = q.reshape(*q.shape[:2], k.shape[2], -1, c.head_width)
        scores = jnp.einsum("btghd,bsgd->bghts", q, k).astype(jnp.float32) * c.head_width**-0.5
        later = places[:, None, :] > positions[:, :, None]
        scores = jnp.where(later[:, None, None], -1e30, scores)
        out = jnp.einsum("bghts,bsgd->btghd", jax.nn.softmax(scores).astype(v.dtype), v)
        return out.reshape(*out.shape[:2], -1, c.head_width)

    heads = P(BATCH, "context", "tensor")
    split = P(BATCH, "context")
    places = P(BATCH) if "repeated" in c.followed else split
    attention = mapped(attend, (heads, heads, heads, split, places), heads)

    def routed(x, router):
        logits = (x @ router).astype(jnp.float32)
        top = lambda p: lax.top_k(p, c.top)  # noqa: E731
        if "transformed whole" in c.followed and not c.sparse:
            top = jax.shard_map(top, mesh=mesh, in_specs=split, out_specs=split)
        gates, chosen = top(jax.nn.softmax(logits))
        return (gates / gates.sum(-1, keepdims=True)).astype(x.dtype), chosen

    def sparse(x, router, both, down):
        """Each device's experts alone, on rows that are sorted by expert."""
        x = gather(x, "expert", 0)
        if fsdp:
            axis = 2 if "left apart" in c.followed else 1
            both, down = (
                jax.tree.map(lambda w: gather(w, "fsdp", axis), both),
                gather(down, "fsdp", 2),
            )
        gate, up = both
        rows = x.reshape(-1, x.shape[-1])
        gates, chosen = routed(rows, router)
        order = jnp.argsort(chosen.reshape(-1), stable=True)
        sizes = (chosen.reshape(-1, 1) == jnp.arange(c.experts)).sum(0)
        count = gate.shape[0]
        first = lax.axis_index("expert") * count
        start = jnp.where(jnp.arange(c.experts) < first, sizes, 0).sum()
        mine = lax.dynamic_slice(sizes, (first,), (count,))
        given = jnp.roll(jnp.repeat(rows, c.top, axis=0)[order], -start, axis=0)
        inside = jnp.arange(given.shape[0])[:, None] < mine.sum()
        given = jnp.where(inside, given, 0)
        h = jax.nn.silu(grouped(given, gate, mine)) * grouped(given, up, mine)
        out = jnp.roll(jnp.where(inside, grouped(h, down, mine), 0), start, axis=0)
        out = jnp.zeros_like(out).at[order].set(out).reshape(*gates.shape, -1)
        out = (out * gates[..., None]).sum(1).reshape(x.shape)
        out = lax.psum_scatter(out, "expert", scatter_dimension=0, tiled=True)
        load = lax.pmean(sizes / sizes.sum(), ("fsdp", "context"))
        return lax.psum(out, "tensor"), load

    rows = P(BATCH, "context")
    fsdp = "fsdp" if "only a slice" in c.followed else None
    wide = P("expert", fsdp, "tensor")
    both = P(None, *wide) if "left apart" in c.followed else (wide, wide)
    down = P("expert", "tensor", fsdp)
    sparse = mapped(sparse, (rows, P(), both, down), (rows, P()))

    def in_parts(x):
        """Count each part alone, and add what those before it have, as the hint says."""
        s = lax.cumsum(x, 1)
        t = gather(s[:, -1:], "context", 1)
        count, i = mesh.shape["context"], lax.axis_index("context")
        return s + sum(jnp.where(i > k, t[:, k : k + 1], 0) for k in range(count))

    counted = lambda x: jnp.cumsum(x, 1)  # noqa: E731
    if "transformed whole" in c.followed:
        counted = jax.shard_map(in_parts, mesh=mesh, in_specs=split, out_specs=split)

    def dense(x, router, both, down):
        """Dispatch by one-hot masks, with room for twice each expert's share."""
        (gate, up), (gates, chosen) = both, routed(x, router)
        room = 2 * c.top * c.length // c.experts
        hot = jax.nn.one_hot(chosen, c.experts, dtype=jnp.int32)  # [batch, length, top, experts]
        flat = hot.reshape(hot.shape[0], -1, c.experts)
        place = (counted(flat) * flat).reshape(hot.shape) - 1
        sent = jax.nn.one_hot(place, room, dtype=x.dtype).sum(2)  # [batch, length, experts, room]
        weighed = (jax.nn.one_hot(place, room, dtype=x.dtype) * gates[..., None, None]).sum(2)
        inbox = constrained(jnp.einsum("btd,btec->ebcd", x, sent), "expert", "fsdp")
        h = jax.nn.silu(jnp.einsum("ebcd,edf->ebcf", inbox, gate))
        h = constrained(
            h * jnp.einsum("ebcd,edf->ebcf", inbox, up), "expert", "fsdp", None, "tensor"
        )
        outbox = constrained(jnp.einsum("ebcf,efd->ebcd", h, down), "expert", "fsdp")
        out = jnp.einsum("ebcd,btec->btd", outbox, weighed)
        if "after the loop" not in c.followed:
            return out, hot.sum((0, 1, 2)) / hot.sum()
        shards = [mesh.shape["fsdp"] * mesh.shape["expert"], mesh.shape["context"]]
        hot = hot.reshape(shards[0], -1, shards[1], c.length // shards[1], *hot.shape[2:])
        return out, hot.sum((1, 3, 4))

    def layer(x, w, positions, places):
        w = jax.tree.map(lambda a: a.astype(dtype), w)
        y = rms_norm(x, w["norm1"])
        q, k, v = (jnp.einsum("btd,dhk->bthk", y, w[name]) for name in "qkv")
        q, k = rotated(q, positions), rotated(k, positions)
        q, k, v = (constrained(one, BATCH, "context", "tensor") for one in (q, k, v))
        x = x + jnp.einsum("bthk,hkd->btd", attention(q, k, v, positions, places), w["out"])
        x = constrained(x, BATCH, "context")
        both = w["gate"], w["up"]
        if "left apart" in c.followed and c.sparse:
            both = jnp.stack(both)
        mixture = sparse if c.sparse else dense
        y, load = mixture(rms_norm(x, w["norm2"]), w["router"], both, w["down"])
        return constrained(x + y, BATCH, "context"), load

    def loss(weights, tokens, targets):
        positions = constrained(
            jnp.broadcast_to(jnp.arange(c.length), tokens.shape), BATCH, "context"
        )
        x = constrained(weights["embedding"].astype(dtype)[tokens], BATCH, "context")
        stacked = jax.tree.map(lambda a: jnp.moveaxis(a, 1, 0), weights["layers"])
        places = constrained(positions, BATCH) if "repeated" in c.followed else positions
        policies = jax.checkpoint_policies
        policy = policies.save_only_these_names("gathered")
        body = jax.checkpoint(
            lambda x, w: layer(x, w, positions, places),
            policy=policy if "gathered twice" in c.followed else policies.nothing_saveable,
            prevent_cse=False,
        )
        x, loads = lax.scan(body, x, stacked)
        if "after the loop" in c.followed:
            loads = loads.sum((1, 2)) / loads.sum((1, 2, 3))[:, None]
        logits = rms_norm(x, weights["norm"]) @ weights["logits"].astype(dtype)
        logits = constrained(logits, BATCH, "context", "tensor").astype(jnp.float32)
        log_p = jax.nn.log_softmax(logits)
        hot = jax.nn.one_hot(targets, c.vocabulary)
        if "reduce first" in c.followed:
            return -(log_p * hot).sum() / targets.size, loads
        return -(log_p * hot).sum(-1).mean(), loads

    return loss


def _is_leaf(value):
    return isinstance(value, tuple)


def make_step(c, mesh, rate=1e-3):
    """Return a step of Adam with the gradients clipped by their norm, and its metrics."""
    loss = make_loss(c, mesh)

    def step(state, tokens, targets):
        weights, first, second = state
        (value, loads), gradient = jax.value_and_grad(loss, has_aux=True)(weights, tokens, targets)
        norm = jnp.sqrt(sum((g**2).sum() for g in jax.tree.leaves(gradient)))
        gradient = jax.tree.map(lambda g: g / jnp.maximum(norm, 1), gradient)
        first = jax.tree.map(lambda m, g: 0.9 * m + 0.1 * g, first, gradient)
        second = jax.tree.map(lambda m, g: 0.95 * m + 0.05 * g * g, second, gradient)
        weights = jax.tree.map(
            lambda w, m, v: w - rate * m / (jnp.sqrt(v) + 1e-8), weights, first, second
        )
        size = jnp.sqrt(sum((w**2).sum() for w in jax.tree.leaves(weights)))
        return (weights, first, second), {"loss": value, "norm": norm, "size": size, "load": loads}

    held = tuple(jax.tree.map(lambda s: s.sharding, one) for one in shapes(c, mesh)[0])
    return jax.jit(step, donate_argnums=0, out_shardings=(held, None))


def shapes(c, mesh):
    """Return the step's arguments, as shapes with shardings."""

    def struct(leaf):
        return jax.ShapeDtypeStruct(leaf[0], jnp.float32, sharding=NamedSharding(mesh, leaf[1]))

    weights = jax.tree.map(struct, parameters(c), is_leaf=_is_leaf)
    tokens = jax.ShapeDtypeStruct(
        (c.batch, c.length), jnp.int32, sharding=NamedSharding(mesh, P(BATCH, "context"))
    )
    return (weights, weights, weights), tokens, tokens
