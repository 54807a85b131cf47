"""Loops and branches in the proof."""

from __future__ import annotations

from typing import Any

import numpy as np

from shardrules.hlo import loops
from shardrules.hlo import module as hm
from shardrules.hlo import states as hs
from shardrules.hlo.ranges import Exact
from shardrules.hlo.values import Values

_MAX_STEPS = 12  # iterations of a loop that are followed one by one


class Control(Values):
    """The part of the proof that evaluates while and conditional."""

    module: hm.Module

    def _called(self, instruction, key: str) -> hm.Computation | None:
        name = (instruction.attribute(key) or "").lstrip("%")
        return self.module.computations.get(name)

    def _while(self, computation, position, instruction, operands, guard):
        condition = self._called(instruction, "condition")
        body = self._called(instruction, "body")
        if condition is None or body is None or len(operands) != 1:
            return self._blocked(hs.Blocker(f"while {instruction.name!r} without a condition or "
                                            "a body"), operands)
        trips = self._trip_counts.get((computation.name, position), -1)
        if trips == -1:
            trips = self._trip_counts[computation.name, position] = loops.trip_count(
                self.module, computation, instruction)
        if trips is not None:
            found = self._unrolled(condition, body, operands[0], guard, trips)
            if found is not None:
                return found
        else:
            found = self._stepped(condition, body, operands[0], guard)
            if found is not None:
                return found
        carry = operands[0]
        inner = guard
        for step in range(64):
            before = inner
            predicate = self.collapse(self.evaluate(condition, (carry,), inner))
            if trips is None:
                inner = self.states.refine(inner, predicate)
            out = self.evaluate(body, (carry,), inner)
            joined = self.join(carry, out)
            if joined == carry and inner == before:
                if trips is not None:  # what a loop gives that is known to run is what body gives
                    return out if trips else operands[0]
                return self._keep(body, carry, self._diverged(carry, predicate))
            carry = joined
            if step >= 32:  # a chain of carries: take them all together
                carry = self.with_state(carry, self.collapse(carry))
        return self._blocked(hs.Blocker(f"while {instruction.name!r} reached no fixpoint"),
                             operands)

    def _unrolled(self, condition, body, carry: Any, guard: int, trips: int) -> Any:
        """Follow a loop of known trip count until its carry's states repeat; None if too long.

        What a carry starts as doesn't matter after the iteration that replaces it: a carry that
        starts sharded and is summed in each iteration comes out equal.
        """
        history = [carry]
        seen = {carry: 0}
        for step in range(1, min(trips, _MAX_STEPS) + 1):
            self.evaluate(condition, (carry,), guard)  # for the collectives in it
            carry = self._forget(carry, self.evaluate(body, (carry,), guard))
            if carry in seen:
                start = seen[carry]
                return history[start + (trips - start) % (step - start)]
            seen[carry] = step
            history.append(carry)
        if trips > _MAX_STEPS:
            return None
        self.evaluate(condition, (carry,), guard)  # it runs once more than the body
        return carry

    def _stepped(self, condition, body, carry: Any, guard: int) -> Any:
        """Follow a loop whose predicate is known on every device; None where it isn't."""
        for _ in range(_MAX_STEPS + 1):
            predicate = self.evaluate(condition, (carry,), guard)
            if not isinstance(predicate, Exact) or predicate.array[0].size != 1:
                return None
            running = predicate.array.reshape(-1)
            if not running.any():
                return carry
            guard = self.states.refine(guard, predicate.state)
            following = self._keep(body, carry, self.evaluate(body, (carry,), guard))
            chosen = self.choose(Exact(predicate.state, running.astype(np.int64), False),
                                 [carry, following])
            carry = self._keep(body, carry, chosen)
        return None

    def _keep(self, body: hm.Computation, carry: Any, out: Any) -> Any:
        """Put back the elements that a loop's body passes on: they stay, whoever leaves when."""
        if not isinstance(carry, tuple) or not isinstance(out, tuple) or len(carry) != len(out):
            return out
        return tuple([c if _passed(body, k) == k else o
                      for k, (c, o) in enumerate(zip(carry, out))])

    def _forget(self, before: Any, after: Any) -> Any:
        """Replace numbers that an iteration changes, as a counter, by their states."""
        if isinstance(after, Exact) and after != before:
            return after.state
        if isinstance(after, tuple) and isinstance(before, tuple) and len(before) == len(after):
            return tuple([self._forget(x, y) for x, y in zip(before, after)])
        return after

    def _diverged(self, value: Any, predicate: int) -> Any:
        """Refine what a loop or branch gives by its predicate; known numbers stay known."""
        if not predicate or isinstance(value, Exact):
            return value
        if isinstance(value, tuple):
            return tuple([self._diverged(v, predicate) for v in value])
        return self.with_state(value, predicate)

    def _conditional(self, computation, position, instruction, operands, guard):
        branches = [self.module.computations[c] for c in instruction.calls]
        if not operands or len(operands) != len(branches) + 1:
            return self._blocked(hs.Blocker(f"conditional {instruction.name!r} has "
                                            f"{len(branches)} branches and {len(operands)} "
                                            "operands"), operands)
        shape = computation.instructions[instruction.operands[0]].shape
        which = operands[0]
        state = self.collapse(which)
        inner = self.states.refine(guard, state)
        results = [self.evaluate(b, (v,), inner) for b, v in zip(branches, operands[1:])]
        if isinstance(which, Exact) and not shape.dimensions:
            # A predicate's branch 0 is its true one.
            numbers = which.array.reshape(-1)
            if shape.element_type == "pred":
                numbers = np.where(numbers, 0, 1)
            found = self.choose(Exact(which.state, np.asarray(numbers), False), results)
        else:
            found = results[0]
            for result in results[1:]:
                found = self.join(found, result)
            found = self.with_state(found, state)
        if not isinstance(found, tuple):
            return found
        return tuple([self._same_passed(computation, instruction, branches, operands, k, value)
                      for k, value in enumerate(found)])

    def _same_passed(self, computation, instruction, branches, operands, index, value) -> Any:
        """Give the element that all branches pass on, if it is one and the same."""
        origins = set()
        passed = None
        for branch, operand, given in zip(branches, instruction.operands[1:], operands[1:]):
            element = _passed(branch, index)
            packed = computation.instructions[operand]
            if element is None or packed.opcode != "tuple" or not isinstance(given, tuple) or (
                    element >= len(given)):
                return value
            origin = packed.operands[element]
            while computation.instructions[origin].opcode == "copy":
                origin = computation.instructions[origin].operands[0]
            origins.add(origin)
            passed = given[element]
        return passed if len(origins) == 1 else value


def _passed(computation: hm.Computation, index: int) -> int | None:
    """Give the parameter's element that a computation returns unchanged as element ``index``."""
    root = computation.instructions[computation.root]
    if root.opcode != "tuple" or index >= len(root.operands):
        return None
    instruction = computation.instructions[root.operands[index]]
    while instruction.opcode == "copy" and instruction.operands:
        instruction = computation.instructions[instruction.operands[0]]
    if instruction.opcode != "get-tuple-element" or len(instruction.operands) != 1:
        return None
    if computation.instructions[instruction.operands[0]].opcode != "parameter":
        return None
    text = instruction.attribute("index") or ""
    return int(text) if text.isdigit() and len(text) < 10 else None
