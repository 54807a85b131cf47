"""JAX's refusal of what follows from a type that the hooks changed names the cause."""

from __future__ import annotations

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import raising
from jax import lax
from jax.sharding import PartitionSpec as P

from core import versions

X = np.arange(1, 9, dtype=np.float32)


def by_indices(x):
    return jnp.ones(2)[lax.sort((x, jnp.arange(2)), num_keys=1)[1]]


def by_predicate(x):
    return lax.cond(x[0] > 4, lambda: jnp.ones(2), lambda: jnp.zeros(2))


def by_condition(x):
    return lax.while_loop(lambda c: c[0] < x[0], lambda c: c + 1, jnp.zeros(2))


def refusal(f, mesh):
    g = versions.shard_map(f, mesh=mesh, in_specs=P("data"), out_specs=P())
    with pytest.raises((ValueError, TypeError)) as caught:
        jax.eval_shape(g, X)
    return str(caught.value)


@versions.where(versions.types_values, versions.has("jax", "shard_map"))
@pytest.mark.parametrize(
    "f, cause",
    [
        (by_predicate, "cond, as the predicate of a cond or switch varies, at "),
        (by_condition, "while, as the condition of a while_loop varies, at "),
    ],
)
def test_the_cause_stands_beside_jax_own_text(cpu_mesh, hooks, f, cause):
    text = refusal(f, cpu_mesh)
    assert "out_specs" in text and "{data}" in text.partition("shardrules:")[2]
    assert cause in text and "test_type_notes.py:" in text


@versions.where(versions.types_values, versions.has("jax", "shard_map"))
def test_a_primitive_that_forgot_its_axes_is_named(cpu_mesh, hooks):

    def maximum(x):
        return lax.pmax(x, "data", axis_index_groups=[[0, 1], [2, 3]])

    assert re.search(r"\bpmax at .*test_type_notes\.py:", refusal(maximum, cpu_mesh))


@versions.where(versions.types_values, versions.has("jax", "shard_map"))
def test_other_refusals_are_jax_own(cpu_mesh, hooks):
    assert "shardrules" not in refusal(lambda x: jnp.sin(x), cpu_mesh)
    # What was noted in one shard_map is not told of another.
    versions.shard_map(by_predicate, mesh=cpu_mesh, in_specs=P("data"), out_specs=P("data"))(X)
    assert "shardrules" not in refusal(lambda x: jnp.cos(x), cpu_mesh)


def two(w, x):
    """The second one varies, and the gradient has residuals beside them."""
    return {"mean": lax.pmean((w * x).sum(), "data"), "own": jnp.sin(w * x**2).sum()}


def three(w, x):
    """As many residuals as outputs, nearly; the first output varies, and its residuals do."""
    return (w * jnp.sin(x * w), [lax.pmean(w * x, "data"), jnp.sin(w) * w])


@pytest.mark.sampled
@versions.where(versions.types_values, versions.has("jax", "shard_map"))
@pytest.mark.parametrize(
    "body, specs, output",
    [
        (two, P(), "['own']"),
        (two, {"mean": P(), "own": P()}, "['own']"),
        (three, P(), "[0]"),
        (three, (P(), [P(), P()]), "[0]"),
    ],
)
@pytest.mark.parametrize("by", [jax.grad, lambda f: jax.grad(jax.grad(f))])
@pytest.mark.parametrize("jit", [True, False])
def test_of_a_gradient_the_output_that_varies_is_named(
    body, specs, output, by, jit, cpu_mesh, hooks
):
    """JAX pairs residuals with out_specs, and its own error is about pytrees."""
    f = versions.shard_map(body, mesh=cpu_mesh, in_specs=(P(), P("data")), out_specs=specs)

    def loss(w, x):
        return sum(one.sum() for one in jax.tree_util.tree_leaves(f(w, x)))

    gradient = jax.jit(by(loss)) if jit else by(loss)
    with raising.wrong_out_specs() as caught:
        gradient(np.float32(2), X)
    assert f"shardrules: output{output} varies over {{data}}" in str(caught.value)


@versions.where(versions.types_values, versions.has("jax", "shard_map"))
def test_of_a_hessian_the_axes_are_named(cpu_mesh, hooks):
    """To JAX 0.8 the outputs can't be told from their tangents."""
    f = versions.shard_map(two, mesh=cpu_mesh, in_specs=(P(), P("data")), out_specs=P())
    with raising.wrong_out_specs() as caught:
        jax.jit(jax.hessian(lambda w: f(w, X)["own"]))(np.float32(2))
    assert re.search(r"shardrules: .* varies over {data}", str(caught.value))
