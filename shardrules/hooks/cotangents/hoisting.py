"""Each device's share of a cotangent that a bwd sums over the devices.

In a branch that only some devices take, the sum would wait for the other devices. The primal is
cast before the branch, and the cast's transpose sums after it. So we leave out the sum inside the
branch where everything that follows it is linear.
"""

from __future__ import annotations

from typing import Any

import jax

from shardrules.door.internals import Door
from shardrules.door.jaxprs import SUMS, TO_VARYING, is_inexact, named_axes
from shardrules.hooks.cotangents.traced import Trace

# Primitives that are linear in the first operand, in either operand, in all operands together.
_FIRST = frozenset(
    "broadcast_in_dim copy copy_p div expand_dims neg reduce_sum reshape rev slice squeeze "
    "transpose".split()
)
_EITHER = frozenset({"mul", "dot_general"})
_TOGETHER = frozenset({"add", "add_any", "sub"})


class Shares:
    """This device's shares of the sums over mesh axes in a bwd's jaxpr."""

    def __init__(self, door: Door, trace: Trace, axes: frozenset[str]):
        self.door = door
        self.jaxpr = trace.jaxpr
        self.axes = axes
        self._constants, self._arrays = trace.constants, trace.arrays
        self._made = {var: eqn for eqn in self.jaxpr.eqns for var in eqn.outvars}

    def of(self, at: int) -> Any:
        """Return output ``at``'s share; None where its sum can't be left out."""
        jaxpr, out = self.jaxpr, self.jaxpr.outvars[at]
        if len(jaxpr.constvars) != len(self._constants) or len(jaxpr.invars) != len(self._arrays):
            return None
        return self._share(out) if self._is_sum(out) else None

    def _is_sum(self, atom: Any) -> bool:
        """Whether a value is linear in sums over the axes, so that shares of them add up to it."""
        # All other values that it depends on are equal along the axes, as the output is.
        eqn = None if hasattr(atom, "val") else self._made.get(atom)
        if eqn is None:
            return False
        name, operands = eqn.primitive.name, eqn.invars
        if name in SUMS:
            groups, named = eqn.params.get("axis_index_groups"), named_axes(eqn.params)
            return groups is None and self.axes <= named and is_inexact(atom.aval)
        if name == "convert_element_type":
            return is_inexact(atom.aval) and self._is_sum(operands[0])
        if name in _FIRST or name in TO_VARYING:
            return self._is_sum(operands[0])
        sums = [*map(self._is_sum, operands)]
        return sum(sums) == 1 if name in _EITHER else name in _TOGETHER and any(sums)

    def _share(self, atom: Any) -> Any:
        eqn = self._made[atom]
        if eqn.primitive.name in SUMS:
            summed = self._whole(eqn.invars[eqn.outvars.index(atom)])
            rest = tuple(a for a in eqn.params["axes"] if a not in self.axes)
            return jax.lax.psum(summed, rest) if rest else summed
        if eqn.primitive.name in TO_VARYING:
            return self._share(eqn.invars[0])
        operands = []
        for at, operand in enumerate(eqn.invars):
            linear = not at or eqn.primitive.name not in _FIRST
            if linear and self._is_sum(operand):
                operands.append(self._share(operand))
                continue
            value = self._whole(operand)
            if eqn.primitive.name in _TOGETHER:  # each device adds its part
                value = value / jax.lax.psum(1, tuple(sorted(self.axes)))
            operands.append(value)
        return eqn.primitive.bind(*self._same_type(operands), **eqn.params)

    def _same_type(self, operands: list[Any]) -> list[Any]:
        types = [self.door.axis_type(self.door.typeof(x)) for x in operands]
        union = frozenset().union(*(type_.varying for type_ in types))
        return [self.door.cast(x, type_.vary(*union)) for x, type_ in zip(operands, types)]

    def _whole(self, atom: Any) -> Any:
        if hasattr(atom, "val"):
            return jax.numpy.asarray(atom.val, atom.aval.dtype)
        needed, eqns = {atom}, []
        for eqn in reversed(self.jaxpr.eqns):
            if not needed.isdisjoint(eqn.outvars):
                needed.update(atom for atom in eqn.invars if not hasattr(atom, "val"))
                eqns.append(eqn)
        jaxpr = self.jaxpr.replace(eqns=eqns[::-1], outvars=[atom])
        return jax.core.eval_jaxpr(jaxpr, self._constants, *self._arrays)[0]
