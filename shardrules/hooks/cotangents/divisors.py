"""The known numbers by which a jaxpr divides a sum: whether the sum is a mean."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

from shardrules.door.jaxprs import CASTS

Number = Callable[[Any], "float | None"]  # from an atom to the number that all its elements hold

# Equations that change the shape, type or dtype of their operand, but not its values.
SAME_VALUES = CASTS | set(
    "broadcast_in_dim convert_element_type reshape squeeze stop_gradient".split()
)

# Those, and what changes only a sign.
_SAME_SIZE = SAME_VALUES | {"neg"}
_MOST_FACTORS = 12  # whose products are formed


def divisors_of(jaxpr: Any, number: Number, operand: Any, result: Any) -> list[float]:
    """Return the known numbers that divide a sum's operand, or all uses of its result.

    A sum over elements divides by one over their number.
    """
    divisors: list[float] = []
    made = maker_of(jaxpr, operand)
    while made is not None and (divisor := _scaled_by(made, number)) != 1:
        divisors.append(divisor)
        made = maker_of(jaxpr, next(atom for atom in made.invars if number(atom) is None))
    names, variables = {result}, lambda atoms: {a for a in atoms if not hasattr(a, "val")}
    while names.isdisjoint(variables(jaxpr.outvars)):
        uses: set[float] = set()
        divided: set[Any] = set()
        for eqn in jaxpr.eqns:
            if names.isdisjoint(variables(eqn.invars)):
                continue
            if eqn.primitive.name in _SAME_SIZE:
                names.update(eqn.outvars)
            else:
                uses.add(_scaled_by(eqn, number))
                divided.update(eqn.outvars)
        if len(uses) != 1 or 1 in uses or not names.isdisjoint(variables(jaxpr.outvars)):
            break
        divisors += uses
        names = divided
    return divisors


def _scaled_by(eqn: Any, number: Number) -> float:
    return size_ratio(eqn) if eqn.primitive.name == "reduce_sum" else divided_by(eqn, number)


def size_ratio(eqn: Any) -> float:
    return max(eqn.outvars[0].aval.size, 1) / max(eqn.invars[0].aval.size, 1)


def maker_of(jaxpr: Any, atom: Any) -> Any:
    """Return the equation that computed an atom's values, before reshapes; None for an input."""
    for eqn in reversed(jaxpr.eqns):
        if any(atom is var for var in eqn.outvars):
            if eqn.primitive.name not in _SAME_SIZE:
                return eqn
            atom = eqn.invars[eqn.outvars.index(atom)]
    return None


def divided_by(eqn: Any, number: Number) -> float:
    """Return the known number by which an equation divides its other operand, or 1."""
    if eqn.primitive.name not in ("div", "mul"):
        return 1
    first, second = map(number, eqn.invars)
    if (first is None) == (second is None):
        return 1
    if eqn.primitive.name == "div":
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
