"""The hooks' notes on a program that is traced only to look at it."""

from __future__ import annotations

import dataclasses
from typing import Any


@dataclasses.dataclass(eq=False)
class Claims:
    """The claims of ``already_summed`` that are being compared. Compared by identity."""

    # the source place and axes of each
    made: set[tuple[str, tuple[str, ...]]] = dataclasses.field(default_factory=set)
    # those of the claims that two devices contradict
    wrong: set[tuple[str, tuple[str, ...]]] = dataclasses.field(default_factory=set)


@dataclasses.dataclass(frozen=True)
class NotedSum:
    axes: tuple[str, ...]  # the mesh axes, sorted
    shape: tuple[int, ...]  # the local shape of what is summed
    dtype: Any  # its dtype
    at: str  # the source line behind it, or empty
    why: str  # what asked for it


@dataclasses.dataclass(frozen=True)
class PlacedCast:
    # the source line that makes what is cast; empty for an argument of what is differentiated
    at: str
    value: str  # its dtype and local shape
    axes: tuple[str, ...]  # the mesh axes, sorted
    runs: int  # how often the loops around run it
    function: str = ""  # what is differentiated, ``name at file:line``, or empty


@dataclasses.dataclass(frozen=True)
class Placement:
    """The casts of one linear program, placed where they move the fewest bytes."""

    before_bytes: int  # what the psums of its casts sum on each device, where JAX put them
    after_bytes: int  # the same where they are the fewest
    casts: tuple[PlacedCast, ...]  # the casts there, if they are fewer
    applied: bool  # whether they were placed; by ``install()`` or ``place_casts``
    why: str  # why the casts stayed in place, if no cheapest place could be found
    unchecked_bytes: int = 0  # what these cotangents' psums sum with the check off
    exceptions: tuple[str, ...] = ()  # why the fewest bytes are more than that
    at_borders: bool = False  # whether casts stand earlier at the price of JAX's own
    in_the_way: str = ""  # the step without which they would be fewer, and how many

    def held_up(self, subject: str) -> str:
        """Say which step keeps the subject's psums from fewer bytes; empty if none does."""
        if not self.in_the_way:
            return ""
        return f"{subject} sum {self.after_bytes:,} B on each device: {self.in_the_way}"

    def beyond(self, subject: str) -> str:
        """Say why the subject's psums sum more than with the check off; empty if they don't."""
        if not self.exceptions:
            return ""
        return (
            f"{subject} sum at least {self.after_bytes:,} B on each device, and "
            f"{self.unchecked_bytes:,} B with the check off: {'; '.join(self.exceptions)}"
        )


@dataclasses.dataclass(eq=False)
class Notes:
    """What the hooks record while a program is traced only to look at it. Compared by identity."""

    # each call without rule or proof, with its operands' axis types and the lines to paste
    unknown: list[tuple[Any, tuple[Any, ...], tuple[str, ...]]] = dataclasses.field(
        default_factory=list
    )
    sums: list[NotedSum] = dataclasses.field(default_factory=list)  # each psum that was put in
    # where casts were placed anew
    placements: list[Placement] = dataclasses.field(default_factory=list)
    # where each declaration that a call obeys stands
    declared: list[str] = dataclasses.field(default_factory=list)
    # each annotation of an output that its kernel contradicts, as a sentence
    annotations: list[str] = dataclasses.field(default_factory=list)
    # why values or gradients may differ with the check on
    reasons_to_leave: list[str] = dataclasses.field(default_factory=list)
    rules: set[Any] = dataclasses.field(default_factory=set)  # the bwds that ran
    computed: set[Any] = dataclasses.field(default_factory=set)  # what each of them computes
    unchecked: list[Any] = dataclasses.field(default_factory=list)  # unchecked shard_maps
