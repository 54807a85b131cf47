"""Values that need more than one state.

``Ranged`` is a flat array with a state for each range of elements: XLA's GPU combiner packs several
all-reduces into one flat array by bitcast and concatenate, and ranges keep the packed arrays apart.
``Exact`` is integers known on each device. ``Started`` is a ``-start``'s operand and its result.
"""

from __future__ import annotations

import bisect
import dataclasses
import math
import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeAlias

import numpy as np

from shardrules.hlo.reader.module import Shape

MAX_RANGES = 4096  # an array of more ranges gets one state
MAX_ELEMENTS = 8192  # an integer array of more elements is not evaluated


@dataclasses.dataclass(slots=True, unsafe_hash=True)
class Ranged:
    """An array in row-major order with a state for each range of elements."""

    cuts: tuple[tuple[int, int], ...]  # pairs of a range's end and its state


class Exact:
    """Integers or booleans known on every device."""

    __slots__ = ("_hash", "_key", "array", "state")

    def __init__(self, state: int, array: np.ndarray):
        self.state = state
        # One row per device, or one row for all devices. A row has the value's shape; or it has as
        # many dimensions, each of size 1, and all elements equal its one number.
        self.array = array
        self._hash: int | None = None  # computed with the key at the first comparison

    def __eq__(self, other: Any) -> bool:
        if self is other:
            return True
        return type(other) is Exact and hash(self) == hash(other) and self._key == other._key

    def __hash__(self) -> int:
        if self._hash is None:
            array = self.array
            self._key = (self.state, array.dtype.str, array.shape, array.tobytes())
            self._hash = hash(self._key)
        return self._hash


@dataclasses.dataclass(slots=True, unsafe_hash=True)
class Started:
    """The value of a ``-start``: its operand, and the result for the ``-done``."""

    operand: Value
    result: Value


# What the proof knows about a value: the number of a state, an object of the classes above, or a
# tuple with the values of a tuple's elements.
Value: TypeAlias = "int | Exact | Ranged | Started | tuple[Value, ...]"


def normal(cuts: Sequence[tuple[int, int]]) -> Value:
    """Return the ranges without empty ones: a state if one range is left, else a Ranged."""
    kept: list[tuple[int, int]] = []
    for stop, state in cuts:
        if stop > (kept[-1][0] if kept else 0):
            kept.append((stop, state))
    if len(kept) <= 1:
        return kept[0][1] if kept else 0
    return Ranged(tuple(kept))


def zip_cuts(
    a: Sequence[tuple[int, int]], b: Sequence[tuple[int, int]], combine: Callable[[int, int], int]
) -> list[tuple[int, int]]:
    """Return the combined states of two arrays, with a new range where either array has one."""
    cuts = []
    i = j = 0
    while i < len(a) and j < len(b):
        stop = min(a[i][0], b[j][0])
        cuts.append((stop, combine(a[i][1], b[j][1])))
        if a[i][0] == stop:
            i += 1
        if b[j][0] == stop:
            j += 1
    return cuts


def joined(parts: Iterable[Sequence[tuple[int, int]]]) -> list[tuple[int, int]]:
    """Return the ranges of the concatenation of several flat arrays."""
    cuts: list[tuple[int, int]] = []
    offset = 0
    for part in parts:
        cuts += [(offset + stop, state) for stop, state in part]
        offset = cuts[-1][0] if cuts else 0
    return cuts


def between(cuts: Sequence[tuple[int, int]], start: int, stop: int) -> list[tuple[int, int]]:
    """Return the ranges of elements ``start`` to ``stop``, counted from ``start``."""
    first = bisect.bisect_right(cuts, start, key=lambda cut: cut[0])
    last = bisect.bisect_left(cuts, stop, first, key=lambda cut: cut[0])
    return [(min(end, stop) - start, state) for end, state in cuts[first : last + 1]]


def without_padding(
    cuts: Sequence[tuple[int, int]], constant: Callable[[int], bool]
) -> list[tuple[int, int]]:
    """Join each range of constants to the range before it, or to the next range at the start."""
    kept: list[tuple[int, int]] = []
    for stop, state in cuts:
        if kept and constant(state):
            kept[-1] = (stop, kept[-1][1])
        elif kept and constant(kept[-1][1]):
            kept[-1] = (stop, state)
        else:
            kept.append((stop, state))
    return kept


def keeps_order(before: Shape, after: Shape) -> bool:
    """Return whether a bitcast surely keeps all elements and their row-major order."""
    # A bitcast reads the same bytes under another layout: if layouts or element widths differ, it
    # permutes or splits elements. Without printed layouts, only a bitcast of one element is sure to
    # keep the order.
    return before.element_type == after.element_type and (
        before.element_count == after.element_count == 1
        or (before.is_row_major and after.is_row_major)
        or (before.dimensions == after.dimensions and before.layout == after.layout != "")
    )


def contiguous(
    dimensions: Sequence[int], starts: Sequence[int], sizes: Sequence[int]
) -> tuple[int, int] | None:
    """Return the flat range of a block; None if the block is not contiguous."""
    partial = False
    for full, size in zip(dimensions, sizes):
        if partial and size != full:
            return None
        if size != 1:  # after a dimension with several rows, all dimensions must be whole
            partial = True
    flat = 0
    for full, start in zip(dimensions, starts):
        flat = flat * full + start
    return flat, flat + math.prod(sizes)


_SLICE = re.compile(r"\[\s*(\d{1,18})\s*:\s*(\d{1,18})\s*(?::\s*(\d{1,18})\s*)?\]")


def read_slice(text: str, shape: Shape) -> list[tuple[int, int, int]] | None:
    """Read ``{[0:8], [0:128:2]}``; None if it doesn't fit the shape."""
    bounds = [(int(a), int(b), int(c or 1)) for a, b, c in _SLICE.findall(text)]
    if len(bounds) != len(shape.dimensions) or any(
        c < 1 or not a <= b <= size for (a, b, c), size in zip(bounds, shape.dimensions)
    ):
        return None
    return bounds


def read_ints(text: str | None) -> list[int]:
    """Return all integers that a text contains, in order."""
    return [int(n) for n in re.findall(r"-?\d{1,18}", text or "")]
