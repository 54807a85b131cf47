"""Triton kernels of `jax.experimental.pallas.ops.gpu`."""

from __future__ import annotations

import functools

from kernels.case import (
    DATA,
    NO_DERIVATIVE,
    NOT_ANNOTATED,
    REFUSED,
    SAME_FAILURE,
    ZERO,
    Arg,
    Case,
    Expected,
    Fails,
    bytes_,
)

_H100 = "h100"
_QKV = Arg((8, 256, 4, 64), "float16", DATA)
_KV_SHARED = Arg((2, 256, 4, 64), "float16")


def _segments(rng, shape):
    return rng.integers(0, 2, shape).cumsum(axis=-1) // 64


_SEGMENTS = Arg((8, 256), "int32", DATA, _segments)


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


_ACTIVATIONS = Arg((8, 64, 512), "float32", DATA)
_NORM_ARGS = (_ACTIVATIONS, Arg((512,), "float32"), Arg((512,), "float32"))
_NORM = Expected(bytes_(model=262144, both=4096), NOT_ANNOTATED, bytes_(data=4096))
_QKV_GRADS = Expected(bytes_(model=786432), NOT_ANNOTATED, ZERO)
_FORWARD = Expected(ZERO, NOT_ANNOTATED, ZERO)
_OP_BUG = Fails(
    "f32 output of a reference for f16 inputs",
    "ValueError",
    "unexpected JAX type .* for argument to VJP function: got float16.* expected float32",
)


def _lengths(rng, shape):
    return rng.integers(1, 2049, shape)


CASES = (
    Case("mha", _H100, (_QKV,) * 3, _mha, _QKV_GRADS, (0, 1, 2), interpret="argument"),
    Case(
        "mha_fwd",
        _H100,
        (_QKV,) * 3,
        _mha,
        Expected(ZERO, ZERO, ZERO, wrong=True),
        interpret="argument",
    ),
    Case(
        "mha_fwd_wrongspec",
        _H100,
        (_QKV,) * 3,
        _mha,
        Expected(ZERO, ZERO, REFUSED, wrong=True),
        out_spec=(),
    ),
    Case(
        "mha_seg",
        _H100,
        (*(_QKV,) * 3, _SEGMENTS),
        _mha,
        _QKV_GRADS,
        (0, 1, 2),
        interpret="argument",
    ),
    Case(
        "mha_mixedkv",
        _H100,
        (_QKV, _KV_SHARED, _KV_SHARED),
        _mha,
        Expected(bytes_(model=262144, both=524288), NOT_ANNOTATED, bytes_(data=524288)),
        (0, 1, 2),
        interpret="argument",
    ),
    Case(
        "mha_xla_bwd",
        _H100,
        (_QKV,) * 3,
        functools.partial(_mha, backward="xla"),
        Expected(_OP_BUG, NOT_ANNOTATED, SAME_FAILURE),
        (0, 1, 2),
    ),
    Case("rms_norm", _H100, _NORM_ARGS, _rms_norm, _NORM, (0, 1, 2), interpret="argument"),
    Case(
        "rms_norm_xla_bwd",
        _H100,
        _NORM_ARGS,
        functools.partial(_rms_norm, backward="xla"),
        _NORM,
        (0, 1, 2),
        interpret="argument",
    ),
    Case("layer_norm", _H100, _NORM_ARGS, _layer_norm, _NORM, (0, 1, 2), interpret="argument"),
    Case("softmax_fwd", _H100, (_ACTIVATIONS,), _softmax, _FORWARD, interpret="argument"),
    Case(
        "softmax_grad",
        _H100,
        (_ACTIVATIONS,),
        _softmax,
        Expected(NO_DERIVATIVE, NOT_ANNOTATED, SAME_FAILURE),
        (0,),
    ),
    Case(
        "decode_mqa",
        _H100,
        (Arg((8, 16, 64), "float16", DATA), *(Arg((8, 4096, 64), "float16", DATA),) * 2),
        _decode_mqa,
        _FORWARD,
        interpret="argument",
    ),
    Case(
        "decode_gqa",
        _H100,
        (
            Arg((8, 32, 64), "float16", DATA),
            *(Arg((8, 4096, 2, 64), "float16", DATA),) * 2,
            Arg((8,), "int32", DATA, _lengths),
        ),
        _decode_gqa,
        _FORWARD,
        interpret="argument",
    ),
    Case(
        "decode_gqa_scalar_len",
        _H100,
        (
            Arg((8, 32, 64), "float16", DATA),
            *(Arg((8, 4096, 2, 64), "float16", DATA),) * 2,
            Arg((), "int32", (), _lengths),
        ),
        _decode_gqa,
        _FORWARD,
        interpret="argument",
    ),
    Case(
        "paged_attention_gpu",
        _H100,
        (
            Arg((8, 16, 64), "float16", DATA),
            *(Arg((2, 256, 16, 64), "float16"),) * 2,
            Arg((8, 128), "int32", DATA, lambda rng, shape: rng.integers(0, 256, shape)),
            Arg((8,), "int32", DATA, _lengths),
        ),
        _paged,
        _FORWARD,
        interpret="argument",
    ),
)
