"""Parts of buffers: boxes of elements, and what a set of boxes leaves out."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import numpy as np

__all__ = ["ANY", "SOME", "WHOLE", "Undecided", "is_box", "left_out", "shown", "whole_box"]

WHOLE = "whole"  # the region that is all of a ref
SOME = "some"  # a region that nothing more is known of
ANY = "any"  # in place of a set of boxes: any element may be among them

_MOST_CELLS = 1_000_000  # a bound on the work of ``left_out``

Box = tuple  # of (start, size), one for each dimension


class Undecided(Exception):
    """Finding out would be too much work, or takes what is not known."""


def is_box(region: Any) -> bool:
    """Whether a region is known as a box of elements."""
    return type(region) is tuple and region[:1] != ("view",)


def whole_box(shape: Iterable[int]) -> Box:
    """Return the box that is all of a shape."""
    return tuple((0, size) for size in shape)


def shown(box: Box) -> str:
    """Return a box as one would index it."""
    return "[" + ", ".join(f"{start}:{start + size}" for start, size in box) + "]"


def left_out(boxes: Iterable[Box], within: Box) -> Box | None:
    """Return a part of ``within`` that no box covers, or None if they cover all of it.

    Raises:
      Undecided: if there are too many boxes, or a dimension is not a number.
    """
    if not all(type(n) is int for part in within for n in part):
        raise Undecided
    low = [start for start, _ in within]
    high = [start + size for start, size in within]
    if any(a >= b for a, b in zip(low, high)):
        return None
    cut = set()
    for box in boxes:
        if len(box) != len(within):
            raise Undecided
        part = tuple(
            (max(start, a), min(start + size, b)) for (start, size), a, b in zip(box, low, high)
        )
        if all(a < b for a, b in part):
            cut.add(part)
    if tuple(zip(low, high)) in cut:
        return None
    edges = [
        sorted({a, b, *(e for part in cut for e in part[d])})
        for d, (a, b) in enumerate(zip(low, high))
    ]
    # Cells between neighbouring edges are covered as one.
    counts = [len(e) - 1 for e in edges]
    if math.prod(counts) > _MOST_CELLS:
        raise Undecided
    place = [{e: i for i, e in enumerate(es)} for es in edges]
    covered = np.zeros(counts, bool)
    for part in cut:
        covered[tuple(slice(p[a], p[b]) for p, (a, b) in zip(place, part))] = True
    if covered.all():
        return None
    first = np.unravel_index(int(np.argmin(covered)), counts)
    return tuple((e[i], e[i + 1] - e[i]) for e, i in zip(edges, first))
