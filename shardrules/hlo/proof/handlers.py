"""The proof: the devices on which each value of the program is equal.

The table of handlers says what each opcode does to the values of its operands (see ``states``);
``evaluation`` applies it to a whole module. Every step errs towards "may differ": anything that the
proof does not understand becomes a named blocker.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from shardrules.hlo.known import exact, ranges
from shardrules.hlo.known import states as hs
from shardrules.hlo.known.ranges import Exact, Ranged, Started, Value
from shardrules.hlo.known.values import ELEMENTWISE, LOCAL, Values
from shardrules.hlo.proof import collectives as hc
from shardrules.hlo.proof import control, customcalls, effects, slices
from shardrules.hlo.proof.evaluation import (
    APPLIERS,
    Handler,
    Handlers,
    Proof,
    Record,
    Visit,
    parameter,
)
from shardrules.hlo.reader import devices as hd
from shardrules.hlo.reader import module as hm

_SOURCES = {
    "rng": "draws its own random numbers on each device",
    "rng-get-and-update-state": "reads each device's own random state",
    "infeed": "reads each device's own infeed",
}
_UPDATES = ("async-update", "call-update", "fusion-update")
_INDEX = re.compile(r", index=(\d{1,9})(?=[,\n]|$)")


def prove(
    module: hm.Module,
    registry: Any,
    parameters: list[Value],
    states: hs.States,
    mesh: dict[str, int] | None = None,
) -> Proof:
    """Evaluate a module from its parameters' values, and return the proof with its records."""
    size = sum(len(c.original.instructions) for c in module.computations.values())
    values = Values(states, budget_for(size))
    proof = Proof(module, registry, values, HANDLERS, mesh)
    proof.reach.find_unfollowed(HANDLERS.by_opcode)
    proof.result = proof.evaluate(module.entry, tuple(parameters), 0)
    return proof


def budget_for(size: int) -> int:
    """Return the most instructions to evaluate in a module of ``size`` instructions."""
    # If a module calls its computations with new arguments each time, evaluation takes exponential
    # time. Real modules need fewer than 3 evaluations for each instruction.
    return 40 * size + 100_000


def _constant(visit: Visit) -> Value:
    proof, instruction = visit.proof, visit.instruction
    cache, shape = proof.cache, instruction.shape
    if exact.dtype(shape) is None:
        return 0
    value: Value | None = cache.get(instruction.start)  # set if a loop evaluates it again
    if value is None:
        key = (shape, instruction.literal)
        if key not in cache:
            rows = exact.literal(instruction.literal, shape)
            cache[key] = 0 if rows is None else Exact(0, rows)
        value = cache[instruction.start] = cache[key]
    return value


def _device_id(visit: Visit) -> Value:
    proof, instruction = visit.proof, visit.instruction
    values, relations = proof.values, proof.values.relations
    ids = np.arange(relations.device_count, dtype=np.uint32)
    numbers, count = ids % relations.partitions, relations.partitions
    if instruction.opcode == "replica-id":
        numbers, count = ids // relations.partitions % relations.replicas, relations.replicas
    if not relations.counts_stated and relations.device_count > 1 and count == 1:
        # The text leaves open whether the devices are partitions or replicas.
        why = "partition-id or replica-id, but the text doesn't say how many (pass mesh=)"
        return values.blocked(why, ())
    return values.device_number(numbers, instruction.opcode)


def _general(visit: Visit) -> Value:
    return visit.proof.values.general(visit.computation, visit.instruction, visit.operands)


def _iota(visit: Visit) -> Value:
    shape = visit.instruction.shape
    kind = exact.dtype(shape)
    places = ranges.read_ints(visit.instruction.attribute("iota_dimension"))
    if kind in (None, np.bool_) or len(places) != 1 or shape.element_count > ranges.MAX_ELEMENTS:
        return 0
    if not 0 <= places[0] < len(shape.dimensions):
        return 0
    sizes = [1] * (len(shape.dimensions) + 1)
    sizes[places[0] + 1] = -1
    line: np.ndarray = np.arange(shape.dimensions[places[0]]).astype(kind).reshape(sizes)
    return Exact(0, np.ascontiguousarray(np.broadcast_to(line, (1,) + shape.dimensions)))


