"""A body whose Python counts its traces: values and the count are those of the check off.

JAX traces what is jitted, and the body of a loop, once. With the check on it may do so more often.
"""

import collections
import functools
import itertools
import os
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import shardrules
from shardrules.hooks import shard_map
from shardrules.unchecked.sites import OLDER

X = np.random.RandomState(0).rand(8, 6).astype(np.float32)
W = np.random.RandomState(1).rand(6).astype(np.float32)


COUNTS = "it changes Python state by how often its functions are traced"
BY_TYPE = "its Python changes other state, or computes with other numbers, with the check on"


def op_of(fwd, bwd, primal=lambda w: w):
    op = jax.custom_vjp(lambda w: primal(w))
    op.defvjp(lambda w: (fwd(w), None), lambda _, g: (bwd(g),))
    return op


def in_a_scan(op):
    step = lambda c, w: (jnp.tanh(c * op(w)), None)  # noqa: E731
    return lambda x, w: jax.lax.scan(step, x, jnp.stack([w, w]))[0]


def in_a_branch(scaled):
    same = lambda w: w  # noqa: E731
    return lambda x, w: x * jax.lax.cond(jnp.sum(w) > 0, scaled, same, w)


def plain(w):
    return w


# From a function that multiplies by a new number at each of its traces to a body.
LEFT = {
    "jit": lambda scaled: functools.partial(lambda g, x, w: x * g(w), jax.jit(scaled)),
    "scan": in_a_scan,
    "branch": in_a_branch,
    "remat": lambda scaled: functools.partial(lambda g, x, w: x * g(w), jax.checkpoint(scaled)),
    "jit in a bwd": lambda scaled: lambda x, w: x * op_of(plain, jax.jit(scaled))(w),
    "a jit in fwd, another in the primal": lambda scaled: functools.partial(
        lambda op, x, w: x * op(w), op_of(jax.jit(scaled), plain, jax.jit(lambda w: 2 * scaled(w)))
    ),
    "bwd in a scan": lambda scaled: in_a_scan(op_of(plain, scaled)),  # the casts read the bwd
}
SWITCHED = {
    "body": lambda scaled: lambda x, w: x * scaled(w),
    "new jit": lambda scaled: lambda x, w: x * jax.jit(lambda w: scaled(w))(w),
    "fwd": lambda scaled: functools.partial(lambda op, x, w: x * op(w), op_of(scaled, plain)),
    "bwd": lambda scaled: functools.partial(lambda op, x, w: x * op(w), op_of(plain, scaled)),
}


def scalar(f):
    return lambda x, w: jnp.sum(jnp.sin(f(x, w)))


ASKED = {
    "forward": lambda f: jax.jit(f)(X, W),
    "fewer rows": lambda f: jax.jit(f)(X[:4], W),
    "gradient": lambda f: jax.jit(jax.grad(scalar(f), (0, 1)))(X, W),
    "second": lambda f: jax.jit(
        jax.grad(lambda x, w: jnp.sum(jax.grad(scalar(f), 1)(x, w) ** 2), 1)
    )(X, W),
}
ORDERS = (
    ("forward", "gradient"),
    ("gradient", "forward"),
    ("gradient", "second"),
    ("forward", "fewer rows", "forward"),
)


def results(mesh, make, order):
    """Return what is asked for in that order, and the next number."""
    numbers = [0]

    def number():
        numbers[0] += 1
        return numbers[0]

    body = make(lambda w: w * number())
    f = lambda *args: shard_map(body, mesh, (P("data"), P()), P("data"), check=False)(*args)  # noqa: E731
    return [jax.tree_util.tree_map(np.asarray, ASKED[asked](f)) for asked in order], number()


