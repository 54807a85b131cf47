"""A few rows that are joined to many along a sharded dimension, for which XLA moves nearly all."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from costs.test_followed import Measured, assert_equal

pytestmark = pytest.mark.one_lane

KIND = "joined"
N = 256


def centred(x):
    return x[2:] - x[:-2]


JOINS = {
    "edges": lambda x: [x[:1], centred(x), x[-1:]],
    "edges of two rows": lambda x: [x[1:3], jnp.sin(x[2:-2]), x[-3:-1]],
    "before": lambda x: [x[-4:] * 2, jnp.sin(x[4:])],
    "behind": lambda x: [jnp.sin(x[:-1]), x[:1]],
}


def measured(f, mesh, spec):
    x = jax.ShapeDtypeStruct((N, N), jnp.float32, sharding=NamedSharding(mesh, spec))
    return Measured(jax.jit(f, out_shardings=x.sharding).lower(x).compile())


def advice(program):
    (first,) = (h for h in program.hints if h.kind == KIND and "goes away" not in h.advice)
    return first.advice


def followed(advice):
    """Return what the advice says to type for the arrays."""
    line, said = re.search(r"With (i = .*?), (jnp\.where\(.*\)) is the same", advice).groups()

    def join(arrays, axis):
        given = {"jnp": jnp, **dict(zip("abcdef", arrays))}
        exec(line, given)
        return eval(said, given)

    return join


def compared(platform, mesh, make, spec=P("data", "model"), axis=0):
    now = measured(lambda x: jnp.concatenate(make(x), axis), mesh, spec)
    join = followed(advice(now))
    then = measured(lambda x: join(make(x), axis), mesh, spec)
    sent, trips = now.promised([KIND])
    assert now.sent - then.sent >= sent > 0.5 * now.sent and now.trips - then.trips >= trips
    assert KIND not in then.kinds
    if platform == "cpu":
        values = np.random.default_rng(0).normal(size=(N, N)).astype(np.float32)
        values = jax.device_put(values, NamedSharding(mesh, spec))
        assert_equal(now.compiled(values), then.compiled(values))


@pytest.mark.parametrize("name", JOINS)
def test_pads_move_only_the_rows_that_change_their_device(platform, name):
    kind, mesh = platform
    if kind == "tpu":  # XLA moves the few rows alone
        f = lambda x: jnp.concatenate(JOINS[name](x))  # noqa: E731
        assert KIND not in measured(f, mesh, P("data", "model")).kinds
    else:
        compared(kind, mesh, JOINS[name])


@pytest.mark.parametrize("spec", [P("data"), P("model")])
def test_other_shardings(cpu_mesh, spec):
    compared("cpu", cpu_mesh, JOINS["edges"], spec)


def test_columns(cpu_mesh):
    make = lambda x: [x[:, -1:], jnp.sin(x[:, :-1])]  # noqa: E731
    compared("cpu", cpu_mesh, make, axis=1)


def test_a_gradient_of_rows(cpu_mesh):
    """What jnp.gradient joins isn't in the user's hands, but the advice can be typed for it."""
    spec = P("data", "model")
    now = measured(lambda x: jnp.gradient(x, axis=0), cpu_mesh, spec)
    join = followed(advice(now))
    parts = lambda x: [x[1:2] - x[:1], 0.5 * centred(x), x[-1:] - x[-2:-1]]  # noqa: E731
    then = measured(lambda x: join(parts(x), 0), cpu_mesh, spec)
    assert now.sent - then.sent >= now.promised([KIND])[0] > 0
    values = jax.device_put(np.ones((N, N), np.float32), NamedSharding(cpu_mesh, spec))
    assert_equal(now.compiled(values), then.compiled(values))


def test_a_line_that_joins_along_both_dimensions(cpu_mesh):
    now = measured(lambda x: jnp.hypot(*jnp.gradient(x)), cpu_mesh, P("data", "model"))
    first = [h for h in now.hints if h.kind == KIND and "goes away" not in h.advice]
    assert sorted(h.entry.axes for h in first) == [("data",), ("model",)]

    def both(x):
        rows = followed(next(h for h in first if h.entry.axes == ("data",)).advice)
        columns = followed(next(h for h in first if h.entry.axes == ("model",)).advice)
        down = rows([x[1:2] - x[:1], 0.5 * centred(x), x[-1:] - x[-2:-1]], 0)
        beside = [x[:, 1:2] - x[:, :1], 0.5 * centred(x.T).T, x[:, -1:] - x[:, -2:-1]]
        return jnp.hypot(down, columns(beside, 1))

    then = measured(both, cpu_mesh, P("data", "model"))
    assert now.sent - then.sent >= now.promised([KIND])[0] > 0.5 * now.sent
    values = np.random.default_rng(0).normal(size=(N, N)).astype(np.float32)
    values = jax.device_put(values, NamedSharding(cpu_mesh, P("data", "model")))
    assert_equal(now.compiled(values), then.compiled(values))


def test_two_in_one_line(cpu_mesh):
    def twice(join):
        return lambda x: join([x[:1], centred(x), x[-1:]], 0) * join([x[:1], -centred(x), x[:1]], 0)

    now = measured(twice(jnp.concatenate), cpu_mesh, P("data"))
    then = measured(twice(followed(advice(now))), cpu_mesh, P("data"))
    sent, trips = now.promised([KIND])
    assert now.sent - then.sent >= sent > 0.5 * now.sent and now.trips - then.trips >= trips


@pytest.mark.parametrize(
    "f",
    [
        lambda x: jnp.concatenate([x[: N // 2], jnp.sin(x[N // 2 :])]),  # not a few
        lambda x: jnp.concatenate([x[: N // 3], jnp.sin(x[N // 3 :])]),
        lambda x: jnp.roll(x, 1, 0),
        lambda x: jnp.pad(x[1:-1], ((1, 1), (0, 0))),
        lambda x: jnp.concatenate([x[:, :1], jnp.sin(x[:, 1:])], 1),  # along whole columns
    ],
    ids="halves thirds roll pad columns".split(),
)
def test_what_has_to_move_or_stays(cpu_mesh, f):
    assert KIND not in measured(f, cpu_mesh, P("data")).kinds
