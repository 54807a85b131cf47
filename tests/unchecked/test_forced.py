"""What to compare before a check is switched on by hand, and what migrate says to write first."""

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

import shardrules
from shardrules import testing
from shardrules.costs import findings
from shardrules.errors import ShardrulesError
from shardrules.unchecked import results, sites

AXIS = "data"
AXES = ("data", "model")
W = np.random.default_rng(0).normal(size=(8, 4)).astype(np.float32)
X = np.random.default_rng(1).normal(size=(16, 8)).astype(np.float32)


def op_of(function, bwd):
    op = jax.custom_vjp(function)
    op.defvjp(lambda x, w: (function(x, w), (x, w)), bwd)
    return op


def product(x, w):
    return x @ w


def reducing(reduce):
    """A product whose bwd reduces the gradient of the weight, which is the same on all devices."""
    return op_of(product, lambda r, g: (g @ r[1].T, reduce(r[0].T @ g)))


def summed_forward(reduce):
    """An all-reduce after a product, and a bwd that takes the cotangent of it as it likes."""
    forward = lambda x, w: lax.psum(x @ w, "model")  # noqa: E731
    return op_of(forward, lambda r, g: (reduce(g) @ r[1].T, r[0].T @ reduce(g)))


def loss_of(op, mesh, specs=(P(), P(AXIS))):
    def local(w, x):
        return lax.pmean((op(x, w) ** 2).mean(), AXIS)

    def loss(w, x):
        return jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=P(), check_vma=False)(w, x)

    return loss


def site_of(loss):
    with shardrules.install(unchecked="check") as handle:
        before = len(handle.unchecked())
        jax.jit(jax.grad(loss))(W, X)
        return handle.unchecked()[before:][0]


BWDS = {
    "pmean": lambda g: lax.pmean(g, AXIS),
    "psum": lambda g: lax.psum(g, AXIS),
    "largest": lambda g: lax.pmax(g, AXIS),
}


@pytest.mark.parametrize("name", BWDS)
def test_what_a_bwd_sums_itself_is_another_gradient_with_the_check_on(name, cpu_mesh):
    """It is linear, and the comparison that was advised compared the program with itself."""
    loss = loss_of(reducing(BWDS[name]), cpu_mesh)
    with pytest.warns(UserWarning, match="nothing was compared: .* forced=True compares with"):
        (site,) = testing.assert_same_unchecked(loss, W, X)
    assert not site.switched and any(text in site.reason for text in sites.SUMMED)
    with pytest.raises(ShardrulesError, match="not the same with the check") as caught:
        testing.assert_same_unchecked(loss, W, X, forced=True)
    assert caught.value.name == "gradient[0]"
    # As migrate says: the bwd returns each device's own share.
    own = loss_of(reducing(lambda g: g), cpu_mesh)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        testing.assert_same_unchecked(own, W, X, forced=True)
        (site,) = testing.assert_same_unchecked(own, W, X)
    assert site.switched
    whole = jax.grad(lambda w: ((X @ w) ** 2).mean())(W)
    with shardrules.install(unchecked="check"):
        np.testing.assert_allclose(jax.jit(jax.grad(own))(W, X), whole, 1e-4)


@pytest.mark.parametrize("slope", [1.0, 0.0])
def test_infinite_and_nan_gradients_hide_no_other(slope, cpu_mesh):
    """The root's gradient at 0 is infinite, and NaN if it is multiplied by 0."""
    w = W.copy()
    w[0, 0] = 0

    def loss_with(reduce):
        loss = loss_of(reducing(reduce), cpu_mesh)
        return lambda w, x: loss(w, x) + slope * jnp.sqrt(w[0, 0])

    assert not np.isfinite(jax.grad(loss_with(lambda g: g))(w, X)[0, 0])
    testing.assert_same_unchecked(loss_with(lambda g: g), w, X, forced=True)
    with pytest.raises(ShardrulesError, match=r"largest difference is \d") as caught:
        testing.assert_same_unchecked(loss_with(BWDS["psum"]), w, X, forced=True)
    assert caught.value.name == "gradient[0]"


def test_imaginary_parts_are_compared(cpu_mesh):
    """With the check on, the gradient that this bwd sums is another in its imaginary part alone."""

    @jax.custom_vjp
    def op(w):
        return w * 1.0

    op.defvjp(lambda w: (op(w), None), lambda _, g: (g.real + 1j * jnp.clip(g.imag, -0.1, 0.1),))

    def loss(w, x):
        f = jax.shard_map(
            lambda w, x: x * op(w), mesh=cpu_mesh, in_specs=(P(), P(AXIS)), out_specs=P(AXIS),
            check_vma=False,
        )  # fmt: skip
        return (f(w, x) * (1 + 1j)).real.sum()

    w = np.linspace(0.3, 1, 8).astype(np.complex64)
    with pytest.raises(ShardrulesError, match="not the same with the check"):
        testing.assert_same_unchecked(loss, w, X, forced=True)


def test_complex_results_are_recorded_with_their_parts():
    one, other = (results._read(jnp.asarray([z, 2 * z])) for z in (3 + 4j, 3 - 4j))
    assert one.elements == (3, 4, 6, 8) and other.elements == (3, -4, 6, -8)
    assert one.largest == 8


