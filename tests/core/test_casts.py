"""Casts placed for the fewest bytes: on every JAX with types on avals; on others they stay."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

import shardrules as sr
from core import versions
from shardrules import errors, testing
from shardrules.door import internals

W = np.linspace(-1, 1, 64, dtype=np.float32).reshape(8, 8)
X = np.linspace(0, 1, 128, dtype=np.float32).reshape(16, 8)


def repeated(w, x):
    """Rows that are repeated and read twice."""
    wide = jnp.repeat(w, 4, axis=0)
    return lax.psum(((jnp.sin(wide) @ x.T) * (jnp.cos(wide) @ x.T)).sum(), "data")


def scanned(w, x):
    """A weight in a loop: every RNN, and every model whose layers are scanned."""
    h, _ = lax.scan(lambda h, _: (jnp.tanh(h @ w), None), x, None, length=5)
    return lax.psum((h**2).sum(), "data")


def product(w, x):
    """A custom_vjp whose bwd returns a share of w's cotangent, in a loop."""

    @jax.custom_vjp
    def multiply(w, x):
        return x @ w

    multiply.defvjp(lambda w, x: (x @ w, (w, x)), lambda kept, g: (kept[1].T @ g, g @ kept[0].T))
    h, _ = lax.scan(lambda h, _: (jnp.tanh(multiply(w, h)), None), x, None, length=5)
    return lax.psum((h**2).sum(), "data")


def affine(w, x):
    """The same of three operands, one of them a slice of the weight."""

    @jax.custom_vjp
    def apply(w, x, bias):
        return x @ w + bias

    def bwd(kept, g):
        return kept[1].T @ g, g @ kept[0].T, g.sum(0)

    apply.defvjp(lambda w, x, bias: (apply(w, x, bias), (w, x)), bwd)
    h, _ = lax.scan(lambda h, row: (jnp.tanh(apply(w, h, row)), None), x, w[:5])
    return lax.psum((h**2).sum(), "data")


BODIES = (repeated, scanned, product, affine)


def whole(body):
    """The body's function on one device: the sum over the data's blocks is the whole."""

    def f(w, x):
        return jax.vmap(lambda x: body(w, x), axis_name="data")(x.reshape(4, 4, 8))[0]

    return jax.grad(f)(W, X)


def gradient(body, mesh, casts, check=True):
    f = versions.shard_map(body, mesh=mesh, in_specs=(P(), P("data")), out_specs=P(), check=check)
    with sr.install(casts=casts):
        return jax.jit(jax.grad(f)).lower(W, X).compile()


def summed_bytes(program):
    """The bytes of all all-reduces in one execution, on each device."""
    found = testing.account(program).by("kind").get(("all-reduce",))
    return found.bytes if found else 0


@pytest.mark.parametrize("body", BODIES, ids=lambda body: body.__name__)
def test_a_weight_is_summed_once(body, cpu_mesh):
    late, cheapest = (gradient(body, cpu_mesh, casts) for casts in ("late", "cheapest"))
    for program in (late, cheapest):
        np.testing.assert_allclose(program(W, X), whole(body), rtol=1e-4, atol=1e-6)
    if internals.load().typed:
        testing.assert_no_defensive_psum(cheapest)
        assert summed_bytes(cheapest) == W.nbytes < summed_bytes(late)
        assert summed_bytes(cheapest) < summed_bytes(gradient(body, cpu_mesh, "late", False))
    else:
        assert summed_bytes(cheapest) == summed_bytes(late)


@versions.where(versions.types_values)  # JAX 0.4.28 rejects it by its replication sets
@pytest.mark.parametrize("reduce", (lax.psum, lax.pmean), ids=lambda reduce: reduce.__name__)
def test_a_reduction_over_an_axis_along_which_the_value_is_equal(reduce, cpu_mesh):
    """JAX 0.8.2 to 0.12 reject it, although over such axes alone it casts by itself."""

    def body(w, x):
        most = lax.pmax(lax.stop_gradient(x @ w).max(), ("data", "model"))
        return most + reduce(jnp.sin(x @ w).sum(), ("data", "model"))

    unchecked = gradient(body, cpu_mesh, "late", False)
    for casts in ("late", "cheapest"):
        checked = gradient(body, cpu_mesh, casts)
        np.testing.assert_allclose(checked(W, X), unchecked(W, X), rtol=1e-4, atol=1e-6)


@versions.where(versions.types_values)
def test_a_saved_pullback_takes_its_own_types(cpu_mesh):
    """A cast that moved before it made its cotangents vary over axes that it was not taken with."""
    body = lambda w, x: jnp.sin(w) * jnp.tanh(x)  # noqa: E731
    op = jax.custom_vjp(body)
    op.defvjp(lambda w, x: jax.vjp(body, w, x), lambda pullback, g: pullback(g))

    def loss(op, w, x):
        wide = op(w, jnp.tile(x, 64)) * (1.0 + jax.lax.axis_index("model"))
        return lax.psum(wide.sum(), ("data", "model"))

    def grad(op):
        f = versions.shard_map(
            lambda w, x: loss(op, w, x), mesh=cpu_mesh, in_specs=(P(), P("data")), out_specs=P()
        )
        return jax.jit(jax.grad(f, argnums=(0, 1)))(W[0, 0], X[:, 0])

    with sr.install(casts="cheapest"):
        for got, want in zip(grad(op), grad(body)):
            np.testing.assert_allclose(got, want, rtol=1e-5)


