"""Evaluate loops and branches in the proof."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

from shardrules.hlo.known.ranges import Exact, Ranged, Value
from shardrules.hlo.known.values import Values
from shardrules.hlo.proof import collectives as hc
from shardrules.hlo.proof import customcalls, loops
from shardrules.hlo.proof.evaluation import Proof, Visit
from shardrules.hlo.reader import devices as hd
from shardrules.hlo.reader import module as hm

_MAX_STEPS = 12  # iterations of a loop to evaluate one by one


def loop(visit: Visit) -> Value:
    """Evaluate a while loop."""
    proof, _, _, instruction, operands, guard = visit
    if len(operands) != 1:
        why = f"while {instruction.name!r} has {len(operands)} operands"
        return proof.abandoned(instruction.calls, why, operands)
    (carry,) = operands

    def start(index: int) -> int | None:
        element = carry[index] if isinstance(carry, tuple) and index < len(carry) else None
        if not isinstance(element, Exact) or element.array[0].size != 1:
            return None
        numbers = element.array.reshape(-1)
        return int(numbers[0]) if (numbers == numbers[0]).all() else None

    stated = loops.stated_count(instruction)
    trips = loops.counted(proof.module, instruction, start)
    evaluated = _LoopEvaluation(proof, instruction, guard)
    # There are three ways. Try the most exact way first. With a known count, evaluate iterations
    # until the carry repeats. Otherwise, evaluate iterations while the predicate's numbers are
    # known. If neither succeeds, join all iterations. If the text states a count that differs from
    # the counter's arithmetic, neither count is certain, so assume any count.
    if trips is not None and stated not in (None, trips):
        trips, value = None, None
    elif trips is not None:
        value = evaluated.unrolled(carry, trips)
    else:
        value = evaluated.stepped(carry, stated)
    if value is None:
        value = evaluated.settled(carry, trips)
    if value is None:
        why = f"while {instruction.name!r} reached no fixpoint"
        value = proof.abandoned(instruction.calls, why, operands)
    return value


# After how many iterations an element stops changing, and the collectives that compute it.
_Age = tuple[int, frozenset[int]]


class _LoopEvaluation:
    """One evaluation of a loop."""

    def __init__(self, proof: Proof, instruction: hm.Instruction, guard: int):
        self.proof = proof
        self.values = proof.values
        self.guard = guard
        self.condition, self.body = loops.parts(proof.module, instruction)
        self.root = self.body.instructions[self.body.root]

    def settled(self, start: Value, trips: int | None) -> Value | None:
        """Evaluate until the carry's states no longer change; None if they never settle."""
        # Any iteration may be the last, so the result is the join of all iterations. Each pass
        # joins the body's result to the body's argument, until nothing changes (Kleene's
        # iteration). This ends because a join only refines the proven partition of the devices, and
        # there are finitely many partitions. But if each element of the carry takes its value from
        # the next element, each pass changes only one element. So after 32 passes all elements get
        # one merged state, which is sound and converges soon. If the carry still changes after 64
        # passes (changes of causes and blockers count, too), the loop becomes a blocker.
        carry, guard = start, self.guard
        states = self.values.states
        for step in range(64):
            before = guard
            # The predicate decides which devices run the next iteration, so its state guards the
            # body's collectives. Like the carry, the guard only becomes finer with each pass.
            predicate = self.values.collapse(self.proof.evaluate(self.condition, (carry,), guard))
            if trips is None:
                guard = states.refine(guard, predicate)
            out = self.proof.evaluate(self.body, (carry,), guard)
            joined = self.values.join(carry, out)
            if joined == carry and guard == before:
                if trips is not None:  # all devices leave together, with the body's result
                    return out if trips else start
                # Devices that leave at different iterations hold the carries of those iterations.
                run = _diverged(self.values, carry, predicate)
                together = states[predicate].proven == hd.EQUAL
                return _apart_as(self.values, run, out) if together else run
            carry = joined
            if step >= 32:
                carry = self.values.with_state(carry, self.values.collapse(carry))
        return None

    def unrolled(self, carry: Value, trips: int) -> Value | None:
        """Evaluate a known number of iterations; None if that takes too long."""
        if not self.values.unwritten or trips < 2 or not isinstance(carry, tuple):
            return self._iterated(carry, trips)

        def renamed(value: Value, names: dict[int, int]) -> Value:
            return self.values.mapped(value, lambda state: names.get(state, state))

        # An uninitialised buffer that the loop fills gets another state inside the loop, so that a
        # write into the buffer counts as filling it. Parts that stay unwritten get their old state
        # back after the loop.
        filled, empty = self._filled(carry, trips), list(self.values.unwritten)
        inside = {state: customcalls.empty_buffer(self.values, True) for state in empty}
        carry = tuple([renamed(c, inside if k in filled else {}) for k, c in enumerate(carry)])
        value = self._iterated(carry, trips)
        outside = {new: old for old, new in inside.items() if new != old}
        return value if value is None else renamed(value, outside)

    def _filled(self, carry: tuple[Value, ...], trips: int) -> set[int]:
        """Return the carry's buffers that a loop fills, judged by its first two iterations."""
        # The second iteration must write as many elements as the first, at another place, and so
        # many that all iterations together fill the buffer. The other iterations are assumed to do
        # the same; FILLED states this assumption.
        steps = [carry]
        for _ in range(2):
            following = self.proof.evaluate(self.body, (steps[-1],), self.guard)
            if not isinstance(following, tuple) or len(following) != len(carry):
                return set()
            steps.append(following)
        filled = set()
        for k, shape in enumerate(self.root.shape.elements or ()):
            left = [_unwritten_count(self.values, s[k], shape.element_count) for s in steps]
            each = left[1] - left[2]
            if left[0] - left[1] == each > 0 and left[2] <= (trips - 2) * each:
                filled.add(k)
        return filled

    def _iterated(self, carry: Value, trips: int) -> Value | None:
        """Evaluate iterations until the carry repeats; None if it doesn't repeat soon."""
        # This is more exact than a join, because an iteration may replace the initial carry: a
        # carry that starts sharded and is summed in each iteration ends equal. Equal carries have
        # equal successors, so from the first repetition on the carries form a cycle, and the number
        # of trips gives the last carry's place in the cycle.
        history = [carry]
        seen = {carry: 0}
        for step in range(1, min(trips, _MAX_STEPS) + 1):
            self.proof.evaluate(self.condition, (carry,), self.guard)  # to record its collectives
            carry = _forget(carry, self.proof.evaluate(self.body, (carry,), self.guard))
            if carry in seen:
                start = seen[carry]
                return history[start + (trips - start) % (step - start)]
            seen[carry] = step
            history.append(carry)
        if trips > _MAX_STEPS:
            return None
        # The condition runs once more than the body.
        self.proof.evaluate(self.condition, (carry,), self.guard)
        return carry

    def stepped(self, carry: Value, stated: int | None) -> Value | None:
        """Evaluate a loop whose predicate is known on every device; None if it isn't known."""
        guard = self.guard
        for step in range(_MAX_STEPS + 1):
            predicate = self.proof.evaluate(self.condition, (carry,), guard)
            if not isinstance(predicate, Exact) or predicate.array[0].size != 1:
                return None
            running = predicate.array.reshape(-1)
            if stated is not None and (running != (step < stated)).any():
                return None
            if not running.any():
                return carry
            guard = self.values.states.refine(guard, predicate.state)
            following = self.proof.evaluate(self.body, (carry,), guard)
            # Devices that run take the body's result, and the others keep their carry. An element
            # that no longer changes is the same in both, so it keeps its old value.
            which = Exact(predicate.state, running.astype(np.int64))
            chosen = self.values.choose(which, [carry, following])
            if isinstance(carry, tuple) and isinstance(chosen, tuple):
                same = {k for k, age in self.ages.items() if self._stays(*age, step, guard)}
                both = enumerate(zip(carry, chosen))
                chosen = tuple([old if k in same else new for k, (old, new) in both])
            carry = chosen
        return None

    def _stays(self, count: int, collectives: frozenset[int], step: int, guard: int) -> bool:
        """Return whether an element has settled by now, and its collectives run in whole groups."""
        proven, transfer = self.values.states[guard].proven, self.proof.transfer
        records = [self.proof.records.get((self.body.name, p)) for p in collectives]
        return count <= step and all(r and transfer.uniform(proven, r.channel) for r in records)

    @functools.cached_property
    def ages(self) -> dict[int, _Age]:
        """Return the carry's elements that stop changing, and after how many iterations they do."""
        # An element that the body passes on never changes (age 0). A deterministic function of
        # elements of age n or less stops changing one iteration later (age n + 1). Each round of
        # the outer loop adds the elements that depend only on elements already in ``ages``. It ends
        # with a round that adds none.
        returned = self.root.operands if self.root.opcode == "tuple" else ()
        passed = [_passed(self.body, k, self.proof.module.unknown) for k in range(len(returned))]
        ages: dict[int, _Age] = {k: (0, frozenset()) for k, e in enumerate(passed) if e == k}
        while True:
            made: list[_Age | None] = []
            for position, instruction in enumerate(self.body.instructions):
                pure = self.proof.reach.deterministic(instruction)
                element = hm.parameter_element(self.body, instruction)
                if element is not None:
                    made.append(ages.get(element) if pure else None)
                    continue
                parts = [made[o] for o in instruction.operands]
                own = frozenset([position] if instruction.opcode in hc.KINDS else [])
                known = [p for p in parts if p is not None]
                if (
                    len(known) < len(parts)
                    or instruction.opcode == "parameter"
                    or not (own or pure)
                ):
                    made.append(None)
                    continue
                count = max([count for count, _ in known], default=0)
                made.append((count, own.union(*[collectives for _, collectives in known])))
            fresh = {k: made[o] for k, o in enumerate(returned) if k not in ages}
            later = {k: (age[0] + 1, age[1]) for k, age in fresh.items() if age is not None}
            if not later:
                return ages
            ages |= later


