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
    if module.strange and _holds_strange(module, loop):
        return None
    return _Induction(module, loop, *parts(module, loop), start).count()


def _holds_strange(module: hm.Module, loop: hm.Instruction) -> bool:
    seen, stack = set(loop.calls), list(loop.calls)
    while stack:
        for instruction in module.computations[stack.pop()].instructions:
            if instruction.start in module.strange:
                return True
            stack += [name for name in instruction.calls if name not in seen]
            seen.update(instruction.calls)
    return False


class _Induction:
    """The induction variable of one loop."""

    def __init__(self, module, loop, condition, body, start):
        self.module = module
        self.loop = loop
        self.condition = condition
        self.body = body
        self._initial = start

    def count(self) -> int | None:
        comparison = self._compare(self.condition, self.condition.root)
        if comparison is None:
            return None
        direction, left, right = comparison
        flip = {"LT": "GT", "GT": "LT", "LE": "GE", "GE": "LE", "NE": "NE"}
        if direction not in flip:
            return None
        if left[0] != "element":
            left, right, direction = right, left, flip[direction]
        if left[0] != "element":
            return None
        limit = self._value(right)
        start = self._initial(left[1])
        position = self._returned(left[1])
        step = None if position is None else self._added(self.body, position, left[1])
        if limit is None or start is None or not step:
            return None
        trips = _trips(direction, start, limit, step)
        carried = self.loop.shape.elements or ()
        kind = exact.dtype(carried[left[1]]) if left[1] < len(carried) else None
        if trips is None or kind is None or kind == np.bool_:
            return None
        # A counter that wraps around before it stops has another trip count.
        bounds = np.iinfo(kind)
        return trips if bounds.min <= start + trips * step <= bounds.max else None

    def _compare(self, computation, position):
        """Find a comparison, also inside a fusion; each side is an element or a constant."""
        root = hm.behind(computation, position, ("copy", "bitcast"))
        if root.opcode == "fusion" and len(root.calls) == 1:
            inner = self.module.computations[root.calls[0]]
            comparison = self._compare(inner, inner.root)
            if comparison is None:
                return None
            sides = [self._outer(computation, root.operands, side) for side in comparison[1:]]
            return None if None in sides else (comparison[0], *sides)
        if root.opcode != "compare" or len(root.operands) != 2:
            return None
        sides = [self._side(computation, o) for o in root.operands]
        own = exact.dtype(computation.instructions[root.operands[0]].shape)
        signed = "UNSIGNED" if own is None or own(0).dtype.kind != "i" else "SIGNED"
        if None in sides or root.attribute("type") not in (None, signed):
            return None
        return (root.attribute("direction"), *sides)

    def _outer(self, computation, operands, side):
        """Translate a side inside a fusion to the computation that holds the fusion."""
        # An element inside the fusion belongs to the fusion's operand, not to the loop's carry.
        if side is None or side[0] == "element":
            return None
        if side[0] != "parameter":
            return side
        return self._side(computation, operands[side[1]]) if side[1] < len(operands) else None

    def _side(self, computation, position):
        instruction = computation.instructions[position]
        while instruction.opcode in ("copy", "bitcast", "reshape") and instruction.operands:
            before = computation.instructions[instruction.operands[0]]
            if before.shape.element_type != instruction.shape.element_type:
                return None  # the same bits mean another number
            instruction = before
        if instruction.opcode == "constant":
            number = _constant(instruction)
            return None if number is None else ("constant", number)
        index = hm.parameter_element(computation, instruction)
        if index is not None:
            return ("element", index)
        if instruction.opcode == "parameter":
            return ("parameter", int(instruction.literal))
        return None

    def _value(self, side) -> int | None:
        if side[0] == "constant":
            return side[1]
        if side[0] == "element":
            # The bound may be in the carry; then the body must not change it.
            position = self._returned(side[1])
            if position is not None and self._side(self.body, position) == side:
                return self._initial(side[1])
        return None

    def _returned(self, index: int) -> int | None:
        """Give the position of the body's instruction that returns element ``index``, or None."""
        root = self.body.instructions[self.body.root]
        returns = root.opcode == "tuple" and index < len(root.operands)
        return root.operands[index] if returns else None

    def _added(self, computation, position, index) -> int | None:
        """Give the number that is added to element ``index``; None if that isn't clear."""
        instruction = computation.instructions[position]
        side = self._side(computation, position)
        if side == ("element", index):
            return 0
        operands = instruction.operands
        if instruction.opcode == "fusion" and len(instruction.calls) == 1:
            inner = self.module.computations[instruction.calls[0]]
            root = inner.instructions[inner.root]
            if root.opcode not in ("add", "subtract") or len(root.operands) != 2:
                return None
            sides = [
                self._outer(computation, operands, self._side(inner, o)) for o in root.operands
            ]
            opcode = root.opcode
        elif instruction.opcode in ("add", "subtract") and len(operands) == 2:
            sides = [self._side(computation, o) for o in operands]
            opcode = instruction.opcode
        else:
            return None
        if opcode == "add" and sides[1] == ("element", index):
            sides.reverse()
        if sides[0] != ("element", index) or sides[1] is None:
            return None
        number = sides[1][1] if sides[1][0] == "constant" else None
        if number is None and sides[1][0] == "element" and sides[1][1] != index:
            number = self._value(sides[1])
        if number is None:
            return None
        return number if opcode == "add" else -number


def _follow(computation: hm.Computation, position: int, index: int) -> int | None:
    """Give the constant at ``index`` of a tuple, or None."""
    passed_on = ("copy", "optimization-barrier", "opt-barrier")
    instruction = hm.behind(computation, position, passed_on)
    if instruction.opcode != "tuple" or not 0 <= index < len(instruction.operands):
        return None
    element = computation.instructions[instruction.operands[index]]
    for _ in range(64):
        if element.opcode in ("copy", "bitcast", "reshape", "copy-done") and element.operands:
            before = computation.instructions[element.operands[0]]
            if before.shape.element_type != element.shape.element_type:
                return None
            element = before
        elif element.opcode == "copy-start" and element.operands:
            element = computation.instructions[element.operands[0]]
        else:
            break
    return _constant(element) if element.opcode == "constant" else None


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
