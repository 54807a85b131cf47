"""TPU kernels: those of `jax.experimental.pallas.ops.tpu`, and a doubling on both cores of a chip."""

from __future__ import annotations

import functools

from kernels.case import (
    BWD_TYPE,
    DATA,
    FORWARD,
    NO_DERIVATIVE,
    NOT_ANNOTATED,
    REFUSED,
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

_SCALE = 128**-0.5
_CORES = 2

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


def _splash_dynmask(mesh, interpret):
    import jax
    import jax.numpy as jnp

    def f(q, k, v, mask):
        mask = jnp.broadcast_to(mask > 0, (4, 256, 256))
        return jax.vmap(_splash_kernel(interpret, mask=mask))(q * _SCALE, k, v)

    return f


# --- matmuls ---------------------------------------------------------------------------------


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


# --- the example kernel ----------------------------------------------------------------------


def _double(mesh, interpret):
    from jax.experimental.pallas.ops.tpu import example_kernel

    return lambda x: example_kernel.double(x)


# --- pl.kernel and core_map: both cores of a TPU v5p chip -------------------------------------


def _mesh():
    from jax.experimental.pallas import tpu as pltpu

    return pltpu.create_tensorcore_mesh("core", num_cores=_CORES)


def _double_share(x_ref, o_ref):
    """Double this core's share of the rows of x_ref into o_ref, by way of VMEM."""
    import functools

    from jax import lax
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import tpu as pltpu

    rows = x_ref.shape[0] // _CORES
    share = pl.ds(lax.axis_index("core") * rows, rows)

    @functools.partial(pl.run_scoped, buffer=pltpu.VMEM((rows, *x_ref.shape[1:]), x_ref.dtype))
    def _(buffer):
        pltpu.sync_copy(x_ref.at[share], buffer)
        buffer[...] = buffer[...] * 2
        pltpu.sync_copy(buffer, o_ref.at[share])


def _pl_kernel(x):
    import jax
    from jax.experimental import pallas as pl

    out_type = jax.ShapeDtypeStruct(x.shape, x.dtype)
    return pl.kernel(_double_share, out_type=out_type, mesh=_mesh())(x)


def _run_state(x, out):
    from jax.experimental import pallas as pl

    def body(refs):
        pl.core_map(_mesh())(lambda: _double_share(*refs))

    return pl.run_state(body)((x, out))[1]


def _with_vjp(double):
    def make(mesh, interpret):
        import jax

        f = jax.custom_vjp(double)
        f.defvjp(lambda x: (double(x), None), lambda _, g: (double(g),))
        return f

    return make


def _into_itself(x):
    return _run_state(x, x)


def _into_zeros(x):
    import jax.numpy as jnp

    return _run_state(x, jnp.zeros(x.shape, x.dtype))


# --- the table -------------------------------------------------------------------------------

_V5E = functools.partial(Case, target="v5e:2x4")
_V5P = functools.partial(Case, target="v5p:2x2x2")

_QKV = (Arg((8, 4, 256, 128), "bfloat16", DATA),)
_SHARED = (Arg((2, 4, 256, 128), "bfloat16"),)
_ONE_HEAD = (Arg((8, 256, 128), "bfloat16", DATA),)
_IDS = (Arg((8, 256), "int32", DATA, segments),)
_MASK = (Arg((256, 256), "int32", (), drawn(0, 2)),)
_SPLASH_LEAVES = tuple(
    Arg((256,), "int32", (), _splash_leaf(i))
    if i % 3 == 2
    else Arg((1, 2, 2), "int8", (), _splash_leaf(i))
    for i in range(9)
)
_BIAS = (Arg((8, 4, 256, 256), "bfloat16", DATA),)
_BIAS_SHARED = (Arg((4, 256, 256), "bfloat16"),)
_X, _W = (Arg((2048, 256), "bfloat16", DATA),), (Arg((256, 256), "bfloat16"),)
_EXPERTS = (Arg((4, 256, 256), "bfloat16"),)
_GROUPS = (
    Arg((16,), "int32", DATA, lambda rng, shape: [128, 100, 156, 128, 256, 0, 128, 128] * 2),
)
_GMM = _X + _EXPERTS + _GROUPS
_ROWS = (Arg((1024, 256), "float32", DATA),)
_KEY = (Arg((2,), "uint32", (), drawn(0, 2**32)),)
_LINES = (Arg((512, 128), "float32", DATA),)

_GRADS = Expected(bytes_(model=1572864), NOT_ANNOTATED, ZERO)
_GMM_BOTH = Expected(bytes_(both=524288, model=262144), NOT_ANNOTATED, bytes_(data=524288))
_ONE_ROWS = Expected(bytes_(model=262144), NOT_ANNOTATED, ZERO)
_DYNMASK = Fails(
    "mask read while traced", "TracerBoolConversionError", "boolean conversion of traced array"
)
_NESTED = Fails(
    "nested mesh", "ValueError", "The context mesh .* should match the mesh passed to shard_map"
)
_ASSERTION = Fails("bare assertion in JAX's jvp of pallas_call", "AssertionError", "^$")
_QKV_DIFF = (0, 1, 2)
_SMALL = Arg((8, 2, 128, 128), "bfloat16", DATA)


def _small(*args):
    """Run an attention in the slow TPU interpreter on these arguments, after q, or q, k and v."""
    return {"interpret": "tpu", "small_args": (_SMALL,) * (1 if len(args) == 2 else 3) + args}


_SMALL_IDS = Arg((8, 128), "int32", DATA, segments)
_TPU, _ARG = {"interpret": "tpu"}, {"interpret": "argument"}

CASES = (
    _V5E("flash_attention", _QKV * 3, _flash, _GRADS, _QKV_DIFF, **_small()),
    _V5E(
        "flash_attention_seg", _QKV * 3 + _IDS, _flash_seg, _GRADS, _QKV_DIFF, **_small(_SMALL_IDS)
    ),
    _V5E("flash_attention_segconst", _QKV * 3, _flash_segconst, _GRADS, _QKV_DIFF, **_small()),
    _V5E(
        "flash_attention_ab",
        _QKV * 3 + _BIAS,
        _flash_ab,
        Expected(bytes_(model=2621440), NOT_ANNOTATED, ZERO),
        (0, 1, 2, 3),
        **_small(_SMALL),
    ),
    _V5E(
        "flash_attention_ab_bcast",
        _QKV * 3 + _BIAS_SHARED,
        _flash_ab_bcast,
        Expected(
            bytes_(both=524288, model=1572864),
            NOT_ANNOTATED,
            bytes_(data=524288),
            same_code=bytes_(data=1048576),
        ),
        (0, 1, 2, 3),
        **_small(Arg((2, 128, 128), "bfloat16")),
    ),
    _V5E(
        "flash_attention_mixedkv",
        _QKV + _SHARED * 2,
        _flash,
        Expected(bytes_(both=1048576, model=524288), NOT_ANNOTATED, bytes_(data=1048576)),
        _QKV_DIFF,
        **_small(*(Arg((2, 2, 128, 128), "bfloat16"),) * 2),
    ),
    # No interpret mode: its callbacks are effects, which jax.checkpoint refuses.
    _V5E("flash_attention_remat", _QKV * 3, _flash_remat, _GRADS, _QKV_DIFF),
    _V5E("flash_attention_scan", _QKV * 3, _flash_scan, _GRADS, _QKV_DIFF, **_small()),
    _V5E("flash_attention_scan_zeros", _QKV * 3, _flash_scan_zeros, _GRADS, _QKV_DIFF, **_small()),
    _V5E("splash_mha_closed", _QKV * 3, _splash, _GRADS, _QKV_DIFF, **_ARG),
    _V5E(
        "splash_mha_closed_fused",
        _QKV * 3,
        functools.partial(_splash, fused=True),
        _GRADS,
        _QKV_DIFF,
        **_ARG,
    ),
    _V5E(
        "splash_mqa_closed",
        _QKV + _ONE_HEAD * 2,
        functools.partial(_splash, mqa=True),
        Expected(bytes_(model=786432), NOT_ANNOTATED, ZERO),
        _QKV_DIFF,
        **_ARG,
    ),
    _V5E("splash_mha_seg", _QKV * 3 + _IDS, _splash_seg, _GRADS, _QKV_DIFF, **_ARG),
    _V5E("splash_mha_passed", _QKV * 3 + _SPLASH_LEAVES, _splash_passed, _GRADS, _QKV_DIFF, **_ARG),
    _V5E(
        "splash_mha_dynmask",
        _QKV * 3 + _MASK,
        _splash_dynmask,
        Expected(_DYNMASK, _DYNMASK, SAME_FAILURE),
        _QKV_DIFF,
    ),
    _V5E("megablox_gmm", _X + _EXPERTS, _gmm, _GMM_BOTH, (0, 1), **_ARG),
    _V5E("megablox_gmm_gs", _GMM, _gmm, _GMM_BOTH, (0, 1), **_ARG),
    _V5E("megablox_gmm_xonly", _GMM, _gmm, _ONE_ROWS, (0,), **_ARG),
    _V5E("megablox_gmm_fwd", _GMM, _gmm, FORWARD, **_ARG),
    _V5E("matmul_fwd", _X + _W, _matmul, FORWARD, **_TPU),
    _V5E(
        "matmul_grad", _X + _W, _matmul, Expected(_ASSERTION, NOT_ANNOTATED, SAME_FAILURE), (0, 1)
    ),
    _V5E(
        "matmul_user_vjp",
        _X + _W,
        matmul_with_vjp(_matmul),
        Expected(bytes_(both=131072, model=262144), NOT_ANNOTATED, bytes_(data=131072)),
        (0, 1),
        **_TPU,
    ),
    _V5E(
        "paged_attention",
        (
            Arg((8, 8, 128), "bfloat16", DATA),
            *(Arg((8, 64, 16, 128), "bfloat16"),) * 2,
            Arg((8,), "int32", DATA, drawn(1, 129)),
            Arg((8, 8), "int32", DATA, drawn(0, 64)),
        ),
        _paged,
        FORWARD,
        **_TPU,
    ),
    _V5E(
        "ragged_paged_attention",
        (
            Arg((512, 8, 128), "bfloat16", DATA),
            Arg((64, 16, 8, 128), "bfloat16"),
            Arg((32,), "int32", DATA, drawn(32, 129)),
            Arg((32, 8), "int32", DATA, drawn(0, 64)),
            Arg((36,), "int32", DATA, lambda rng, shape: [16 * i for i in range(9)] * 4),
            Arg((4,), "int32", DATA, lambda rng, shape: [8] * 4),
        ),
        # JAX 0.10.2's TPU interpreter raises AttributeError on this kernel's reshaped refs.
        _ragged_paged,
        FORWARD,
    ),
    _V5E(
        "all_gather_nested",
        _LINES,
        _all_gather_op,
        Expected(_NESTED, _NESTED, SAME_FAILURE),
        out_spec=(),
    ),
    _V5E(
        "all_gather_top",
        _LINES,
        _all_gather_op,
        Expected(ZERO, ZERO, ZERO),
        out_spec=(),
        wrap=False,
        **_TPU,
    ),
    _V5E(
        "all_gather_local",
        _LINES,
        _all_gather_local,
        FORWARD,
        out_spec=(),
        communicates=Communicates(
            "all_gather_invariant",
            DATA,
            "jax.experimental.pallas.ops.tpu.all_gather:ag_kernel",
            "ag_kernel",
        ),
        **_TPU,
    ),
    _V5E("random_threefry", _ROWS + _KEY, _threefry, _ONE_ROWS, (0,), **_TPU),
    _V5E("random_philox", _ROWS + _KEY, _philox, _ONE_ROWS, (0,), **_TPU),
    _V5E("example_double_fwd", _ROWS, _double, TRUSTED, **_TPU),
    _V5E(
        "example_double_grad",
        _ROWS,
        _double,
        Expected(NO_DERIVATIVE, NO_DERIVATIVE, SAME_FAILURE),
        (0,),
    ),
    _V5E("example_double_wrongspec", _ROWS, _double, WRONG_SPEC, out_spec=()),
    _V5E(
        "example_double_stopgrad",
        _ROWS + (Arg((256,), "float32"),),
        stopped(_double),
        Expected(bytes_(both=1024), bytes_(data=262144), bytes_(data=1024), wrong=True),
        (1,),
        **_TPU,
    ),
    _V5P("pl_kernel", _ROWS, _with_vjp(_pl_kernel), _ONE_ROWS, (0,), **_TPU),
    _V5P(
        "core_map_run_state",
        _ROWS,
        _with_vjp(_into_itself),
        Expected(bytes_(model=262144), ZERO, ZERO),
        (0,),
        **_TPU,
    ),
    _V5P(
        "core_map_run_state_zeros",
        _ROWS,
        _with_vjp(_into_zeros),
        Expected(bytes_(model=262144), BWD_TYPE, ZERO),
        (0,),
        **_TPU,
    ),
    _V5P("core_map_zeros_wrongspec", _ROWS, _with_vjp(_into_zeros), WRONG_SPEC, out_spec=()),
    _V5P(
        "pl_kernel_wrongspec",
        _ROWS,
        _with_vjp(_pl_kernel),
        Expected(ZERO, NOT_ANNOTATED, REFUSED),
        out_spec=(),
    ),
)
