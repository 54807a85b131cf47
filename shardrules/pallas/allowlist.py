"""Which primitives a kernel may hold and still be proven, and why the others are refused.

A primitive is named ``family:name``: the family is the part of JAX that defines it, so that a
user's own primitive called ``add`` is not mistaken for JAX's. What stands in none of these tables
is not proven. A name may have two forms (``debug_barrier_p``: JAX 0.10, ``debug_barrier``: 0.12).
"""

from __future__ import annotations

__all__ = ["KEEPS_SHAPE", "PURE", "REFUSED", "REMOTE_TRANSFORMS", "TRANSFORMS"]


def _family(family: str, names: str) -> frozenset[str]:
    return frozenset(f"{family}:{name}" for name in names.split())


# Functions of their operands, and operations without a result that touch no data (hints, fences,
# prints, waits for what this kernel itself has started).
PURE = (
    _family(
        "jax",
        """
        abs acos acosh add add_any and argmax argmin asin asinh atan atan2 atanh bessel_i0e
        bessel_i1e bitcast_convert_type broadcast_in_dim cbrt ceil clamp clz complex concatenate
        conj conv_general_dilated convert_element_type copy copy_p cos cosh cumlogsumexp cummax
        cummin cumprod cumsum digamma div dot_general dynamic_slice dynamic_update_slice eq eq_to
        erf erf_inv erfc exp exp2 expm1 floor from_edtype gather ge gt igamma igamma_grad_a igammac
        imag integer_pow iota iota_2x32_shape is_finite le le_to lgamma log log1p log2 logistic lt
        lt_to max min mul mulhi name ne neg nextafter not optimization_barrier or pad philox2x32
        philox4x32 polygamma population_count pow pvary ragged_dot_general random_bits
        random_clone random_fold_in random_seed random_split random_unwrap random_wrap real
        reduce_and reduce_max reduce_min reduce_or reduce_precision reduce_prod reduce_sum
        reduce_xor regularized_incomplete_beta rem reshape rev round rsqrt select_n shift_left
        shift_right_arithmetic shift_right_logical sign sin sinh slice sort split sqrt square
        squeeze stack stop_gradient sub tan tanh threefry2x32 threefry4x32 tile to_edtype top_k
        transpose unstack xor zeros_like zeta""",
    )
    | _family("state", "broadcast_to")
    # delay spends time and gives nothing back.
    | _family("pallas", "delay multiple_of num_programs program_id reciprocal einshape_lo")
    # add_dependency orders; trace_value writes to the profiler's trace; stochastic_round takes its
    # random bits as an operand.
    | _family(
        "tpu",
        """
        add_dependency bitcast pack_elementwise prng_join prng_split repeat roll
        stochastic_round trace_value unpack_elementwise""",
    )
    | _family(
        "mgpu",
        """
        _copysign async_prefetch commit_group commit_smem commit_tmem griddepcontrol_wait
        layout_cast print_layout set_max_registers set_max_registers_p wait_load_tmem
        wait_smem_to_gmem wgmma_wait""",
    )
    | _family("triton", "debug_barrier debug_barrier_p max_contiguous")
    # It formats its operands and gives nothing back. debug_callback runs the user's Python.
    | _family("debug", "debug_print")
)

# name -> (reason, whether it shows that the kernel communicates or reads its device's place).
REFUSED = {
    "callback:*": ("it calls out of the kernel", False),
    "debug:*": ("it calls out of the kernel", False),
    "parallel:*": ("it is a collective over a mesh axis", True),
    "jax:empty": ("its elements hold whatever the memory held before", False),
    "jax:empty2": ("its elements hold whatever the memory held before", False),
    "jax:rng_uniform": ("its state lives outside of the kernel", False),
    "mgpu:async_store_smem": ("it writes another block's shared memory", False),
    "mgpu:barrier_test": ("its answer depends on timing", False),
    "mgpu:inline_mgpu": ("inline code can read a clock or an SM's id", False),
    "mgpu:inline_mgpu_p": ("inline code can read a clock or an SM's id", False),
    "mgpu:mgpu_atomic_store": ("the order in which it happens is not fixed", False),
    "mgpu:multimem_load_reduce": ("it reads the memory of other devices", True),
    "mgpu:multimem_store": ("it writes the memory of other devices", True),
    "mgpu:query_cluster_cancel": ("its answer depends on timing", False),
    "mgpu:semaphore_signal_multicast": ("it signals semaphores of other devices", True),
    "mgpu:semaphore_signal_parallel": ("it can signal semaphores of other devices", False),
    "mgpu:try_cluster_cancel": ("its answer depends on timing", False),
    "pallas:semaphore_read": ("its answer depends on timing", False),
    "triton:atomic_cas": ("what it finds depends on which program comes first", False),
    "triton:elementwise_inline_asm": ("inline code can read a clock or an SM's id", False),
    "triton:elementwise_inline_asm_p": ("inline code can read a clock or an SM's id", False),
}

# Views of a ref that stay on this device.
KEEPS_SHAPE = frozenset(
    """
    state:BitcastTransform state:ReshapeTransform state:TransposeTransform mgpu:TilingTransform
    mgpu:UntilingTransform mgpu:SwizzleTransform mgpu:UnswizzleRef mgpu:IdentityTransform
    mgpu:CollapseLeadingBatchDimensionsTransform mgpu:ExpandLeadingBatchDimensionsTransform
    """.split()
)
TRANSFORMS = KEEPS_SHAPE | frozenset(
    "state:NDIndexer state:Slice state:TransformedRef mgpu:ExtractAliasedRef".split()
)
REMOTE_TRANSFORMS = frozenset("mgpu:PeerMemRef mgpu:MulticastRef".split())
