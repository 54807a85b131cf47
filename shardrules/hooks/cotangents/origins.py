"""Find the origin of each value in a jaxpr: its inputs, and the axes along which it differs.

A type names the mesh axes over which a value *may* vary, and a cast adds axes to it. This module
finds the axes along which devices can really hold different values, since a sum of equal values
counts the same value once per device. It also finds the arriving cotangents on which a returned
cotangent depends.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import operator
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any

from shardrules.door.internals import Door
from shardrules.door.jaxprs import (
    CASTS,
    DECLARED,
    SUMS,
    is_in,
    is_inexact,
    is_transposed,
    named_axes,
    size_of,
)
from shardrules.door.protocols import Eqn, Jaxpr, Var
from shardrules.hooks.cotangents.divisors import (
    SAME_VALUES,
    divided_by,
    divisors_of,
    maker_of,
    product_of,
    products_of,
    size_ratio,
)
from shardrules.hooks.types.calls.opaque import OpaqueCall
from shardrules.jaxprs.fold import Cell, Fold
from shardrules.jaxprs.walk import makers, uses
from shardrules.registry.axistypes import show_axes

# Equations whose results hold a number if all of their operands hold it.
_SAME_NUMBER = SAME_VALUES | {"transpose", "copy", "slice", "rev", "select_n", "pmax", "pmin"}

# Equations whose results are zero if all operands are zero, and equations whose results are zero if
# one operand is.
_OF_ZEROS = frozenset("neg add add_any sub cumsum".split())
_OF_ONE_ZERO = frozenset("mul dot_general".split())

# How equations on floating-point numbers compute a known number from known numbers.
_ARITHMETIC: dict[str, Callable[..., float]] = {
    "add": operator.add,
    "add_any": operator.add,
    "sub": operator.sub,
    "mul": operator.mul,
    "div": operator.truediv,
    "neg": operator.neg,
    "max": max,
    "min": min,
    "integer_pow": lambda number, y: number**y,
    "clamp": lambda low, number, high: max(low, min(number, high)),
}


@dataclasses.dataclass(frozen=True)
class Origin:
    inputs: frozenset[int] = frozenset()  # the positions of the jaxpr's inputs on which it depends
    # the mesh axes along which devices may hold different values of it
    axes: frozenset[str] = frozenset()
    # the mesh axes over which a collective summed or moved data that the value depends on (gathered
    # values may be added up later)
    sums: frozenset[str] = frozenset()
    # the axes in ``sums`` over which a backward pass summed
    gradients: frozenset[str] = frozenset()
    # pairs of an input and a mesh axis along which a collective moved that input's data here
    crossed: frozenset[tuple[int, str]] = frozenset()
    # the number that all its elements hold, if known; it then depends on no input
    number: float | None = None
    # sets of mesh axes along which it holds all devices' data, each with the origin of that data
    gathered: frozenset[tuple[frozenset[str], Origin]] = frozenset()

    def __or__(self, other: Origin) -> Origin:
        if other is self or (other is NOWHERE and self.number is None):
            return self
        return Origin(
            self.inputs | other.inputs,
            self.axes | other.axes,
            self.sums | other.sums,
            self.gradients | other.gradients,
            self.crossed | other.crossed,
            self.number if self.number == other.number else None,
            self.gathered | other.gathered,
        )

    def along(self, axes: frozenset[str]) -> Origin:
        return self if axes <= self.axes else dataclasses.replace(self, axes=self.axes | axes)

    def moved(self, axes: frozenset[str]) -> Origin:
        return dataclasses.replace(self, axes=self.axes | axes, sums=self.sums | axes)

    def equal(self, axes: frozenset[str]) -> Origin:
        return dataclasses.replace(self, axes=self.axes - axes)

    def summed(self, axes: frozenset[str], in_gradient: bool = False) -> Origin:
        """Return the origin of the sum over ``axes``, along which the sum is equal."""
        gradients = self.gradients | axes if in_gradient else self.gradients
        axes, sums = self.axes - axes, self.sums | axes
        return dataclasses.replace(self, axes=axes, sums=sums, gradients=gradients)

    def gathering(self, axes: frozenset[str]) -> Origin:
        """Return the origin of the values of all devices along ``axes``."""
        values = (axes, dataclasses.replace(self, gathered=frozenset()))
        return dataclasses.replace(self.summed(axes), gathered=self.gathered | {values})

    def crossing(self, axes: frozenset[str]) -> Origin:
        """Return the origin with the record that a collective moved its inputs along ``axes``."""
        pairs = frozenset((at, axis) for at in self.inputs for axis in axes)
        return dataclasses.replace(self, crossed=self.crossed | pairs, number=None)


NOWHERE = Origin()


@dataclasses.dataclass(frozen=True)
class Reduction:
    """One operand of an equation that sums over mesh axes."""

    text: str  # the equation, for messages
    axes: frozenset[str]  # the axes that it sums over
    origin: Origin  # the origin of the operand
    # known numbers that divide the operand or the sum, and the products of some of them
    divisors: frozenset[float] = frozenset()
    products: frozenset[float] = frozenset()

    @property
    def differing(self) -> frozenset[str]:
        return self.axes & self.origin.axes

    def is_mean(self, *sizes: float | None) -> bool:
        """Return whether the sum is divided by one of these numbers, at once or in steps."""
        return not self.products.isdisjoint(sizes)


class Origins(Fold[Origin]):
    """The origins of a jaxpr's outputs, and its reductions and divisions."""

    bottom = NOWHERE

    def __init__(
        self,
        door: Door,
        opaque_of: Callable[[Any, dict[str, Any]], Any],
        mesh_axes: frozenset[str],
        jaxpr: Jaxpr,
        inputs: Sequence[Origin],
        declared: str = "",
    ):
        super().__init__()
        self.door = door
        self.opaque_of = opaque_of
        self.mesh_axes = mesh_axes
        self.declared = declared
        # Keyed by place, since several equations may share a jaxpr, and loops are read repeatedly.
        self._reductions: dict[tuple[Any, ...], Reduction] = {}
        self._divisors: dict[
            tuple[Any, ...], float
        ] = {}  # the divisors of equations that divide by a known number
        self._means: dict[
            tuple[Any, ...], float
        ] = {}  # the divisors of equations that divide a sum over elements
        # The entries to complete after the jaxpr at a place was read: see ``finished``.
        self._noted: dict[tuple[Any, ...], list[tuple[tuple[Any, ...], Any, int | None]]] = {}
        closed = jaxpr.invars[: len(jaxpr.invars) - len(inputs)]
        self.outputs = self.run(jaxpr, [*map(self.constant, closed), *inputs])

    @property
    def reductions(self) -> list[Reduction]:
        return list(self._reductions.values())

    def divisions(self, by: Collection[float | None]) -> int:
        """Count the equations that divide by a number in ``by``."""
        return sum(divisor in by for divisor in self._divisors.values())

    @property
    def products(self) -> frozenset[float]:
        """Return all products of known divisors that are not part of a mean over elements."""
        return products_of([by for at, by in self._divisors.items() if at not in self._means])

    @property
    def mean_size(self) -> float:
        """Return the product of the element counts of all means that one device computes."""
        return product_of(self._means.values())

    @property
    def scale(self) -> float:
        """Return the product of the known divisors that are not part of a mean."""
        sizes = [size_of(s.axes) or 1 for s in self.reductions if s.is_mean(size_of(s.axes))]
        return product_of(self._divisors.values()) / (self.mean_size * product_of(sizes))

    # The values.

    def literal(self, value: Any) -> Origin:
        return _literal(value)

    def constant(self, var: Var) -> Origin:
        axes = self.door.axes_of(var.aval)
        return Origin(axes=self.mesh_axes if axes is None else axes)

    def join(self, values: Iterable[Origin]) -> Origin:
        first, *others = [*values] or [NOWHERE]
        return functools.reduce(Origin.__or__, others, first)  # keeps a number that all hold

    def mixed(self, values: Iterable[Origin]) -> Origin:
        return _union(values)

    def chosen(self, by: Origin, value: Origin) -> Origin:
        return by | value

    # Equations.

    def equation(self, eqn: Eqn, operands: list[Any]) -> Sequence[Any]:
        opaque = self.opaque_of(eqn.primitive, eqn.params)
        if opaque is not None:
            joined = _union(map(self.content, operands))
            result = self._opaque(eqn, opaque, joined, len(eqn.outvars) or 1)
            return self.one_step(eqn, operands, result)  # a call without results writes to refs
        results = super().equation(eqn, operands)
        name = eqn.primitive.name
        if name in ("div", "mul"):
            key = self._note(eqn) if name == "div" else (*self.place, id(eqn))
            self._divisors[key] = divided_by(name, *(operand.number for operand in operands))
        number = _number(eqn, operands)
        return results if number is None else [Origin(number=number)] * len(results)

    def other(self, eqn: Eqn, name: str, operands: list[Origin]) -> Sequence[Origin]:
        params, count = eqn.params, len(eqn.outvars)
        if name in CASTS:
            if self.declared in named_axes(params) and is_in(eqn, DECLARED):
                return [NOWHERE] * count
            return operands
        results, joined = self.anything(eqn, operands)
        if results is not None:
            return results
        over = named_axes(params)
        if over:
            return self._collective(eqn, operands, joined, over)
        if name == "reduce_sum" and joined.gathered:
            over = frozenset().union(*(axes for axes, _ in joined.gathered))
            text = f"the sum of what is gathered over {show_axes(over)}"
            values = _union([origin for _, origin in joined.gathered])
            self._reduces(eqn, 0, Reduction(text, over, values))
            joined = dataclasses.replace(joined, gathered=frozenset())
        # An equation may add axes, such as a random draw that differs by device.
        entering = frozenset().union(*(self.door.axis_type(a.aval).axes for a in eqn.invars))
        return [
            joined.along(self.door.axis_type(var.aval).varying - entering) for var in eqn.outvars
        ]

    def finished(self, jaxpr: Jaxpr, read: Callable[[Any], Any]) -> None:
        """Add to a jaxpr's reductions the known numbers by which the jaxpr divides them."""
        # This can't be done when a reduction is read: the divisions of its result come later.
        noted = self._noted.pop(self.place, None)
        if noted is None:
            return
        made, used = makers(jaxpr), uses(jaxpr)

        def number(atom: Var) -> float | None:
            return self.content(read(atom)).number

        for key, eqn, i in noted:
            if i is None:
                source = maker_of(made, eqn.invars[0])
                if source is not None and source.primitive.name == "reduce_sum":
                    gathered = self._reductions.get((*self.place, id(source), 0))
                    devices = size_of(gathered.axes) if gathered is not None else None
                    self._means[key] = self._divisors[key] / (devices or 1)
                continue
            reduction = self._reductions[(*key, i)]
            result = eqn.outvars[min(i, len(eqn.outvars) - 1)]
            factors = divisors_of(jaxpr, made, used, number, eqn.invars[i], result)
            if eqn.primitive.name == "reduce_sum":  # it sums gathered values and elements
                elements = size_ratio(eqn) * (size_of(reduction.axes) or 1)
                factors.insert(0, elements)
            self._reductions[(*key, i)] = dataclasses.replace(
                reduction, divisors=frozenset(factors), products=products_of(factors)
            )

    def _note(self, eqn: Eqn, i: int | None = None) -> tuple[Any, ...]:
        """Note a reduction's operand, or a division, for ``finished``; return its key."""
        key = (*self.place, id(eqn))
        self._noted.setdefault(self.place, []).append((key, eqn, i))
        return key

    def _reduces(self, eqn: Eqn, i: int, reduction: Reduction) -> None:
        self._reductions[(*self._note(eqn, i), i)] = reduction

    def _collective(
        self, eqn: Eqn, operands: list[Origin], joined: Origin, over: frozenset[str]
    ) -> list[Origin]:
        name = eqn.primitive.name
        scatters = "scatter" in name
        if "psum" in name or scatters:
            text = f"{name} over {show_axes(over)}"
            for i, origin in enumerate(operands):
                if origin.number is None:  # a sum of a known number only counts the devices
                    self._reduces(eqn, i, Reduction(text, over, origin))
        if "axis_size" in name:
            return [joined] * len(eqn.outvars)
        if name != "axis_index":
            operands = [operand.crossing(over) for operand in operands]
            joined = joined.crossing(over)
        whole = eqn.params.get("axis_index_groups") is None and not scatters
        if whole and "all_gather" in name:  # the result is equal, even if its type varies
            return [joined.gathering(over)] * len(eqn.outvars)
        if whole and name in ("pmax", "pmin"):
            return [origin.equal(over) for origin in operands]
        if whole and "psum" in name:
            in_gradient = any(map(is_transposed, (eqn, *self.around)))
            if len(operands) == len(eqn.outvars):
                return [origin.summed(over, in_gradient) for origin in operands]
            return [joined.summed(over, in_gradient)] * len(eqn.outvars)
        if name == "axis_index":
            return [joined.along(over)] * len(eqn.outvars)
        return [joined.moved(over)] * len(eqn.outvars)

    def _opaque(self, eqn: Eqn, opaque: OpaqueCall, joined: Origin, count: int) -> Origin:
        rule = rule_of(opaque)
        if rule is None:
            return joined.crossing(self.mesh_axes).moved(self.mesh_axes)
        effects, over = rule.effects(count) or (), frozenset(rule.named_axes)
        decided = effects and not any(effect.kind in ("unknown", "typed") for effect in effects)
        axes = [effect.axes for effect in effects] if decided else [self.mesh_axes]
        along = frozenset().union(*axes)
        joined = joined.crossing(along)
        if any(word in rule.name for word in ("all_reduce", "reduce_scatter")):
            text = f"{opaque.call}, whose rule is {rule!r}"
            self._reductions[(*self.place, id(eqn))] = Reduction(text, over, joined)
        if effects and all(effect.kind == "local" for effect in effects):
            return joined
        whole = effects and all(effect.kind == "join" for effect in effects)
        return joined.summed(over) if rule.drops and whole else joined.moved(over or self.mesh_axes)


