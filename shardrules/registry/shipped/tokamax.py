"""tokamax's kernels for Hopper and Blackwell that the audit can't read (0.0.12 and 0.0.17).

What it can't read was: code that emits barriers among a kernel's own warps, votes of a warp and
unpacked bits, and a scheduler that hands out each tile once. Left out is the backward pass of
attention for Blackwell of 0.0.12: its copies add floats in no fixed order.
"""

from __future__ import annotations

from shardrules.registry.shipped import Shipped

_OPS = "tokamax._src.ops"
_ATTENTION = "attention; its inline code is barriers, a vote and unpacked bits"
_TILES = "it takes its next tile when the scheduler has one for it, and each tile once"

RULES = Shipped(
    kernels={
        f"{_OPS}.attention.pallas_mosaic_gpu_kernel_sm90:kernel": _ATTENTION,
        f"{_OPS}.attention.pallas_mosaic_gpu_kernel_sm100:kernel": _ATTENTION,
        "tokamax._src.mosaic_gpu:flash_attention_sm90": _ATTENTION,
        "tokamax._src.mosaic_gpu:flash_attention_sm100": _ATTENTION,
        f"{_OPS}.attention.pallas_mosaic_gpu_vjp_kernel_sm100:sm100_dq_kernel": _ATTENTION,
        f"{_OPS}.attention.pallas_mosaic_gpu_vjp_kernel_sm100:sm100_dkv_kernel": _ATTENTION,
        f"{_OPS}.gated_linear_unit.pallas_mosaic_gpu_kernel_sm100:kernel": _TILES,
        f"{_OPS}.ragged_dot.pallas_mosaic_gpu_kernel_sm100:kernel": _TILES,
        f"{_OPS}.ragged_dot.pallas_mosaic_gpu_kernel_sm100:ragged_dot_sm100": _TILES,
    }
)
