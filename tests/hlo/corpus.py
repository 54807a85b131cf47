"""Training steps as people write them, for comparing our reader with XLA's."""

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

ROWS, WIDTH = P("data", None), 64


def _sum(y):
    return (y.astype(jnp.float32) ** 2).sum()


def scan(x, ws):
    """Layers in a scan, each summed over model."""
    return lax.scan(lambda c, w: (lax.psum(jnp.tanh(c @ w), "model") / 2, None), x, ws)[0]


def remat(x, ws):
    """Layers in a scan, recomputed in the backward pass."""
    return lax.scan(jax.checkpoint(lambda c, w: (jnp.tanh(c @ w), None)), x, ws)[0]


def fsdp(x, ws):
    """Weights gathered layer by layer."""

    def layer(c, w):
        return jnp.tanh(c @ lax.all_gather(w, "data", axis=0, tiled=True)), None

    return lax.scan(jax.checkpoint(layer), x, ws)[0]


def sequence(x, ws):
    """Sequence parallelism: gather before, scatter after each product."""
    for i in range(ws.shape[0]):
        whole = lax.all_gather(x, "model", axis=0, tiled=True)
        x = lax.psum_scatter(jnp.tanh(whole @ ws[i]), "model", scatter_dimension=0, tiled=True)
    return x


def experts(x, ws):
    """All-to-all there and back, with a choice of the largest."""
    parts = x.reshape(4, -1, x.shape[-1])
    there = lax.all_to_all(parts, "data", 0, 0)
    chosen = lax.top_k(there, 8)[0].mean(-1, keepdims=True)
    back = lax.all_to_all(jnp.tanh(there * chosen @ ws[0]), "data", 0, 0)
    return back.reshape(x.shape)


def ring(x, ws):
    """A collective matmul: shards of the weight pass by in a loop."""
    index = lax.axis_index("data")

    def step(i, carry):
        total, w = carry
        total = total + x[:, : ws.shape[1]] @ w * ((index + i) % 4).astype(x.dtype)
        return total, lax.ppermute(w, "data", [(k, (k + 1) % 4) for k in range(4)])

    shard = lax.pcast(ws[0], "data", to="varying")  # a carry's type is the same before and after
    return lax.fori_loop(0, 4, step, (jnp.zeros_like(x @ ws[0]), shard))[0]


def pipeline(x, ws):
    """Stages along data; a conditional on the stage."""
    stage = lax.axis_index("data")

    def tick(c, w):
        y = lax.cond(stage % 2 == 0, jnp.tanh, jnp.sin, c @ w)
        return lax.ppermute(y, "data", [(0, 1), (1, 2), (2, 3)]), None

    return lax.scan(tick, x, ws)[0]


def dropout(x, ws):
    """Random bits, sorting, a cumulative sum."""
    key = jax.random.fold_in(jax.random.key(0), lax.axis_index("data"))
    kept = jax.random.bernoulli(key, 0.5, x.shape)
    return jnp.sort(jnp.cumsum(jnp.where(kept, x @ ws[0], 0), axis=0), axis=-1)


PROGRAMS = {f.__name__: f for f in (scan, remat, fsdp, sequence, experts, ring, pipeline, dropout)}
SHARDED = {"fsdp": P(None, "data", None)}


def compile_program(name, mesh, check_vma, layers=3, dtype="float32", grad=True):
    """Give a compiled program."""
    weights = SHARDED.get(name, P())

    def body(x, ws):
        y = PROGRAMS[name](x, ws)
        # Under the check a mean is over just the axes that its operand varies over.
        return lax.pmean(_sum(y), ("data", "model") if name == "sequence" else "data")

    mapped = jax.shard_map(
        body, mesh=mesh, in_specs=(ROWS, weights), out_specs=P(), check_vma=check_vma
    )
    args = [
        jax.ShapeDtypeStruct(shape, jnp.dtype(dtype), sharding=NamedSharding(mesh, spec))
        for shape, spec in (((64, WIDTH), ROWS), ((layers, WIDTH, WIDTH), weights))
    ]
    function = jax.grad(mapped, argnums=(0, 1)) if grad else mapped
    return jax.jit(function).lower(*args).compile()
