"""Opaque primitives that come late, without inputs, or hold whole programs."""

import contextlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import raising
from jax import export, lax
from jax.experimental import io_callback
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir
from jax.sharding import PartitionSpec as P

import shardrules as sr
from shardrules import errors
from shardrules.hooks.types import join_law

X = np.arange(1, 33, dtype=np.float32).reshape(8, 4)
W = np.arange(1, 5, dtype=np.float32)


def gradients(op, mesh):
    f = jax.shard_map(op, mesh=mesh, in_specs=(P("data"), P()), out_specs=P("data"))
    return jax.jit(jax.grad(lambda x, w: (f(x, w) ** 2).sum() / 2, argnums=(0, 1)))(X, W)


def assert_right(got):
    want = jax.grad(lambda x, w: ((x * w) ** 2).sum() / 2, argnums=(0, 1))(X, W)
    for a, b in zip(got, want):
        np.testing.assert_allclose(a, b, rtol=1e-6)


def around(multiply):
    """A custom_vjp whose both cotangents come from an opaque product."""

    @jax.custom_vjp
    def op(x, w):
        return multiply(x, jnp.broadcast_to(w, x.shape))

    op.defvjp(
        lambda x, w: (op(x, w), (x, w)),
        lambda res, g: (multiply(g, jnp.broadcast_to(res[1], g.shape)), multiply(g, res[0]).sum(0)),
    )
    return op


def product(name):
    p = Primitive(name)
    p.def_impl(lambda x, y: x * y)
    p.def_abstract_eval(lambda x, y: jax.core.ShapedArray(x.shape, x.dtype))
    return p


def lowered(p):
    mlir.register_lowering(p, mlir.lower_fun(lambda x, y: x * y, multiple_results=False))
    return p


def made_before_lowered_after():
    p = product("test_late_lowering")
    return p, lambda: lowered(p)


def made_after():
    return None, lambda: lowered(product("test_made_late"))


@pytest.mark.parametrize("make", [made_before_lowered_after, made_after])
def test_primitives_that_come_late_are_typed_by_their_rules(cpu_mesh, make):
    early, late = make()
    with sr.install():
        p = late()
        assert early is None or p is early
        with raising.raises(errors.UnknownKernelError, kernel=p.name):
            gradients(around(p.bind), cpu_mesh)
        sr.register(p, sr.no_communication)
        assert_right(gradients(around(p.bind), cpu_mesh))


def test_an_exported_program_is_an_opaque_call(cpu_mesh, hooks):
    struct = jax.ShapeDtypeStruct((2, 4), jnp.float32)
    exported = export.export(jax.jit(lambda x, y: x * y))(struct, struct)
    with raising.raises(errors.UnknownKernelError, kernel="<lambda>"):
        gradients(around(exported.call), cpu_mesh)
    sr.register("call_exported", sr.no_communication)
    assert_right(gradients(around(exported.call), cpu_mesh))


def test_a_primitive_that_reads_its_place_without_inputs_is_no_guess(cpu_mesh, hooks):
    p = Primitive("test_rank")
    p.def_impl(lambda: lax.axis_index("data"))
    p.def_abstract_eval(lambda: jax.core.ShapedArray((), jnp.int32))
    mlir.register_lowering(
        p, mlir.lower_fun(lambda: lax.axis_index("data"), multiple_results=False)
    )
    f = jax.shard_map(lambda: p.bind()[None], mesh=cpu_mesh, in_specs=(), out_specs=P())
    with raising.raises(errors.UnknownKernelError, kernel="test_rank"):
        jax.jit(f)()
    sr.register(p, sr.per_device("data"))
    with raising.not_inferred():
        jax.jit(f)()
    f = jax.shard_map(lambda: p.bind()[None], mesh=cpu_mesh, in_specs=(), out_specs=P("data"))
    np.testing.assert_array_equal(jax.jit(f)(), np.arange(4))


def test_a_primitive_that_types_itself_keeps_its_answer(cpu_mesh, hooks):
    p = Primitive("test_types_itself")
    p.def_impl(lambda x: 2 * x)
    p.def_abstract_eval(lambda x: x)
    mlir.register_lowering(p, mlir.lower_fun(lambda x: 2 * x, multiple_results=False))
    f = jax.shard_map(p.bind, mesh=cpu_mesh, in_specs=P("data"), out_specs=P("data"))
    np.testing.assert_array_equal(jax.jit(f)(X), 2 * X)


@pytest.mark.parametrize("jit", [True, False])
@pytest.mark.parametrize("callback", [jax.pure_callback, io_callback])
def test_callbacks_also_without_jit(cpu_mesh, hooks, callback, jit):
    def doubled(x):
        return np.asarray(x) * np.float32(2)

    sr.register("doubled", sr.no_communication)
    f = jax.shard_map(
        lambda x: callback(doubled, jax.ShapeDtypeStruct(x.shape, x.dtype), x),
        mesh=cpu_mesh,
        in_specs=P("data"),
        out_specs=P("data"),
    )
    np.testing.assert_array_equal((jax.jit(f) if jit else f)(X), 2 * X)


