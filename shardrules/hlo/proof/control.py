"""Loops and branches in the proof."""

from __future__ import annotations

from typing import Any

import numpy as np

from shardrules.hlo.known.ranges import Exact, Ranged
from shardrules.hlo.known.values import Values
from shardrules.hlo.proof import collectives as hc
from shardrules.hlo.proof import customcalls, loops
from shardrules.hlo.proof.evaluation import Proof
from shardrules.hlo.reader import devices as hd
from shardrules.hlo.reader import module as hm

_MAX_STEPS = 12  # iterations of a loop to evaluate one by one


def loop(proof: Proof, computation, position, instruction, operands, guard):
    """Evaluate a while."""
    condition, body = loops.parts(proof.module, instruction)
    if len(operands) != 1:
        why = f"while {instruction.name!r} has {len(operands)} operands"
        return proof.abandoned(instruction.calls, why, operands)
    stated = loops.stated_count(instruction)
    trips = loops.counted(proof.module, instruction, lambda index: _everywhere(operands[0], index))
    # If the text states another count, neither is certain: assume any.
    if trips is not None and stated not in (None, trips):
        trips, value = None, None
    elif trips is not None:
        value = _unrolled(proof, condition, body, operands[0], guard, trips)
    else:
        value = _stepped(proof, condition, body, operands[0], guard, stated)
    if value is None:
        value = _settle(proof, condition, body, operands[0], guard, trips)
    if value is None:
        why = f"while {instruction.name!r} reached no fixpoint"
        value = proof.abandoned(instruction.calls, why, operands)
    return value


def _settle(proof: Proof, condition, body, start: Any, guard: int, trips: int | None) -> Any:
    """Evaluate a loop until its carry's states no longer change; None if they never settle."""
    carry = start
    inner = guard
    for step in range(64):
        before = inner
        predicate = proof.values.collapse(proof.evaluate(condition, (carry,), inner))
        if trips is None:
            inner = proof.values.states.refine(inner, predicate)
        out = proof.evaluate(body, (carry,), inner)
        joined = proof.values.join(carry, out)
        if joined == carry and inner == before:
            if trips is not None:  # the count is known: the result is the body's
                return out if trips else start
            run = _diverged(proof.values, carry, predicate)
            if proof.values.states[predicate].proven == hd.EQUAL:
                run = _apart_as(proof.values, run, out)
            return _keep(proof, body, carry, run)
        carry = joined
        if step >= 32:  # a long chain of carries: give all elements one state
            carry = proof.values.with_state(carry, proof.values.collapse(carry))
    return None


def _apart_as(values: Values, value: Any, out: Any) -> Any:
    """Give a loop's value the differences that its body makes."""
    # A value that differs after every iteration differs after the loop, if the loop runs at all,
    # even if the carry was equal at the start.
    if isinstance(value, tuple) and isinstance(out, tuple) and len(value) == len(out):
        return tuple([_apart_as(values, v, o) for v, o in zip(value, out)])
    if type(value) is not int or type(out) is not int:
        return value
    return values.states.changed(value, apart=values.states[out].apart)


def _unrolled(proof: Proof, condition, body, carry: Any, guard: int, trips: int) -> Any:
    """Evaluate a loop of known trip count until its carry repeats; None if it takes too long."""
    # A carry's initial value no longer matters once an iteration replaces it: a carry that starts
    # sharded and is summed in each iteration ends equal.
    if not proof.values.unwritten or trips < 2 or not isinstance(carry, tuple):
        return _iterated(proof, condition, body, carry, guard, trips)
    filled = _filled(proof, body, carry, guard, trips)
    inside = {s: customcalls.empty_buffer(proof.values, True) for s in list(proof.values.unwritten)}
    value = _iterated(
        proof,
        condition,
        body,
        tuple([_renamed(c, inside) if k in filled else c for k, c in enumerate(carry)]),
        guard,
        trips,
    )
    outside = {new: old for old, new in inside.items() if new != old}
    return value if value is None else _renamed(value, outside)


