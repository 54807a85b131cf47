"""How often computations run: loops, their nesting and their trip counts."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Iterator

import numpy as np

from shardrules.hlo.known import exact
from shardrules.hlo.reader import attributes
from shardrules.hlo.reader import module as hm

_KNOWN = re.compile(r'"known_trip_count"\s*:\s*\{\s*"n"\s*:\s*"?(\d{1,18})"?')

_Start = Callable[[int], "int | None"]


@dataclasses.dataclass(frozen=True)
class Run:
    """How a computation runs."""

    depth: int  # number of while loops around it
    count: int | None  # runs in one execution of the module; None if a loop's count isn't known
    at_most: bool = False  # it is in a branch; ``count`` counts every branch as taken
    each: int = 1  # runs if each loop of unknown count makes one trip


# Opcodes that run each computation they name once; others may run it any number of times.
_ONCE = frozenset("call call-start fusion fusion-start async-start conditional".split())


def executions(module: hm.Module) -> dict[str, Run]:
    """Count the runs of each computation that ENTRY reaches."""
    runs = {module.entry.name: Run(0, 1)}
    for name in reversed(module.order):  # callers first
        if name not in runs:
            continue
        computation = module.computations[name]
        for position in computation.calling:
            instruction = computation.instructions[position]
            if instruction.opcode.endswith(("-update", "-done")):
                continue
            for callee, run in _calls(module, computation, instruction, runs[name]):
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


def _calls(module, computation, instruction, outer: Run) -> Iterator[tuple[str, Run]]:
    opcode = instruction.opcode
    if opcode != "while":
        at_most = outer.at_most or (opcode == "conditional" and len(instruction.calls) > 1)
        count = outer.count if opcode in _ONCE else None
        for callee in instruction.calls:
            yield callee, Run(outer.depth, count, at_most, outer.each)
        return
    trips = trip_count(module, computation, instruction)
    for place, callee in enumerate(instruction.calls):
        # The condition is listed first; it runs once more than the body.
        times = trips if trips is None or place else trips + 1
        count = None if times is None or outer.count is None else outer.count * times
        each = outer.each * (1 if times is None else times)
        yield callee, Run(outer.depth + 1, count, outer.at_most, each)


def parts(module: hm.Module, loop: hm.Instruction) -> tuple[hm.Computation, hm.Computation]:
    """Give a while's condition and body."""
    keys = {key for key, _, _ in loop.attributes()}
    if len(loop.calls) != 2 or not {"condition", "body"} <= keys:
        raise attributes.syntax_error(
            module.text, loop.start, f"while {loop.name!r} has no condition or no body"
        )
    return module.computations[loop.calls[0]], module.computations[loop.calls[1]]


def trip_count(module: hm.Module, computation: hm.Computation, loop: hm.Instruction) -> int | None:
    """Give a while loop's trip count, for its cost; None if it isn't static."""
    # XLA prints known_trip_count on CPU and GPU. On TPU the count follows from the bound, start and
    # step, if all three are constants.
    stated = stated_count(loop)
    if stated is not None:
        return stated
    if len(loop.operands) != 1:
        return None
    return counted(module, loop, lambda index: _follow(computation, loop.operands[0], index))


def stated_count(loop: hm.Instruction) -> int | None:
    """Give the trip count that XLA prints on CPU and GPU; None if there is none."""
    config = loop.attribute("backend_config")
    match = _KNOWN.search(config.replace('\\"', '"')) if config else None
    return int(match[1]) if match else None


def counted(module: hm.Module, loop: hm.Instruction, start: _Start) -> int | None:
    """Give the trip count that follows from a loop's own counter; None if none does."""
    condition, body = parts(module, loop)
    if module.strange and _holds_strange(module, loop):
        return None
    return _Induction(module, loop, condition, body, start).count()


def _holds_strange(module: hm.Module, loop: hm.Instruction) -> bool:
    seen, stack = set(loop.calls), list(loop.calls)
    while stack:
        for instruction in module.computations[stack.pop()].instructions:
            if instruction.start in module.strange:
                return True
            stack += [name for name in instruction.calls if name not in seen]
            seen.update(instruction.calls)
    return False


_FLIPPED = {"LT": "GT", "GT": "LT", "LE": "GE", "GE": "LE", "NE": "NE"}
# What an operand is: ("element", index of the carry), ("constant", number) or, in a fusion,
# ("parameter", its number).
_Side = tuple[str, int]


