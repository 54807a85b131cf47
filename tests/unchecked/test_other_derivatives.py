"""Derivatives of a program that no look traces: fewer results, fewer arguments, under a vmap.

Each body sends a cotangent that is equal along ``data`` through a bwd that clips, only in the
derivative that the program asks for. The site was switched, with another gradient.
"""

import collections
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from core import versions
from jax._src.lax import parallel
from jax.custom_derivatives import SymbolicZero, linear_call
from jax.experimental import checkify
from jax.experimental import pallas as pl
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir
from jax.sharding import PartitionSpec as P

import shardrules
from shardrules.hooks import shard_map

X = np.linspace(0.5, 2, 32, dtype=np.float32).reshape(8, 4)
W = np.linspace(0.3, 1, 4, dtype=np.float32)


def clipped(g):
    return jnp.clip(g, -0.1, 0.1)


def op_of(fwd, bwd, **options):
    op = jax.custom_vjp(lambda *args: fwd(*args)[0])
    op.defvjp(fwd, bwd, **options)
    return op


clip = op_of(lambda w: (w * 1.0, None), lambda _, g: (clipped(g),))


def halved(v):
    """Loop without a derivative in reverse mode."""
    return jax.lax.while_loop(lambda c: jnp.sum(c) > 1, lambda c: c / 2, v)


def beside_a_loop(mapped):
    f = mapped(lambda x, w: (x * clip(w), halved(w)), (P("data"), P()))

    def loss(w):
        y, metric = f(X, w)
        return jnp.sum(y**2), metric

    return jax.grad(loss, has_aux=True)(W)[0]


def with_a_metric(mapped):
    f = mapped(lambda x, w: (x * clip(w), halved(w)), (P("data"), P()))

    def loss(w):
        y, metric = f(X, w)
        return jnp.sum(y**2) + 0 * jnp.sum(jax.lax.stop_gradient(metric))

    return jax.grad(loss)(W)


def rounded_beside_a_loop(mapped):
    f = mapped(lambda x, w: (x * jax.lax.reduce_precision(w, 5, 2), halved(w)), (P("data"), P()))
    return jax.grad(lambda w: jnp.sum(f(X, w)[0] ** 2))(W)


def of_few_bits_beside_a_loop(mapped):
    f = mapped(lambda x, w: (jnp.where(x > 1, w * w, w), halved(w)), (P("data"), P()))
    return jax.grad(lambda w: jnp.sum(f(X, w)[0].astype(jnp.float32)))(W.astype(np.float16))


def without_a_result(mapped):
    def bwd(_, g):
        if not isinstance(g[1], SymbolicZero):
            raise NotImplementedError("no gradient of the second result")
        return (clipped(g[0]),)

    op = op_of(lambda w: ((w.value * 2.0, jnp.sum(w.value)), None), bwd, symbolic_zeros=True)
    op.fun = lambda w: (w * 2.0, jnp.sum(w))
    f = mapped(lambda x, w: (x * op(w)[0], op(w)[1]), (P("data"), P()))
    return jax.grad(lambda w: jnp.sum(f(X, w)[0] ** 2))(W)


def by_a_pair(mapped):
    def fwd(w, v):
        if not (w.perturbed and v.perturbed):
            raise NotImplementedError("no gradient of one alone")
        return w.value * v.value, (w.value, v.value)

    op = op_of(fwd, lambda r, g: (clipped(g * r[1]), g * r[0]), symbolic_zeros=True)
    op.fun = lambda w, v: w * v
    f = mapped(lambda x, w, v, u: x * op(w, v) * jnp.sum(halved(u)), P("data"), 3)
    return jax.grad(lambda w, v: jnp.sum(f(X, w, v, W) ** 2), (0, 1))(W, W + 1)


def with_a_sum_for_one_result(mapped):
    """A rule returns a device's share of a weight's gradient, or, of one result, the sum."""

    def bwd(saved, g):
        x, w = saved
        share = jnp.sum(x * g[0], 0)
        is_one = isinstance(g[1], SymbolicZero)
        return g[0] * w, jax.lax.psum(share, "data") if is_one else share + jnp.sum(g[1])

    fwd = lambda x, w: ((x.value * w.value, jnp.sin(x.value)), (x.value, w.value))  # noqa: E731
    op = op_of(fwd, bwd, symbolic_zeros=True)
    op.fun = lambda x, w: (x * w, jnp.sin(x))
    f = mapped(lambda x, w: op(x, w), P("data"))
    return jax.grad(lambda w: jnp.sum(f(X, w)[0] ** 2))(W)


def with_a_sum_for_one_argument(mapped):
    def fwd(x, w):
        return x.value * w.value, (x.value, w.value, None if x.perturbed else ())

    def bwd(saved, g):
        x, w, is_one = saved
        share = jnp.sum(x * g, 0)
        return g * w, share if is_one is None else jax.lax.psum(share, "data")

    op = op_of(fwd, bwd, symbolic_zeros=True)
    op.fun = lambda x, w: x * w
    f = mapped(lambda x, w: op(x, w), P("data"))
    return jax.grad(lambda w: jnp.sum(f(X, w) ** 2))(W)


def twice_by_one(mapped):
    outer = op_of(lambda w: (w**2, w), lambda w, g: (clip(w) * g * 2,))
    step = lambda c: (c[0] + 1, c[1] * 3)  # noqa: E731
    cubed = lambda g: jax.lax.while_loop(lambda c: c[0] < 3, step, (0, g))[1]  # noqa: E731
    other = op_of(lambda v: (v * 27, None), lambda _, g: (cubed(g),))
    f = mapped(lambda x, w, v: x * outer(w) * other(v), P("data"), 2)
    once = jax.grad(lambda w: jnp.sum(f(X, w, W + 1) ** 2))
    return jax.grad(lambda w: jnp.sum(jnp.sin(once(w))))(W)


