"""Forward mode with a probe for each device: a varying tangent of an invariant primal."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import raising
from jax import lax
from jax.experimental import jet
from jax.sharding import PartitionSpec as P

from core import versions

pytestmark = [pytest.mark.usefixtures("hooks")]
X = np.arange(1, 5, dtype=np.float32)
W = np.array([[0.3, 0.1], [0.2, 0.5]], np.float32)


@jax.custom_jvp
def custom(x):
    return jnp.sin(x)


custom.defjvp(lambda primals, tangents: (jnp.sin(primals[0]), jnp.cos(primals[0]) * tangents[0]))


def scan(w):
    return lax.scan(lambda c, row: (jnp.tanh(c * row), c.sum()), w[0], w)[0]


def loss(w):
    return jnp.sin(w @ w).sum()


def along(f):
    """Return the directional derivative of f at w, in a direction that v scales."""
    return lambda w, v: jax.jvp(f, (w,), (v * jnp.ones_like(w),))[1]


def frechet(w, v):
    return jax.scipy.linalg.expm_frechet(w, v * jnp.ones_like(w), compute_expm=False)


def series(w, v):
    terms = (v * jnp.ones_like(w), jnp.ones_like(w))
    return jet.jet(lambda u: jnp.sin(u) * u, (w,), (terms,))[1][1]


def in_a_loop(w, v):
    def body(c, row):
        return c + jax.jvp(jnp.tanh, (row,), (v * row,))[1], None

    return lax.scan(body, jnp.zeros(2), w)[0]


PROGRAMS = {
    "jit": along(jax.jit(lambda w: jnp.sin(3 * w) @ w)),
    "tanh": along(jnp.tanh),
    "scan": along(scan),
    "cond": along(lambda w: lax.cond(w[0, 0] > 0, jnp.sin, jnp.cos, w)),
    "remat": along(jax.checkpoint(lambda w: jnp.sin(jnp.sin(w)))),
    "custom_jvp": along(custom),
    "vmap": along(jax.vmap(lambda row: jnp.sin(row) * row)),
    "forward over reverse": along(jax.grad(loss)),
    "forward over forward": lambda w, v: along(lambda u: along(loss)(u, v))(w, 1.0),
    "loop": in_a_loop,
    "frechet": frechet,
    "jet": series,
}
if not versions.differentiates_what_varies():
    PROGRAMS["forward over reverse"] = PROGRAMS["jit"]


def mapped(f, mesh, out_specs):
    return versions.shard_map(f, mesh=mesh, in_specs=(P(), P("data")), out_specs=out_specs)


@versions.where(versions.types_values)
@pytest.mark.parametrize("name", PROGRAMS)
def test_a_tangent_for_each_device(cpu_mesh, name):
    """Accepted under P() with four different values, or dead of types that no longer matched."""
    f = PROGRAMS[name]
    want = np.stack([f(W, v) for v in X])
    have = jax.jit(mapped(lambda w, x: f(w, x[0])[None], cpu_mesh, P("data")))(W, X)
    np.testing.assert_allclose(have, want, rtol=2e-5)
    with raising.wrong_out_specs():
        jax.eval_shape(mapped(lambda w, x: f(w, x[0]), cpu_mesh, P()), W, X)


@versions.where(versions.types_values)
@pytest.mark.parametrize("name", ["jit", "scan", "custom_jvp", "frechet", "forward over reverse"])
def test_gradient_through_a_tangent(cpu_mesh, name):
    """146.8 for 1174.3: one device's share, called the sum."""
    f = PROGRAMS[name]
    want = jax.grad(lambda w: sum((f(w, v) ** 2).sum() for v in X))(W)
    total = mapped(lambda w, x: lax.psum((f(w, x[0]) ** 2).sum(), "data"), cpu_mesh, P())
    np.testing.assert_allclose(jax.jit(jax.grad(total))(W, X), want, rtol=2e-5)


@versions.where(versions.types_values)
def test_an_invariant_tangent_stays_invariant(cpu_mesh):
    same = mapped(lambda w, x: jax.jvp(jax.jit(jnp.sin), (w,), (w,)), cpu_mesh, P())
    for one in same(W, X):
        assert one.shape == W.shape


@versions.where(versions.types_values)
def test_an_invariant_tangent_of_a_varying_primal(cpu_mesh):
    """The other way around, in which a scan's carry no longer had the type of its body's."""
    f = mapped(lambda w, x: jax.jvp(scan, (x * w,), (w,))[1][None], cpu_mesh, P("data"))
    want = np.stack([jax.jvp(scan, (v * W,), (W,))[1] for v in X])
    np.testing.assert_allclose(jax.jit(f)(W, X), want, rtol=2e-5)
