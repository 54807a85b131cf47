"""Loops over the rows of a sharded array, of which each device makes all trips."""

import functools
import re
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from core import versions
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import shardrules
from costs.test_followed import Measured, assert_equal
from shardrules import install

pytestmark = pytest.mark.one_lane

KIND = "looped over"
ROWS, WIDTH = 256, 128


class Over(NamedTuple):
    """How a function of arrays, and of a part of others, is applied to each part."""

    map: Any  # of the function, the arrays and those that have parts, the results
    sum: Any  # their sum


def zeros(f, w, x):
    return jax.tree.map(lambda y: jnp.zeros(y.shape, y.dtype), jax.eval_shape(f, w, x))


def scanned(f, w, xs):
    add = lambda c, x: (jax.tree.map(jnp.add, c, f(w, x)), None)  # noqa: E731
    return lax.scan(add, zeros(f, w, xs[0]), xs)[0]


def counted(f, w, xs):
    part = lambda i: f(w, lax.dynamic_index_in_dim(xs, i, keepdims=False))  # noqa: E731
    add = lambda i, c: jax.tree.map(jnp.add, c, part(i))  # noqa: E731
    return lax.fori_loop(0, len(xs), add, zeros(f, w, xs[0]))


LOOPS = {
    "map": Over(lambda f, w, xs: lax.map(lambda x: f(w, x), xs), scanned),
    "batches": Over(lambda f, w, xs: lax.map(lambda x: f(w, x), xs, batch_size=16), scanned),
    "indices": Over(lambda f, w, xs: lax.map(lambda i: f(w, xs[i]), jnp.arange(len(xs))), counted),
    "reversed": Over(
        lambda f, w, xs: lax.scan(lambda c, x: (c, f(w, x)), None, xs, reverse=True)[1], scanned
    ),
}


def instead(mesh, advice):
    """Return what the advice says to type, both ways."""
    (at_once,) = re.findall(r"jax\.vmap\(f, \(None, 0\)\)\(w, xs\)", advice)
    (on_each,) = re.findall(r"jax\.shard_map\(lambda w, xs: .*\)\(w, xs\)", advice)
    for text in (at_once, on_each):
        given = {"jax": jax, "mesh": mesh, "P": P, "functools": functools}
        given["shardrules"] = shardrules

        def each(f, w, xs, text=text, given=given):
            return eval(text, given | {"f": f, "w": w, "xs": xs})

        yield Over(each, lambda *given, each=each: jax.tree.map(lambda y: y.sum(0), each(*given)))


def product(w, x):
    return jnp.tanh(x @ w)


def rows(over, x, w):
    return over.map(product, w, x)


def normalized(over, x, w):
    y = rows(over, x, w)
    return (y - y.mean(0)) / y.std(0)


def total(over, x, w):
    return over.sum(product, w, x)


def gradient(over, x, w):
    return jax.grad(lambda w: jnp.sum(rows(over, x, w) ** 2))(w)


def microbatches(over, x, w):
    grad = jax.grad(lambda w, batch: jnp.mean(product(w, batch) ** 2))
    return over.sum(grad, w, x.reshape(8, -1, WIDTH))


def checkpointed(over, x, w):
    each = jax.checkpoint(lambda w, batch: jnp.sum(product(w, batch) ** 2))
    return jax.value_and_grad(lambda w: over.sum(each, w, x.reshape(16, -1, WIDTH)))(w)


CASES = [
    *[(rows, loop) for loop in LOOPS],
    (normalized, "map"),
    *[(total, loop) for loop in ("map", "indices")],
    (gradient, "map"),
    *[(microbatches, loop) for loop in ("map", "indices")],
    (checkpointed, "map"),
]


def measured(mesh, f, spec=P("data"), **options):
    x = jax.ShapeDtypeStruct((ROWS, WIDTH), jnp.float32, sharding=NamedSharding(mesh, spec))
    w = jax.ShapeDtypeStruct((WIDTH, 16), jnp.float32, sharding=NamedSharding(mesh, P()))
    with jax.set_mesh(mesh), install():
        return Measured(jax.jit(f, **options).lower(x, w).compile())


def arrays(compiled):
    draw = np.random.default_rng(0)
    (x, w), _ = compiled.input_shardings
    x = jax.device_put(draw.normal(size=(ROWS, WIDTH)).astype(np.float32), x)
    return x, jax.device_put(0.1 * draw.normal(size=(WIDTH, 16)).astype(np.float32), w)


def compared(platform, mesh, program, loop, spec=P("data")):
    now = measured(mesh, lambda x, w: program(LOOPS[loop], x, w), spec)
    (first,) = (h for h in now.hints if h.kind == KIND and "goes away" not in h.advice)
    sent, trips = now.promised([KIND])
    assert sent > 0.4 * now.sent
    for over in instead(mesh, first.advice):
        then = measured(mesh, lambda x, w, over=over: program(over, x, w), spec)
        assert now.sent - then.sent >= sent and now.trips - then.trips >= trips
        assert KIND not in then.kinds
        if platform == "cpu":
            given = arrays(now.compiled)
            jax.tree.map(assert_equal, now.compiled(*given), then.compiled(*given))
    return first


@pytest.mark.parametrize("program, loop", CASES, ids=[f"{p.__name__}-{n}" for p, n in CASES])
def test_each_device_can_make_the_trips_of_its_own_rows(platform, program, loop):
    name, mesh = platform
    first = compared(name, mesh, program, loop)
    assert "test_looped_over.py:" in first.advice
    assert ("jnp.sum(..., axis=0)" in first.advice) == (
        program in (total, microbatches, checkpointed)
    )


