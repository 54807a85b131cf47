"""Scalars of a kernel that follow from constants, program ids and a loop's round.

In the grid's first iteration all program ids are 0; in the first iteration that sees a block of an
output, those of the innermost axes that its index map does not look at are 0. So
``pl.when(pl.program_id(2) == 0)`` around a store counts as one that runs before everything else.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from shardrules.pallas.events import Scope, Walk
from shardrules.pallas.regions import is_box

__all__ = ["Ids", "Values", "is_integer"]


@dataclasses.dataclass
class Ids:
    """What is known of the grid in one pass.

    Args:
      program_ids: by axis of the grid as the kernel counts them; an absent one is not known.
      sizes: the grid; None where it is dynamic.
      asked: axes whose id was looked up.
    """

    program_ids: dict[int, int]
    sizes: tuple[int | None, ...]
    asked: set = dataclasses.field(default_factory=set)


class Values:
    """Scalars that follow from constants and program ids; None for those that don't.

    Args:
      walk: the walk.
      ids: what is known of the grid.
      given: scope -> variable -> value, for loops in a round that is known.
    """

    def __init__(self, walk: Walk, ids: Ids, given: Mapping[Scope, Mapping] | None = None):
        self.walk = walk
        self.ids = ids
        self.given = given or {}
        self.looked: set[Scope] = set()  # the scopes of which something given was looked at
        self._known: dict[tuple[int, Any], int | None] = {}

    def with_given(self, scope: Scope, values: Mapping) -> Values:
        """Return values that also know what ``scope``'s variables hold."""
        inner = Values(self.walk, self.ids, {**self.given, scope: values})
        inner.looked = self.looked
        return inner

    def of(self, scope: Scope, atom: Any) -> int | None:
        """Return the value of an integer or boolean scalar, or None."""
        if isinstance(atom, self.walk.names.Literal):
            value = atom.val
            if getattr(value, "shape", ()) != ():
                return None
            return int(value) if is_integer(atom) else None
        key = (id(scope), atom)
        if key not in self._known:
            self._known[key] = None  # while it is being worked out
            try:
                self._known[key] = self._work_out(scope, atom)
            except RecursionError:  # it follows from too much
                pass
        return self._known[key]

    def _work_out(self, scope: Scope, var: Any) -> int | None:
        if not is_integer(var):
            return None
        if scope in self.given and var in self.given[scope]:
            self.looked.add(scope)
            return self.given[scope][var]
        if var in scope.bound:
            return self.of(*scope.bound[var])
        eqn = scope.defs.get(var)
        if eqn is None:
            return None
        name = eqn.primitive.name
        inner = scope.inner.get(id(eqn))
        if inner is not None:
            if len(inner) > 1 or name not in _CALLS:
                return None
            return self.of(inner[0], inner[0].jaxpr.outvars[eqn.outvars.index(var)])
        if name == "program_id":
            self.ids.asked.add(eqn.params["axis"])
            return self.ids.program_ids.get(eqn.params["axis"])
        if name == "num_programs":
            axis = eqn.params["axis"]
            return self.ids.sizes[axis] if axis < len(self.ids.sizes) else None
        operation = _OPERATIONS.get(name)
        if operation is None:
            return None
        if self.walk.names.primitive(eqn.primitive) not in (f"jax:{name}", "pallas:multiple_of"):
            return None  # somebody else's primitive of that name
        found = operation(var, *[self.of(scope, a) for a in eqn.invars])
        return found if found is None or _fits(found, var.aval.dtype) else None

    def of_all(self, scope: Scope, atom: Any) -> int | None:
        """Return the value of a scalar, or of an array that holds one scalar throughout."""
        while not isinstance(atom, self.walk.names.Literal):
            eqn = scope.defs.get(atom)
            if eqn is None and atom in scope.bound:
                scope, atom = scope.bound[atom]
            elif eqn is not None and eqn.primitive.name == "broadcast_in_dim":
                atom = eqn.invars[0]
            else:
                break
        return self.of(scope, atom)

    def region(self, region: Any, shape: tuple[int, ...]) -> Any:
        """Return a region as a box if its place is known here, else as it is."""
        if type(region) is not tuple or is_box(region) or region[2] is None:
            return region
        _, scope, parts, *_ = region
        box = []
        for (terms, size), limit in zip(parts, shape):
            start = 0
            for term in terms:
                value = term if type(term) is int else self.of(scope, term)
                if value is None:
                    return region
                start += value
            if start < 0 or start + size > limit:  # what this means differs between platforms
                return region
            box.append((start, size))
        return tuple(box)

    def from_floats(self, scope: Scope, atom: Any) -> bool:
        """Whether a value depends on floating-point data of the operands."""
        known, top = self.walk.floats, (scope, atom)
        if isinstance(atom, self.walk.names.Literal):
            return False
        todo, seen = [top], set()
        while todo and top not in known:
            scope, atom = key = todo.pop()
            if isinstance(atom, self.walk.names.Literal) or key in seen:
                continue
            seen.add(key)
            eqn = scope.defs.get(atom)
            if known.get(key, atom in scope.refs and scope.refs[atom].is_float):
                known[top] = True
            elif key in known or atom in scope.refs:
                pass
            elif atom in scope.bound:
                todo.append(scope.bound[atom])
            elif eqn is not None:  # a loop's carry has none: its body's results tell
                inner = scope.inner.get(id(eqn), ())
                todo += [(one, out) for one in inner for out in one.jaxpr.outvars]
                # What a nested jaxpr does with a ref is seen there.
                todo += [(scope, a) for a in eqn.invars if not inner or not self._is_ref(a)]
        if top not in known:
            known.update(dict.fromkeys(seen, False))
        return known[top]

    def _is_ref(self, atom) -> bool:
        return isinstance(atom.aval, self.walk.names.AbstractRef)


