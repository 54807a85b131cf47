"""custom_vjp around opaque calls: axes that the forward drops, and every form of a cotangent."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.extend.core import Primitive
from jax.interpreters import mlir
from jax.sharding import PartitionSpec as P
from raising import raises

import shardrules as sr
from shardrules import errors, testing


def primitive(name, implementation, out_shape=lambda x: x.shape):
    """A user's primitive that communicates, and whose output JAX types as invariant."""
    p = Primitive(name)
    p.def_impl(implementation)
    p.def_abstract_eval(lambda x: jax.core.ShapedArray(out_shape(x), x.dtype))
    mlir.register_lowering(p, mlir.lower_fun(implementation, multiple_results=False))
    return p


sum_p = primitive("test_sum_over_data", lambda x: lax.psum(x, "data"))
gather_p = primitive(
    "test_gather_over_data",
    lambda x: lax.all_gather(x, "data", tiled=True),
    lambda x: (4 * x.shape[0], *x.shape[1:]),
)
X = np.arange(1, 33, dtype=np.float32).reshape(8, 4)


@pytest.fixture(autouse=True)
def rules(hooks):
    sr.register(sum_p, sr.all_reduce("data"))
    sr.register("test_gather_over_data", sr.all_gather_invariant("data"))


def gradient(op, mesh, check_vma=True):
    """Gradient of |op(x)|^2 / 2 with x split over data and op's output replicated."""
    f = jax.shard_map(op, mesh=mesh, in_specs=P("data"), out_specs=P(), check_vma=check_vma)
    return jax.jit(jax.grad(lambda x: (f(x) ** 2).sum() / 2))


def with_bwd(forward, bwd):
    op = jax.custom_vjp(forward)
    op.defvjp(lambda x: (forward(x), None), lambda _, g: (bwd(g),))
    return op


def my_slice(g):
    return lax.dynamic_slice_in_dim(g, lax.axis_index("data") * 2, 2)


SUMMED = np.tile(X.reshape(4, 2, 4).sum(0), (4, 1))


@pytest.mark.parametrize(
    "forward, bwd, want",
    [(sum_p.bind, lambda g: g, SUMMED), (gather_p.bind, my_slice, X)],
    ids=["all_reduce passes it on", "all_gather_invariant slices it"],
)
def test_right_forms_after_a_dropped_axis(cpu_mesh, forward, bwd, want):
    f = gradient(with_bwd(forward, bwd), cpu_mesh)
    np.testing.assert_allclose(f(X), want)
    for verdict in testing.judge(f, X).verdicts:  # the forward's own; none in the backward pass
        assert verdict.collective.phase != "backward"


@pytest.mark.parametrize(
    "forward, bwd, reduction",
    [
        (sum_p.bind, lambda g: lax.psum(g, "data"), "psum"),
        (gather_p.bind, lambda g: lax.psum_scatter(g, "data", tiled=True), "reduce_scatter"),
        (sum_p.bind, sum_p.bind, "all_reduce('data')"),
        (lambda x: lax.psum(x, "data"), lambda g: lax.psum(g, "data"), "psum"),
    ],
    ids=[
        "psum after all_reduce",
        "psum_scatter after all_gather_invariant",
        "kernel",
        "plain psum",
    ],
)
def test_bwd_that_reduces_over_an_axis_that_the_forward_dropped(cpu_mesh, forward, bwd, reduction):
    """Right with the check off, N times the gradient with it on: 4w for w on 4 devices."""
    with raises(errors.CotangentError, problem="summed", axes={"data"}) as caught:
        gradient(with_bwd(forward, bwd), cpu_mesh)(X)
    text = str(caught.value)
    assert reduction in text
    assert re.search(r"the bwd '<lambda>' \(at \S*test_cotangent_forms.py:\d+\) returns", text)
    form = "return (ct,)"
    if reduction == "reduce_scatter":  # the shapes tell which form fits
        form = "return (jax.lax.dynamic_slice_in_dim(ct, i * 2, 2),)"
    (returned,) = [line for line in text.splitlines() if line.startswith("    return (ct,)")] or [
        line for line in text.splitlines() if line.startswith("    return (jax.lax.dynamic")
    ]
    assert returned == f"    {form}"


