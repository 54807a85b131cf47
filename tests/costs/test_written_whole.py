"""A part of a sharded array that is written at a fixed place, for which XLA gathers all of it."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from costs.test_followed import Measured, assert_equal

pytestmark = pytest.mark.one_lane

KIND = "written whole"
N = 256


def by_both(mesh, shape=(N, N), spec=P("data", "model")):
    return jax.ShapeDtypeStruct(shape, jnp.float32, sharding=NamedSharding(mesh, spec))


def measured(f, x, out=None):
    return Measured(jax.jit(f, out_shardings=out or x.sharding).lower(x).compile())


def inner(x):
    return x[2:, 1:-1] - x[:-2, 1:-1] + x[1:-1, 2:] * x[1:-1, :-2]


# What is written, and how; the advice says how to write it instead.
WRITES = {
    "set": (inner, lambda x, v: x.at[1:-1, 1:-1].set(v)),
    "add": (inner, lambda x, v: x.at[1:-1, 1:-1].add(v)),
    "max": (inner, lambda x, v: x.at[1:-1, 1:-1].max(v)),
    "a slice": (inner, lambda x, v: lax.dynamic_update_slice(x, v, (1, 1))),
    "rows": (lambda x: x[2:] - x[:-2], lambda x, v: x.at[1:-1].set(v)),
    "all but the last": (lambda x: x[3:], lambda x, v: x.at[:-3].set(v)),
    "all but the first": (lambda x: jnp.sin(x)[:-1], lambda x, v: x.at[1:].multiply(v)),
    "a number": (lambda x: 2.0, lambda x, v: x.at[1:-1, 1:-1].set(v)),
    "a number for a half": (lambda x: 2.0, lambda x, v: x.at[: N // 2].set(v)),
    "a number for rows": (lambda x: 2.0, lambda x, v: x.at[1:-1].multiply(v)),
}


def followed(advice):
    """Return what the advice says to type for x and v."""
    indices, padded, said = re.search(
        r"With (.*), and v = (jnp\.pad\(.*?\]\)) if v is an array, x = (jnp\.where\(.*\)) is the "
        r"same",
        advice,
    ).groups()

    def write(x, v):
        given = {"jnp": jnp, "x": x, "v": v}
        given["v"] = eval(padded, given) if isinstance(v, jax.Array) else v
        for line in indices.split(" and "):
            exec(line, given)
        return eval(said, given)

    return write


def compared(platform, x, make, write):
    now = measured(lambda x: write(x, make(x)), x)
    (first,) = (h for h in now.hints if h.kind == KIND and "goes away" not in h.advice)
    instead = followed(first.advice)
    then = measured(lambda x: instead(x, make(x)), x)
    sent, trips = now.promised([KIND])
    assert now.sent - then.sent >= sent > 0.9 * now.sent and now.trips - then.trips >= trips
    assert KIND not in then.kinds
    if platform == "cpu":
        values = np.random.default_rng(0).normal(size=x.shape).astype(np.float32)
        values = jax.device_put(values, x.sharding)
        assert_equal(now.compiled(values), then.compiled(values))
    return first.advice


@pytest.mark.parametrize("kind", WRITES)
def test_a_mask_and_a_pad_move_only_the_rows_at_borders(platform, kind):
    name, mesh = platform
    advice = compared(name, by_both(mesh), *WRITES[kind])
    method = {"a slice": "jax.lax.dynamic_update_slice(x, v, (1, 1))", "rows": "x.at[1:255, :].set"}
    assert method.get(kind, "x.at[") in advice
    # As the write does, what is typed keeps the dtype of x.
    make, _ = WRITES[kind]
    narrow = jax.ShapeDtypeStruct((N, N), jnp.bfloat16)
    wide = jax.ShapeDtypeStruct((N, N), jnp.float32)
    kept = jax.eval_shape(lambda x, y: followed(advice)(x, make(y)), narrow, wide)
    assert kept.dtype == narrow.dtype


def test_into_an_array_of_zeros(cpu_mesh):
    """XLA for TPU and GPU makes a pad of it, before it partitions that."""
    x = by_both(cpu_mesh)

    def of(write):
        return lambda x: x + 0.1 * write(jnp.zeros_like(x), inner(x))

    now = measured(of(WRITES["set"][1]), x)
    (first,) = (h for h in now.hints if h.kind == KIND and "goes away" not in h.advice)
    then = measured(of(followed(first.advice)), x)
    by_hand = measured(of(lambda _, v: jnp.pad(v, 1)), x)
    assert now.sent - max(then.sent, by_hand.sent) >= now.promised([KIND])[0] > 0.9 * now.sent
    values = jax.device_put(np.ones((N, N), np.float32), x.sharding)
    assert_equal(now.compiled(values), then.compiled(values))


@pytest.mark.parametrize("spec", [P("data"), P(("data", "model")), P("model", "data")])
def test_other_shardings(cpu_mesh, spec):
    advice = compared("cpu", by_both(cpu_mesh, spec=spec), *WRITES["set"])
    assert "'data'" in advice


def test_three_dimensions_of_which_one_is_not_sharded(cpu_mesh):
    x = by_both(cpu_mesh, (8, N, 64), P(None, "data", "model"))
    make = lambda x: x[:, 2:] - x[:, :-2]  # noqa: E731
    advice = compared("cpu", x, make, lambda x, v: x.at[:, 1:-1].set(v))
    assert "With i = jnp.arange(256)[:, None], and v = jnp.pad(v.astype(x.dtype), [(0, 0)" in advice


def stepped(write):
    def step(x, _):
        return write(x, 0.1 * inner(x)), (x * x).sum()

    return lambda x: lax.scan(step, x, None, length=5)[0]


def test_in_a_loop_and_in_its_gradient(cpu_mesh):
    x = by_both(cpu_mesh)

    def trained(write):
        return jax.grad(lambda x: jnp.sum(jnp.sin(stepped(write)(x))))

    for of in (stepped, trained):
        now = measured(of(WRITES["add"][1]), x)
        sent, _ = now.promised([KIND])
        (first, *_) = (h for h in now.hints if h.kind == KIND and "goes away" not in h.advice)
        then = measured(of(followed(first.advice)), x)
        assert now.sent - then.sent >= sent > now.sent // 4
        values = jax.device_put(np.full((N, N), 0.01, np.float32), x.sharding)
        assert_equal(now.compiled(values), then.compiled(values))


def at_a_computed_place(x):
    return lax.dynamic_update_slice(x, inner(x), (x[0, 0].astype(jnp.int32), 1))


def read_elsewhere(x):
    whole = lax.with_sharding_constraint(x, P())
    return whole.at[1:-1, 1:-1].set(whole[1:-1, 1:-1] @ whole[1:-1, 1:-1])


def made_whole(x):
    """The program's own constraint gathers it, and would with a mask, too."""
    whole = lax.with_sharding_constraint(jnp.cos(x), P())
    return lax.with_sharding_constraint(whole.at[1:-1].set(2.0), P("data", "model"))


SILENT = {
    "made whole": made_whole,
    "half of the array": lambda x: x.at[: N // 2].set(jnp.sin(x[: N // 2])),
    "every other row": lambda x: x.at[::2].set(jnp.sin(x[::2])),
    "at a computed place": at_a_computed_place,
    "an edge": lambda x: x.at[0].set(x[1]).at[-1].set(0.0),
    "read elsewhere": read_elsewhere,
}


@pytest.mark.parametrize("kind", SILENT)
def test_other_writes_have_no_hint(cpu_mesh, kind):
    with jax.set_mesh(cpu_mesh):
        assert KIND not in measured(SILENT[kind], by_both(cpu_mesh)).kinds


def test_a_result_that_is_returned_whole(cpu_mesh):
    """XLA writes into each device's part all the same, and gathers the result once more."""
    make, write = WRITES["set"]
    x, whole = by_both(cpu_mesh), NamedSharding(cpu_mesh, P())
    now = measured(lambda x: write(x, make(x)), x, whole)
    (first,) = (h for h in now.hints if h.kind == KIND and "goes away" not in h.advice)
    then = measured(lambda x: followed(first.advice)(x, make(x)), x, whole)
    assert now.sent - then.sent >= now.promised([KIND])[0] > 0
