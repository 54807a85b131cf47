"""bwds that take a gradient themselves, by a value that is equal on the devices.

The check sums such a gradient inside of bwd, and without it shard_map sums at its inputs.
"""

import collections

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from core import versions
from jax.custom_derivatives import linear_call
from jax.experimental import pallas as pl
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import shardrules
from shardrules.hooks import shard_map

pytestmark = versions.where(versions.types_values)

X = np.linspace(-2, 2, 32, dtype=np.float32).reshape(8, 4)
W = np.linspace(-0.3, 1, 4, dtype=np.float32)


def by_kernel(reference, *args):
    """Compute a function in a Pallas kernel."""
    out = jax.eval_shape(reference, *args)

    def kernel(*refs):
        *inputs, result = refs
        result[...] = reference(*(ref[...] for ref in inputs))

    return pl.pallas_call(kernel, jax.ShapeDtypeStruct(out.shape, out.dtype), interpret=True)(*args)


def op_of(reference, bwd, fwd=None):
    op = jax.custom_vjp(lambda *args: by_kernel(reference, *args))
    op.defvjp(fwd or (lambda *args: (op(*args), args)), bwd)
    return op


def fallback(reference):
    return op_of(reference, lambda saved, g: jax.vjp(reference, *saved)[1](g))


def rms_norm(x, w):
    wide = x.astype(jnp.float32)
    normed = wide * jax.lax.rsqrt(jnp.mean(wide * wide, -1, keepdims=True) + 1e-6)
    return (normed * w.astype(jnp.float32)).astype(x.dtype)


def gated(x, w):
    matrix = jnp.outer(w, w)
    return (jax.nn.silu(x @ matrix) * (x @ matrix.T)) @ matrix


def attention(x, w):
    scores = jnp.einsum("qd,kd->qk", x, jnp.outer(w, w)).astype(jnp.float32)
    return jnp.einsum("qk,kd->qd", jax.nn.softmax(scores).astype(x.dtype), jnp.outer(w, w))


def recurrent(x, w):
    return jax.lax.scan(lambda h, row: 2 * (jnp.tanh(w * h + row),), jnp.zeros_like(w) + x[0], x)[1]


def plain(x, w):
    return jnp.sin(x * w)


def taken(saved, g, f=plain):
    return jax.vjp(f, *saved)[1](g)


def of_w(change):
    """Return a bwd that changes the gradient by ``w``, which is a sum over the devices."""

    def bwd(saved, g):
        by_x, by_w = taken(saved, g)
        return by_x, change(by_w)

    return bwd


def by_linear_transpose(saved, g):
    x, w = saved
    by = lambda f, like: jax.linear_transpose(f, like)(g)[0]  # noqa: E731
    return by(lambda x: x * w, x), by(lambda w: x * w, w)


def by_grad(saved, g):
    return jax.grad(lambda x, w: jnp.sum(plain(x, w) * g), (0, 1))(*saved)


jitted = jax.jit(taken)
SWITCHED = {
    "rms_norm": fallback(rms_norm),
    "gated": fallback(gated),
    "attention": fallback(attention),
    "recurrent": fallback(recurrent),
    "saved_pullback": op_of(plain, lambda pull, g: pull(g), lambda x, w: jax.vjp(plain, x, w)),
    "linear_transpose": op_of(lambda x, w: x * w, by_linear_transpose),
    "grad": op_of(plain, by_grad),
    "jitted": op_of(plain, jitted),
    "remat": op_of(plain, lambda saved, g: taken(saved, g, jax.checkpoint(plain))),
    "scaled": op_of(plain, lambda saved, g: of_w(lambda c: 2 * c / saved[1])(saved, g)),
}


def clipped(c):
    return jnp.clip(c, -0.1, 0.1)


@jax.custom_vjp
def clip(w):
    return w * 1.0


clip.defvjp(lambda w: (w * 1.0, None), lambda _, g: (clipped(g),))


def transposed_to_clip(x, w):
    same = jax.custom_jvp(lambda w: w * 1.0)
    rule = lambda r, t: linear_call(lambda r, t: t, lambda r, c: clipped(c), (), t)  # noqa: E731
    same.defjvp(lambda primals, tangents: (primals[0] * 1.0, rule(None, *tangents)))
    return plain(x, same(w))


def clipping(x, w):
    return plain(x, clip(w))


def summing(x, w):
    return plain(x, w * jax.lax.psum(jnp.sum(x), "data") / 8)


def rounding(x, w):
    return plain(x, w.astype(jnp.bfloat16).astype(jnp.float32))