def _filled(proof: Proof, body, carry: tuple, guard: int, trips: int) -> set[int]:
    """Find the buffers that a loop fills, by what its first two iterations write."""
    # The second iteration must write as many elements as the first, at another place, and enough
    # that all iterations together fill the buffer. FILLED states the assumption that the other
    # iterations go on like this.
    steps: list[Any] = [carry]
    for _ in range(2):
        steps.append(proof.evaluate(body, (steps[-1],), guard))
    if any(not isinstance(s, tuple) or len(s) != len(carry) for s in steps):
        return set()
    shapes = body.instructions[body.root].shape.elements or ()
    filled = set()
    for k, shape in enumerate(shapes):
        left = [_unwritten_count(proof.values, s[k], shape.element_count) for s in steps]
        each = left[1] - left[2]
        if left[0] - left[1] == each > 0 and left[2] <= (trips - 2) * each:
            filled.add(k)
    return filled


def _unwritten_count(values: Values, value: Any, count: int) -> int:
    if type(value) is int:
        return count if value in values.unwritten else 0
    if not isinstance(value, Ranged):
        return 0
    starts = (0, *[stop for stop, _ in value.cuts])
    return sum(b - a for a, (b, s) in zip(starts, value.cuts) if s in values.unwritten)


def _renamed(value: Any, names: dict[int, int]) -> Any:
    if type(value) is int:
        return names.get(value, value)
    if isinstance(value, tuple):
        return tuple([_renamed(v, names) for v in value])
    if isinstance(value, Ranged):
        return Ranged(tuple((stop, names.get(s, s)) for stop, s in value.cuts))
    return value


def _iterated(proof: Proof, condition, body, carry: Any, guard: int, trips: int) -> Any:
    history = [carry]
    seen = {carry: 0}
    for step in range(1, min(trips, _MAX_STEPS) + 1):
        proof.evaluate(condition, (carry,), guard)  # to record its collectives
        carry = _forget(carry, proof.evaluate(body, (carry,), guard))
        if carry in seen:
            start = seen[carry]
            return history[start + (trips - start) % (step - start)]
        seen[carry] = step
        history.append(carry)
    if trips > _MAX_STEPS:
        return None
    proof.evaluate(condition, (carry,), guard)  # the condition runs once more than the body
    return carry


def _stepped(proof: Proof, condition, body, carry: Any, guard: int, stated: int | None) -> Any:
    """Evaluate a loop whose predicate is known on every device; None if it isn't."""
    settling = _settling(body, proof.reach.deterministic, proof.module.strange)
    for step in range(_MAX_STEPS + 1):
        predicate = proof.evaluate(condition, (carry,), guard)
        if not isinstance(predicate, Exact) or predicate.array[0].size != 1:
            return None
        running = predicate.array.reshape(-1)
        if stated is not None and (running != (step < stated)).any():
            return None
        if not running.any():
            return carry
        guard = proof.values.states.refine(guard, predicate.state)
        following = _keep(proof, body, carry, proof.evaluate(body, (carry,), guard))
        chosen = proof.values.choose(
            Exact(predicate.state, running.astype(np.int64), False), [carry, following]
        )
        chosen = _keep(proof, body, carry, chosen)
        if isinstance(carry, tuple) and isinstance(chosen, tuple):
            chosen = tuple(
                [
                    before if _settled(proof, body, settling.get(k), step, guard) else after
                    for k, (before, after) in enumerate(zip(carry, chosen))
                ]
            )
        carry = chosen
    return None


def _settled(proof: Proof, body: hm.Computation, settling, step: int, guard: int) -> bool:
    if settling is None or settling[0] > step:
        return False
    proven = proof.values.states[guard].proven
    channels = [proof.channels.get((body.name, p)) for p in settling[1]]
    return all(c is not None and proof.transfer.uniform(proven, c) for c in channels)


