"""TPU kernels of `jax.experimental.pallas.ops.tpu`: attention, matmuls, all-gather, random bits."""

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
    Communicates,
    Expected,
    Fails,
    bytes_,
)

_SCALE = 128**-0.5
_QKV = Arg((8, 4, 256, 128), "bfloat16", DATA)
_KV_SHARED = Arg((2, 4, 256, 128), "bfloat16")
_KV_ONE_HEAD = Arg((8, 256, 128), "bfloat16", DATA)


def _segments(rng, shape):
    return rng.integers(0, 2, shape).cumsum(axis=-1) // 64


_SEGMENTS = Arg((8, 256), "int32", DATA, _segments)
_SMALL_QKV = (Arg((8, 2, 128, 128), "bfloat16", DATA),) * 3


# --- flash attention -------------------------------------------------------------------------


def _flash(mesh, interpret, causal=True):
    from jax.experimental.pallas.ops.tpu import flash_attention as fa

    return functools.partial(fa.flash_attention, causal=causal, sm_scale=_SCALE)


def _flash_seg(mesh, interpret):
    from jax.experimental.pallas.ops.tpu import flash_attention as fa

    def f(q, k, v, ids):
        return _flash(mesh, interpret)(q, k, v, segment_ids=fa.SegmentIds(ids, ids))

    return f


