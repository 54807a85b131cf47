"""Parts of a sharded dimension that move because of how they are split, joined or sorted."""

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

X = ((256, 64), D)
COLUMNS = P(None, "data")


def following(platform, before, after, args, outs, kind, sent):
    mesh = platform[1]
    kept = {} if outs is None else {"out_shardings": NamedSharding(mesh, outs)}
    with jax.set_mesh(mesh):
        f, g = (jax.jit(h, **kept) for h in (before, after))
        return follow(platform, f, g, structs(mesh, args), kind, sent)


# -- split ----------------------------------------------------------------------------------------


def gated(parts):
    return jax.nn.silu(parts[0]) * parts[1]


def of_three(parts):
    return jnp.tanh(parts[0]) * parts[1] + parts[2]


def in_one(count):
    """Split a product of the weights (d, parts, f) as they are written one behind the other."""
    return lambda x, w: jnp.split(x @ w, count, -1)


def apart(count):
    """The same of the same weights, each part by a dimension of its own."""
    return lambda x, w: [*jnp.einsum("bd,dkf->kbf", x, w)]


def weights(count):
    """The shapes of both: a test gives one the other's numbers."""
    return ((64, count * 256), P(None, "model")), ((64, count, 256), P(None, None, "model"))


def lstm(products):
    def f(x, w):
        def step(c, _):
            i, f, g, o = products(c[0], w)
            c = jax.nn.sigmoid(f) * c[1] + jax.nn.sigmoid(i) * jnp.tanh(g)
            return (jax.nn.sigmoid(o)[:, :64] * jnp.tanh(c[:, :64]), c), None

        return lax.scan(step, (x, jnp.zeros((256, 256))), None, length=4)[0][0]

    return f


def trained(layer):
    return lambda products: jax.grad(lambda x, w: jnp.mean(layer(products(x, w)) ** 2), 1)


# What is made of the products, how many parts, and what a device sends for them.
HALF = 64 * 256 * 4  # a part's rows on one device, half of the columns of two
SPLITS = {
    "gated": (lambda products: lambda x, w: gated(products(x, w)), 2, HALF),
    "of_three": (lambda products: lambda x, w: of_three(products(x, w)), 3, 2 * HALF),
    "gradient": (trained(gated), 2, 2 * HALF),
}


@pytest.mark.parametrize("name", SPLITS)
def test_parts_that_have_a_dimension_of_their_own(platform, name):
    of, count, sent = SPLITS[name]
    if (platform[0], name) == ("tpu", "gradient"):
        sent -= HALF // 2  # of 16 bits, for a product
    mesh, (one, other) = platform[1], weights(count)
    with jax.set_mesh(mesh):
        f, g = jax.jit(of(in_one(count))), jax.jit(of(apart(count)))
        given = [structs(mesh, [X, w]) for w in (one, other)]
        found = [h for h in hints(f, given[0]) if h.kind == "split"]
        totals = [testing.account(h, *args).total.wire_bytes for h, args in zip((f, g), given)]
        assert hints(g, given[1]) == []
        if platform[0] == "cpu":
            x, w = random_like(given[0])
            now, then = f(x, w), g(x, jax.device_put(w.reshape(other[0]), given[1][1].sharding))
            np.testing.assert_allclose(now, then.reshape(now.shape), rtol=2e-5, atol=1e-5)
    assert sum(h.sent_before for h in found) == totals[0] - totals[1] == sent
    assert not any(h.sent_after or h.round_trips_after for h in found)
    assert "P(None, None, 'model')" in found[0].advice


def test_gates_in_a_loop(cpu_mesh):
    """Each trip sends parts of all four gates."""
    with jax.set_mesh(cpu_mesh):
        given = [structs(cpu_mesh, [X, w]) for w in weights(4)]
        f, g = jax.jit(lstm(in_one(4))), jax.jit(lstm(apart(4)))
        found = [h for h in hints(f, given[0]) if h.kind == "split"]
        totals = [testing.account(h, *args).total.wire_bytes for h, args in zip((f, g), given)]
        assert "split" not in [h.kind for h in hints(g, given[1])]
    said = sum(h.sent_before for h in found)
    assert said == totals[0] - totals[1] > 0 and {h.round_trips_before for h in found} == {4}