def compared(mesh, make, order, without_hooks=True):
    """Compare with the hooks and with the check on; return the sites' reasons."""
    shardrules.install().uninstall(ops=True)
    expected = results(mesh, make, order)
    with shardrules.install():
        bare = results(mesh, make, order)
    with shardrules.install(unchecked="check") as handle:
        checked = results(mesh, make, order)
    for a, b in ((bare, checked), (expected if without_hooks else bare, bare)):
        jax.tree_util.tree_map(lambda a, b: np.testing.assert_allclose(a, b, 1e-5, 1e-6), a, b)
    return {site.reason.partition(":")[0] for site in handle.unchecked()}


@pytest.mark.sampled
@pytest.mark.parametrize("order", ORDERS, ids="-".join)
@pytest.mark.parametrize("kind", LEFT)
def test_a_site_whose_traces_jax_counts_is_left(cpu_mesh, kind, order):
    # Of a bwd in a scan the count may differ with the check on only, by JAX's version.
    reasons = {COUNTS, BY_TYPE} if kind == "bwd in a scan" else {COUNTS}
    # JAX 0.12 takes a loop's bwd from its cache; with the hooks, one for each order of derivatives.
    same = (kind, order[-1]) != ("bwd in a scan", "second")
    (why,) = compared(cpu_mesh, LEFT[kind], order, same)
    assert why in reasons


@pytest.mark.parametrize("order", ORDERS, ids="-".join)
@pytest.mark.parametrize("kind", SWITCHED)
def test_a_site_that_is_traced_as_often_is_switched(cpu_mesh, kind, order):
    assert compared(cpu_mesh, SWITCHED[kind], order) == {""}


def test_a_cached_function_that_changes_state_is_called_by_no_other_look(cpu_mesh):
    """What a look adds to a cache that isn't empty can't be taken out of it."""

    def make(scaled):
        asked = [0]

        @functools.lru_cache
        def scale(n):
            return float(scaled(1.0))

        def body(x, w):
            asked[0] += 1
            return x * w * scale(asked[0])

        return body

    order = ("forward", "fewer rows", "gradient")
    assert compared(cpu_mesh, make, order) == {COUNTS, "it can't be looked at"}


# From a function that multiplies by a Python variable's number to a body.
READ_ONCE = "jit", "scan", "branch", "remat"
OF_A_VARIABLE = {**{kind: LEFT[kind] for kind in READ_ONCE}, **SWITCHED}
CHANGES = (
    (("forward", 1.0), ("gradient", 3.0), ("gradient", 1.0), ("forward", 3.0)),
    (("gradient", 1.0), ("forward", 3.0), ("gradient", 3.0)),
    (("gradient", 2.0), ("gradient", 2.0), ("second", 3.0), ("forward", 2.0)),
)


@pytest.mark.sampled
@pytest.mark.parametrize("changes", CHANGES, ids=lambda c: "-".join(asked for asked, _ in c))
@pytest.mark.parametrize("kind", OF_A_VARIABLE)
def test_a_variable_that_changes_is_read_when_jax_reads_it(cpu_mesh, kind, changes):
    """JAX keeps its first trace of a jitted function, or of a loop's body, for each type."""

    def results():
        variable = {}
        body = OF_A_VARIABLE[kind](lambda w: w * variable["scale"])
        f = shard_map(body, cpu_mesh, (P("data"), P()), P("data"), check=False)
        for asked, variable["scale"] in changes:
            yield jax.tree_util.tree_map(np.asarray, ASKED[asked](lambda *args: f(*args)))

    shardrules.install().uninstall(ops=True)
    expected = [*results()]
    with shardrules.install(unchecked="check") as handle:
        checked = [*results()]
    jax.tree_util.tree_map(
        lambda a, b: np.testing.assert_allclose(a, b, 1e-5, 1e-6), expected, checked
    )
    reasons = {site.reason for site in handle.unchecked()}
    assert reasons == ({"", OLDER} if kind in READ_ONCE else {""})


def test_what_is_filled_once_is_no_count(cpu_mesh):
    """A table that a body fills, as libraries have."""

    def make(scaled):
        made = {}

        def body(x, w):
            if "scale" not in made:
                made["scale"] = float(next(itertools.count(3)))
            return x * w * made["scale"]

        return body

    assert compared(cpu_mesh, make, ORDERS[0]) == {""}


