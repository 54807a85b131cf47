"""Hijax primitives, whose authors type their results by hand.

If the author forgets the mesh axes in a result type (``out_aval``, or ``abstract_eval`` to JAX
0.11), JAX types the result as invariant, silently wrong. The expansion shows what varies.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

from shardrules.door.internals import Door
from shardrules.errors import AxisError
from shardrules.hooks.state import Hooks
from shardrules.hooks.types.funnel import Law
from shardrules.hooks.types.laws import Row
from shardrules.registry.axistypes import show_axes


def hijax_object(door: Door, primitive: Any, params: dict[str, Any]) -> Any:
    """Return the hijax primitive's object, or None for another primitive."""
    if isinstance(primitive, door.HiPrimitive or ()):  # JAX 0.11 and older
        return primitive
    if primitive is door.hi_primitive_p:
        return params.get("_prim", params.get("prim"))  # JAX 0.8 and 0.9: prim
    return None


class HijaxHooks(Hooks):
    """Hooks on the calls of hijax primitives."""

    laws = ("hijax",)

    def law(self, primitive: Any, row: Row) -> Law:
        """Return the law of a hijax primitive."""
        is_hijax = hijax_object(self.door, primitive, {"prim": primitive}) is not None
        return Law(bind=self._bind) if is_hijax else Law()

    def _bind(self, rest, primitive, trace, args, params):
        result = rest(primitive, trace, args, params)
        called = hijax_object(self.door, primitive, params)

        def expand(*flat):
            import jax

            if called is primitive:
                return primitive.to_lojax(*flat, **params)
            return called.expand(*jax.tree_util.tree_unflatten(called.in_tree, flat))

        self._check(called, expand, args, result if primitive.multiple_results else [result])
        return result

    def _check(self, called: Any, expand: Callable[..., Any], args, outputs) -> None:
        """Raise AxisError if a result's type has fewer axes than in the call's expansion."""
        door = self.door
        if not self.acts or type(called).__module__.startswith("jax."):
            return  # JAX types its own by tracing
        takes, gives = [*map(door.typeof, args)], [*map(door.typeof, outputs)]
        if any(isinstance(a, door.AbstractRef) or getattr(a, "has_qdd", False) for a in takes):
            return  # an expansion on trial would write to refs
        everywhere = frozenset(door.manual_axes())
        if not any(door.can_cast(a) and everywhere - door.axis_type(a).varying for a in gives):
            return
        for i, (aval, made) in enumerate(zip(gives, self._expanded(expand, takes))):
            if not door.can_cast(aval):
                continue
            lost = door.axis_type(made).varying - door.axis_type(aval).varying
            if lost:
                name = type(called).__name__
                raise AxisError(
                    f"result {i} of the hijax primitive {name!r} is typed invariant over "
                    f"{show_axes(lost)}, by its out_aval or abstract_eval, and varies over them "
                    "where it is expanded: out_specs would be taken that are wrong, and gradients "
                    f"summed. Give it the type of what varies as it does: jax.typeof(x) of an "
                    "operand of its shape, say.",
                    axes=lost,
                )

    def _expanded(self, expand: Callable[..., Any], takes) -> list[Any]:
        """Return the avals of the results when the call is expanded to arrays."""
        import jax

        arrays = [array for aval in takes for array in aval.lo_ty()]
        results: list[Any] = []

        def run(*flat):
            typed = iter([self.door.cast(x, self.door.axis_type(a)) for x, a in zip(flat, arrays)])
            values = [aval.raise_val(*itertools.islice(typed, len(aval.lo_ty()))) for aval in takes]
            results.extend(map(jax.typeof, jax.tree_util.tree_leaves(expand(*values))))

        jax.make_jaxpr(run)(*(jax.ShapeDtypeStruct(a.shape, a.dtype) for a in arrays))
        return results
