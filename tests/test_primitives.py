"""Opaque primitives that come late, without inputs, or hold whole programs."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export, lax
from jax.experimental import io_callback
from jax.extend.core import Primitive
from jax.interpreters import mlir
from jax.sharding import PartitionSpec as P

import shardrules as sr
from shardrules import errors
from shardrules.hooks import forgetful

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

    op.defvjp(lambda x, w: (op(x, w), (x, w)),
              lambda res, g: (multiply(g, jnp.broadcast_to(res[1], g.shape)),
                              multiply(g, res[0]).sum(0)))
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
        with pytest.raises(errors.UnknownKernelError, match=p.name):
            gradients(around(p.bind), cpu_mesh)
        sr.register(p, sr.no_communication)
        assert_right(gradients(around(p.bind), cpu_mesh))


def test_an_exported_program_is_an_opaque_call(cpu_mesh, hooks):
    struct = jax.ShapeDtypeStruct((2, 4), jnp.float32)
    exported = export.export(jax.jit(lambda x, y: x * y))(struct, struct)
    with pytest.raises(errors.UnknownKernelError) as caught:
        gradients(around(exported.call), cpu_mesh)
    assert "no rule for call_exported kernel '<lambda>'" in str(caught.value)
    sr.register("call_exported", sr.no_communication)
    assert_right(gradients(around(exported.call), cpu_mesh))


def test_a_primitive_that_reads_its_place_without_inputs_is_no_guess(cpu_mesh, hooks):
    p = Primitive("test_rank")
    p.def_impl(lambda: lax.axis_index("data"))
    p.def_abstract_eval(lambda: jax.core.ShapedArray((), jnp.int32))
    mlir.register_lowering(p, mlir.lower_fun(lambda: lax.axis_index("data"),
                                             multiple_results=False))
    f = jax.shard_map(lambda: p.bind()[None], mesh=cpu_mesh, in_specs=(), out_specs=P())
    with pytest.raises(errors.UnknownKernelError, match="test_rank"):
        jax.jit(f)()
    sr.register(p, sr.per_device("data"))
    with pytest.raises(ValueError, match="can't be statically inferred"):
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
    f = jax.shard_map(lambda x: callback(doubled, jax.ShapeDtypeStruct(x.shape, x.dtype), x),
                      mesh=cpu_mesh, in_specs=P("data"), out_specs=P("data"))
    np.testing.assert_array_equal((jax.jit(f) if jit else f)(X), 2 * X)


def test_a_cotangent_whose_invariant_type_is_wrong_is_refused(cpu_mesh, hooks, monkeypatch):
    """As JAX types the indices of a sort, whatever the keys vary over (JAX 0.10.2)."""
    monkeypatch.setattr(forgetful, "_FORGETFUL", ())  # shardrules would type them right
    hooks.uninstall()

    @jax.custom_vjp
    def op(x, w):
        return x * w

    op.defvjp(lambda x, w: (op(x, w), (x, w)),
              lambda res, g: (jnp.argsort(g).astype(g.dtype), (g * res[0]).sum(0)))
    with sr.install(), pytest.raises(errors.CotangentError) as caught:
        gradients(op, cpu_mesh)
    text = str(caught.value)
    assert "at output[0] that is typed invariant over {'data'}, but it depends on sort" in text
    assert text.endswith("Cast its result: shardrules.vary(x, 'data').")