def twice_past_a_solve(mapped):
    """The second derivative by all arguments can't be traced, and that by one solves shares."""
    step = lambda c: (c[0] + 1, c[1] * 3)  # noqa: E731
    cubed = lambda g: jax.lax.while_loop(lambda c: c[0] < 3, step, (0, g))[1]  # noqa: E731
    other = op_of(lambda v: (v * 27, None), lambda _, g: (cubed(g),))
    op = op_of(lambda w: (w**2, w), lambda w, g: (g * solved(w),))
    f = mapped(lambda x, w, v: x * op(w) * other(v), P("data"), 2)
    once = jax.grad(lambda w: jnp.sum(f(X, w, W + 1) ** 2))
    return jax.grad(lambda w: jnp.sum(jnp.sin(once(w))))(W)


def of_the_forward_half(mapped):
    """No second derivative can be traced, but that of what jax.vjp returns first runs a rule."""
    op = jax.custom_vjp(lambda w, again: w * 1.0, nondiff_argnums=(1,))

    def bwd(again, w, g):
        return (clipped(g) if again else g + 0 * halved(w),)

    op.defvjp(lambda w, again: (op(w, True), w), bwd)
    f = mapped(lambda x, w: x * op(w, False), P("data"))
    return jax.grad(lambda w: jnp.sum(jax.vjp(lambda w: f(X, w), w)[0] ** 2))(W)


def under_vmap(mapped):
    @jax.custom_batching.custom_vmap
    def op(w):
        return w * 1.0

    op.def_vmap(lambda size, in_batched, w: (clip(w), in_batched[0]))
    f = jax.vmap(mapped(lambda x, w: x * op(w), P("data")), (None, 0))
    return jax.grad(lambda w: jnp.sum(f(X, jnp.stack([w, 2 * w])) ** 2))(W)


def of_one_tangent(mapped):
    @jax.custom_jvp
    def op(w, v):
        return w * v

    def rule(primals, tangents):
        (w, v), (t, u) = primals, tangents
        if isinstance(u, SymbolicZero):
            clips = lambda r, c: clipped(c * r)  # noqa: E731
            return w * v, linear_call(lambda r, t: t * r, clips, v, t)
        return w * v, t * v + u * w

    op.defjvp(rule, symbolic_zeros=True)
    f = mapped(lambda x, w, v: x * op(w, v), P("data"), 2)
    return jax.grad(lambda w: jnp.sum(f(X, w, W + 1) ** 2))(W)


ASKED = (
    twice_past_a_solve,
    beside_a_loop,
    rounded_beside_a_loop,
    of_few_bits_beside_a_loop,
    with_a_metric,
    without_a_result,
    by_a_pair,
    twice_by_one,
    of_the_forward_half,
    under_vmap,
)


def twice(h):
    """Differentiate twice a function whose bwd multiplies by ``h(w)``."""

    def asked(mapped):
        op = op_of(lambda w: (w**2, w), lambda w, g: (g * h(w),))
        f = mapped(lambda x, w: x * op(w), P("data"))
        once = jax.grad(lambda w: jnp.sum(jnp.sin(f(X, w) * 1.3)))
        return jax.grad(lambda w: jnp.sum(jnp.sin(once(w))))(W)

    asked.__name__ = h.__name__
    return asked


def linear_and_clipped(t):
    return linear_call(lambda r, t: t, lambda r, c: clipped(c), (), t)


def rounded(w):
    return jnp.cos(w.astype(jnp.bfloat16).astype(jnp.float32))


def solved(w):
    matrix = jnp.diag(jnp.array([1.0, 2.0, 5.0, 9.0])) + 0.3
    return jax.scipy.sparse.linalg.cg(lambda v: matrix @ v, w, maxiter=1)[0]


def by_defjvps(w):
    op = jax.custom_jvp(lambda w: w * 1.0)
    op.defjvps(lambda t, ans, w: linear_and_clipped(t))
    return op(w)


def by_a_root(w):
    solve = lambda g, y: linear_and_clipped(y) / g(jnp.ones_like(y))  # noqa: E731
    return jax.lax.custom_root(lambda z: z * z - w, w * 0 + 1, lambda f, z: jnp.sqrt(w), solve)


ASKED = (*ASKED, of_one_tangent, *map(twice, (rounded, solved, by_defjvps, by_a_root)))


def gradient_of(asked, mesh):
    def mapped(body, out_specs, replicated=1):
        in_specs = (P("data"), *[P()] * replicated)
        return shard_map(body, mesh, in_specs, out_specs, check=False)

    def gradient():
        return jax.tree_util.tree_map(np.asarray, jax.jit(lambda: asked(mapped))())

    off = gradient()
    with shardrules.install(unchecked="check") as handle:
        before = collections.Counter(handle.unchecked())
        on = gradient()
        sites = collections.Counter(handle.unchecked()) - before
    return off, on, [*sites.elements()]


@pytest.mark.parametrize("asked", ASKED, ids=lambda asked: asked.__name__)
def test_a_derivative_that_no_look_traces_leaves_its_site(asked, cpu_mesh):
    off, on, sites = gradient_of(asked, cpu_mesh)
    jax.tree_util.tree_map(np.testing.assert_array_equal, off, on)
    assert sites and not any(site.switched for site in sites)


SUMMING = (with_a_sum_for_one_result, with_a_sum_for_one_argument)


