"""JAX's own primitives that read no other device, and whose abstract evals forget mesh axes.

Each result gets the axes of one operand, or none, where it depends on all (read and run, JAX 0.6.2
to 0.12). So the indices that ``jnp.argsort`` gives for varying data are typed invariant, and the
gradient of what they pick is silently wrong; cuDNN attention types the gradient of a replicated k
as invariant, and no psum makes it whole. To users they are ordinary operations, not kernels.
"""

from __future__ import annotations

import fnmatch
import functools
from typing import Any

from shardrules.hooks.door.patching import Patches
from shardrules.hooks.state import Hooks

__all__ = ["ForgetfulHooks"]

# Names of primitives. After the first row, calls of cuDNN's and cuSPARSE's routines on GPU.
_FORGETFUL = (
    "sort",
    "rng_bit_generator",
    "shard_alike",
    "dot_product_attention_*",
    "scaled_dot",
    "scaled_matmul",
    "scaled_matmul_wrapper",
    "cudnn_fusion",
    "rnn_fwd",
    "rnn_bwd",
    "bcoo_*",
    "bcsr_*",
    "coo_*",
    "csr_*",
)


class ForgetfulHooks(Hooks):
    """The hooks of JAX's primitives that forget mesh axes."""

    def install(self, patches: Patches) -> None:
        """Adopt those of JAX's primitives that are there."""
        tables = [self.jax.lowerings, *(self.jax.platform_lowerings or {}).values()]
        for primitive in dict.fromkeys(p for table in tables for p in table):
            self.adopt(patches, primitive)

    def adopt(self, patches: Patches, primitive: Any) -> None:
        """Let one of JAX's primitives remember the axes of all its operands, if it forgets them.

        Args:
          patches: what to undo.
          primitive: a primitive.
        """
        evaluate = vars(primitive).get("abstract_eval")
        if (
            not self.jax.typed
            or evaluate is None
            or hasattr(evaluate, "shardrules")
            or not any(fnmatch.fnmatchcase(primitive.name, one) for one in _FORGETFUL)
            or not (getattr(_innermost(evaluate), "__module__", None) or "").startswith("jax.")
        ):
            return
        bind = primitive.bind

        def bound(*args, **params):
            if self.acts:
                avals = [self.jax.typeof(x) for x in args]
                union = _union(map(self.jax.axis_type, avals))
                args = [
                    self.jax.cast(x, self.jax.axis_type(aval).vary(*union))
                    if self.jax.can_cast(aval)
                    else x
                    for x, aval in zip(args, avals)
                ]
            return bind(*args, **params)

        def abstract_eval(*avals, **params):
            outputs, effects = evaluate(*avals, **params)
            if self.acts:
                union = _union(map(self.jax.axis_type, avals))
                several = primitive.multiple_results
                listed = [
                    self.jax.with_axis_type(aval, self.jax.axis_type(aval).vary(*union))
                    for aval in (outputs if several else (outputs,))
                ]
                outputs = listed if several else listed[0]
            return outputs, effects

        setattr(abstract_eval, "shardrules", True)
        patches.attribute(primitive, "bind", bound)
        patches.attribute(primitive, "abstract_eval", abstract_eval)


def _union(types) -> frozenset[str]:
    return frozenset().union(*(t.varying for t in types))


def _innermost(evaluate: Any) -> Any:
    """Return the function that was given to ``def_abstract_eval``, inside what JAX made of it."""
    for cell in getattr(evaluate, "__closure__", None) or ():
        if callable(cell.cell_contents):
            evaluate = cell.cell_contents
    while isinstance(evaluate, functools.partial):
        evaluate = evaluate.func
    return evaluate
