"""Bodies whose gradients change if a step gets a whole cotangent in place of shares, by kind.

Each is called with x, split over data, and w, replicated; ``LIMIT`` is small enough to clip.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

LIMIT = 0.05


def clip(g):
    return jnp.clip(g, -LIMIT, LIMIT)


def vjp_of(f, bwd):
    """Return the identity ``f`` with a bwd that takes no residuals."""
    op = jax.custom_vjp(f)
    op.defvjp(lambda x: (f(x), None), lambda _, g: (bwd(g),))
    return op


def primitive_of(name, transpose):
    """Return the identity as a primitive of a user's, with a transpose rule of theirs."""
    p = Primitive(name)
    p.def_impl(lambda x: x)
    p.def_abstract_eval(lambda x: x)
    ad.deflinear2(p, lambda ct, x: [transpose(ct)])
    batching.primitive_batchers[p] = lambda xs, ds: (p.bind(*xs), ds[0])
    mlir.register_lowering(p, lambda ctx, x: [x])
    return p.bind


clipping_primitive = primitive_of("clipping_identity", clip)


def by_linear_call(w):
    return jax.custom_derivatives.linear_call(lambda _, x: x, lambda _, g: clip(g), (), w)


def solved(w):
    """Solve by two steps of cg: the result is no linear function of the right-hand side."""
    n = w.shape[-1]
    a = jnp.asarray(np.diag(np.arange(1.0, n + 1)) + 0.1, w.dtype)
    return jax.scipy.sparse.linalg.cg(lambda v: a @ v, w, maxiter=2)[0]


inner_clips = vjp_of(lambda g: g, clip)
second_clips = jax.custom_vjp(jnp.sin)
second_clips.defvjp(lambda x: (jnp.sin(x), x), lambda x, g: (g * inner_clips(jnp.cos(x)),))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def clip_gradient(limit, x):
    return x


def _clip_bwd(limit, _, g):
    return (g if limit is None else jnp.clip(g, -limit, limit),)


clip_gradient.defvjp(lambda limit, x: (x, None), _clip_bwd)


@jax.custom_vjp
def by_perturbed(w, v):
    return w + v


def _perturbed_fwd(w, v):
    return w.value + v.value, (jnp.zeros(()) if v.perturbed else None,)


def _perturbed_bwd(saved, g):
    (both,) = saved
    return (g, g) if both is not None else (clip(g), jnp.zeros_like(g))


by_perturbed.defvjp(_perturbed_fwd, _perturbed_bwd, symbolic_zeros=True)


def _clip_kernel(g_ref, o_ref):
    o_ref[...] = jnp.clip(g_ref[...], -LIMIT, LIMIT)


def clip_by_kernel(g):
    return pl.pallas_call(_clip_kernel, jax.ShapeDtypeStruct(g.shape, g.dtype), interpret=True)(g)


def in_loop(g):
    return jax.lax.scan(lambda c, _: (clip(c), None), g, None, length=2)[0]


def to_float8(x):
    return jax.lax.reduce_precision(x, exponent_bits=4, mantissa_bits=2)


# By kind: what is done to w before it meets x.
BODIES = {
    "linear_call": by_linear_call,
    "primitive": clipping_primitive,
    "cg": solved,
    "custom_vjp": vjp_of(lambda x: x, clip),
    "kernel": vjp_of(lambda x: x, clip_by_kernel),
    "loop": vjp_of(lambda x: x, in_loop),
    "norm": vjp_of(lambda x: x, lambda g: g / (1e-6 + jnp.sqrt(jnp.sum(g * g)))),
    "affine": vjp_of(lambda x: x, lambda g: g + 1.0),
    "rounded": to_float8,
    "rounded in bwd": vjp_of(lambda x: x, to_float8),
    "rounded by a cast": lambda w: w.astype(jnp.float8_e4m3fn).astype(w.dtype),
    "in a scan": lambda w: jax.lax.scan(
        lambda c, _: (clipping_primitive(c), None), w, None, length=2
    )[0],
    "in a cond": lambda w: jax.lax.cond(w.sum() > 0, by_linear_call, lambda w: w, w),
    "in remat": jax.checkpoint(lambda w: by_linear_call(jnp.sin(w))),
    "in jit": jax.jit(lambda w: by_linear_call(jnp.sin(w))),
}