@pytest.mark.parametrize("asked", SUMMING, ids=lambda asked: asked.__name__)
def test_a_rule_that_may_sum_what_it_returned_as_a_share_leaves_its_site(asked):
    off, on, (site,) = gradient_of(asked, jax.sharding.Mesh(jax.devices()[:4], ("data",)))
    np.testing.assert_array_equal(off, on)
    assert site.reason.endswith("may depend on what is differentiated (symbolic_zeros)")


@pytest.mark.parametrize("kind", [jnp.float32, jnp.int32])
def test_a_rule_for_vmap_that_computes_by_a_type_leaves_its_site(kind, cpu_mesh):
    """Nothing is differentiated past it, and no look sees what the rule computes."""
    op = jax.custom_batching.custom_vmap(lambda x: x + 1)
    typed = lambda x: "data" in str(jax.typeof(x))  # noqa: E731
    op.def_vmap(lambda size, in_batched, x: (x + 3 if typed(x) else x + 1, True))

    def asked(mapped):
        body = lambda x, w: x * w * op(jax.lax.stop_gradient(x).astype(kind))  # noqa: E731
        f = jax.vmap(mapped(body, P("data")), (0, None))
        return jax.grad(lambda w: jnp.sum(f(jnp.stack([X, X]), w) ** 2))(W)

    off, on, (site,) = gradient_of(asked, cpu_mesh)
    np.testing.assert_array_equal(off, on)
    assert site.reason == "vmap calls a rule that somebody wrote for 'custom_vmap_call'"


def test_a_function_that_jax_maps_by_a_loop_is_switched(cpu_mesh):
    op = jax.custom_batching.sequential_vmap(lambda x: x + 1)

    def asked(mapped):
        body = lambda x, w: x * w * op(jax.lax.stop_gradient(x))  # noqa: E731
        return jax.grad(lambda w: jnp.sum(mapped(body, P("data"))(X, w) ** 2))(W)

    off, on, (site,) = gradient_of(asked, cpu_mesh)
    np.testing.assert_allclose(off, on, 1e-5)
    assert site.switched, site


def without_rules(mapped):
    f = mapped(lambda x, w: (x * w, halved(w)), (P("data"), P()))
    return jax.grad(lambda w: jnp.sum(f(X, w)[0] ** 2))(W)


def with_a_rule_in_the_loop(mapped):
    def step(carried):
        count, h = carried
        return count + 1, jnp.tanh(h * clip(jnp.sum(h)))

    def body(x, w):
        return x * w, jax.lax.while_loop(lambda c: c[0] < 3, step, (0, w))[1]

    f = mapped(body, (P("data"), P()))
    return jax.grad(lambda w: jnp.sum(f(X, w)[0] ** 2))(W)


@pytest.mark.parametrize("asked", [without_rules, with_a_rule_in_the_loop])
def test_what_only_jax_differentiates_is_switched(asked, cpu_mesh):
    off, on, sites = gradient_of(asked, cpu_mesh)
    np.testing.assert_allclose(off, on, 1e-5)
    assert [site.switched for site in sites] == [True]


def a_gradient(f, x, w):
    return jax.vjp(f, w)[1](x)[0]


def in_a_bwd(f, x, w):
    def bwd(saved, g):
        x, w = saved
        return g * w + 0.1 * a_gradient(lambda w: f(x, w), g, w), 0 * w

    return op_of(lambda x, w: (x * w, (x, w)), bwd)(x, w)


def in_a_fwd(f, x, w):
    def fwd(x, w):
        return x * w, (a_gradient(lambda w: f(x, w), x, w), w)

    op = jax.custom_vjp(lambda x, w: x * w)  # only fwd takes it
    op.defvjp(fwd, lambda saved, g: (g * saved[0], 0 * saved[1]))
    return op(x, w)


def in_a_jvp(f, x, w):
    op = jax.custom_jvp(lambda x, w: x * w)

    @op.defjvp
    def rule(primals, tangents):
        (x, w), (t, u) = primals, tangents
        return x * w, t * a_gradient(lambda w: f(x, w), x, w) + x * u

    return op(x, w)


def summed(x, w):
    """Multiply by ``w``, which is one value for all devices: with the check on, a cast sums."""
    return x * w


def summing(x, w):
    """Sum what differs by device: the transpose of that is a sum with the check off alone."""
    return x * jax.lax.psum(x * w, "data")


@pytest.mark.parametrize("f", [summed, summing])
@pytest.mark.parametrize("place", [in_a_bwd, in_a_fwd, in_a_jvp])
def test_a_gradient_that_a_rule_takes_over_devices_leaves_its_site(place, f, cpu_mesh):
    def asked(mapped):
        g = mapped(lambda x, w: place(f, x, w), P("data"))
        return jax.grad(lambda x: jnp.sum(jnp.sin(g(x, W))))(jnp.asarray(X))

    off, on, (site,) = gradient_of(asked, cpu_mesh)
    np.testing.assert_array_equal(off, on)
    taken = "a custom rule takes a gradient itself (jax.vjp, jax.grad), which is summed over {data}"
    assert site.reason.startswith(taken) and "assert_same_unchecked" in site.reason


@pytest.mark.parametrize("place", [in_a_bwd, in_a_fwd, in_a_jvp])
def test_a_gradient_that_a_rule_takes_on_each_device_is_switched(place, cpu_mesh):
    def asked(mapped):
        own = lambda x, w: place(lambda x, v: x * jnp.sin(v), x, x * w)  # noqa: E731
        g = mapped(own, P("data"))
        return jax.grad(lambda x: jnp.sum(jnp.sin(g(x, W))))(jnp.asarray(X))

    off, on, (site,) = gradient_of(asked, cpu_mesh)
    np.testing.assert_allclose(off, on, 1e-5)
    assert site.switched, site


