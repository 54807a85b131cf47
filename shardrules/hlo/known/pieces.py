"""Find all-reduces that work as all-gathers: each device adds its own piece to zeros.

XLA for TPU writes a small all-gather like this: each device writes its piece into an array of
zeros, at a place that follows from the device id, and an all-reduce adds these arrays. Elements of
16 bits or fewer are first packed into words, whose parts are added separately.

If the pieces of a group are equal, each member knows the operands of all others and could compute
any reduction of them.
"""

from __future__ import annotations

import collections
import re
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from shardrules.hlo.known.ranges import Exact, Value
from shardrules.hlo.reader import module as hm

_ZERO = re.compile(r"0(\.0*)?|false")
# Nested computations, innermost last, each with the fusion that calls it (None for the outermost).
_Within = list[tuple[hm.Computation, hm.Instruction | None]]
# Opcodes that sum packed words: split into parts, add the parts, join them.
_PACKED = frozenset(
    "add bitcast-convert constant convert or parameter shift-left shift-right-logical".split()
)
# Instructions to follow from the all-reduce to the piece, or from the piece to the zeros.
_STEPS = 16


class Piece(NamedTuple):
    """The piece that a dynamic-update-slice writes at a place that depends on the device id."""

    state: int  # of the written value
    shape: hm.Shape
    dimension: int  # along which the devices' places differ
    starts: Exact  # where the piece begins on each device


def written(full: hm.Shape, block: hm.Shape, state: int, starts: Sequence[Value]) -> Piece | None:
    """Return the piece that an update writes, if its start is known and varies in one dimension."""
    sizes = zip(full.dimensions, block.dimensions)
    partial = [n for n, (whole, part) in enumerate(sizes) if whole != part]
    if len(partial) != 1 or len(starts) != len(full.dimensions) or full.dynamic or block.dynamic:
        return None
    index = starts[partial[0]]
    if not isinstance(index, Exact) or index.array.shape[0] == 1:
        return None
    return Piece(state, block, partial[0], index)


def adds(module: hm.Module, instruction: hm.Instruction, reduction: str) -> bool:
    """Return whether an all-reduce is a sum, of numbers or of the parts of packed words."""
    if reduction == "add" or len(instruction.calls) != 1:
        return reduction == "add"
    called = module.computations[instruction.calls[0]].instructions
    if any(i.opcode not in _PACKED for i in called):
        return False
    used, shifts = collections.Counter[int](), collections.Counter[int]()
    for i in called:
        used.update(i.operands)
        if i.opcode.startswith("shift"):
            shifts.update(i.operands[1:])
    # A constant may only be the distance of a shift: an added constant would change the sum.
    constants = (n for n, i in enumerate(called) if i.opcode == "constant")
    return all(used[n] == shifts[n] for n in constants)


def of(
    module: hm.Module,
    computation: hm.Computation,
    position: int,
    pieces: dict[tuple[str, str], Piece | None],
    groups: np.ndarray | None,
) -> Piece | None:
    """Return the piece that each device contributes; None if the all-reduce isn't an all-gather."""
    # Step 1: follow the operand back to the dynamic-update-slice, which may be inside a fusion.
    within: _Within = [(computation, None)]
    update = computation.instructions[_passed_on(computation, position)]
    if update.opcode == "fusion" and len(update.calls) == 1:
        inner = module.computations[update.calls[0]]
        within.append((inner, update))
        update = inner.instructions[_passed_on(inner, inner.root)]
    inner = within[-1][0]
    piece = pieces.get((inner.name, update.name))
    if piece is None or update.opcode != "dynamic-update-slice" or groups is None:
        return None
    # Step 2: the pieces of each group must tile the whole array: sorted, they start at 0, size,
    # 2 * size and so on, without a gap or an overlap.
    whole = inner.instructions[update.operands[0]].shape.dimensions[piece.dimension]
    size = piece.shape.dimensions[piece.dimension]
    places = np.sort(piece.starts.array.reshape(-1)[groups], axis=1)
    if size * groups.shape[1] != whole or (places != np.arange(0, whole, size)).any():
        return None
    # Step 3: each device must write into zeros, or the sum would change the others' pieces.
    return piece if _zeros(module, within, update.operands[0]) else None


def _passed_on(computation: hm.Computation, position: int) -> int:
    """Return the position of the value behind copies, reshapes and bitcasts."""
    for _ in range(_STEPS):
        instruction = computation.instructions[position]
        target = (
            instruction.attribute("custom_call_target")
            if instruction.opcode == "custom-call"
            else None
        )
        moves = instruction.opcode in ("bitcast", "copy", "reshape") or target == '"ZeroCrop"'
        if not moves or len(instruction.operands) != 1:
            break
        position = instruction.operands[0]
    return position


def _zeros(module: hm.Module, within: _Within, position: int) -> bool:
    """Return whether an array is all zeros, following its value into and out of fusions."""
    # ``within`` is the stack of fusions that we are in: a fusion's result leads to its root, and
    # its parameter leads back to the operand in the computation that calls it.
    for _ in range(_STEPS):
        computation, fusion = within[-1]
        instruction = computation.instructions[position]
        if (
            instruction.opcode in ("bitcast", "broadcast", "copy", "reshape")
            and len(instruction.operands) == 1
        ):
            (position,) = instruction.operands
        elif instruction.opcode == "fusion" and len(instruction.calls) == 1:
            inner = module.computations[instruction.calls[0]]
            within.append((inner, instruction))
            position = inner.root
        elif instruction.opcode == "parameter" and fusion is not None:
            if int(instruction.literal) >= len(fusion.operands):
                return False
            position = fusion.operands[int(instruction.literal)]
            within.pop()
        else:
            return instruction.opcode == "constant" and bool(
                _ZERO.fullmatch(instruction.literal.strip())
            )
    return False