def _keep(proof: Proof, body: hm.Computation, carry: Any, out: Any) -> Any:
    """Keep the elements that a loop's body passes on: they never change."""
    if not isinstance(carry, tuple) or not isinstance(out, tuple) or len(carry) != len(out):
        return out
    return tuple(
        [
            c if _passed(body, k, proof.module.strange) == k else o
            for k, (c, o) in enumerate(zip(carry, out))
        ]
    )


def _forget(before: Any, after: Any) -> Any:
    if isinstance(after, Exact) and after != before:
        return after.state
    if isinstance(after, tuple) and isinstance(before, tuple) and len(before) == len(after):
        return tuple([_forget(x, y) for x, y in zip(before, after)])
    return after


def _diverged(values: Values, value: Any, predicate: int) -> Any:
    """Refine the result of a loop or branch by its predicate; exact numbers stay exact."""
    if not predicate or isinstance(value, Exact):
        return value
    if isinstance(value, tuple):
        return tuple([_diverged(values, v, predicate) for v in value])
    return values.with_state(value, values.states.evened(predicate))


def conditional(proof: Proof, computation, position, instruction, operands, guard):
    """Evaluate a conditional."""
    branches = [proof.module.computations[c] for c in instruction.calls]
    if len(operands) != len(branches) + 1:
        why = (
            f"conditional {instruction.name!r} has {len(branches)} branches and "
            f"{len(operands)} operands"
        )
        return proof.abandoned(instruction.calls, why, operands)
    shape = computation.instructions[instruction.operands[0]].shape
    which = operands[0]
    state = proof.values.collapse(which)
    inner = proof.values.states.refine(guard, state)
    results = [proof.evaluate(b, (v,), inner) for b, v in zip(branches, operands[1:])]
    if isinstance(which, Exact) and not shape.dimensions:
        # Branch 0 of a predicate is the true branch.
        numbers = which.array.reshape(-1)
        if shape.element_type == "pred":
            numbers = np.where(numbers, 0, 1)
        value = _chosen(proof, computation, instruction, which, numbers, results)
    else:
        value = results[0]
        for result in results[1:]:
            value = proof.values.join(value, result)
        value = proof.values.with_state(value, proof.values.states.evened(state))
    if not isinstance(value, tuple):
        return value
    value = list(value)
    for index in range(len(value)):
        origins = set(_origins(proof, computation, instruction, index))
        if len(origins) == 1 and None not in origins:  # all branches return the same value
            first = results[0]
            value[index] = first[index] if isinstance(first, tuple) else value[index]
    return tuple(value)


def _origins(proof: Proof, computation, instruction, index: int) -> list[Any]:
    """Say what each branch of a conditional returns at ``index``."""
    return [
        _origin(computation, operand, proof.module.computations[name], index, proof.module.strange)
        for name, operand in zip(instruction.calls, instruction.operands[1:])
    ]


def _chosen(proof: Proof, computation, instruction, which: Exact, numbers, results) -> Any:
    """Give each device the result of its branch; branches that return the same count as one."""
    numbers = np.asarray(numbers).astype(np.int64)
    last = len(results) - 1
    numbers = np.where((numbers < 0) | (numbers > last), last, numbers)
    widths = {len(r) if isinstance(r, tuple) else -1 for r in results}
    if len(widths) > 1 or -1 in widths:
        return proof.values.choose(Exact(which.state, numbers, False), results)
    elements = []
    for index in range(widths.pop()):
        first: dict[Any, int] = {}
        origins = _origins(proof, computation, instruction, index)
        same = [first.setdefault(o or ("branch", n), n) for n, o in enumerate(origins)]
        number = Exact(which.state, np.array(same)[numbers], False)
        elements.append(proof.values.choose(number, [r[index] for r in results]))
    return tuple(elements)