def algorithm(name):
    def body(x, w):
        matrix = jnp.eye(4) + 0.123
        asked = getattr(jax.lax.DotAlgorithmPreset, name)
        turned = lambda g: jax.lax.dot(g[None], matrix, precision=asked)[0]  # noqa: E731
        return x * op_of(lambda w: (w * 1.0, None), lambda _, g: (turned(g),))(w)

    return body


@pytest.mark.parametrize("name", ["BF16_BF16_F32", "TF32_TF32_F32", "BF16_BF16_F32_X3"])
def test_a_dot_whose_algorithm_rounds_is_left(name, cpu_mesh):
    def reason(name):
        with shardrules.install(unchecked="check") as handle:
            f = shard_map(algorithm(name), cpu_mesh, (P("data"), P()), P("data"), check=False)
            before = collections.Counter(handle.unchecked())
            jax.eval_shape(jax.grad(lambda x, w: jnp.sum(f(x, w) ** 2), 1), X[:, :4], W)
            (site,) = collections.Counter(handle.unchecked()) - before
        return site.reason

    # Over data, four devices: one fourth of a whole cotangent rounds as the whole one does, but
    # each device's own share doesn't.
    assert reason(name).endswith("rounds a cotangent")
    assert reason("F32_F32_F32") == ""


def test_a_primitive_is_not_known_by_its_name(cpu_mesh, fresh_registry):
    """It clips, and is called as one of JAX's is; its rule says nothing of that."""
    own = Primitive("roll")
    own.def_abstract_eval(lambda x: x)
    mlir.register_lowering(own, mlir.lower_fun(clipped, multiple_results=False))

    def asked(mapped):
        op = op_of(lambda w: (w * 1.0, None), lambda _, g: (own.bind(g),))
        f = mapped(lambda x, w: x * op(w), P("data"))
        return jax.grad(lambda w: jnp.sum(f(X, w) ** 2))(W)

    shardrules.register("roll", shardrules.no_communication)
    off, on, sites = gradient_of(asked, cpu_mesh)
    np.testing.assert_array_equal(off, on)
    assert [site.switched for site in sites] == [False]


def printed(g, note):
    jax.debug.callback(note, g)


def told(g, note):
    jax.experimental.io_callback(note, None, g)


def printed_in_a_loop(g, note):
    jax.lax.fori_loop(0, 2, lambda i, _: jax.debug.callback(note, g[i]), None)


def printed_a_number(g, note):
    jax.lax.cond(g.sum() > 0, lambda: jax.debug.callback(note, 1.0), lambda: None)


def takes_refs():
    """Whether JAX differentiates a shard_map that takes a ref."""
    return versions.has("jax", "new_ref")() and hasattr(jax.custom_vjp, "defvjp_with_logs")


@pytest.mark.parametrize("show", [printed, told, printed_in_a_loop, printed_a_number])
def test_a_bwd_that_shows_a_cotangent_leaves_its_site(show, cpu_mesh):
    shown = []

    def asked(mapped):
        def bwd(_, g):
            show(g, lambda x: shown.append(round(float(np.sum(x)), 3)))
            return (g,)

        op = op_of(lambda w: (w * 1.0, None), bwd)
        f = mapped(lambda x, w: x * op(w), P("data"))
        return jax.grad(lambda w: jnp.sum(f(X, w) ** 2))(W)

    off, on, sites = gradient_of(asked, cpu_mesh)
    jax.effects_barrier()
    np.testing.assert_array_equal(off, on)
    (site,) = sites
    assert site.reason.endswith("shows a cotangent outside of the program")
    half = len(shown) // 2
    assert sorted(shown[:half]) == sorted(shown[half:])


def test_a_bwd_that_checks_a_cotangent_leaves_its_site(cpu_mesh):
    """Where a share is too large, and where the sum of them is, are two things."""

    def asked(mapped):
        def bwd(_, g):
            checkify.check(jnp.all(jnp.abs(g) < 1), "large: {x}", x=jnp.max(jnp.abs(g)))
            return (g,)

        op = op_of(lambda w: (w * 1.0, None), bwd)
        f = mapped(lambda x, w: x * op(w), P("data"))
        error, _ = checkify.checkify(jax.grad(lambda w: jnp.sum(f(X, w) ** 2)))(W)
        # JAX numbers the checks that it meets, in int32.
        return [x for x in jax.tree_util.tree_leaves(error) if x.dtype != jnp.int32]

    off, on, (site,) = gradient_of(asked, cpu_mesh)
    jax.tree_util.tree_map(np.testing.assert_array_equal, off, on)
    assert not site.switched, site


@versions.where(takes_refs)
@pytest.mark.parametrize("spec", [P(), P("data")])
def test_a_bwd_that_keeps_a_cotangent_in_a_ref_leaves_its_site(spec, cpu_mesh):
    def bwd(kept, g):
        kept[...] = (g * 1000).astype(jnp.int32).reshape(kept.shape)
        return None, g

    op = jax.custom_vjp(lambda kept, w: w * 1.0)
    op.defvjp(lambda kept, w: (w * 1.0, kept), bwd)

    def asked(mapped):
        kept = jax.new_ref(jnp.zeros((4, 4) if spec else 4, jnp.int32))
        body = lambda x, w, kept: x * op(kept, w)  # noqa: E731
        f = shard_map(body, cpu_mesh, (P("data"), P(), spec), P("data"), check=False)
        return jax.grad(lambda w: jnp.sum(f(X, w, kept) ** 2))(W), kept[...]

    off, on, (site,) = gradient_of(asked, cpu_mesh)
    jax.tree_util.tree_map(np.testing.assert_array_equal, off, on)
    assert site.reason.endswith("shows a cotangent outside of the program")


