"""Whether a cotangent may be the sum of shares at each step of a linear program.

With the check off, each device transposes its own share of the cotangent of a value that is equal
on the devices; with the check on, all of them transpose the sum. Both give the same gradients where
each step's transpose is linear and rounds no share. JAX's own linear primitives are; an author's
function is only if its jaxpr proves it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax

from shardrules.door import places
from shardrules.door.internals import Door
from shardrules.door.jaxprs import (
    CALLS,
    CASTS,
    SUMS,
    inner_jaxprs,
    is_inexact,
    name_of,
    opened,
    scan_counts,
)
from shardrules.hooks.cotangents.linearity import linear_in
from shardrules.hooks.retyping.retyping import transposed_by_jax
from shardrules.hooks.types.identities import MARK
from shardrules.hooks.types.lost_axes import hijax_object

Precision = tuple[int, int]  # bits of the mantissa and of the exponent
IsOpaque = Callable[[Any], bool]
_IDENTITIES = CASTS | {MARK}


def precision(dtype: Any) -> Precision:
    kind = jax.numpy.finfo(dtype)
    return kind.nmant, kind.nexp


def is_less(a: Precision, b: Precision) -> bool:
    return a[0] < b[0] or a[1] < b[1]


def why_not_linear(door: Door, eqn: Any, is_opaque: IsOpaque) -> str:
    """Say why an equation's transpose may not be linear on each device; empty if it is."""
    name = name_of(eqn)
    if name == "custom_linear_solve":
        # An iterative solver (cg) is not linear: it would solve each device's share to a tolerance
        # of its own, also where the shares cancel.
        return "" if _solves(eqn) else f"{name!r} is solved by a function that may not be linear"
    is_authors = hijax_object(door, eqn.primitive, eqn.params) is not None
    if is_authors or not transposed_by_jax(eqn.primitive) or is_opaque(eqn) or _calls(eqn):
        return f"the transpose of {name!r} is not known to be linear"
    return ""


def has_rule(door: Door, eqn: Any) -> bool:
    """Whether an equation is differentiated by a rule that its author wrote, or rounds."""
    name = name_of(eqn)
    if name.startswith("custom_jvp_call"):
        rule = eqn.params.get("jvp_jaxpr_fun", eqn.params.get("jvp_jaxpr_thunk"))
        return not places.owns(door.function_place(rule))
    return (
        name.startswith("custom_vjp_call")
        or name in ("linear_call", "custom_transpose_call", "reduce_precision")
        or hijax_object(door, eqn.primitive, eqn.params) is not None
        or not transposed_by_jax(eqn.primitive)
    )


def rounded_to(eqn: Any) -> Precision | None:
    """Return the precision that an equation rounds cotangents to in one dtype, or None."""
    if name_of(eqn) != "reduce_precision":
        return None
    return eqn.params["mantissa_bits"], eqn.params["exponent_bits"]


def rounds(jaxpr: Any, inputs: Sequence[Any]) -> bool:
    """Whether a jaxpr may round what depends on ``inputs`` below their and its results' dtypes."""
    ends = [*inputs, *jaxpr.outvars]
    kept = [precision(atom.aval.dtype) for atom in ends if is_inexact(atom.aval)]
    least = min((p[0] for p in kept), default=0), min((p[1] for p in kept), default=0)
    return any(is_less(each, least) for each in _precisions(jaxpr, set(inputs)))


def _precisions(jaxpr: Any, reached: set[Any] | None) -> Iterator[Precision]:
    """Yield the precisions of all that depends on what is ``reached``; on all inputs if None."""
    for eqn in jaxpr.eqns:
        atoms = [atom for atom in eqn.invars if not hasattr(atom, "val")]
        if reached is not None and reached.isdisjoint(atoms):
            continue
        if reached is not None:
            reached.update(eqn.outvars)
        to = rounded_to(eqn)
        if to is not None:
            yield to
        for var in eqn.outvars:
            if is_inexact(var.aval):
                yield precision(var.aval.dtype)
        for inner in inner_jaxprs(eqn.params):
            yield from _precisions(inner, None)


