"""The proof: the devices on which each value of the program is equal.

The table of handlers says what each opcode does to the values of its operands (see ``states``);
``evaluation`` applies it to a whole module. Every step errs towards "may differ": anything that the
proof does not understand becomes a named blocker.
"""

from __future__ import annotations

import re
from typing import Any

import numpy as np

from shardrules.hlo.known import exact, ranges
from shardrules.hlo.known import states as hs
from shardrules.hlo.known.ranges import Exact, Started
from shardrules.hlo.known.values import ELEMENTWISE, LOCAL, Values
from shardrules.hlo.proof import collectives as hc
from shardrules.hlo.proof import control, effects, inputs
from shardrules.hlo.proof.evaluation import PARAMETER, Handlers, Proof
from shardrules.hlo.proof.reach import APPLIERS
from shardrules.hlo.reader import devices as hd
from shardrules.hlo.reader import module as hm

_SOURCES = {
    "rng": "draws its own random numbers on each device",
    "rng-get-and-update-state": "reads each device's own random state",
    "infeed": "reads each device's own infeed",
}
_INDEX = re.compile(r", index=(\d{1,9})(?=[,\n]|$)")


def prove(
    module: hm.Module,
    registry: Any,
    parameters: list[Any],
    states: hs.States,
    mesh: dict[str, int] | None = None,
) -> Proof:
    """Evaluate a module."""
    size = sum(len(c.instructions) for c in module.computations.values())
    values = Values(states, budget_for(size))
    proof = Proof(module, registry, values, HANDLERS, mesh)
    proof.reach.find_unfollowed(HANDLERS.by_opcode)
    proof.result = proof.evaluate(module.entry, tuple(parameters), 0)
    return proof


def budget_for(size: int) -> int:
    """Say how many instructions to evaluate at most in a module that holds ``size``."""
    # A module could call computations with ever new arguments, in exponential time. Real modules
    # need less than 3 evaluations for each instruction.
    return 40 * size + 100_000


def _constant(proof: Proof, computation, position, instruction, operands, guard):
    shape = instruction.shape
    if exact.dtype(shape) is None:
        return 0
    key = (shape, instruction.literal)
    if key not in proof.cache:
        rows = exact.literal(instruction.literal, shape)
        proof.cache[key] = 0 if rows is None else Exact(0, rows, False)
    return proof.cache[key]


def _device_id(proof: Proof, computation, position, instruction, operands, guard):
    """Give each device's partition or replica, if the text states the counts."""
    opcode, values = instruction.opcode, proof.values
    if opcode not in proof.cache:
        count, partitions = values.relations.device_count, values.relations.partitions
        ids = np.arange(count, dtype=np.uint32)
        kinds, numbers = partitions, ids % partitions
        if opcode == "replica-id":
            kinds, numbers = values.relations.replicas, ids // partitions
        if (
            not values.relations.counts_stated and count > 1 and kinds == 1
        ):  # devices may be partitions or replicas
            why = "partition-id or replica-id, but the text doesn't say how many (pass mesh=)"
            proof.cache[opcode] = values.blocked(why, ())
        else:
            proof.cache[opcode] = values.device_number(numbers, opcode)
    return proof.cache[opcode]


def _mixed(proof: Proof, computation, position, instruction, operands, guard):
    return proof.values.general(computation, instruction, operands)


def _iota(proof: Proof, computation, position, instruction, operands, guard):
    shape = instruction.shape
    kind = exact.dtype(shape)
    places = ranges.read_ints(instruction.attribute("iota_dimension"))
    if kind in (None, np.bool_) or len(places) != 1 or shape.element_count > ranges.MAX_ELEMENTS:
        return 0
    if not 0 <= places[0] < len(shape.dimensions):
        return 0
    sizes = [1] * (len(shape.dimensions) + 1)
    sizes[places[0] + 1] = -1
    line = np.arange(shape.dimensions[places[0]]).astype(kind).reshape(sizes)
    return Exact(0, np.ascontiguousarray(np.broadcast_to(line, (1,) + shape.dimensions)), False)


def _tuple(proof: Proof, computation, position, instruction, operands, guard):
    return tuple(operands)


def _element(proof: Proof, computation, position, instruction, operands, guard):
    value = operands[0] if operands else 0
    match = _INDEX.match(instruction.text, instruction.attributes_start, instruction.end)
    text = match[1] if match else instruction.attribute("index")
    if text is None or not match and not re.fullmatch(r"\d{1,9}", text):
        raise proof.reach.error(instruction, "has no index")
    index = int(text)
    if isinstance(value, tuple):
        if index >= len(value):
            raise proof.reach.error(instruction, f"takes element {index} of {len(value)}")
        return value[index]
    if isinstance(value, Started) and index < 2:
        return value.result if index else value.operand
    return proof.values.collapse(value)