def test_a_bwd_that_shows_what_it_saved_is_switched(cpu_mesh):
    def asked(mapped):
        def bwd(w, g):
            jax.debug.callback(lambda x: None, w)
            return (g,)

        op = op_of(lambda w: (w * 1.0, w), bwd)
        f = mapped(lambda x, w: x * op(w), P("data"))
        return jax.grad(lambda w: jnp.sum(f(X, w) ** 2))(W)

    off, on, sites = gradient_of(asked, cpu_mesh)
    np.testing.assert_allclose(off, on, 1e-6)
    assert [site.switched for site in sites] == [True]


def doubled():
    own = Primitive("doubled")
    own.def_abstract_eval(lambda x: x)
    mlir.register_lowering(own, mlir.lower_fun(lambda x: x * 2, multiple_results=False))
    ad.primitive_jvps[own] = lambda primals, tangents: (own.bind(*primals), tangents[0] * 2)
    return own


def test_a_primitive_whose_batched_form_somebody_wrote_is_left(cpu_mesh, fresh_registry):
    """No look sees what a vmap around the call makes of it: here something that clips."""

    def asked(mapped):
        f = jax.vmap(mapped(lambda x, w: x * own.bind(w), P("data")), (None, 0))
        return jax.grad(lambda w: jnp.sum(f(X, jnp.stack([w, w])) ** 2))(W)

    shardrules.register("doubled", shardrules.no_communication)
    own = doubled()
    batching.defvectorized(own)
    off, on, (site,) = gradient_of(asked, cpu_mesh)
    np.testing.assert_allclose(off, on, 1e-6)
    assert site.switched

    class Rule:
        def __call__(self, args, dims):
            return (clip(*args) * 2, *dims)

    for rule in (Rule().__call__, Rule()):
        own = doubled()  # another one each time: a decision that an earlier test left stands
        batching.primitive_batchers[own] = rule
        off, on, (site,) = gradient_of(asked, cpu_mesh)
        np.testing.assert_array_equal(off, on)
        assert site.reason == "vmap calls a rule that somebody wrote for 'doubled'"

    def mapped(body, out_specs):
        return shard_map(body, cpu_mesh, (P("data"), P()), out_specs, check=False)

    own = doubled()  # another one: a program's text names it alone
    batching.primitive_batchers[own] = Rule()
    with shardrules.install(unchecked="check") as handle:
        jax.jit(lambda: asked(mapped)).lower()
        before = collections.Counter(handle.unchecked())
        batching.defvectorized(own)
        jax.jit(lambda: asked(mapped)).lower()
        (site,) = (collections.Counter(handle.unchecked()) - before).elements()
    assert site.switched


def _varying(x):
    kind = jax.typeof(x)
    return kind.vma if hasattr(kind, "vma") else kind.manual_axis_type.varying


NUMBERS = np.arange(2.0 * W.size, dtype=np.float32).reshape(2, -1)
ARRAYS = [jnp.asarray(numbers) for numbers in NUMBERS]
LARGE = np.arange(1 << 20, dtype=np.float32).reshape(2, -1)


def by_a_kernel(x, w):
    def kernel(a, b, out):
        out[...] = a[...] - b[...] if is_cast else b[...] - a[...]

    is_cast = bool(_varying(x))
    w = w + 0 * x
    return pl.pallas_call(kernel, jax.typeof(w), interpret=True)(x, w)


def by_an_order_of_carries(x, w):
    start = (0, x, x * w) if _varying(x) else (0, x * w, x)
    once = lambda c: (c[0] + 1, c[1] - 2 * c[2], c[2])  # noqa: E731
    return jax.lax.while_loop(lambda c: c[0] < 2, once, start)[1]


def by_equal_carries(x, w):
    once = lambda c, _: ((c[0] + w, c[1] - c[0] if _varying(x) else c[0] - c[1]), None)  # noqa: E731
    return jax.lax.scan(once, (x, x), None, length=3)[0][1]


def by_numbers(x, w):
    a, b = (2.0, 3.0) if _varying(x) else (3.0, 2.0)
    return a * x + b * w


def by_constants(x, w):
    a, b = (W, 2 * W) if _varying(x) else (2 * W, W)
    return jax.jit(lambda x, w: a * x + b * w)(x, w)


def by_large_constants(x, w, of=_varying):
    return x * w + jnp.take(jnp.asarray(LARGE[int(bool(of(x)))]), jnp.argsort(w))


def by_a_permutation(x, w):
    pairs = [(n, np.int64((n + (1 if _varying(x) else 3)) % 4)) for n in range(4)]
    return jax.lax.ppermute(x * w, "data", pairs)


def by_a_transform(x, w):
    kind = jax.lax.FftType.FFT if _varying(x) else jax.lax.FftType.IFFT
    return jax.lax.fft(x * w + 0j, kind, (4,)).imag


def by_a_callback(x, w):
    return jax.pure_callback(np.sin if _varying(x) else np.cos, jax.typeof(x), x * w)


def by_a_length(x, w):
    return jax.lax.scan(lambda c, _: (c * w, None), x, None, length=2 if _varying(x) else 3)[0]