def _unwritten_count(values: Values, value: Value, count: int) -> int:
    """Return how many of a value's ``count`` elements are still uninitialised."""
    if type(value) is int:
        return count if value in values.unwritten else 0
    if not isinstance(value, Ranged):
        return 0
    starts = (0, *[stop for stop, _ in value.cuts])
    return sum(b - a for a, (b, s) in zip(starts, value.cuts) if s in values.unwritten)


def _apart_as(values: Values, value: Value, out: Value) -> Value:
    """Return a loop's value; its devices are apart if they are apart in the body's result."""
    # A value that differs after every iteration differs after the loop (if the loop runs at all),
    # even if the carry was equal at the start.
    if isinstance(value, tuple) and isinstance(out, tuple) and len(value) == len(out):
        return tuple([_apart_as(values, v, o) for v, o in zip(value, out)])
    if type(value) is not int or type(out) is not int:
        return value
    return values.states.changed(value, apart=values.states[out].apart)


def _forget(before: Value, after: Value) -> Value:
    """Return the next carry with a state in place of each exact number that has changed.

    A carry that contains a counter's numbers would never repeat.
    """
    if isinstance(after, Exact) and after != before:
        return after.state
    if isinstance(after, tuple) and isinstance(before, tuple) and len(before) == len(after):
        return tuple([_forget(x, y) for x, y in zip(before, after)])
    return after