def rule_of(opaque: OpaqueCall) -> Any:
    """Return the rule that an opaque call obeys; None if it has none, or isn't an opaque call."""
    return getattr(getattr(opaque, "registration", None), "rule", None)


def _union(origins: Iterable[Origin]) -> Origin:
    joined = NOWHERE
    for origin in origins:
        joined |= origin
    return joined


def _literal(value: Any) -> Origin:
    try:
        number = float(value)
    except (TypeError, ValueError):  # a key, a complex number
        return NOWHERE
    return Origin(number=number) if math.isfinite(number) else NOWHERE


def _number(eqn: Eqn, operands: Sequence[Any]) -> float | None:
    """Return the number that all elements of an equation's results hold; None if unknown."""
    # One zero factor makes a product zero. Otherwise all operands must hold known numbers: compute
    # arithmetic on floats, keep a number that all operands share, and multiply it in a sum by the
    # number of summed devices or elements.
    name = eqn.primitive.name
    numbers = [None if isinstance(x, Cell) else x.number for x in operands]
    if name == "select_n":
        del numbers[0]  # the predicate
    if (name in _OF_ONE_ZERO and 0 in numbers) or (name == "div" and numbers[0] == 0):
        return 0
    known = [number for number in numbers if number is not None]
    if not known or len(known) < len(numbers):
        return None
    if not eqn.outvars:  # such as a print
        return None
    first, is_float = known[0], is_inexact(eqn.outvars[0].aval)
    if name in _ARITHMETIC and is_float:
        try:
            return _ARITHMETIC[name](*known, **{k: v for k, v in eqn.params.items() if k == "y"})
        except (ArithmeticError, TypeError):
            return None
    if any(number != first for number in known) or eqn.params.get("axis_index_groups") is not None:
        return None
    if name in SUMS:
        size = size_of(named_axes(eqn.params))
        return None if size is None else first * size
    if name == "reduce_sum":
        summed = eqn.invars[0].aval.size
        total: float = first * summed / max(eqn.outvars[0].aval.size, 1)
        return total
    return (
        first
        if (name in _SAME_NUMBER and (is_float or not first)) or (not first and name in _OF_ZEROS)
        else None
    )
