"""Find out how often computations run: loops, their nesting and their trip counts."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import TypeAlias

import numpy as np

from shardrules.hlo.known import exact
from shardrules.hlo.reader import attributes
from shardrules.hlo.reader import module as hm

_KNOWN = re.compile(r'"known_trip_count"\s*:\s*\{\s*"n"\s*:\s*"?(\d{1,18})"?')

_Start = Callable[[int], "int | None"]


@dataclasses.dataclass(frozen=True)
class Run:
    """How often a computation runs."""

    depth: int  # number of while loops around it
    count: int | None  # runs in one execution of the module; None if a loop's count isn't known
    at_most: bool = False  # it is in a branch, and ``count`` counts every branch as taken
    each: int = 1  # runs if each loop of unknown count makes one trip


# No computation can run more often in one execution. If the trip counts of nested loops multiply to
# more, the program must leave the loops early, so the number of runs is unknown.
_MOST = 2**63
_MAX_STEPS = 1000  # the most copies and fusions to follow from a number to its computation
# Opcodes that run each computation they name once; other opcodes may run it any number of times.
_FUSED = ("fusion", "call")
_ONCE = frozenset("call call-start fusion fusion-start async-start conditional".split())


def executions(module: hm.Module) -> dict[str, Run]:
    """Return how often each computation that ENTRY reaches runs."""
    # The text defines a computation before its callers, so read it backwards: when we reach a
    # computation, all of its callers have added their runs, and its own runs are complete.
    runs = {module.entry.name: Run(0, 1)}
    for name in reversed(module.computations):  # callers first
        if name not in runs:
            continue
        computation = module.computations[name]
        if not computation.calling:
            continue
        for instruction, calls in computation.calls():
            if instruction.opcode.endswith(("-update", "-done")):
                continue
            if instruction.opcode in _FUSED and len(calls) == 1:
                if calls[0] not in runs:  # the common case
                    runs[calls[0]] = runs[name]
                    continue
            for callee, run in _calls(module, computation, instruction, calls, runs[name]):
                before = runs.get(callee)
                if before is None:
                    runs[callee] = run
                    continue
                countable = before.count is not None and run.count is not None
                runs[callee] = Run(
                    max(before.depth, run.depth),
                    (before.count or 0) + (run.count or 0) if countable else None,
                    before.at_most or run.at_most,
                    before.each + run.each,
                )
    return runs


def _calls(
    module: hm.Module,
    computation: hm.Computation,
    instruction: hm.Instruction,
    calls: Sequence[str],
    outer: Run,
) -> Iterator[tuple[str, Run]]:
    """Yield each computation that an instruction runs, and how often it runs."""
    opcode = instruction.opcode
    if opcode != "while":
        at_most = outer.at_most or (opcode == "conditional" and len(calls) > 1)
        count = outer.count if opcode in _ONCE else None
        for callee in calls:
            yield callee, Run(outer.depth, count, at_most, outer.each)
        return
    trips = trip_count(module, computation, instruction)
    for place, callee in enumerate(calls):
        # The condition is listed first; it runs once more than the body.
        times = trips if trips is None or place else trips + 1
        count = None if times is None or outer.count is None else outer.count * times
        each = outer.each * (1 if times is None else times)
        if each > _MOST:
            count, each = None, 1
        yield callee, Run(outer.depth + 1, count, outer.at_most, each)


def parts(module: hm.Module, loop: hm.Instruction) -> tuple[hm.Computation, hm.Computation]:
    """Return a loop's condition and body; raise an error if the text lacks one of them."""
    keys = {key for key, _, _ in loop.attributes()}
    if len(loop.calls) != 2 or not {"condition", "body"} <= keys:
        raise attributes.syntax_error(
            module.text, loop.start, f"while {loop.name!r} has no condition or no body"
        )
    return module.computations[loop.calls[0]], module.computations[loop.calls[1]]