def _tuple(visit: Visit) -> Value:
    return tuple(visit.operands)


def _element(visit: Visit) -> Value:
    proof, instruction, operands = visit.proof, visit.instruction, visit.operands
    (value,) = operands[:1]
    if instruction.start in proof.cache and type(value) is tuple:  # a loop evaluates it again
        known: int = proof.cache[instruction.start]
        if known < len(value):
            return value[known]
    match = _INDEX.match(instruction.text, instruction.attributes_start, instruction.end)
    text = match[1] if match else instruction.attribute("index")
    if text is None or (not match and not re.fullmatch(r"\d{1,9}", text)):
        raise proof.reach.error(instruction, "has no index")
    index = int(text)
    if isinstance(value, tuple):
        if index >= len(value):
            raise proof.reach.error(instruction, f"takes element {index} of {len(value)}")
        if instruction.text is proof.module.text:
            proof.cache[instruction.start] = index
        return value[index]
    if isinstance(value, Started) and index < 2:
        return value.result if index else value.operand
    return proof.values.collapse(value)


def _first_operand(visit: Visit) -> Value:
    """Return the first operand's value, refined by the other operands, which it waits for."""
    proof, operands = visit.proof, visit.operands
    if len(operands) > 1:
        rest = proof.values.merged(operands[1:])
        return proof.values.with_state(operands[0], proof.values.states.maybe_equal(rest))
    return operands[0]


def _copy_start(visit: Visit) -> Value:
    return Started(visit.operands[0], visit.operands[0])


def _done(visit: Visit) -> Value:
    value = visit.operands[0]
    return value.result if isinstance(value, Started) else visit.proof.values.collapse(value)


def _applies_computation(visit: Visit) -> Value:
    """Evaluate an op that applies a computation to its operands, such as reduce or sort."""
    proof, instruction, operands = visit.proof, visit.instruction, visit.operands
    own = proof.reach.applied(instruction)
    if own:
        return proof.values.blocked(f"{instruction.opcode} applies {own}", operands)
    state = proof.values.merged(operands)
    several = instruction.shape.elements is not None
    # The second half of a reduce's operands are the initial values.
    count = len(operands) // 2 if instruction.opcode == "reduce" else len(operands)
    if several and not proof.values.vary_alike(operands[:count]):
        return proof.values.states.maybe_equal(state)
    called = [proof.module.computations[name].original for name in instruction.calls]
    if any(hs.rounds(c.instructions[c.root].opcode, instruction.shape) for c in called):
        return proof.values.states.maybe_equal(state)
    return state


def _equalizing(visit: Visit) -> Value:
    """Evaluate an elementwise op that may make different operands equal."""
    proof, computation, _, instruction, operands, _ = visit
    values = proof.values
    for operand in operands:
        if type(operand) is not int:
            value = values.general(computation, instruction, operands)
            break
    else:
        value = values.merged(operands)
    if not value or isinstance(value, Exact):
        return value
    if type(value) is int and values.states[value].apart == hd.EQUAL:
        return value  # it already may be equal
    return values.maybe_equal(value) if hs.cancels(computation, instruction) else value


def _unknown_attribute(visit: Visit) -> int:
    why = visit.proof.reach.unknown_attribute(visit.instruction)
    return visit.proof.values.blocked(why, visit.operands)


def _source(visit: Visit) -> int:
    opcode, name = visit.instruction.opcode, visit.instruction.name
    cause = hs.Cause(f"{opcode} {name!r}", _SOURCES[opcode])
    return visit.proof.values.states.source(hd.DISTINCT, cause)


