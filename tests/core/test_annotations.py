"""A kernel's output that is annotated less varying than it is: widened by a proof, or refused."""

from __future__ import annotations

import inspect
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import raising
from jax.experimental import pallas as pl
from jax.sharding import PartitionSpec as P

import shardrules as sr
from core import kernels, versions
from shardrules import errors

X = np.arange(8, dtype=np.float32)


def annotated(shape, *axes):
    """Return a ShapeDtypeStruct that says over which axes an output varies."""
    axes = frozenset(axes)
    if hasattr(jax.sharding, "ManualAxisType"):
        mat = jax.sharding.ManualAxisType(varying=axes)
        return jax.ShapeDtypeStruct(shape, jnp.float32, manual_axis_type=mat)
    return jax.ShapeDtypeStruct(shape, jnp.float32, vma=axes)


annotates = versions.where(versions.annotates_outputs)


@pytest.fixture(autouse=True)
def nothing_is_told_yet():
    """An op that another test declared keeps the hooks, and with them what was told."""
    sr.install().uninstall(ops=True)


def cast(x, axes):
    if hasattr(jax.lax, "pcast"):
        return jax.lax.pcast(x, axes, to="varying")
    return jax.lax.pvary(x, axes)


def copied(mesh, *axes, out_specs=P("data"), kernel=kernels.copy_kernel):
    """A copy whose output is annotated as invariant, and cast to axes after (MaxText's form)."""

    def body(x):
        out = annotated(x.shape)
        y = pl.pallas_call(kernel, out_shape=out, interpret=True)(x)
        return cast(y, axes) if axes else y

    return versions.shard_map(body, mesh=mesh, in_specs=P("data"), out_specs=out_specs)


@annotates
def test_a_proof_widens_an_annotation_and_the_cast_after_it_does_nothing(cpu_mesh, hooks):
    f = copied(cpu_mesh, "data")
    np.testing.assert_array_equal(jax.jit(f)(X), X)
    with pytest.warns(errors.AnnotationWarning):
        np.testing.assert_array_equal(copied(cpu_mesh)(X), X)
    wide = copied(cpu_mesh, "model", "data", out_specs=P(("data", "model")))
    np.testing.assert_array_equal(wide(X), np.repeat(X.reshape(4, 2), 2, axis=0).ravel())
    with raising.wrong_out_specs():
        jax.eval_shape(copied(cpu_mesh, out_specs=P()), X)


@annotates
def test_a_declared_rule_refuses_an_annotation(cpu_mesh, hooks):
    kernel = sr.no_communication(kernels.copy_kernel)
    with raising.raises(errors.RuleError, annotation=sr.AxisType(), answer=sr.AxisType("data")):
        jax.eval_shape(copied(cpu_mesh, "data", kernel=kernel), X)


@annotates
def test_a_cast_stays_an_error_without_the_hooks(cpu_mesh):
    f = versions.shard_map(
        lambda x: cast(x, ("data",)), mesh=cpu_mesh, in_specs=P("data"), out_specs=P("data")
    )
    with pytest.raises(ValueError):
        jax.eval_shape(f, X)
    with sr.install():
        jax.eval_shape(f, X)
    with pytest.raises(ValueError):
        jax.eval_shape(f, X)


