"""What the hooks note while a program is traced to look at it only."""

from __future__ import annotations

import dataclasses
from typing import Any

__all__ = ["Claims", "NotedSum", "Notes", "PlacedCast", "Placement"]


@dataclasses.dataclass(eq=False)
class Claims:
    """The claims of ``already_summed`` that are being compared; equal to itself alone.

    Args:
      made: the source place and axes of each.
      wrong: those of the claims that two devices contradict.
    """

    made: set[tuple[str, tuple[str, ...]]] = dataclasses.field(default_factory=set)
    wrong: set[tuple[str, tuple[str, ...]]] = dataclasses.field(default_factory=set)


@dataclasses.dataclass(frozen=True)
class NotedSum:
    """A psum that the hooks put in.

    Args:
      axes: the mesh axes, sorted.
      shape: the local shape of what is summed.
      dtype: its dtype.
      at: the source line behind it, or empty.
      why: what asked for it.
    """

    axes: tuple[str, ...]
    shape: tuple[int, ...]
    dtype: Any
    at: str
    why: str


@dataclasses.dataclass(frozen=True)
class PlacedCast:
    """One cast, where its psum moves the fewest bytes.

    Args:
      at: the source line that makes what is cast; empty for an argument of what is differentiated.
      value: its dtype and local shape.
      axes: the mesh axes, sorted.
      runs: how often the loops around run it.
      function: what is differentiated, ``name at file:line``, or empty.
    """

    at: str
    value: str
    axes: tuple[str, ...]
    runs: int
    function: str = ""


@dataclasses.dataclass(frozen=True)
class Placement:
    """The casts of one linear program, and where they move the fewest bytes.

    Args:
      before_bytes: what the psums of its casts sum on each device, where JAX put them.
      after_bytes: the same where they are the fewest.
      casts: the casts there, if they are fewer.
      applied: whether they were placed; by ``install()`` or ``place_casts``.
      why: why they stand where they stood, if that could not be told to be the cheapest.
    """

    before_bytes: int
    after_bytes: int
    casts: tuple[PlacedCast, ...]
    applied: bool
    why: str


@dataclasses.dataclass(eq=False)
class Notes:
    """What the hooks note while a program is traced to look at it only; equal to itself alone.

    Args:
      unknown: each call without rule or proof, with its operands' axis types and the lines to
        paste.
      sums: each psum that was put in.
      placements: where casts were placed anew.
      declared: where each declaration that a call obeys stands.
      annotations: each annotation of an output that its kernel contradicts, as a sentence.
    """

    unknown: list[tuple[Any, tuple[Any, ...], tuple[str, ...]]] = dataclasses.field(
        default_factory=list
    )
    sums: list[NotedSum] = dataclasses.field(default_factory=list)
    placements: list[Placement] = dataclasses.field(default_factory=list)
    declared: list[str] = dataclasses.field(default_factory=list)
    annotations: list[str] = dataclasses.field(default_factory=list)
