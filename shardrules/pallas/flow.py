"""Runs a kernel's events: is every buffer stored to before it is read, and is every output stored?

A predicate is worked out where it follows from constants and from what is known of the program
ids. In the grid's first iteration all of them are 0; in the first iteration that sees a block of
an output, those of the innermost axes that its index map does not look at are 0. So
``pl.when(pl.program_id(2) == 0)`` around a store counts as one that runs before everything else.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from typing import Any

from shardrules.pallas.events import (
    SOME, WHOLE, Branch, Fresh, Loop, Read, Root, Scope, Store, Wait, Walk)

__all__ = ["Ids", "Runner", "Values", "covers", "settled"]


@dataclasses.dataclass
class Ids:
    """What is known of the grid in one pass.

    Args:
      program_ids: by axis of the grid as the kernel counts them; an absent one is not known.
      sizes: the grid; None where it is dynamic.
    """

    program_ids: dict[int, int]
    sizes: tuple[int | None, ...]
    asked: set = dataclasses.field(default_factory=set)  # axes whose id was looked up


class Values:
    """Scalars that follow from constants and program ids; None for those that don't.

    Args:
      walk: the walk.
      ids: what is known of the grid.
      starting: loop bodies that are in their first round.
    """

    def __init__(self, walk: Walk, ids: Ids, starting: frozenset = frozenset()):
        self.walk = walk
        self.ids = ids
        self.starting = starting
        self._known: dict[tuple[int, Any], int | None] = {}

    def of(self, scope: Scope, atom: Any) -> int | None:
        """Return the value of an integer or boolean scalar, or None."""
        if isinstance(atom, self.walk.names.Literal):
            value = atom.val
            if getattr(value, "shape", ()) != ():
                return None
            return int(value) if _is_integer(atom) else None
        key = (id(scope), atom)
        if key not in self._known:
            self._known[key] = None  # while it is being worked out
            self._known[key] = self._work_out(scope, atom)
        return self._known[key]

    def _work_out(self, scope: Scope, var: Any) -> int | None:
        if not _is_integer(var):
            return None
        if var in scope.bound:
            return self.of(*scope.bound[var])
        if scope in self.starting and var in scope.first:
            return self.of(*scope.first[var])
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
        if self.walk.names.primitive(eqn.primitive) != f"jax:{name}":
            return None
        return operation(var, *[self.of(scope, a) for a in eqn.invars])

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

    def from_floats(self, scope: Scope, atom: Any) -> bool:
        """Whether a value depends on floating-point data of the operands."""
        return self._floats(scope, atom, set())

    def _floats(self, scope, atom, seen) -> bool:
        if isinstance(atom, self.walk.names.Literal):
            return False
        key = (id(scope), atom)
        if key in seen:
            return False
        seen.add(key)
        if atom in scope.refs:
            return scope.refs[atom].is_float
        if atom in scope.bound:
            return self._floats(*scope.bound[atom], seen)
        eqn = scope.defs.get(atom)
        if eqn is None:
            return False  # a loop's carry: what it becomes is among its body's results
        if any(self._floats(inner, out, seen) for inner in scope.inner.get(id(eqn), ())
               for out in inner.jaxpr.outvars):
            return True
        # What a nested jaxpr does with a ref was seen above.
        return any(self._floats(scope, a, seen) for a in eqn.invars
                   if id(eqn) not in scope.inner or not self._is_ref(a))

    def _is_ref(self, atom) -> bool:
        return isinstance(atom.aval, self.walk.names.AbstractRef)


_CALLS = ("jit", "pjit", "closed_call", "call", "custom_jvp_call")


def _is_integer(atom: Any) -> bool:
    return getattr(getattr(atom.aval, "dtype", None), "kind", "") in "iub" and (
        getattr(atom.aval, "shape", None) == ())


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
        return cases[which]
    return cases[0] if len(set(cases)) == 1 else None


def _convert(var, a, *rest):
    return None if a is None else int(bool(a)) if var.aval.dtype.kind == "b" else a


_OPERATIONS = {
    "add": _both(lambda a, b: a + b), "sub": _both(lambda a, b: a - b), "mul": _mul,
    "div": _div, "rem": _rem, "max": _both(max), "min": _both(min),
    "eq": _both(lambda a, b: a == b), "ne": _both(lambda a, b: a != b),
    "lt": _both(lambda a, b: a < b), "le": _both(lambda a, b: a <= b),
    "gt": _both(lambda a, b: a > b), "ge": _both(lambda a, b: a >= b),
    "and": _and, "or": _or, "not": _not, "neg": _one(lambda a: -a),
    "sign": _one(lambda a: (a > 0) - (a < 0)), "abs": _one(abs),
    "select_n": _select, "convert_element_type": _convert,
    "clamp": lambda var, low, x, high: (
        None if None in (low, x, high) else min(max(x, low), high)),
    "squeeze": _one(int), "reshape": _one(int), "broadcast_in_dim": _one(int),
    "stop_gradient": _one(int), "copy": _one(int), "multiple_of": _one(int),
}


_MOST_CELLS = 100_000  # a bound on the work of ``covers``

# What has been stored: buffer -> the regions that every path so far has stored to.
State = dict


def _meet(states: list) -> State:
    first, *rest = states
    merged = {}
    for root, regions in first.items():
        for other in rest:
            theirs = other.get(root)
            if theirs is None:
                break
            if WHOLE in theirs:
                continue
            regions = theirs if WHOLE in regions else (regions & theirs) | {SOME}
        else:
            merged[root] = regions
    return merged


class Runner:
    """One pass over the events.

    Args:
      walk: the walk that found them.
      ids: what is known of the grid in this pass.
      watched: the buffers to report on; others are taken to hold something.
    """

    def __init__(self, walk: Walk, ids: Ids, watched: set):
        self.walk = walk
        self.values = Values(walk, ids)
        self.watched = watched
        self.unstored: dict[Root, Read] = {}  # read with no store before it
        self.in_part: dict[Root, Read] = {}  # read with stores to some of it before it
        self.endless: dict[Root, Wait] = {}  # waited for, and started nowhere
        # A store of what an excused read kept -> the state at that read, and what selects it.
        self.kept: dict[tuple[int, Root], tuple] = {}
        self.left_out = False  # whether a branch was not taken because its condition is known

    def run(self, events: list, state: State) -> State:
        """Run ``events`` from ``state``; return the state after them."""
        for event in events:
            kind = type(event)
            if kind is Read:
                if event.root in self.watched:
                    self._read(event, state)
            elif kind is Store:
                self._store(event, state)
            elif kind is Wait:
                self._wait(event, state)
            elif kind is Fresh:
                state.pop(event.root, None)
            elif kind is Branch:
                state = self._branch(event, state)
            elif kind is Loop:
                state = self._loop(event, state)
        return state

    def _read(self, event: Read, state: State) -> None:
        root = event.root
        have = state.get(root)
        if have is not None and (WHOLE in have or event.region in have - {SOME}):
            return
        kept = keeps_what_was_there(self.values, event)
        if kept is not None:
            for eqn, masks in kept:
                self.kept[id(eqn), root] = have, masks
        elif have is None or _lacks(event.region, root.boxes, root.shape):
            self.unstored.setdefault(root, event)
        else:
            self.in_part.setdefault(root, event)

    def _store(self, event: Store, state: State) -> None:
        kept = self.kept.pop((id(event.eqn), event.root), None)
        if kept is not None:
            event.masks = kept[1]
        if kept is None:
            # Which elements a mask from data leaves out differs from one run to the next.
            if not any(self.values.from_floats(*mask) for mask in event.masks):
                _add(state, event.root, event.region)
        elif kept[0] is None:  # what nobody stored stands there again
            state.pop(event.root, None)
        else:
            state[event.root] = kept[0]

    def _wait(self, event: Wait, state: State) -> None:
        filled = self.walk.links.get(event.on, {})
        if event.target is not None:
            if event.target in filled:
                _add(state, event.target, event.region)
            elif not filled:
                self.endless.setdefault(event.on, event)
            else:
                for root in filled:
                    _add(state, root, SOME)
            return
        for root in (*filled, *self.walk.handed.get(event.on, ())):
            _add(state, root, SOME)

    def _branch(self, event: Branch, state: State) -> State:
        which = self.values.of(event.scope, event.predicate)
        if which is not None:
            self.left_out = True
            which = min(max(which, 0), len(event.branches) - 1)
            return self.run(event.branches[which], state)
        return _meet([self.run(branch, dict(state)) for branch in event.branches])

    def _loop(self, event: Loop, state: State) -> State:
        runs = event.runs
        if not isinstance(runs, bool):
            runs = self.values.of(*runs)
            if runs == 0:
                self.left_out = True
                return state
        found = [dict(d) for d in (self.unstored, self.in_part, self.endless)]
        after = self.run(event.events, dict(state))
        if len(self.unstored) > len(found[0]):
            # Perhaps the first round, whose carry is known, stores what the later ones read.
            self.unstored, self.in_part, self.endless = found
            values = self.values
            self.values = Values(self.walk, values.ids, values.starting | {event.body})
            first = self.run(event.events, dict(state))
            self.values = values
            self.run(event.events, settled(first))
            after = first
        return settled(after) if runs else state


def _add(state: State, root: Root, region: Any) -> None:
    have = state.get(root, frozenset())
    if WHOLE not in have:
        state[root] = frozenset([WHOLE]) if region is WHOLE else have | {region, SOME}


def settled(state: State) -> State:
    """Return a state without the regions that a variable's next value would change."""
    return {root: frozenset(r for r in regions if r is WHOLE or r is SOME or r[0] != "view")
            for root, regions in state.items()}