def told(f, *args, run=jax.eval_shape):
    """Trace a function, or run it eagerly, and return what it warns of."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run(f, *args)
    return [one.message for one in caught if one.category is errors.AnnotationWarning]


def then(mesh, after, kernel=kernels.copy_kernel, spec=P(("data", "model")), jit=False):
    """A copy of what varies over both axes, annotated as invariant, and what is done with it."""

    def call(x):
        return pl.pallas_call(kernel, out_shape=annotated(x.shape), interpret=True)(x)

    def body(x):
        return after((jax.jit(call) if jit else call)(x))

    return versions.shard_map(body, mesh=mesh, in_specs=spec, out_specs=spec)


@annotates
def test_an_annotation_that_the_kernel_contradicts_is_told_once_for_each_kernel_and_place(
    cpu_mesh, hooks
):
    def kernel(x_ref, o_ref):
        o_ref[...] = x_ref[...]

    def twice(x):
        out = annotated(x.shape)
        x = pl.pallas_call(kernel, out_shape=out, interpret=True)(x)
        return pl.pallas_call(kernel, out_shape=out, interpret=True)(x)

    f = versions.shard_map(twice, mesh=cpu_mesh, in_specs=P("data"), out_specs=P("data"))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        jax.eval_shape(f, X)
        jax.eval_shape(lambda x: f(x) + 1, X)  # traced anew, and told already
    caught = [one for one in caught if one.category is errors.AnnotationWarning]
    first = inspect.getsourcelines(twice)[1] + 2
    assert [(one.filename, one.lineno) for one in caught] == [
        (__file__, first),
        (__file__, first + 1),
    ]
    error = caught[0].message
    assert (error.kernel, error.output, error.axes) == ("kernel", 0, frozenset({"data"}))
    assert (str(error.annotation), str(error.answer)) == ("invariant", "varying over {data}")
    assert error.at == f"{__file__}:{first}"
    text = str(error)
    assert text.startswith("output 0 of pallas_call kernel 'kernel' (defined at ")
    assert (
        f", called at {__file__}:{first}, is annotated 'invariant', but the kernel's own jaxpr "
        "shows that it depends on its operands, so that it is 'varying over {data}'. shardrules "
        "widens it. Plain JAX believes the annotation and loses the reduction over {data} wherever "
        "one follows from the type: each device keeps its own share of a gradient. Remove the "
        "annotation, or write "
    ) in text
    assert text.endswith("=frozenset({'data'})).") or text.endswith("vma=frozenset({'data'}).")


@annotates
@pytest.mark.parametrize("jit", [False, True])
@pytest.mark.parametrize("axes", [[("data", "model")], ["data", "model"], ["model", "data"]])
def test_a_cast_of_the_output_to_what_it_is_silences_the_warning(cpu_mesh, hooks, axes, jit):
    def after(y):
        for one in axes:
            y = cast(y, one)
        return y

    f = then(cpu_mesh, after, jit=jit)
    assert not told(f, X)
    with warnings.catch_warnings():
        warnings.simplefilter("error", errors.AnnotationWarning)
        f(X)  # eagerly


@annotates
@pytest.mark.parametrize("jit", [False, True])
def test_a_cast_that_also_adds_axes_silences_the_warning(cpu_mesh, hooks, jit):
    def body(x):
        call = pl.pallas_call(kernels.copy_kernel, out_shape=annotated(x.shape), interpret=True)
        return cast((jax.jit(call) if jit else call)(x), ("model", "data"))

    both = P(("data", "model"))
    assert not told(versions.shard_map(body, mesh=cpu_mesh, in_specs=P("data"), out_specs=both), X)


@annotates
@pytest.mark.parametrize(
    ("after", "axes"),
    [
        (lambda y: cast(y, "model"), {"data"}),
        (lambda y: cast(3 * y, ("data", "model")), {"data", "model"}),  # 3 may be a weight
        (lambda y: y, {"data", "model"}),
    ],
)
def test_a_cast_that_may_lose_something_does_not(cpu_mesh, hooks, after, axes):
    (one,) = told(then(cpu_mesh, after), X)
    assert one.axes == axes


@annotates
def test_only_the_output_that_is_cast_is_silent(cpu_mesh, hooks):
    def first(x_ref, o_ref):
        o_ref[...] = x_ref[...]

    def body(x):
        x = pl.pallas_call(first, out_shape=annotated(x.shape), interpret=True)(x)
        x = pl.pallas_call(kernels.copy_kernel, out_shape=annotated(x.shape), interpret=True)(x)
        return cast(x, "data")

    f = versions.shard_map(body, mesh=cpu_mesh, in_specs=P("data"), out_specs=P("data"))
    (one,) = told(f, X)
    assert one.kernel == "first"


@annotates
@pytest.mark.parametrize(
    ("masked", "count"),
    [
        (lambda y, x: jnp.where(x[0] > 3, y, 0).astype(jnp.float32).reshape(1), 0),
        (lambda y, x: jax.jit(lambda y: -y)(y), 0),
        (lambda y, x: y * x[0], 1),  # which is as good as a weight
        (lambda y, x: jax.jit(lambda y, w: (w, w + y)[1])(y, x), 1),
        (lambda y, x: jax.lax.psum(y, "model"), 1),
    ],
)
def test_what_is_only_masked_or_converted_in_a_jit_is_the_output_still(
    cpu_mesh, hooks, masked, count
):
    """MaxText's megablox puts zeros where a group is another device's, before its cast."""

    @jax.jit
    def call(x):
        y = pl.pallas_call(kernels.copy_kernel, out_shape=annotated(x.shape), interpret=True)(x)
        return masked(y, x)

    both = P(("data", "model"))
    f = versions.shard_map(
        lambda x: cast(call(x), "data"), mesh=cpu_mesh, in_specs=both, out_specs=both
    )
    found = told(f, X)
    assert [one.axes - {"model"} for one in found if "data" in one.axes] == [{"data"}] * count


@annotates
@pytest.mark.parametrize("casts", [True, False])
@pytest.mark.parametrize("run", [jax.eval_shape, lambda f, x: f(x)])
def test_a_kernel_in_a_loop_is_told_like_any(cpu_mesh, hooks, run, casts):
    def step(carry, row):
        y = pl.pallas_call(kernels.copy_kernel, out_shape=annotated(row.shape), interpret=True)(row)
        return carry, cast(y, "data") if casts else y

    f = versions.shard_map(
        lambda x: jax.lax.scan(step, 0.0, x)[1],
        mesh=cpu_mesh,
        in_specs=P(None, "data"),
        out_specs=P(None, "data"),
    )
    assert len(told(f, X.reshape(2, 4), run=run)) == (not casts)


@annotates
def test_an_annotation_that_says_enough_or_more_is_not_told(cpu_mesh, hooks):
    def body(x):
        x = pl.pallas_call(
            kernels.copy_kernel, out_shape=annotated(x.shape, "data"), interpret=True
        )(x)
        return pl.pallas_call(
            kernels.copy_kernel, out_shape=annotated(x.shape, "data", "model"), interpret=True
        )(x)

    both = P(("data", "model"))
    f = versions.shard_map(body, mesh=cpu_mesh, in_specs=P("data"), out_specs=both)
    assert not told(f, X)


@annotates
def test_the_gradient_of_a_weight_that_is_annotated_like_the_weight(cpu_mesh):
    """As MaxText's megablox: plain JAX leaves out the sum over the batch's axis."""

    def scale(x, w):
        return pl.pallas_call(
            kernels.scale_kernel, out_shape=annotated(x.shape, "data"), interpret=True
        )(x, w)

    def weights(g, x):
        out = annotated(x.shape[1:])
        return pl.pallas_call(kernels.sum_rows_kernel, out_shape=out, interpret=True)(g, x)

    @jax.custom_vjp
    def op(x, w):
        return scale(x, w)

    op.defvjp(lambda x, w: (scale(x, w), (x, w)), lambda r, g: (scale(g, r[1]), weights(g, r[0])))

    def loss(x, w):
        f = versions.shard_map(op, mesh=cpu_mesh, in_specs=(P("data"), P()), out_specs=P("data"))
        return f(x, w).sum()

    x, w = np.ones((8, 4), np.float32), np.ones(4, np.float32)
    with sr.install():
        with pytest.warns(errors.AnnotationWarning) as got:
            gradient = jax.grad(loss, argnums=1)(x, w)
        (one,) = [one.message for one in got if one.category is errors.AnnotationWarning]
        assert (one.kernel, one.axes) == ("sum_rows_kernel", {"data"})
        said = sr.explain(jax.grad(loss, argnums=1), x, w)
    np.testing.assert_array_equal(gradient, np.full(4, 8, np.float32))
    (text,) = said.annotations
    assert text.startswith("output 0 of pallas_call kernel 'sum_rows_kernel'")
    assert f"annotation: {text[:60]}" in str(said)


@annotates
def test_a_refusal_by_jax_names_the_annotation(cpu_mesh, hooks):
    with pytest.raises(ValueError) as caught:
        jax.eval_shape(copied(cpu_mesh, out_specs=P()), X)
    assert "annotated 'invariant': over {data}" in str(caught.value)
