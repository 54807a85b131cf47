"""Follow the dimensions of an array, as factors, through operations that move the whole array.

XLA reads the same memory as an array with other dimensions. For example, it gathers f32[64,128,32]
over 2 x 4 devices as f32[512,128,32], and turns the result into f32[128,128,128]: it splits 512
into 2, 4 and 64, moves the 4 beside the 32, and joins the factors that are now neighbours.
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
    """A part of the index into one dimension: ``size`` steps of ``stride`` each."""

    origin: int  # the number of its dimension in the array where following began
    stride: int
    size: int


# The factors of each dimension, the major one first; none for a size of one.
Factors = list[list[Factor]]


def of(dimensions: Sequence[int]) -> Factors:
    """Return the factors of the array where following begins: each dimension is one factor."""
    return [[Factor(d, 1, size)] if size > 1 else [] for d, size in enumerate(dimensions)]


def followed(factors: Factors | None, node: Node) -> Factors | None:
    """Return a value's factors, given the factors before its moves; None if they are unknown."""
    # First go back through the moves to the value that has the given factors. Then apply the moves
    # to the factors in program order.
    moves, value = [], node
    while node.opcode in MOVES | UNARY and node.operands:
        moves.append(node)
        node = node.operands[0]
    for move in reversed(moves):
        if factors is None or move.opcode in _UNCHANGED:
            continue
        before, after = move.operands[0].shape, move.shape
        if not _are_of(factors, before):
            return None
        if move.opcode == "transpose":
            order = re.findall(r"\d+", move.instruction.attribute("dimensions") or "")
            factors = [factors[int(d)] for d in order]
        else:
            factors = read_as(factors, before, after)
    return factors if factors is None or _are_of(factors, value.shape) else None


def _are_of(factors: Factors, shape: hlo.Shape) -> bool:
    """Return whether factors multiply to an array's dimensions (after a reshape, they don't)."""
    sizes = tuple(math.prod(factor.size for factor in of) for of in factors)
    return shape.is_tuple or sizes == shape.dimensions


def read_as(factors: Factors, before: hlo.Shape, after: hlo.Shape) -> Factors | None:
    """Return the factors of another array in the same memory; None if a factor would be cut."""
    if not is_same_memory(before, after):
        return None
    # Assign the factors to the other array's dimensions, both in their order in memory, the major
    # one first. Split a factor that is larger than the rest of its dimension. If neither divides
    # the other, the new dimension mixes two factors, and there is no answer.
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
            if common < factor.size:  # split it; its minor part goes to the next dimension
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
    """Return an array's dimensions in the order in memory, the major one first."""
    order = shape.layout.partition(":")[0]
    return [int(d) for d in reversed(order.split(","))] if order else []


_TILE = re.compile(r"T\((\d+)((?:,\d+)*)\)(.*)")


def is_same_memory(before: hlo.Shape, after: hlo.Shape) -> bool:
    """Return whether two arrays have the same order of elements in memory, tiles included."""
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
    # Tiles start again for each index of the outer dimensions, so all tiles must be full of rows.
    lanes = [int(size) for size in one[2].split(",")[1:]]
    (row, *rest), (row_after, *rest_after) = (
        s[-1 - len(lanes) :] if len(s) > len(lanes) else [0] for s in sizes
    )
    if not row or not row_after or rest != rest_after:
        return False
    whole = row % int(one[1]) == 0 == row_after % int(other[1])
    if one[1] == other[1]:
        return whole or row == row_after
    # Tiles of different heights have the same rows if a tile is as wide as the array, and if each
    # consists of whole smaller tiles, into which its rows are packed.
    packed = [int(rows) for rows in re.findall(r"(?<!\w)\((\d+)", one[3])]
    if any(int(one[1]) % rows or int(other[1]) % rows for rows in packed):
        return False
    return whole and all(size <= lane for size, lane in zip(rest, lanes))