def by_blocks(x, w):
    def kernel(a, b, out):
        out[...] = a[...] * b[...]

    first = int(bool(_varying(x)))
    block = lambda of: pl.BlockSpec((1, 4), lambda i: (of(i), 0))  # noqa: E731
    specs = [block(lambda i: (i + first) % 2), block(lambda i: i)]
    mapped = dict(grid=(2,), in_specs=specs, out_specs=block(lambda i: i))
    return pl.pallas_call(kernel, jax.typeof(x), **mapped, interpret=True)(x, w + 0 * x)


def by_an_alias(x, w):
    def kernel(a, b, out):
        out[...] = 2 * out[...]

    aliases = {0 if _varying(x) else 1: 0}
    kind = jax.typeof(x)
    return pl.pallas_call(kernel, kind, input_output_aliases=aliases, interpret=True)(x, w + 0 * x)


def by_an_order_of_writes(x, w):
    ref = jax.new_ref(x * w)
    first, then = (1, 0) if _varying(x) else (0, 1)
    for n in (first, then):
        ref[...] = ref[...] * 2 if n else ref[...] + x
    return ref[...]


def by_a_ref(x, w):
    refs = jax.new_ref(x * w), jax.new_ref(x * w)
    refs[bool(_varying(x))][0] = x[0]
    return refs[0][...]


def by_a_ref_in_a_loop(x, w):
    def step(n, _):
        order = (1, 0) if _varying(x) else (0, 1)
        for n in order:
            ref[...] = ref[...] * 2 if n else ref[...] + x

    ref = jax.new_ref(x * w)
    jax.lax.fori_loop(0, 2, step, None)
    return ref[...]


def by_a_callback_s_number(x, w):
    count = -1 if _varying(x) else -2
    return jax.pure_callback(lambda v: v * count, jax.typeof(x), x * w)


READS = {
    "padding": lambda x, w: jnp.concatenate(
        [x * w, jax.lax.pad(x, 0.0, ((0, 0, 0), (-1, -2, 0) if _varying(x) else (-2, -1, 0)))], 1
    ),
    "a callback's number": by_a_callback_s_number,
    "blocks": by_blocks,
    "alias": by_an_alias,
    "an order of writes": by_an_order_of_writes,
    "a ref": by_a_ref,
    "a ref in a loop": by_a_ref_in_a_loop,
    "conversion": lambda x, w: (x.astype(int) if _varying(x) else x).astype(x.dtype) * w,
    "mode": lambda x, w: x.at[np.array([0, 5])].add(w, mode="drop" if _varying(x) else "clip"),
    "numbers": by_numbers,
    "constants": by_constants,
    "large constants": by_large_constants,
    "permutation": by_a_permutation,
    "transform": by_a_transform,
    "callback": by_a_callback,
    "length": by_a_length,
    "kernel": by_a_kernel,
    "carries": by_an_order_of_carries,
    "equal carries": by_equal_carries,
    "axes": lambda x, w: jax.lax.psum(x * w, [*_varying(x)] or ["data", "model"]),
    "operands": lambda x, w: x - w if _varying(x) else w - x,
    "place": lambda x, w: x * w + jax.lax.axis_index("data" if _varying(x) else "model"),
    "dimension": lambda x, w: jnp.flip(x, 0 if _varying(x) else 1) * w,
    "in a call": lambda x, w: jax.jit(lambda x, w: x - w if _varying(x) else w - x)(x, w),
    "a result": lambda x, w: [x * w, x / w][bool(_varying(x))] + 0 * (x * w + x / w),
    "arrays": lambda x, w: x * w + NUMBERS[bool(_varying(x))],
    "arrays of JAX's": lambda x, w: x * w + ARRAYS[bool(_varying(x))],
    "a print": lambda x, w: [jax.debug.print("") if _varying(x) else 0, x * w][1],
}


@pytest.mark.parametrize("kind", READS)
def test_a_body_that_computes_by_the_type_of_a_value_is_left(kind, cpu_mesh):
    def asked(mapped):
        return mapped(READS[kind], P() if kind == "axes" else P("data"))(X, W)

    off, on, (site,) = gradient_of(asked, cpu_mesh)
    np.testing.assert_array_equal(off, on)
    assert site.reason == "its body computes something else with the check on"


def test_a_large_constant_is_read_where_it_is_made_anew(cpu_mesh):
    def asked(mapped):
        return mapped(lambda x, w: by_large_constants(x, w, of=np.shape), P("data"))(X, W)

    off, on, (site,) = gradient_of(asked, cpu_mesh)
    np.testing.assert_array_equal(off, on)
    assert site.switched


@versions.where(lambda: hasattr(parallel, "all_gather_invariant"))
def test_a_gather_that_presumes_the_check_is_left(cpu_mesh):
    """Its transpose sums nothing: with the check on each device gets the whole cotangent."""

    def asked(mapped):
        f = mapped(lambda x, w: parallel.all_gather_invariant(x * w, "data", tiled=True), P())
        return jax.grad(lambda w: jnp.sum(f(X, w) ** 2))(W)

    off, on, (site,) = gradient_of(asked, cpu_mesh)
    np.testing.assert_array_equal(off, on)
    assert site.reason == "the transpose of 'all_gather_invariant' is right with the check on alone"


def by_a_bwd_s_number(x, w):
    bwd = lambda _, g: (g * (3.0 if _varying(g) else 1.0),)  # noqa: E731
    return op_of(lambda w: (w * 3.0, None), bwd)(x * w)


def by_a_bwd_s_operands(x, w):
    bwd = lambda saved, g: (g - g * saved if _varying(g) else g * saved - g,)  # noqa: E731
    return x * op_of(lambda w: (w * 2.0, w), bwd)(w * x)