_CALLS = ("jit", "pjit", "closed_call", "call", "custom_jvp_call")


def is_integer(atom: Any) -> bool:
    """Whether an atom is an integer or boolean scalar."""
    return getattr(getattr(atom.aval, "dtype", None), "kind", "") in "iub" and (
        getattr(atom.aval, "shape", None) == ()
    )


def _fits(value: int, dtype: Any) -> bool:
    """Whether arithmetic of a dtype would not have wrapped around."""
    if dtype.kind == "b":
        return True
    bits = 8 * dtype.itemsize
    return 0 <= value < 1 << bits if dtype.kind == "u" else -1 << bits - 1 <= value < 1 << bits - 1


def _both(function):
    return lambda var, a, b: None if a is None or b is None else int(function(a, b))


def _one(function):
    return lambda var, a, *rest: None if a is None else int(function(a))


def _and(var, a, b):
    if a == 0 or b == 0:
        return 0
    return None if a is None or b is None else a & b


def _or(var, a, b):
    for one in (a, b):
        if one == 1 and var.aval.dtype.kind == "b":
            return 1
    return None if a is None or b is None else a | b


def _not(var, a):
    return None if a is None else int(not a) if var.aval.dtype.kind == "b" else ~a


def _mul(var, a, b):
    return 0 if a == 0 or b == 0 else None if a is None or b is None else a * b


def _div(var, a, b):
    if a is None or not b:
        return None
    return abs(a) // abs(b) * (1 if (a < 0) == (b < 0) else -1)


def _rem(var, a, b):
    return None if a is None or not b else abs(a) % abs(b) * (1 if a >= 0 else -1)


def _select(var, which, *cases):
    if which is not None:
        return cases[which] if 0 <= which < len(cases) else None
    return cases[0] if len(set(cases)) == 1 else None


def _convert(var, a, *rest):
    return None if a is None else int(bool(a)) if var.aval.dtype.kind == "b" else a


_OPERATIONS = {
    "add": _both(lambda a, b: a + b),
    "sub": _both(lambda a, b: a - b),
    "mul": _mul,
    "div": _div,
    "rem": _rem,
    "max": _both(max),
    "min": _both(min),
    "eq": _both(lambda a, b: a == b),
    "ne": _both(lambda a, b: a != b),
    "lt": _both(lambda a, b: a < b),
    "le": _both(lambda a, b: a <= b),
    "gt": _both(lambda a, b: a > b),
    "ge": _both(lambda a, b: a >= b),
    "and": _and,
    "or": _or,
    "not": _not,
    "neg": _one(lambda a: -a),
    "sign": _one(lambda a: (a > 0) - (a < 0)),
    "abs": _one(abs),
    "select_n": _select,
    "convert_element_type": _convert,
    "shift_left": _both(lambda a, b: a << b if 0 <= b < 64 else -1 << 64),
    "shift_right_arithmetic": _both(lambda a, b: a >> b if b >= 0 else -1 << 64),
    "clamp": lambda var, low, x, high: None if None in (low, x, high) else min(max(x, low), high),
    "squeeze": _one(int),
    "reshape": _one(int),
    "broadcast_in_dim": _one(int),
    "stop_gradient": _one(int),
    "copy": _one(int),
    "multiple_of": _one(int),
}
