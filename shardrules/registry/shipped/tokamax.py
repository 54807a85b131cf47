"""tokamax's kernels for Hopper and Blackwell that the audit can't read (0.0.12 and 0.0.17).

What it can't read is code that emits barriers among a kernel's own warps, a vote of a warp,
unpacked bits, and a scheduler that hands out each tile once. Left out, all for Blackwell, is what
may differ between devices that hold the same arrays: attention of 0.0.12 (a tile without keys
overwrites the residuals of all; its backward pass adds floats in no fixed order), the backward pass
of 0.0.17 (with a causal mask it leaves parts of dk, dv and dbias unwritten), the gated linear unit
(so are rows beyond the last whole tile) and ragged_dot of 0.0.12 (a pair of blocks may take
different tiles).
"""

from __future__ import annotations

from shardrules.registry.shipped import Shipped

_OPS = "tokamax._src.ops"

RULES = Shipped(
    kernels={
        f"{_OPS}.attention.pallas_mosaic_gpu_kernel_sm90:kernel": (
            "attention; each tile takes its keys in one order, and its inline code is barriers"
        ),
        "tokamax._src.mosaic_gpu:flash_attention_sm90": (
            "attention; each tile takes its keys in one order, and its inline code is barriers"
        ),
        "tokamax._src.mosaic_gpu:flash_attention_sm100": (
            "attention; each tile once, its keys in one order; a vote skips what changes nothing"
        ),
        f"{_OPS}.ragged_dot.pallas_mosaic_gpu_kernel_sm100:ragged_dot_sm100": (
            "a grouped product; each tile once, summed in one order"
        ),
    }
)