def _lacks(region: Any, boxes: list | None, shape: tuple[int, ...]) -> bool:
    """Whether boxes, all that is ever stored, leave out some of a region that is known."""
    if not boxes or region is SOME or region is not WHOLE and region[0] == "view":
        return False
    if region is WHOLE:
        region = tuple((0, size) for size in shape)
    if any(len(box) != len(region) for box in boxes):
        return False
    moved = [tuple((start - origin, size) for (start, size), (origin, _) in zip(box, region))
             for box in boxes]
    return not covers(moved, tuple(size for _, size in region))


def covers(boxes: list | None, shape: tuple[int, ...]) -> bool:
    """Whether boxes of (start, size) fill a shape; True where they are not all known."""
    if boxes is None:
        return True
    edges = [sorted({0, *(e for box in boxes for e in (box[d][0], sum(box[d])) if 0 <= e < size)})
             for d, size in enumerate(shape)]
    if math.prod(map(len, edges)) * max(1, len(boxes)) > _MOST_CELLS:
        return True
    return all(any(all(start <= e < start + size for (start, size), e in zip(box, corner))
                   for box in boxes) for corner in itertools.product(*edges))


def keeps_what_was_there(values: Values, event: Read) -> list | None:
    """Return the stores that put what is read back where it stood; None if it goes elsewhere.

    ``ref[i] = jnp.where(mask, new, ref[i])`` is a masked store: what stood there stays, and goes
    nowhere else. ``jnp.where(i == 0, 0, ref[...])`` drops it where ``i`` is known to be 0.

    Returns:
      Each store's equation, and the (scope, atom) of each mask that keeps elements from it.
    """
    scope, eqn = event.scope, event.eqn
    if scope is None or len(eqn.outvars) != 1 or eqn.primitive.name not in ("get", "masked_load"):
        return None
    found: list = []
    return found if _only_kept(values, scope, eqn.outvars[0], event, (), found) else None


