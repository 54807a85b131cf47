"""Whether a bwd returns one device's share of a gradient or the whole: shown, or an error.

Every program is executed on four devices along ``data`` and two along ``model``.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P
from raising import raises

import shardrules as sr
from core import kernels, versions
from shardrules import errors
from shardrules.door import internals

X = np.arange(1, 9, dtype=np.float32)
W = np.float32(2)
pytestmark = pytest.mark.usefixtures("hooks")


def op_of(fwd, bwd):
    """Return the custom_vjp function of a fwd, which returns a result and residuals, and a bwd."""
    op = jax.custom_vjp(lambda *args: fwd(*args)[0])
    op.defvjp(fwd, bwd)
    return op


def gradient(body, mesh, *, axis="data", out=P(), x=X):
    """The gradient of w, which is replicated, where x is split over an axis."""
    f = versions.shard_map(body, mesh=mesh, in_specs=(P(), P(axis)), out_specs=out)
    return jax.jit(jax.grad(lambda w: f(w, x).sum()))(W)


def gather(x):
    return lax.all_gather(x, "data", tiled=True)


def mean_of(x):
    """Return a fwd: the mean over data of the products with what ``x`` makes of x, saved."""

    def fwd(w, a):
        a = x(a)
        return lax.pmean((w * a).sum(), "data"), (w, a)

    return fwd


def share(residuals, g):
    w, a = residuals
    return g * a.sum(), g * w * jnp.ones_like(a)


def share_by_kernel(residuals, g):
    w, a = residuals
    g = jnp.broadcast_to(g, a.shape)
    return kernels.call(kernels.copy_kernel, a.shape, g * a).sum(), g * w


def share_in_a_loop(residuals, g):
    w, a = residuals
    (total, _), _ = lax.scan(lambda c, one: ((c[0] + c[1] * one, c[1]), None), (a[0] * 0, g), a)
    return total, g * w * jnp.ones_like(a)


def own_residuals(residuals, g):
    del g
    w, a = residuals
    return a.sum(), w * jnp.ones_like(a)


OF_GATHERED = {
    "argument": (mean_of(lambda a: a), share, gather),
    "kernel": (mean_of(lambda a: a), share_by_kernel, gather),
    "loop": (mean_of(lambda a: a), share_in_a_loop, gather),
    "no cotangent": (mean_of(lambda a: a), own_residuals, gather),
    "jit": (mean_of(lambda a: a), jax.jit(share), gather),
}


@pytest.mark.parametrize("name", OF_GATHERED)
def test_whole_gradient_of_gathered_features_is_not_summed_again(cpu_mesh, name):
    """Four times the gradient, silently: the cotangent arrives whole, the features are gathered."""
    sr.register("copy_kernel", sr.no_communication)
    fwd, bwd, feed = OF_GATHERED[name]
    op = op_of(fwd, bwd)
    with raises(errors.CotangentError, problem="undecided", axes={"data"}):
        gradient(lambda w, x: op(w, feed(x)), cpu_mesh)


def test_residual_that_fwd_gathers_and_saves(cpu_mesh):
    """A contrastive loss with a learnable temperature, in short."""

    def fwd(t, x):
        features = gather(x)
        return lax.pmean((t * features).sum(), "data"), features

    op = op_of(fwd, lambda features, g: (g * features.sum(), jnp.zeros(2)))
    with raises(errors.CotangentError, problem="undecided", axes={"data"}):
        gradient(op, cpu_mesh)


def test_right_forms_for_gathered_features(cpu_mesh):
    """Both that the error shows, and a mean, which makes equal values invariant on every JAX."""

    def finished(finish):
        op = op_of(
            mean_of(lambda a: a), lambda res, g: (finish(share(res, g)[0]), share(res, g)[1] / 4)
        )
        return gradient(lambda w, x: op(w, gather(x)), cpu_mesh)

    assert finished(lambda ct: lax.pmean(ct, "data")) == X.sum()
    if versions.types_values():
        assert finished(lambda ct: sr.already_summed(ct, "data")) == X.sum()
    op = op_of(
        mean_of(lambda a: a),
        lambda res, g: (lax.psum(share(res, g)[0] / 4, "data"), g * res[1] / 4),
    )
    assert gradient(op, cpu_mesh) == X.sum() / 4


def test_residual_that_varies_through_a_cast_alone(cpu_mesh):
    op = op_of(mean_of(lambda a: sr.vary(jnp.ones(2), "data") + 0 * a), share)
    with raises(errors.CotangentError, problem="undecided", axes={"data"}):
        gradient(op, cpu_mesh)


@pytest.mark.parametrize("feed", [lambda x: x, gather], ids=["own", "gathered"])
def test_a_loss_for_each_device_is_a_share(cpu_mesh, feed):
    op = op_of(lambda w, a: (w * a, (w, a)), lambda r, g: ((g * r[1]).sum(), g * r[0]))
    assert gradient(lambda w, x: lax.pmean(op(w, feed(x)).sum(), "data"), cpu_mesh) == (
        X.sum() / 4 if feed is not gather else X.sum()
    )


def two_outputs(bwd):
    """An op with an output for each device, and one that is the same on all."""
    return op_of(lambda w, a: ((w * a, w * w), (w, a)), bwd)


def added(op):
    def body(w, x):
        mine, ours = op(w, x)
        return lax.psum(mine.sum(), "data") + ours

    return body


def test_a_share_and_a_whole_cannot_be_summed_as_one(cpu_mesh):
    """Right is 40; one psum over both gives 52."""

    def bwd(res, g):
        w, a = res
        return (g[0] * a).sum() + 2 * w * g[1], g[0] * w

    with raises(errors.CotangentError, problem="mixed", axes={"data"}):
        gradient(added(two_outputs(bwd)), cpu_mesh)

    def as_told(res, g):
        w, a = res
        return lax.psum((g[0] * a).sum(), "data") + 2 * w * g[1], g[0] * w

    assert gradient(added(two_outputs(as_told)), cpu_mesh) == 40


def test_cotangents_that_it_does_not_depend_on_may_be_whole(cpu_mesh):
    def bwd(res, g):
        w, a = res
        return jax.jit(lambda g, h: ((g * a).sum(), g * w + h))(*g)

    op = op_of(lambda w, a: ((w * a, lax.psum(a.sum(), "data")), (w, a)), bwd)
    assert gradient(added(op), cpu_mesh) == X.sum()


def test_zeros_are_no_share(cpu_mesh):
    op = op_of(
        mean_of(lambda a: a),
        lambda res, g: (jnp.zeros_like(res[1]).sum(), g * jnp.ones_like(res[1]) / 4),
    )
    assert gradient(op, cpu_mesh) == 0


# Sums of what is equal on all devices.


def through(w, x):
    return w, None


def tensor_parallel(entry, mesh):
    """Megatron's pair around a layer that is split over model: w goes in, a sum comes out."""
    leave = op_of(lambda y: (lax.psum(y, "model"), None), lambda _, g: (g,))
    enter = op_of(lambda w: (w, None), lambda _, g: (entry(g),))
    return gradient(lambda w, x: leave((enter(w) * x).sum()), mesh, axis="model")


