"""FFI calls, callbacks and users' primitives under shard_map's check, by the same registry."""

from __future__ import annotations

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import raising
from jax.extend.core import Primitive
from jax.interpreters import ad, mlir
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import shardrules as sr
from core import kernels, versions
from core.test_check import DATA, trace, varies_as
from shardrules import errors, hlo, registry, testing

X = jax.ShapeDtypeStruct((8, 128), jnp.float32)


def called_back(x):
    return np.asarray(x) * 2


def pure_call(x):
    return jax.pure_callback(called_back, jax.ShapeDtypeStruct(x.shape, x.dtype), x)


def io_call(x):
    from jax.experimental import io_callback

    return io_callback(called_back, jax.ShapeDtypeStruct(x.shape, x.dtype), x)


def ffi_call(x):
    return versions.ffi_call("called_back", jax.ShapeDtypeStruct(x.shape, x.dtype), x)


@functools.lru_cache(maxsize=None)
def make_primitive():
    primitive = Primitive("called_back")
    primitive.def_abstract_eval(lambda x: jax.core.ShapedArray(x.shape, x.dtype))
    primitive.def_impl(lambda x: x * 2)
    mlir.register_lowering(primitive, mlir.lower_fun(lambda x: x * 2, multiple_results=False))
    return primitive


def own_primitive(x):
    return make_primitive().bind(x)


CALLS = [pure_call, io_call, own_primitive]
if versions.has_ffi_call():
    CALLS.append(ffi_call)


@pytest.mark.parametrize("call", [call for call in CALLS if call is not pure_call])
def test_opaque_call_without_rule_is_refused(call, hooks, cpu_mesh):
    with raising.raises(errors.UnknownKernelError, kernel=lambda name: "called_back" in name):
        trace(call, cpu_mesh, DATA, DATA, X)


def test_pure_callback_obeys_its_own_contract(hooks, cpu_mesh):
    assert varies_as(pure_call, cpu_mesh, DATA, X) == {"data"}


@pytest.mark.parametrize("call", CALLS)
def test_outputs_of_an_opaque_call_vary_as_its_rule_says(call, hooks, cpu_mesh):
    with sr.rules({"called_back": sr.no_communication}):
        assert varies_as(call, cpu_mesh, DATA, X) == {"data"}
    with sr.rules({"called_back": sr.all_gather_invariant("data")}):
        assert varies_as(call, cpu_mesh, DATA, X) == set()
    with sr.rules({"called_back": sr.per_device("model")}):
        assert varies_as(call, cpu_mesh, DATA, X) == {"data", "model"}


@functools.lru_cache(maxsize=None)
def make_product(summed):
    """A product that answers for its axis types itself, and a transpose that may forget the psum."""
    primitive = Primitive("own_product")
    product = lambda x, w: x * w  # noqa: E731
    primitive.def_abstract_eval(lambda x, w: x)
    mlir.register_lowering(primitive, mlir.lower_fun(product, multiple_results=False))

    def transpose(ct, x, w):
        share = (ct * x).sum(0)
        return None, jax.lax.psum(share, "data") if summed else share

    ad.defjvp(primitive, lambda dx, x, w: dx * w, lambda dw, x, w: primitive.bind(x, dw))
    ad.primitive_transposes[primitive] = transpose
    return primitive.bind


if versions.types_values():  # it could answer with none before

    def test_a_transpose_that_returns_a_share_for_what_is_invariant_is_refused(hooks, cpu_mesh):
        """JAX to 0.7.2 takes it for the whole, so that a psum's operand had one device's gradient."""

        def gradient(product, x, w):
            f = versions.shard_map(
                lambda x, w: product(x, jax.lax.psum(w[0], "data")),
                mesh=cpu_mesh,
                in_specs=(P("data"), P("data")),
                out_specs=P("data"),
            )
            return jax.jit(jax.grad(lambda x, w: (f(x, w) ** 2).sum(), 1))(x, w)

        x = np.arange(8 * 3, dtype=np.float32).reshape(8, 3)
        w = np.arange(4 * 3, dtype=np.float32).reshape(4, 3)
        want = np.broadcast_to((2 * x**2).sum(0) * w.sum(0), w.shape)
        np.testing.assert_allclose(gradient(make_product(True), x, w), want, rtol=1e-6)
        with pytest.raises(
            errors.CotangentError, match="own_product.* operand 1 .*vary.* over {data}"
        ):
            gradient(make_product(False), x, w)

        def chosen(x, w):
            def op(x, w):
                return make_product(True)(x, w)

            return jax.lax.cond(jax.lax.axis_index("model") > 0, op, jnp.multiply, x, w)

        with raising.raises(errors.AxisError, primitive="own_product"):
            gradient(chosen, x, w)
        sr.register("own_product", sr.no_communication)
        np.testing.assert_allclose(gradient(make_product(False), x, w), want, rtol=1e-6)


