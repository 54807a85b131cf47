"""What gets a whole cotangent with the check on, and shares with it off: left unless linear."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl
from jax.sharding import PartitionSpec as P

import shardrules
from shardrules import errors
from shardrules.hooks import shard_map

from .whole import (
    BODIES,
    LIMIT,
    by_linear_call,
    by_perturbed,
    clip,
    clip_gradient,
    second_clips,
    vjp_of,
)

X = np.random.RandomState(0).randn(8, 6).astype(np.float32)
W = np.random.RandomState(1).randn(6).astype(np.float32)


@pytest.fixture(autouse=True)
def nothing_held():
    shardrules.install().uninstall(ops=True)


def off(f, mesh, in_specs, out_specs=P("data"), check=False):
    """Return a function that asks for the shard_map when it is called, as libraries do."""
    return lambda *args: shard_map(f, mesh, in_specs, out_specs, check=check)(*args)


def derivatives(f, order=1, argnums=1):
    def run(*args):
        def scalar(*args):
            return sum(jnp.sum(jnp.sin(leaf)) for leaf in jax.tree_util.tree_leaves(f(*args)))

        def second(*args):
            return jnp.sum(jnp.sin(jax.grad(scalar, argnums)(*args)))

        return jax.grad((scalar, second)[order - 1], argnums)(*args)

    return jax.jit(run)


def same(a, b):
    jax.tree_util.tree_map(lambda x, y: np.testing.assert_allclose(x, y, 2e-5, 2e-5), a, b)


def left(f, *args, order=1, argnums=1):
    """Return the reasons; the derivatives are those with the check off."""
    plain = derivatives(f, order, argnums)(*args)
    with shardrules.install(unchecked="check") as handle:
        same(plain, derivatives(f, order, argnums)(*args))
    assert handle.unchecked()
    return [site.reason for site in handle.unchecked()]


def multiplied(step):
    return lambda x, w: x * step(w)


@pytest.mark.parametrize("kind", BODIES)
def test_a_step_that_is_not_linear_is_left(cpu_mesh, kind):
    f = off(multiplied(BODIES[kind]), cpu_mesh, (P("data"), P()))
    reasons = left(f, X, W)
    assert all(reasons), reasons


@pytest.mark.parametrize("kind", BODIES)
def test_no_cast_passes_a_step_that_is_not_linear(cpu_mesh, kind):
    step = BODIES[kind]

    def body(x, w):  # cast late it is summed in each iteration
        return jax.lax.scan(lambda c, _: (c * step(w), None), x, None, length=3)[0]

    f = off(body, cpu_mesh, (P("data"), P()), check=True)
    with shardrules.install(casts="late"):
        late = derivatives(f)(X, W)
    with shardrules.install():
        same(late, derivatives(f)(X, W))


def test_a_bwd_whose_own_derivative_clips(cpu_mesh):
    f = off(lambda x, w: x * jnp.sin(second_clips(jnp.sin(w))), cpu_mesh, (P("data"), P()))
    assert all(left(f, X, W, order=2))


def jvp_of(rule):
    """Return sin with a rule for its tangent, as a function of the primal and the tangent."""
    op = jax.custom_jvp(jnp.sin)
    op.defjvp(lambda primals, tangents: (jnp.sin(*primals), rule(*primals, *tangents)))
    return op


def calls_next(rule):
    """Return sin with a bwd that multiplies by another function of the primal."""
    op = jax.custom_vjp(jnp.sin)
    op.defvjp(lambda x: (jnp.sin(x), x), lambda x, g: (g * rule(x),))
    return op


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def counts_down(n, x):
    return jnp.sin(x)


counts_down.defvjp(
    lambda n, x: (jnp.sin(x), x), lambda n, x, g: (g * counts_down(n - 1, x) if n else clip(g),)
)
clips_tangent = jvp_of(lambda x, t: by_linear_call(t))
# By how the rules follow each other: the names and the places of the first two are the same.
CLIPS_IN_THE_THIRD = {
    "bwds": calls_next(calls_next(vjp_of(jnp.sin, clip))),
    "one bwd with arguments": lambda w: counts_down(2, w),
    "tangents": jvp_of(lambda x, t: t * jvp_of(lambda x, t: t * clips_tangent(x))(x)),
    "a tangent in a bwd": calls_next(jvp_of(lambda x, t: t * clips_tangent(x))),
    "a bwd in a tangent": jvp_of(lambda x, t: t * calls_next(vjp_of(jnp.sin, clip))(x)),
}


@pytest.mark.parametrize("kind", CLIPS_IN_THE_THIRD)
def test_a_rule_that_only_the_third_derivative_runs(cpu_mesh, kind):
    f = off(lambda x, w: x * CLIPS_IN_THE_THIRD[kind](w), cpu_mesh, (P("data"), P()))

    def third(x, w):
        of_w = lambda w: jnp.sum(jnp.sin(f(x, w)))  # noqa: E731
        for _ in range(2):
            of_w = functools.partial(lambda g, w: jnp.sum(jnp.sin(jax.grad(g)(w))), of_w)
        return jax.jit(jax.grad(of_w))(w)

    plain = third(X, W)
    with shardrules.install(unchecked="check") as handle:
        same(plain, third(X, W))
    (site,) = handle.unchecked()
    assert site.reason == "its derivatives of order 3 are taken by rules of their own"


def calls_itself(x, g):
    return (g * itself(x + 1.57),)


itself = jax.custom_vjp(jnp.sin)
itself.defvjp(lambda x: (jnp.sin(x), x), calls_itself)
itself_again = jvp_of(lambda x, t: t * itself_again(x + 1.57))


@pytest.mark.parametrize("step", [itself, itself_again])
def test_a_rule_that_calls_itself_is_no_other(cpu_mesh, step):
    f = off(lambda x, w: x * step(w), cpu_mesh, (P("data"), P()))
    plain = derivatives(f)(X, W)
    with shardrules.install(unchecked="check") as handle:
        same(plain, derivatives(f)(X, W))
    (site,) = handle.unchecked()
    assert site.switched, site.reason


# Each share is a half, since all is equal along the axis model; but it may be too small.
TOO_SMALL = {
    "float16": lambda x: 3e-7 * x * x.astype(jnp.float16).astype(x.dtype),
    "float16 in a bwd": lambda x: 2e-7 * vjp_of(lambda x: x, through_float16)(x),
    "exponents": lambda x: 6e-5 * x * jax.lax.reduce_precision(x, 5, 10),
}


def through_float16(g):
    return g.astype(jnp.float16).astype(g.dtype)


@pytest.mark.parametrize("kind", TOO_SMALL)
def test_a_share_that_is_too_small_for_its_type(cpu_mesh, kind):
    f = off(lambda x, w: TOO_SMALL[kind](x) * jnp.ones_like(w), cpu_mesh, (P("data"), P()))
    gradient = jax.jit(jax.grad(lambda x: jnp.sum(jnp.sin(f(x, W)))))
    plain = np.asarray(gradient(X))
    with shardrules.install(unchecked="check") as handle:
        ours = np.asarray(jax.jit(jax.grad(lambda x: jnp.sum(jnp.sin(f(x, W)))))(X))
    np.testing.assert_allclose(plain, ours, rtol=1e-4, atol=0)
    (site,) = handle.unchecked()
    assert "rounds a cotangent" in site.reason


def test_a_bwd_that_reads_what_is_differentiated(cpu_mesh):
    f = off(lambda x, w, v: x * by_perturbed(w, v), cpu_mesh, (P("data"), P(), P()))
    assert all(left(f, X, W, W))
    assert all(left(f, X, W, W, argnums=(1, 2)))


@pytest.mark.parametrize("limits", [(None, 0.05), (0.05, None), (None, 0.05, None)])
def test_one_line_with_several_limits(cpu_mesh, limits):
    def f(x, w, limit):
        return off(lambda x, w: x * clip_gradient(limit, w), cpu_mesh, (P("data"), P()))(x, w)

    plain = [derivatives(lambda x, w: f(x, w, limit))(X, W) for limit in limits]
    with shardrules.install(unchecked="check") as handle:
        for limit, expected in zip(limits, plain):
            same(expected, derivatives(lambda x, w: f(x, w, limit))(X, W))
    assert {site.switched for site in handle.unchecked()} == {True, False}


@pytest.mark.parametrize("order", ["forward", "gradient"])
def test_what_is_traced_first_decides_nothing(cpu_mesh, order):
    def body(x, w):
        return jax.lax.scan(lambda c, _: (jnp.tanh(c * w), None), x, None, length=3)[0]

    f = off(body, cpu_mesh, (P("data"), P()))
    with shardrules.install(unchecked="check") as handle:
        runs = [jax.jit(f), derivatives(f)]
        for run in runs if order == "forward" else runs[::-1]:
            run(X, W)
    assert [site.switched for site in handle.unchecked()] == [True]


class Counted:
    def __init__(self):
        self.count = 0
        self.rng = np.random.default_rng(0)

    def __call__(self, x, w):
        self.count += 1
        return x * w * self.count + self.rng.normal()


def test_looking_has_no_effects(cpu_mesh):
    def run():
        count, body, rng = 0, Counted(), np.random.default_rng(1)
        seen = []

        def counts(x, w):
            nonlocal count
            count += 1
            seen.append(count)
            return x * w * count + rng.integers(10) + len(seen)

        f = off(body, cpu_mesh, (P("data"), P()))
        g = off(counts, cpu_mesh, (P("data"), P()))
        results = [jax.jit(lambda x, w: (f(x, w), g(x, w)))(X, W) for _ in range(3)]
        return results, count, body.count, len(seen)

    plain = run()
    with shardrules.install(unchecked="check"):
        same(plain, run())


class Boxed:
    """A pytree with state of Python's beside its array."""

    def __init__(self, array, counts):
        self.array, self.counts = array, counts


