"""Casts that JAX rejects or crashes on.

A user's cast over axes that a value already varies over does nothing here (JAX 0.8 to 0.12 reject
it): a kernel's annotation is widened by a proof, and then the user casts (MaxText's megablox). JAX
to 0.6.0 sums or casts a cotangent that is known to be zero (a bwd returns None), and raises.
"""

from __future__ import annotations

import functools
from typing import Any

from jax.interpreters import ad

from shardrules.door.internals import Door
from shardrules.door.patching import Patches
from shardrules.hooks.state import Hooks
from shardrules.hooks.types.calls.annotations import note_cast

# By JAX's names: to 0.5.3, and 0.6.0's.
_CASTS_AND_SUMS = ("pbroadcast", "psum2", "pvary", "psum_invariant")


def leave_out_zeros(door: Door, patches: Patches) -> None:
    """Let transposes of casts and of psums of several values skip zero cotangents."""
    table = ad.primitive_transposes
    # Of several values: jax.lax.pbroadcast, of the same name, takes one.
    for primitive in [p for p in table if p.multiple_results and p.name in _CASTS_AND_SUMS]:
        transpose = functools.partial(_transpose_nonzero, door.Zero, table[primitive])
        patches.entry(table, primitive, transpose)


def _transpose_nonzero(Zero: Any, rule, cts, *args, **params):
    kept = [ct for ct in cts if not isinstance(ct, Zero)]
    rest = iter(rule(kept, **params) if kept else ())
    return [Zero(x.aval) if isinstance(ct, Zero) else next(rest) for ct, x in zip(cts, args)]


class RedundantCastHooks(Hooks):
    def install(self, patches: Patches) -> None:
        door = self.door
        if door.transpose_cast is not None:  # to JAX 0.6.1
            leave_out_zeros(door, patches)
        if door.pcast_from is not None:  # from JAX 0.8.2
            patches.attribute(*door.owner("pcast_from"), self._from)
            patches.entry(door.pcast_steps, ("varying", "varying"), self._stay)
            cast = functools.partial(self._noted, door.pcast_steps["invarying", "varying"])
            patches.entry(door.pcast_steps, ("invarying", "varying"), cast)

    def _from(self, aval: Any, axes: tuple[Any, ...], name: str) -> str:
        """Return the state over the axes that are still to be cast."""
        if self.acts and name == "jax.lax.pcast":
            varying = self.door.axis_type(aval).varying
            left = tuple(a for a in axes if a not in varying)
            if left and len(left) < len(axes):
                state = self.door.pcast_from(aval, left, name)
                # The primitive for all of them is refused, and bound for those that are left.
                return state if state == "invarying" else self.door.pcast_from(aval, axes, name)
        return self.door.pcast_from(aval, axes, name)

    def _stay(self, leaf: Any, axes: tuple[Any, ...]) -> Any:
        if not self.acts:
            raise ValueError("Unsupported pcast from=varying, to='varying'")  # as JAX words it
        note_cast(self.state, leaf, axes, leaf)
        return leaf

    def _noted(self, cast: Any, x: Any, axis_name: tuple[Any, ...]) -> Any:
        result = cast(x, axis_name)
        note_cast(self.state, x, axis_name, result)
        return result
