"""Find out how a loop uses the results of its collectives, and which results no trip reads.

We evaluate a loop's body on values that say how they depend on these results. A trip may compute
values from the results only, and write, add or pass such values into an element of the carry that
no trip reads. The program can do all of this after the loop. Any other use is a read.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from shardrules.costs import walk
from shardrules.costs.waste.program import (
    FLOATS,
    FUNCTIONS,
    MOVES,
    Program,
    Site,
    is_constant,
    is_unfilled,
)
from shardrules.costs.waste.slices import device_rows
from shardrules.hlo.proof.collectives import OPCODES
from shardrules.hlo.reader.flow import BARRIERS, Flat, Node

# A collective's result: where its instruction starts, and its operand's number or range's start.
_Source = tuple[int, int]
_Sources = frozenset[_Source]


@dataclasses.dataclass(frozen=True)
class _Same:
    """A value that is the same on every device: it depends on constants and the trip's number."""

    zero: bool = False


@dataclasses.dataclass(frozen=True)
class _LoopResult:
    """A value that this trip computes from collectives' results and ``_Same`` values only.

    ``packed`` has the ranges of a flat result that XLA packed from several arrays.
    """

    sources: _Sources
    linear: bool = True
    packed: tuple[tuple[int, int, _Source], ...] = ()


@dataclasses.dataclass(frozen=True)
class _Carried:
    """An element of the carry with earlier trips' results; ``change`` is this trip's change."""

    element: int
    sources: _Sources
    change: str = ""


_PLAIN = None  # depends on no result
_SAME = _Same()
_IN_PLACE = BARRIERS | frozenset("copy copy-start copy-done bitcast reshape".split())
_WAYS = {"written": "stacks", "added": "adds up", "last": "keeps the last of"}

# For each element of a loop's carry that contains results: how it is made, and from which results.
_Outcome = dict[int, tuple[str, _Sources]]


class Unread(NamedTuple):
    """A collective's result that no trip of a loop reads."""

    around: str  # the computation in which a collective after the loop would be
    # The number of trips whose operands the collective after the loop takes: 1 if the loop only
    # adds them up, or keeps the last; None if a trip count isn't known.
    copies: int | None
    # What the loops do with the result: ``stacks``, ``adds up`` and ``keeps the last of``.
    ways: frozenset[str]
    one_each: bool = True  # each loop uses the result in one of these ways only


def trips_of(program: Program, loop: Node) -> int | None:
    """Return a loop's trips in one run of its computation; None if they aren't known."""
    own, outer = (program.runs.get(n) for n in (loop.instruction.calls[1], loop.home.name))
    if own is None or own.count is None or outer is None or not outer.count:
        return None
    return own.count // outer.count


def unread(program: Program) -> dict[_Source, Unread]:
    """Return the results that no trip reads, each with the outermost loop that it can leave."""
    # Inner loops come first. A result that can leave an inner loop is a result in the outer one,
    # which it may leave, too.
    outcomes: dict[str, _Outcome] = {}
    found: dict[_Source, Unread] = {}
    results: dict[str, set[_Source]] = {}
    for sites in program.collectives.values():
        results.setdefault(sites[0].computation.name, set()).update(_own(sites).values())
    for name in program.module.computations:  # callees first
        loop = program.loops.get(name)
        if loop is None:
            continue
        body = program.module.computations[name]
        inner = [outcomes.get(i.calls[1], {}) for i in body.instructions if i.opcode == "while"]
        sources = frozenset(results.get(name, ())).union(*map(_held, inner))
        outcome = _settle(program, loop, outcomes, sources)
        if not outcome:
            continue
        outcomes[name] = outcome
        trips = trips_of(program, loop)
        for source in _held(outcome):
            ways = {how for how, sources in outcome.values() if source in sources}
            before = found.get(source, Unread(name, 1, frozenset()))
            copies = before.copies
            if "written" in ways:
                copies = None if trips is None or copies is None else copies * trips
            named = before.ways | {_WAYS[way] for way in ways}
            one_each = before.one_each and len(ways) == 1
            found[source] = Unread(loop.home.name, copies, named, one_each)
    return found


