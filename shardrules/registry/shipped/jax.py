"""What JAX's own calls do that the audit can't read or can't prove (read in 0.10.2)."""

from __future__ import annotations

from shardrules.registry.shipped import Shipped

RULES = Shipped(
    kernels={
        "jax.experimental.pallas.ops.gpu.blackwell_matmul_mgpu:kernel": (
            "it takes its next tile when the scheduler has one for it, and each tile once"
        ),
        # Not a guess: else the program is undefined.
        "pure_callback": "its contract is that it is a pure function of its arguments",
    }
)