class Counts(list):
    __hash__ = object.__hash__


jax.tree_util.register_pytree_node(
    Boxed, lambda b: ((b.array,), b.counts), lambda counts, arrays: Boxed(*arrays, counts)
)


def test_looking_has_no_effects_on_arguments(cpu_mesh):
    def body(x, boxed):
        boxed.counts[0] += 1
        return x * boxed.array * boxed.counts[0]

    def run():
        f, counts = off(body, cpu_mesh, (P("data"), P())), Counts([0])
        return [jax.jit(lambda x, w: f(x, Boxed(w, counts)))(X, W) for _ in range(2)]

    plain = run()
    with shardrules.install(unchecked="check"):
        same(plain, run())


@pytest.fixture(autouse=True)
def primitive_declared():
    with shardrules.rules({"clipping_identity": shardrules.no_communication}):
        yield


def test_a_body_that_advances_an_iterator_is_left(cpu_mesh):
    scales = iter([2.0, 3.0, 4.0, 5.0, 6.0, 7.0])
    f = off(lambda x, w: x * w * next(scales), cpu_mesh, (P("data"), P()))
    with shardrules.install(unchecked="check") as handle:
        same(2 * X * W, jax.jit(f)(X, W))
        same(3 * X * W, jax.jit(lambda *args: f(*args))(X, W))
    (site,) = handle.unchecked()
    assert "its body can change 'scales', a list_iterator" in site.reason


