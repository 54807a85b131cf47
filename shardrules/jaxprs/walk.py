"""Walk through a jaxpr: its equations, the equations of nested jaxprs, the uses of variables.

This module doesn't follow values; ``fold`` does.
"""

from __future__ import annotations

import functools
import math
import re
import weakref
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from typing import Any, TypeVar

from shardrules.door.jaxprs import KERNELS, SUMS, inner_jaxprs, is_transposed, named_axes, opened
from shardrules.door.protocols import ClosedJaxpr, Eqn, Jaxpr, Primitive

C = TypeVar("C")
T = TypeVar("T")

_ADDRESS = re.compile(r"0x[0-9a-f]+")

# Reads the jaxprs in an equation's parameters, given the facts known around them; returns one list
# for each jaxpr.
Inside = Callable[[C], "list[list[T]]"]


def visited(
    jaxpr: Jaxpr,
    visit: Callable[[Eqn, C, Inside[C, T]], Iterable[T]],
    around: C,
    enter: Callable[[Jaxpr, C], C] | None = None,
) -> list[T]:
    """Return what ``visit`` yields for each equation, in order.

    Args:
      jaxpr: the jaxpr, without its constants.
      visit: takes an equation, the facts known around it, and a function that reads the jaxprs in
        its parameters. That function takes the facts known around these jaxprs.
      around: the facts known around the jaxpr, such as how often it runs.
      enter: takes a jaxpr and the facts known around it; returns the facts around its equations.
    """

    def each(jaxpr: Jaxpr, around: C) -> list[T]:
        found: list[T] = []
        around = around if enter is None else enter(jaxpr, around)
        for eqn in jaxpr.eqns:
            found += visit(eqn, around, functools.partial(inside, eqn))
        return found

    def inside(eqn: Eqn, around: C) -> list[list[T]]:
        return [each(inner, around) for inner in inner_jaxprs(eqn.params)]

    return each(jaxpr, around)


def equations(jaxpr: Jaxpr, kernels: bool = False) -> Iterator[Eqn]:
    """Yield the equations of a jaxpr and its inner jaxprs; of kernels only with ``kernels``."""
    for equation in jaxpr.eqns:
        yield equation
        if kernels or equation.primitive.name not in KERNELS:
            for inner in inner_jaxprs(equation.params):
                yield from equations(inner, kernels)


def named(jaxpr: Jaxpr, name: str) -> list[Eqn]:
    """Return a jaxpr's own equations whose primitive has this name."""
    return [eqn for eqn in jaxpr.eqns if eqn.primitive.name == name]


def all_but(jaxpr: Jaxpr, names: Mapping[Primitive, Any], left_out: Container[Any]) -> list[Eqn]:
    """Return a jaxpr's own equations, without the primitives whose names are left out."""
    return [eqn for eqn in jaxpr.eqns if names[eqn.primitive] not in left_out]


def makers(jaxpr: Jaxpr) -> dict[Any, Eqn]:
    """Map each variable to the equation that makes it; inputs have none."""
    made_by: dict[Any, Eqn] = {}
    for eqn in jaxpr.eqns:
        made_by |= dict.fromkeys(eqn.outvars, eqn)
    return made_by


def uses(jaxpr: Jaxpr) -> dict[Any, list[tuple[Eqn, int]]]:
    """Map each variable to its uses, in order: an equation and an operand's position."""
    found: dict[Any, list[tuple[Eqn, int]]] = {}
    for eqn in jaxpr.eqns:
        for i, atom in enumerate(eqn.invars):
            if not hasattr(atom, "val"):
                found.setdefault(atom, []).append((eqn, i))
    return found


def _transposed(jaxpr: Jaxpr) -> list[tuple[Eqn, int]]:
    """Return the equations of a jaxpr's backward passes, with how often scans run each."""

    def visit(
        eqn: Eqn, around: tuple[int, bool], inside: Inside[tuple[int, bool], tuple[Eqn, int]]
    ) -> Iterator[tuple[Eqn, int]]:
        runs, is_inside = around
        is_inside = is_inside or is_transposed(eqn)
        if is_inside:
            yield eqn, runs
        if eqn.primitive.name not in KERNELS:
            for found in inside((runs * eqn.params.get("length", 1), is_inside)):
                yield from found

    return visited(jaxpr, visit, (1, False))


def gradient_sums(jaxpr: Jaxpr) -> frozenset[str]:
    """Return the mesh axes over which backward passes in a jaxpr sum."""
    sums = [eqn for eqn, _ in _transposed(jaxpr) if "psum" in eqn.primitive.name]
    return frozenset().union(*(named_axes(eqn.params) for eqn in sums))


def transposed_sums(jaxpr: Jaxpr) -> Iterator[tuple[int, frozenset[str]]]:
    """Yield the bytes and the axes of each psum that a jaxpr's backward passes hold."""
    for eqn, runs in _transposed(jaxpr):
        for atom in eqn.invars if eqn.primitive.name in SUMS else ():
            size_bytes = math.prod(atom.aval.shape) * atom.aval.dtype.itemsize
            yield size_bytes * runs, named_axes(eqn.params)


def program_text(closed: ClosedJaxpr) -> str:
    """Return a program's text without addresses, with the kernels that it calls."""
    # Cache the texts, since a rule that calls itself is printed at each of its calls: in
    # tests/core, 16 of 17 texts were of programs that had been printed before.
    if closed not in _TEXTS:
        text = "\n".join([str(closed), *_kernel_texts(opened(closed))])
        _TEXTS[closed] = _ADDRESS.sub("", text)
    return _TEXTS[closed]


_TEXTS: weakref.WeakKeyDictionary[Any, str] = weakref.WeakKeyDictionary()


def is_same_program(one: Any, other: Any) -> bool:
    """Return whether two programs have the same text, as ``program_text`` returns it."""
    eqns = opened(one).eqns, opened(other).eqns
    # Compare primitives first, since printing the programs takes a hundred times as long.
    if [eqn.primitive for eqn in eqns[0]] != [eqn.primitive for eqn in eqns[1]]:
        return False
    return program_text(one) == program_text(other)


def _kernel_texts(jaxpr: Jaxpr) -> Iterator[str]:
    for eqn in equations(jaxpr):
        if eqn.primitive.name in KERNELS:
            yield from map(str, eqn.params.values())