def _everywhere(carry: Any, index: int) -> int | None:
    element = carry[index] if isinstance(carry, tuple) and 0 <= index < len(carry) else None
    if not isinstance(element, Exact) or element.array[0].size != 1:
        return None
    numbers = element.array.reshape(-1)
    return int(numbers[0]) if (numbers == numbers[0]).all() else None


def _origin(
    computation: hm.Computation,
    operand: int,
    branch: hm.Computation,
    index: int,
    strange: dict[int, str],
) -> Any:
    root = branch.instructions[branch.root]
    if root.opcode == "tuple" and index < len(root.operands):
        result = _behind_copies(branch, root.operands[index], strange)
        constant = branch.instructions[result]
        if constant.opcode == "constant" and constant.start not in strange:
            if "..." in constant.literal:  # elided: equal to itself only
                return "elided", branch.name, result
            return "constant", constant.shape, constant.literal
    element = _passed(branch, index, strange)
    packed = computation.instructions[operand]
    if element is None or packed.opcode != "tuple" or element >= len(packed.operands):
        return None
    return "passed", _behind_copies(computation, packed.operands[element], strange)


def _behind_copies(computation: hm.Computation, position: int, strange: dict[int, str]) -> int:
    # A copy with an unknown attribute may be more than a copy.
    while (
        instruction := computation.instructions[position]
    ).opcode == "copy" and instruction.start not in strange:
        position = instruction.operands[0]
    return position


def _settling(
    body: hm.Computation, pure, strange: dict[int, str]
) -> dict[int, tuple[int, tuple[int, ...]]]:
    """Find the elements of a loop's carry that stop changing after some iterations."""
    # An element that the body passes on never changes. A deterministic function of such elements
    # no longer changes after the first iteration, a function of those after the second, and so on.
    root = body.instructions[body.root]
    if root.opcode != "tuple":
        return {}
    needs: dict[int, tuple[set[int], tuple[int, ...]]] = {}
    for index, result in enumerate(root.operands):
        needed = _needs(body, result, pure)
        if needed is not None:
            needs[index] = needed
    settled: dict[int, tuple[int, tuple[int, ...]]] = {
        k: (0, ()) for k in range(len(root.operands)) if _passed(body, k, strange) == k
    }
    while True:
        ready = [k for k in needs if k not in settled and needs[k][0] <= set(settled)]
        if not ready:
            return settled
        fresh = {}
        for k in ready:
            own = [settled[e] for e in needs[k][0]]
            fresh[k] = (
                1 + max((count for count, _ in own), default=0),
                tuple(sorted({*needs[k][1], *(p for _, ps in own for p in ps)})),
            )
        settled.update(fresh)


def _needs(body: hm.Computation, result: int, pure) -> tuple[set[int], tuple[int, ...]] | None:
    """List the carry's elements that determine a result, and the collectives on the way."""
    elements: set[int] = set()
    collectives = []
    stack, seen = [result], {result}
    while stack:
        position = stack.pop()
        instruction = body.instructions[position]
        element = hm.parameter_element(body, instruction)
        if element is not None and pure(instruction):
            elements.add(element)
            continue
        if instruction.opcode in hc.KINDS:
            collectives.append(position)
        elif instruction.opcode == "parameter" or not pure(instruction):
            return None
        fresh = [o for o in instruction.operands if o not in seen]
        seen.update(fresh)
        stack.extend(fresh)
    return elements, tuple(sorted(collectives))


def _passed(computation: hm.Computation, index: int, strange: dict[int, str]) -> int | None:
    """Give the parameter's element that a computation returns unchanged at ``index``, or None."""
    root = computation.instructions[computation.root]
    if root.opcode != "tuple" or index >= len(root.operands):
        return None
    behind = _behind_copies(computation, root.operands[index], strange)
    instruction = computation.instructions[behind]
    if {instruction.start, root.start} & strange.keys():
        return None
    return hm.parameter_element(computation, instruction)