def _flash_segconst(mesh, interpret):
    import jax.numpy as jnp
    from jax.experimental.pallas.ops.tpu import flash_attention as fa

    def f(q, k, v):
        ids = jnp.broadcast_to(jnp.arange(q.shape[2], dtype=jnp.int32) // 64, q.shape[::2])
        return _flash(mesh, interpret)(q, k, v, segment_ids=fa.SegmentIds(ids, ids))

    return f


def _flash_ab(mesh, interpret):
    return lambda q, k, v, ab: _flash(mesh, interpret)(q, k, v, ab)


def _flash_ab_bcast(mesh, interpret):
    import jax.numpy as jnp

    def f(q, k, v, ab):
        return _flash(mesh, interpret)(q, k, v, jnp.broadcast_to(ab, (q.shape[0], *ab.shape)))

    return f


def _flash_remat(mesh, interpret):
    import jax

    return jax.checkpoint(lambda q, k, v: _flash(mesh, interpret)(q, k, v))


def _flash_scan(mesh, interpret):
    from jax import lax

    def f(q, k, v):
        return lax.scan(lambda x, _: (_flash(mesh, interpret)(x, k, v), None), q, length=3)[0]

    return f


def _flash_scan_zeros(mesh, interpret):
    import jax.numpy as jnp
    from jax import lax

    def f(q, k, v):
        def step(acc, _):
            return acc + _flash(mesh, interpret)(q + acc, k, v), None

        return lax.scan(step, jnp.zeros(q.shape, q.dtype), length=3)[0]

    return f


# --- splash attention ------------------------------------------------------------------------


def _splash_kernel(interpret, mqa=False, fused=False, mask=None):
    from jax.experimental.pallas.ops.tpu import splash_attention as sa

    blocks = sa.BlockSizes(
        block_q=128,
        block_kv=128,
        block_q_dkv=128,
        block_kv_dkv=128,
        block_q_dq=None if fused else 128,
        block_kv_dq=None if fused else 128,
        use_fused_bwd_kernel=fused,
    )
    if mask is None:
        mask = sa.MultiHeadMask([sa.CausalMask((256, 256))] * 4)
    make = sa.make_splash_mqa if mqa else sa.make_splash_mha
    return make(mask, block_sizes=blocks, head_shards=1, q_seq_shards=1, interpret=interpret)


def _splash(mesh, interpret, **kwargs):
    import jax

    kernel = _splash_kernel(interpret, **kwargs)
    return lambda q, k, v: jax.vmap(kernel)(q * _SCALE, k, v)


def _splash_seg(mesh, interpret):
    import jax
    from jax.experimental.pallas.ops.tpu import splash_attention as sa

    kernel = _splash_kernel(interpret)

    def f(q, k, v, ids):
        return jax.vmap(kernel)(q * _SCALE, k, v, segment_ids=sa.SegmentIds(ids, ids))

    return f


def _splash_passed(mesh, interpret):
    import jax

    treedef = jax.tree.structure(_splash_kernel(interpret))

    def f(q, k, v, *leaves):
        return jax.vmap(jax.tree.unflatten(treedef, leaves))(q * _SCALE, k, v)

    return f


def _splash_leaf(position):
    def fill(rng, shape):
        import jax
        import numpy as np

        leaf = np.asarray(jax.tree.leaves(_splash_kernel(False))[position])
        assert leaf.shape == shape
        return leaf

    return fill


_SPLASH_LEAVES = tuple(
    Arg((256,), "int32", (), _splash_leaf(i))
    if i % 3 == 2
    else Arg((1, 2, 2), "int8", (), _splash_leaf(i))
    for i in range(9)
)


def _splash_dynmask(mesh, interpret):
    import jax
    import jax.numpy as jnp

    def f(q, k, v, mask):
        mask = jnp.broadcast_to(mask > 0, (4, 256, 256))
        return jax.vmap(_splash_kernel(interpret, mask=mask))(q * _SCALE, k, v)

    return f


# --- matmuls ---------------------------------------------------------------------------------

_GMM_X = Arg((2048, 256), "bfloat16", DATA)
_GMM_W = Arg((4, 256, 256), "bfloat16")
_GROUPS = Arg((16,), "int32", DATA, lambda rng, shape: [128, 100, 156, 128, 256, 0, 128, 128] * 2)


def _gmm(mesh, interpret):
    import jax.numpy as jnp
    from jax.experimental.pallas.ops.tpu.megablox import gmm

    def f(x, w, group_sizes=None):
        if group_sizes is None:
            group_sizes = jnp.full((4,), x.shape[0] // 4, jnp.int32)
        return gmm(x, w, group_sizes, jnp.bfloat16, interpret=interpret)

    return f


def _matmul(mesh, interpret):
    from jax.experimental.pallas.ops.tpu import matmul

    return functools.partial(matmul.matmul, block_shape=(256, 256))


def _matmul_user_vjp(mesh, interpret):
    import jax

    matmul = _matmul(mesh, interpret)
    f = jax.custom_vjp(matmul)
    f.defvjp(
        lambda x, w: (matmul(x, w), (x, w)),
        lambda res, g: (matmul(g, res[1].T), matmul(res[0].T, g)),
    )
    return f


_X = Arg((2048, 256), "bfloat16", DATA)
_W = Arg((256, 256), "bfloat16")


# --- paged attention -------------------------------------------------------------------------


def _paged(mesh, interpret):
    from jax.experimental.pallas.ops.tpu.paged_attention import paged_attention

    return functools.partial(paged_attention, pages_per_compute_block=4)


def _ragged_paged(mesh, interpret):
    from jax.experimental.pallas.ops.tpu.ragged_paged_attention import ragged_paged_attention

    return functools.partial(
        ragged_paged_attention, sm_scale=_SCALE, num_kv_pages_per_block=4, num_queries_per_block=32
    )


# --- all-gather ------------------------------------------------------------------------------


def _all_gather_op(mesh, interpret):
    from jax.experimental.pallas.ops.tpu.all_gather import all_gather

    return functools.partial(all_gather, mesh=mesh, axis_name="data")


def _all_gather_local(mesh, interpret):
    import jax
    from jax import lax
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import tpu as pltpu
    from jax.experimental.pallas.ops.tpu import all_gather

    def f(x):
        size = lax.axis_size("data")
        out = pl.pallas_call(
            functools.partial(all_gather.ag_kernel, axis_name="data", mesh=mesh),
            out_shape=jax.ShapeDtypeStruct((size, *x.shape), x.dtype),
            compiler_params=pltpu.CompilerParams(collective_id=0),
            in_specs=[pl.BlockSpec(memory_space=pltpu.VMEM)],
            out_specs=pl.BlockSpec(memory_space=pltpu.VMEM),
            scratch_shapes=(
                (pltpu.SemaphoreType.DMA, pltpu.SemaphoreType.DMA),
                (pltpu.SemaphoreType.DMA, pltpu.SemaphoreType.DMA),
            ),
        )(x)
        return out.reshape(size * x.shape[0], *x.shape[1:])

    return f


# --- random bits -----------------------------------------------------------------------------


def _dropout(bits):
    import jax.numpy as jnp

    def f(x, key):
        return jnp.where(bits(key, x.shape) & 1, x, 0.0)

    return f


def _threefry(mesh, interpret):
    from jax.experimental.pallas.ops.tpu.random import threefry

    return _dropout(lambda key, shape: threefry.plthreefry_random_bits(key, 32, shape))


def _philox(mesh, interpret):
    from jax.experimental.pallas.ops.tpu.random import philox

    return _dropout(lambda key, shape: philox.philox_random_bits(key, 32, shape))


_ROWS = Arg((1024, 256), "float32", DATA)
_KEY = Arg((2,), "uint32", (), lambda rng, shape: rng.integers(0, 2**32, shape))


# --- the example kernel ----------------------------------------------------------------------


def _double(mesh, interpret):
    from jax.experimental.pallas.ops.tpu import example_kernel

    return lambda x: example_kernel.double(x)


def _double_stopgrad(mesh, interpret):
    from jax import lax

    return lambda x, w: _double(mesh, interpret)(lax.stop_gradient(x)) * w


# --- the table -------------------------------------------------------------------------------

_V5E = "v5e:2x4"
_QKV_GRADS = Expected(bytes_(model=1572864), NOT_ANNOTATED, ZERO)
_FORWARD = Expected(ZERO, NOT_ANNOTATED, ZERO)
_TRUSTED = Expected(ZERO, ZERO, ZERO, wrong=True)
_GMM_BOTH = Expected(bytes_(both=524288, model=262144), NOT_ANNOTATED, bytes_(data=524288))
_ONE_ROWS = Expected(bytes_(model=262144), NOT_ANNOTATED, ZERO)
_DYNMASK = Fails(
    "mask read while traced", "TracerBoolConversionError", "boolean conversion of traced array"
)
_NESTED = Fails(
    "nested mesh", "ValueError", "The context mesh .* should match the mesh passed to shard_map"
)
_ASSERTION = Fails("bare assertion in JAX's jvp of pallas_call", "AssertionError", "^$")

CASES = (
    Case(
        "flash_attention",
        _V5E,
        (_QKV,) * 3,
        _flash,
        _QKV_GRADS,
        (0, 1, 2),
        interpret="tpu",
        small_args=_SMALL_QKV,
    ),
    Case(
        "flash_attention_seg",
        _V5E,
        (*(_QKV,) * 3, _SEGMENTS),
        _flash_seg,
        _QKV_GRADS,
        (0, 1, 2),
        interpret="tpu",
        small_args=(*_SMALL_QKV, Arg((8, 128), "int32", DATA, _segments)),
    ),
    Case(
        "flash_attention_segconst",
        _V5E,
        (_QKV,) * 3,
        _flash_segconst,
        _QKV_GRADS,
        (0, 1, 2),
        interpret="tpu",
        small_args=_SMALL_QKV,
    ),
    Case(
        "flash_attention_ab",
        _V5E,
        (*(_QKV,) * 3, Arg((8, 4, 256, 256), "bfloat16", DATA)),
        _flash_ab,
        Expected(bytes_(model=2621440), NOT_ANNOTATED, ZERO),
        (0, 1, 2, 3),
        interpret="tpu",
        small_args=(*_SMALL_QKV, Arg((8, 2, 128, 128), "bfloat16", DATA)),
    ),
    Case(
        "flash_attention_ab_bcast",
        _V5E,
        (*(_QKV,) * 3, Arg((4, 256, 256), "bfloat16")),
        _flash_ab_bcast,
        Expected(
            bytes_(both=524288, model=1572864),
            NOT_ANNOTATED,
            bytes_(data=524288),
            same_code=bytes_(data=1048576),
        ),
        (0, 1, 2, 3),
        interpret="tpu",
        small_args=(*_SMALL_QKV, Arg((2, 128, 128), "bfloat16")),
    ),
    Case(
        "flash_attention_mixedkv",
        _V5E,
        (_QKV, _KV_SHARED, _KV_SHARED),
        _flash,
        Expected(bytes_(both=1048576, model=524288), NOT_ANNOTATED, bytes_(data=1048576)),
        (0, 1, 2),
        interpret="tpu",
        small_args=(_SMALL_QKV[0], *(Arg((2, 2, 128, 128), "bfloat16"),) * 2),
    ),
    Case(
        "flash_attention_remat",
        _V5E,
        (_QKV,) * 3,
        _flash_remat,
        _QKV_GRADS,
        (0, 1, 2),
        # No interpret mode: its callbacks are effects, which jax.checkpoint refuses.
    ),
    Case(
        "flash_attention_scan",
        _V5E,
        (_QKV,) * 3,
        _flash_scan,
        _QKV_GRADS,
        (0, 1, 2),
        interpret="tpu",
        small_args=_SMALL_QKV,
    ),
    Case(
        "flash_attention_scan_zeros",
        _V5E,
        (_QKV,) * 3,
        _flash_scan_zeros,
        _QKV_GRADS,
        (0, 1, 2),
        interpret="tpu",
        small_args=_SMALL_QKV,
    ),
    Case(
        "splash_mha_closed", _V5E, (_QKV,) * 3, _splash, _QKV_GRADS, (0, 1, 2), interpret="argument"
    ),
    Case(
        "splash_mha_closed_fused",
        _V5E,
        (_QKV,) * 3,
        functools.partial(_splash, fused=True),
        _QKV_GRADS,
        (0, 1, 2),
        interpret="argument",
    ),
    Case(
        "splash_mqa_closed",
        _V5E,
        (_QKV, _KV_ONE_HEAD, _KV_ONE_HEAD),
        functools.partial(_splash, mqa=True),
        Expected(bytes_(model=786432), NOT_ANNOTATED, ZERO),
        (0, 1, 2),
        interpret="argument",
    ),
    Case(
        "splash_mha_seg",
        _V5E,
        (*(_QKV,) * 3, _SEGMENTS),
        _splash_seg,
        _QKV_GRADS,
        (0, 1, 2),
        interpret="argument",
    ),
    Case(
        "splash_mha_passed",
        _V5E,
        (*(_QKV,) * 3, *_SPLASH_LEAVES),
        _splash_passed,
        _QKV_GRADS,
        (0, 1, 2),
        interpret="argument",
    ),
    Case(
        "splash_mha_dynmask",
        _V5E,
        (*(_QKV,) * 3, Arg((256, 256), "int32", (), lambda rng, shape: rng.integers(0, 2, shape))),
        _splash_dynmask,
        Expected(_DYNMASK, _DYNMASK, SAME_FAILURE),
        (0, 1, 2),
    ),
    Case("megablox_gmm", _V5E, (_GMM_X, _GMM_W), _gmm, _GMM_BOTH, (0, 1), interpret="argument"),
    Case(
        "megablox_gmm_gs",
        _V5E,
        (_GMM_X, _GMM_W, _GROUPS),
        _gmm,
        _GMM_BOTH,
        (0, 1),
        interpret="argument",
    ),
    Case(
        "megablox_gmm_xonly",
        _V5E,
        (_GMM_X, _GMM_W, _GROUPS),
        _gmm,
        _ONE_ROWS,
        (0,),
        interpret="argument",
    ),
    Case("megablox_gmm_fwd", _V5E, (_GMM_X, _GMM_W, _GROUPS), _gmm, _FORWARD, interpret="argument"),
    Case("matmul_fwd", _V5E, (_X, _W), _matmul, _FORWARD, interpret="tpu"),
    Case(
        "matmul_grad",
        _V5E,
        (_X, _W),
        _matmul,
        Expected(_ASSERTION, NOT_ANNOTATED, SAME_FAILURE),
        (0, 1),
    ),
    Case(
        "matmul_user_vjp",
        _V5E,
        (_X, _W),
        _matmul_user_vjp,
        Expected(bytes_(both=131072, model=262144), NOT_ANNOTATED, bytes_(data=131072)),
        (0, 1),
        interpret="tpu",
    ),
    Case(
        "paged_attention",
        _V5E,
        (
            Arg((8, 8, 128), "bfloat16", DATA),
            *(Arg((8, 64, 16, 128), "bfloat16"),) * 2,
            Arg((8,), "int32", DATA, lambda rng, shape: rng.integers(1, 129, shape)),
            Arg((8, 8), "int32", DATA, lambda rng, shape: rng.integers(0, 64, shape)),
        ),
        _paged,
        _FORWARD,
        interpret="tpu",
    ),
    Case(
        "ragged_paged_attention",
        _V5E,
        (
            Arg((512, 8, 128), "bfloat16", DATA),
            Arg((64, 16, 8, 128), "bfloat16"),
            Arg((32,), "int32", DATA, lambda rng, shape: rng.integers(32, 129, shape)),
            Arg((32, 8), "int32", DATA, lambda rng, shape: rng.integers(0, 64, shape)),
            Arg((36,), "int32", DATA, lambda rng, shape: [16 * i for i in range(9)] * 4),
            Arg((4,), "int32", DATA, lambda rng, shape: [8] * 4),
        ),
        # JAX 0.10.2's TPU interpreter raises AttributeError on this kernel's reshaped refs.
        _ragged_paged,
        _FORWARD,
    ),
    Case(
        "all_gather_nested",
        _V5E,
        (Arg((512, 128), "float32", DATA),),
        _all_gather_op,
        Expected(_NESTED, _NESTED, SAME_FAILURE),
        out_spec=(),
    ),
    Case(
        "all_gather_top",
        _V5E,
        (Arg((512, 128), "float32", DATA),),
        _all_gather_op,
        Expected(ZERO, ZERO, ZERO),
        out_spec=(),
        wrap=False,
        interpret="tpu",
    ),
    Case(
        "all_gather_local",
        _V5E,
        (Arg((512, 128), "float32", DATA),),
        _all_gather_local,
        _FORWARD,
        out_spec=(),
        interpret="tpu",
        communicates=Communicates(
            "all_gather_invariant",
            DATA,
            "jax.experimental.pallas.ops.tpu.all_gather:ag_kernel",
            "ag_kernel",
        ),
    ),
    Case("random_threefry", _V5E, (_ROWS, _KEY), _threefry, _ONE_ROWS, (0,), interpret="tpu"),
    Case("random_philox", _V5E, (_ROWS, _KEY), _philox, _ONE_ROWS, (0,), interpret="tpu"),
    Case("example_double_fwd", _V5E, (_ROWS,), _double, _TRUSTED, interpret="tpu"),
    Case(
        "example_double_grad",
        _V5E,
        (_ROWS,),
        _double,
        Expected(NO_DERIVATIVE, NO_DERIVATIVE, SAME_FAILURE),
        (0,),
    ),
    Case(
        "example_double_wrongspec",
        _V5E,
        (_ROWS,),
        _double,
        Expected(ZERO, ZERO, REFUSED, wrong=True),
        out_spec=(),
    ),
    Case(
        "example_double_stopgrad",
        _V5E,
        (_ROWS, Arg((256,), "float32")),
        _double_stopgrad,
        Expected(bytes_(both=1024), bytes_(data=262144), bytes_(data=1024), wrong=True),
        (1,),
        interpret="tpu",
    ),
)
