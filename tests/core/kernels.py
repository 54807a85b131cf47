"""The kernels of these tests. They run in interpret mode: the machine has CPUs only."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl


def copy_kernel(x_ref, o_ref):
    o_ref[...] = x_ref[...]


def make_copy(kernel):
    """Return the report's op: a copy kernel whose bwd is the same kernel."""

    def call(x):
        return pl.pallas_call(
            kernel, out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype), interpret=True
        )(x)

    @jax.custom_vjp
    def copy(x):
        return call(x)

    copy.defvjp(lambda x: (copy(x), ()), lambda _, g: (copy(g),))
    return copy


def scale_kernel(x_ref, w_ref, o_ref):
    o_ref[...] = x_ref[...] * w_ref[...]


def sum_rows_kernel(g_ref, x_ref, o_ref):
    o_ref[...] = jnp.sum(g_ref[...] * x_ref[...], axis=0)


def gather_kernel(x_ref, o_ref):
    """Stands in for an all-gather along columns of two devices: the shapes are right."""
    o_ref[...] = jnp.concatenate([x_ref[...], x_ref[...]], axis=1)


def impure_kernel(x_ref, w_ref, o_ref):
    """Asks the host: nothing in its jaxpr says what the answer depends on."""
    x = x_ref[...]
    o_ref[...] = w_ref[...] * jax.pure_callback(
        lambda x: x, jax.ShapeDtypeStruct(x.shape, x.dtype), x
    )


def call(kernel, shape, *args, **kwargs):
    """Call a kernel without a grid."""
    return pl.pallas_call(
        kernel, out_shape=jax.ShapeDtypeStruct(shape, args[0].dtype), interpret=True, **kwargs
    )(*args)


def make_scale(kernel=scale_kernel, weight_kernel=sum_rows_kernel, finish=lambda ct: ct):
    """Return ``x * w`` for x of shape (rows, columns) and w of shape (columns,).

    Args:
      kernel: the forward kernel.
      weight_kernel: the kernel of w's cotangent.
      finish: applied to w's cotangent at the end of bwd.
    """

    @jax.custom_vjp
    def scale(x, w):
        return call(kernel, x.shape, x, w)

    def bwd(residuals, g):
        x, w = residuals
        return call(kernel, g.shape, g, w), finish(call(weight_kernel, w.shape, g, x))

    scale.defvjp(lambda x, w: (scale(x, w), (x, w)), bwd)
    return scale
