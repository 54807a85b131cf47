"""What a loop does with the results of its collectives: which of them no trip reads.

A loop's body is evaluated on values that say how they depend on these results. A trip may compute
something from them alone, and write, add or pass that into an element of the carry that no trip
reads: all of this can be done after the loop. Anything else is a read.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence
from typing import Any, NamedTuple

from shardrules import hlo
from shardrules.costs import walk
from shardrules.costs.waste.shared.values import FLOATS, FUNCTIONS, MOVES, Value
from shardrules.hlo.proof.collectives import OPCODES

# A collective's result: its computation, its position, and its operand's number or range's start.
Source = tuple[str, int, int]
_Sources = frozenset[Source]


@dataclasses.dataclass(frozen=True)
class _Same:
    """The same on every device in each trip: made of constants and of the trip's number."""

    zero: bool = False


@dataclasses.dataclass(frozen=True)
class _Result:
    """Computed in this trip from collectives' results and what is the same on every device.

    ``packed`` holds the ranges of a flat result that XLA packed from several arrays.
    """

    sources: _Sources
    linear: bool = True
    packed: tuple[tuple[int, int, Source], ...] = ()


@dataclasses.dataclass(frozen=True)
class _Carried:
    """An element of the carry with results of earlier trips in it; ``change``: made in this one."""

    element: int
    sources: _Sources
    change: str = ""


_PLAIN = None  # depends on no result
_NONE: tuple[str, frozenset[Source]] = ("", frozenset())
_SAME = _Same()

_IN_PLACE = frozenset(
    "copy copy-start copy-done bitcast reshape optimization-barrier opt-barrier".split()
)


class Unread(NamedTuple):
    """A collective's result that no trip of a loop reads.

    Attributes:
      around: the computation in which one collective after the loop would stand.
      copies: how many trips' operands that one takes: 1 where the loop only adds them up, or keeps
        the last; None if a trip count isn't known.
      ways: what the loops do with it: ``stacks``, ``adds up`` and ``keeps the last of``.
    """

    around: str
    copies: int | None
    ways: frozenset[str]


_WAYS = {"written": "stacks", "added": "adds up", "last": "keeps the last of"}


@dataclasses.dataclass(frozen=True)
class _Outcome:
    """The elements of a loop's carry that hold results: how they are made, and of which results."""

    elements: dict[int, tuple[str, _Sources]]
    sources: _Sources

    def ways(self, source: Source) -> frozenset[str]:
        return frozenset(how for how, sources in self.elements.values() if source in sources)


def unread(program: Any) -> dict[Source, Unread]:
    """List the results that no trip reads, each with the outermost loop that it can leave."""
    outcomes: dict[str, _Outcome] = {}
    results: dict[Source, Unread] = {}
    for name in program.module.order:  # callees first
        loop = program.loops.get(name)
        if loop is None:
            continue
        body = program.module.computations[name]
        inner = [outcomes[i.calls[1]] for i in body.instructions if _is_loop(i, outcomes)]
        sources = frozenset(program.results_in(name)).union(*(o.sources for o in inner))
        outcome = _settle(program, loop, outcomes, sources) if sources else None
        if outcome is None or not outcome.sources:
            continue
        outcomes[name] = outcome
        outer, own = (program.runs.get(n) for n in (loop.around, name))
        trips = None
        if own and outer and own.count is not None and outer.count:
            trips = own.count // outer.count
        for source in outcome.sources:
            ways = outcome.ways(source)
            before = results.get(source, Unread(name, 1, frozenset()))
            copies = before.copies
            if "written" in ways:
                copies = None if trips is None or copies is None else copies * trips
            named = before.ways | {_WAYS[way] for way in ways}
            results[source] = Unread(loop.around, copies, named)
    return results


def _is_loop(instruction: hlo.Instruction, outcomes: dict[str, _Outcome]) -> bool:
    return instruction.opcode == "while" and instruction.calls[1] in outcomes