@pytest.mark.parametrize(
    "entry",
    [
        lambda g: lax.psum(g, "model"),
        lambda g: lax.psum(g, ("data", "model")),
        jax.jit(lambda g: lax.psum(g, "model")),
        lambda g: lax.scan(lambda c, _: (c, lax.psum(g, "model")), 0.0, None, length=1)[1][0],
    ],
    ids=["psum", "both axes", "jit", "loop"],
)
def test_bwd_that_sums_where_nothing_varied(cpu_mesh, entry):
    """Right with the check off; under it x's gradient came twice, silently."""
    with raises(errors.CotangentError, problem="summed"):
        tensor_parallel(entry, cpu_mesh)


@pytest.mark.parametrize(
    "entry", [lambda g: g, lambda g: lax.pmean(g, "model"), lambda g: lax.psum(g / 2, "model")]
)
def test_bwd_that_passes_on_what_arrives_summed(cpu_mesh, entry):
    assert tensor_parallel(entry, cpu_mesh) == X.sum()


@versions.where(versions.sums_copies)
def test_bwd_may_sum_copies_where_its_forward_did(cpu_mesh):
    """A mean over an axis over which nothing varies, differentiated by JAX inside of bwd."""

    def loss(w, a):
        return lax.pmean(lax.pmean((w * a).sum(), "data"), "model")

    op = op_of(lambda w, a: (loss(w, a), (w, a)), lambda res, g: jax.vjp(loss, *res)[1](g))
    if not versions.types_values():  # the sum over data may be a share, or whole
        with pytest.raises(errors.CotangentError):
            gradient(op, cpu_mesh)
        return
    assert gradient(op, cpu_mesh) == X.sum() / 4