def by_a_bwd_in_a_branch(x, w):
    """Call an op in a branch, before which its primal is cast."""
    bwd = lambda saved, g: (g * saved if _varying(saved) else g,)  # noqa: E731
    op = op_of(lambda w: (w * 2.0, w), bwd)
    return jax.lax.cond(x[0, 0] > 1, lambda: x * op(w), lambda: x * w)


def by_a_fwd(x, w):
    fwd = lambda w: (w * 2.0, 1 / w if _varying(w) else w)  # noqa: E731
    op = jax.custom_vjp(lambda w: w * 2.0)
    op.defvjp(fwd, lambda saved, g: (g * saved,))
    return x * op(w * x)


def by_a_jvp(x, w):
    op = jax.custom_jvp(lambda w: jnp.sin(w) * 3.0)
    op.defjvp(lambda w, t: (jnp.sin(*w) * 3.0, t[0] * (3.0 if _varying(*w) else 1.0)))
    return op(x * w)


def by_the_operands_of_a_jvp(x, w):
    """Take the same steps, with the operands of one swapped."""
    op = jax.custom_jvp(lambda a, b: a - b)

    @op.defjvp
    def rule(primals, tangents):
        one, other = (t * jnp.cos(p) for p, t in zip(primals, tangents))
        return primals[0] - primals[1], one - other if _varying(primals[1]) else other - one

    return op(x, x * w)


def by_a_factor_of_a_jvp(x, w):
    """Compute two factors, and multiply by one of them."""
    op = jax.custom_jvp(lambda w: w * 2.0)

    @op.defjvp
    def rule(primals, tangents):
        factors = jnp.sin(*primals), jnp.sin(primals[0] + 1)
        return primals[0] * 2.0, tangents[0] * factors[bool(_varying(*primals))]

    return op(x * w)


def by_two_bwds(x, w):
    """Call two ops of one line, of which each computes what the other does in the other case."""
    one, other = (
        op_of(lambda w: (w * 2.0, w), lambda _, g, n=n: (g * (2.0 + (bool(_varying(g)) == n)),))
        for n in range(2)
    )
    return x * one(w) * jnp.sum(other(w))


def by_two_fwds(x, w):
    def made(by):
        op = jax.custom_vjp(lambda w: w * 2.0)
        scale = lambda w: by[bool(_varying(w))]  # noqa: E731
        op.defvjp(lambda w: (w * 2.0, w * scale(w)), lambda saved, g: (g * saved,))
        return op

    return made((2.0, 3.0))(x * w) + made((3.0, 2.0))(w)


def by_a_bwd(change):
    """Return a body whose bwd scales a cotangent by a change, which takes whether it is cast."""
    bwd = lambda saved, g: (g * change(saved, bool(_varying(g))),)  # noqa: E731
    op = op_of(lambda w: (w * 2.0, w), bwd)
    return lambda x, w: x * op(w * x)


def called_back(f, saved):
    like = jax.ShapeDtypeStruct(saved.shape, saved.dtype)
    return jax.pure_callback(f, like, saved, vmap_method="sequential")


class Scale:
    def __init__(self, by):
        self.by = by

    def __call__(self, value):
        return np.asarray(value) * np.float32(self.by)

    def scaled(self, value):
        return self(value)


def with_keywords(by):
    def scale(value, *, by):
        return np.asarray(value) * np.float32(by)

    scale.__kwdefaults__ = {"by": by}
    return scale


KEYS = [jax.random.key(seed) for seed in range(2)]
SCALES = (Scale(2), Scale(3))
CHANGES = {
    "dtype": lambda s, is_cast: (300 * s).astype(("int32", "int8")[is_cast]).astype(s.dtype),
    "key": lambda s, is_cast: jax.random.uniform(KEYS[is_cast], s.shape),
    "array": lambda s, is_cast: called_back(
        lambda value, by=NUMBERS[int(is_cast)]: np.asarray(value) * by, s
    ),
    "set": lambda s, is_cast: called_back(lambda value, by={2 + is_cast}: value * max(by), s),
    "dict": lambda s, is_cast: called_back(lambda value, by={0: is_cast}: value * by[0], s),
    "keyword": lambda s, is_cast: called_back(with_keywords(int(is_cast)), s),
    "object": lambda s, is_cast: called_back(SCALES[is_cast], s),
    "method": lambda s, is_cast: called_back(SCALES[is_cast].scaled, s),
}


@pytest.mark.parametrize("name", CHANGES)
def test_what_a_rule_holds_and_takes_by_a_type_leaves_its_site(name, cpu_mesh):
    body = by_a_bwd(CHANGES[name])

    def asked(mapped):
        return jax.grad(lambda w: jnp.sum(mapped(body, P("data"))(X, w) ** 2))(W)

    off, on, (site,) = gradient_of(asked, cpu_mesh)
    np.testing.assert_array_equal(off, on)
    assert site.reason == "a rule for its derivative computes something else with the check on"


RULES = (
    by_a_bwd_s_number,
    by_a_bwd_s_operands,
    by_a_bwd_in_a_branch,
    by_a_fwd,
    by_a_jvp,
    by_the_operands_of_a_jvp,
    by_a_factor_of_a_jvp,
    by_two_bwds,
    by_two_fwds,
)


@pytest.mark.parametrize("body", RULES, ids=lambda body: body.__name__)
def test_a_rule_that_computes_by_the_type_of_a_value_leaves_its_site(body, cpu_mesh):
    def asked(mapped):
        return jax.grad(lambda w: jnp.sum(mapped(body, P("data"))(X, w) ** 2))(W)

    off, on, (site,) = gradient_of(asked, cpu_mesh)
    np.testing.assert_allclose(off, on, 1e-6)
    assert site.reason == "a rule for its derivative computes something else with the check on"