def _diverged(values: Values, value: Value, predicate: int) -> Value:
    """Refine the result of a loop or branch by its predicate; exact numbers stay exact."""
    if not predicate or isinstance(value, Exact):
        return value
    if isinstance(value, tuple):
        return tuple([_diverged(values, v, predicate) for v in value])
    return values.with_state(value, values.states.maybe_equal(predicate))


def conditional(visit: Visit) -> Value:
    """Evaluate all branches of a conditional, and combine their results element by element."""
    proof, computation, _, instruction, operands, guard = visit
    branches = [proof.module.computations[c] for c in instruction.calls]
    if len(operands) != len(branches) + 1:
        why = (
            f"conditional {instruction.name!r} has {len(branches)} branches and "
            f"{len(operands)} operands"
        )
        return proof.abandoned(instruction.calls, why, operands)
    # The branch number's state guards the collectives in all branches. If the numbers are known,
    # each device takes its branch's result. If not, the result joins all branches and differs
    # where the branch numbers may differ, except for elements that all branches compute alike.
    which, values = operands[0], proof.values
    state = values.collapse(which)
    inner = values.states.refine(guard, state)
    results = [proof.evaluate(b, (v,), inner) for b, v in zip(branches, operands[1:])]
    shape = computation.instructions[instruction.operands[0]].shape
    numbers = None
    if isinstance(which, Exact) and not shape.dimensions:
        numbers = which.array.reshape(-1).astype(np.int64)
        if shape.element_type == "pred":  # branch 0 is the true branch
            numbers = 1 - numbers
        last = len(results) - 1
        numbers = np.where((numbers < 0) | (numbers > last), last, numbers)

    def chosen(options: list[Value], same: list[int]) -> Value:
        """Return each device's result; ``same`` maps a branch to the first with the same result."""
        if not any(same):
            return options[0]
        if numbers is not None:
            return values.choose(Exact(state, np.array(same)[numbers]), options)
        joined = functools.reduce(values.join, options)
        return values.with_state(joined, values.states.maybe_equal(state))

    tuples = [r for r in results if isinstance(r, tuple)]
    widths = {*map(len, tuples)}
    if len(tuples) < len(results) or len(widths) > 1:
        return chosen(results, list(range(len(results))))
    elements = []
    for index in range(widths.pop()):
        first: dict[Any, int] = {}
        same = [
            first.setdefault(_origin(proof, computation, operand, branch, index) or n, n)
            for n, (operand, branch) in enumerate(zip(instruction.operands[1:], branches))
        ]
        elements.append(chosen([r[index] for r in tuples], same))
    return tuple(elements)


