"""The cotangent of an invariant output is the sum over all devices: who may hand it on, and to what.

Every program is executed on four devices along ``data`` and two along ``model``; x is split over
``data``, and w is the same on all devices.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P
from jax.tree_util import SequenceKey
from raising import raises

import shardrules as sr
from core import kernels, versions
from shardrules import errors

X = np.arange(1, 9, dtype=np.float32)
W = np.float32(2)
MEAN = X.sum() / 4  # the derivative of the mean over data of w x
pytestmark = pytest.mark.usefixtures("hooks")
typed = versions.where(versions.types_values)


def op_of(fwd, bwd, **options):
    op = jax.custom_vjp(lambda *args: fwd(*args)[0])
    op.defvjp(fwd, bwd, **options)
    return op


def gradient(body, mesh, check=True):
    """The gradient of w, of what a body returns that is the same on all devices."""
    f = versions.shard_map(body, mesh=mesh, in_specs=(P(), P("data")), out_specs=P(), check=check)
    return jax.jit(jax.grad(lambda w: f(w, X).sum()))(W)


def mean(value):
    return lax.pmean(value, "data")


def total(value):
    return lax.psum(value, "data")


def with_loss(op, value=mean):
    """A body that calls an op with the mean of the devices' losses, and this device's loss."""

    def body(w, x):
        loss = (w * x).sum()
        return op(value(loss), loss)

    return body


def replace_gradient():
    return op_of(lambda value, loss: (value, None), lambda _, g: (jnp.zeros_like(g), g))


def in_a_loop(w, x):
    step = lambda c, one: (c + replace_gradient()(mean(w * one), w * one), None)  # noqa: E731
    return lax.scan(step, mean(x.sum() - x.sum()), x)[0]


def nested():
    inner = replace_gradient()
    return op_of(lambda value, loss: (inner(value, loss), None), lambda _, g: (0 * g, g))


def saved_pullback():
    inner = replace_gradient()
    return op_of(lambda *args: jax.vjp(inner, *args), lambda pullback, g: pullback(g))


def scaled():
    """Plain JAX accepts it: what is returned varies, and each device gets the whole all the same."""
    return op_of(lambda value, loss: (value, loss), lambda loss, g: (0 * g, g * loss / loss))


def moved_and_multiplied_by_zero():
    return op_of(lambda value, loss: (value + 0 * total(loss), None), lambda _, g: (0 * g, g))


def moved_for_a_residual():
    fwd = lambda value, loss: (value, total(loss / 4))  # noqa: E731
    return op_of(fwd, lambda own, g: (0 * g, g * own / own))


def of_another_primal():
    """The output is made of the first by a psum; its cotangent is handed to the second."""
    return op_of(lambda one, other: (total(one), None), lambda _, g: (jnp.zeros_like(g), g))


STAND_INS = {
    "value": with_loss(replace_gradient()),
    "scaled": with_loss(scaled()),
    "sum": with_loss(replace_gradient(), total),
    "jit": with_loss(jax.jit(replace_gradient())),
    "checkpoint": jax.checkpoint(with_loss(replace_gradient())),
    "vmap": lambda w, x: jax.vmap(replace_gradient())(mean(w * x), w * x).sum(),
    "nested": with_loss(nested()),
    "pullback": with_loss(saved_pullback()),
    "multiplied by zero": with_loss(moved_and_multiplied_by_zero()),
    "residual": with_loss(moved_for_a_residual()),
    "another primal": lambda w, x: of_another_primal()((w * x).sum() / 4, (w * x).sum()),
    "weight": lambda w, x: op_of(lambda w, a: (w, None), lambda _, g: (0 * g, g))(w, (w * x).sum()),
}


@pytest.mark.parametrize("name", STAND_INS)
def test_the_sum_of_all_cotangents_is_not_handed_to_each_device(name, cpu_mesh):
    """Four times the gradient that the check off gives, silently."""
    body = STAND_INS[name]
    assert gradient(body, cpu_mesh, check=False) == MEAN
    with raises(errors.CotangentError, problem="unmoved", axes={"data"}, path=(SequenceKey(1),)):
        gradient(body, cpu_mesh)


@typed
def test_stand_in_inside_a_loop(cpu_mesh):
    """JAX 0.4.28 types the carry of such a loop otherwise."""
    assert gradient(in_a_loop, cpu_mesh, check=False) == MEAN
    with raises(errors.CotangentError, problem="unmoved"):
        gradient(in_a_loop, cpu_mesh)


@pytest.mark.parametrize("axes", [("model",), ("data",)])
def test_what_the_forward_moves_over_one_axis_is_not_moved_over_the_other(axes, cpu_mesh):
    """Eight devices along two axes: moved over one of them, the whole comes over the other."""
    (other,) = {"data", "model"} - {*axes}

    def body(w, x):
        part = (w * x).sum() * (1.0 + lax.axis_index("model"))
        op = op_of(
            lambda part, whole: (lax.psum(lax.psum(part, axes) / 2, other) + whole, None),
            lambda _, g: (g, g),
        )
        stand_in = op_of(lambda part, value: (value, None), lambda _, g: (g, 0 * g))
        value = lax.psum(part, ("data", "model"))
        return op(part, value) + stand_in(lax.psum(part, axes), value)

    with pytest.raises(errors.CotangentError) as caught:
        gradient(body, cpu_mesh)
    assert caught.value.axes == {other}


def test_an_invariant_output_beside_one_that_varies(cpu_mesh):
    op = op_of(lambda value, loss: ((value, loss), None), lambda _, g: (0 * g[0], g[0] + g[1]))

    def body(w, x):
        value, own = with_loss(op)(w, x)
        return value + mean(own)

    with raises(errors.CotangentError, problem="unmoved"):
        gradient(body, cpu_mesh)


def test_a_forward_that_cannot_be_traced_again(cpu_mesh):
    """Whether it moves the primal is not known: this one doesn't."""
    runs = []

    def fwd(value, loss):
        runs.append(value)
        if len(runs) > 1:
            raise RuntimeError("once")
        return value, None

    op = jax.custom_vjp(lambda value, loss: value)
    op.defvjp(fwd, lambda _, g: (0 * g, g))
    with pytest.raises(errors.CotangentError, match="can't be traced again"):
        gradient(with_loss(op), cpu_mesh)


