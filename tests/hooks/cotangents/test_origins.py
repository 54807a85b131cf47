"""Where values of a small jaxpr come from: which inputs, along which axes they differ, what sums."""

import jax
import jax.numpy as jnp
import programs
import pytest
from jax import lax

import shardrules as sr
from hooks import bodies
from shardrules.door import internals
from shardrules.hooks.cotangents.origins import NOWHERE, Origin, Origins
from shardrules.hooks.install import state

X, W = Origin(frozenset({0}), frozenset({"data"})), Origin(frozenset({1}))
DATA, MODEL, NONE = frozenset({"data"}), frozenset({"model"}), frozenset()
BOTH = X | W


def origins(f, mesh, declared="", inputs=(X, W)):
    """Read ``f`` of an x that varies over data and a w that is invariant."""

    def look(x, w):
        jaxpr = jax.make_jaxpr(f)(x, w).jaxpr
        axes = frozenset(bodies.AXES)
        return Origins(internals.load(), state().opaque_call_of, axes, jaxpr, inputs, declared)

    return bodies.inside(mesh, look, ("data",), ())


def looped(x, w):
    return lax.fori_loop(0, 3, lambda i, c: (c[0] + w, c[0] * x), (w, w))[1]


def last_is_carried(x, w):
    return lax.scan(lambda c, t: (c + t, w[0]), jnp.zeros(()), x)[0]


D, M, DM = "data", "model", ("data", "model")

# What is asked, and of each output: the inputs, the axes along which it differs, those over which
# something was summed or moved, and the input and axis of what a collective brought.
CASES = {
    "each its own": (lambda x, w: (x, w), ({0}, {D}, {}, {}), ({1}, {}, {}, {})),
    "joined": (lambda x, w: x * w, ({0, 1}, {D}, {}, {})),
    "of a constant": (lambda x, w: jnp.sin(jnp.zeros(4)), ({}, {}, {}, {})),
    "a cast adds nothing": (lambda x, w: lax.pcast(w, D, to="varying"), ({1}, {}, {}, {})),
    "summed": (lambda x, w: lax.psum(x, D), ({0}, {}, {D}, {(0, D)})),
    "summed where it is equal": (lambda x, w: lax.psum(w, M), ({1}, {}, {M}, {(1, M)})),
    "equal to the largest": (lambda x, w: lax.pmax(x, D), ({0}, {}, {}, {(0, D)})),
    "gathered": (lambda x, w: lax.all_gather(x, D), ({0}, {}, {D}, {(0, D)})),
    "scattered": (lambda x, w: lax.psum_scatter(x, D, tiled=True), ({0}, {D}, {D}, {(0, D)})),
    "permuted": (lambda x, w: lax.ppermute(x, D, [(0, 1)]), ({0}, {D}, {D}, {(0, D)})),
    "where a device is": (lambda x, w: w * lax.axis_index(M), ({1}, {M}, {}, {})),
    "in a jit": (
        lambda x, w: jax.jit(lambda a, b: (b, a))(x, w),
        ({1}, {}, {}, {}),
        ({0}, {D}, {}, {}),
    ),
    "by a branch": (
        lambda x, w: lax.cond(x[0] > 0, lambda: w, lambda: w + 1),
        ({0, 1}, {D}, {}, {}),
    ),
    "by a loop's second pass": (looped, ({0, 1}, {D}, {}, {})),
    "by how often a loop runs": (
        lambda x, w: lax.while_loop(lambda c: c[0] < x[0], lambda c: c + w, w),
        ({0, 1}, {D}, {}, {}),
    ),
    "by a scan's carry": (last_is_carried, ({0}, {D}, {}, {})),
    "a number of devices": (lambda x, w: x + lax.psum(1.0, D), ({0}, {D}, {}, {})),
}


@pytest.mark.parametrize("name", CASES)
def test_what_a_value_comes_from(name, cpu_mesh, hooks):
    f, *want = CASES[name]
    found = origins(f, cpu_mesh).outputs
    assert [(o.inputs, o.axes, o.sums, o.crossed) for o in found] == [
        tuple(map(frozenset, one)) for one in want
    ]


@pytest.mark.parametrize(
    ("f", "number"),
    [
        (lambda x, w: jnp.full(4, 3.0), 3),
        (lambda x, w: lax.psum(1.0, "data") * jnp.ones(4), 4),
        (lambda x, w: lax.psum(jnp.full(4, 2.0), ("data", "model")), 16),
        (lambda x, w: jnp.zeros(4) / 5 - jnp.zeros(4), 0),
        (lambda x, w: x * jnp.zeros(4), 0),
        (lambda x, w: lax.psum(jnp.full(4, 3.0), "data") / lax.psum(jnp.ones(4), "data"), 3),
        (lambda x, w: jnp.full(4, 3.0) + w, None),
        (lambda x, w: jnp.sin(jnp.full(4, 3.0)), None),
    ],
)
def test_the_number_that_each_element_is(f, number, cpu_mesh, hooks):
    (one,) = origins(f, cpu_mesh).outputs
    assert one.number == number


