"""Running sums of a dimension that is sharded: XLA gathers all of it, the last sums are enough."""

import jax
import jax.numpy as jnp
import pytest
from core import versions
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from costs.test_waste import D, follow, hints, structs

pytestmark = pytest.mark.one_lane

ROWS, LAST = 3 * 256 * 128 * 4, 3 * 128 * 4


def own(axis, name, count, reverse=False):
    """As the hint writes it."""

    def f(x):
        s = lax.cumsum(x, axis, reverse=reverse)
        last = lax.slice_in_dim(s, 0, 1, axis=axis) if reverse else s[(slice(None),) * axis + END]
        t, i = lax.all_gather(last, name), lax.axis_index(name)
        return s + sum(jnp.where(i < k if reverse else i > k, t[k], 0) for k in range(count))

    return f


END = (slice(-1, None),)


def in_parts(spec, axis=0, name="data", count=4, reverse=False):
    f = own(axis, name, count, reverse)
    return lambda x: jax.shard_map(f, in_specs=spec, out_specs=spec)(x)


def sums(x, axis=0):
    return jnp.cumsum(x, axis)


# Before, after, the array, its spec, the bytes that a device sends before and after.
BOTH = ("data", "model")
COLUMNS = P("model", "data")
SUMS = {
    "rows": (sums, in_parts(D), (1024, 128), D, (ROWS, LAST)),
    "in_a_row": (sums, in_parts(D), (4096,), D, (3 * 1024 * 4, 3 * 4)),
    "counted": (
        lambda x: sums(x > 0),
        lambda x: in_parts(D)((x > 0).astype(jnp.int32)),
        (1024, 128),
        D,
        (ROWS, LAST),
    ),
    "over_both": (
        sums,
        in_parts(P(BOTH), name=BOTH, count=8),
        (1024, 64),
        P(BOTH),
        (7 * 128 * 64 * 4, 7 * 64 * 4),
    ),
    "columns": (
        lambda x: sums(x, 1),
        in_parts(COLUMNS, 1),
        (8, 1024, 32),
        COLUMNS,
        (3 * 4 * 256 * 32 * 4, 3 * 4 * 32 * 4),
    ),
    "from_the_end": (
        lambda x: lax.cumsum(x, 0, reverse=True),
        in_parts(D, reverse=True),
        (1024, 128),
        D,
        (ROWS, LAST),
    ),
    "gradient": (
        jax.grad(lambda x: (jnp.cumsum(x, 0) ** 2).mean()),
        jax.grad(lambda x: (in_parts(D)(x) ** 2).mean()),
        (1024, 128),
        D,
        (2 * ROWS, 2 * LAST),
    ),
    "places_among_experts": (
        lambda x: jnp.cumsum(jax.nn.one_hot(x.argmax(-1), 8, dtype=jnp.int32), 0),
        lambda x: in_parts(D)(jax.nn.one_hot(x.argmax(-1), 8, dtype=jnp.int32)),
        (1024, 8),
        D,
        (3 * 256 * 8 * 4, 3 * 8 * 4),
    ),
}


# XLA for TPU, and for GPU on JAX 0.12, gathers the last sums alone.
PLATFORMS = [
    "cpu",
    pytest.param("gpu", marks=[pytest.mark.gpu, versions.where(versions.names_gathers_by_use)]),
]


@pytest.mark.parametrize("platform", PLATFORMS, indirect=True)
@pytest.mark.parametrize("name", SUMS)
def test_the_last_sums_of_each_part_are_enough(platform, name):
    before, after, shape, spec, sent = SUMS[name]
    if platform[0] == "gpu" and name in ("counted", "places_among_experts"):
        return  # it moves the mask
    given, outs = structs(platform[1], [(shape, spec)]), NamedSharding(platform[1], spec)
    with jax.set_mesh(platform[1]):
        f, g = (
            jax.jit(lambda x, h=h: h(jnp.round(x * 4)), out_shardings=outs) for h in (before, after)
        )
        found = follow(platform, f, g, given, "transformed whole", sent)
    written = next(h for h in found if h.entry.phase == "forward").advice
    said = {"columns": "P(None, 'data')", "over_both": "P(('data', 'model'))"}.get(
        name, "P('data')"
    )
    assert f"in_specs={said}, out_specs={said})(x)" in written
    assert ("reverse=True" in written) == (name == "from_the_end")
    assert ("what splits its other dimensions" in written) == (name != "over_both")


@pytest.mark.parametrize(
    "f",
    [
        lambda x: lax.cummax(x, axis=0),  # nothing is added
        lambda x: jnp.cumsum(x, 1),
        lambda x: lax.reduce_window(x, 0.0, lax.add, (4, 1), (4, 1), "VALID"),
        lambda x: jnp.nonzero(x[:, 0] > 0, size=16),  # it counts itself
        lambda x: (jnp.cumsum(lax.with_sharding_constraint(x, P()), 0), x),
        lambda x: (lambda y: (jnp.cumsum(y, 0), y @ y.T))(lax.with_sharding_constraint(x, P())),
    ],
    ids="maxima rows pooled nonzero constrained read_whole_too".split(),
)
def test_what_is_summed_otherwise(cpu_mesh, f):
    with jax.set_mesh(cpu_mesh):
        found = hints(jax.jit(f), structs(cpu_mesh, [((1024, 128), D)]))
    assert "transformed whole" not in [h.kind for h in found]