def test_a_forward_that_reduces(cpu_mesh):
    """Megatron's g: with the check off, its gradient was half of one device's."""
    specs = P("model"), P(AXIS, "model")
    loss = loss_of(summed_forward(lambda g: g), cpu_mesh, specs)
    whole = jax.grad(lambda w: ((X @ w) ** 2).mean())(W)
    off = jax.jit(jax.grad(loss))(W, X)
    np.testing.assert_allclose(off, whole / 2, 1e-4)
    with pytest.warns(UserWarning, match="nothing was compared"):
        (site,) = testing.assert_same_unchecked(loss, W, X)
    assert any(text in site.reason for text in sites.SUMMED)
    with pytest.raises(ShardrulesError, match="not the same with the check"):
        testing.assert_same_unchecked(loss, W, X, forced=True)


def test_a_gradient_of_its_own_for_an_equal_argument(cpu_mesh):
    """The reason said that it was summed, and the advice that its psum should go; it has none."""
    mixed = op_of(lambda y, w: y * 1.0, lambda r, g: (g, 0.1 * r[1]))

    def loss_of_own(check, *axes):
        def local(w, x):
            of = shardrules.vary(w, *axes) if axes else w
            return lax.pmean((mixed(x @ w, of) ** 2).mean(), AXES)

        def loss(w, x):
            specs = P(), P(AXES)
            f = jax.shard_map(local, mesh=cpu_mesh, in_specs=specs, out_specs=P(), check_vma=check)
            return f(w, x)

        return loss

    loss = loss_of_own(False)
    site = site_of(loss)
    assert "returns at output[1], for an argument that is equal over 'data', 'model'" in site.reason
    (advice,) = sites.of_cotangents([site.reason])
    assert "To keep the sum, pass shardrules.vary(w, *axes) for that argument" in advice
    off = jax.jit(jax.grad(loss))(W, X)
    with shardrules.install():
        kept = jax.jit(jax.grad(loss_of_own(True, *AXES)))(W, X)
        once = jax.jit(jax.grad(loss_of_own(True)))(W, X)
    np.testing.assert_allclose(kept, off, 1e-4)
    np.testing.assert_allclose(off - once, 0.7 * W, 1e-3, 1e-5)  # eight devices' terms, or one


def test_a_linear_bwd_that_is_not_proven_so(cpu_mesh):
    """What is compared passes, and then the check may be switched on by hand."""

    def bwd(r, g):
        ordered = lax.while_loop(lambda c: c[0] < 2, lambda c: (c[0] + 1, c[1] * 1.0), (0, g))[1]
        return ordered @ r[1].T, r[0].T @ (jnp.sort(ordered, 0) * 0 + ordered)

    loss = loss_of(op_of(product, bwd), cpu_mesh)
    testing.assert_same_unchecked(loss, W, X, forced=True)


def test_an_error_of_the_gradient_is_said(cpu_mesh):
    """With the check on the bwd below is refused; the message was the error's type alone."""

    def refused(g):
        if "data" in str(jax.typeof(g)):
            raise TypeError("only for arrays that are equal")
        return g

    loss = loss_of(reducing(refused), cpu_mesh)
    with pytest.raises(ShardrulesError, match="with the check .* on: TypeError: only for arrays"):
        testing.assert_same_unchecked(loss, W, X, forced=True)


def test_what_was_made_before_is_not_compared(cpu_mesh):
    shardrules.install().uninstall(ops=True)  # what an earlier test has left
    made = loss_of(product, cpu_mesh)
    mapped = jax.shard_map(
        lambda w, x: lax.pmean((x @ w).mean(), AXIS),
        mesh=cpu_mesh,
        in_specs=(P(), P(AXIS)),
        out_specs=P(),
        check_vma=False,
    )
    testing.assert_same_unchecked(made, W, X, forced=True)
    with pytest.raises(ShardrulesError, match="nothing was compared: 1 shard_map with the check"):
        testing.assert_same_unchecked(lambda w, x: mapped(w, x), W, X, forced=True)


def test_what_goes_with_a_reduction_that_a_body_differentiates(cpu_mesh):
    """Dropped to the letter, the mean of equal values in a body's own loss changed its gradient."""

    def local(w, x, u):
        loss = lambda w, u: jnp.sum(jnp.sin(lax.pmean(jnp.tanh(x @ w), "model") @ u))  # noqa: E731
        gw, gu = jax.grad(loss, (0, 1))(w, u)
        return lax.pmean(gw, AXIS), lax.pmean(gu, AXIS)

    columns = P(None, "model")
    f = jax.shard_map(
        local,
        mesh=cpu_mesh,
        in_specs=(P(), P(AXIS), columns),
        out_specs=(P(), columns),
        check_vma=False,
    )
    compiled = jax.jit(f).lower(np.eye(8, dtype=np.float32), X, W).compile()
    found = findings.find(testing.judge(compiled))
    forward = [one for one in found if one.entry.phase == "forward"]
    assert forward and all(one.advice.startswith("keep it if the body") for one in forward)