def repeated(f, between, mesh):
    """The gradient of f(f(w x)): f sums what each device has, then four copies of the sum."""
    return gradient(lambda w, x: f(between(f((w * x).sum()))), mesh)


@versions.where(versions.sums_copies)
def test_one_bwd_for_a_varying_and_an_invariant_primal(cpu_mesh):
    """The error's form is right for both of the uses, as it says they are to be written."""
    f = op_of(lambda x: (lax.psum(x, "data"), None), lambda _, g: (lax.psum(g, "data"),))
    with raises(errors.CotangentError, problem="summed") as caught:
        repeated(f, lambda y: y, cpu_mesh)
    f = op_of(lambda x: (lax.psum(x, "data"), None), lambda _, g: (g,))
    if versions.types_values():
        form = "f(shardrules.vary(x, 'data'))"
        assert repeated(f, lambda y: sr.vary(y, "data"), cpu_mesh) == 4 * X.sum()
    else:
        form = "return (ct * jax.lax.psum(1, ('data',)),)"
        copies = op_of(
            lambda x: (lax.psum(x, "data"), None), lambda _, g: (g * lax.psum(1, ("data",)),)
        )
        assert gradient(lambda w, x: copies(f((w * x).sum())), cpu_mesh) == 4 * X.sum()
    assert form in str(caught.value)


SAVED = {
    "cast": lambda w, a: (w * 6, (w, sr.vary(3 * jnp.ones(2), "data"))),
    "gathered": lambda w, a: (lax.pmean((w * gather(a)).sum(), "data"), (w, gather(a))),
    "averaged": lambda w, a: (lax.pmean(w * w, "data"), (w, sr.vary(w * jnp.ones(2), "data"))),
    "averaged after a cast": lambda w, a: (
        lax.pmean((w * sr.vary(3 * jnp.ones(2), "data")).sum(), "data"),
        (w, sr.vary(3 * jnp.ones(2), "data")),
    ),
}


def summing(by):
    return lambda res, g: (lax.psum(g * res[1].sum(), "data") / by, jnp.zeros(2))


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=versions.where(versions.sums_copies))
        if name.startswith("averaged")
        else name
        for name in SAVED
    ],
)
def test_sum_of_residuals_that_vary_by_their_type_alone(cpu_mesh, name):
    """Four times the gradient, silently: what is cast or gathered is equal on all devices."""
    with raises(errors.CotangentError, problem="summed"):
        gradient(op_of(SAVED[name], summing(1)), cpu_mesh)


@versions.where(versions.sums_copies)
def test_sum_of_residuals_where_the_forward_sums_them(cpu_mesh):
    def fwd(w, a):
        factor = sr.vary(3 * jnp.ones(2), "data")
        return lax.psum((w * factor).sum(), "data"), (w, factor)

    assert gradient(op_of(fwd, summing(1)), cpu_mesh) == 24
    assert gradient(op_of(SAVED["averaged"], summing(4)), cpu_mesh) == 2 * W
    assert gradient(op_of(SAVED["averaged after a cast"], summing(4)), cpu_mesh) == 6
    assert gradient(op_of(SAVED["gathered"], summing(4)), cpu_mesh) == X.sum()


@versions.where(versions.sums_copies)
def test_a_sum_of_ones_in_the_forward_is_no_sum_of_copies(cpu_mesh):
    """It counts the devices; no cotangent goes through it: twice the gradient, silently."""

    def fwd(w):
        return w / lax.psum(jnp.ones(()), "model"), None

    enter = op_of(fwd, lambda _, g: (lax.psum(g, "model") / lax.psum(jnp.ones(()), "model"),))
    with raises(errors.CotangentError, problem="summed", axes={"model"}):
        gradient(lambda w, x: lax.psum((enter(w) * x).sum(), "model"), cpu_mesh, axis="model")


