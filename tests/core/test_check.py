"""Rules under shard_map's check: what is refused, what is accepted, and when it takes effect."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from raising import raises, refused, wrong_out_specs

import shardrules as sr
from core import kernels, versions
from shardrules import errors, testing

X = jax.ShapeDtypeStruct((8, 128), jnp.float32)
W = jax.ShapeDtypeStruct((128,), jnp.float32)
DATA = P("data", None)


def trace(op, mesh, in_specs, out_specs, *args):
    return jax.eval_shape(
        versions.shard_map(op, mesh=mesh, in_specs=in_specs, out_specs=out_specs), *args
    )


def scale(x, w, **kwargs):
    return kernels.call(kernels.scale_kernel, x.shape, x, w, **kwargs)


def varies_as(op, mesh, in_specs, *args):
    """The axes over which op's one output varies: out_specs that leave one of them out raise."""
    axes = []
    for axis in mesh.axis_names:
        others = tuple(a for a in mesh.axis_names if a != axis)
        try:
            trace(op, mesh, in_specs, P(others), *args)
        except ValueError as error:
            assert axis in str(error)
            axes.append(axis)
    return set(axes)


def test_an_unknown_kernel_is_an_error(declared_only, cpu_mesh):
    inputs = (sr.AxisType("data"), sr.AxisType())
    with raises(errors.UnknownKernelError, kernel="scale_kernel", inputs=inputs):
        trace(scale, cpu_mesh, (DATA, P()), DATA, X, W)


def test_kernel_that_its_own_jaxpr_proves_trains_without_a_rule(hooks, cpu_mesh):
    f = versions.shard_map(
        kernels.make_scale(), mesh=cpu_mesh, in_specs=(DATA, P()), out_specs=DATA
    )
    gradient = jax.jit(jax.grad(lambda w, x: (f(x, w) ** 2).sum()))
    x = np.arange(8 * 128, dtype=np.float32).reshape(8, 128)
    w = np.arange(1, 129, dtype=np.float32)
    if not versions.proves_kernels():
        with raises(errors.UnknownKernelError, kernel="scale_kernel"):
            gradient(w, x)
        sr.register("scale_kernel", sr.no_communication)
        sr.register("sum_rows_kernel", sr.no_communication)
    np.testing.assert_allclose(gradient(w, x), (2 * x * x * w).sum(0), rtol=1e-5)
    x = jax.device_put(x, NamedSharding(cpu_mesh, DATA))  # where a program of JAX 0.4 has its mesh
    [verdict] = testing.judge(gradient, w, x).verdicts
    assert (verdict.verdict, verdict.collective.axes) == ("needed", ("data",))


def test_kernel_that_its_own_jaxpr_does_not_prove_is_an_error_that_says_why(hooks, cpu_mesh):
    op = lambda x, w: kernels.call(kernels.impure_kernel, x.shape, x, w)  # noqa: E731
    with raises(errors.UnknownKernelError, kernel="impure_kernel") as caught:
        trace(op, cpu_mesh, (DATA, P()), DATA, X, W)
    blockers = caught.value.audit.blockers if versions.proves_kernels() else ()
    assert [b.primitive for b in blockers] == ["pure_callback"] * versions.proves_kernels()
    assert all("kernels.py:" in b.source for b in blockers)
    # Bits without a seed, say, are of no other device, and differ all the same.
    told = "no device id, and what is named above is the same on every device, write one of these"
    assert (told in str(caught.value)) == versions.proves_kernels()
    sr.register("impure_kernel", sr.no_communication)
    assert varies_as(op, cpu_mesh, (DATA, P()), X, W) == {"data"}


def test_policy_varying_takes_outputs_to_vary_everywhere(cpu_mesh):
    with sr.install(unknown="varying", prove=False):
        assert varies_as(scale, cpu_mesh, (DATA, P()), X, W) == {"data", "model"}


def test_outputs_vary_over_the_union_of_the_inputs(hooks, cpu_mesh):
    sr.register("scale_kernel", sr.no_communication)
    for x_spec, w_spec, axes in [
        (P(), P(), set()),
        (DATA, P(), {"data"}),
        (P(None, "model"), P("model"), {"model"}),
        (P("data", "model"), P("model"), {"data", "model"}),
        (DATA, P("model"), {"data", "model"}),
    ]:
        w = W if w_spec == P() or x_spec != DATA else jax.ShapeDtypeStruct((256,), jnp.float32)
        assert varies_as(scale, cpu_mesh, (x_spec, w_spec), X, w) == axes


@pytest.mark.parametrize(
    "rule, axes",
    [
        (sr.all_gather("model"), {"data", "model"}),
        (sr.all_reduce("data"), set()),
        (sr.all_gather_invariant("model"), {"data"}),
        (lambda ctx: ctx.union.vary("model"), {"data", "model"}),
    ],
)
def test_rule_decides_over_which_axes_outputs_vary(rule, axes, declared_only, cpu_mesh):
    sr.register("scale_kernel", rule)
    assert varies_as(scale, cpu_mesh, (DATA, P()), X, W) == axes


@pytest.mark.parametrize(
    "rule, message",
    [
        (lambda ctx: [ctx.union, ctx.union], r"answered for 2 outputs .* but the call has 1"),
        (
            lambda ctx: ctx.union.vary("rows"),
            r"\{rows\} is not a manual mesh axis here; they are "
            r"\{data, model\}",
        ),
        (
            sr.all_gather("rows"),
            r"names \{rows\}, but the manual mesh axes here are \{data, model\}",
        ),
        (lambda ctx: None, "answered None"),
    ],
)
def test_rule_whose_answer_cant_be_used_is_refused(rule, message, hooks, cpu_mesh):
    sr.register("scale_kernel", rule)
    with pytest.raises(errors.RuleError, match=message):
        trace(scale, cpu_mesh, (DATA, P()), DATA, X, W)


