"""Hijax primitives, whose authors type their results by hand.

``out_aval`` written without an axis type, as most are, is invariant to JAX (0.8 to 0.12): its check
accepts ``P()`` for what differs on devices, and the gradient through it is silently wrong. What the
primitive expands to says what varies.
"""

from __future__ import annotations

from typing import Any

from shardrules.errors import AxisError
from shardrules.hooks.door.patching import Patches
from shardrules.hooks.state import Hooks
from shardrules.registry.axistypes import show_axes

__all__ = ["HijaxHooks"]


class HijaxHooks(Hooks):
    """The hooks on the calls of hijax primitives."""

    def install(self, patches: Patches) -> None:
        """Replace what binds them."""
        primitive = self.jax.call_hi_primitive_p
        if primitive is not None:
            patches.attribute(primitive, "bind", self._binder(primitive.bind))

    def _binder(self, bind):
        def bound(*args, **params):
            outputs = bind(*args, **params)
            if self.acts:
                called = params.get("_prim", params.get("prim"))  # JAX 0.8 and 0.9: prim
                if not type(called).__module__.startswith("jax."):  # JAX's own are traced
                    self._check(called, args, outputs)
            return outputs

        return bound

    def _check(self, called: Any, args, outputs) -> None:
        """Raise if a result is typed less varying than what the call expands to.

        Raises:
          AxisError: naming the result, and what to give as its type.
        """
        import jax

        declared = [self._varying(one) for one in outputs]
        if all(declared) and frozenset(self.jax.manual_axes()) <= frozenset.intersection(*declared):
            return

        def expanded(*flat):
            result = called.expand(*jax.tree_util.tree_unflatten(called.in_tree, flat))
            return jax.tree_util.tree_leaves(result)

        results = jax.make_jaxpr(expanded)(*args).out_avals
        for i, (have, aval) in enumerate(zip(declared, results)):
            lost = self.jax.axis_type(aval).varying - have
            if lost:
                name = type(called).__name__
                raise AxisError(
                    f"result {i} of the hijax primitive {name!r} is typed invariant over "
                    f"{show_axes(lost)} by its out_aval, and varies over them where it is "
                    "expanded: out_specs would be taken that are wrong, and gradients summed. Give "
                    f"{name!r} an out_aval that has the axes, as jax.typeof(x) has of an operand "
                    "of that shape.",
                    axes=lost,
                )

    def _varying(self, value: Any) -> frozenset[str]:
        return self.jax.axis_type(self.jax.typeof(value)).varying