# Parts of other sizes, as q, k and v of grouped-query attention: for two devices along "model".
SIZES = (256, 128, 128)


def of_groups(x, q, k, v):
    """Return what is made of the parts, with as many columns as x has."""
    q = jnp.tanh(q.reshape(256, 128, 2)) * k[..., None] + v[..., None]
    return jnp.mean((x + q.reshape(256, 64, 4).sum(-1)) ** 2)


def sliced(x, w):
    return of_groups(x, *jnp.split(x @ w, np.cumsum(SIZES)[:2], -1))


def by_devices(x, w):
    y = jnp.einsum("bd,dnf->bnf", x, w)
    parts = jnp.split(y, np.cumsum(SIZES)[:2] // 2, -1)
    return of_groups(x, *(part.reshape(256, -1) for part in parts))


def in_turn(w):
    """Return the same columns with a dimension for two devices."""
    parts = np.split(np.asarray(w), np.cumsum(SIZES)[:2], -1)
    return np.concatenate([part.reshape(64, 2, -1) for part in parts], -1)


def test_parts_of_other_sizes_by_a_dimension_for_the_devices(platform):
    """A weight for each part would all-reduce the gradient of x three times."""
    mesh = platform[1]
    with jax.set_mesh(mesh):
        f, g = (jax.jit(jax.grad(h, (0, 1))) for h in (sliced, by_devices))
        one = structs(mesh, [X, ((64, 512), P(None, "model"))])
        other = structs(mesh, [X, ((64, 2, 256), P(None, "model"))])
        found = [h for h in hints(f, one) if h.kind == "split"]
        totals = [testing.account(h, *args).total.wire_bytes for h, args in ((f, one), (g, other))]
        assert "split" not in [h.kind for h in hints(g, other)]
        if platform[0] == "cpu":
            x, w = random_like(one)
            now, then = f(x, w), g(x, jax.device_put(in_turn(w), other[1].sharding))
            np.testing.assert_allclose(now[0], then[0], rtol=2e-5, atol=1e-6)
            np.testing.assert_allclose(in_turn(now[1]), then[1], rtol=2e-5, atol=1e-6)
    assert sum(h.sent_before for h in found) == totals[0] - totals[1] > 0
    assert "w of (d, 2, f) with P(None, 'model')" in found[0].advice


def test_parts_whose_product_has_a_gradient_by_its_input(platform):
    mesh = platform[1]

    def both(products):
        return jax.grad(lambda x, w: jnp.mean((x + products_of(products, x, w)) ** 2), (0, 1))

    def products_of(products, x, w):
        return of_three(products(x, w)).reshape(256, 64, -1).sum(-1)

    with jax.set_mesh(mesh):
        f, g = jax.jit(both(in_one(3))), jax.jit(both(apart(3)))
        given = [structs(mesh, [X, w]) for w in weights(3)]
        found = [h for h in hints(f, given[0]) if h.kind == "split"]
        totals = [testing.account(h, *args).total.wire_bytes for h, args in zip((f, g), given)]
    assert sum(h.sent_before for h in found) == totals[0] - totals[1] > 0


# -- joined ---------------------------------------------------------------------------------------


def stacked(*arrays):
    return jnp.stack(arrays, 1).reshape(-1, *arrays[0].shape[1:])


def joined(*arrays):
    return jnp.concatenate(arrays)


BATCH = ((256, 512), D)
MOVED = 3 * 64 * 512 * 4 // 4  # what a device sends of one batch
JOINS = {
    "two": (2, lambda join: lambda a, b: (jnp.tanh(join(a, b)) ** 2).mean(), 4 * MOVED),
    "three": (3, lambda join: lambda a, b, c: (join(a, jnp.sin(b), c) ** 2).mean(), 6 * MOVED),
    "itself": (1, lambda join: lambda a: (join(a, a) ** 2).mean(), 3 * MOVED),
    "gradient": (
        2,
        lambda join: jax.grad(lambda a, b: (jnp.tanh(join(a, b)) ** 2).mean()),
        8 * MOVED,  # and permutes of two thirds more for the gradient
    ),
}


# On JAX 0.12 what is sent has the name of what made it, not of what sends it.
def by_use(cases, *named):
    marks = [versions.where(versions.names_gathers_by_use)]
    return [pytest.param(name, marks=marks) if name in named else name for name in cases]


@pytest.mark.parametrize("name", by_use(JOINS, "gradient"))
def test_batches_of_which_each_device_keeps_its_rows(platform, name):
    count, of, sent = JOINS[name]
    before, after = of(joined), of(stacked)
    found = following(platform, before, after, [BATCH] * count, None, "reshape", (sent, 0))
    assert f"put {max(count, 2)} arrays" in found[0].advice


def test_the_first_part_again(cpu_mesh):
    """As the advice says, and in the order that the program had."""
    with jax.set_mesh(cpu_mesh):
        a, b = random_like(structs(cpu_mesh, [BATCH] * 2))
        y = stacked(a, b)
        np.testing.assert_array_equal(y.reshape(-1, 2, *y.shape[1:])[:, 0], a)


# -- sorted ---------------------------------------------------------------------------------------


def within(f, spec=COLUMNS):
    return lambda x: lax.with_sharding_constraint(f(lax.with_sharding_constraint(x, spec)), spec)


def places(x):
    return jnp.argsort(x, 0)


def ranked(x):
    return jnp.argsort(x, -1)


def best(x):
    return jnp.argsort(x, -1, descending=True)


BOTH = ("data", "model")
PART = 128 * 512 * 4
SENT = 3 * 256 * 256 * 4 // 4
SORTS = {
    "columns": (places, within(places), ((1024, 256), D), SENT),
    "rows": (ranked, within(ranked, P(BOTH)), ((512, 1024), P(*BOTH)), PART // 2),
    # It is turned, and so are the places, before and after.
    "best": (best, within(best, P(BOTH)), ((512, 1024), P(*BOTH)), PART // 2 + 3 * PART),
    "middle": (
        lambda x: jnp.argsort(x, 1),
        within(lambda x: jnp.argsort(x, 1), P(None, None, "data")),
        ((8, 512, 64), P(None, "data")),
        3 * 8 * 128 * 64 * 4 // 4,
    ),
}


@pytest.mark.sampled  # XLA for TPU takes some ten seconds for a sort
@pytest.mark.parametrize("name", by_use(SORTS, "best"))
def test_places_that_each_device_counts(platform, name):
    before, after, arg, sent = SORTS[name]
    if (platform[0], name) == ("tpu", "best"):
        sent += PART // 2  # it counts them once more, by which the sort is stable
    following(platform, before, after, [arg], arg[1], "counted", (sent, 0))


@pytest.mark.tpu
@pytest.mark.full
def test_places_by_which_a_sort_is_stable(tpu_mesh):
    sort = lambda x: jnp.sort(x, 0)  # noqa: E731
    args = [((1024, 256), D)]
    following(("tpu", tpu_mesh), sort, within(sort), args, D, "counted", (SENT, 0))


@pytest.mark.parametrize(
    "f, args",
    [
        (lambda x: jnp.sort(x, 0), [BATCH]),  # on CPU nothing is counted
        (lambda k, v: lax.sort((k, v), dimension=0, num_keys=1), [BATCH, BATCH]),
        (lambda x: jnp.argsort(x, 1), [BATCH]),
        (lambda x: jnp.argsort(x), [((4096,), D)]),  # gathered: there is no other dimension
        (lambda x: jnp.roll(x, 1, 0), [BATCH]),
        (lambda x: jnp.roll(x, 100, 0), [BATCH]),
        (lambda x: jnp.concatenate([jnp.zeros((1, 512)), x[:-1]]), [BATCH]),
        (lambda x, y: jnp.concatenate([x, y]), [BATCH, ((128, 512), D)]),
        (lambda x, y: jnp.concatenate([x, y], 1), [BATCH, BATCH]),
        (lambda x: jnp.split(x, 2, 1), [BATCH]),
        (lambda x: x[1:] - x[:-1], [BATCH]),
        (lambda x: jnp.pad(x, ((4, 4), (0, 0))), [BATCH]),
    ],
    ids="sort pairs rows flat roll roll_far shift unequal beside columns differences pad".split(),
)
def test_what_has_to_move_or_stays(cpu_mesh, f, args):
    with jax.set_mesh(cpu_mesh):
        found = {h.kind for h in hints(jax.jit(f), structs(cpu_mesh, args))}
    assert not found & {"split", "counted", "reshape"}
