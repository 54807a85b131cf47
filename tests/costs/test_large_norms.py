"""Norms of gradients so large that XLA for CPU reduces them in blocks first."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from costs.test_waste import D, follow, hints, structs

pytestmark = pytest.mark.one_lane

SHARDED = P(None, "data")
ARGS = [((128, 512), SHARDED), ((512, 128), SHARDED), ((256, 128), D)]


def step(square):
    """The gradients of two layers, sharded as the weights are, and their norm."""

    def loss(ws, x):
        return jnp.mean((jax.nn.gelu(x @ ws[0]) @ ws[1]) ** 2)

    def f(up, down, x):
        grads = [lax.with_sharding_constraint(g, SHARDED) for g in jax.grad(loss)((up, down), x)]
        return grads, jnp.sqrt(sum(square(g) for g in grads))

    return f


def test_the_norm_of_a_step_with_sharded_weights(cpu_mesh):
    with jax.set_mesh(cpu_mesh):
        f, g = jax.jit(step(lambda g: jnp.vdot(g, g))), jax.jit(step(lambda g: jnp.sum(g * g)))
        sent = 2 * 3 * 128 * 512 * 4 // 4
        found = follow(
            ("cpu", cpu_mesh), f, g, structs(cpu_mesh, ARGS), "reduce instead", (sent, 2 * 6)
        )
    assert len(found) == 2


@pytest.mark.parametrize("stride", [16, 64])
def test_blocks_that_overlap_or_leave_some_out(cpu_mesh, stride):
    """Each element counts twice, or not at all."""

    def f(g):
        blocks = lax.reduce_window(g.ravel(), 0.0, lax.add, (32,), (stride,), "VALID")
        return blocks.sum()

    given = structs(cpu_mesh, [((64, 64), SHARDED)])
    sharding = NamedSharding(cpu_mesh, P())
    with jax.set_mesh(cpu_mesh):
        found = hints(jax.jit(f, out_shardings=sharding), given)
    assert not [h for h in found if h.kind == "reduce instead"]
