"""What one JAX version or another gets wrong in its own way; the program is the same on each."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import raising
from jax.extend.core import Primitive
from jax.interpreters import mlir
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import shardrules as sr
from core import kernels, versions

X = np.arange(1.0, 17, dtype=np.float32).reshape(4, 4)
W = np.arange(1.0, 5, dtype=np.float32)


def sharded(body, in_specs, out_specs):
    mesh = Mesh(np.array(jax.devices()[:4]), ("data",))
    return versions.shard_map(body, mesh=mesh, in_specs=in_specs, out_specs=out_specs)


@pytest.fixture
def twice():
    """A user's primitive."""
    primitive = Primitive("versions_twice")
    primitive.def_impl(lambda x: 2 * x)
    primitive.def_abstract_eval(lambda aval: aval)
    mlir.register_lowering(primitive, mlir.lower_fun(lambda x: 2 * x, multiple_results=False))
    return primitive


@pytest.mark.parametrize("draw", ["gamma", "chisquare", "dirichlet"])
def test_a_draw_from_a_key_per_device_varies(draw, hooks):
    """JAX 0.6.2 accepts four different draws under P()."""
    parameter = {"dirichlet": jnp.ones(3)}.get(draw, 2.0)

    def body(keys):
        return getattr(jax.random, draw)(keys[0], parameter, (2,))

    keys = jax.random.split(jax.random.PRNGKey(0), 4)
    with raising.refused():
        jax.eval_shape(sharded(body, P("data"), P()), keys)
    if versions.types_values():
        assert jax.eval_shape(sharded(body, P("data"), P("data")), keys).shape[0] == 8
        jax.eval_shape(sharded(body, P(), P()), jnp.stack([keys[0]] * 4))


def test_one_primitive_under_two_rules_obeys_each_where_it_is_bound(twice, hooks):
    """To JAX 0.5.3 both obeyed the last."""

    def body(x):
        with sr.rules({twice.name: sr.no_communication}):
            one = twice.bind(x)
        with sr.rules({twice.name: sr.all_reduce("data")}):
            return one, twice.bind(x)

    jax.eval_shape(jax.jit(sharded(body, P("data"), (P("data"), P()))), X)
    with raising.wrong_out_specs():
        jax.eval_shape(jax.jit(sharded(body, P("data"), (P(), P()))), X)


@pytest.mark.parametrize("declare", ["op", "scope"])
def test_a_declared_primitive_in_a_bwd_keeps_its_rule(declare, twice, hooks):
    """To JAX 0.5.3 it had none once bwd was looked at, and was refused."""

    def call(x):
        if declare == "op":
            return sr.no_communication(lambda x: twice.bind(x))(x)
        with sr.rules({twice.name: sr.no_communication}):
            return twice.bind(x)

    @jax.custom_vjp
    def product(x, w):
        return x * w

    product.defvjp(
        lambda x, w: (x * w, (x, w)), lambda kept, g: (g * kept[1], call(g * kept[0]) / 2)
    )
    f = sharded(lambda x, w: product(x[0], w)[None], (P("data"), P()), P("data"))
    gradient = jax.jit(jax.grad(lambda x, w: f(x, w).sum(), 1))(X, W)
    np.testing.assert_allclose(gradient, X.sum(0))


@pytest.mark.parametrize("mapped", ["vmap", "jacrev"])
def test_a_custom_vjp_with_a_replicated_weight_is_mapped(mapped, hooks):
    """JAX 0.8.3 passes the psum a parameter that it doesn't have."""

    @jax.custom_vjp
    def product(x, w):
        return x * w

    product.defvjp(lambda x, w: (x * w, (x, w)), lambda kept, g: (g * kept[1], g * kept[0]))

    def body(x, w):
        return jax.lax.psum(product(x[0], w) ** 2, "data")

    f = sharded(body, (P("data"), P()), P())
    if mapped == "jacrev":
        got = jax.jit(jax.jacrev(f, 1))(X, W)
        np.testing.assert_allclose(got, np.diag(2 * (X**2).sum(0) * W), rtol=1e-5)
    else:
        several = np.stack([X, X + 1])
        got = jax.jit(jax.vmap(jax.grad(lambda x, w: f(x, w).sum(), 1), (0, None)))(several, W)
        np.testing.assert_allclose(got, 2 * (several**2).sum(1) * W, rtol=1e-5)


def psums_in_branches(jaxpr, inside=False):
    """Return how many psums stand in branches."""
    count = 0
    for equation in jaxpr.eqns:
        count += inside and equation.primitive.name.startswith("psum")
        for value in equation.params.values():
            for inner in value if isinstance(value, (tuple, list)) else (value,):
                inner = getattr(inner, "jaxpr", inner)
                if hasattr(inner, "eqns"):
                    count += psums_in_branches(inner, inside or equation.primitive.name == "cond")
    return count


@versions.where(versions.has_rule_for_cond)
@pytest.mark.parametrize("varying", [True, False])
def test_a_cond_whose_branches_hold_kernels_has_a_gradient(varying, hooks):
    """JAX 0.5.3 leaves the psum in a branch, and the program hangs; 0.4.35 has no rule for cond."""
    scale = kernels.make_scale()
    for kernel in ("scale_kernel", "sum_rows_kernel"):
        sr.register(kernel, sr.no_communication)

    def body(x, w):
        decides = x[0, 0] > 4 if varying else w[0] > 0
        return jax.lax.cond(decides, lambda: scale(x, w), lambda: scale(2 * x, w))

    f = sharded(body, (P("data"), P()), P("data"))
    gradient = jax.jit(jax.grad(lambda x, w: f(x, w).sum(), 1))
    assert not (varying and psums_in_branches(jax.make_jaxpr(gradient)(X, W).jaxpr))
    taken = np.where(X[:, :1] > 4, 1, 2) if varying else np.ones((4, 1))
    np.testing.assert_allclose(gradient(X, W), (taken * X).sum(0), rtol=1e-6)