def softmax_loss(divide=lambda g: g):
    """A loss that averages over the devices and saves its own gradient, as fused losses do."""
    return op_of(
        lambda x: (mean(jax.nn.logsumexp(x)), jax.nn.softmax(x)), lambda p, g: (divide(g) * p,)
    )


AVERAGED = {
    "pmean": (mean, lambda g: g),
    "by a literal": (lambda x: total(x) / 4, lambda g: g),
    "divided before": (lambda x: total(x / 4), lambda g: g),
    "times a fraction": (lambda x: total(x) * 0.25, lambda g: g),
    "by a count": (lambda x: total(x) / lax.psum(jnp.ones(()), "data"), lambda g: g),
    "in steps": (lambda x: total(x) / 2 / 2, lambda g: g),
    "over elements too": (lambda x: total(jnp.stack([x, x]).sum()) / 8, lambda g: g),
    "of a negated": (lambda x: -total(-x) / 4, lambda g: g),
    "square of a mean": (lambda x: mean(x) ** 2, lambda g: 2 * g),
    "rounded": (lambda x: jnp.round(mean(x)), lambda g: g),
    "jit": (jax.jit(mean), jax.jit(lambda g: g)),
    "loop": (lambda x: lax.fori_loop(0, 2, lambda _, c: c + mean(x), 0 * mean(x)), lambda g: g),
}