def test_reduction_that_plain_jax_accepts_is_left_alone(cpu_mesh):
    """No kernel dropped the axis, and the types match: it may be right, as it is here."""

    def forward(x):  # the sum of deviations from the mean over data, weighted
        return lax.psum((x - lax.pmean(x, "data")) * (1 + lax.axis_index("data")), "data")

    def bwd(g):
        w = (1 + lax.axis_index("data")).astype(jnp.float32)
        own = w * g
        return own - lax.pmean(own, "data")

    op = with_bwd(forward, bwd)
    plain = jax.shard_map(forward, mesh=cpu_mesh, in_specs=P("data"), out_specs=P())
    want = jax.jit(jax.grad(lambda x: (plain(x) ** 2).sum() / 2))(X)
    np.testing.assert_allclose(gradient(op, cpu_mesh)(X), want, rtol=1e-5)


@pytest.mark.parametrize("summed", [False, True])
def test_replicated_weight_behind_a_dropped_axis(cpu_mesh, summed):
    """The cotangent arrives whole: whether g * x is a share depends on where x comes from."""

    @jax.custom_vjp
    def op(x, w):
        return sum_p.bind(x * w)

    def bwd(res, g):
        dw = (g * res[0]).sum(0, keepdims=True)
        return g * res[1], lax.psum(dw, "data") if summed else dw

    op.defvjp(lambda x, w: (op(x, w), (x, w)), bwd)
    f = jax.shard_map(op, mesh=cpu_mesh, in_specs=(P("data"), P()), out_specs=P())
    w = np.arange(1, 5, dtype=np.float32)[None]
    gradient = jax.jit(jax.grad(lambda x, w: (f(x, w) ** 2).sum() / 2, argnums=(0, 1)))
    if not summed:
        with raises(errors.CotangentError, problem="undecided", axes={"data"}):
            gradient(X, w)
        return

    def single(x, w):
        return ((x * w).reshape(4, 2, 4).sum(0) ** 2).sum() / 2

    for have, want in zip(gradient(X, w), jax.grad(single, argnums=(0, 1))(X, w)):
        np.testing.assert_allclose(have, want, rtol=1e-6)


@sr.no_communication
def mul_kernel(x_ref, y_ref, o_ref):
    o_ref[...] = x_ref[...] * y_ref[...]


def mul(x, y):
    from jax.experimental import pallas as pl

    return pl.pallas_call(mul_kernel, jax.ShapeDtypeStruct(x.shape, x.dtype), interpret=True)(
        x, jnp.broadcast_to(y, x.shape)
    )


def both(op, mesh, *args, specs, argnums):
    """The gradient in shard_map and on a single device."""
    f = jax.shard_map(op, mesh=mesh, in_specs=specs, out_specs=P("data"))
    got = jax.jit(jax.grad(lambda *a: (f(*a) ** 2).sum() / 2, argnums=argnums))(*args)
    want = jax.grad(lambda *a: (op(*a) ** 2).sum() / 2, argnums=argnums)(*args)
    for a, b in zip(jax.tree_util.tree_leaves(got), jax.tree_util.tree_leaves(want)):
        np.testing.assert_allclose(a, b, rtol=1e-5)


W = np.arange(1, 5, dtype=np.float32)


def test_symbolic_zeros(cpu_mesh):
    @jax.custom_vjp
    def op(x, w):
        return mul(x, w)

    def fwd(x, w):
        assert not w.perturbed
        return op(x.value, w.value), (x.value, w.value)

    def bwd(res, g):
        x, w = res
        zero = jax.custom_derivatives.SymbolicZero(jax.typeof(w).to_ct_aval())
        return mul(g, w), zero

    op.defvjp(fwd, bwd, symbolic_zeros=True)
    both(op, cpu_mesh, X, W, specs=(P("data"), P()), argnums=0)


def test_symbolic_zero_of_the_output_and_of_another_type(cpu_mesh):
    @jax.custom_vjp
    def op(x, w):
        return mul(x, w), x

    def bwd(res, cts):
        x, w = res
        g, unused = cts
        assert isinstance(unused, jax.custom_derivatives.SymbolicZero)
        # A zero that is typed as w is, for x: zero varies over whatever it has to.
        aval = jax.typeof(w).update(shape=x.shape)
        return jax.custom_derivatives.SymbolicZero(aval), (x * g).sum(0)

    op.defvjp(lambda x, w: (op(x.value, w.value), (x.value, w.value)), bwd, symbolic_zeros=True)
    f = jax.shard_map(
        lambda x, w: op(x, w)[0], mesh=cpu_mesh, in_specs=(P("data"), P()), out_specs=P("data")
    )
    dx, dw = jax.jit(jax.grad(lambda x, w: (f(x, w) ** 2).sum() / 2, argnums=(0, 1)))(X, W)
    np.testing.assert_array_equal(dx, np.zeros_like(X))
    np.testing.assert_allclose(dw, (X * X * W).sum(0), rtol=1e-6)


