"""Rows at an index of a sharded dimension, for which XLA gathers all of it."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

from costs.test_waste import D, follow, hints, structs

pytestmark = pytest.mark.one_lane

INDEX = ((), P(), jnp.int32)
CACHE = ((8, 512, 4, 64), P(None, "data", "model"))


def cut(k, axis=0):
    return lambda x, i: lax.dynamic_slice_in_dim(x, i, k, axis)


def taken(k, axis=0):
    return lambda x, i: jnp.take(x, jnp.clip(i, 0, x.shape[axis] - k) + jnp.arange(k), axis=axis)


def one(x, i):
    return jnp.sum(x, 0, where=(jnp.arange(len(x)) == i)[:, None])


def of_a_cache(x, i):
    return jnp.sum(x, 1, where=(jnp.arange(x.shape[1]) == i)[:, None, None])


def decoding(read):
    """Each token reads the cache behind its place, and writes its own."""

    def step(carry, _):
        cache, i = carry
        h = jnp.tanh(read(cache, i)).sum(0)
        return (lax.dynamic_update_slice_in_dim(cache, h[None], i + 8, 0), i + 1), h

    return lambda x, i: lax.scan(step, (x, i), None, length=4)


# Before, after, the array, and how many bytes of it are gathered by each device, and summed.
READS = {
    "rows": (cut(8), taken(8), ((512, 64), D), 128 * 64 * 4, 8 * 64 * 4),
    "of_a_cache": (cut(64, 1), taken(64, 1), CACHE, 8 * 128 * 128 * 4, 8 * 64 * 128 * 4),
    "one": (lambda x, i: x[i], one, ((512, 64), D), 128 * 64 * 4, 64 * 4),
    "one_of_a_cache": (
        lambda x, i: lax.dynamic_index_in_dim(x, i, 1, False),
        of_a_cache,
        CACHE,
        8 * 128 * 128 * 4,
        8 * 128 * 4,
    ),
    "decoding": (
        decoding(cut(8)),
        decoding(taken(8)),
        ((512, 64), D),
        4 * 128 * 64 * 4,
        4 * 8 * 64 * 4,
    ),
}


@pytest.mark.parametrize("name", READS)
def test_rows_that_the_devices_that_have_them_give(platform, name):
    before, after, array, gathered, summed = READS[name]
    given = structs(platform[1], [array, INDEX])
    with jax.set_mesh(platform[1]):
        f, g = (
            jax.jit(lambda x, i, h=h: jax.tree.map(jnp.tanh, h(x, i + 200)))
            for h in (before, after)
        )
        sent = 3 * gathered, 2 * 3 * summed // 4
        (found,) = follow(platform, f, g, given, "one part", sent)
    assert found.round_trips_after == found.round_trips_before
    assert ("jnp.sum" in found.advice) == ("one" in name)


@pytest.mark.parametrize(
    "f",
    [
        lambda x, i: cut(384)(x, i),  # so many that their sum costs more
        lambda x, i: cut(8, 1)(x, i),
        lambda x, i: (lambda y: (cut(8)(y, i), y @ y.T))(lax.with_sharding_constraint(x, P())),
        lambda x, i: taken(8)(x, i),
        lambda x, i: lax.scan(lambda c, r: (jnp.tanh(c + r), None), x[0] * 0, x)[0],  # all rows
        lambda x, i: lax.dynamic_update_slice_in_dim(x, x[:1] * 2, i, 0),
    ],
    ids="most columns read_whole_too taken scanned written".split(),
)
def test_what_is_read_otherwise(cpu_mesh, f):
    with jax.set_mesh(cpu_mesh):
        found = hints(jax.jit(f), structs(cpu_mesh, [((512, 64), D), INDEX]))
    assert "one part" not in [h.kind for h in found]


def test_an_index_of_each_device_is_none_of_all(cpu_mesh):
    given = structs(
        cpu_mesh, [((1024, 512), P(("data", "model"))), ((8,), P(("data", "model")), int)]
    )
    rows = lambda x, i: jax.vmap(lambda j: jax.lax.dynamic_slice(x, (j, 0), (4, 512)))(i)  # noqa: E731
    with jax.set_mesh(cpu_mesh):
        outs = jax.NamedSharding(cpu_mesh, P(("data", "model")))
        found = hints(jax.jit(rows, out_shardings=outs), given)
    assert "one part" not in {hint.kind for hint in found}