@pytest.mark.parametrize("name", AVERAGED)
def test_the_cotangent_of_a_mean_is_divided(name, cpu_mesh):
    """Right with the check off; with it on, each device would get all devices' cotangents."""
    forward, backward = AVERAGED[name]
    op = op_of(lambda x: (forward(x), None), lambda _, g: (backward(g),))
    with raises(errors.CotangentError, problem="averaged"):
        gradient(lambda w, x: op((w * x).sum()), cpu_mesh)


def test_a_fused_loss_that_averages(cpu_mesh):
    body = lambda op: lambda w, x: op(w * x)  # noqa: E731
    want = gradient(body(lambda x: mean(jax.nn.logsumexp(x))), cpu_mesh)
    assert gradient(body(softmax_loss()), cpu_mesh, check=False) == pytest.approx(want)
    with raises(errors.CotangentError, problem="averaged"):
        gradient(body(softmax_loss()), cpu_mesh)
    divided = softmax_loss(lambda g: g / lax.psum(1, "data"))
    assert gradient(body(divided), cpu_mesh) == pytest.approx(want)


@typed  # without types, the pullback's transpose sums again
def test_the_pullback_of_a_fused_loss_that_averages(cpu_mesh):
    body = lambda op: lambda w, x: op(w * x)  # noqa: E731
    want = gradient(body(lambda x: mean(jax.nn.logsumexp(x))), cpu_mesh)
    pullback = op_of(
        lambda x: jax.vjp(lambda x: mean(jax.nn.logsumexp(x)), x), lambda pullback, g: pullback(g)
    )
    assert gradient(body(pullback), cpu_mesh) == pytest.approx(want)


BOTH = {
    "at once": lambda x: lax.pmean(x, ("data", "model")),
    "one by one": lambda x: lax.pmean(lax.pmean(x, "data"), "model"),
}


@typed
@pytest.mark.parametrize("name", BOTH)
@pytest.mark.parametrize("divisor", [8, 4, 2, 1])
def test_a_mean_over_two_axes_is_divided_by_both(name, divisor, cpu_mesh):
    op = op_of(lambda x: (BOTH[name](x), None), lambda _, g: (g / divisor,))

    def body(w, x):
        return op((w * x).sum() * (1.0 + lax.axis_index("model")))

    if divisor == 8:
        assert gradient(body, cpu_mesh) == 1.5 * MEAN
        return
    with raises(errors.CotangentError, problem="averaged"):
        gradient(body, cpu_mesh)


def squares(local, divide, saved=lambda x: x):
    """The mean over data of the mean of squares, its elements averaged in two ways."""
    return op_of(lambda x: (mean(local(x)), saved(x)), lambda x, g: (divide(2 * x * g),))


OF_ELEMENTS = {
    "two divisions": lambda ct: ct / 2,
    "one division": lambda ct: ct / 2,
    "saved": lambda ct: ct,
    "four elements": lambda ct: ct * 2 / 4,
}
HALVES = {
    "two divisions": (lambda x: jnp.mean(x**2), lambda ct: ct / 2 / 4, lambda x: x),
    "one division": (lambda x: (x**2).sum() / 2, lambda ct: ct / 8, lambda x: x),
    "saved": (lambda x: jnp.mean(x**2), lambda ct: ct / 4, lambda x: x / 2),
    "four elements": (lambda x: jnp.mean(jnp.tile(x**2, 2)), lambda ct: ct * 2 / 16, lambda x: x),
}


@pytest.mark.parametrize("name", HALVES)
def test_a_mean_over_elements_and_devices(name, cpu_mesh):
    local, divide, saved = HALVES[name]
    body = lambda op: lambda w, x: op(w * x)  # noqa: E731
    want = 2 * W * (X**2).mean()
    assert gradient(body(squares(local, divide, saved)), cpu_mesh) == want
    undivided = squares(local, OF_ELEMENTS[name], saved)
    with raises(errors.CotangentError, problem="averaged"):
        gradient(body(undivided), cpu_mesh)


