"""A top_k for which XLA gathers all rows on each device, or on CPU all parts of each row."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from core import versions
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from costs.test_waste import D, follow, hints, random_like, structs
from shardrules import testing

pytestmark = pytest.mark.one_lane

BOTH = P("data", "model")


def top(k):
    return lambda x: lax.top_k(x, k)


def of_rows(k, spec):
    return lambda x: jax.shard_map(top(k), in_specs=spec, out_specs=spec)(x)


def of_parts(k, axis, own, whole):
    def part(x):
        v, i = lax.top_k(x, k)
        return v, i + x.shape[-1] * lax.axis_index(axis)

    def f(x):
        found = jax.shard_map(part, in_specs=own, out_specs=own)(x)
        v, i = (lax.with_sharding_constraint(a, whole) for a in found)
        v, j = of_rows(k, whole)(v)
        return v, jnp.take_along_axis(i, j, -1)

    return f


@pytest.mark.parametrize(
    "shape, spec, said",
    [
        ((64, 1024), D, "P('data')"),
        ((8, 64, 512), P(None, "data"), "P(None, 'data')"),
        ((64, 256), P(("data", "model")), "P(('data', 'model'))"),
    ],
    ids=["rows", "middle", "over_both"],
)
def test_rows_that_each_device_may_keep(platform, shape, spec, said):
    mesh, count = platform[1], 8 if "model" in str(spec) else 4
    with jax.set_mesh(mesh):
        outs = NamedSharding(mesh, spec)
        f, g = (
            jax.jit(lambda x, t=t: t(jnp.tanh(x)), out_shardings=outs)
            for t in (top(8), of_rows(8, spec))
        )
        sent, given = (count - 1) * int(np.prod(shape)) * 4 // count, structs(mesh, [(shape, spec)])
        partitioned = {
            "cpu": [],
            "gpu": [P(("data", "model"))],
            "tpu": [P(("data", "model")), P(None, "data")],
        }
        if spec in partitioned[platform[0]]:
            assert hints(f, given) == []
            return
        (found,) = follow(platform, f, g, given, "transformed whole", (sent, 0))
    assert f"lax.top_k(x, 8), mesh=mesh, in_specs={said}, out_specs={said})" in found.advice


def test_a_router_of_experts(cpu_mesh):
    """The two best experts of each token, and the gradient of their weights."""

    def routed(top):
        def loss(w, x):
            v, i = top(x @ w)
            return (jax.nn.softmax(v) * (i + 1)).sum()

        return jax.jit(jax.grad(loss))

    given = structs(cpu_mesh, [((128, 16), P()), ((256, 128), D)])
    with jax.set_mesh(cpu_mesh):
        follow(
            ("cpu", cpu_mesh),
            routed(top(2)),
            routed(of_rows(2, D)),
            given,
            "transformed whole",
            (3 * 64 * 16 * 4, 0),
        )


BF16 = jnp.bfloat16


# XLA of JAX 0.12 makes other operations of it for GPU, in which no hint is found.
SIXTEEN = [
    "cpu",
    pytest.param("tpu", marks=pytest.mark.tpu),
    pytest.param("gpu", marks=[pytest.mark.gpu, versions.where(versions.names_gathers_by_use)]),
]


@pytest.mark.parametrize("platform", SIXTEEN, indirect=True)
def test_of_16_bits(platform):
    """XLA for CPU sorts all of each row, on JAX 0.12, on TPU too, with places in the last bits."""
    mesh, is_narrow = platform[1], platform[0] != "cpu" and versions.names_gathers_by_use()
    bits = 16 if is_narrow else 32
    given = structs(mesh, [((64, 1024), D, BF16)])
    with jax.set_mesh(mesh):
        outs = NamedSharding(mesh, D)
        f, g = (jax.jit(t, out_shardings=outs) for t in (top(8), of_rows(8, D)))
        follow(platform, f, g, given, "transformed whole", (3 * 16 * 1024 * bits // 8, 0))


@versions.where(versions.names_gathers_by_use)
@pytest.mark.parametrize("platform", [pytest.param("tpu", marks=pytest.mark.tpu)], indirect=True)
def test_rows_that_are_needed_whole(platform):
    """XLA for CPU and GPU, on JAX 0.12 for TPU, cuts what it found, and gathers that again."""
    mesh = platform[1]
    given = structs(mesh, [((512, 2048), D)])
    with jax.set_mesh(mesh):
        outs = NamedSharding(mesh, P())
        f, g = (jax.jit(t, out_shardings=outs) for t in (top(8), of_rows(8, D)))
        sent = 3 * 128 * 2048 * 4, 3 * 128 * 8 * 8
        (found,) = follow(platform, f, g, given, "transformed whole", sent)
    assert (found.round_trips_before, found.round_trips_after) == (1, 2)


PARTS = {
    "whole": ((64, 8192), P(None, "data"), P(), "data", 4, 64),
    "rows": ((64, 32768), BOTH, D, "model", 2, 16),
    "flat": ((2**19,), D, P(), "data", 4, 1),
    "of_16_bits": ((64, 8192), P(None, "data"), P(), "data", 4, 64, BF16),
}


@pytest.mark.parametrize("name", PARTS)
def test_parts_of_each_row(cpu_mesh, name):
    shape, own, whole, axis, count, rows, *dtype = PARTS[name]
    given = structs(cpu_mesh, [(shape, own, *dtype)])
    with jax.set_mesh(cpu_mesh):
        f, g = jax.jit(top(8)), jax.jit(of_parts(8, axis, own, whole))
        found = [h for h in hints(f, given) if h.kind == "transformed whole"]
        # Where the rows are sharded, too, they are gathered for it, and that is the other hint.
        sent = (count - 1) * rows * shape[-1] * 4 // count
        parts = found[0]
        assert (parts.sent_before, parts.sent_after) == (sent, (count - 1) * rows * 8 * 8)
        assert (parts.round_trips_before, parts.round_trips_after) == (1, 2)
        totals = [testing.account(p, *given).total.wire_bytes for p in (f, g)]
        assert totals[0] - totals[1] == sum(h.sent_before - h.sent_after for h in found)
        assert hints(g, given) == []
        (x,) = random_like(given)
        for array in (x, jnp.round(x)):  # of equal numbers it takes the first
            one, other = f(array), g(array)
            assert all(np.array_equal(a, b) for a, b in zip(one, other, strict=True))
    assert len(found) == (2 if name == "rows" else 1)
    # Followed alone, a shard_map over the rows would gather each row's parts.
    assert all(h.advice.startswith("goes away with that at") for h in found[1:])
    assert {h.goes_with for h in found} == {parts.verdict.collective if found[1:] else None}
    assert f"jax.lax.axis_index({axis!r}), as v, i = jax.shard_map(part" in parts.advice


@pytest.mark.parametrize(
    "f, spec",
    [
        (lambda x: [lax.with_sharding_constraint(a, P()) for a in lax.top_k(x, 8)], D),
        (lambda x: (lax.top_k(x, 8), x * 2), P()),
        (top(8), P(None, "data")),  # of few bytes: they would be gathered with their places
        (lambda x: of_rows(8, D)(x), D),
        (lambda x: jnp.sort(x, -1)[:, :8], D),  # XLA partitions it
        (lambda x: (lambda y: (lax.top_k(y, 8)[0].sum(), y))(lax.all_gather(x, "data")), None),
    ],
    ids="needed_whole whole small local sorted gathered_too".split(),
)
def test_what_gains_nothing(cpu_mesh, f, spec):
    given = structs(cpu_mesh, [((64, 128), D if spec is None else spec)])
    with jax.set_mesh(cpu_mesh):
        if spec is None:
            f = jax.shard_map(f, in_specs=D, out_specs=P(), check_vma=False)
        assert not [h for h in hints(jax.jit(f), given) if h.kind == "transformed whole"]


def test_an_array_that_is_reshaped_between_its_gathers(cpu_mesh):
    """As beam search does, over the beams and the words of each; the report raised IndexError."""
    given = structs(cpu_mesh, [((16, 4, 512), P("data", None, "model"))])
    with jax.set_mesh(cpu_mesh):
        assert hints(jax.jit(lambda x: lax.top_k(x.reshape(16, -1), 4)), given) == []
