"""Rules of an author's behind JAX's wrappers, gradients of other types, weak types, metaclasses.

Each site was switched, with another gradient or result: no trace ran the rule, or compared the type.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from core import versions
from jax import lax
from jax.sharding import PartitionSpec as P

import shardrules
from shardrules.hooks import shard_map

pytestmark = versions.where(versions.types_values)

W = np.linspace(0.3, 1, 4, dtype=np.float32)
X = np.linspace(0.5, 2, 32, dtype=np.float32).reshape(8, 4)
LIMIT = 0.1


@jax.custom_vjp
def clipped(w):
    return w * 1.0


clipped.defvjp(lambda w: (w * 1.0, None), lambda _, g: (jnp.clip(g, -LIMIT, LIMIT),))


def looped(x):
    """A metric by which JAX takes no derivative, so that no trace takes one by all results."""
    return lax.while_loop(lambda c: c[0] < 3, lambda c: (c[0] + 1, c[1] * 2), (0, x))[1]


def decided(body, mesh, in_specs, run, out_specs=P()):
    """Return the results with the check off and with it decided, and the decision."""

    def results():
        return run(shard_map(body, mesh, in_specs, out_specs, check=False))

    before = results()
    with shardrules.install(unchecked="check") as handle:
        known = len(handle.unchecked())
        after = results()
        (site,) = handle.unchecked()[known:]
    for a, b in zip(*map(jax.tree.leaves, (before, after)), strict=True):
        assert a.dtype == b.dtype
        np.testing.assert_allclose(a, b, 1e-5)
    return site


def by_jvp():
    f = jax.custom_jvp(jnp.sin)
    f.defjvp(functools.partial(jax.jvp, lambda w: jnp.sin(clipped(w))))
    return f


def test_a_rule_behind_a_function_of_jax_leaves_its_site(cpu_mesh):
    f = by_jvp()
    body = lambda w: (f(w), looped(w))  # noqa: E731
    gradient = lambda f: jax.jit(jax.grad(lambda w: f(w)[0].sum()))(W)  # noqa: E731
    site = decided(body, cpu_mesh, P(), gradient)
    assert not site.switched and "derivative rules can't be looked at" in site.reason


def test_a_rule_for_vmap_behind_named_call_leaves_its_site(cpu_mesh):
    f = jax.custom_batching.custom_vmap(jnp.sin)
    f.def_vmap(jax.named_call(lambda size, given, w: (jnp.sin(clipped(w)), given[0])))
    mapped = lambda f: jax.grad(lambda w: jax.vmap(f)(w).sum())  # noqa: E731
    site = decided(f, cpu_mesh, P(), lambda f: jax.jit(mapped(f))(W.reshape(2, 2)))
    assert not site.switched


def test_its_second_derivative_is_traced(cpu_mesh):
    def second(f):
        return jax.jit(jax.grad(lambda w: jax.grad(lambda w: f(w).sum())(w).sum()))(W)

    site = decided(by_jvp(), cpu_mesh, P(), second)
    assert not site.switched and "is not known to be linear (it applies max" in site.reason


@pytest.mark.parametrize("f", [jax.nn.relu, jnp.sinc])
def test_a_rule_of_jax_alone_is_switched(f, cpu_mesh):
    body = lambda w, x: (f(w) * x, looped(x))  # noqa: E731
    gradient = lambda f: jax.jit(jax.grad(lambda w: f(w, X)[0].sum()))(W)  # noqa: E731
    assert decided(body, cpu_mesh, (P(), P("data")), gradient, P("data")).switched


def quantized():
    kind = getattr(jax.dtypes, "primal_tangent_dtype", None)
    if kind is None:
        kind = pytest.importorskip("jax._src.dtypes").primal_tangent_dtype
    return kind(jnp.dtype("int8"), jnp.dtype("float32"))


@jax.custom_vjp
def dequantize(q):
    return lax.convert_element_type(q, jnp.int8).astype(jnp.float32)


dequantize.defvjp(lambda q: (dequantize(q), None), lambda _, g: (jnp.clip(g, -LIMIT, LIMIT),))


def test_an_integer_that_has_a_gradient_leaves_its_site(cpu_mesh):
    def run(f):
        def step(i, x):
            out, pull = jax.vjp(f, lax.convert_element_type(i, quantized()), x)
            return pull(jnp.ones_like(out))[0]

        return jax.jit(step)(np.arange(4, dtype=np.int8), X)

    body = lambda q, x: dequantize(q) + lax.psum(x.sum(), "data")  # noqa: E731
    site = decided(body, cpu_mesh, (P(), P("data")), run)
    assert not site.switched and "whose gradients are of another type" in site.reason


def test_so_does_one_that_a_body_closes_over(cpu_mesh):
    def of(q):
        body = lambda x: dequantize(q) + lax.psum(x.sum(), "data")  # noqa: E731
        return shard_map(body, cpu_mesh, P("data"), P(), check=False)

    def gradient():
        def step(i):
            q = lax.convert_element_type(i, quantized())
            return jax.vjp(lambda q: of(q)(X), q)[1](jnp.ones(4))[0]

        return jax.jit(step)(np.arange(4, dtype=np.int8))

    before = gradient()
    with shardrules.install(unchecked="check") as handle:
        np.testing.assert_allclose(before, gradient(), 1e-6)
        (site,) = handle.unchecked()
    assert not site.switched and "closes over values that are traced" in site.reason


@pytest.mark.parametrize("reduce", [lax.psum, lax.pmean, lax.pmax])
def test_a_weak_type_that_the_check_keeps_leaves_its_site(reduce, cpu_mesh):
    """bfloat16 divided by it was bfloat16, and float32 with the check off."""

    def body(x):
        return reduce(jnp.where(jnp.isfinite(x).all(), 1.1, 0.0), "data")

    run = lambda f: jax.jit(lambda x: x / f(x))(jnp.asarray(X, jnp.bfloat16))  # noqa: E731
    decided(body, cpu_mesh, P("data"), run)


def test_a_weak_type_of_a_gradient(cpu_mesh):
    def run(f):
        gradient = jax.grad(lambda scale: f(X, scale).sum())
        return jax.jit(lambda x: x * gradient(2.0))(jnp.asarray(W, jnp.bfloat16))

    decided(lambda x, s: x * s, cpu_mesh, (P("data"), P()), run, P("data"))


class Named(type):
    made = 0

    def __call__(cls):
        Named.made += 1
        layer = super().__call__()
        layer.number = Named.made
        return layer


class Layer(metaclass=Named):
    def __call__(self, w, x):
        return x * w * (1 + jax.random.uniform(jax.random.key(self.number), w.shape))


def test_what_a_metaclass_counts_is_put_back(cpu_mesh):
    """The number of a layer seeds its weights: five traces made other numbers of it."""

    def run(f):
        Named.made = 0
        made = jax.jit(f)(W, X)
        assert Named.made == 1
        return made

    body = lambda w, x: Layer()(w, x)  # noqa: E731
    assert decided(body, cpu_mesh, (P(), P("data")), run, P("data")).switched
