"""Sums in a loop of which each device keeps a part, that are combined, or over two dimensions."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from costs.test_followed import Measured, assert_equal

pytestmark = pytest.mark.one_lane

WIDTH, STEPS, TRIPS = 128, 4, 40


def measured(mesh, f, *given):
    structs = [
        jax.ShapeDtypeStruct(shape, jnp.float32, sharding=NamedSharding(mesh, spec))
        for shape, spec in given
    ]
    with jax.set_mesh(mesh):
        return Measured(jax.jit(f).lower(*structs).compile())


def arrays(compiled, *shapes):
    draw = np.random.default_rng(0)
    placed = zip(shapes, compiled.input_shardings[0])
    return [jax.device_put(0.1 * draw.normal(size=s).astype(np.float32), p) for s, p in placed]


def loss(w, x):
    return (jnp.tanh(x @ w) ** 2).mean()


def sharded_update(w, g):
    g = lax.with_sharding_constraint(g, P("data"))
    w = lax.with_sharding_constraint(w, P("data")) - 0.1 * g
    return lax.with_sharding_constraint(w, P())


def microbatches(w, x):
    """Each device updates its part of the weight: ZeRO."""
    add = lambda g, x: (g + jax.grad(loss)(w, x), None)  # noqa: E731
    steps = x.reshape(-1, STEPS, WIDTH).swapaxes(0, 1)
    return sharded_update(w, lax.scan(add, jnp.zeros_like(w), steps)[0] / STEPS)


def apart(w, x):
    """As the advice says: each shard's own gradient in a carry that is sharded."""
    add = lambda g, x: (g + jax.vmap(jax.grad(loss), (None, 0))(w, x), None)  # noqa: E731
    steps = x.reshape(4, STEPS, -1, WIDTH).swapaxes(0, 1)
    start = lax.with_sharding_constraint(jnp.zeros((4, *w.shape)), P("data"))
    return sharded_update(w, jnp.mean(lax.scan(add, start, steps)[0], 0) / STEPS)


def test_a_gradient_of_which_each_device_keeps_its_part(cpu_mesh):
    given = ((WIDTH, 256), P()), ((64, WIDTH), P("data"))
    now, then = (measured(cpu_mesh, f, *given) for f in (microbatches, apart))
    (hint,) = (h for h in now.hints if h.kind == "accumulated")
    assert "jax.vmap(jax.grad(loss), (None, 0))(w, " in hint.advice
    sent, trips = now.promised(["accumulated"])
    assert now.sent - then.sent >= sent > 0.5 * now.sent and now.trips - then.trips >= trips > 0
    values = arrays(now.compiled, (WIDTH, 256), (64, WIDTH))
    assert_equal(now.compiled(*values), then.compiled(*values))


def test_a_part_of_another_place_on_each_trip_is_read(cpu_mesh):
    def rotated(w, x):
        def add(carry, x):
            i, total = carry
            g = jax.grad(loss)(w, x)
            return (i + 1, total + lax.dynamic_slice_in_dim(g, 32 * i, 32)), None

        steps = x.reshape(-1, STEPS, WIDTH).swapaxes(0, 1)
        return lax.scan(add, (0, jnp.zeros((32, 256))), steps)[0][1]

    now = measured(cpu_mesh, rotated, ((WIDTH, 256), P()), ((64, WIDTH), P("data")))
    assert now.sent and "accumulated" not in now.kinds


def stacked(of):
    def f(x):
        def body(x, _):
            x = jnp.sin(x)
            return x, of(x)

        return lax.scan(body, x, None, length=TRIPS)[1]

    return f


def test_a_part_of_a_combined_sum_stays_if_the_other_stays(cpu_mesh):
    """A histogram's sum is beside it in one all-reduce, and no advice is given on a histogram."""
    both = stacked(lambda x: (jnp.histogram(x, 16, (-1, 1))[0], x.sum()))
    alone = stacked(lambda x: x.sum())
    found = [measured(cpu_mesh, f, ((4096,), P("data"))).kinds for f in (both, alone)]
    assert found == [set(), {"after the loop"}]


def test_a_sum_over_two_dimensions_that_are_sharded(cpu_mesh):
    given = ((128, 128), P("data", "model"))
    now = measured(cpu_mesh, stacked(jnp.mean), given)
    assert now.hints and all(h.kind == "after the loop" for h in now.hints)
    said = "x.reshape(n, -1, m, x.shape[1] // m, *x.shape[2:]) over all but n and m"
    assert any(said in h.advice for h in now.hints)

    def followed(x):
        n, m = 4, 2
        own = lambda x: x.reshape(n, -1, m, x.shape[1] // m, *x.shape[2:]).mean((1, 3))  # noqa: E731
        return stacked(own)(x).mean((1, 2))

    then = measured(cpu_mesh, followed, given)
    sent, trips = now.promised(["after the loop"])
    assert now.trips - then.trips >= trips > 0 and not then.hints
    values = arrays(now.compiled, (128, 128))
    assert_equal(now.compiled(*values), then.compiled(*values))