def _own(sites: list[Site]) -> dict[int, _Source]:
    """Return one collective's results that might move behind the loop, by operand or range."""
    if len({s.operand for s in sites}) > 1 and not all(s.whole for s in sites):
        return {}
    kinds = ("all-reduce", "all-gather")
    return {s.part: s.key for s in sites if s.needed and s.collective.kind in kinds}


def _held(outcome: _Outcome) -> _Sources:
    """Return all results that the elements of a carry contain."""
    return frozenset().union(*(sources for _, sources in outcome.values()))


def _settle(
    program: Program, loop: Node, outcomes: dict[str, _Outcome], sources: _Sources
) -> _Outcome:
    """Return how a loop's body makes elements of its carry from results that no trip reads."""
    # A fixpoint of three assumptions: which elements are the same on every device, which results no
    # trip reads, and which results the elements contain. Each round evaluates one trip under these
    # assumptions. If the trip refutes one of the first two, this set shrinks and the third starts
    # anew. Otherwise the elements contain the results that the trip has put into them. A round that
    # changes nothing is the last one. There is one: the first two sets only shrink, and while they
    # stay the same, the elements only gain results. The fixpoint holds for any number of trips.
    condition, body = map(program.flat, loop.instruction.calls)
    if body.root.opcode != "tuple" or not sources:
        return {}
    count = len(body.end.operands)
    same = {k for k, node in enumerate(program.start(loop)[:count]) if is_constant(node)}
    elements: _Outcome = {}
    while sources:
        trip = _Trip(program, outcomes, sources)
        carry = tuple(
            _SAME if k in same else _Carried(k, elements.get(k, ("", frozenset()))[1])
            for k in range(count)
        )
        returned = trip.evaluate(body, [carry])
        kept = {k for k in same if isinstance(returned[k], _Same)}
        if kept != same:
            same, elements = kept, {}
            continue
        after: _Outcome = {}
        for k, value in enumerate(returned):
            if not _sources([value]):
                continue
            if isinstance(value, _LoopResult):
                after[k] = ("last", value.sources)
            elif isinstance(value, _Carried) and value.element == k:
                after[k] = (value.change or elements[k][0], value.sources)
            else:
                trip.read([value])
        trip.read([trip.evaluate(condition, [carry])])
        if trip.seen:
            sources, elements = sources - trip.seen, {}
        elif after == elements:
            return after
        else:
            elements = after
    return {}