@typed  # JAX 0.4.28 has no rule for pmax
@pytest.mark.parametrize("extreme", [lax.pmax, lax.pmin])
def test_the_largest_value_hands_its_cotangent_to_one_device(extreme, cpu_mesh):
    def fwd(x):
        top = extreme(x, "data")
        return top, x == top

    body = lambda op: lambda w, x: op((w * x).sum())  # noqa: E731
    one = op_of(fwd, lambda is_top, g: (jnp.where(is_top, g, 0.0),))
    assert gradient(body(one), cpu_mesh) == {lax.pmax: 15, lax.pmin: 3}[extreme]
    with pytest.raises(errors.CotangentError, match="the forward keeps the largest or smallest"):
        gradient(body(op_of(fwd, lambda is_top, g: (g,))), cpu_mesh)


GATHERED = {
    "one value": lambda x, gather: gather(x.mean(), "data").mean(),
    "tiled": lambda x, gather: gather(x, "data", tiled=True).mean(),
    "mean of means": lambda x, gather: gather(x, "data").mean(0).mean(),
}


@versions.where(versions.gathers_invariant)
@pytest.mark.parametrize("name", GATHERED)
@pytest.mark.parametrize("divisor", [8, 4, 2, 1])
def test_a_mean_of_gathered_values(name, divisor, cpu_mesh):
    """With any smaller divisor, each device would get all devices' cotangents."""
    forward = lambda x: GATHERED[name](x, versions.all_gather_invariant())  # noqa: E731
    op = op_of(lambda x: (forward(x), None), lambda _, g: (jnp.broadcast_to(g / divisor, (2,)),))
    body = lambda w, x: op(w * x)  # noqa: E731
    if divisor == 8:
        assert gradient(body, cpu_mesh) == gradient(lambda w, x: forward(w * x), cpu_mesh)
        return
    with raises(errors.CotangentError, problem="averaged"):
        gradient(body, cpu_mesh)


@typed
def test_a_bwd_that_gathers_and_sums(cpu_mesh):
    """Of equal cotangents, the sum counts each of them once for each device."""
    body = lambda bwd: with_loss(lambda loss, _: of_an_identity(total, bwd)(loss), lambda x: x)  # noqa: E731
    each = lambda g: lax.all_gather(g, "data")  # noqa: E731
    assert gradient(body(lambda g: each(g).mean()), cpu_mesh) == X.sum()
    with pytest.raises(errors.CotangentError, match="by the sum of what is gathered over {data}"):
        gradient(body(lambda g: each(g).sum()), cpu_mesh)


# What the error says to type.


@typed
def test_forms_for_each_devices_own_gradient(cpu_mesh):
    """As the check off has it, also where the output is used before it leaves the body."""
    cast = lambda value: sr.vary(value, "data")  # noqa: E731
    own = op_of(lambda value, loss: (cast(value), None), lambda _, g: (jnp.zeros_like(g), g))

    def use(op, finish):
        def body(w, x):
            y = with_loss(op)(w, x)
            return finish(y) + total(y * x[0])

        return body

    want = gradient(use(replace_gradient(), lambda y: y), cpu_mesh, check=False)
    assert gradient(use(own, mean), cpu_mesh) == want
    at_the_call = lambda value, loss: replace_gradient()(cast(value), loss)  # noqa: E731
    assert gradient(use(at_the_call, mean), cpu_mesh) == want


def test_forms_for_a_mean_and_a_sum(cpu_mesh):
    def reduced(by):
        return lambda value, loss: replace_gradient()(value, by(loss))

    assert gradient(with_loss(reduced(mean)), cpu_mesh) == MEAN
    assert gradient(with_loss(reduced(total)), cpu_mesh) == X.sum()
    with raises(errors.CotangentError, problem="unmoved") as caught:
        gradient(with_loss(replace_gradient()), cpu_mesh)
    for form in ("jax.lax.pmean(x, 'data')", "jax.lax.psum(x, 'data')"):
        assert form in str(caught.value)


