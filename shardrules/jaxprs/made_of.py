"""What each value of a jaxpr is made of, to compare two traces of one function."""

from __future__ import annotations

import collections
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from shardrules.door.jaxprs import CASTS, KERNELS, SUMS, name_of, named_axes, opened
from shardrules.door.protocols import ClosedJaxpr, Eqn, Jaxpr, Params
from shardrules.jaxprs.walk import Inside, visited

_MOST_ELEMENTS = 1 << 16  # of an array that is compared


class _Around(NamedTuple):
    """The equation around a jaxpr, and what its operands are made of."""

    name: str
    operands: Sequence[Any]
    makes: dict[Any, Any]  # what each variable of the jaxpr is made of
    read: list[tuple[Jaxpr, dict[Any, Any]]]  # the jaxprs of the equation so far

    def of(self, atom: Any) -> Any:
        return _held(atom.val) if hasattr(atom, "val") else self.makes.get(atom, "constant")


def made_of(closed: ClosedJaxpr) -> collections.Counter[Any]:
    """Count what a jaxpr computes by what it makes that of; casts and conversions are left out.

    A body may read the type of a value, and sum over other axes or swap operands by that.
    """
    counted: collections.Counter[Any] = collections.Counter()

    def enter(jaxpr: Jaxpr, around: _Around) -> _Around:
        inside = around._replace(makes=dict(zip(jaxpr.invars, _given(jaxpr, around))))
        if jaxpr is whole_jaxpr:
            inside.makes.update(zip(jaxpr.constvars, map(_held, getattr(closed, "consts", ()))))
        around.read.append((jaxpr, inside.makes))
        return inside

    def visit(eqn: Eqn, around: _Around, inside: Inside[_Around, None]) -> Iterator[None]:
        name, operands = name_of(eqn), [around.of(atom) for atom in eqn.invars]
        if name in CASTS | {"convert_element_type"}:
            around.makes.update(zip(eqn.outvars, operands))
            return
        inner = _Around(name, operands, {}, [])
        for found in () if name in KERNELS else inside(inner):
            yield from found
        results: list[Any] = [(name, _plain(eqn.params), operands, n) for n in _numbers(eqn)]
        if name in SUMS:
            results = [("psum", named_axes(eqn.params), operand) for operand in operands]
        elif inner.read:
            # There may be more operands with the check on: a value, and what it is cast to.
            ends = [
                [inner._replace(makes=makes).of(atom) for atom in jaxpr.outvars]
                for jaxpr, makes in inner.read
            ]
            results = [(name, n, ends, {*operands}) for n in _numbers(eqn)]
        keys = [_key(result) for result in results]
        counted.update(keys)
        around.makes.update(zip(eqn.outvars, keys))

    whole_jaxpr = opened(closed)
    whole = _Around("", range(len(whole_jaxpr.invars)), {}, [])
    visited(whole_jaxpr, visit, whole, enter)
    ends = whole._replace(makes=whole.read[0][1])
    counted.update(enumerate(map(ends.of, whole_jaxpr.outvars)))
    return counted


def _held(value: Any) -> Any:
    """Return an array's elements, hashed; scalars are compared elsewhere, as casts round them."""
    import jax
    import numpy as np

    if isinstance(value, jax.core.Tracer) or not 1 < getattr(value, "size", 1) <= _MOST_ELEMENTS:
        return "constant"
    if isinstance(value, jax.Array) and (value.is_deleted() or not value.is_fully_addressable):
        return "constant"
    try:
        elements = np.asarray(value)
    except Exception:  # a key's, say  # noqa: BLE001
        return "constant"
    return elements.shape, str(elements.dtype), hash(elements.tobytes())


def _numbers(eqn: Eqn) -> range:
    """Return the numbers of an equation's results; one without any may show something."""
    return range(len(eqn.outvars) or 1)


def _given(jaxpr: Jaxpr, around: _Around) -> Sequence[Any]:
    """Return what the inputs of a jaxpr in an equation are made of, as far as it is known."""
    count = len(jaxpr.invars)
    is_known = around.name != "while" and count <= len(around.operands)
    return around.operands[len(around.operands) - count :] if is_known else ["input"] * count


def _key(value: Any) -> int:
    if isinstance(value, (tuple, list)):
        return hash((*map(_key, value),))
    return hash(frozenset(map(_key, value)) if isinstance(value, (set, frozenset)) else value)


def _plain(params: Params) -> list[Any]:
    """Return the parameters of an equation that are made of numbers and names."""

    def held(value: Any) -> Any:
        if isinstance(value, (tuple, list)):
            return [*map(held, value)]
        return value if type(value) in (bool, int, float, str) else None

    return [(name, held(value)) for name, value in params.items() if name != "weak_type"]
