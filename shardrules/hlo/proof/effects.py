"""Evaluates collectives and custom calls."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np

from shardrules.hlo.known import states as hs
from shardrules.hlo.known.ranges import Ranged, Started
from shardrules.hlo.proof import collectives as hc
from shardrules.hlo.proof import customcalls
from shardrules.hlo.proof.evaluation import Proof, Record
from shardrules.hlo.reader import devices as hd

# Each element of the result depends on the operand's elements at the same place only.
_PLACEWISE = ("all-reduce", "collective-permute", "collective-broadcast")


def collective(proof: Proof, computation, position, instruction, operands, guard):
    """Evaluate a collective, and record its operands."""
    values = proof.values
    kind = hc.OPCODES[instruction.opcode]
    where = (computation.name, position)
    what = f"{kind} {instruction.name!r}"
    record = proof.records.get(where)
    if record is not None:
        channel = record.channel
    else:
        relations, own = values.relations, proof.reach.applied(instruction)
        channel = hc.read_channel(proof.module, instruction, kind, relations, proof.cache)
        if own:
            channel = dataclasses.replace(channel, unread=f"a reduction by {own}")
    if channel.unread:
        operands = [values.blocked(f"{what} has {channel.unread}", [v]) for v in operands]
    if record is None:
        proof.records[where] = Record(list(operands), guard, channel)
    else:
        record.operands = [values.join(a, b) for a, b in zip(record.operands, operands)]
        record.guard = values.states.refine(record.guard, guard)
    if channel.unread:
        return values.merged(operands)
    how = hc.result_how(instruction, channel)

    def moved(state: int) -> int:
        return proof.transfer.state(channel, how, state, guard, what)

    result = _result(proof, instruction, channel, operands, moved)
    if hs.rounds(channel.reduction, instruction.shape):
        result = values.evened(result)
    if not instruction.opcode.endswith("-start"):
        return result
    parts = instruction.shape.elements or (instruction.shape,)
    if kind == "all-reduce" and not parts[0].is_tuple and len(parts) == len(operands):
        return result  # only JAX 0.12 and newer return the operands as well
    return Started(operands[0] if len(operands) == 1 else tuple(operands), result)


def _result(proof: Proof, instruction, channel: hc.Channel, operands, moved) -> Any:
    """Give a collective's value; ``moved`` maps an operand's state to the result's."""
    values, kind = proof.values, channel.kind
    if kind == "ragged-all-to-all" or kind == "all-to-all" and len(operands) > 1:
        # A member's piece k may come from any operand of member k.
        return moved(values.merged(operands))
    if hc.updates_in_place(instruction, kind):
        # The target keeps its own data around the moved slice.
        whole = values.merged(operands)
        return values.states.refine(moved(whole), whole)
    results = []
    for value in operands:
        if isinstance(value, Ranged) and kind in _PLACEWISE:
            results.append(Ranged(tuple((stop, moved(part)) for stop, part in value.cuts)))
        else:
            results.append(moved(values.collapse(value)))
    return results[0] if len(results) == 1 else tuple(results)


def _spread(proof: Proof, computation, instruction, operands) -> Any:
    """Evaluate the start or done of a TPU collective spread over fusions; None for other calls."""
    target = (instruction.attribute("custom_call_target") or "").strip('"')
    if target not in (customcalls.ASYNC_START, customcalls.ASYNC_DONE):
        return None
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


def custom_call(proof: Proof, computation, position, instruction, operands, guard):
    values = proof.values
    if operands:
        spread = _spread(proof, computation, instruction, operands)
        if spread is not None:
            return spread
    where = (computation.name, position)
    resolution = proof.opaque.get(where)
    if resolution is None:
        resolution = proof.opaque[where] = customcalls.resolve(
            proof.module, instruction, proof.registry
        )
    if resolution.uninitialised:
        return customcalls.empty_buffer(values, False)
    if resolution.effects is None:
        return values.blocked(resolution.blocker, operands)
    own = proof.reach.applied(instruction)
    if own:
        return values.blocked(f"custom call {instruction.name!r} applies {own}", operands)
    if values.unwritten and resolution.support is not None:
        # A well-formed kernel does not read the uninitialised buffer that it writes its result to.
        written = values.states.intern(hs.State(supports=(customcalls.FILLED,)))
        aliased = customcalls.aliased(instruction)
        operands = [
            written if type(o) is int and o in values.unwritten and n in aliased else o
            for n, o in enumerate(operands)
        ]
    state = values.merged(operands)
    if resolution.support is not None:
        state = values.states.refine(
            state, values.states.intern(hs.State(supports=(resolution.support,)))
        )
    if len(resolution.effects) > 1 and not values.vary_alike(operands):
        state = values.states.evened(state)  # each output may depend on other operands
    parts = [_effect(proof, e, state, resolution, guard) for e in resolution.effects]
    if instruction.shape.elements is None:
        return parts[0] if parts else state
    return tuple(parts)


def _effect(proof: Proof, effect, state: int, resolution, guard: int) -> int:
    states = proof.values.states
    if effect.kind == "local":
        return state
    if effect.kind == "unknown":
        return states.blocked(resolution.blocker, state)
    # A rule names axes; only the module's mesh gives their sizes.
    sizes = proof.default_mesh if resolution.mesh is None else resolution.mesh
    if (
        not sizes
        or math.prod(sizes.values()) != proof.values.relations.partitions
        or not set(effect.axes) <= set(sizes)
    ):
        what = resolution.blocker.what.split(" is tagged")[0].split(" has a rule")[0]
        what += (
            f" communicates over {','.join(effect.axes)}, and no known mesh with these axes has "
            f"{proof.values.relations.partitions} partitions"
        )
        return states.blocked(resolution.blocker._replace(what=what), state)
    key = ("mesh", effect.kind, effect.axes, tuple(sizes.items()))
    channel = proof.cache.get(key)
    if channel is None:
        channel = proof.cache[key] = _mesh_channel(proof, effect, sizes)
    what = resolution.support.what
    if effect.kind == "typed":
        old, relation = states[state], channel.groups.relation
        causes = [*old.causes, (relation, hs.Cause(what, "is declared to vary"))]
        return states.intern(
            old._replace(
                proven=relation,
                optimistic=relation,
                apart=hd.EQUAL,
                causes=states.causes(causes if relation else ()),
            )
        )
    how = "join" if effect.kind == "join" else "exchange"
    return proof.transfer.state(channel, how, state, guard, what)


def _mesh_channel(proof: Proof, effect, sizes: dict[str, int]) -> hc.Channel:
    relations = proof.values.relations
    # A typed output is equal along the axes that its type does not name.
    along = [n for n in sizes if (n in effect.axes) != (effect.kind == "typed")]
    rows = hd.Mesh([("", relations.replicas), *sizes.items()], relations).lines(along)
    lists = rows.reshape(-1), np.full(len(rows), rows.shape[1])
    return hc.Channel("custom-call", hc.make_groups(lists, relations), True)