class _Trip:
    """One evaluation of a loop's body; ``seen`` collects the results that something reads."""

    def __init__(self, program: Program, outcomes: dict[str, _Outcome], sources: _Sources):
        self.program = program
        self.outcomes = outcomes
        self.sources = sources
        self.seen: set[_Source] = set()

    def read(self, values: Iterable[Any]) -> None:
        """Record that something reads the results in these values."""
        self.seen |= _sources(values)

    def evaluate(self, flat: Flat, arguments: Sequence[Any]) -> Any:
        """Return the value of a computation's root."""
        values: dict[Node, Any] = {}
        for node in flat.nodes:
            if node.opcode == "parameter":
                number = int(node.instruction.literal)
                values[node] = arguments[number] if number < len(arguments) else _PLAIN
            elif node is not flat.end:
                values[node] = self._apply(node, [values[o] for o in node.operands])
        return values[flat.root]

    def _apply(self, node: Node, operands: list[Any]) -> Any:
        """Return a node's value from the values of its operands."""
        # First the opcodes that have their own rules. Then any function that may take results, and
        # last, functions of values that are the same on every device.
        opcode, calls = node.opcode, node.instruction.calls
        if opcode == "tuple":
            return tuple(operands)
        if opcode == "get-tuple-element":
            (value,) = operands
            return value[node.index] if isinstance(value, tuple) else value
        if opcode == "constant":
            return _Same(walk.is_zero(node.instruction))
        if opcode.endswith("-done") and isinstance(operands[0], tuple):
            return operands[0][1] if _holds_operands(node.operands[0]) else operands[0]
        if opcode in OPCODES:
            return self._collective(node, operands)
        if opcode == "while" and calls[1] in self.outcomes:
            return self._loop(node, operands[0])
        if opcode == "call" and len(calls) == 1:
            return self.evaluate(self.program.flat(calls[0]), operands)
        if is_unfilled(node):
            return _SAME
        if any(map(_may_hold, operands)):
            value = self._function(node, operands)
            if value is _PLAIN:
                self.read(operands)
            return value
        if opcode not in FUNCTIONS or not all(isinstance(o, _Same) for o in operands):
            return _PLAIN
        moved = opcode in MOVES or opcode == "convert"
        return _Same(moved and all(o.zero for o in operands))

    def _function(self, node: Node, operands: list[Any]) -> Any:
        """Return the value of an instruction that takes results; _PLAIN if it reads them."""
        # In turn: a write into the carry, a device's own slice of a result, any other change of the
        # carry, and a function of results alone.
        carried = [o for o in operands if isinstance(o, _Carried)]
        if node.opcode == "dynamic-update-slice":
            base, update, *places = operands
            if (
                isinstance(base, _Carried)
                and isinstance(update, _LoopResult)
                and not _sources(places)
            ):
                if base.change in ("", "written"):
                    return _Carried(base.element, base.sources | update.sources, "written")
            if isinstance(base, _Carried) and not _sources([update, *places]):
                return base  # the trip writes something else into another trip's place
            return _PLAIN
        if node.opcode == "dynamic-slice" and isinstance(operands[0], _LoopResult):
            # Each device keeps its own part of a result, the same one on each trip.
            is_own = all(
                device_rows(self.program, place) is not None for place in node.operands[1:]
            )
            return _LoopResult(operands[0].sources, operands[0].linear) if is_own else _PLAIN
        if carried:
            return _in_carry(node, operands, carried[0]) if len(carried) == 1 else _PLAIN
        if node.opcode not in FUNCTIONS or any(
            not isinstance(o, _LoopResult | _Same) for o in operands
        ):
            return _PLAIN
        results = [o for o in operands if isinstance(o, _LoopResult)]
        if len(results) == 1 and results[0].packed:
            return self._unpacked(node, results[0])
        linear = all(r.linear for r in results) and self._is_linear(node, operands)
        return _LoopResult(_sources(results), linear)

    def _is_linear(self, node: Node, operands: Sequence[Any]) -> bool:
        """Return whether an instruction is linear in the results that it takes."""
        opcode = node.opcode
        floats = FLOATS.match(node.shape.element_type) is not None
        if opcode == "bitcast":  # with another element type, the bits are other numbers
            return node.operands[0].shape.element_type == node.shape.element_type
        if opcode in MOVES or opcode == "negate":
            return True
        if opcode == "convert":
            return floats
        first = isinstance(operands[0], _LoopResult)
        if opcode in ("add", "subtract", "concatenate"):
            return all(isinstance(o, _LoopResult) or o.zero for o in operands)
        if opcode == "multiply":
            return sum(isinstance(o, _LoopResult) for o in operands) == 1
        if opcode == "divide":
            return floats and first and not isinstance(operands[1], _LoopResult)
        if opcode == "pad":
            return first and operands[1].zero
        if opcode == "reduce" and len(operands) == 2 and first:
            added = walk.applied(self.program.module, node.instruction) == "add"
            return added and getattr(operands[1], "zero", False)
        return False

    def _unpacked(self, node: Node, flat: _LoopResult) -> Any:
        """Return the value of a slice of a flat result: the results whose ranges it overlaps."""
        if node.opcode in ("copy", "all-reduce-done", "copy-done"):
            return flat
        bounds = re.fullmatch(r"\{\[(\d+):(\d+)\]\}", node.instruction.attribute("slice") or "")
        taken = {source for _, _, source in flat.packed}
        if node.opcode == "slice" and bounds is not None:
            low, high = int(bounds[1]), int(bounds[2])
            taken = {s for start, stop, s in flat.packed if start < high and low < stop}
            if taken <= self.sources:
                return _LoopResult(frozenset(taken), flat.linear)
        self.seen |= taken & self.sources
        return _PLAIN

    def _collective(self, node: Node, operands: list[Any]) -> Any:
        """Return a collective's value, which contains its own results and those of its operands."""
        # A collective may take results of other collectives, and then leave the loop with them. It
        # may not take an element of the carry that has results. If its own results can't leave the
        # loop, it stays there, and so it reads its operands.
        sites = self.program.parts(node.instruction)
        own = _own(sites)
        if any(_sources([o]) and not isinstance(o, _LoopResult) for o in operands):
            self.read(operands)
            return _PLAIN
        if not own or not self.sources.issuperset(own.values()):
            self.read(operands)
            operands = [_PLAIN] * len(operands)
        linear = bool(sites) and (sites[0].adds or sites[0].collective.kind == "all-gather")
        ranges = tuple(
            (s.verdict.range.start, s.verdict.range.stop, s.key) for s in sites if s.verdict.range
        )
        results: list[Any] = []
        for k, operand in enumerate(operands):
            made = own.values() if ranges else [own[k]] if k in own else []
            sources = self.sources.intersection(made)
            if not sources:
                results.append(_PLAIN)
                continue
            chained = isinstance(operand, _LoopResult)
            still_linear = linear and (not chained or operand.linear)
            packed = () if chained else ranges
            results.append(_LoopResult(sources | _sources([operand]), still_linear, packed))
        if node.shape.elements is None:
            return results[0]
        whole = results[0] if len(results) == 1 else tuple(results)
        return (_PLAIN, whole) if _holds_operands(node) else tuple(results)

    def _loop(self, node: Node, start: Any) -> Any:
        """Return the value of an inner loop, given its initial carry."""
        count = len(node.shape.elements or ())
        starts = start if isinstance(start, tuple) else (start,) * count
        outcome = self.outcomes[node.instruction.calls[1]]
        none: tuple[str, _Sources] = ("", frozenset())
        return tuple(self._element(*outcome.get(k, none), value) for k, value in enumerate(starts))

    def _element(self, how: str, sources: _Sources, start: Any) -> Any:
        """Return an element of an inner loop's value, given the element's initial value."""
        change = {"written": ("", "written"), "added": ("", "added")}.get(how, ())
        if sources and sources <= self.sources:
            if isinstance(start, _Same) and (how != "added" or start.zero):
                return _LoopResult(sources, how != "last")
            if isinstance(start, _Carried) and start.change in change:
                return _Carried(start.element, start.sources | sources, how)
        self.read([start])
        self.seen |= sources & self.sources
        return _PLAIN