@pytest.mark.parametrize(
    ("f", "axes", "origin", "divisors"),
    [
        (lambda x, w: lax.psum(x, "data"), DATA, X, set()),
        (lambda x, w: lax.psum(x, "data") / 4, DATA, X, {4}),
        (lambda x, w: lax.pmean(w, "data"), DATA, W, {4}),
        (lambda x, w: lax.psum(x / 8, "data").reshape(2, 2), DATA, X, {8}),
        (lambda x, w: lax.psum(x * 0.25, "data"), DATA, X, {4}),
        (lambda x, w: lax.psum(x / 2, "data") / 4 / 8, DATA, X, {2, 4, 8}),
        (lambda x, w: lax.psum(x, "data") / lax.psum(jnp.ones(()), "data"), DATA, X, {4}),
        (lambda x, w: jax.jit(lambda x: lax.psum(x, "data") / 4)(x), DATA, X, {4}),
        (lambda x, w: (lax.psum(x, "data") / 4, lax.psum(x, "data") / 2)[0], DATA, X, {4}),
        (
            lambda x, w: lax.psum(sr.vary(x + w, "model"), ("data", "model")),
            DATA | MODEL,
            BOTH,
            set(),
        ),
        (lambda x, w: lax.psum_scatter(x, "data", tiled=True), DATA, X, set()),
    ],
)
def test_what_is_summed_over_which_axes_and_by_what_it_is_divided(
    f, axes, origin, divisors, cpu_mesh, hooks
):
    one = origins(f, cpu_mesh).reductions[0]
    assert (one.axes, one.origin.inputs, one.origin.axes) == (axes, origin.inputs, origin.axes)
    assert one.divisors == divisors
    assert show(axes) in one.text


def show(axes):
    return "{" + ", ".join(sorted(axes)) + "}"


def test_a_sum_in_a_loop_is_one_reduction_of_all_that_passes(cpu_mesh, hooks):
    def f(x, w):
        return lax.fori_loop(0, 3, lambda i, c: lax.psum(c * x, "data") + w, w)

    (one,) = origins(f, cpu_mesh).reductions
    assert one.origin.inputs == {0, 1} and one.origin.sums == DATA


def test_what_scales_is_no_mean(cpu_mesh, hooks):
    found = origins(lambda x, w: (lax.psum(x, "data") / 4, x / 4, x.sum() / 4), cpu_mesh)
    assert found.divisions({4}) == 3
    assert found.mean_size == 4  # the last is over elements


def test_a_backward_pass_sums_gradients(cpu_mesh, hooks):
    def f(x, w):
        return jax.grad(lambda w: (lax.pcast(w, "data", to="varying") * x).sum())(w)

    (one,) = origins(f, cpu_mesh).outputs
    assert one.gradients == one.sums == DATA and 0 in one.inputs
    (one,) = origins(lambda x, w: lax.psum(x * w, "data"), cpu_mesh).outputs
    assert not one.gradients


def test_a_declared_cast_comes_from_nowhere_over_its_axis_alone(cpu_mesh, hooks):
    f = lambda x, w: sr.vary(w, "data")  # noqa: E731
    assert origins(f, cpu_mesh, "data").outputs == [NOWHERE]
    assert origins(f, cpu_mesh, "model").outputs == [W]
    written = lambda x, w: lax.pcast(w, "data", to="varying")  # noqa: E731
    assert origins(written, cpu_mesh, "data").outputs == [W]


@pytest.mark.parametrize(
    ("rule", "axes", "sums", "crossed"),
    [
        (sr.no_communication, {D}, {}, {}),
        (sr.permute(M), DM, {M}, {M}),
        (sr.all_reduce(D), {}, {D}, {D}),
        (sr.all_gather_invariant(D), {}, {D}, {D}),
        (sr.all_to_all(D), {D}, {D}, {D}),
        (sr.per_device(D), {D}, {D}, {D}),
    ],
)
def test_a_kernel_is_what_its_rule_says(rule, axes, sums, crossed, cpu_mesh, declared_only):
    op = programs.copy_op("cpu", kernel=lambda x_ref, o_ref: o_ref.__setitem__(..., x_ref[...]))
    with sr.rules({"<lambda>": rule}):
        (one,) = origins(lambda x, w: op(x.reshape(2, 2)), cpu_mesh).outputs
    assert (one.inputs, one.axes, one.sums) == ({0}, frozenset(axes), frozenset(sums))
    assert one.crossed == {(0, axis) for axis in crossed}


def test_a_store_to_a_ref_is_what_a_later_pass_reads(cpu_mesh, hooks):
    def f(x, w):
        ref = jax.new_ref(sr.vary(w, "data"))

        def step(i, c):
            c = c + ref[...]
            ref[...] = x
            return c

        return lax.fori_loop(0, 2, step, sr.vary(jnp.zeros(4), "data"))

    (one,) = origins(f, cpu_mesh).outputs
    assert one.inputs == {0, 1} and one.axes == DATA


def test_a_number_that_a_loop_carries_stays_known(cpu_mesh, hooks):
    def f(x, w, factor):
        return lax.scan(lambda n, t: (n * factor, t), jnp.float32(4), x)[0]

    (same,) = origins(lambda x, w: f(x, w, 1.0), cpu_mesh).outputs
    (grows,) = origins(lambda x, w: f(x, w, 2.0), cpu_mesh).outputs
    assert (same.number, grows.number) == (4, None)