def _same(proof: Proof, computation, position, instruction, operands, guard):
    if not operands:
        return 0
    if len(operands) > 1:
        rest = proof.values.merged(operands[1:])
        return proof.values.with_state(operands[0], proof.values.states.evened(rest))
    return operands[0]


def _copy_start(proof: Proof, computation, position, instruction, operands, guard):
    value = operands[0] if operands else 0
    return Started(value, value)


def _done(proof: Proof, computation, position, instruction, operands, guard):
    value = operands[0] if operands else 0
    return value.result if isinstance(value, Started) else proof.values.collapse(value)


def _applier(proof: Proof, computation, position, instruction, operands, guard):
    own = proof.reach.applied(instruction)
    if own:
        return proof.values.blocked(f"{instruction.opcode} applies {own}", operands)
    state = proof.values.merged(operands)
    several = instruction.shape.elements is not None
    # The second half of a reduce's operands are the initial values.
    count = len(operands) // 2 if instruction.opcode == "reduce" else len(operands)
    if several and not proof.values.vary_alike(operands[:count]):
        return proof.values.states.evened(state)
    called = [proof.module.computations[name] for name in instruction.calls]
    if any(hs.rounds(c.instructions[c.root].opcode, instruction.shape) for c in called):
        return proof.values.states.evened(state)
    return state


def _evening(proof: Proof, computation, position, instruction, operands, guard):
    """Evaluate an elementwise op that may make different operands equal."""
    value = proof.values.general(computation, instruction, operands)
    if not value or isinstance(value, Exact) or not hs.cancels(computation, instruction):
        return value
    return proof.values.evened(value)


def _strange(proof: Proof, computation, position, instruction, operands, guard) -> int:
    return proof.values.blocked(proof.reach.unknown_attribute(instruction), operands)


def _source(proof: Proof, computation, position, instruction, operands, guard):
    states, partitions = proof.values.states, proof.values.relations.partitions
    what = f"{instruction.opcode} {instruction.name!r}"
    own = states.source(hd.DISTINCT, hs.Cause(what, _SOURCES[instruction.opcode]))
    if instruction.opcode != "infeed" or partitions == 1 or _infeeds_elsewhere(proof):
        return own
    sharding = instruction.attribute("sharding")
    copies = inputs.replicated_leaves(instruction.shape, sharding, partitions)
    replica = states.relations.intern(np.arange(states.relations.device_count) // partitions)
    same = states.source(replica, hs.Cause(what, "differs between replicas"))
    return inputs.tree(instruction.shape, [same if c else own for c in copies], states)


def _infeeds_elsewhere(proof: Proof) -> bool:
    if "infeeds" not in proof.cache:
        proof.cache["infeeds"] = any(
            not c.is_entry and any(i.opcode == "infeed" for i in c.instructions)
            for c in proof.module.computations.values()
        )
    return proof.cache["infeeds"]


def _unusual(proof: Proof, computation, position, instruction, operands, guard) -> Any:
    opcode = instruction.opcode
    if opcode.endswith("-done") or opcode.endswith("-update"):
        if operands and isinstance(operands[0], Started):
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


def _call(proof: Proof, computation, position, instruction, operands, guard):
    if len(instruction.calls) != 1:
        count = len(instruction.calls)
        why = f"{instruction.opcode} {instruction.name!r} names {count} computations"
        return proof.abandoned(instruction.calls, why, operands)
    return proof.evaluate(proof.module.computations[instruction.calls[0]], tuple(operands), guard)


def _async_start(proof: Proof, computation, position, instruction, operands, guard):
    result = _call(proof, computation, position, instruction, operands, guard)
    return Started(tuple(operands), result)


_BY_OPCODE: dict[str, Any] = {
    **dict.fromkeys((*ELEMENTWISE, *LOCAL)),
    **dict.fromkeys(hs.EVENING, _evening),
    "parameter": PARAMETER,
    "iota": _iota,
    "concatenate": _mixed,
    "pad": _mixed,
    "dynamic-update-slice": _mixed,
    "constant": _constant,
    "tuple": _tuple,
    "get-tuple-element": _element,
    "fusion": _call,
    "call": _call,
    "while": control.loop,
    "conditional": control.conditional,
    "custom-call": effects.custom_call,
    "optimization-barrier": _same,
    "opt-barrier": _same,
    "domain": _same,
    "add-dependency": _same,
    "copy-start": _copy_start,
    "async-start": _async_start,
    "async-update": _same,
    "async-done": _done,
    # XLA prints asynchronous fusions like this on GPU (JAX 0.12).
    "fusion-start": _async_start,
    "fusion-done": _done,
    "call-start": _async_start,
    "call-done": _done,
    "partition-id": _device_id,
    "replica-id": _device_id,
    **dict.fromkeys(hc.OPCODES, effects.collective),
    **dict.fromkeys(APPLIERS, _applier),
    **dict.fromkeys(_SOURCES, _source),
}
HANDLERS = Handlers(_BY_OPCODE, _unusual, _strange)