def test_rule_registered_after_a_trace_takes_effect(declared_only, cpu_mesh):
    f = jax.jit(versions.shard_map(scale, mesh=cpu_mesh, in_specs=(DATA, P()), out_specs=DATA))
    x, w = np.ones((8, 128), np.float32), np.ones((128,), np.float32)
    with pytest.raises(errors.UnknownKernelError):
        f(x, w)
    sr.register("scale_kernel", sr.no_communication)
    np.testing.assert_array_equal(f(x, w), x)
    sr.register("scale_kernel", lambda ctx: ctx.union.vary("model"), replace=True)
    with wrong_out_specs():
        f(x, w)
    sr.register("scale_kernel", sr.no_communication, replace=True)
    np.testing.assert_array_equal(f(x, w), x)


def test_scope_holds_inside_its_with_only(declared_only, cpu_mesh):
    f = jax.jit(versions.shard_map(scale, mesh=cpu_mesh, in_specs=(DATA, P()), out_specs=DATA))
    x, w = np.ones((8, 128), np.float32), np.ones((128,), np.float32)
    with sr.rules({"scale_kernel": sr.no_communication}):
        np.testing.assert_array_equal(f(x, w), x)
    with pytest.raises(errors.UnknownKernelError):
        f(x, w)


def test_op_scope_is_not_confused_by_a_jit_inside(declared_only, cpu_mesh):
    inner = jax.jit(scale)
    op = sr.no_communication(lambda x, w: inner(x, w))
    assert varies_as(op, cpu_mesh, (DATA, P()), X, W) == {"data"}
    with pytest.raises(errors.UnknownKernelError):
        trace(inner, cpu_mesh, (DATA, P()), DATA, X, W)


def test_two_calls_of_one_kernel_function_are_kept_apart(hooks, cpu_mesh):
    """JAX to 0.6.2 caches the kernel's jaxpr: what is known of the last was known of the first."""

    def first_of_two(x, w):
        with sr.rules({"scale_kernel": sr.no_communication}):
            y = scale(x, w)
        with sr.rules({"scale_kernel": lambda ctx: ctx.union.vary("model")}):
            scale(x, w)
        return y

    assert varies_as(first_of_two, cpu_mesh, (DATA, P()), X, W) == {"data"}


def grid_scale(x, w):
    rows, columns = x.shape
    return pl.pallas_call(
        kernels.scale_kernel,
        grid=(rows,),
        in_specs=[
            pl.BlockSpec(*versions.block((1, columns), lambda i: (i, 0))),
            pl.BlockSpec(*versions.block((columns,), lambda i: (0,))),
        ],
        out_specs=pl.BlockSpec(*versions.block((1, columns), lambda i: (i, 0))),
        out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype),
        interpret=True,
    )(x, w)


def scanned(x, w):
    def body(carry, row):
        return carry, scale(row[None], carry)[0]

    return jax.lax.scan(body, w, x)[1]


def mapped(x, w):
    return jax.vmap(lambda row: scale(row[None], w)[0])(x)


def looped(x, w):
    return jax.lax.fori_loop(0, 3, lambda _, y: scale(y, w), x)


def branched(x, w):
    return jax.lax.cond(w[0] > 0, lambda: scale(x, w), lambda: scale(x, 2 * w))


@pytest.mark.parametrize(
    "op, power",
    [
        (scale, 1),
        (grid_scale, 1),
        (scanned, 1),
        (mapped, 1),
        (looped, 3),
        (branched, 1),
        (jax.checkpoint(scale), 1),
    ],
)
@pytest.mark.parametrize("compiled", [True, False])
def test_interpret_mode_runs_under_the_check(op, power, compiled, hooks, cpu_mesh):
    sr.register("scale_kernel", sr.no_communication)
    f = versions.shard_map(op, mesh=cpu_mesh, in_specs=(DATA, P()), out_specs=DATA)
    if op is branched and not versions.has_rule_for_cond():
        with refused():
            jax.eval_shape(f, X, W)
        return
    x = np.arange(8 * 128, dtype=np.float32).reshape(8, 128)
    w = np.arange(1, 129, dtype=np.float32)
    np.testing.assert_allclose((jax.jit(f) if compiled else f)(x, w), x * w**power, rtol=1e-6)


@versions.where(versions.proves_kernels)
@pytest.mark.parametrize("look", ["eval_shape", "explain", "scan_calls"])
@pytest.mark.parametrize("check", [True, False])
@pytest.mark.parametrize("rule", [sr.no_communication, sr.linear(sr.no_communication)], ids=str)
def test_a_declaration_that_the_kernel_contradicts_is_refused_before_it_is_lowered(
    look, check, rule, hooks, cpu_mesh
):
    @rule
    def place_kernel(x_ref, o_ref):
        o_ref[...] = x_ref[...] + jax.lax.axis_index("model").astype(x_ref.dtype)

    f = versions.shard_map(
        lambda x: kernels.call(place_kernel, x.shape, x),
        mesh=cpu_mesh,
        in_specs=P("data"),
        out_specs=P("data"),
        check=check,
    )
    look = getattr(sr, look, None) or jax.eval_shape
    with raises(errors.RuleError, rule=rule) as caught:
        look(f, jnp.ones(8))
    assert [b.primitive for b in caught.value.audit.blockers] == ["axis_index"]