@typed
@pytest.mark.parametrize("cast", [sr.vary, jax.jit(sr.vary, static_argnums=1)], ids=["", "jit"])
def test_form_for_the_whole(cast, cpu_mesh):
    """The primal was reduced before the call, and bwd says that it knows."""
    op = op_of(lambda value, loss: (value, loss), lambda loss, g: (0 * g, loss * cast(g, "data")))
    body = with_loss(op, lambda loss: total(loss**2 / 2))
    assert gradient(body, cpu_mesh) == 2 * (X.reshape(4, 2).sum(1) ** 2).sum()
    partly = op_of(
        lambda value, loss: (value, loss), lambda loss, g: (0 * g, loss * cast(g, "data") + g)
    )
    with pytest.raises(errors.CotangentError) as caught:
        gradient(with_loss(partly), cpu_mesh)
    lines = (
        "shardrules.vary(ct, 'data')",
        "shardrules.vary(y, 'data')",
        "jax.lax.pmean(y, 'data')",
    )
    assert [line for line in lines if line not in str(caught.value)] == []


# Right as they are.


def by_kernel(loss):
    return total(kernels.call(kernels.copy_kernel, (1,), loss[None]).sum())


def in_steps(loss):
    return lax.fori_loop(0, 3, lambda _, c: c + total(loss), total(loss) - total(loss)) / 3


def through_a_pullback(loss):
    return jax.vjp(lambda one: total(jnp.sin(one)), loss)[0] * 0 + total(loss)


MOVED = {
    "psum": (total, lambda g: g, X.sum()),
    "pmean": (mean, lambda g: g / 4, MEAN),
    "jit": (jax.jit(total), jax.jit(lambda g: g), X.sum()),
    "gathered": (lambda loss: mean(lax.all_gather(loss, "data").sum()), lambda g: g, X.sum()),
    "kernel": (by_kernel, lambda g: g, X.sum()),
    "loop": (in_steps, lambda g: g, X.sum()),
    "pullback": (through_a_pullback, lambda g: g, X.sum()),
}


@pytest.mark.parametrize("name", MOVED)
def test_the_forward_makes_the_output_of_the_primal(name, cpu_mesh):
    sr.register("copy_kernel", sr.no_communication)
    forward, backward, want = MOVED[name]
    op = op_of(lambda loss: (forward(loss), None), lambda _, g: (backward(g),))
    assert gradient(lambda w, x: op((w * x).sum()), cpu_mesh) == want


@typed  # to JAX 0.5.3, shard_map has no rule for such a custom_vjp
@pytest.mark.parametrize("moved", [True, False])
def test_symbolic_zeros(moved, cpu_mesh):
    """The forward takes its primals in another form, also where it is traced once more."""
    forward = (lambda loss, value: total(loss)) if moved else lambda loss, value: value
    op = jax.custom_vjp(forward)
    op.defvjp(
        lambda loss, value: (forward(loss.value, value.value), None),
        lambda _, g: (g, None),
        symbolic_zeros=True,
    )
    body = lambda w, x: op((w * x).sum(), total(x.sum()))  # noqa: E731
    if moved:
        assert gradient(body, cpu_mesh) == X.sum()
        return
    with raises(errors.CotangentError, problem="unmoved"):
        gradient(body, cpu_mesh)


@pytest.mark.parametrize(
    "zero",
    [
        lambda rate, g: 0.0 * jnp.broadcast_to(g, rate.shape),
        lambda rate, g: g * jnp.zeros_like(rate),
        lambda rate, g: 0 * rate,
    ],
    ids=["times zero", "zeros times it", "no cotangent"],
)
def test_a_zero_for_what_varies(zero, cpu_mesh):
    """A rate that differs by device, of which the output is not made and gets no gradient."""
    op = op_of(lambda y, rate: (y, rate), lambda rate, g: (g, zero(rate, g)))
    assert gradient(lambda w, x: op(total((w * x).sum()), x), cpu_mesh) == X.sum()


