"""A mask that XLA for CPU gathers as numbers, as jnp.nonzero and jnp.cumsum of a sharded one."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

from costs.test_waste import D, hints, random_like, structs
from shardrules import testing

X = ((256, 64), D)


def held(mask):
    """What the hint says to type."""
    return lax.with_sharding_constraint(lax.optimization_barrier(mask), P())


USES = {
    "nonzero": lambda h, x: jnp.nonzero(h(x > 0), size=64),
    "rows": lambda h, x: x[jnp.nonzero(h(x[:, 0] > 0), size=64)[0]],
    "read_too": lambda h, x: (jnp.cumsum(h((x > 0).ravel())), jnp.where(x > 0, jnp.sin(x), 0)),
}


@pytest.mark.parametrize("name", USES)
def test_a_mask_is_a_quarter_of_its_numbers(cpu_mesh, name):
    use, given = USES[name], structs(cpu_mesh, [X])
    with jax.set_mesh(cpu_mesh):
        f, g = (jax.jit(lambda x, h=h: use(h, x)) for h in (lambda mask: mask, held))
        (found,) = hints(f, given)
        totals = [testing.account(p, *given).total.wire_bytes for p in (f, g)]
        assert hints(g, given) == []
        values = random_like(given)
        jax.tree.map(np.testing.assert_array_equal, f(*values), g(*values))
    assert found.kind == "narrow first" and found.sent_after == found.sent_before // 4
    # With the mask whole, nonzero needs no sum of the places that each device found.
    assert totals[0] - totals[1] >= found.sent_before - found.sent_after > 0
    assert "NamedSharding(mesh, spec)) with a spec without 'data' (on CPU: " in found.advice


@pytest.mark.one_lane
@pytest.mark.parametrize(
    "f",
    [
        lambda x: jnp.cumsum(x, 0),  # the numbers themselves
        lambda x: jnp.cumsum(x.astype(jnp.int8), 0, dtype=jnp.int8),
        lambda x: jnp.nonzero(held(x > 0), size=64),
        lambda x: jnp.cumsum(x > 0, 1),  # along what no device shares
        # each device counts its own part, and XLA gathers the numbers for that of a held mask too
        lambda x: lax.with_sharding_constraint(jnp.cumsum(x > 0, 0) * (x > 0), D),
    ],
    ids="numbers narrow held within sharded".split(),
)
def test_what_is_no_mask_or_is_held(cpu_mesh, f):
    with jax.set_mesh(cpu_mesh):
        found = hints(jax.jit(f), structs(cpu_mesh, [X]))
        assert "narrow first" not in [h.kind for h in found]


@pytest.mark.tpu
def test_xla_for_tpu_sums_each_shard(tpu_mesh):
    with jax.set_mesh(tpu_mesh):
        f = jax.jit(lambda x: jnp.nonzero(x > 0, size=64))
        assert hints(f, structs(tpu_mesh, [X])) == []