@pytest.mark.parametrize("row", [1, np.int32(1)])
def test_a_number_that_a_fwd_saves_and_the_check_casts_is_none_of_a_rule_s_own(row, cpu_mesh):
    op = jax.custom_vjp(lambda x, row: jax.lax.dynamic_index_in_dim(x, row, keepdims=False))
    op.defvjp(
        lambda x, row: (op(x, row), (x, row)),
        lambda saved, g: (jnp.zeros_like(saved[0]).at[saved[1]].set(g), None),
    )

    def asked(mapped):
        body = lambda x, w: (op(x, row) * w)[None]  # noqa: E731
        return jax.grad(lambda x: jnp.sum(mapped(body, P("data"))(x, W) ** 2))(jnp.asarray(X))

    off, on, (site,) = gradient_of(asked, cpu_mesh)
    np.testing.assert_allclose(off, on, 1e-5)
    assert site.switched, site


def test_a_scalar_that_a_derivative_saves_is_none_of_a_rule_s_own(cpu_mesh):
    """With the check on, shard_map hands it on as an array of one element, as it does losses."""
    op = jax.custom_vjp(lambda x: x * 2)
    op.defvjp(lambda x: (op(x), None), lambda _, g: (2 * g,))

    def asked(mapped):
        def body(x, w):
            share = jax.lax.pmean((x * w).mean() / (1 + (w * w).sum()), "data")
            return (op(x * w) / share)[None], share[None]

        outputs = mapped(body, (P("data"), P()))
        return jax.grad(lambda w: sum(map(jnp.sum, outputs(X, w))))(jnp.asarray(W))

    off, on, (site,) = gradient_of(asked, cpu_mesh)
    np.testing.assert_allclose(off, on, 1e-5)
    assert site.switched, site


def test_a_number_that_one_branch_multiplies_by_is_none_of_a_rule_s_own(cpu_mesh):
    """With the check on JAX saves the number, which was cast, and fills it in the other branch."""
    op = op_of(lambda x, w: (x * w, w), lambda w, g: (g * w, jnp.sum(g, 0)))

    def asked(mapped):
        body = lambda x, w: jax.lax.cond(w[0] > 0, op, lambda x, w: x * 2, x, w)  # noqa: E731
        return jax.grad(lambda x: jnp.sum(mapped(body, P("data"))(x, W) ** 2))(jnp.asarray(X))

    off, on, (site,) = gradient_of(asked, cpu_mesh)
    np.testing.assert_allclose(off, on, 1e-5)
    assert site.switched, site


def derivative(order, f):
    """Return the derivative of a mapped function by its weight, of some order."""
    scalar = lambda w: jnp.sum(jnp.sin(f(X, w)))  # noqa: E731
    for _ in range(order - 1):
        scalar = functools.partial(lambda g, w: jnp.sum(jnp.sin(jax.grad(g)(w))), scalar)
    return jax.grad(scalar)


def op_with(primal, bwd, saved=lambda w: w):
    op = jax.custom_vjp(lambda w: primal(w))
    op.defvjp(lambda w: (primal(w), saved(w)), bwd)
    return op


def squares(g):
    return 10 * g * jnp.abs(g)


def sines(is_other):
    """Return an op whose second derivative calls it again, or else one that looks like it."""
    sine = op_with(jnp.sin, lambda w, g: (g * cosine(w),))
    other = op_with(jnp.sin, lambda w, g: (squares(g) * jnp.cos(w),))
    cosine = op_with(jnp.cos, lambda w, g: (-g * (other if is_other else sine)(w),))
    return sine


def test_programs_whose_third_derivatives_differ_are_decided_one_by_one(cpu_mesh):
    def asked(mapped):
        ops = map(sines, (False, True))
        return [derivative(3, mapped(lambda x, w, op=op: x * op(w), P("data")))(W) for op in ops]

    off, on, sites = gradient_of(asked, cpu_mesh)
    jax.tree_util.tree_map(lambda a, b: np.testing.assert_allclose(a, b, 1e-3), off, on)
    assert [site.switched for site in sites] == [True, False]


def test_a_rule_is_not_known_by_its_bwd_alone(cpu_mesh):
    """Two ops have one bwd; in the fourth derivative the fwd of one squares a cotangent."""
    bwd = lambda w, g: (g * cosine(w),)  # noqa: E731
    squared = op_with(lambda w: w * 1.0, lambda _, g: (squares(g),))
    sine, other = op_with(jnp.sin, bwd), op_with(jnp.sin, bwd, squared)
    cosine = op_with(jnp.cos, lambda w, g: (-g * other(w),))

    def asked(mapped):
        return derivative(4, mapped(lambda x, w: x * sine(w), P("data")))(W)

    off, on, (site,) = gradient_of(asked, cpu_mesh)
    np.testing.assert_allclose(off, on, 1e-3)
    assert not site.switched, site


def test_an_error_without_words_is_named(cpu_mesh):
    """JAX refuses a sum within groups of equal values, and says nothing."""
    groups = [[0, 1], [2, 3]]
    summed = lambda g: jax.lax.psum(g, "data", axis_index_groups=groups)  # noqa: E731
    op = op_of(lambda w: (w * 1.0, None), lambda _, g: (summed(g),))

    def asked(mapped):
        return jax.grad(lambda w: jnp.sum(mapped(lambda x, w: x * op(w), P("data"))(X, w)))(W)

    *_, (site,) = gradient_of(asked, cpu_mesh)
    assert site.reason.startswith("in the derivative: ")
    assert site.reason != "in the derivative: "