def _settle(program, loop, outcomes, sources: _Sources) -> _Outcome | None:
    """Evaluate a loop's body until no further result turns out to be read."""
    body = program.module.computations[loop.body]
    root = body.instructions[body.root]
    if root.opcode != "tuple" or len(body.parameters) != 1:
        return None
    same = _same(program, loop, outcomes)
    elements: dict[int, tuple[str, _Sources]] = {}
    while sources:
        trip = _Trip(program, outcomes, sources)
        carry = tuple(
            _SAME if k in same else _Carried(k, elements.get(k, _NONE)[1])
            for k in range(len(root.operands))
        )
        returned = trip.evaluate(body, [carry])
        after: dict[int, tuple[str, _Sources]] = {}
        for k, value in enumerate(returned if isinstance(returned, tuple) else ()):
            if not _sources([value]):
                continue
            if isinstance(value, _Result):
                after[k] = ("last", value.sources)
            elif isinstance(value, _Carried) and value.element == k:
                after[k] = (value.change or elements[k][0], value.sources)
            else:
                trip.read([value])
        if not isinstance(returned, tuple):
            trip.read([returned])
        trip.read([trip.evaluate(loop.condition, [carry])])
        if trip.seen:
            sources, elements = sources - trip.seen, {}
        elif after == elements:
            held = frozenset().union(*(of for _, of in after.values()))
            return _Outcome(after, sources & held)
        else:
            elements = after
    return None


def _same(program, loop, outcomes) -> set[int]:
    """List the elements of a carry that are the same on every device in each trip."""
    body = program.module.computations[loop.body]
    around = program.module.computations[loop.around]
    start = around.instructions[around.instructions[loop.position].operands[0]]
    while start.opcode in _IN_PLACE and start.operands:
        start = around.instructions[start.operands[0]]
    if start.opcode != "tuple":
        return set()
    count = len(body.instructions[body.root].operands)
    same = {
        k for k, o in enumerate(start.operands[:count]) if program.is_constant(Value.at(around, o))
    }
    while same:
        carry = tuple(_SAME if k in same else _PLAIN for k in range(count))
        returned = _Trip(program, outcomes, frozenset()).evaluate(body, [carry])
        if not isinstance(returned, tuple):
            return set()
        kept = {k for k in same if isinstance(returned[k], _Same)}
        if kept == same:
            break
        same = kept
    return same


