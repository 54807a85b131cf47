"""What JAX's own calls do that the audit can't read (read in 0.10.2).

Left out is `blackwell_matmul_mgpu`, as tokamax 0.0.12's ragged_dot is: it runs in clusters of two
blocks and gives `dynamic_scheduling_loop` no `cluster_axes`, which that asks for where a cluster
has more than one. Then nothing holds a block back from taking the next tile before the other one
has read this one's number, and the two may work on different tiles.
"""

from __future__ import annotations

from shardrules.registry.shipped import Shipped

RULES = Shipped(
    # Not a guess: else the program is undefined.
    kernels={"pure_callback": "its contract is that it is a pure function of its arguments"}
)
