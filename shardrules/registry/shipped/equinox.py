"""equinox's primitives (read in 0.13): what they compute from arrays, apart from transformations.

Left out is ``noinline``, which runs any function of the user's. ``error_if`` is a
``jax.pure_callback``, which is declared by its contract.
"""

from __future__ import annotations

from shardrules.registry.shipped import Shipped

RULES = Shipped(
    primitives={
        "equinox._unvmap:unvmap_all_p": "whether all elements hold, on each device",
        "equinox._unvmap:unvmap_any_p": "whether any element holds, on each device",
        "equinox._unvmap:unvmap_max_p": "the largest element, on each device",
        "equinox.internal._nontraceable:nontraceable_p": "its operand",
        "equinox.internal._nontraceable:nondifferentiable_backward_p": "its operand",
        "equinox.internal._nontraceable:nonbatchable_p": "its operand",
        "equinox.internal._loop.common:select_if_vmap_p": "a selection among its operands",
        "equinox.internal._loop.common:maybe_set_p": "an array with some elements set",
    }
)
