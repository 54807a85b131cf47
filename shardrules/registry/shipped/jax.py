"""What JAX's own calls do that the audit can't read (read in 0.10.2 and 0.12.0.1)."""

from __future__ import annotations

from shardrules.registry.shipped import Shipped

RULES = Shipped(
    kernels={
        # Not a guess: else the program is undefined.
        "pure_callback": "its contract is that it is a pure function of its arguments",
        # The scheduler hands out each tile once, and a tile is summed in one order. What is well
        # formed has both blocks of a cluster work on one tile; the call names no cluster_axes, by
        # which dynamic_scheduling_loop would see to that.
        "jax.experimental.pallas.ops.gpu.blackwell_matmul_mgpu:kernel": (
            "a product; each tile once, summed in one order, if it is well formed: the blocks of a "
            "cluster take one tile together"
        ),
    }
)