def _only_kept(values, scope, var, event, masks, found) -> bool:
    walk = values.walk
    uses = [e for e in scope.jaxpr.eqns if any(a is var for a in e.invars)]
    if not uses or any(out is var for out in scope.jaxpr.outvars):
        return False
    for eqn in uses:
        name = walk.names.primitive(eqn.primitive)
        if name == "state:swap" and masks:
            ref, value, *leaves = eqn.invars
            same = value is var and scope.refs.get(ref) is event.root and (
                walk.region(scope, eqn.params["tree"].unflatten(leaves)) == event.region)
            if not same or event.region is SOME:
                return False
            found.append((eqn, masks))
        elif name == "jax:convert_element_type":
            if not _only_kept(values, scope, eqn.outvars[0], event, masks, found):
                return False
        else:
            how = _selects(values, scope, eqn, var)
            if how is _DROPS:
                continue
            if not how or not _only_kept(values, scope, eqn.outvars[0], event, (*masks, how),
                                         found):
                return False
    return True


_DROPS = "drops"


def _selects(values, scope, eqn, var) -> Any:
    """Return the (scope, atom) that selects ``var`` as an unmoved case, _DROPS, or None."""
    walk = values.walk
    name = walk.names.primitive(eqn.primitive)
    places = [i for i, a in enumerate(eqn.invars) if a is var]
    if len(places) != 1 or len(eqn.outvars) != 1:
        return None
    if name == "jax:select_n":
        if not places[0]:
            return None
        which = values.of_all(scope, eqn.invars[0])
        return (scope, eqn.invars[0]) if which in (None, places[0] - 1) else _DROPS
    if name not in ("jax:jit", "jax:pjit"):
        return None
    (inner,) = scope.inner.get(id(eqn), (None,))  # jnp.where is a jit of its own
    if inner is None:
        return None
    var = inner.jaxpr.invars[places[0]]
    while True:
        uses = [e for e in inner.jaxpr.eqns if any(a is var for a in e.invars)]
        if len(uses) != 1 or any(out is var for out in inner.jaxpr.outvars):
            return None
        (eqn,) = uses
        if walk.names.primitive(eqn.primitive) == "jax:convert_element_type":
            var = eqn.outvars[0]
        else:
            how = _selects(values, inner, eqn, var)
            return how if eqn.outvars[0] is inner.jaxpr.outvars[0] else None
