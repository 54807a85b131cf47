"""Hold the times that a program's collectives took in a profile, by verdict."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import NamedTuple

from shardrules import hlo
from shardrules.costs import accounts


class Timing(NamedTuple):
    """The time that one collective took in a step."""

    seconds: float  # the median over steps, on the slowest device
    exposed_seconds: float  # the part of it in which that device did nothing else
    fastest_seconds: float  # the same median on the fastest device
    runs: float  # how often it ran, on one device in one step
    device: str  # the slowest device
    fastest_device: str  # the fastest device, for which the others wait

    def part(self, share: float) -> Timing:
        """Return the timing of one operand of a combined collective, by its share of the bytes."""
        return self._replace(
            seconds=self.seconds * share,
            exposed_seconds=self.exposed_seconds * share,
            fastest_seconds=self.fastest_seconds * share,
        )

    @property
    def spread(self) -> bool:
        """Return whether devices differ by over a tenth: a straggler, not a slow collective."""
        return self.seconds - self.fastest_seconds > 0.1 * self.seconds


@dataclasses.dataclass(frozen=True)
class Timings:
    """The times that a profile measured of one program."""

    step_seconds: float  # the median step
    # A timing for each of the judgement's verdicts; None if the profile has no event for it.
    of: tuple[Timing | None, ...]
    device: str = ""  # the device whose step is drawn
    # The runs in that step: a verdict's number, its start and its end, in seconds after the begin.
    ran: tuple[tuple[int, float, float], ...] = ()
    busy: tuple[tuple[float, float], ...] = ()  # start and end of that device's other work

    def together(self, numbers: Iterable[int]) -> Timing | None:
        """Return the total time of some verdicts' collectives; None if the profile has no event."""
        each = [timing for timing in map(self.of.__getitem__, numbers) if timing is not None]
        if not each:
            return None
        return max(each)._replace(
            seconds=sum(timing.seconds for timing in each),
            exposed_seconds=sum(timing.exposed_seconds for timing in each),
            fastest_seconds=sum(timing.fastest_seconds for timing in each),
            runs=sum(timing.runs for timing in each),
        )


def avoidable(verdict: hlo.Verdict, entry: accounts.Entry) -> float:
    """Return the share of a collective's wire bytes that its verdict shows to be unnecessary."""
    if verdict.verdict == "redundant":
        return 1.0
    if verdict.verdict != "overwide" or not entry.wire_bytes:
        return 0.0
    needed_count = verdict.collective.group_size // verdict.copies
    needed = accounts.wire_bytes(entry.kind, verdict.bytes, needed_count)
    return max(0.0, 1 - needed / entry.wire_bytes)
