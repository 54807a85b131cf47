"""A user's cast to axes over which a value varies by then: it does nothing there.

A kernel's output that is annotated as invariant is widened to what a proof says, and who wrote the
annotation casts the output afterwards (MaxText's megablox). JAX 0.8 to 0.12 refuse to cast what
varies; before, a cast comes down to one primitive, which is bound again for the axes that are left.
"""

from __future__ import annotations

from typing import Any

from shardrules.hooks.door.patching import Patches
from shardrules.hooks.state import Hooks

__all__ = ["RecastHooks"]


class RecastHooks(Hooks):
    """The hooks of ``jax.lax.pcast``."""

    def install(self, patches: Patches) -> None:
        """Replace how it finds the state to start from, and add a step from varying to varying."""
        jax = self.jax
        if jax.typed and jax.pcast_from is not None and jax.pcast_steps is not None:
            patches.attribute(*jax.owner("pcast_from"), self._from)
            patches.entry(jax.pcast_steps, ("varying", "varying"), self._stay)

    def _from(self, aval: Any, axes: tuple[Any, ...], name: str) -> str:
        """Return the state over those axes that are left to be cast, where some vary by then."""
        if self.acts and name == "jax.lax.pcast":
            varying = self.jax.axis_type(aval).varying
            left = tuple(a for a in axes if a not in varying)
            if left and len(left) < len(axes):
                state = self.jax.pcast_from(aval, left, name)
                # The primitive for all of them is refused, and bound for those that are left.
                return state if state == "invarying" else self.jax.pcast_from(aval, axes, name)
        return self.jax.pcast_from(aval, axes, name)

    def _stay(self, leaf: Any, axes: tuple[Any, ...]) -> Any:
        if not self.acts:
            raise ValueError("Unsupported pcast from=varying, to='varying'")  # as JAX words it
        return leaf
