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


if internals.load().typed:  # to others a gradient in the body is one device's

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