def _in_carry(node: Node, operands: list[Any], element: _Carried) -> Any:
    """Return an element of the carry after an instruction; _PLAIN if the instruction reads it."""
    opcode, rest = node.opcode, [o for o in operands if o is not element]
    floats = FLOATS.match(node.shape.element_type)
    if len(operands) == 1 and (opcode in _IN_PLACE or (opcode == "convert" and floats)):
        return element
    if opcode == "add" and len(rest) == 1 and isinstance(rest[0], _LoopResult) and rest[0].linear:
        if element.change in ("", "added"):
            return _Carried(element.element, element.sources | rest[0].sources, "added")
    if opcode == "select" and element is not operands[0] and not element.change:
        # On TPU the first trip selects the carry's initial value.
        return element if len(rest) == 2 and all(isinstance(o, _Same) for o in rest) else _PLAIN
    return _PLAIN


def _holds_operands(start: Node) -> bool:
    """Return whether a start's shape is (operands, results, contexts), not only the results."""
    if not start.opcode.endswith("-start") or start.opcode == "copy-start":
        return start.opcode == "copy-start"
    elements = start.shape.elements or (start.shape,)
    return elements[0].is_tuple or len(elements) > len(start.operands)


def _may_hold(value: Any) -> bool:
    """Return whether a value may contain results, in this trip or (in the carry) in a later one."""
    if isinstance(value, tuple):
        return any(map(_may_hold, value))
    return isinstance(value, _LoopResult | _Carried)


def _sources(values: Iterable[Any]) -> _Sources:
    """Return the results that some values contain."""
    sources: _Sources = frozenset()
    for value in values:
        if isinstance(value, tuple):
            sources |= _sources(value)
        elif isinstance(value, _LoopResult | _Carried):
            sources |= value.sources
    return sources