@typed
def test_values_behind_one_barrier_are_not_made_of_each_other(cpu_mesh):
    op = op_of(
        lambda a, b: ((a, b), None), lambda _, g: (lax.optimization_barrier(tuple(g))[0], None)
    )

    def body(w, x):
        own = (w * x).sum()
        a, b = op(own, total(own))
        return total(a) + b

    assert gradient(body, cpu_mesh) == X.sum()


# Means of what is equal on all devices, in whatever way they are written.


def counted():
    return lax.psum(jnp.ones(()), "data")


MEANS = {
    "pmean": mean,
    "by a literal": lambda g: total(g) / 4,
    "by the axis": lambda g: total(g) / lax.psum(1, "data"),
    "by a count": lambda g: total(g) / counted(),
    "by a count before": lambda g: total(g / counted()),
    "times a count's reciprocal": lambda g: total(g) * (1 / counted()),
    "by a count of halves": lambda g: total(g) / (2 * lax.psum(jnp.full((), 0.5), "data")),
    "by a broadcast count": lambda g: (total(jnp.stack([g])) / lax.psum(jnp.ones(1), "data"))[0],
    "times a power of a count": lambda g: total(g) * counted() ** -1,
    "by a clipped count": lambda g: total(g) / jnp.clip(jnp.maximum(counted(), 1.0), 1.0),
    "by a count without a gradient": lambda g: total(g) / lax.stop_gradient(counted()),
    "by a count of elements": lambda g: total(g) / total(jnp.ones(2).sum() / 2),
    "in steps": lambda g: total(g) / 2 / 2,
    "of a negated": lambda g: -total(-g) / 4,
    "over elements too": lambda g: total(jnp.stack([g, g]).sum()) / 8,
    "by a count in a jit": jax.jit(lambda g: total(g) / counted()),
    "by a count that a jit takes": lambda g: jax.jit(lambda g, n: total(g) / n)(g, counted()),
    "by a count in a loop": lambda g: lax.scan(
        lambda n, _: (n, total(g) / n), counted(), None, length=1
    )[1][0],
}


def of_an_identity(fwd, bwd):
    return op_of(lambda w: (fwd(w), None), lambda _, g: (bwd(g),))


@versions.where(versions.sums_copies)
@pytest.mark.parametrize("name", MEANS)
def test_a_mean_of_equal_cotangents_changes_nothing(name, cpu_mesh):
    """The count of the devices was no known number: right, and refused."""
    op = of_an_identity(lambda w: w, MEANS[name])
    assert gradient(lambda w, x: mean((op(w) * x).sum()), cpu_mesh) == MEAN
    # A forward that averages as many elements as there are devices divides nothing that matters.
    of_elements = lambda w: (w * jnp.arange(4.0) / 1.5).mean()  # noqa: E731
    op = of_an_identity(of_elements, MEANS[name])
    assert gradient(lambda w, x: mean((op(w) * x).sum()), cpu_mesh) == MEAN


@versions.where(versions.sums_copies)
@pytest.mark.parametrize("name", MEANS)
def test_a_mean_is_no_sum_of_what_the_forward_divides(name, cpu_mesh):
    """With the check off it is the psum, and the forward's division: four times the gradient."""
    op = of_an_identity(lambda w: w / counted(), MEANS[name])
    body = lambda w, x: mean((op(w) * x).sum())  # noqa: E731
    with raises(errors.CotangentError, problem="summed"):
        gradient(body, cpu_mesh)
    op = of_an_identity(lambda w: w / counted(), lambda g: MEANS[name](g) / counted())
    assert gradient(body, cpu_mesh) == MEAN / 4