def _other_opcode(visit: Visit) -> Value:
    proof, computation, _, instruction, operands, _ = visit
    opcode = instruction.opcode
    if opcode.endswith("-done") or opcode.endswith("-update"):
        if len(operands) == 1 and isinstance(operands[0], Started):
            return operands[0] if opcode.endswith("-update") else operands[0].result
        if opcode[:-5] in hc.OPCODES and operands:
            # An all-reduce-start may return its result alone; other starts return operands as well.
            started = computation.instructions[instruction.operands[0]].opcode
            alone = started == "all-reduce-start"
            return operands[0] if alone else proof.values.collapse(operands[0])
    elif opcode.endswith("-start"):
        base = opcode[:-6]
        if base in ELEMENTWISE or base in LOCAL:
            return Started(tuple(operands), proof.values.merged(operands))
        if base == "custom-call":
            why = "an asynchronous custom call whose computation the text doesn't show"
            return Started(tuple(operands), proof.values.blocked(why, operands))
    why = f"opcode {opcode!r} ({instruction.name!r}), which the proof doesn't know"
    return proof.values.blocked(why, operands)


def _call(visit: Visit) -> Value:
    proof, _, _, instruction, operands, guard = visit
    if len(instruction.calls) != 1:
        count = len(instruction.calls)
        why = f"{instruction.opcode} {instruction.name!r} names {count} computations"
        return proof.abandoned(instruction.calls, why, operands)
    called = proof.module.computations[instruction.calls[0]]
    return proof.evaluate(called, tuple(operands), guard)


def _async_start(visit: Visit) -> Started:
    return _started_call(visit, visit.instruction, tuple(visit.operands))


def _async_update(visit: Visit) -> Value:
    """Evaluate an update; XLA for TPUs (JAX 0.12) passes some calls' operands only here."""
    begun, *brought = visit.operands
    if not brought or not isinstance(begun, Started) or not isinstance(begun.operand, tuple):
        return _first_operand(visit)
    start = hm.behind(visit.computation, visit.position, _UPDATES)
    return _started_call(visit, start, (*begun.operand, *brought))


def _started_call(visit: Visit, start: hm.Instruction, given: tuple[Value, ...]) -> Started:
    """Evaluate an asynchronous instruction's computation, once it has all of its operands."""
    proof, instruction = visit.proof, visit.instruction
    called = [proof.module.computations[name] for name in start.calls]
    count = len(called[0].parameters) if called else 0
    if len(given) < count:
        why = f"{start.opcode} {start.name!r} has {len(given)} of its {count} operands so far"
        return Started(given, proof.values.blocked(why, given))
    if len(given) > count and instruction is not start:
        why = f"{instruction.opcode} {instruction.name!r} brings operands that nothing takes"
        return Started(given, proof.abandoned(start.calls, why, given))
    return Started(given, _call(visit._replace(instruction=start, operands=given)))


# Each element of the result depends only on the operands' elements at the same place.
_PLACEWISE = ("all-reduce", "collective-permute", "collective-broadcast")


def _collective(visit: Visit) -> Value:
    """Evaluate a collective, and record its operands."""
    # Every evaluation joins its operands into the collective's record. Judging needs this: a
    # collective is redundant only if its operands are equal at all calls and on all trips.
    proof, computation, position, instruction, operands, guard = visit
    values = proof.values
    kind = hc.OPCODES[instruction.opcode]
    what = f"{kind} {instruction.name!r}"
    record = proof.records.get((computation.name, position))
    if record is not None:
        channel = record.channel
    else:
        relations, own = values.relations, proof.reach.applied(instruction)
        channel = hc.read_channel(proof.module, instruction, kind, relations, proof.cache)
        if own:
            channel = dataclasses.replace(channel, unknown=f"a reduction by {own}")
    operands = _recorded(visit, what, operands, channel)
    if channel.unknown:
        return values.merged(operands)
    how = hc.result_how(instruction, channel)

    def moved(state: int) -> int:
        return proof.transfer.state(channel, how, state, guard, what)

    result = _result(visit, channel, operands, moved)
    if hs.rounds(channel.reduction, instruction.shape):
        result = values.maybe_equal(result)
    if not instruction.opcode.endswith("-start"):
        return result
    parts = instruction.shape.elements or (instruction.shape,)
    if kind == "all-reduce" and not parts[0].is_tuple and len(parts) == len(operands):
        return result  # only JAX 0.12 and newer return the operands as well
    return Started(operands[0] if len(operands) == 1 else tuple(operands), result)


