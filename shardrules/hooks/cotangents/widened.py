"""A custom_vjp's fwd that runs with primals that were cast to vary before a branch.

fwd may save the pullback of a ``jax.vjp``, which sums the cotangents of invariant values over the
devices wherever bwd calls it. In a branch that only some devices take, that sum waits forever for
the other devices. So fwd is traced with the types that its primals have in the branch
(``retyping/higher_order.py``), and each device saves residuals of its own.
"""

from __future__ import annotations

from typing import Any

import jax

from shardrules.door.internals import Door
from shardrules.door.jaxprs import widened


class WidenedFwd:
    """A custom_vjp's fwd, and its trees for each set of axes that its primals were cast to."""

    def __init__(self, door: Door, state: Any):
        self.door = door
        self.state = state
        self._trees: dict[frozenset[str], Any] = {}
        self._axes: frozenset[str] = frozenset()  # of the current run
        self._returned: Any = None

    def flatten(self, fwd: Any, *rest: Any, **options: Any) -> tuple[Any, Any]:
        """Return the flat fwd and the function that returns its trees, as JAX does."""
        *before, primal = rest
        seen = self.door.transformation(self._see)(fwd)
        flat, trees = self.door.flatten_fwd(seen, *before, self._typed_as(primal), **options)

        def trees_of_run():  # JAX's own function returns only the trees of the last run
            axes = self.state.here.widened
            return self._trees[axes] if axes in self._trees else trees()

        return self.door.transformation(self._run)(flat, trees), trees_of_run

    def _run(self, flat, trees, *args):
        values, marks = args[::2], args[1::2]
        axes = frozenset().union(*(getattr(mark, "axes", frozenset()) for mark in marks))
        if axes:
            values = tuple(self._cast(value, axes) for value in values)
            args = tuple(x for pair in zip(values, map(bool, marks)) for x in pair)
        before, self._axes = self._axes, axes
        try:
            results = flat(*args)
        finally:
            self._axes, self._returned = before, None
        self._trees[axes] = trees()
        return results

    def _see(self, fwd, *args):
        self._returned = fwd(*args)
        return self._returned

    def _typed_as(self, primal):
        """Give the primal's outputs the types of fwd's outputs, which JAX compares with them."""

        def out_type():
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
