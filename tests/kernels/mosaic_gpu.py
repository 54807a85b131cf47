"""Mosaic GPU kernels of `jax.experimental.pallas.ops.gpu`, for Hopper and Blackwell.

None of them runs on CPU: JAX 0.10.2 ships an interpreter for Mosaic GPU, but no public name for it.
"""

from __future__ import annotations

import functools

from kernels.case import (
    BWD_TYPE,
    DATA,
    LINE,
    REFUSED,
    ZERO,
    Arg,
    Case,
    Communicates,
    Expected,
    bytes_,
)

_H100 = "h100"
_B200 = "b200"
_OPS = "jax.experimental.pallas.ops.gpu."


# --- attention -------------------------------------------------------------------------------


def _attention(mesh, interpret):
    from jax.experimental.pallas.ops.gpu import attention_mgpu

    config = attention_mgpu.TuningConfig(
        block_q=64,
        block_kv=64,
        max_concurrent_steps=2,
        block_q_dkv=64,
        block_kv_dkv=64,
        block_q_dq=64,
        block_kv_dq=64,
    )
    return lambda q, k, v: attention_mgpu.attention(q, k, v, config)


def _attention_resid(mesh, interpret):
    attention = _attention(mesh, interpret)
    return lambda q, k, v: q + attention(q, k, v)


def _attention_pipeline(mesh, interpret):
    from jax.experimental.pallas.ops.gpu import attention_mgpu

    config = attention_mgpu.TuningConfig(block_q=64, block_kv=64, max_concurrent_steps=2)
    return lambda q, k, v: attention_mgpu.attention_with_pipeline_emitter(q, k, v, config)


def _attention_stopgrad(mesh, interpret):
    from jax import lax

    attention = _attention(mesh, interpret)
    return lambda q, k, v, w: attention(*map(lax.stop_gradient, (q, k, v))) * w


_QKV = Arg((8, 512, 4, 64), "float16", DATA)
_KV_SHARED = Arg((2, 512, 4, 64), "float16")


# --- matmuls ---------------------------------------------------------------------------------


def _hopper_matmul(mesh, interpret):
    from jax.experimental.pallas.ops.gpu import hopper_matmul_mgpu as op

    config = op.TuningConfig(tile_m=128, tile_n=128, tile_k=64, max_concurrent_steps=4)
    return lambda a, b: op.matmul(a, b, None, config)


def _hopper_matmul_user_vjp(mesh, interpret):
    import jax

    matmul = _hopper_matmul(mesh, interpret)
    f = jax.custom_vjp(matmul)
    f.defvjp(
        lambda a, b: (matmul(a, b), (a, b)),
        lambda res, g: (matmul(g, res[1].T), matmul(res[0].T, g)),
    )
    return f


def _hopper_mixed_matmul(mesh, interpret):
    import jax.numpy as jnp
    from jax.experimental.pallas.ops.gpu import hopper_mixed_type_matmul_mgpu as op

    config = op.TuningConfig(tile_m=128, tile_n=128, tile_k=64, max_concurrent_steps=4)
    return functools.partial(op.mixed_matmul_kernel, out_dtype=jnp.bfloat16, config=config)


def _blackwell_matmul(mesh, interpret):
    from jax.experimental.pallas.ops.gpu import blackwell_matmul_mgpu as op

    config = op.TuningConfig(
        tile_m=128, tile_n=128, tile_k=64, max_concurrent_steps=4, collective=False
    )
    return functools.partial(op.matmul_kernel, config=config)


_TILES = dict(block_m=64, block_n=128, block_k=64, max_concurrent_steps=4, grid_block_n=2)


def _ragged_dot(mesh, interpret):
    from jax.experimental.pallas.ops.gpu.ragged_dot_mgpu import ragged_dot

    return lambda x, w, sizes: ragged_dot(x, w, group_sizes=sizes, **_TILES)


def _transposed_ragged_dot(mesh, interpret):
    from jax.experimental.pallas.ops.gpu import transposed_ragged_dot_mgpu as op

    return lambda x, y, sizes: op.transposed_ragged_dot(x, y, group_sizes=sizes, **_TILES)


def _blackwell_ragged_dot(mesh, interpret):
    from jax.experimental.pallas.ops.gpu import blackwell_matmul_mgpu, blackwell_ragged_dot_mgpu

    config = blackwell_ragged_dot_mgpu.TuningConfig(
        tile_m=128,
        tile_n=128,
        tile_k=64,
        max_concurrent_steps=4,
        collective=True,
        grid_tile_width=1,
        grid_minor_dim=blackwell_matmul_mgpu.MatmulDimension.N,
    )
    return functools.partial(blackwell_ragged_dot_mgpu.ragged_dot_kernel, config=config)


_A = Arg((4096, 512), "float16", DATA)
_B = Arg((512, 512), "float16")
_EXPERTS = Arg((4, 512, 512), "float16")
_GROUPS = Arg((16,), "int32", DATA, lambda rng, shape: [256, 200, 312, 256] * 4)


# --- collectives -----------------------------------------------------------------------------


def _all_gather(mesh, interpret):
    from jax.experimental.pallas.ops.gpu.all_gather_mgpu import all_gather

    return functools.partial(all_gather, axis_name="x", num_blocks=16)


def _reduce_scatter(mesh, interpret, scatter_dimension=0):
    from jax.experimental.pallas.ops.gpu.reduce_scatter_mgpu import reduce_scatter

    return functools.partial(
        reduce_scatter, axis_name="x", num_blocks=16, scatter_dimension=scatter_dimension
    )