@versions.where(versions.types_values)
def test_no_cast_passes_a_saved_pullback_whose_gradient_is_zero(cpu_mesh):
    body = lambda x: lax.stop_gradient(jnp.sin(x))  # noqa: E731
    op = jax.custom_vjp(body)
    op.defvjp(lambda x: jax.vjp(body, x), lambda pullback, g: pullback(g))

    def loss(x):
        wide = jnp.tile(x, 64)
        both = (wide + op(wide)) * (1.0 + jax.lax.axis_index("model"))
        return lax.psum(both.sum(), ("data", "model"))

    f = versions.shard_map(loss, mesh=cpu_mesh, in_specs=P("data"), out_specs=P())
    with sr.install(casts="cheapest"):
        np.testing.assert_allclose(jax.jit(jax.grad(f))(X[:, 0]), 64 * 3 * np.ones(len(X)))


def differentiated(w, x):
    """A product in a loop whose bwd differentiates, and so sums w's cotangent itself."""

    @jax.custom_vjp
    def multiply(w, x):
        return x @ w

    def bwd(kept, g):
        return jax.vjp(lambda w, x: x @ w, *kept)[1](g)

    multiply.defvjp(lambda w, x: (x @ w, (w, x)), bwd)
    h, _ = lax.scan(lambda h, _: (jnp.tanh(multiply(w, h)), None), x, None, length=5)
    return lax.psum((h**2).sum(), "data")


def by_gradients(coefficient):
    """A product whose bwd needs the total of a gradient by w for x's cotangent."""

    @jax.custom_vjp
    def multiply(w, x):
        return x @ w

    def bwd(kept, g):
        w, x = kept
        total = jax.grad(lambda w: (x @ w).mean())(w)
        if not coefficient:  # it depends on the cotangent instead
            total = jax.vjp(lambda w: x @ w, w)[1](g)[0]
        return x.T @ g, g @ total.T if coefficient else 0.1 * x @ (total @ w.T)

    multiply.defvjp(lambda w, x: (x @ w, (w, x)), bwd)

    def body(w, x):
        h = multiply(jnp.tile(w, (1, 3)), jnp.tanh(x + w.sum()))
        return lax.psum((jnp.tanh(h) ** 2).sum(), "data")

    return body


if internals.load().typed:  # to others a gradient in the body is one device's

    def test_a_bwd_that_differentiates_sums_once(cpu_mesh):
        late, cheapest = (gradient(differentiated, cpu_mesh, c) for c in ("late", "cheapest"))
        for program in (late, cheapest):
            np.testing.assert_allclose(program(W, X), whole(scanned), rtol=1e-4, atol=1e-6)
        assert summed_bytes(cheapest) == W.nbytes < summed_bytes(late)

    @versions.where(versions.differentiates_what_varies)
    @pytest.mark.parametrize("coefficient", [False, True])
    def test_a_bwd_that_needs_a_sum_keeps_it(coefficient, cpu_mesh):
        """w's cotangent could be summed earlier, but then w would vary, and the sum be a share."""
        body = by_gradients(coefficient)
        late, cheapest = (gradient(body, cpu_mesh, casts) for casts in ("late", "cheapest"))
        np.testing.assert_allclose(cheapest(W, X), late(W, X), rtol=1e-4)

    @pytest.mark.parametrize("body", BODIES, ids=lambda body: body.__name__)
    def test_a_gradient_in_the_body(body, cpu_mesh):
        """Its residuals are constants of a jaxpr that takes them as inputs, from JAX 0.12."""

        def rows(w, x):  # one of them is mapped
            return jax.vmap(jax.grad(body), (0, None))(jnp.stack([w, 2 * w]), x)

        f = versions.shard_map(rows, mesh=cpu_mesh, in_specs=(P(), P("data")), out_specs=P())
        for casts in ("late", "cheapest"):
            with sr.install(casts=casts):
                program = jax.jit(f).lower(W, X).compile()
            np.testing.assert_allclose(program(W, X)[0], whole(body), rtol=1e-4, atol=1e-6)
        assert summed_bytes(program) == 2 * W.nbytes


def test_one_body_alone(cpu_mesh):
    marked, plain = (
        gradient(body, cpu_mesh, "late") for body in (sr.place_casts(scanned), scanned)
    )
    # One after the other: on JAX 0.5.3's CPU client two executions with collectives that overlap
    # crash the process ("Id can't be larger than the number of participating threads").
    found, wanted = (jax.block_until_ready(program(W, X)) for program in (marked, plain))
    np.testing.assert_allclose(found, wanted, rtol=1e-4)
    if internals.load().typed:
        assert summed_bytes(marked) == W.nbytes < summed_bytes(plain)


def test_what_install_takes():
    with pytest.raises(errors.ShardrulesError) as caught:
        sr.install(casts="early")
    assert str(caught.value) == (
        "install(casts='early') is not known; it is one of 'late', 'cheapest'"
    )