@versions.where(versions.sums_copies)
def test_sum_in_a_forwards_pmean_differentiated_by_jax(cpu_mesh):
    """JAX divides far before it sums: what is averaged was cast before it was squared."""

    def loss(w, a):
        one = jax.jit(lambda w: jnp.sin(w) * w)(sr.vary(w, "data"))
        return lax.pmean(one, "data")

    op = op_of(lambda w, a: (loss(w, a), (w, a)), lambda res, g: jax.vjp(loss, *res)[1](g))
    assert np.isclose(gradient(op, cpu_mesh), np.cos(W) * W + np.sin(W))


def loss_of(cast):
    """A loss whose fwd takes its gradients too, as fused losses do."""

    def fwd(w, a):
        value, gradients = jax.value_and_grad(lambda w, a: (w * a**2).sum(), (0, 1))(cast(w), a)
        return value, gradients

    return op_of(fwd, lambda gradients, g: (g * gradients[0], g * gradients[1]))


def test_gradients_that_the_forward_takes(cpu_mesh):
    """Of an invariant weight they are summed in the forward: four times that, silently."""
    if not versions.types_values():  # there, nothing is summed in the forward
        op = loss_of(lambda w: w)
    elif not versions.differentiates_what_varies():
        with pytest.raises(ValueError, match="unexpected JAX type"):  # JAX's own refusal
            gradient(lambda w, x: lax.psum(loss_of(lambda w: w)(w, x), "data"), cpu_mesh)
        return
    else:
        with raises(errors.CotangentError, problem="undecided"):
            gradient(lambda w, x: lax.psum(loss_of(lambda w: w)(w, x), "data"), cpu_mesh)
        op = loss_of(lambda w: sr.vary(w, "data"))
    assert gradient(lambda w, x: lax.psum(op(w, x), "data"), cpu_mesh) == (X**2).sum()


def normalized(w, a, count):
    return (w * a**2).sum() / count


def gradients_with_what_varies(take):
    """Return a fwd that saves gradients of what is not normalized yet, and what each device counts."""

    def fwd(w, a):
        count = a[0]
        gradients = take(lambda w, a: normalized(w, a, 1.0))(w, a)
        return normalized(w, a, count), (gradients, count)

    return fwd


GRADIENTS_WITH_WHAT_VARIES = {
    "saved": gradients_with_what_varies(lambda f: jax.grad(f, (0, 1))),
    "in a jit": gradients_with_what_varies(lambda f: jax.jit(jax.grad(f, (0, 1)))),
    "traced before": gradients_with_what_varies(lambda f: TAKEN),
    "in a loop": gradients_with_what_varies(
        lambda f: lambda w, a: lax.map(lambda a: jax.grad(f, (0, 1))(w, a[None]), a)
    ),
}
TAKEN = jax.jit(jax.grad(lambda w, a: normalized(w, a, 1.0), (0, 1)))


@versions.where(versions.differentiates_what_varies)
@pytest.mark.parametrize("name", GRADIENTS_WITH_WHAT_VARIES)
def test_gradients_that_the_forward_takes_and_something_that_varies(name, cpu_mesh):
    """A fused loss that divides by each device's count in its bwd: four times that, silently."""

    def bwd(res, g):
        (dw, da), count = res
        return (g / count * dw).sum(), g / count * da.reshape(2)

    op = op_of(GRADIENTS_WITH_WHAT_VARIES[name], bwd)

    def loss(w, x):
        if name == "traced before":
            TAKEN(w, x)
        return lax.psum(op(w, x), "data")

    if versions.types_values():  # to JAX 0.5.3, nothing is summed in the forward
        with raises(errors.CotangentError, problem="undecided"):
            gradient(loss, cpu_mesh)
    got = gradient(lambda w, x: lax.psum(op(sr.vary(w, "data"), x), "data"), cpu_mesh)
    pairs = X.reshape(4, 2)
    np.testing.assert_allclose(got, ((pairs**2).sum(1) / pairs[:, 0]).sum(), rtol=1e-6)


