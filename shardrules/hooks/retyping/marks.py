"""Marks by which a custom_vjp's fwd learns over which axes its primals were cast to vary.

JAX traces fwd when it is differentiated, and tells it which tangents are not zero. These marks, and
no others, reach it through whatever stands between: ``jit``, ``vmap``, another trace. They are part
of the key by which JAX keeps what it traced.
"""

from __future__ import annotations

from typing import Any


class Mark:
    """Whether a tangent is not zero, and over which axes its primal was cast to vary."""

    # nonzero: whether it is not zero, or such a mark.
    # axes: mesh axes.

    def __init__(self, nonzero: Any, axes: frozenset[str]):
        self.nonzero = bool(nonzero)
        self.axes = axes | getattr(nonzero, "axes", frozenset())

    def __bool__(self) -> bool:
        return self.nonzero

    def __eq__(self, other: object) -> bool:
        same = isinstance(other, Mark) and (self.nonzero, self.axes) == (other.nonzero, other.axes)
        return same

    def __hash__(self) -> int:
        return hash((self.nonzero, self.axes))
