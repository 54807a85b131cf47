"""A custom_vjp whose products are a Triton kernel of one's own; needs jax-triton and triton."""

import jax
import jax.numpy as jnp
import jax_triton
import triton
import triton.language as tl


@triton.jit
def multiply_kernel(x_ptr, y_ptr, o_ptr, size: tl.constexpr):
    i = tl.program_id(0) * size + tl.arange(0, size)
    tl.store(o_ptr + i, tl.load(x_ptr + i) * tl.load(y_ptr + i))


def multiply(x, y):
    """Multiply x by y, which has its shape, for an H100."""
    return jax_triton.triton_call(
        x,
        y,
        kernel=multiply_kernel,
        grid=(x.size // 128,),
        size=128,
        out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype),
        compute_capability=90,
    )


@jax.custom_vjp
def scale(x, w):
    """Multiply every row of x by w."""
    return multiply(x, jnp.broadcast_to(w, x.shape))


scale.defvjp(
    lambda x, w: (scale(x, w), (x, w)),
    lambda res, g: (multiply(g, jnp.broadcast_to(res[1], g.shape)), multiply(g, res[0]).sum(0)),
)