@pytest.mark.parametrize("call", [pure_call, own_primitive])
def test_opaque_call_runs_under_the_check(call, hooks, cpu_mesh):
    sr.register("called_back", sr.no_communication)
    f = versions.shard_map(call, mesh=cpu_mesh, in_specs=DATA, out_specs=DATA)
    x = np.arange(8 * 128, dtype=np.float32).reshape(8, 128)
    np.testing.assert_array_equal(jax.jit(f)(x), 2 * x)


@pytest.mark.parametrize("call", CALLS)
def test_declared_op_covers_opaque_calls_in_it(call, hooks, cpu_mesh):
    assert varies_as(sr.no_communication(lambda x: call(x)), cpu_mesh, P("data"), X) == {"data"}


@pytest.mark.parametrize("call", CALLS)
def test_outside_the_check_nothing_is_asked(call, hooks, cpu_mesh):
    f = versions.shard_map(call, mesh=cpu_mesh, in_specs=DATA, out_specs=DATA, check=False)
    assert jax.eval_shape(f, X).shape == X.shape


if versions.has_ffi_call():

    def cholesky(a):
        """LAPACK's, by FFI: a target that every jaxlib for CPUs brings."""
        n = a.shape[0]
        results = jax.ShapeDtypeStruct((n, n), a.dtype), jax.ShapeDtypeStruct((), jnp.int32)
        return versions.ffi_call("lapack_spotrf_ffi", results, a, uplo=np.uint8(ord("L")))[0]

    @pytest.fixture(scope="module")
    def lapack():
        """What the target calls is loaded when JAX first needs it."""
        jnp.linalg.cholesky(jnp.eye(2)).block_until_ready()

    def test_ffi_call_runs_under_the_check(lapack, hooks, cpu_mesh):
        sr.register("lapack_spotrf_ffi", sr.no_communication)
        a = np.stack([np.eye(4, dtype=np.float32) * (i + 1) ** 2 for i in range(4)])
        f = versions.shard_map(
            lambda a: cholesky(a[0])[None], mesh=cpu_mesh, in_specs=P("data"), out_specs=P("data")
        )
        np.testing.assert_allclose(jax.jit(f)(a), np.sqrt(a))

    @pytest.mark.parametrize(
        "rule, tags",
        [
            (sr.no_communication, {"local;local"}),
            (sr.all_reduce("model"), {"join(model);join(model)"}),
            (lambda ctx: [ctx.union, ctx.union], {"typed(data,model);typed(data,model)"}),
            (lambda ctx: [ctx.union.drop("model"), ctx.union], {"typed(data);typed(data,model)"}),
        ],
    )
    def test_compiled_call_carries_the_effects_of_its_rule(rule, tags, lapack, hooks, cpu_mesh):
        sr.register("lapack_spotrf_ffi", rule)
        spec = P("data", "model")
        f = versions.shard_map(cholesky, mesh=cpu_mesh, in_specs=spec, out_specs=spec)
        x = jax.ShapeDtypeStruct((32, 16), jnp.float32, sharding=NamedSharding(cpu_mesh, spec))
        text = jax.jit(f).lower(x).compile().as_text()
        assert set(re.findall(r'shardrules\.effects="([^"]*)"', text)) == tags

    @pytest.mark.parametrize(
        "check, expected",
        [
            (True, [("needed", None)]),
            # Only the tag says that what it gathered is equal along model.
            (False, [("overwide", ("data",))]),
        ],
    )
    def test_verdict_rests_on_what_the_tag_says(check, expected, lapack, hooks, cpu_mesh):
        """LAPACK's target stands in for one that gathers: XLA sees a custom call, and no more."""
        sr.register("lapack_spotrf_ffi", sr.all_gather_invariant("model"))
        scale = kernels.make_scale(
            sr.no_communication(kernels.scale_kernel), sr.no_communication(kernels.sum_rows_kernel)
        )

        def f(x, w):
            gathered = cholesky(jax.lax.stop_gradient(x))
            return scale(gathered, w)

        mapped = versions.shard_map(
            f,
            mesh=cpu_mesh,
            in_specs=(P("data", "model"), P()),
            out_specs=P("data", None),
            check=check,
        )
        gradient = jax.jit(jax.grad(lambda w, x: (mapped(x, w) ** 2).sum()))
        x = jax.ShapeDtypeStruct(
            (32, 16), jnp.float32, sharding=NamedSharding(cpu_mesh, P("data", "model"))
        )
        w = jax.ShapeDtypeStruct((8,), jnp.float32, sharding=NamedSharding(cpu_mesh, P()))
        judgement = testing.judge(gradient, w, x)
        assert [(v.verdict, v.needed_axes) for v in judgement.verdicts] == expected
        assert judgement.opaque == ()
        # Without tag and rule it is LAPACK's own, which reads one device alone: nothing is proven.
        text = gradient.lower(w, x).compile().as_text()
        untagged = text.replace("shardrules.effects", "nothing.effects")
        assert untagged != text
        alone = hlo.judge(untagged, registry=registry.Registry())
        assert not alone.overwide and not alone.redundant and len(alone.verdicts) == 1