def test_a_bwd_that_clips_a_sum_is_told_once(cpu_mesh):
    def body(x, w):
        return x * clip_gradient(LIMIT, w)

    def cast_first(x, w):
        return body(x, shardrules.vary(w, "data"))

    plain = derivatives(off(body, cpu_mesh, (P("data"), P())))(X, W)
    with shardrules.install():
        f = off(body, cpu_mesh, (P("data"), P()), check=True)
        with pytest.warns(errors.WholeCotangentWarning) as told:
            derivatives(f)(X, W)
            derivatives(lambda *args: f(*args))(X, W)
        assert len(told) == 1 and told[0].filename.endswith("whole.py")
        assert told[0].message.axes == {"data"}
        for word in ("'_clip_bwd' is not known to be linear", "f(shardrules.vary(x, 'data'))"):
            assert word in str(told[0].message)
        advised = off(cast_first, cpu_mesh, (P("data"), P()), check=True)
        clipped = derivatives(advised)(X, W)
    # Its own share each, without the division by the model axis that the check off makes.
    assert np.all(np.abs(clipped) <= 4 * LIMIT + 1e-6) and np.any(np.abs(clipped) > LIMIT)
    assert plain.shape == clipped.shape


def test_a_linear_bwd_is_not_told_of(cpu_mesh, recwarn):
    f = off(lambda x, w: x * clip_gradient(None, w), cpu_mesh, (P("data"), P()), check=True)
    with shardrules.install():
        derivatives(f)(X, W)
        # All devices hold the same here: nothing was summed.
        same = off(lambda x, w: x + clip_gradient(LIMIT, w), cpu_mesh, (P(), P()), P(), check=True)
        derivatives(same)(X, W)
    assert not [w for w in recwarn if w.category is errors.WholeCotangentWarning]


