"""GPU kernels of `jax.experimental.pallas.ops.gpu`: Triton's, and Mosaic's for Hopper and Blackwell.

Those of Mosaic don't run on CPU: JAX 0.10.2 ships an interpreter, but no public name for it.
"""

from __future__ import annotations

import functools

from kernels.case import (
    BWD_TYPE,
    DATA,
    FORWARD,
    LINE,
    NO_DERIVATIVE,
    NOT_ANNOTATED,
    SAME_FAILURE,
    TRUSTED,
    WRONG_SPEC,
    ZERO,
    Arg,
    Case,
    Communicates,
    Expected,
    Fails,
    bytes_,
    drawn,
    matmul_with_vjp,
    segments,
    stopped,
)

# --- Triton ----------------------------------------------------------------------------------


def _mha(mesh, interpret, backward="triton"):
    from jax.experimental.pallas.ops.gpu import attention

    blocks = attention.BlockSizes(
        block_q=64, block_k=64, block_q_dkv=64, block_kv_dkv=64, block_q_dq=64, block_kv_dq=64
    )

    def f(q, k, v, segment_ids=None):
        return attention.mha(
            q,
            k,
            v,
            segment_ids,
            sm_scale=64**-0.5,
            block_sizes=blocks,
            backward_pass_impl=backward,
            interpret=interpret,
        )

    return f


def _rms_norm(mesh, interpret, backward="triton"):
    from jax.experimental.pallas.ops.gpu.rms_norm import rms_norm

    return lambda x, w, b: rms_norm(x, w, b, backward_pass_impl=backward, interpret=interpret)


def _layer_norm(mesh, interpret):
    from jax.experimental.pallas.ops.gpu.layer_norm import layer_norm

    return lambda x, w, b: layer_norm(x, w, b, interpret=interpret)


def _softmax(mesh, interpret):
    from jax.experimental.pallas.ops.gpu.softmax import softmax

    return functools.partial(softmax, interpret=interpret)


def _decode_mqa(mesh, interpret):
    from jax.experimental.pallas.ops.gpu import decode_attention

    return lambda q, k, v: decode_attention.mqa(q, k, v, interpret=interpret)


def _decode_gqa(mesh, interpret):
    from jax.experimental.pallas.ops.gpu import decode_attention

    return lambda q, k, v, n: decode_attention.gqa(q, k, v, kv_seq_len=n, interpret=interpret)


def _paged(mesh, interpret):
    from jax.experimental.pallas.ops.gpu.paged_attention import paged_attention

    return functools.partial(paged_attention, interpret=interpret)


# --- Mosaic GPU: attention -------------------------------------------------------------------------------


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


# --- Mosaic GPU: matmuls ---------------------------------------------------------------------------------


def _hopper_matmul(mesh, interpret):
    from jax.experimental.pallas.ops.gpu import hopper_matmul_mgpu as op

    config = op.TuningConfig(tile_m=128, tile_n=128, tile_k=64, max_concurrent_steps=4)
    return lambda a, b: op.matmul(a, b, None, config)


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


# --- Mosaic GPU: collectives -----------------------------------------------------------------------------


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


# --- the table -------------------------------------------------------------------------------

_H100 = functools.partial(Case, target="h100")
_B200 = functools.partial(Case, target="b200")
_TRITON = functools.partial(_H100, interpret="argument")

_QKV, _SHARED = (Arg((8, 256, 4, 64), "float16", DATA),), (Arg((2, 256, 4, 64), "float16"),)
_IDS = (Arg((8, 256), "int32", DATA, segments),)
_ACTIVATIONS = (Arg((8, 64, 512), "float32", DATA),)
_NORM_ARGS = _ACTIVATIONS + (Arg((512,), "float32"),) * 2
_GQA = (Arg((8, 32, 64), "float16", DATA), *(Arg((8, 4096, 2, 64), "float16", DATA),) * 2)
_LENGTHS = drawn(1, 2049)
_MGPU_QKV = (Arg((8, 512, 4, 64), "float16", DATA),)
_MGPU_SHARED = (Arg((2, 512, 4, 64), "float16"),)
_A, _B = (Arg((4096, 512), "float16", DATA),), (Arg((512, 512), "float16"),)
_EXPERTS = (Arg((4, 512, 512), "float16"),)
_GROUPS = (Arg((16,), "int32", DATA, lambda rng, shape: [256, 200, 312, 256] * 4),)
_LINE_X = (Arg((4096, 256), "float32", ("x",)),)