def _collective_matmul(mesh, interpret):
    import jax.numpy as jnp
    from jax.experimental.pallas.ops.gpu import collective_matmul_mgpu as op

    config = op.TuningConfig(tile_m=128, tile_n=128, tile_k=64, max_concurrent_steps=4)
    return functools.partial(
        op.all_gather_lhs_matmul, axis_name="x", config=config, dtype=jnp.float16
    )


_LINE_X = (Arg((4096, 256), "float32", ("x",)),)


# --- the table -------------------------------------------------------------------------------

_TRUSTED = Expected(ZERO, ZERO, ZERO, wrong=True)
_WRONG_SPEC = Expected(ZERO, ZERO, REFUSED, wrong=True)
_RIGHT = Expected(ZERO, ZERO, ZERO)
_QKV_GRADS = Expected(bytes_(model=1572864), BWD_TYPE, ZERO)

CASES = (
    Case("attention_mgpu_fwd", _H100, (_QKV,) * 3, _attention, _TRUSTED),
    Case("attention_mgpu_wrongspec", _H100, (_QKV,) * 3, _attention, _WRONG_SPEC, out_spec=()),
    Case("attention_mgpu", _H100, (_QKV,) * 3, _attention, _QKV_GRADS, (0, 1, 2)),
    Case("attention_mgpu_resid", _H100, (_QKV,) * 3, _attention_resid, _QKV_GRADS, (0, 1, 2)),
    Case(
        "attention_mgpu_mixedkv",
        _H100,
        (_QKV, _KV_SHARED, _KV_SHARED),
        _attention,
        Expected(bytes_(model=524288, both=1048576), BWD_TYPE, bytes_(data=1048576)),
        (0, 1, 2),
    ),
    Case("attention_mgpu_pipeline", _H100, (_QKV,) * 3, _attention_pipeline, _TRUSTED),
    Case(
        "attention_mgpu_stopgrad",
        _H100,
        (*(_QKV,) * 3, Arg((64,), "float16")),
        _attention_stopgrad,
        Expected(bytes_(both=128), bytes_(data=524288), bytes_(data=128), wrong=True),
        (3,),
    ),
    Case("hopper_matmul", _H100, (_A, _B), _hopper_matmul, _TRUSTED),
    Case(
        "hopper_matmul_user_vjp",
        _H100,
        (_A, _B),
        _hopper_matmul_user_vjp,
        Expected(bytes_(both=524288, model=1048576), BWD_TYPE, bytes_(data=524288)),
        (0, 1),
    ),
    Case(
        "hopper_mixed_matmul",
        _H100,
        (
            Arg((4096, 512), "int8", DATA, lambda rng, shape: rng.integers(-128, 128, shape)),
            Arg((512, 512), "bfloat16"),
        ),
        _hopper_mixed_matmul,
        _TRUSTED,
    ),
    Case("ragged_dot_mgpu", _H100, (_A, _EXPERTS, _GROUPS), _ragged_dot, _TRUSTED),
    Case("transposed_ragged_dot_mgpu", _H100, (_A, _A, _GROUPS), _transposed_ragged_dot, _TRUSTED),
    Case(
        "all_gather_mgpu",
        _H100,
        _LINE_X,
        _all_gather,
        _RIGHT,
        out_spec=(),
        mesh=LINE,
        communicates=Communicates(
            "all_gather_invariant", ("x",), _OPS + "all_gather_mgpu:all_gather", "kernel"
        ),
    ),
    Case(
        "all_gather_mgpu_outD",
        _H100,
        _LINE_X,
        _all_gather,
        _RIGHT,
        out_spec=("x",),
        mesh=LINE,
        communicates=Communicates(
            "all_gather", ("x",), _OPS + "all_gather_mgpu:all_gather", "kernel"
        ),
    ),
    Case(
        "reduce_scatter_mgpu",
        _H100,
        _LINE_X,
        _reduce_scatter,
        _TRUSTED,
        out_spec=("x",),
        mesh=LINE,
        communicates=Communicates(
            "reduce_scatter", ("x",), _OPS + "reduce_scatter_mgpu:reduce_scatter", "kernel"
        ),
    ),
    Case(
        "all_reduce_mgpu",
        _H100,
        _LINE_X,
        functools.partial(_reduce_scatter, scatter_dimension=None),
        _RIGHT,
        out_spec=(),
        mesh=LINE,
        communicates=Communicates(
            "all_reduce", ("x",), _OPS + "reduce_scatter_mgpu:reduce_scatter", "kernel"
        ),
    ),
    Case(
        "collective_matmul_mgpu",
        _H100,
        (Arg((8192, 512), "float16", ("x",)), Arg((512, 2048), "float16", (None, "x"))),
        _collective_matmul,
        _TRUSTED,
        out_spec=(None, "x"),
        mesh=LINE,
        communicates=Communicates(
            "all_gather",
            ("x",),
            _OPS + "collective_matmul_mgpu:all_gather_lhs_matmul",
            "kernel_body",
        ),
    ),
    Case("blackwell_matmul", _B200, (_A, _B), _blackwell_matmul, _TRUSTED),
    Case("blackwell_ragged_dot", _B200, (_A, _EXPERTS, _GROUPS), _blackwell_ragged_dot, _TRUSTED),
)