def test_a_sum_of_its_own_rows_in_the_shard_map(cpu_mesh):
    """The advice for less memory, in brackets."""
    now = measured(cpu_mesh, lambda x, w: microbatches(LOOPS["map"], x, w))
    (hint,) = now.hints
    assert "(or, in the shard_map, jax.lax.psum of what a scan adds up, after" in hint.advice

    def summed(f, w, xs):
        return jax.shard_map(
            lambda w, xs: lax.psum(scanned(f, shardrules.vary(w, "data"), xs), "data"),
            mesh=cpu_mesh,
            in_specs=(P(), P("data")),
            out_specs=P(),
            axis_names={"data"},
        )(w, xs)

    then = measured(cpu_mesh, lambda x, w: microbatches(Over(None, summed), x, w))
    assert then.sent == hint.sent_after and then.trips == hint.round_trips_after
    given = arrays(now.compiled)
    assert_equal(now.compiled(*given), then.compiled(*given))


@pytest.mark.parametrize("spec", [P(("data", "model")), P("model")])
def test_other_shardings(cpu_mesh, spec):
    compared("cpu", cpu_mesh, rows, "map", spec)


def test_a_trip_that_computes_with_its_number(cpu_mesh):
    def of(over_numbers):
        def dropped(x, w, i):
            kept = jax.random.bernoulli(jax.random.fold_in(jax.random.key(0), i), 0.5, x.shape)
            return jnp.tanh((x * kept) @ w)

        return lambda x, w: over_numbers(lambda x, i: dropped(x, w, i), x)

    def loop(f, x):
        start = jnp.zeros(16)
        return lax.fori_loop(0, ROWS, lambda i, c: c + f(x[i], i), start)

    now = measured(cpu_mesh, of(loop))
    (hint,) = now.hints
    assert (
        hint.kind == KIND
        and "all that the loop slices (jnp.arange(256) for the trip" in hint.advice
    )
    then = measured(cpu_mesh, of(lambda f, x: jax.vmap(f)(x, jnp.arange(ROWS)).sum(0)))
    assert then.sent == hint.sent_after
    given = arrays(now.compiled)
    assert_equal(now.compiled(*given), then.compiled(*given))


def largest(x, w):
    return lax.scan(lambda c, r: (jnp.maximum(c, r @ w), None), jnp.zeros(16), x)[0]


def recurrent(x, w):
    return lax.scan(lambda c, r: (jnp.tanh(c + r @ w), None), jnp.zeros(16), x)[0]


def averaged(x, w):
    return lax.scan(lambda c, r: (0.9 * c + r @ w, c), jnp.zeros(16), x)


def with_the_next(x, w):
    return lax.map(lambda i: (x[i] - x[(i + 1) % ROWS]) @ w, jnp.arange(ROWS))


def read_in_another_order(x, w):
    def step(y, i):
        return lax.dynamic_update_index_in_dim(y, x[ROWS - 1 - i] @ w, i, 0), None

    return lax.scan(step, jnp.zeros((ROWS, 16)), jnp.arange(ROWS))[0]


def the_first_alone(x, w):
    return lax.map(lambda i: x[i] @ w, jnp.zeros(ROWS, jnp.int32))


def half(x, w):
    return lax.map(lambda i: x[i] @ w, jnp.arange(ROWS // 2))


def read_elsewhere(x, w):
    x = lax.with_sharding_constraint(x, P())
    return lax.map(lambda r: r @ w, x), x


def the_last_alone(x, w):
    return lax.scan(lambda c, r: (jnp.tanh(r @ w), None), jnp.zeros(16), x)[0]


def printed(x, w):
    def each(r):
        jax.debug.print("{}", r[0], ordered=False)
        return r @ w

    return lax.map(each, x)


def large_sums(x, w):
    return lax.scan(lambda c, r: (c + r[:, None] * r, None), jnp.zeros((WIDTH, WIDTH)), x)[0]


@pytest.mark.parametrize(
    "program",
    [
        *(largest, recurrent, averaged, with_the_next, read_in_another_order),
        *(the_first_alone, half, read_elsewhere, the_last_alone),
    ],
    ids=lambda program: program.__name__,
)
def test_loops_that_need_all_rows(platform, program):
    _, mesh = platform
    now = measured(mesh, program)
    assert now.sent and KIND not in now.kinds


def test_a_sum_that_is_larger_than_the_rows(cpu_mesh):
    """XLA for TPU and GPU gathers the rows again on each trip, which costs more."""
    now = measured(cpu_mesh, large_sums)
    assert now.sent and KIND not in now.kinds


def test_what_each_trip_prints(cpu_mesh):
    now = measured(cpu_mesh, printed)
    assert now.sent and KIND not in now.kinds


@versions.where(versions.names_gathers_by_use)
def test_a_gather_is_named_by_its_own_loop(platform):
    """JAX traces the slice once for all loops over arrays of a shape: its line is the first's."""
    name, mesh = platform
    # XLA for TPU and GPU gathers in the loop, for the line within it.
    within = f"test_looped_over.py:{product.__code__.co_firstlineno + 1} (product)"
    for over in ("map", "batches", "reversed"):
        now = measured(mesh, lambda x, w, over=LOOPS[over]: rows(over, x, w))
        (hint,) = now.hints
        assert f"the loop at {hint.entry.place} " in hint.advice or name != "cpu"
        assert f"the loop at {hint.entry.place} " in hint.advice or within in hint.entry.place


def test_what_needs_no_gather(cpu_mesh):
    by_columns = lambda x, w: lax.map(lambda r: jnp.tanh(r @ w), x)  # noqa: E731
    assert not measured(cpu_mesh, by_columns, P(None, "data")).hints
    spread = lambda x, w: rows(LOOPS["map"], x.reshape(-1, 8, WIDTH).swapaxes(0, 1), w)  # noqa: E731
    assert not measured(cpu_mesh, spread).hints