def exchanged(part, how):
    if how == "scattered":
        return gather(lax.psum_scatter(part, "data", tiled=True))
    if how == "gathered":
        return lax.all_gather(part, "data").sum(0)
    parts = lax.all_to_all(part.reshape(4, -1), "data", 0, 0)
    return gather(parts.sum(0))


@versions.where(versions.types_values)
@pytest.mark.parametrize("how", ["scattered", "gathered", "exchanged"])
def test_gradients_that_the_forward_sums_by_hand(how, cpu_mesh):
    """By other means than psum, and typed invariant: four times the gradient, silently."""

    def fwd(w, a):
        part = jnp.full(4, (a**2).sum() / 4)
        return (w * a**2).sum(), lax.pmax(exchanged(part, how), "data").sum()

    op = op_of(fwd, lambda dw, g: (g * dw, jnp.zeros(2)))
    with raises(errors.CotangentError, problem="undecided"):
        gradient(lambda w, x: lax.psum(op(w, x), "data"), cpu_mesh)


@versions.where(versions.types_values, versions.differentiates_what_varies)
def test_gradients_whose_equations_the_forward_runs(cpu_mesh):
    """The gradient was taken before, of another trace: four times that, silently."""

    def body(w, x):
        taken, constants = jax.closure_convert(jax.grad(lambda w: (w * x**2).sum()), w)
        op = op_of(
            lambda w, a: ((w * a**2).sum() / a[0], (taken(w, *constants), a)),
            lambda res, g: (g / res[1][0] * res[0], jnp.zeros(2)),
        )
        return lax.psum(op(w, x), "data")

    with raises(errors.CotangentError, problem="undecided"):
        gradient(body, cpu_mesh)


@versions.where(versions.differentiates_what_varies)
def test_gradients_of_a_forward_that_cannot_be_traced_again(cpu_mesh):
    """It closes over what a vmap has mapped: twice for each device, silently."""

    def over(x):
        return op_of(jax.value_and_grad(lambda w: w * x**2), lambda dw, g: (g * dw,))

    def loss(w, x):
        return lax.psum(jax.vmap(lambda x: over(x)(w))(x).sum(), "data")

    if not versions.types_values():  # nothing sums what is taken in a body
        assert gradient(loss, cpu_mesh) == (X**2).sum()
        return
    with raises(errors.CotangentError, problem="undecided"):
        gradient(loss, cpu_mesh)


def test_statistics_that_the_forward_sums(cpu_mesh):
    """A residual that was summed is no gradient where what varies is saved with it."""

    def fwd(w, a):
        mean = lax.pmean(a.mean(), "data")
        return w * (a - mean), (w, a, mean)

    def bwd(res, g):
        w, a, mean = res
        return (g * (a - mean)).sum(), w * (g - lax.pmean(g.mean(), "data"))

    op = op_of(fwd, bwd)
    got = gradient(lambda w, x: lax.psum((op(w, x) * x).sum(), "data"), cpu_mesh)
    assert got == ((X - X.mean()) * X).sum()


@pytest.mark.parametrize("where", ["outside", "in the body", "in the body, eagerly"])
@pytest.mark.parametrize("again", [True, False])
def test_a_bwd_that_closes_over_a_value(where, again, cpu_mesh):
    """JAX puts it before the bwd's arguments: these are told apart from it."""
    ones = jnp.ones(2)

    def body(x, y):
        scale = ones if where == "outside" else y

        def bwd(x, g):
            return ((lax.psum(g, "data") if again else g) * x * scale,)

        op = op_of(lambda x: (lax.psum(x**2 / 2, "data"), x), bwd)
        return jax.grad(lambda x: op(x).sum())(x)

    f = versions.shard_map(body, mesh=cpu_mesh, in_specs=(P("data"), P()), out_specs=P("data"))
    f = f if "eagerly" in where else jax.jit(f)
    if again and internals.load().typed:
        with raises(errors.CotangentError, problem="summed"):
            f(X, ones)
    elif not again:
        np.testing.assert_array_equal(f(X, ones), X)
