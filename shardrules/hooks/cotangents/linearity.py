"""A proof that a jaxpr is linear, equation by equation."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from shardrules.door.jaxprs import CALLS, SUMS, name_of, opened

__all__ = ["linear_in", "strings"]

# JAX's primitives that are linear in all operands together, in any operand while the others are
# fixed, and in the first operand.
_LINEAR = frozenset(
    "add_any sub add neg reduce_sum broadcast_in_dim reshape transpose squeeze expand_dims slice "
    "concatenate copy copy_p rev cumsum pvary real imag reduce_precision".split()
)
_BILINEAR = frozenset("mul dot_general conv_general_dilated".split())
_LINEAR_IN_FIRST = frozenset("div dynamic_slice gather".split())


def linear_in(jaxpr: Any, inputs: Sequence[Any]) -> frozenset[str] | None:
    """Return the mesh axes that a jaxpr sums over if it is linear in ``inputs``, else None."""
    # Over these axes, the sum of the devices' results is not one device's result for the sum.
    reached = set(inputs)
    summed: frozenset[str] = frozenset()

    def is_reached(atom):
        return not hasattr(atom, "val") and atom in reached

    for eqn in jaxpr.eqns:
        name, moving = name_of(eqn), [is_reached(atom) for atom in eqn.invars]
        if not any(moving):
            continue
        if name in CALLS:
            inner = opened(eqn.params[CALLS[name]])
            over = linear_in(inner, [var for var, moves in zip(inner.invars, moving) if moves])
            fine = over is not None
            summed |= over or frozenset()
        elif name == "convert_element_type":
            old, new = eqn.invars[0].aval.dtype, eqn.outvars[0].aval.dtype
            fine = old.kind == new.kind  # not from or to float0 and integers
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
    return summed if all(map(is_reached, jaxpr.outvars)) else None


def strings(params: dict[str, Any]) -> frozenset[str]:
    """Return all strings in an equation's parameters, which include its mesh axes."""
    names: set[str] = set()
    queue = list(params.values())
    while queue:
        value = queue.pop()
        if isinstance(value, str):
            names.add(value)
        elif isinstance(value, (tuple, list, set, frozenset)):
            queue += value
    return frozenset(names)