def _recorded(
    visit: Visit, what: str, operands: Sequence[Value], channel: hc.Channel
) -> Sequence[Value]:
    """Record the operands of one evaluation of a collective; return them, blocked if unknown."""
    values, guard, where = visit.proof.values, visit.guard, (visit.computation.name, visit.position)
    record = visit.proof.records.get(where)
    if channel.unknown:
        operands = [values.blocked(f"{what} has {channel.unknown}", [v]) for v in operands]
    if record is None:
        visit.proof.records[where] = Record(list(operands), guard, channel)
    else:
        record.operands = [values.join(a, b) for a, b in zip(record.operands, operands)]
        record.guard = values.states.refine(record.guard, guard)
    return operands


def _send(visit: Visit) -> int:
    """Record the data that a send takes to another TPU slice; its recv-done will return it."""
    proof, computation, position, instruction, operands, guard = visit
    where = (computation.name, position)
    if where not in proof.records:
        channel = slices.read_send(instruction, proof.values.relations)
    else:
        channel = proof.records[where].channel
    if channel is not None and operands:
        what = f"{channel.kind} {instruction.name!r}"
        sent = _recorded(visit, what, operands[:1], channel)
        proof.sent[where] = proof.values.collapse(sent[0]), guard
    return proof.values.merged(operands)


def _recv_done(visit: Visit) -> Value:
    """Return the data from another TPU slice: the result of the collective that a send begins."""
    proof, computation, position, instruction, _, _ = visit
    receiver, instructions = instruction.operands[0], computation.instructions
    if computation.name not in proof.cache:
        proof.cache[computation.name] = slices.pairs_of(computation)
    sender = proof.cache[computation.name].get(receiver)
    # If the send stands later in the text, its record is from an earlier evaluation.
    if sender is None or sender > position or (computation.name, sender) not in proof.sent:
        return _other_opcode(visit)
    channel = proof.records[computation.name, sender].channel
    state, around = proof.sent[computation.name, sender]
    if channel.unknown:
        return state, state
    what = f"{channel.kind} {instructions[sender].name!r}"
    how = hc.result_how(instructions[sender], channel)
    result = proof.transfer.state(channel, how, state, around, what)
    alone = slices.unreached(channel, proof.values.relations)
    if alone:
        cause = hs.Cause(what, "brings nothing to some devices")
        result = proof.values.states.refine(result, proof.values.states.source(alone, cause))
    return result, 0


def _result(
    visit: Visit, channel: hc.Channel, operands: Sequence[Value], moved: Callable[[int], int]
) -> Value:
    """Return a collective's value; ``moved`` maps an operand's state to the result's."""
    values, kind = visit.proof.values, channel.kind
    if kind == "ragged-all-to-all" or (kind == "all-to-all" and len(operands) > 1):
        # A member's piece k may come from any operand of member k.
        return moved(values.merged(operands))
    if hc.updates_in_place(visit.instruction, kind):
        # The target keeps its own data around the moved slice.
        whole = values.merged(operands)
        return values.states.refine(moved(whole), whole)
    results: list[Value] = []
    for value in operands:
        if isinstance(value, Ranged) and kind in _PLACEWISE:
            results.append(values.mapped(value, moved))
        else:
            results.append(moved(values.collapse(value)))
    return results[0] if len(results) == 1 else tuple(results)


