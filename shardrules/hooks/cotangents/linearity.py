"""Whether a jaxpr is known to be linear, equation by equation."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from shardrules.door.jaxprs import CALLS, SUMS, name_of, opened

__all__ = ["linear_in", "strings"]

# JAX's primitives that are linear in all operands together, and in any one of them with the
# others known.
_LINEAR = frozenset(
    "add_any sub add neg reduce_sum broadcast_in_dim reshape transpose squeeze expand_dims slice "
    "concatenate copy copy_p rev cumsum pvary real imag reduce_precision".split()
)
_BILINEAR = frozenset("mul dot_general conv_general_dilated".split())
_LINEAR_IN_FIRST = frozenset("div dynamic_slice gather".split())


def linear_in(jaxpr: Any, inputs: Sequence[Any]) -> frozenset[str] | None:
    """Tell whether all outputs of a jaxpr are known to be linear in some of its inputs together.

    Args:
      jaxpr: without its constants.
      inputs: those of its variables.

    Returns:
      The mesh axes over which it sums: over these the sum of what devices get is not what one of
      them makes of the sum. None where it is not known to be linear.
    """
    reached = set(inputs)
    summed: frozenset[str] = frozenset()

    def moves(atom):
        return not hasattr(atom, "val") and atom in reached

    for eqn in jaxpr.eqns:
        name, moving = name_of(eqn), [moves(atom) for atom in eqn.invars]
        if not any(moving):
            continue
        if name in CALLS:
            inner = opened(eqn.params[CALLS[name]])
            over = linear_in(inner, [v for v, one in zip(inner.invars, moving) if one])
            fine = over is not None
            summed |= over or frozenset()
        elif name == "convert_element_type":
            old, new = eqn.invars[0].aval.dtype, eqn.outvars[0].aval.dtype
            fine = old.kind == new.kind  # float0 and integers are none
        elif name == "select_n":
            fine = not moving[0] and all(moving[1:])
        elif name in SUMS:
            fine = all(moving) and eqn.params.get("axis_index_groups") is None
            summed |= strings(eqn.params)
        elif name in _LINEAR:
            fine = all(moving)
        elif name in _BILINEAR:
            fine = sum(moving) == 1
        elif name == "triangular_solve":
            fine = moving == [False, True]
        else:
            fine = name in _LINEAR_IN_FIRST and moving[0] and not any(moving[1:])
        if not fine:
            return None
        reached.update(eqn.outvars)
    return summed if all(moves(atom) for atom in jaxpr.outvars) else None


def strings(params: dict[str, Any]) -> frozenset[str]:
    """Return the strings among an equation's parameters: mesh axes, if any, are among them."""
    found: set[str] = set()
    queue = list(params.values())
    while queue:
        one = queue.pop()
        if isinstance(one, str):
            found.add(one)
        elif isinstance(one, (tuple, list, set, frozenset)):
            queue += one
    return frozenset(found)