def trip_count(module: hm.Module, computation: hm.Computation, loop: hm.Instruction) -> int | None:
    """Return a while loop's trip count, for its cost; None if it isn't static."""
    # XLA prints known_trip_count on CPU and GPU. On TPU, the limit, start and step give the count
    # if all three are constants.
    stated = stated_count(loop)
    if stated is not None:
        return stated

    def start(index: int) -> int | None:
        passed_on = ("copy", "optimization-barrier", "opt-barrier")
        carry = hm.behind(computation, loop.operands[0], passed_on)
        if carry.opcode != "tuple" or index >= len(carry.operands):
            return None
        return _constant(_behind(module, computation, carry.operands[index]))

    return counted(module, loop, start) if len(loop.operands) == 1 else None


def stated_count(loop: hm.Instruction) -> int | None:
    """Return the trip count that XLA prints on CPU and GPU; None if there is none."""
    config = loop.attribute("backend_config")
    match = _KNOWN.search(config.replace('\\"', '"')) if config else None
    return int(match[1]) if match else None


def counted(module: hm.Module, loop: hm.Instruction, start: _Start) -> int | None:
    """Return the trip count that a loop's counter gives; None if it isn't certain."""
    counter = _Counter(module, loop, start)  # raises an error if the loop lacks a part
    if module.unknown and _holds_unknown(module, loop):
        return None
    return counter.trips()


def _holds_unknown(module: hm.Module, loop: hm.Instruction) -> bool:
    """Return whether any instruction that a loop runs has an unknown attribute."""
    seen, stack = set(loop.calls), list(loop.calls)
    while stack:
        for instruction in module.computations[stack.pop()].instructions:
            if instruction.start in module.unknown:
                return True
            stack += [name for name in instruction.calls if name not in seen]
            seen.update(instruction.calls)
    return False


_FLIPPED = {"LT": "GT", "GT": "LT", "LE": "GE", "GE": "LE", "NE": "NE"}
# One operand of an operation: ("element", index in the carry) or ("constant", number).
_Side = tuple[str, int]
# The fusions around an instruction, innermost first: a fusion's computation, the fusion, and the
# fusions around it. A place is an instruction with its computation and the fusions around it.
_Fusions: TypeAlias = "tuple[hm.Computation, hm.Instruction, _Fusions] | None"
_Place = tuple[hm.Computation, hm.Instruction, _Fusions]


