"""An array's dimensions as factors, followed through what moves it as a whole.

XLA reads the same memory as arrays of other dimensions: it gathers f32[64,128,32] over 2 x 4
devices as f32[512,128,32], and makes f32[128,128,128] of that: it splits 512 into 2, 4 and 64,
moves the 4 beside the 32, and joins what then lies together.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Sequence
from typing import NamedTuple

from shardrules import hlo
from shardrules.costs.waste.program import UNARY
from shardrules.hlo.reader.flow import BARRIERS, Node

COPIES = BARRIERS | frozenset("copy copy-start copy-done all-reduce-done all-gather-done".split())
MOVES = COPIES | {"bitcast", "transpose"}
_UNCHANGED = COPIES | UNARY


class Factor(NamedTuple):
    """The part of an index into one dimension that counts ``size`` steps of ``stride``."""

    origin: int  # the number of the dimension where it was first seen
    stride: int
    size: int


# For each dimension its factors, the major one first; none for a size of one.
Factors = list[list[Factor]]


def of(dimensions: Sequence[int]) -> Factors:
    """Return the factors of an array from which others are followed: each dimension is one."""
    return [[Factor(d, 1, size)] if size > 1 else [] for d, size in enumerate(dimensions)]


def followed(factors: Factors | None, node: Node) -> Factors | None:
    """Return a value's factors from those of what is behind it; None where they aren't known."""
    moves = []
    while node.opcode in MOVES | UNARY and node.operands:
        moves.append(node)
        node = node.operands[0]
    for move in reversed(moves):
        if factors is None or move.opcode in _UNCHANGED:
            continue
        before, after = move.operands[0].shape, move.shape
        if move.opcode == "transpose":
            order = re.findall(r"\d+", move.instruction.attribute("dimensions") or "")
            factors = [factors[int(d)] for d in order]
        else:
            factors = read_as(factors, before, after)
    return factors


def read_as(factors: Factors, before: hlo.Shape, after: hlo.Shape) -> Factors | None:
    """Return the factors of another array that the same memory holds; None if one would be cut."""
    if not is_same_memory(before, after):
        return None
    # Deal them out to the dimensions, both in the order in which they lie in memory.
    minor_first = (reversed(factors[d]) for d in reversed(in_memory(before)))
    left = [*itertools.chain.from_iterable(minor_first)]
    dealt: Factors = [[] for _ in after.dimensions]
    for d in in_memory(after):
        size = after.dimensions[d]
        while size > 1:
            factor = left.pop()
            common = math.gcd(factor.size, size)
            if common not in (factor.size, size):
                return None
            if common < factor.size:  # split it: its minor part goes on
                rest = factor.size // common
                left.append(factor._replace(size=rest))
                factor = Factor(factor.origin, factor.stride * rest, common)
            size //= common
            last = dealt[d][-1] if dealt[d] else None
            if last and last.origin == factor.origin and last.stride == factor.stride * factor.size:
                dealt[d][-1] = factor._replace(size=last.size * factor.size)  # joined again
            else:
                dealt[d].append(factor)
    return dealt


def in_memory(shape: hlo.Shape) -> list[int]:
    """List an array's dimensions as they lie in memory, the major one first."""
    order = shape.layout.partition(":")[0]
    return [int(d) for d in reversed(order.split(","))] if order else []


_TILE = re.compile(r"T\((\d+)((?:,\d+)*)\)(.*)")


def is_same_memory(before: hlo.Shape, after: hlo.Shape) -> bool:
    """Tell whether two arrays' elements lie in one order: of dimensions, or of rows of tiles."""
    orders = [in_memory(shape) for shape in (before, after)]
    sizes = [[s.dimensions[d] for d in order] for s, order in zip((before, after), orders)]
    tiles = [re.sub(r"S\(\d+\)", "", s.layout.partition(":")[2]) for s in (before, after)]
    complete = all(len(o) == len(s.dimensions) for o, s in zip(orders, (before, after)))
    count = before.element_count
    if not complete or not count or count != after.element_count:
        return False
    if before.element_type != after.element_type:
        return False
    if tiles[0] == tiles[1] and (sizes[0] == sizes[1] or not tiles[0]):
        return True
    one, other = map(_TILE.fullmatch, tiles)
    if one is None or other is None or one.groups()[1:] != other.groups()[1:]:
        return False
    # Tiles begin anew in each row of the dimensions before theirs: all must be full of rows.
    lanes = [int(size) for size in one[2].split(",")[1:]]
    (row, *rest), (row_after, *rest_after) = (
        s[-1 - len(lanes) :] if len(s) > len(lanes) else [0] for s in sizes
    )
    if not row or not row_after or rest != rest_after:
        return False
    whole = row % int(one[1]) == 0 == row_after % int(other[1])
    if one[1] == other[1]:
        return whole or row == row_after
    # Tiles of other heights have the same rows where one is as wide as the array, and each holds
    # whole ones of the smaller tiles that its rows are packed in.
    packed = [int(rows) for rows in re.findall(r"(?<!\w)\((\d+)", one[3])]
    if any(int(one[1]) % rows or int(other[1]) % rows for rows in packed):
        return False
    return whole and all(size <= lane for size, lane in zip(rest, lanes))
