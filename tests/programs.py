"""Programs that several tests use: the report's copy kernel, a kernel with a replicated weight."""

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

SHAPE = (32, 128)  # of x; batch over data


def copy_kernel(x_ref, o_ref):
    o_ref[...] = x_ref[...]


def scale_kernel(x_ref, w_ref, o_ref):
    o_ref[...] = x_ref[...] * w_ref[...]


def scale_bwd_kernel(x_ref, g_ref, o_ref):
    o_ref[...] = jnp.sum(x_ref[...] * g_ref[...], axis=0, keepdims=True)


def options(platform):
    """Keyword arguments of pallas_call for a platform."""
    return {
        "cpu": {"interpret": True},
        "tpu": {},
        "gpu": {"compiler_params": plgpu.CompilerParams()},
    }[platform]


def copy_op(platform, kernel=copy_kernel, annotate=False, **call):
    """The report's custom_vjp: a kernel that copies, also as its own bwd."""

    def struct(x):
        kwargs = {"manual_axis_type": jax.typeof(x).manual_axis_type} if annotate else {}
        return jax.ShapeDtypeStruct(x.shape, x.dtype, **kwargs)

    @jax.custom_vjp
    def op(x):
        return pl.pallas_call(kernel, out_shape=struct(x), **options(platform), **call)(x)

    op.defvjp(lambda x: (op(x), ()), lambda _, g: (op(g),))
    return op


def scale_op(platform, kernel=scale_kernel, bwd_kernel=scale_bwd_kernel):
    """x * w with a replicated row w, forward and both cotangents by kernels."""

    def call(body, out, *args):
        return pl.pallas_call(
            body, out_shape=jax.ShapeDtypeStruct(out.shape, out.dtype), **options(platform)
        )(*args)

    @jax.custom_vjp
    def op(x, w):
        return call(kernel, x, x, w)

    op.defvjp(
        lambda x, w: (op(x, w), (x, w)),
        lambda res, g: (call(kernel, g, g, res[1]), call(bwd_kernel, res[1], res[0], g)),
    )
    return op


def loss_of(op, mesh, specs, out=P("data", None), check_vma=True):
    """Sum of squares of an op inside shard_map: its cotangent is not constant."""
    inner = jax.shard_map(op, mesh=mesh, in_specs=specs, out_specs=out, check_vma=check_vma)
    return lambda *args: (inner(*args) ** 2).sum()


def structs(mesh, *pairs):
    """ShapeDtypeStructs of (shape, spec) pairs in f32."""
    return [
        jax.ShapeDtypeStruct(shape, jnp.float32, sharding=NamedSharding(mesh, spec))
        for shape, spec in pairs
    ]


def copy_gradient(platform, mesh, check_vma=True, **kwargs):
    """The report's program: jitted gradient and its argument."""
    loss = loss_of(copy_op(platform, **kwargs), mesh, P("data", None), check_vma=check_vma)
    return jax.jit(jax.grad(loss)), structs(mesh, (SHAPE, P("data", None)))


def scale_gradient(platform, mesh, check_vma=True, **kwargs):
    """Gradients for x and the replicated weight: jitted function and its arguments."""
    loss = loss_of(scale_op(platform, **kwargs), mesh, (P("data", None), P()), check_vma=check_vma)
    return (
        jax.jit(jax.grad(loss, argnums=(0, 1))),
        structs(mesh, (SHAPE, P("data", None)), ((1, SHAPE[1]), P())),
    )


def random_like(args, key=0):
    """Random arrays for ShapeDtypeStructs, placed as they say."""
    keys = jax.random.split(jax.random.key(key), len(args))
    return [
        jax.device_put(jax.random.normal(k, a.shape, a.dtype), a.sharding)
        for k, a in zip(keys, args)
    ]