def by_kernel(kernel):
    """Return the identity, whose bwd is a Pallas kernel of the cotangent."""

    def bwd(g):
        shape = jax.ShapeDtypeStruct(g.shape, g.dtype)
        return pl.pallas_call(kernel, shape, interpret=True, name="of_cotangents")(g)

    return vjp_of(lambda x: x * 1.0, bwd)


def clips(g, o):
    o[...] = clip(g[...])


def squares(g, o):
    o[...] = g[...] * g[...]


def adds(g, o):
    o[...] = g[...] + 1.0


def doubles(g, o):
    o[...] = 2.0 * g[...]


def doubles_where_it_is_clipped_to(g, o):
    o[...] = 2.0 * g[...] * jnp.clip(jax.lax.iota(jnp.float32, W.size), -LIMIT, LIMIT)


KERNELS = {
    clips: "(it applies max to it)",
    squares: "(it applies mul to it)",
    adds: "(it adds another value to it)",
    doubles: "",
    doubles_where_it_is_clipped_to: "",
}


@pytest.mark.parametrize("kernel", KERNELS)
def test_a_kernel_of_a_bwd_is_read_before_it_is_told_of(kernel, cpu_mesh, recwarn):
    def body(op):
        return lambda x, w: x * op(w)

    specs = P("data"), P()
    op = by_kernel(kernel)
    with shardrules.install():
        derivatives(off(body(op), cpu_mesh, specs, check=True))(X, W)
        told = [w for w in recwarn if w.category is errors.WholeCotangentWarning]
        assert len(told) == bool(KERNELS[kernel])
        for warning in told:
            assert KERNELS[kernel] in str(warning.message)
            assert warning.message.axes == {"data"}

        # As it says: cast where the function is called.
        def cast_first(x, w):
            return x * op(shardrules.vary(w, "data"))

        derivatives(off(cast_first, cpu_mesh, specs, check=True))(X, W)
    assert len([w for w in recwarn if w.category is errors.WholeCotangentWarning]) == len(told)


def test_a_kernel_that_cannot_be_read_is_not_told_of(cpu_mesh, recwarn):
    """A callback stands for FFI: most are linear, and nothing says otherwise."""

    def bwd(g):
        shape = jax.ShapeDtypeStruct(g.shape, g.dtype)
        return jax.pure_callback(lambda g: np.asarray(g), shape, g, vmap_method="sequential")

    op = vjp_of(lambda x: x * 1.0, bwd)
    with shardrules.rules({"pure_callback": shardrules.no_communication}), shardrules.install():
        derivatives(off(lambda x, w: x * op(w), cpu_mesh, (P("data"), P()), check=True))(X, W)
    assert not [w for w in recwarn if w.category is errors.WholeCotangentWarning]


def clipping_hijax():
    """Return the identity as a hijax primitive whose cotangent is clipped."""
    hijax = pytest.importorskip("jax.experimental.hijax")
    base = getattr(hijax, "HiPrim", None) or getattr(hijax, "VJPHiPrimitive", None)
    if base is None or not hasattr(base, "vjp_bwd_retval"):
        pytest.skip("this JAX has other hijax primitives")

    class Clipping(base):
        def __init__(self, aval):
            self.in_avals, self.out_aval, self.params = (aval,), aval, {}
            super().__init__()

        def expand(self, x):
            return x

        def vjp_fwd(self, *args):  # from JAX 0.9 which are not zero comes first
            return args[-1], None

        def vjp_bwd_retval(self, res, ct):
            return (jnp.clip(ct, -LIMIT, LIMIT),)

    return lambda w: Clipping(jax.typeof(w))(w)


def test_a_clipping_hijax_primitive(cpu_mesh):
    step = clipping_hijax()
    assert all(left(off(multiplied(step), cpu_mesh, (P("data"), P())), X, W))

    def body(x, w):
        return jax.lax.scan(lambda c, _: (c * step(w), None), x, None, length=3)[0]

    f = off(body, cpu_mesh, (P("data"), P()), check=True)
    with shardrules.install(casts="late"):
        late = derivatives(f)(X, W)
    with shardrules.install():
        same(late, derivatives(f)(X, W))
