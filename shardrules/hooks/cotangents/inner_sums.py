"""Compare the gradients that a bwd takes itself with the check on and off.

``def bwd(res, g): return jax.vjp(reference, *res)[1](g)`` is how most kernels are differentiated.
With the check on, the casts in ``reference`` become psums inside bwd. With it off, bwd returns each
device's share, and shard_map sums the shares at its inputs. Both give the same gradient if every
step after such a psum is linear in the psum alone, with coefficients that are equal on the devices.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from shardrules.door.internals import Door
from shardrules.door.jaxprs import (
    CALLS,
    CASTS,
    SUMS,
    TO_VARYING,
    inner_jaxprs,
    is_in,
    is_inexact,
    name_of,
    named_axes,
)
from shardrules.door.protocols import Eqn, Jaxpr
from shardrules.hooks.cotangents.communication import moved_by_kernels
from shardrules.hooks.cotangents.linearity import (
    FIXED,
    LINEAR,
    UNKNOWN,
    ZERO,
    Linearity,
    is_less,
    is_narrow,
    precision,
)
from shardrules.hooks.cotangents.summed_shares import has_rule
from shardrules.hooks.state import State
from shardrules.jaxprs.fold import TooLong
from shardrules.jaxprs.walk import Inside, equations, visited

# The name scope of a transposition inside a bwd, in a retrace.
INNER = "shardrules.inner_gradient"

# Equations that only run the jaxprs that they hold.
_CALLING = frozenset((*CALLS, "scan", "cond", "while"))


def only_casts_sum(door: Door, jaxpr: Jaxpr) -> bool:
    """Return whether each psum in the transpose of a linear program comes from a cast."""
    # An author's rule may hold a sum of its own, and a transposition may recompute a sum (remat).
    return not any(
        has_rule(door, eqn)
        or name_of(eqn) == "custom_lin"
        or (named_axes(eqn.params) and name_of(eqn) not in TO_VARYING)
        for eqn in equations(jaxpr)
    )


def _is_inner(eqns: Sequence[Eqn]) -> bool:
    return any(is_in(eqn, INNER) for eqn in eqns)


def inner_sums(jaxpr: Jaxpr) -> list[Eqn]:
    """Return the psums of the gradients that a bwd takes itself."""

    def visit(eqn: Eqn, around: bool, inside: Inside[bool, Eqn]) -> Iterator[Eqn]:
        is_inner = around or is_in(eqn, INNER)
        if is_inner and name_of(eqn) in SUMS:
            yield eqn
        for found in inside(is_inner):
            yield from found

    return visited(jaxpr, visit, False)


def sums_otherwise(door: Door, state: State, jaxpr: Jaxpr, axis: str) -> bool:
    """Return whether equations other than ``inner_sums`` may move data along an axis."""
    inner = {id(eqn) for eqn in inner_sums(jaxpr) if not eqn.params.get("axis_index_groups")}
    return bool(moved_by_kernels(state, jaxpr, frozenset({axis}))) or any(
        # A higher derivative would run an author's rule, which may take a gradient, too.
        has_rule(door, eqn)
        or (
            axis in named_axes(eqn.params)
            and name_of(eqn) not in (*CASTS, "axis_index")
            and id(eqn) not in inner
        )
        for eqn in equations(jaxpr)
    )


def is_total(door: Door, jaxpr: Jaxpr, axis: str) -> bool | None:
    """Return whether a bwd's result equals the sum along an axis of its results without psums.

    False if the result doesn't depend on the psums, None if neither is proven. The jaxpr must have
    one result.
    """
    # Without the psums, each device has its own share of each summed gradient. If the result is
    # linear in the psums, with coefficients that are equal along the axis, then the sum of the
    # devices' results is the same, apart from rounding. So the fold starts with fixed inputs and
    # calls the psums linear. Give up if it can't tell what the result is, or if a step may round.
    fold = _AfterSums(door, axis)
    try:
        (kind,) = fold.run(jaxpr, [FIXED] * len(jaxpr.invars))
    except (TooLong, ValueError):
        return None
    if kind == UNKNOWN or fold.shows:
        return None
    if kind == FIXED:
        return False
    kept = precision(jaxpr.outvars[0].aval.dtype)
    rounds = any(is_less(bits, kept) or is_narrow(bits) for bits in fold.precisions)
    return None if rounds else True


class _AfterSums(Linearity):
    """Finds whether values are linear in the psums along an axis, fixed, or unknown."""

    def __init__(self, door: Door, axis: str):
        super().__init__(kernels=False)
        self.door = door
        self.axis = axis

    def equation(self, eqn: Eqn, operands: list[Any]) -> Sequence[Any]:
        if name_of(eqn) in SUMS and self.axis in named_axes(eqn.params):
            results = [self._sum(eqn, self.content(operand)) for operand in operands]
            for var, result in zip(eqn.outvars, results):
                if result != ZERO and is_inexact(var.aval):
                    self.precisions.add(precision(var.aval.dtype))
            return results
        made = super().equation(eqn, operands)
        return [self._equal(eqn, result) if result == LINEAR else result for result in made]

    def other(self, eqn: Eqn, name: str, operands: list[str]) -> Sequence[str]:
        inside = (each for jaxpr in inner_jaxprs(eqn.params) for each in equations(jaxpr))
        # The fold doesn't read these jaxprs, so it can't tell what a collective in them does.
        if any(self.axis in named_axes(each.params) for each in inside):
            return [UNKNOWN] * len(eqn.outvars)
        return super().other(eqn, name, operands)

    def _sum(self, eqn: Eqn, operand: str) -> str:
        if operand == ZERO:
            return ZERO
        known = _is_inner((*self.around, eqn)) and not eqn.params.get("axis_index_groups")
        return LINEAR if operand == FIXED and known else UNKNOWN

    def _equal(self, eqn: Eqn, result: str) -> str:
        """Return the result, or UNKNOWN if its coefficients differ along the axis."""
        name, atoms = name_of(eqn), [*eqn.invars, *eqn.outvars]
        if name in _CALLING and name != "while":  # the inner equations were tested one by one
            atoms = atoms[: name == "cond"]  # its predicate
        differs = any(self.axis in self.door.axis_type(atom.aval).axes for atom in atoms)
        return UNKNOWN if differs else result
