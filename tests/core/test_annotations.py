"""A kernel's output that is annotated less varying than it is: widened by a proof, or refused."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
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


@versions.where(versions.annotates_outputs)
def test_a_proof_widens_an_annotation_and_the_cast_after_it_does_nothing(cpu_mesh, hooks):
    f = copied(cpu_mesh, "data")
    np.testing.assert_array_equal(jax.jit(f)(X), X)
    np.testing.assert_array_equal(copied(cpu_mesh)(X), X)
    wide = copied(cpu_mesh, "model", "data", out_specs=P(("data", "model")))
    np.testing.assert_array_equal(wide(X), np.repeat(X.reshape(4, 2), 2, axis=0).ravel())
    with pytest.raises(ValueError, match="out_specs"):
        jax.eval_shape(copied(cpu_mesh, out_specs=P()), X)


@versions.where(versions.annotates_outputs)
def test_a_declared_rule_refuses_an_annotation(cpu_mesh, hooks):
    kernel = sr.no_communication(kernels.copy_kernel)
    with pytest.raises(errors.RuleError) as caught:
        jax.eval_shape(copied(cpu_mesh, "data", kernel=kernel), X)
    assert "is annotated 'invariant', but the rule no_communication " in str(caught.value)
    assert "makes it 'varying over {data}'" in str(caught.value)


@versions.where(versions.annotates_outputs)
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
