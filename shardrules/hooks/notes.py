"""Hold the hooks' notes on a program that is traced only for them."""

from __future__ import annotations

import dataclasses
from typing import Any


@dataclasses.dataclass(eq=False)
class Claims:
    """The claims of ``already_summed`` that are being tested. Compared by identity."""

    # the source place and axes of each claim
    made: set[tuple[str, tuple[str, ...]]] = dataclasses.field(default_factory=set)
    # the claims that are wrong, since two devices hold different values
    wrong: set[tuple[str, tuple[str, ...]]] = dataclasses.field(default_factory=set)


@dataclasses.dataclass(frozen=True)
class NotedSum:
    axes: tuple[str, ...]  # the mesh axes, sorted
    shape: tuple[int, ...]  # the local shape of the operand
    dtype: Any  # the operand's dtype
    at: str  # the source line that causes the sum, or empty
    why: str  # the reason for the sum


@dataclasses.dataclass(frozen=True)
class PlacedCast:
    # the source line that makes the cast value; empty for an argument of the function
    at: str
    value: str  # the value's dtype and local shape
    axes: tuple[str, ...]  # the mesh axes, sorted
    runs: int  # how often the enclosing loops run the cast
    function: str = ""  # the differentiated function, ``name at file:line``, or empty


@dataclasses.dataclass(frozen=True)
class Placement:
    """The casts of one linear program, placed where they move the fewest bytes."""

    # the bytes that the casts' psums sum on each device if the casts stand where JAX puts them
    before_bytes: int
    after_bytes: int  # the same if the casts stand at the cheapest places
    casts: tuple[PlacedCast, ...]  # the casts at the cheapest places, if they sum fewer bytes
    applied: bool  # whether ``install()`` or ``place_casts`` moved the casts to these places
    why: str  # why the casts stayed in place, if no cheapest place could be found
    unchecked_bytes: int = 0  # the bytes that these cotangents' psums sum with the check off
    exceptions: tuple[str, ...] = ()  # why the fewest bytes exceed ``unchecked_bytes``
    at_borders: bool = False  # whether casts stand earlier than JAX's own, at the same price
    in_the_way: str = ""  # the step that costs extra bytes, and the bytes without that step

    def held_up(self, subject: str) -> str:
        """Say which step makes the subject's psums sum more bytes; empty if no step does."""
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
    """The hooks' records of a program that is traced only for them. Compared by identity."""

    # each call without rule or proof, with its operands' axis types and the lines to paste
    unknown: list[tuple[Any, tuple[Any, ...], tuple[str, ...]]] = dataclasses.field(
        default_factory=list
    )
    sums: list[NotedSum] = dataclasses.field(default_factory=list)  # each psum that hooks added
    # the placements of casts
    placements: list[Placement] = dataclasses.field(default_factory=list)
    # the place of each declaration that a call obeys
    declared: list[str] = dataclasses.field(default_factory=list)
    # a sentence for each annotation of an output that its kernel contradicts
    annotations: list[str] = dataclasses.field(default_factory=list)
    # why values or gradients may differ with the check on
    reasons_to_leave: list[str] = dataclasses.field(default_factory=list)
    rules: set[Any] = dataclasses.field(default_factory=set)  # the bwds that ran
    computed: set[Any] = dataclasses.field(default_factory=set)  # what each bwd computes
    unchecked: list[Any] = dataclasses.field(default_factory=list)  # unchecked shard_maps