@functools.lru_cache(maxsize=None)
def make_gather():
    """A user's primitive that communicates: shard_map's check sees its name, and no more."""
    primitive = Primitive("ring_gather")
    primitive.def_abstract_eval(
        lambda x: jax.core.ShapedArray((x.shape[0], 2 * x.shape[1]), x.dtype)
    )
    mlir.register_lowering(
        primitive,
        mlir.lower_fun(
            lambda x: jax.lax.all_gather(x, "model", axis=1, tiled=True), multiple_results=False
        ),
    )
    return primitive


@pytest.mark.parametrize("with_ffi", [True, False] if versions.has_ffi_call() else [False])
@pytest.mark.parametrize(
    "check, reduction",
    [(True, ("needed", ("data",), None)), (False, ("overwide", ("data", "model"), ("data",)))],
)
def test_user_program_gets_the_same_verdicts_on_every_jax(
    check, reduction, with_ffi, hooks, cpu_mesh
):
    """A kernel with a replicated weight, an FFI call, a call that gathers over model."""
    sr.register("ring_gather", sr.all_gather_invariant("model"))
    if with_ffi:
        jnp.linalg.cholesky(jnp.eye(2)).block_until_ready()  # loads what the target calls
        sr.register("lapack_spotrf_ffi", sr.no_communication)
    scale = kernels.make_scale(
        sr.no_communication(kernels.scale_kernel), sr.no_communication(kernels.sum_rows_kernel)
    )

    def f(x, w):
        x = jax.lax.stop_gradient(x)
        return scale(make_gather().bind(cholesky(x) if with_ffi else x), w)

    spec = P("data", "model")
    mapped = versions.shard_map(
        f, mesh=cpu_mesh, in_specs=(spec, P()), out_specs=P("data", None), check=check
    )
    gradient = jax.jit(
        jax.grad(lambda w, x: (mapped(x, w) ** 2).sum()),
        in_shardings=(NamedSharding(cpu_mesh, P()), NamedSharding(cpu_mesh, spec)),
    )
    blocks = [
        [np.eye(8, dtype=np.float32) * (1 + i + 4 * j) ** 2 for j in range(2)] for i in range(4)
    ]
    x, w = np.block(blocks), np.arange(1, 17, dtype=np.float32)

    gathered = np.block([[np.sqrt(b) for b in row] for row in blocks]) if with_ffi else x
    np.testing.assert_allclose(gradient(w, x), (2 * gathered**2 * w).sum(0), rtol=1e-5)
    judgement = testing.judge(gradient, w, x)
    assert judgement.opaque == ()
    assert sorted(
        (v.collective.kind, v.verdict, v.collective.axes, v.needed_axes) for v in judgement.verdicts
    ) == [("all-gather", "needed", ("model",), None), ("all-reduce", *reduction)]


@functools.lru_cache(maxsize=None)
def make_sincos():
    """A user's primitive with two results, which no parameter counts."""
    primitive = Primitive("own_sincos")
    primitive.multiple_results = True
    primitive.def_abstract_eval(lambda x: (x, x))
    both = lambda x: (jnp.sin(x), jnp.cos(x))  # noqa: E731
    mlir.register_lowering(primitive, mlir.lower_fun(both, multiple_results=True))
    return primitive


def test_a_users_primitive_with_several_results(hooks, cpu_mesh):
    """To JAX 0.5.3 the check sees their replication sets, and no shapes that tell how many."""
    sr.register("own_sincos", sr.no_communication)

    def f(x):
        return make_sincos().bind(jax.lax.psum(x, "data"))

    x = np.arange(4, dtype=np.float32)
    sharded = versions.shard_map(f, mesh=cpu_mesh, in_specs=P("data"), out_specs=P())
    for one, other in zip(jax.jit(sharded)(x), (np.sin(x.sum()), np.cos(x.sum()))):
        np.testing.assert_allclose(one, [other], rtol=1e-5)
    with raising.wrong_out_specs():
        jax.jit(
            versions.shard_map(make_sincos().bind, mesh=cpu_mesh, in_specs=P("data"), out_specs=P())
        )(x)