class _Trip:
    """One evaluation of a loop's body; ``seen`` gathers the results that something reads."""

    def __init__(self, program: Any, outcomes: dict[str, _Outcome], sources: _Sources):
        self.program = program
        self.outcomes = outcomes
        self.sources = sources
        self.seen: set[Source] = set()

    def read(self, values: Sequence[Any]) -> None:
        self.seen |= _sources(values)

    def evaluate(self, computation: hlo.Computation, arguments: Sequence[Any]) -> Any:
        """Give the value of a computation's root."""
        values: list[Any] = []
        for position, instruction in enumerate(computation.instructions):
            operands = [values[o] for o in instruction.operands]
            if instruction.opcode == "parameter":
                number = int(instruction.literal)
                values.append(arguments[number] if number < len(arguments) else _PLAIN)
            else:
                values.append(self._apply(computation, position, instruction, operands))
        return values[computation.root]

    def _apply(self, computation, position, instruction, operands) -> Any:
        opcode = instruction.opcode
        if opcode == "tuple":
            return tuple(operands)
        if opcode == "get-tuple-element":
            value, index = operands[0], int(instruction.attribute("index") or -1)
            return value[index] if isinstance(value, tuple) else value
        if opcode == "constant":
            return _Same(walk.is_zero(instruction))
        if opcode.endswith("-done") and isinstance(operands[0], tuple):
            started = computation.instructions[instruction.operands[0]]
            whole = started.shape.elements or ()
            return operands[0][1] if _holds_operands(started, len(whole)) else operands[0]
        if opcode in OPCODES:
            return self._collective(computation, position, instruction, operands)
        if opcode == "while" and instruction.calls[1] in self.outcomes:
            return self._loop(instruction, operands)
        if opcode in ("fusion", "call") and len(instruction.calls) == 1:
            same = all(isinstance(o, _Same) for o in operands)
            if not same and not any(map(_may_hold, operands)):
                return _PLAIN
            called = self.program.module.computations[instruction.calls[0]]
            return self.evaluate(called, operands)
        if opcode == "custom-call" and walk.target(instruction) == "AllocateBuffer":
            return _SAME  # on TPU a stack starts so: its content is never read
        if not any(map(_may_hold, operands)):
            return self._without(instruction, operands)
        value = self._function(computation, instruction, operands)
        if value is _PLAIN:
            self.read(operands)
        return value

    def _without(self, instruction, operands) -> Any:
        """Give the value of an instruction that takes no result."""
        same = all(isinstance(o, _Same) for o in operands)
        if not same or instruction.opcode not in FUNCTIONS:
            return _PLAIN
        moved = instruction.opcode in MOVES or instruction.opcode == "convert"
        return _Same(moved and all(o.zero for o in operands))

    def _function(self, computation, instruction, operands) -> Any:
        """Give the value of an instruction that takes results; _PLAIN where it reads them."""
        opcode = instruction.opcode
        if opcode == "dynamic-update-slice":
            base, update, *places = operands
            if isinstance(base, _Carried) and isinstance(update, _Result) and not _sources(places):
                if base.change in ("", "written"):
                    return _Carried(base.element, base.sources | update.sources, "written")
            if isinstance(base, _Carried) and not _sources([update, *places]):
                return base  # another trip's place is written by something else
            return _PLAIN
        carried = [o for o in operands if isinstance(o, _Carried)]
        if carried:
            return self._in_carry(instruction, operands, carried)
        if opcode not in FUNCTIONS or not all(isinstance(o, (_Result, _Same)) for o in operands):
            return _PLAIN
        results = [o for o in operands if isinstance(o, _Result)]
        sources = frozenset().union(*(r.sources for r in results))
        if len(results) == 1 and results[0].packed:
            return self._unpacked(instruction, results[0])
        linear = all(r.linear for r in results) and _linear(
            self.program.module, computation, instruction, operands
        )
        return _Result(sources, linear)

    def _unpacked(self, instruction, flat: _Result) -> Any:
        """Give what is taken out of a flat result: the ranges that a slice covers."""
        if instruction.opcode in ("copy", "all-reduce-done", "copy-done"):
            return flat
        bounds = re.fullmatch(r"\{\[(\d+):(\d+)\]\}", instruction.attribute("slice") or "")
        taken = {source for _, _, source in flat.packed}
        if instruction.opcode == "slice" and bounds is not None:
            low, high = int(bounds[1]), int(bounds[2])
            taken = {s for start, stop, s in flat.packed if start < high and low < stop}
            if taken <= self.sources:
                return _Result(frozenset(taken), flat.linear)
        self.seen |= taken & self.sources
        return _PLAIN

    def _in_carry(self, instruction, operands, carried: list[_Carried]) -> Any:
        """Give what becomes of an element of the carry that holds results."""
        opcode = instruction.opcode
        if len(carried) != 1:
            return _PLAIN
        (element,) = carried
        floats = FLOATS.match(instruction.shape.element_type)
        if len(operands) == 1 and (opcode in _IN_PLACE or (opcode == "convert" and floats)):
            return element
        rest = [o for o in operands if o is not element]
        if opcode == "add" and len(rest) == 1 and isinstance(rest[0], _Result) and rest[0].linear:
            if element.change in ("", "added"):
                return _Carried(element.element, element.sources | rest[0].sources, "added")
        if opcode == "select" and element is not operands[0] and not element.change:
            # On TPU the first trip takes what the carry starts from.
            same = len(rest) == 2 and all(isinstance(o, _Same) for o in rest)
            return element if same else _PLAIN
        return _PLAIN

    def _collective(self, computation, position, instruction, operands) -> Any:
        if any(_sources([o]) and not isinstance(o, _Result) for o in operands):
            self.read(operands)
            return _PLAIN
        sites = self.program.parts(computation.name, position)
        own = self.program.results_at(computation.name, position)
        if any(source not in self.sources for source in own.values()) or not own:
            self.read(operands)
            operands = [_PLAIN] * len(operands)
        linear = bool(sites) and (sites[0].adds or sites[0].collective.kind == "all-gather")
        ranges = tuple(
            (s.verdict.range.start, s.verdict.range.stop, s.key) for s in sites if not s.whole
        )
        results: list[Any] = []
        for k, operand in enumerate(operands):
            made = own.values() if ranges else [own[k]] if k in own else []
            sources = self.sources.intersection(made)
            if not sources:
                results.append(_PLAIN)
                continue
            chained = isinstance(operand, _Result)
            still_linear = linear and (not chained or operand.linear)
            packed = () if chained else ranges
            results.append(_Result(sources | _sources([operand]), still_linear, packed))
        return _started(instruction, operands, results)

    def _loop(self, instruction, operands) -> Any:
        """Give the value of an inner loop whose outcome is settled."""
        outcome, start = self.outcomes[instruction.calls[1]], operands[0]
        count = len(instruction.shape.elements or ())
        starts = start if isinstance(start, tuple) else (start,) * count
        return tuple(self._element(outcome, k, value) for k, value in enumerate(starts))

    def _element(self, outcome: _Outcome, element: int, start: Any) -> Any:
        how, sources = outcome.elements.get(element, ("", frozenset()))
        if not sources or not sources <= self.sources:
            self.read([start])
            self.seen |= sources & self.sources
            return _PLAIN
        same = isinstance(start, _Same) and (how != "added" or start.zero)
        if same:
            return _Result(sources, how != "last")
        change = {"written": ("", "written"), "added": ("", "added")}.get(how, ())
        if isinstance(start, _Carried) and start.change in change:
            return _Carried(start.element, start.sources | sources, how)
        self.read([start])
        self.seen |= sources
        return _PLAIN