class _Induction:
    """The induction variable of one loop."""

    def __init__(self, module, loop, condition, body, start):
        self.module = module
        self.loop = loop
        self.condition = condition
        self.body = body
        self._initial = start

    def count(self) -> int | None:
        comparison = self._operation(self.condition, self.condition.root, ("compare",))
        if comparison is None:
            return None
        compare, kind, (left, right) = comparison
        signed = "UNSIGNED" if kind is None or kind(0).dtype.kind != "i" else "SIGNED"
        direction = compare.attribute("direction") or ""
        if compare.attribute("type") not in (None, signed) or direction not in _FLIPPED:
            return None
        if left is None or left[0] != "element":
            left, right, direction = right, left, _FLIPPED[direction]
        if left is None or left[0] != "element":
            return None
        limit, start, step = self._value(right), self._initial(left[1]), self._step(left)
        carried = self.loop.shape.elements or ()
        kind = exact.dtype(carried[left[1]]) if left[1] < len(carried) else None
        if limit is None or start is None or not step or kind in (None, np.bool_):
            return None
        trips = _trips(direction, start, limit, step)
        # A counter that wraps around before it stops has another trip count.
        bounds = np.iinfo(kind)
        wraps = trips is None or not bounds.min <= start + trips * step <= bounds.max
        return None if wraps else trips

    def _operation(self, computation: hm.Computation, position: int, opcodes):
        """Find an operation on two numbers, also inside a fusion; give their type and sides."""
        root = _behind(computation, position)
        if root is None:
            return None
        if root.opcode == "fusion" and len(root.calls) == 1:
            inner = self.module.computations[root.calls[0]]
            operation = self._operation(inner, inner.root, opcodes)
            if operation is None:
                return None
            # An element inside the fusion belongs to its operand, not to the loop's carry.
            sides = [
                self._side(computation, root.operands[side[1]])
                if side and side[0] == "parameter" and side[1] < len(root.operands)
                else side
                if side and side[0] == "constant"
                else None
                for side in operation[2]
            ]
            return (*operation[:2], sides)
        if root.opcode not in opcodes or len(root.operands) != 2:
            return None
        kind = exact.dtype(computation.instructions[root.operands[0]].shape)
        return root, kind, [self._side(computation, o) for o in root.operands]

    def _side(self, computation: hm.Computation, position: int) -> _Side | None:
        instruction = _behind(computation, position)
        if instruction is None:
            return None
        if instruction.opcode == "constant":
            number = _constant(instruction)
            return None if number is None else ("constant", number)
        index = hm.parameter_element(computation, instruction)
        if index is not None:
            return ("element", index)
        if instruction.opcode == "parameter":
            return ("parameter", int(instruction.literal))
        return None

    def _value(self, side: _Side | None) -> int | None:
        """Give a number that is the same in all iterations."""
        if side is None or side[0] == "constant":
            return side and side[1]
        # It may be in the carry; then the body must not change it.
        position = self._returned(side)
        if position is not None and self._side(self.body, position) == side:
            return self._initial(side[1])
        return None

    def _returned(self, side: _Side) -> int | None:
        """Give the position of the body's instruction that returns an element, or None."""
        root = self.body.instructions[self.body.root]
        returns = side[0] == "element" and root.opcode == "tuple" and side[1] < len(root.operands)
        return root.operands[side[1]] if returns else None

    def _step(self, counter: _Side) -> int | None:
        """Give the number that each iteration adds to the counter; None if that isn't clear."""
        position = self._returned(counter)
        if position is None:
            return None
        operation = self._operation(self.body, position, ("add", "subtract"))
        if operation is None:
            return None
        opcode, sides = operation[0].opcode, operation[2]
        if opcode == "add" and sides[1] == counter:
            sides.reverse()
        number = self._value(sides[1]) if sides[0] == counter else None
        return -number if number is not None and opcode == "subtract" else number


def _behind(computation: hm.Computation, position: int) -> hm.Instruction | None:
    """Follow a number back through copies; None if its bits come to mean another number."""
    instruction = computation.instructions[position]
    while instruction.opcode in ("copy", "bitcast", "reshape") and instruction.operands:
        before = computation.instructions[instruction.operands[0]]
        if before.shape.element_type != instruction.shape.element_type:
            return None
        instruction = before
    return instruction


def _follow(computation: hm.Computation, position: int, index: int) -> int | None:
    """Give the constant at ``index`` of a tuple, or None."""
    passed_on = ("copy", "optimization-barrier", "opt-barrier")
    instruction = hm.behind(computation, position, passed_on)
    if instruction.opcode != "tuple" or not 0 <= index < len(instruction.operands):
        return None
    element = _behind(computation, instruction.operands[index])
    return _constant(element) if element and element.opcode == "constant" else None


def _constant(instruction: hm.Instruction) -> int | None:
    if instruction.shape.element_count != 1:
        return None
    rows = exact.literal(instruction.literal, instruction.shape)
    return None if rows is None else int(rows.reshape(-1)[0])


def _trips(direction: str, start: int, limit: int, step: int) -> int | None:
    if direction in ("LT", "LE") and step > 0:
        limit += direction == "LE"
        return max(0, -(-(limit - start) // step))
    if direction in ("GT", "GE") and step < 0:
        limit -= direction == "GE"
        return max(0, -(-(start - limit) // -step))
    if direction == "NE" and (limit - start) % step == 0 and (limit - start) // step >= 0:
        return (limit - start) // step
    return None