def _origin(
    proof: Proof, computation: hm.Computation, operand: int, branch: hm.Computation, index: int
) -> Any:
    """Return a key for the value at ``index``, or None; equal keys mean equal values."""
    unknown = proof.module.unknown
    root = branch.instructions[branch.root]
    if root.opcode == "tuple" and index < len(root.operands):
        result = _behind_copies(branch, root.operands[index], unknown)
        constant = branch.instructions[result]
        if constant.opcode == "constant" and constant.start not in unknown:
            if "..." in constant.literal:  # the text elides its value, so it equals only itself
                return "elided", branch.name, result
            return "constant", constant.shape, constant.literal
    element = _passed(branch, index, unknown)
    packed = computation.instructions[operand]
    if element is None or packed.opcode != "tuple" or element >= len(packed.operands):
        return None
    return "passed", _behind_copies(computation, packed.operands[element], unknown)


def _behind_copies(computation: hm.Computation, position: int, unknown: dict[int, str]) -> int:
    """Return the position of the value behind copies, if there are any."""
    # A copy with an unknown attribute may be more than a copy.
    while (
        instruction := computation.instructions[position]
    ).opcode == "copy" and instruction.start not in unknown:
        position = instruction.operands[0]
    return position


def _passed(computation: hm.Computation, index: int, unknown: dict[int, str]) -> int | None:
    """Return the element of the parameter that is returned unchanged at ``index``, or None."""
    root = computation.instructions[computation.root]
    if root.opcode != "tuple" or index >= len(root.operands):
        return None
    behind = _behind_copies(computation, root.operands[index], unknown)
    instruction = computation.instructions[behind]
    if {instruction.start, root.start} & unknown.keys():
        return None
    return hm.parameter_element(computation, instruction)
