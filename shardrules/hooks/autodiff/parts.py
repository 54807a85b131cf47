"""What a custom_vjp's bwd belongs to: its fwd, and the primals that it returns cotangents of."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from shardrules.hooks.door.compat import Jax

__all__ = ["Parts"]


@dataclasses.dataclass(frozen=True, eq=False)
class Parts:
    """What a bwd belongs to.

    Args:
      name: the bwd's, for messages.
      fwd: the custom_vjp's fwd, as JAX wraps it.
      gradients: not empty once its fwd took some.
      in_tree: the pytree of the primal inputs.
      in_avals: their avals.
      place: where the bwd is defined, ``file:line``, or empty.
    """

    name: str
    fwd: Any
    gradients: Sequence[None]
    in_tree: Any
    in_avals: tuple[Any, ...]
    place: str = ""
    _stand_ins: dict[int, tuple[int, object]] = dataclasses.field(init=False)

    def __post_init__(self) -> None:
        # At once: two threads that make them together would each hold their own.
        made = [object() for _ in self.in_avals]
        object.__setattr__(self, "_stand_ins", {id(one): (i, one) for i, one in enumerate(made)})

    def primals(self) -> Any:
        """Return the primal inputs' tree, filled with stand-ins for its leaves.

        Classes may check what they hold, and know those that JAX itself fills trees with: objects.
        """
        import jax

        return jax.tree_util.tree_unflatten(self.in_tree, [o for _, o in self._stand_ins.values()])

    def position(self, stand_in: Any) -> int | None:
        """Return which leaf a stand-in stands for; None for what is none."""
        return self._stand_ins.get(id(stand_in), (None, None))[0]

    def to_cast(self, jax: Jax, axes: frozenset[str]) -> str:
        """Say what to do where bwd is not the user's to change: cast before the call."""
        names = ", ".join(map(repr, sorted(axes)))
        types = map(jax.cotangent_type, self.in_avals)
        cast = [i for i, one in enumerate(types) if not axes <= one.axes]
        inputs = f"input {cast[0]}" if len(cast) == 1 else f"inputs {', '.join(map(str, cast))}"
        return (
            f"It is a library's, so change the call: what it is given and is invariant over "
            f"{{{names}}} ({inputs} of its flattened arguments) is to be cast before, as in "
            f"ts, w = shardrules.vary((ts, w), {names})."
        )
