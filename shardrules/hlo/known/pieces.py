"""All-reduces that put each device's own piece beside the others': all-gathers.

XLA for TPU writes a small all-gather so: each device writes its piece into zeros, at a place that
its number gives, and all of that is added up.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from shardrules.hlo.known.ranges import Exact
from shardrules.hlo.reader import module as hm

_ZERO = re.compile(r"0(\.0*)?|false")
# Computations, each with the fusion that calls it, innermost last.
_Within = list[tuple[hm.Computation, hm.Instruction | None]]
_STEPS = 16  # instructions between a piece and the all-reduce, or between zeros and their place


class Piece(NamedTuple):
    """What a dynamic-update-slice writes at a place that the device's number gives."""

    state: int  # of what it writes
    shape: hm.Shape
    dimension: int  # along which the places differ
    starts: Exact  # where it begins on each device


def written(full: hm.Shape, block: hm.Shape, state: int, starts: Sequence[Any]) -> Piece | None:
    """Describe an update whose place differs along one dimension, by numbers that are known."""
    sizes = zip(full.dimensions, block.dimensions)
    partial = [n for n, (whole, part) in enumerate(sizes) if whole != part]
    if len(partial) != 1 or len(starts) != len(full.dimensions) or full.dynamic or block.dynamic:
        return None
    index = starts[partial[0]]
    if not isinstance(index, Exact) or index.array.shape[0] == 1:
        return None
    return Piece(state, block, partial[0], index)


def of(
    module: hm.Module,
    computation: hm.Computation,
    position: int,
    pieces: dict[tuple[str, str], Piece | None],
    groups: np.ndarray | None,
) -> Piece | None:
    """Give the piece that each device adds to an all-reduce; None where it is no all-gather."""
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
    whole = inner.instructions[update.operands[0]].shape.dimensions[piece.dimension]
    size = piece.shape.dimensions[piece.dimension]
    places = np.sort(piece.starts.array.reshape(-1)[groups], axis=1)
    if size * groups.shape[1] != whole or (places != np.arange(0, whole, size)).any():
        return None
    return piece if _zeros(module, within, update.operands[0]) else None


def _passed_on(computation: hm.Computation, position: int) -> int:
    """Follow a value back through what leaves its elements as they are, if in another shape."""
    for _ in range(_STEPS):
        one = computation.instructions[position]
        if one.opcode not in ("bitcast", "copy", "reshape") or len(one.operands) != 1:
            break
        before = computation.instructions[one.operands[0]].shape
        if (before.element_type, before.element_count) != (
            one.shape.element_type,
            one.shape.element_count,
        ):
            break
        position = one.operands[0]
    return position


def _zeros(module: hm.Module, within: _Within, position: int) -> bool:
    """Tell whether an array is zeros, into fusions and out of them."""
    for _ in range(_STEPS):
        computation, fusion = within[-1]
        one = computation.instructions[position]
        if one.opcode in ("bitcast", "broadcast", "copy", "reshape") and len(one.operands) == 1:
            (position,) = one.operands
        elif one.opcode == "fusion" and len(one.calls) == 1:
            inner = module.computations[one.calls[0]]
            within.append((inner, one))
            position = inner.root
        elif one.opcode == "parameter" and fusion is not None:
            if int(one.literal) >= len(fusion.operands):
                return False
            position = fusion.operands[int(one.literal)]
            within.pop()
        else:
            return one.opcode == "constant" and bool(_ZERO.fullmatch(one.literal.strip()))
    return False
