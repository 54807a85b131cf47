"""Find the known numbers by which a jaxpr divides a sum, to tell whether the sum is a mean."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from shardrules.door.jaxprs import CASTS
from shardrules.door.protocols import Eqn, Jaxpr, Var

Number = Callable[[Any], "float | None"]  # maps an atom to the number that all its elements hold
# Map a jaxpr's variables to the equation that makes each, and to the equations that use it.
Makers = Mapping[Any, Any]
Uses = Mapping[Any, "list[tuple[Any, int]]"]

# Equations that change the shape, type or dtype of their operand, but not its values.
SAME_VALUES = CASTS | set(
    "broadcast_in_dim convert_element_type reshape squeeze stop_gradient".split()
)

# Equations that change at most the sign of their operand's values.
_SAME_SIZE = SAME_VALUES | {"neg"}
_MOST_FACTORS = 12  # form the products of this many factors, and ignore the others


def divisors_of(
    jaxpr: Jaxpr, made: Makers, used: Uses, number: Number, operand: Any, result: Any
) -> list[float]:
    """Return the known numbers that divide a sum's operand, or all uses of its result.

    A sum over elements counts as a division by one over their number.
    """
    # Follow the operand back through divisions by known numbers. Then follow the result forward, as
    # long as all its uses divide by the same number and the jaxpr doesn't return it. Both walks
    # end, since each step goes to another equation and a jaxpr has no cycles.
    divisors: list[float] = []
    maker = maker_of(made, operand)
    while maker is not None and (divisor := _scaled_by(maker, number)) != 1:
        divisors.append(divisor)
        maker = maker_of(made, next(atom for atom in maker.invars if number(atom) is None))
    returned = {atom for atom in jaxpr.outvars if not hasattr(atom, "val")}
    names = [result]
    while returned.isdisjoint(names):
        scales: set[float] = set()
        divided: dict[Any, None] = {}
        for name in names:  # the loop appends to the list
            for eqn, _ in used.get(name, ()):
                if eqn.primitive.name in _SAME_SIZE:
                    names += eqn.outvars
                else:
                    scales.add(_scaled_by(eqn, number))
                    divided.update(dict.fromkeys(eqn.outvars))
        if len(scales) != 1 or 1 in scales or not returned.isdisjoint(names):
            break
        divisors += scales
        names = list(divided)
    return divisors


def _scaled_by(eqn: Eqn, number: Number) -> float:
    if eqn.primitive.name == "reduce_sum":
        return size_ratio(eqn)
    if eqn.primitive.name in ("div", "mul"):
        return divided_by(eqn.primitive.name, *map(number, eqn.invars))
    return 1


def size_ratio(eqn: Eqn) -> float:
    ratio: float = max(eqn.outvars[0].aval.size, 1) / max(eqn.invars[0].aval.size, 1)
    return ratio


def maker_of(made: Makers, atom: Var) -> Any:
    """Return the equation that computed an atom's values, skipping reshapes; None for an input."""
    while not hasattr(atom, "val"):
        eqn = made.get(atom)
        if eqn is None or eqn.primitive.name not in _SAME_SIZE:
            return eqn
        atom = eqn.invars[eqn.outvars.index(atom)]
    return None


def divided_by(name: str, first: float | None, second: float | None) -> float:
    """Return the known number by which a ``div`` or ``mul`` divides its other operand, or 1."""
    if (first is None) == (second is None):
        return 1
    if name == "div":
        return second or 1
    factor = first if second is None else second
    divisor = 1 / factor if factor else 1
    whole = round(divisor)  # 1 / 3 is not exact in float32
    return whole if math.isclose(divisor, whole, rel_tol=1e-6) else divisor


def product_of(divisors: Iterable[float]) -> float:
    return math.prod(divisor for divisor in divisors if divisor > 1)


def products_of(factors: Iterable[float]) -> frozenset[float]:
    products = {1.0}
    for factor in [factor for factor in factors if factor != 1][:_MOST_FACTORS]:
        products |= {round(factor * product, 6) for product in products}
    return frozenset(products)
