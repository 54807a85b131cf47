"""Reduce-scatters that XLA for TPU writes as a fusion of an all-reduce and a slice of its result.

XLA emits code for the fusion that moves as much as a reduce-scatter. The fusion contains a pad of
the operand, the all-reduce, the offset of the device's piece, and the slice at that offset::

    %all-reduce-scatter (input: f32[8008,768]) -> f32[1008,768] {
      %pad = f32[8064,768] pad(%input, %zero), padding=0_56x0_0
      %all-reduce.1 = f32[8064,768] all-reduce(%pad), ...
      %multiply.2 = u32[] multiply(%partition-id.3, %constant.5)
      ROOT %slice = f32[1008,768] dynamic-slice(%all-reduce.1, %multiply.2, %constant.6), ...

The reduce-scatter has the fusion's phase, source line and name. A fusion in any other form counts
as an all-reduce.
"""

from __future__ import annotations

import collections
import dataclasses
from typing import Any

import numpy as np

from shardrules.hlo.known import exact, ranges
from shardrules.hlo.known.ranges import Exact
from shardrules.hlo.proof import collectives as hc
from shardrules.hlo.proof.evaluation import Proof
from shardrules.hlo.reader import module as hm

_EMITTER, _NAME = "AllReduceScatterFusion", "all-reduce-scatter"
_NUMBERS = exact.OPCODES | {"constant", "partition-id", "replica-id"}
_FORMS = frozenset("bitcast reshape copy transpose convert".split())


# A fusion that is a reduce-scatter: the computation that contains it, its position there, and the
# reduce-scatter's channel, with each group's members in the order of their pieces.
Scatter = tuple[hm.Computation, int, hc.Channel]


def find(proof: Proof) -> dict[tuple[str, int], Scatter]:
    """Return the reduce-scatters by the computation and the position of their all-reduce."""
    module = proof.module
    named = any(name.startswith(_NAME) for name in module.computations)
    if not named and not module.mentions(_EMITTER):
        return {}
    callers: collections.Counter[str] = collections.Counter()
    fusions: dict[str, tuple[hm.Computation, int]] = {}
    for computation in module.computations.values():
        for position, (instruction, calls) in zip(computation.calling, computation.calls()):
            callers.update(calls)
            if instruction.start not in module.unknown and _emitted(instruction, calls):
                fusions[calls[0]] = computation, position
    scatters: dict[tuple[str, int], Scatter] = {}
    for name, (computation, position) in fusions.items():
        inside = module.computations[name]
        places = [p for p, i in enumerate(inside.instructions) if i.opcode in hc.OPCODES]
        if len(places) == callers[name] == 1:
            channel = _read(proof, inside, places[0])
            if channel is not None:
                scatters[name, places[0]] = computation, position, channel
    return scatters


def _emitted(fusion: hm.Instruction, calls: tuple[str, ...]) -> bool:
    """Return whether the emitter or the computation's name marks a fusion as a reduce-scatter."""
    if len(calls) != 1 or (fusion.opcode, fusion.attribute("kind")) != ("fusion", "kCustom"):
        return False
    config = fusion.attribute("backend_config") or ""
    return _EMITTER in config or calls[0].startswith(_NAME)


def _read(proof: Proof, inside: hm.Computation, position: int) -> hc.Channel | None:
    """Return the reduce-scatter's channel; None if the fusion has another form."""
    reduce = inside.instructions[position]
    record = proof.records.get((inside.name, position))
    unknown = any(i.start in proof.module.unknown for i in inside.instructions)
    if reduce.opcode != "all-reduce" or record is None or record.channel.unknown or unknown:
        return None
    # The all-reduce must take all of the fusion's parameters, in order, and only the slices may use
    # its result.
    groups = record.channel.groups
    slices = _slices(inside, position)
    made_of = [hm.behind(inside, operand, {*_FORMS, "pad"}) for operand in reduce.operands]
    in_order = [("parameter", str(number)) for number in range(len(made_of))]
    whole = [(i.opcode, i.literal.strip()) for i in made_of] == in_order
    if slices is None or not whole or groups.matrix is None:
        return None
    # The slices' starts give each device's piece. All operands must be split in the same order.
    numbers = _numbers(proof, inside)
    read = [_order(inside, piece, numbers, groups.matrix) for piece in slices]
    orders = [r for r in read if r is not None]
    if len(orders) < len(read) or any((order != orders[0][1]).any() for _, order in orders):
        return None
    members = np.take_along_axis(groups.matrix, orders[0][1], axis=1).reshape(-1)
    return dataclasses.replace(
        record.channel,
        kind="reduce-scatter",
        groups=dataclasses.replace(groups, members=members),
        ordered=True,
        dimension=",".join(dict.fromkeys(str(along) for along, _ in orders)),
    )


def _slices(inside: hm.Computation, position: int) -> list[hm.Instruction] | None:
    """Return each operand's slice if the slices are the all-reduce's only users, else None."""
    instructions, users = inside.instructions, inside.users()
    root = instructions[inside.root]
    count = len(instructions[position].operands)
    takers = [position]
    if instructions[position].shape.is_tuple:
        elements = {instructions[t].attribute("index"): t for t in users[position]}
        takers = [elements.get(str(k), position) for k in range(count)]
        if len(users[position]) != count:
            return None
    slices = []
    for place in root.operands if root.opcode == "tuple" else [inside.root]:
        while instructions[place].opcode in _FORMS and instructions[place].operands:
            place = instructions[place].operands[0]
        slices.append(place)
    sliced_by = [instructions[place] for place in slices]
    alone = [users[taker] == [place] for taker, place in zip(takers, slices)]
    sliced = [
        i.opcode == "dynamic-slice" and i.operands[:1] == (t,) for i, t in zip(sliced_by, takers)
    ]
    return sliced_by if len(sliced_by) == count and all(alone + sliced) else None


def _numbers(proof: Proof, inside: hm.Computation) -> list[Any]:
    """Evaluate the instructions that compute integers from device ids; None for all others."""
    values: list[Any] = []
    for position, instruction in enumerate(inside.instructions):
        operands = [values[o] for o in instruction.operands]
        if instruction.opcode not in _NUMBERS or any(o is None for o in operands):
            values.append(None)
            continue
        values.append(proof.operation(inside, position, operands))
    return values


def _order(
    inside: hm.Computation, piece: hm.Instruction, numbers: list[Any], members: np.ndarray
) -> tuple[int, np.ndarray] | None:
    """Return the split dimension, and each group's order of members by their pieces."""
    full = inside.instructions[piece.operands[0]].shape.dimensions
    sizes = tuple(ranges.read_ints(piece.attribute("dynamic_slice_sizes")))
    cut = [k for k, (whole, size) in enumerate(zip(full, sizes)) if whole != size]
    count = members.shape[1]
    if len(sizes) != len(full) or len(cut) != 1 or len(piece.operands) != len(full) + 1:
        return None
    (along,) = cut
    if full[along] != count * sizes[along]:
        return None
    start = numbers[piece.operands[along + 1]]
    if type(start) is int:  # the text elides the table of starts; XLA numbers members in order
        return along, np.broadcast_to(np.arange(count), members.shape)
    is_exact = isinstance(start, Exact)
    rows = exact.clamped_index(start.array, full[along] - sizes[along]) if is_exact else None
    if rows is None or rows.size == 1:
        return None
    starts = rows[members]
    order = np.argsort(starts, axis=1, kind="stable")
    expected = np.arange(count) * sizes[along]
    got = np.take_along_axis(starts, order, axis=1)
    return (along, order) if (got == expected).all() else None