def narrow(saved, g):
    x, w = saved
    by_x, by_w = taken((x, w.astype(jnp.bfloat16)), g, lambda x, w: plain(x, w.astype(x.dtype)))
    return by_x, by_w.astype(jnp.float32)


def of_both(saved, g):
    by_x, by_w = taken(saved, g)
    return by_x + by_w, by_w


def at_a_sum(saved, g):
    x, w = saved
    return taken((x, w + jax.lax.psum(jnp.sum(g), "data")), g)


def jitted_in_fwd(x, w):
    return plain(x, w), (x, w * (1 + jitted((x, w), x)[1]))


LEFT = {
    "clipped": op_of(plain, of_w(clipped)),
    "squared": op_of(plain, of_w(lambda c: c * c)),
    "moved": op_of(plain, of_w(lambda c: c + 0.1)),
    "normalised": op_of(plain, of_w(lambda c: c / (1 + jnp.sum(c * c)))),
    "chosen": op_of(plain, of_w(lambda c: jnp.where(c > 0, c, 2 * c))),
    "rounded": op_of(plain, of_w(lambda c: jax.lax.reduce_precision(c, 8, 7))),
    "looped": op_of(plain, of_w(lambda c: jax.lax.fori_loop(0, 2, lambda i, c: c * c, c))),
    "jitted_and_clipped": op_of(
        plain, lambda saved, g: (jitted(saved, g)[0], clipped(jitted(saved, g)[1]))
    ),
    "narrow": op_of(plain, narrow),
    "of_both": op_of(plain, of_both),
    "at_a_sum": op_of(plain, at_a_sum),
    "of_a_fwd": op_of(plain, jitted, jitted_in_fwd),
    "transposed_to_clip": op_of(plain, lambda saved, g: taken(saved, g, transposed_to_clip)),
    "clipping": op_of(plain, lambda saved, g: taken(saved, g, clipping)),
    "summing": op_of(lambda x, w: x * 1, lambda saved, g: taken(saved, g, summing)),
    "rounding": op_of(plain, lambda saved, g: taken(saved, g, rounding)),
    "clip_g_and_sum": op_of(plain, lambda saved, g: of_w(clipped)(saved, clipped(g))),
}


def on_meshes():
    grids = ((4, 2), ("data", "model")), ((8,), ("data",)), ((2, 2, 2), ("data", "a", "b"))
    return [Mesh(np.reshape(jax.devices()[:8], shape), names) for shape, names in grids]


def compared(op, mesh, order, dtype=np.float32):
    def derivative():
        f = shard_map(op, mesh, (P("data"), P()), P("data"), check=False)
        once = jax.grad(lambda x, w: jnp.sum(jnp.sin(f(x, w).astype(jnp.float32))), (0, 1))
        squares = lambda x, w: sum(jnp.sum(c.astype(jnp.float32) ** 2) for c in once(x, w))  # noqa: E731
        found = {1: once, 2: jax.grad(squares, (0, 1))}[order]
        found = jax.jit(found)(jnp.asarray(X, dtype), jnp.asarray(W, dtype))
        return [np.asarray(c, np.float32) for c in found]

    off = derivative()
    with shardrules.install(unchecked="check") as handle:
        before = collections.Counter(handle.unchecked())
        on = derivative()
        sites = collections.Counter(handle.unchecked()) - before
    return off, on, [*sites.elements()]


def is_same(name, mesh, order, dtype=np.float32, tolerance=1e-4):
    off, on, sites = compared(SWITCHED[name], mesh, order, dtype)
    for a, b in zip(off, on):
        np.testing.assert_allclose(a, b, tolerance, tolerance / 10)
    assert [site.reason for site in sites] == [""]


@pytest.mark.sampled
@pytest.mark.parametrize("name", SWITCHED)
def test_a_gradient_that_a_bwd_takes_and_returns_is_switched(name):
    is_same(name, on_meshes()[len(name) % 3], 1)


@pytest.mark.parametrize("name", ["rms_norm", "saved_pullback"])
def test_so_is_its_second_derivative(name):
    is_same(name, on_meshes()[0], 2)


def test_casts_to_wider_types_inside_are_switched():
    is_same("rms_norm", on_meshes()[0], 1, jnp.bfloat16, 0.03)


@pytest.mark.sampled
@pytest.mark.parametrize("name", LEFT)
def test_a_gradient_that_a_bwd_takes_and_changes_leaves_its_site(name):
    off, on, sites = compared(LEFT[name], on_meshes()[1], 1)
    jax.tree_util.tree_map(np.testing.assert_array_equal, off, on)
    assert sites and all(site.reason for site in sites)