def test_nondiff_argnums_none_and_integer_inputs(cpu_mesh):
    @functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
    def op(factor, x, tree, index):
        return mul(x, tree["w"]) * factor + tree["unused"].sum() * 0 + index.sum() * 0.0

    def bwd(factor, res, g):
        x, tree = res
        return mul(g, tree["w"]) * factor, {"w": (x * g).sum(0) * factor, "unused": None}, None

    def fwd(factor, x, tree, index):
        return op(factor, x, tree, index), (x, tree)

    op.defvjp(fwd, bwd)
    tree = {"w": W, "unused": np.ones(3, np.float32)}
    both(
        functools.partial(op, 3.0),
        cpu_mesh,
        X,
        tree,
        np.arange(8),
        specs=(P("data"), P(), P("data")),
        argnums=(0, 1),
    )


def test_scan_and_remat_around_it(cpu_mesh):
    @jax.custom_vjp
    def op(x, w):
        return mul(x, w)

    op.defvjp(lambda x, w: (op(x, w), (x, w)), lambda res, g: (mul(g, res[1]), (g * res[0]).sum(0)))

    def stack(x, ws):
        return lax.scan(jax.checkpoint(lambda c, w: (op(c, w), None)), x, ws)[0]

    ws = np.stack([W / 4, W / 3, W / 2])
    both(stack, cpu_mesh, X, ws, specs=(P("data"), P()), argnums=(0, 1))


@pytest.mark.parametrize("jit", [True, False])
def test_a_bwd_whose_share_is_summed_is_traced_once(cpu_mesh, jit):
    """Also where it closes over a value of the trace around it."""
    calls = []

    def local(x, w):
        scale = x[:1] * 0 + 3

        @jax.custom_vjp
        def op(x, w):
            return x * w

        def bwd(saved, g):
            calls.append(1)
            x, w = saved
            return g * w * scale / 3, (g * x).sum(0)

        op.defvjp(lambda x, w: (op(x, w), (x, w)), bwd)
        return jax.grad(lambda x, w: op(x, w).sum(), argnums=(0, 1))(x, w)

    f = jax.shard_map(local, mesh=cpu_mesh, in_specs=(P("data"), P()), out_specs=(P("data"), P()))
    w = np.full((4,), 2, np.float32)
    dx, dw = (jax.jit(f) if jit else f)(X, w)
    np.testing.assert_array_equal(dx, np.broadcast_to(w, X.shape))
    np.testing.assert_array_equal(dw, X.sum(0))
    assert len(calls) == 1


def of_features(bwd):
    """Return a mean over data of products with features, which the bwd gets."""
    f = jax.custom_vjp(lambda w, x: lax.pmean((w * x).sum(), "data"))
    f.defvjp(lambda w, x: (f(w, x), x), lambda x, g: (bwd(x, g), jnp.zeros_like(x)))
    return f


def test_a_share_of_a_reduced_primal_is_no_whole(hooks):
    """The cast to a partial sum counted the whole once for each device, silently."""
    mesh = jax.make_mesh((4,), ("data",), axis_types=(jax.sharding.AxisType.Explicit,))
    x = np.arange(1, 9, dtype=np.float32)

    def gradient(bwd):
        def body(w, x):
            features = lax.all_gather(x, "data", tiled=True)
            w = lax.pcast(w, "data", to="reduced")
            return lax.psum(jax.grad(lambda w: of_features(bwd)(w, features))(w), "data")

        with jax.set_mesh(mesh):
            f = jax.shard_map(body, in_specs=(P(), P("data")), out_specs=P())
            return jax.jit(f)(np.float32(2), jax.device_put(x, jax.NamedSharding(mesh, P("data"))))

    reduced = lambda primal: primal.unreduced == {"data"}  # noqa: E731
    with raises(errors.CotangentError, problem="undecided", want=reduced):
        gradient(lambda x, g: g * x.sum())

    def whole(x, g):
        share = g * x.sum() / lax.axis_size(("data",))
        return lax.pcast(share, ("data",), to="unreduced")

    assert gradient(whole) == x.sum()