_NORM = Expected(bytes_(model=262144, both=4096), NOT_ANNOTATED, bytes_(data=4096))
_GRADS = Expected(bytes_(model=786432), NOT_ANNOTATED, ZERO)
_MGPU_GRADS = Expected(bytes_(model=1572864), BWD_TYPE, ZERO)
_RIGHT = Expected(ZERO, ZERO, ZERO)
_OP_BUG = Fails(
    "f32 output of a reference for f16 inputs",
    "ValueError",
    "unexpected JAX type .* for argument to VJP function: got float16.* expected float32",
)
_QKV_DIFF = (0, 1, 2)


def _over_x(rule, op, kernel="kernel"):
    """Return what a case needs whose kernel communicates over the one axis of its mesh."""
    op = f"jax.experimental.pallas.ops.gpu.{op}"
    return {"mesh": LINE, "communicates": Communicates(rule, ("x",), op, kernel)}


CASES = (
    _TRITON("mha", _QKV * 3, _mha, _GRADS, _QKV_DIFF),
    _TRITON("mha_fwd", _QKV * 3, _mha, TRUSTED),
    _H100("mha_fwd_wrongspec", _QKV * 3, _mha, WRONG_SPEC, out_spec=()),
    _TRITON("mha_seg", _QKV * 3 + _IDS, _mha, _GRADS, _QKV_DIFF),
    _TRITON(
        "mha_mixedkv",
        _QKV + _SHARED * 2,
        _mha,
        Expected(bytes_(model=262144, both=524288), NOT_ANNOTATED, bytes_(data=524288)),
        _QKV_DIFF,
    ),
    _H100(
        "mha_xla_bwd",
        _QKV * 3,
        functools.partial(_mha, backward="xla"),
        Expected(_OP_BUG, NOT_ANNOTATED, SAME_FAILURE),
        _QKV_DIFF,
    ),
    _TRITON("rms_norm", _NORM_ARGS, _rms_norm, _NORM, (0, 1, 2)),
    _TRITON(
        "rms_norm_xla_bwd",
        _NORM_ARGS,
        functools.partial(_rms_norm, backward="xla"),
        _NORM,
        (0, 1, 2),
    ),
    _TRITON("layer_norm", _NORM_ARGS, _layer_norm, _NORM, (0, 1, 2)),
    _TRITON("softmax_fwd", _ACTIVATIONS, _softmax, FORWARD),
    _H100(
        "softmax_grad",
        _ACTIVATIONS,
        _softmax,
        Expected(NO_DERIVATIVE, NOT_ANNOTATED, SAME_FAILURE),
        (0,),
    ),
    _TRITON(
        "decode_mqa",
        (Arg((8, 16, 64), "float16", DATA), *(Arg((8, 4096, 64), "float16", DATA),) * 2),
        _decode_mqa,
        FORWARD,
    ),
    _TRITON("decode_gqa", (*_GQA, Arg((8,), "int32", DATA, _LENGTHS)), _decode_gqa, FORWARD),
    _TRITON("decode_gqa_scalar_len", (*_GQA, Arg((), "int32", (), _LENGTHS)), _decode_gqa, FORWARD),
    _TRITON(
        "paged_attention_gpu",
        (
            Arg((8, 16, 64), "float16", DATA),
            *(Arg((2, 256, 16, 64), "float16"),) * 2,
            Arg((8, 128), "int32", DATA, drawn(0, 256)),
            Arg((8,), "int32", DATA, _LENGTHS),
        ),
        _paged,
        FORWARD,
    ),
    _H100("attention_mgpu_fwd", _MGPU_QKV * 3, _attention, TRUSTED),
    _H100("attention_mgpu_wrongspec", _MGPU_QKV * 3, _attention, WRONG_SPEC, out_spec=()),
    _H100("attention_mgpu", _MGPU_QKV * 3, _attention, _MGPU_GRADS, _QKV_DIFF),
    _H100("attention_mgpu_resid", _MGPU_QKV * 3, _attention_resid, _MGPU_GRADS, _QKV_DIFF),
    _H100(
        "attention_mgpu_mixedkv",
        _MGPU_QKV + _MGPU_SHARED * 2,
        _attention,
        Expected(bytes_(model=524288, both=1048576), BWD_TYPE, bytes_(data=1048576)),
        _QKV_DIFF,
    ),
    _H100("attention_mgpu_pipeline", _MGPU_QKV * 3, _attention_pipeline, TRUSTED),
    _H100(
        "attention_mgpu_stopgrad",
        _MGPU_QKV * 3 + (Arg((64,), "float16"),),
        stopped(_attention),
        Expected(bytes_(both=128), bytes_(data=524288), bytes_(data=128), wrong=True),
        (3,),
    ),
    _H100("hopper_matmul", _A + _B, _hopper_matmul, TRUSTED),
    _H100(
        "hopper_matmul_user_vjp",
        _A + _B,
        matmul_with_vjp(_hopper_matmul),
        Expected(bytes_(both=524288, model=1048576), BWD_TYPE, bytes_(data=524288)),
        (0, 1),
    ),
    _H100(
        "hopper_mixed_matmul",
        (Arg((4096, 512), "int8", DATA, drawn(-128, 128)), Arg((512, 512), "bfloat16")),
        _hopper_mixed_matmul,
        TRUSTED,
    ),
    _H100("ragged_dot_mgpu", _A + _EXPERTS + _GROUPS, _ragged_dot, TRUSTED),
    _H100("transposed_ragged_dot_mgpu", _A + _A + _GROUPS, _transposed_ragged_dot, TRUSTED),
    _H100(
        "all_gather_mgpu",
        _LINE_X,
        _all_gather,
        _RIGHT,
        out_spec=(),
        **_over_x("all_gather_invariant", "all_gather_mgpu:all_gather"),
    ),
    _H100(
        "all_gather_mgpu_outD",
        _LINE_X,
        _all_gather,
        _RIGHT,
        out_spec=("x",),
        **_over_x("all_gather", "all_gather_mgpu:all_gather"),
    ),
    _H100(
        "reduce_scatter_mgpu",
        _LINE_X,
        _reduce_scatter,
        TRUSTED,
        out_spec=("x",),
        **_over_x("reduce_scatter", "reduce_scatter_mgpu:reduce_scatter"),
    ),
    _H100(
        "all_reduce_mgpu",
        _LINE_X,
        functools.partial(_reduce_scatter, scatter_dimension=None),
        _RIGHT,
        out_spec=(),
        **_over_x("all_reduce", "reduce_scatter_mgpu:reduce_scatter"),
    ),
    _H100(
        "collective_matmul_mgpu",
        (Arg((8192, 512), "float16", ("x",)), Arg((512, 2048), "float16", (None, "x"))),
        _collective_matmul,
        TRUSTED,
        out_spec=(None, "x"),
        **_over_x("all_gather", "collective_matmul_mgpu:all_gather_lhs_matmul", "kernel_body"),
    ),
    _B200("blackwell_matmul", _A + _B, _blackwell_matmul, TRUSTED),
    _B200("blackwell_ragged_dot", _A + _EXPERTS + _GROUPS, _blackwell_ragged_dot, TRUSTED),
)