class _Counter:
    """The element of a loop's carry that its condition compares with a limit."""

    def __init__(self, module: hm.Module, loop: hm.Instruction, start: _Start):
        self._module = module
        self._carried = loop.shape.elements or ()
        self._condition, self._body = parts(module, loop)
        self._start = start

    def trips(self) -> int | None:
        """Return the trip count; None if the condition, limit, start or step isn't certain."""
        # The condition must compare the counter with a limit, on either side. Swap the sides so
        # that the counter is on the left.
        comparison = self._operation(self._condition, self._condition.root, ("compare",))
        if comparison is None:
            return None
        compare, kind, (left, right) = comparison
        signed = "UNSIGNED" if kind is None or kind(0).dtype.kind != "i" else "SIGNED"
        direction = compare.attribute("direction") or ""
        if compare.attribute("type") not in (None, signed) or direction not in _FLIPPED:
            return None
        if left is None or left[0] != "element":
            left, right, direction = right, left, _FLIPPED[direction]
        if left is None or left[0] != "element" or left[1] >= len(self._carried):
            return None
        # The count follows from the limit and the step, which no iteration may change, and the
        # counter's first value.
        limit, start, step = self._fixed(right), self._start(left[1]), self._step(left)
        kind = exact.dtype(self._carried[left[1]])
        if limit is None or start is None or not step or kind in (None, np.bool_):
            return None
        trips = _trips(direction, start, limit, step)
        # If the counter overflows before it stops, the loop makes another number of trips.
        bounds = np.iinfo(kind)
        wraps = trips is None or not bounds.min <= start + trips * step <= bounds.max
        return None if wraps else trips

    def _operation(
        self, computation: hm.Computation, position: int, opcodes: Collection[str]
    ) -> tuple[hm.Instruction, type | None, list[_Side | None]] | None:
        """Return an operation on two numbers, with their type and both sides; None if uncertain."""
        place = _behind(self._module, computation, position)
        if place is None or place[1].opcode not in opcodes or len(place[1].operands) != 2:
            return None
        within, operation, around = place
        kind = exact.dtype(within.instructions[operation.operands[0]].shape)
        return operation, kind, [self._side(within, o, around) for o in operation.operands]

    def _side(
        self, computation: hm.Computation, position: int, around: _Fusions = None
    ) -> _Side | None:
        """Return a constant or an element of the carry; None for anything else."""
        place = _behind(self._module, computation, position, around)
        number = _constant(place)
        if number is not None:
            return "constant", number
        # An element inside a fusion belongs to its operand, not to the loop's carry.
        index = hm.parameter_element(*place[:2]) if place and not place[2] else None
        return None if index is None else ("element", index)

    def _fixed(self, side: _Side | None) -> int | None:
        """Return a number that is the same in all iterations; None if it isn't certain."""
        if side is None or side[0] == "constant":
            return side and side[1]
        # A number in the carry counts if the body doesn't change it.
        position = self._returned(side[1])
        unchanged = position is not None and self._side(self._body, position) == side
        return self._start(side[1]) if unchanged else None

    def _returned(self, index: int) -> int | None:
        """Return the position of the instruction that makes an element of the next carry."""
        root = self._body.instructions[self._body.root]
        inside = root.opcode == "tuple" and index < len(root.operands)
        return root.operands[index] if inside else None

    def _step(self, counter: _Side) -> int | None:
        """Return the number that each iteration adds to the counter; None if it isn't certain."""
        position = self._returned(counter[1])
        if position is None:
            return None
        operation = self._operation(self._body, position, ("add", "subtract"))
        if operation is None:
            return None
        opcode, sides = operation[0].opcode, operation[2]
        if opcode == "add" and sides[1] == counter:
            sides.reverse()
        number = self._fixed(sides[1]) if sides[0] == counter else None
        return -number if number is not None and opcode == "subtract" else number


def _behind(
    module: hm.Module, computation: hm.Computation, position: int, around: _Fusions = None
) -> _Place | None:
    """Return where a number is computed, looking through copies and fusions.

    Return None if its type changes on the way.
    """
    for _ in range(_MAX_STEPS):  # nested fusions could take exponential time
        instruction = computation.instructions[position]
        if instruction.opcode in ("copy", "bitcast", "reshape") and instruction.operands:
            (position,) = instruction.operands[:1]
            before = computation.instructions[position].shape
            if before.element_type != instruction.shape.element_type:
                return None
        elif instruction.opcode == "fusion" and len(instruction.calls) == 1:
            around = computation, instruction, around
            computation = module.computations[instruction.calls[0]].original
            position = computation.root
        elif instruction.opcode == "parameter" and around is not None:
            computation, fusion, around = around
            if int(instruction.literal) >= len(fusion.operands):
                return None
            position = fusion.operands[int(instruction.literal)]
        else:
            return computation, instruction, around
    return None


def _constant(place: _Place | None) -> int | None:
    if place is None or place[1].opcode != "constant" or place[1].shape.element_count != 1:
        return None
    rows = exact.literal(place[1].literal, place[1].shape)
    return None if rows is None else int(rows.reshape(-1)[0])


def _trips(direction: str, start: int, limit: int, step: int) -> int | None:
    """Return how often the counter meets the condition; None if it may never stop."""
    if step < 0:  # mirror all numbers, so that the counter ascends
        direction, start, limit, step = _FLIPPED[direction], -start, -limit, -step
    way = limit - start + (direction == "LE")
    if direction in ("LT", "LE"):
        return max(0, -(-way // step))
    return way // step if direction == "NE" and way >= 0 and way % step == 0 else None
