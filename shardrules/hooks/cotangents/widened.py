"""A custom_vjp's fwd that runs with primals that were cast to vary before a branch.

What fwd saves may hold a function that JAX differentiated: ``jax.vjp``'s pullback sums over the
devices what is invariant, and does so wherever bwd calls it. In a branch that some devices take
only, that sum waits for the others for good. So fwd is traced with the types that its primals have
there (``retyping/higher_order.py``), and what it saves is each device's own.
"""

from __future__ import annotations

from typing import Any

from shardrules.door.internals import Door
from shardrules.door.jaxprs import widened

__all__ = ["WidenedFwd"]


class WidenedFwd:
    """A custom_vjp's fwd that obeys marks, and its trees under each mark."""

    def __init__(self, door: Door, state: Any):
        self.door = door
        self.state = state
        self._known: dict[frozenset[str], Any] = {}
        self._axes: frozenset[str] = frozenset()  # those of the run that goes on
        self._returned: Any = None

    def flatten(self, fwd: Any, *rest: Any, **options: Any) -> tuple[Any, Any]:
        """Return the flat fwd and the function that returns its trees, as JAX does."""
        *others, primal = rest
        seen = self.door.transformation(self._see)(fwd)
        flat, trees = self.door.flatten_fwd(seen, *others, self._typed_as(primal), **options)

        def known():  # JAX's own knows those of the last run alone
            axes = self.state.here.widened
            return self._known[axes] if axes in self._known else trees()

        return self.door.transformation(self._run)(flat, trees), known

    def _run(self, flat, trees, *args):
        values, marks = args[::2], args[1::2]
        axes = frozenset().union(*(getattr(one, "axes", frozenset()) for one in marks))
        if axes:
            values = tuple(self._cast(value, axes) for value in values)
            args = tuple(x for pair in zip(values, map(bool, marks)) for x in pair)
        before, self._axes = self._axes, axes
        try:
            results = flat(*args)
        finally:
            self._axes, self._returned = before, None
        self._known[axes] = trees()
        return results

    def _see(self, fwd, *args):
        self._returned = fwd(*args)
        return self._returned

    def _typed_as(self, primal):
        """Give the primal's outputs, which JAX compares with fwd's, the types that fwd's have."""

        def out_type():
            import jax

            tree, avals, *rest = primal()
            if self._axes:
                leaves = jax.tree_util.tree_leaves(self._returned[0])
                if len(leaves) == len(avals):
                    types = [self.door.axis_type(self.door.typeof(leaf)) for leaf in leaves]
                    avals = [*map(self.door.with_axis_type, avals, types)]
            return (tree, avals, *rest)

        return out_type

    def _cast(self, value, axes):
        aval = self.door.typeof(value)
        if not (self.door.checking() and self.door.can_cast(aval)):
            return value
        return self.door.cast(value, widened(self.door.axis_type(aval), axes))