def test_a_cotangent_whose_invariant_type_is_wrong_is_refused(
    cpu_mesh, hooks, monkeypatch, request
):
    """As JAX types the indices of a sort, whatever the keys vary over (JAX 0.10.2)."""
    # shardrules would type them right.
    monkeypatch.setattr(join_law.JoinLawHooks, "acts", False)
    jax.clear_caches()  # of an argsort in another test
    request.addfinalizer(jax.clear_caches)  # and of this one

    @jax.custom_vjp
    def op(x, w):
        return x * w

    op.defvjp(
        lambda x, w: (op(x, w), (x, w)),
        lambda res, g: (jnp.argsort(g).astype(g.dtype), (g * res[0]).sum(0)),
    )
    with raising.raises(errors.CotangentError, problem="lost", axes={"data"}) as caught:
        gradients(op, cpu_mesh)
    assert str(caught.value).endswith(
        " at output[0] that is typed invariant over {'data'}, but it depends on sort, whose "
        "operands vary over them and whose result JAX types as invariant. Cast its result: "
        "shardrules.vary(x, 'data')."
    )


@pytest.fixture(scope="module")
def bilinear():
    """A product with rules for differentiation and batching, as JAX's own primitives have them."""
    p = lowered(product("test_bilinear"))

    def jvp(primals, tangents):
        (x, y), (dx, dy) = primals, tangents
        terms = [] if type(dx) is ad.Zero else [p.bind(dx, y)]
        terms += [] if type(dy) is ad.Zero else [p.bind(x, dy)]
        return p.bind(x, y), sum(terms[1:], terms[0])

    def transpose(ct, x, y):
        return (p.bind(ct, y), None) if ad.is_undefined_primal(x) else (None, p.bind(x, ct))

    def batch(args, dims):
        size = next(x.shape[d] for x, d in zip(args, dims) if d is not None)
        return p.bind(*(batching.bdim_at_front(x, d, size) for x, d in zip(args, dims))), 0

    ad.primitive_jvps[p], ad.primitive_transposes[p] = jvp, transpose
    batching.primitive_batchers[p] = batch
    return p


def looped(f):
    return lambda x, w: lax.scan(lambda c, _: (f(c, w), None), x, length=1)[0]


def mapped(f):
    return jax.jit(lambda x, w: jax.vmap(f)(x, w))


def by_rules(p):
    """The primitive under a scope that has closed when its transpose is taken."""

    def op(x, w):
        with sr.rules({p.name: sr.no_communication}):
            return p.bind(x, w)

    return op


def by_op(p):
    return sr.no_communication(lambda x, w: p.bind(x, w))


@pytest.mark.parametrize(
    "around",
    [lambda f: f, looped, mapped, jax.checkpoint, jax.jit],
    ids=["as it is", "scan", "vmap", "remat", "jit"],
)
@pytest.mark.parametrize("scope, installed", [(by_rules, True), (by_op, True), (by_op, False)])
def test_a_scopes_rule_holds_for_the_transpose_too(cpu_mesh, bilinear, scope, around, installed):
    f = around(scope(bilinear))
    with sr.install() if installed else contextlib.nullcontext():
        assert_right(gradients(lambda x, w: f(x, jnp.broadcast_to(w, x.shape)), cpu_mesh))


def test_a_scopes_rule_holds_nowhere_else(cpu_mesh, hooks, bilinear):
    """Neither for the same primitive beside the scope, nor for another scope's."""
    f = jax.shard_map(
        lambda x, w: by_rules(bilinear)(x, x) + bilinear.bind(x, x),
        mesh=cpu_mesh,
        in_specs=(P("data"), P()),
        out_specs=P("data"),
    )
    with raising.raises(errors.UnknownKernelError, kernel="test_bilinear"):
        jax.eval_shape(f, X, W)

    seen = []

    def two(x):
        for rule in (sr.no_communication, sr.per_device("model"), sr.no_communication):
            with sr.rules({bilinear.name: rule}):
                y, pull = jax.vjp(lambda x: bilinear.bind(x, x), x)
                seen.append(set(jax.typeof(y).manual_axis_type.varying))
            (ct,) = pull(y)
            assert jax.typeof(ct).manual_axis_type.varying == {"data"}
        return x

    jax.eval_shape(jax.shard_map(two, mesh=cpu_mesh, in_specs=P("data"), out_specs=P("data")), X)
    assert seen == [{"data"}, {"data", "model"}, {"data"}]


def test_a_scopes_rule_is_what_explain_shows(cpu_mesh, hooks, bilinear):
    f = jax.shard_map(
        by_rules(bilinear), mesh=cpu_mesh, in_specs=(P("data"), P("data")), out_specs=P("data")
    )
    explained = sr.explain(jax.grad(lambda x: f(x, X).sum()), X)
    assert explained.calls and all(
        (call.kernel, call.rule) == ("test_bilinear", "no_communication")
        for call in explained.calls
    )
    missing = sr.scan_calls(jax.grad(lambda x: f(x, X).sum()), X)
    assert str(missing) == "every opaque call inside shard_map has a rule (2)"
