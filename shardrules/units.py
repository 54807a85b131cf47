"""Write numbers with their units."""

from __future__ import annotations

from collections.abc import Sequence

from shardrules.arguments import checked

_EXACT = 10_000  # below this number of bytes, no unit makes the text shorter


@checked
def size(count: float) -> str:
    """Write bytes with a unit: all digits below 10,000 B, then three, in powers of 1000."""
    if count < _EXACT:
        return f"{round(count)} B"
    value = float(count)
    for unit in ("kB", "MB", "GB", "TB"):
        value /= 1000
        if value < 999.5:
            return f"{value:.3g} {unit}"
    return f"{value:.0f} TB"


def sizes(counts: Sequence[int]) -> str:
    """Write the bytes of one thing, or the range of several, with their sum if they differ."""
    low, high = min(counts), max(counts)
    if len(counts) == 1:
        return size(low)
    if low == high:
        return f"{size(low)} each"
    return f"{size(low)} to {size(high)} each, {size(sum(counts))} in all"


def counted(count: int, noun: str, of: int | None = None) -> str:
    """Write a number and its noun: ``1 constant``; with ``of`` also a verb: ``1 of 3 lines is``."""
    if of is None:
        return f"{count} {noun}" if count == 1 else f"{count} {noun}s"
    return f"{count} of {counted(of, noun)} {'is' if count == 1 else 'are'}"


def percent(part: float, whole: float) -> str:
    """Write a share with three digits at most, and 0% only if the part is zero."""
    share = part / whole if whole else 0.0
    if 0 < share < 0.001:
        return "<0.1%"
    return f"{share:.0%}" if share >= 0.1 or not share else f"{share:.1%}"


def duration(seconds: float) -> str:
    """Write a time with three digits at most, in the smallest unit that keeps it below 1000."""
    for unit, in_one in (("ns", 1e9), ("us", 1e6), ("ms", 1e3)):
        if seconds * in_one < 999.5:
            return f"{seconds * in_one:.3g} {unit}"
    return f"{seconds:.3g} s" if seconds < 999.5 else f"{seconds:.0f} s"


def milliseconds(seconds: float) -> str:
    """Write a step's time in milliseconds, or in seconds if it is longer than a second."""
    if 0 < seconds < 1e-6:
        return "<0.001 ms"
    return duration(seconds) if seconds >= 1e-3 else f"{seconds * 1e3:.3g} ms"