def counted_by_the_body(x, w):
    seen = []

    def step(c, v):
        seen.append(v)
        return c * v, None

    out, _ = jax.lax.scan(step, w, jnp.stack([x[0], x[0]]))
    return x * out * float(len(seen) + 4)


def a_power_of_it(x, w):
    seen = []

    @jax.jit
    def power(v):
        seen.append(v)
        return v ** (len(seen) + 2)

    return power(x) * power(jnp.broadcast_to(w, x.shape))


def counted_by_a_bwd(x, w):
    def bwd(saved, g):
        seen = []

        @jax.jit
        def scaled(t):
            seen.append(t)
            return t * float(len(seen) + 6)

        return scaled(saved[0]) * 0 + scaled(g) * saved[1], g * saved[0]

    op = jax.custom_vjp(lambda a, b: a * b)
    op.defvjp(lambda a, b: (a * b, (a, b)), bwd)
    return op(jnp.broadcast_to(w, x.shape), x)


@pytest.mark.parametrize("body", [counted_by_the_body, a_power_of_it, counted_by_a_bwd])
def test_a_counter_that_is_made_in_the_body_is_no_state_and_is_seen(cpu_mesh, body):
    """Nothing can put it back, and it begins anew: the program's numbers tell."""
    for order in ORDERS[:2]:
        assert compared(cpu_mesh, lambda _: body, order) == {BY_TYPE}


def varies(x):
    return "V" in str(jax.typeof(x))


TYPES = []


@pytest.mark.parametrize(
    "body",
    [
        lambda x, w: x * w * (2.0 if varies(x) else 1.0),
        lambda x, w: x * w * (TYPES.append(str(jax.typeof(x))) or 1.0),
    ],
)
def test_a_body_that_reads_a_type_is_not_said_to_count_traces(cpu_mesh, body):
    with shardrules.install(unchecked="check") as handle:
        jax.jit(shard_map(body, cpu_mesh, (P("data"), P()), P("data"), check=False))(X, W)
    (site,) = handle.unchecked()
    assert site.reason.partition(":")[0] == BY_TYPE and "by the type of a value" in site.reason


FLAGS = types.SimpleNamespace(on=False)


def by_a_flag(x, w):
    return x * w * (2.0 if FLAGS.on and varies(x) else 1.0)


def by_the_environment(x, w):
    return x * w * (2.0 if os.getenv("A_FLAG_OF_A_TEST") and varies(x) else 1.0)


def by_a_flag_in_its_bwd(x, w):
    op = jax.custom_vjp(lambda a, b: a * b)
    twice = lambda g: 2 * g if FLAGS.on and varies(g) else g  # noqa: E731
    op.defvjp(lambda a, b: (a * b, (a, b)), lambda saved, g: (twice(g * saved[1]), g * saved[0]))
    return op(x, jnp.broadcast_to(w, x.shape))


@pytest.mark.parametrize("body", [by_a_flag, by_the_environment, by_a_flag_in_its_bwd])
def test_a_value_that_is_read_with_a_type_is_asked_again(cpu_mesh, monkeypatch, body):
    """With the check off the programs are one, whatever the value: no type varies there."""
    told = []
    with shardrules.install(unchecked="check") as handle:
        mapped = shard_map(body, cpu_mesh, (P("data"), P()), P("data"), check=False)
        for on in False, True, False:
            monkeypatch.setattr(FLAGS, "on", on)
            monkeypatch.setenv("A_FLAG_OF_A_TEST", "1" if on else "")
            seen = collections.Counter(handle.unchecked())
            gradient = jax.jit(jax.grad(lambda x, w: mapped(x, w).sum()))(X, W)
            np.testing.assert_array_equal(gradient, jnp.broadcast_to(W, X.shape))
            told.append([site.switched for site in collections.Counter(handle.unchecked()) - seen])
    assert told == [[True], [False], []]