class Shares:
    """What keeps gradients from being those of the check off, in one linear program."""

    def __init__(self, door: Door, is_opaque: IsOpaque, jaxpr: Any, linear: Sequence[bool]):
        self.door = door
        self._is_opaque = is_opaque
        sizes = {axis: jax.lax.psum(1, axis) for axis in door.manual_axes()}
        self._every = frozenset(axis for axis, size in sizes.items() if size != 1)
        # Along an axis without casts, all shares are one nth: to round such a share is to round the
        # sum if n is a power of two.
        self.differing = frozenset(a for a in self._every if sizes[a] & (sizes[a] - 1))
        self.summed: frozenset[str] = frozenset()  # over which casts sum cotangents
        self._reasons: list[str] = []
        self._rounding: list[tuple[frozenset[str], str]] = []
        inputs = [v.aval for v, is_in in zip(jaxpr.invars, linear) if is_in and is_inexact(v.aval)]
        kept = [precision(aval.dtype) for aval in inputs]
        self._kept = max((p[0] for p in kept), default=0), max((p[1] for p in kept), default=0)
        self._walk(jaxpr, linear)

    def doubts(self) -> list[str]:
        """Say at which steps the gradients may differ from those with the check off."""
        rounding = [why for axes, why in self._rounding if axes & self.differing]
        return list(dict.fromkeys([*self._reasons, *rounding]))

    def _walk(self, jaxpr: Any, linear: Sequence[bool]) -> list[bool]:
        reached = {var for var, is_in in zip(jaxpr.invars, linear) if is_in}

        def is_in(atom: Any) -> bool:
            return not hasattr(atom, "val") and atom in reached

        for eqn in jaxpr.eqns:
            given = [is_in(atom) for atom in eqn.invars]
            if any(given):
                reached.update(
                    v for v, is_out in zip(eqn.outvars, self._step(eqn, given)) if is_out
                )
            reached.update(v for v in eqn.outvars if isinstance(v.aval, self.door.AbstractRef))
        return [is_in(atom) for atom in jaxpr.outvars]

    def _step(self, eqn: Any, given: list[bool]) -> Sequence[bool]:
        name, params = name_of(eqn), eqn.params
        if name in CALLS:
            return self._walk(opened(params[CALLS[name]]), given)
        if name == "cond" and not given[0]:
            each = [self._walk(opened(branch), given[1:]) for branch in params["branches"]]
            return [any(ends) for ends in zip(*each)]
        if name == "scan":
            constants, carries = scan_counts(params)
            while True:  # a carry that becomes a tangent is one in the next step
                ends = self._walk(opened(params["jaxpr"]), given)
                grown = list(given)
                for i in range(carries):
                    grown[constants + i] |= ends[i]
                if grown == given:
                    return ends
                given = grown
        tangents = [atom for atom, is_in in zip(eqn.invars, given) if is_in]
        if name in _IDENTITIES or name == "custom_lin":
            self._cast(eqn, tangents)
        elif name not in SUMS:
            self._operation(eqn, tangents)
        return [True] * len(eqn.outvars)

    def _varying(self, atoms: Sequence[Any]) -> frozenset[str]:
        types = [self.door.axis_type(atom.aval).varying for atom in atoms]
        return frozenset().union(*types) & self._every

    def _cast(self, eqn: Any, tangents: list[Any]) -> None:
        """Note where the cotangents of invariant tangents are summed over the devices."""
        over = self._varying([*eqn.invars, *eqn.outvars])
        for atom in tangents:
            axes = over - self._varying([atom])
            if axes and is_inexact(atom.aval):
                self.differing |= axes
                self.summed |= axes
                if is_less(precision(atom.aval.dtype), self._kept):
                    self._reasons.append(f"a gradient would be summed in {atom.aval.dtype}")

    def _operation(self, eqn: Any, tangents: list[Any]) -> None:
        results = [var for var in eqn.outvars if is_inexact(var.aval)] or tangents
        whole = frozenset().union(*(self._every - self._varying([var]) for var in results))
        if not whole:
            return
        where = self.door.source_line(eqn.source_info)
        where = f" at {where}" if where else ""
        reason = why_not_linear(self.door, eqn, self._is_opaque)
        if reason:
            self._reasons.append(f"{reason}{where}")
        arriving = [precision(var.aval.dtype) for var in results if is_inexact(var.aval)]
        for atom in tangents if arriving else ():
            if not is_inexact(atom.aval):
                continue
            to = rounded_to(eqn) or precision(atom.aval.dtype)
            narrows = rounded_to(eqn) or any(is_less(to, each) for each in arriving)
            if narrows and is_less(to, self._kept):
                why = f"{name_of(eqn)!r}{where} rounds a cotangent"
                self._rounding.append((whole, why))


def _solves(eqn: Any) -> bool:
    """Whether a linear solve calls functions that are linear on each device."""
    jaxprs, counts = eqn.params["jaxprs"], eqn.params["const_lengths"]
    return all(
        jaxpr is not None and linear_in(opened(jaxpr), opened(jaxpr).invars[count:]) == frozenset()
        for jaxpr, count in (
            (jaxprs.solve, counts.solve),
            (jaxprs.transpose_solve, counts.transpose_solve),
        )
    )


def _calls(eqn: Any) -> bool:
    """Whether an equation calls functions that no graph sees into."""
    if eqn.primitive.name.startswith("scatter"):  # its function only adds or replaces
        return False
    return any(
        opened(item) is not None or (callable(item) and not isinstance(item, type))
        for value in eqn.params.values()
        for item in (value if isinstance(value, (tuple, list)) else (value,))
    )