def _spread(visit: Visit, target: str) -> Value | None:
    """Evaluate the start or done of a TPU collective spread over fusions; None if not certain."""
    proof, computation, _, instruction, operands, _ = visit
    inner = [
        (o, v)
        for o, v in zip(instruction.operands, operands)
        if computation.instructions[o].opcode in hc.KINDS
    ]
    if len(inner) != 1:
        return None
    if target == customcalls.ASYNC_DONE:
        return inner[0][1]
    # Only the done may use the unfinished result: pass the operand on and block the rest.
    collective = computation.instructions[inner[0][0]]
    record = proof.records.get((computation.name, inner[0][0]))
    elements = instruction.shape.elements
    if record is None or not elements or len(collective.operands) != 1:
        return None
    moved = computation.instructions[collective.operands[0]].shape
    if elements[0].dimensions != moved.dimensions:
        return None
    what = f"the unfinished result of {collective.opcode} {collective.name!r}"
    unfinished = proof.values.blocked(what, operands)
    return (record.operands[0],) + (unfinished,) * (len(elements) - 1)


def _custom_call(visit: Visit) -> Value:
    """Evaluate a custom call by its target, or by the effects that its rule declares."""
    proof, computation, position, instruction, operands, _ = visit
    values, target = proof.values, customcalls.target_of(instruction)
    if target in customcalls.UNINITIALISED:
        return customcalls.empty_buffer(values, False)
    if target in (customcalls.ASYNC_START, customcalls.ASYNC_DONE):
        spread = _spread(visit, target)
        if spread is not None:
            return spread
    if target == slices.SLICE_ID and values.relations.slices > 1:
        return values.device_number(slices.number_of_slice(values.relations), target)
    where = (computation.name, position)
    resolution = proof.opaque.get(where)
    if resolution is None:
        resolution = proof.opaque[where] = customcalls.resolve(
            proof.module, instruction, proof.registry
        )
    if resolution.effects is None:
        return values.blocked(resolution.blocker, operands)
    own = proof.reach.applied(instruction)
    if own:
        return values.blocked(f"custom call {instruction.name!r} applies {own}", operands)
    if values.unwritten and resolution.support is not None:
        # A well-formed kernel does not read the uninitialised buffer that it writes its result to.
        written = values.states.intern(hs.ValueState(supports=(customcalls.FILLED,)))
        aliased = customcalls.aliased(instruction)
        operands = [
            written if type(o) is int and o in values.unwritten and n in aliased else o
            for n, o in enumerate(operands)
        ]
    state = values.merged(operands)
    if resolution.support is not None:
        state = values.states.refine(
            state, values.states.intern(hs.ValueState(supports=(resolution.support,)))
        )
    if len(resolution.effects) > 1 and not values.vary_alike(operands):
        state = values.states.maybe_equal(state)  # each output may depend on other operands
    parts = [effects.applied(visit, e, state, resolution) for e in resolution.effects]
    if instruction.shape.elements is None:
        return parts[0] if parts else state
    return tuple(parts)


_BY_OPCODE: dict[str, Handler | None] = {
    **dict.fromkeys((*ELEMENTWISE, *LOCAL)),
    **dict.fromkeys(hs.EQUALIZING, _equalizing),
    "parameter": parameter,
    "iota": _iota,
    "concatenate": _general,
    "pad": _general,
    "dynamic-update-slice": _general,
    "constant": _constant,
    "tuple": _tuple,
    "get-tuple-element": _element,
    "fusion": _call,
    "call": _call,
    "while": control.loop,
    "conditional": control.conditional,
    "custom-call": _custom_call,
    "optimization-barrier": _first_operand,
    "opt-barrier": _first_operand,
    "domain": _first_operand,
    "add-dependency": _first_operand,
    "copy-start": _copy_start,
    "async-start": _async_start,
    **dict.fromkeys(_UPDATES, _async_update),
    "async-done": _done,
    # XLA prints asynchronous fusions like this on GPU (JAX 0.12).
    "fusion-start": _async_start,
    "fusion-done": _done,
    "call-start": _async_start,
    "call-done": _done,
    "send": _send,
    "recv-done": _recv_done,
    "partition-id": _device_id,
    "replica-id": _device_id,
    **dict.fromkeys(hc.OPCODES, _collective),
    **dict.fromkeys(APPLIERS, _applies_computation),
    **dict.fromkeys(_SOURCES, _source),
}
HANDLERS = Handlers(_BY_OPCODE, _other_opcode, _unknown_attribute)