def _started(instruction: hlo.Instruction, operands: list[Any], results: list[Any]) -> Any:
    """Put a collective's results where its shape has them: a start may hold its operands first."""
    elements = instruction.shape.elements
    if elements is None:
        return results[0]
    if _holds_operands(instruction, len(elements)):
        return (_PLAIN, results[0] if len(results) == 1 else tuple(results))
    return tuple(results)


def _holds_operands(start: hlo.Instruction, elements: int) -> bool:
    """Tell whether a start's shape is (operands, results, contexts) and not the results alone."""
    if not start.opcode.endswith("-start") or start.opcode == "copy-start":
        return start.opcode == "copy-start"
    first = (start.shape.elements or (start.shape,))[0]
    return first.is_tuple or elements > len(start.operands)


def _may_hold(value: Any) -> bool:
    """Tell whether a value may hold results: an element of the carry may in a later trip."""
    if isinstance(value, tuple):
        return any(map(_may_hold, value))
    return isinstance(value, (_Result, _Carried))


def _sources(values: Sequence[Any]) -> _Sources:
    sources: _Sources = frozenset()
    for value in values:
        if isinstance(value, tuple):
            sources |= _sources(value)
        elif isinstance(value, (_Result, _Carried)):
            sources |= value.sources
    return sources


def _linear(module, computation, instruction: hlo.Instruction, operands: Sequence[Any]) -> bool:
    """Tell whether an instruction is linear in the results that it takes."""
    opcode = instruction.opcode
    floats = FLOATS.match(instruction.shape.element_type) is not None
    if opcode == "bitcast":  # to another element type it takes the bits for other numbers
        before = computation.instructions[instruction.operands[0]].shape
        return before.element_type == instruction.shape.element_type
    if opcode in MOVES or opcode == "negate":
        return True
    if opcode == "convert":
        return floats
    first = isinstance(operands[0], _Result)
    if opcode in ("add", "subtract", "concatenate"):
        return all(isinstance(o, _Result) or o.zero for o in operands)
    if opcode == "multiply":
        return sum(isinstance(o, _Result) for o in operands) == 1
    if opcode == "divide":
        return floats and first and not isinstance(operands[1], _Result)
    if opcode == "pad":
        return first and operands[1].zero
    if opcode == "reduce" and len(operands) == 2 and first:
        return walk.applied(module, instruction) == "add" and getattr(operands[1], "zero", False)
    return False
