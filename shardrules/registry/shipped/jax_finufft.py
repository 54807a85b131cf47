"""jax-finufft's transforms (read in 1.3): functions of their operands."""

from __future__ import annotations

from shardrules.registry.shipped import Shipped

RULES = Shipped(
    primitives={
        f"jax_finufft.ops:nufft{number}_p": "a nonuniform Fourier transform" for number in "123"
    }
)
