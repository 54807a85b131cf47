"""Gradients under the default casts are those of late ones, where moving a cast would change them.

In each program a bwd or a step stands in a scan, so that a cast before it saves bytes.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from core import versions
from jax.sharding import PartitionSpec as P

import shardrules
from shardrules.hooks import shard_map

pytestmark = versions.where(versions.types_values)

W = np.linspace(0.3, 1, 4, dtype=np.float32)
XS = np.linspace(-1, 2, 6 * 8 * 64, dtype=np.float32).reshape(6, 8, 64)
WIDE = np.linspace(-0.2, 0.4, 4 * 64, dtype=np.float32).reshape(4, 64)


def op_of(fwd, bwd):
    op = jax.custom_vjp(lambda w: fwd(w)[0])
    op.defvjp(fwd, bwd)
    return op


def half(x):
    return x.astype(jnp.bfloat16)


def rounded_beside(dtype):
    """A cotangent is rounded to bfloat16; another result is as narrow."""
    rounded = lambda g: half(g).astype(jnp.float32) @ WIDE.T  # noqa: E731
    op = op_of(lambda w: ((w @ WIDE, (w * 3).astype(dtype)), None), lambda _, g: (rounded(g[0]),))
    return lambda w: op(w)[0]


def by_another_fwd(w):
    """Its bwd calls a function that clips where it is differentiated."""
    inner = jax.custom_vjp(lambda g: g * 1.0)
    inner.defvjp(lambda g: (jnp.clip(g, -0.1, 0.1), None), lambda _, h: (h,))
    return op_of(lambda w: (w**2 @ WIDE, w), lambda w, g: ((inner(g) @ WIDE.T) * 2 * w,))(w)


def by_another_primal(w):
    inner = jax.custom_jvp(lambda g: g * 1.0)
    inner.defjvp(lambda p, t: (jnp.clip(p[0], -0.1, 0.1), t[0]))
    return op_of(lambda w: (w**2 @ WIDE, w), lambda w, g: ((inner(g) @ WIDE.T) * 2 * w,))(w)


def scanned(op, mesh):
    def body(w, xs):
        step = lambda h, x: (jnp.sin(h + op(w) * x), None)  # noqa: E731
        return jax.lax.scan(step, jnp.zeros_like(xs[0]), xs)[0]

    f = shard_map(body, mesh, (P(), P(None, "data")), P("data"), check=True)
    return jax.grad(lambda w: jnp.sum(jnp.sin(f(w, XS) * 1.3)))


def compared(gradient, *args):
    found = {}
    for casts in ("late", "cheapest"):
        with shardrules.install(casts=casts):
            jax.clear_caches()
            found[casts] = np.asarray(jax.jit(gradient)(*args), np.float32)
    assert np.isfinite(found["late"]).all()
    return found.values()


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_a_cotangent_is_rounded_beside_a_narrow_result(dtype, cpu_mesh):
    late, cheapest = compared(scanned(rounded_beside(dtype), cpu_mesh), W)
    np.testing.assert_allclose(late, cheapest, 1e-5)


def by_a_fwd_with_a_constant(w):
    """From JAX 0.11 a constant array is an input of fwd's jaxpr, before the others."""
    factor = np.linspace(0.9, 1.1, 64, dtype=np.float32)
    inner = jax.custom_vjp(lambda g: g * factor)
    inner.defvjp(lambda g: (jnp.clip(g, -0.1, 0.1) * factor, None), lambda _, h: (h * factor,))
    return op_of(lambda w: (w**2 @ WIDE, w), lambda w, g: ((inner(g) @ WIDE.T) * 2 * w,))(w)


@pytest.mark.parametrize("op", [by_another_fwd, by_another_primal, by_a_fwd_with_a_constant])
def test_a_function_in_a_bwd_is_another_when_differentiated(op, cpu_mesh):
    once = scanned(op, cpu_mesh)
    twice = jax.grad(lambda w: jnp.sum(jnp.sin(once(w))))
    late, cheapest = compared(twice, W)
    np.testing.assert_allclose(late, cheapest, 1e-4)


TENS = np.array([10, 10, -10, -10, 10, 10, -9, -10], np.float16)
SMALL = np.full((8, 4), 4e-5, np.float16)


@pytest.mark.parametrize(
    ("factor", "w", "x"),
    [(1e4, 1e-4, np.stack([TENS] * 4, 1)), (1e-3, 1, SMALL)],
    ids=["too large", "too small"],
)
def test_a_share_that_float16_does_not_hold(factor, w, x, cpu_mesh):
    """The shares over data cancel, and each of them overflowed; or all were rounded to zero."""

    def body(w, x):
        step = lambda h, xi: (h + jnp.sum(xi * (w * np.float16(factor))), None)  # noqa: E731
        start = shardrules.vary(jnp.zeros((), jnp.float16), "data")
        return jax.lax.scan(step, start, x)[0][None]

    f = shard_map(body, cpu_mesh, (P(), P("data")), P("data"), check=True)
    gradient = jax.grad(lambda w: jnp.sum(f(w, x)).astype(jnp.float32))
    late, cheapest = compared(gradient, np.full(4, w, np.float16))
    np.testing.assert_array_equal(late, cheapest)
