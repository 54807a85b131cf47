"""Programs as they should be, in which a kind of waste fired that its advice does not mend."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from costs.test_waste import D, hints, program, structs

WEIGHTS = ((128, 128), P())
PART = ((128, 128), D)
BATCH = ((256, 128), D)


def loss(w, x):
    return jnp.mean(jnp.tanh(x @ w) ** 2)


def adam(w, g, m, v):
    m, v = 0.9 * m + 0.1 * g, 0.99 * v + 0.01 * g * g
    return w - 1e-3 * m / (jnp.sqrt(v) + 1e-8), m, v


def zero_under_jit(mesh):
    """Each device has a part of the moments and updates as much of the weights."""
    outs = tuple(NamedSharding(mesh, spec) for _, spec in (WEIGHTS, PART, PART))
    return jax.jit(lambda w, m, v, x: adam(w, jax.grad(loss)(w, x), m, v), out_shardings=outs)


def zero_in_a_shard_map(mesh):
    def step(w, m, v, x):
        g = lax.psum_scatter(jax.grad(loss)(w, x), "data", tiled=True) / 4
        own = lax.dynamic_slice_in_dim(w, lax.axis_index("data") * len(m), len(m))
        own, m, v = adam(own, g, m, v)
        return lax.all_gather(own, "data", tiled=True), m, v

    return program(mesh, step, [WEIGHTS, PART, PART, BATCH], (P(), D, D))


@pytest.mark.parametrize("make", [zero_under_jit, zero_in_a_shard_map])
def test_weights_that_the_next_step_takes_whole(cpu_mesh, make):
    given = structs(cpu_mesh, [WEIGHTS, PART, PART, BATCH])
    assert [h for h in hints(make(cpu_mesh), given) if h.kind == "only returned"] == []


def test_a_gradient_of_as_many_elements_may_stay_sharded(cpu_mesh):
    """It is made of the weights, and is no update of them."""

    def gradient(w, x):
        return lax.all_gather(
            lax.psum_scatter(jax.grad(loss)(w, x), "data", tiled=True), "data", tiled=True
        )

    f = program(cpu_mesh, gradient, [WEIGHTS, BATCH], P())
    assert "only returned" in [h.kind for h in hints(f, structs(cpu_mesh, [WEIGHTS, BATCH]))]


def test_what_the_partitioner_moves_for_products_in_a_loop(cpu_mesh):
    """No line gathers the array, so that none can be constrained to the whole layout."""
    sharded = NamedSharding(cpu_mesh, P(None, D[0]))
    shapes = {"up": (4, 128, 512), "down": (4, 512, 128)}
    ws = {k: jax.ShapeDtypeStruct(s, jnp.float32, sharding=sharded) for k, s in shapes.items()}

    def step(ws, x):
        def layer(h, w):
            return h + jax.nn.gelu(h @ w["up"]) @ w["down"], None

        return jax.grad(lambda ws: jnp.mean(lax.scan(layer, x, ws)[0] ** 2))(ws)

    f = jax.jit(step, out_shardings=sharded)
    assert "gathered too" not in [h.kind for h in hints(f, [ws, *structs(cpu_mesh, [BATCH])])]
