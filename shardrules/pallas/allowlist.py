"""List the primitives that keep a kernel a function of its operands, and why others are refused.

A primitive is named ``family:name``. The family is the part of JAX that defines it, so that a
user's own primitive called ``add`` isn't mistaken for JAX's. The audit refuses a primitive that is
in none of these tables and has no action in ``actions``. Some names are listed in the forms of
several JAX versions (``debug_barrier_p`` in 0.10, ``debug_barrier`` in 0.12).
"""

from __future__ import annotations


def _names(**names_by_family: str) -> frozenset[str]:
    full: set[str] = set()
    for family, names in names_by_family.items():
        full.update(f"{family}:{name}" for name in names.split())
    return frozenset(full)


# Pure functions of the operands, and operations without a result (hints, fences, prints, checks,
# and waits for operations that this kernel started).
PURE = _names(
    jax="""
        abs acos acosh add add_any and argmax argmin asin asinh atan atan2 atanh bessel_i0e
        bessel_i1e bitcast_convert_type broadcast_in_dim cbrt ceil clamp clz complex concatenate
        conj conv_general_dilated convert_element_type copy copy_p cos cosh cumlogsumexp cummax
        cummin cumprod cumsum digamma div dot_general dynamic_slice dynamic_update_slice empty
        empty2 eq eq_to erf erf_inv erfc exp exp2 expm1 floor from_edtype gather ge gt igamma
        igamma_grad_a igammac imag integer_pow iota iota_2x32_shape is_finite le le_to lgamma
        log log1p log2 logistic lt lt_to max min mul mulhi name ne neg nextafter not
        one_minus_square optimization_barrier or pad philox2x32 philox4x32 platform_index
        polygamma polynomial population_count pow pvary ragged_dot_general random_clone
        random_wrap real reduce_and reduce_max reduce_min reduce_or reduce_precision reduce_prod
        reduce_sum reduce_window_max reduce_window_min reduce_window_sum reduce_xor
        regularized_incomplete_beta relayout rem reshape rev round rsqrt scatter scatter-max
        scatter-min select_n shift_left shift_right_arithmetic shift_right_logical sign sin sinh
        slice sort split sqrt square squeeze stack stage stop_gradient sub tan tanh threefry2x32
        threefry4x32 tile to_edtype top_k transpose unstack xor zeros_like zeta""",
    state="broadcast_to with_memory_space_constraint",
    # delay only takes time; it has no result.
    pallas="""
        delay einshape_lo max_contiguous multiple_of num_programs program_id reciprocal
        with_memory_space_constraint""",
    # add_dependency only orders execution; trace_value writes to the profiler's trace;
    # stochastic_round takes its random bits as an operand.
    tpu="""
        add_dependency bitcast conv has_memory_space pack_elementwise prng_join prng_split repeat
        roll stochastic_round trace_value unpack_elementwise""",
    # On a SparseCore, all_reduce_* reduce the lanes of one vector, and barrier joins the subcores.
    sc="""
        all_reduce_ffs all_reduce_population_count barrier bitcast masked_cummax masked_cummin
        masked_cumsum masked_sort pack scan_count unique unpack""",
    mgpu="""
        _copysign async_prefetch commit_group commit_smem commit_tmem
        griddepcontrol_launch_dependents griddepcontrol_wait layout_cast mma
        mosaic_gpu_reduce_max mosaic_gpu_reduce_min mosaic_gpu_reduce_prod mosaic_gpu_reduce_sum
        print_layout set_max_registers set_max_registers_p wait_gmem_to_smem wait_load_tmem
        wait_smem_to_gmem wgmma wgmma_accumulator_deref wgmma_accumulator_deref_p
        wgmma_accumulator_store wgmma_accumulator_store_p wgmma_wait""",
    triton="debug_barrier debug_barrier_p max_contiguous",
    # debug_print only formats its operands. (debug_callback runs the user's Python.)
    debug="debug_print",
    # pl.debug_check stops the program or does nothing.
    checkify="check",
)

# Reads, writes, copies and waits. They stay on this device if the views of their refs do.
LOCAL = _names(
    state="addupdate swap",
    pallas="masked_swap semaphore_wait",
    sc="gather load swap",
    mgpu="""
        async_copy_scales_to_tmem async_copy_smem_to_tmem async_copy_sparse_metadata_to_tmem
        async_load async_store_smem async_store_tmem barrier_arrive barrier_arrive_and_wait
        barrier_wait copy_gmem_to_smem load semaphore_wait store tcgen05_commit_arrive tcgen05_mma
        wgmma_ref""",
)

_ASSEMBLY = ("inline code can read a clock or an SM's id", False)
_NO_ORDER = ("atomic operations run in no fixed order", False)
_TIMING = ("its result depends on timing", False)
_RACE = ("the value that it reads depends on which program runs first", False)
MEETING = "devices meet at a barrier semaphore"

# Maps a name to the reason for refusing it, and to whether it shows that the kernel communicates or
# reads its device's position.
REFUSED = {
    "callback:*": ("it calls out of the kernel", False),
    "debug:*": ("it calls out of the kernel", False),
    "parallel:*": ("it is a collective over a mesh axis", True),
    "jax:rng_uniform": ("its state lives outside of the kernel", False),
    "mgpu:barrier_test": _TIMING,
    "mgpu:inline_mgpu": _ASSEMBLY,
    "mgpu:inline_mgpu_p": _ASSEMBLY,
    "mgpu:mgpu_atomic_store": _NO_ORDER,
    "mgpu:multimem_load_reduce": ("it reads the memory of other devices", True),
    "mgpu:multimem_store": ("it writes the memory of other devices", True),
    "mgpu:query_cluster_cancel": _TIMING,
    "mgpu:semaphore_signal_multicast": ("it signals semaphores of other devices", True),
    "mgpu:try_cluster_cancel": _TIMING,
    "pallas:atomic_cas": _RACE,
    "pallas:atomic_rmw": _NO_ORDER,
    "pallas:get_global": ("its value persists from one run of the kernel to the next", False),
    "pallas:semaphore_read": _TIMING,
    "sc:sc_fetch_and_add": _RACE,
    "tpu:get_barrier_semaphore": (MEETING, False),
    "triton:atomic_cas": _RACE,
    "triton:atomic_rmw": _NO_ORDER,
    "triton:elementwise_inline_asm": _ASSEMBLY,
    "triton:elementwise_inline_asm_p": _ASSEMBLY,
}

# Views of a ref that stay on this device, and views of other devices' memory.
TRANSFORMS = frozenset(
    """
    state:BitcastTransform state:ReshapeTransform state:TransposeTransform state:NDIndexer
    state:Slice state:TransformedRef mgpu:TilingTransform mgpu:UntilingTransform
    mgpu:SwizzleTransform mgpu:UnswizzleRef mgpu:IdentityTransform mgpu:ExtractAliasedRef
    mgpu:CollapseLeadingBatchDimensionsTransform mgpu:ExpandLeadingBatchDimensionsTransform
    """.split()
)
REMOTE_TRANSFORMS = frozenset("mgpu:PeerMemRef mgpu:MulticastRef".split())
