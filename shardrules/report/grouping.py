"""Numbers with their units, and collectives that are alike as one row with a count."""

from __future__ import annotations

import dataclasses
import functools
import os
import re
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import TypeVar

from shardrules.arguments import checked
from shardrules.costs import accounts
from shardrules.costs.timings import Timing

T = TypeVar("T")
_EXACT = 10_000  # bytes below which no unit is shorter than the number


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


def sent(total: accounts.Totals) -> str:
    """Write what one device sends; of loops of unknown length, what it sends on each trip."""
    a_trip = f"{size(total.unknown_wire_bytes)} each trip"
    if total.unknown == total.sites and total.sites:
        return a_trip
    return size(total.wire_bytes) + (f" and {a_trip}" if total.unknown else "")


def sizes(counts: Sequence[int]) -> str:
    """Write the bytes of one, or of each of several with their sum where they differ."""
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


def here(source: str) -> str:
    """Write each ``file:line`` of a text without the working directory, if it is below that."""
    try:
        folder = os.path.join(os.getcwd(), "")
    except OSError:  # it was removed
        return source
    return re.sub(rf"(?<!\S){re.escape(folder)}", "", source)


def percent(part: float, whole: float) -> str:
    """Write a share: three digits at most, and 0% only of nothing."""
    share = part / whole if whole else 0.0
    if 0 < share < 0.001:
        return "<0.1%"
    return f"{share:.0%}" if share >= 0.1 or not share else f"{share:.1%}"


def duration(seconds: float) -> str:
    for unit, scale in (("s", 1.0), ("ms", 1e-3), ("us", 1e-6)):
        if seconds >= scale:
            return f"{seconds / scale:.3g} {unit}"
    return f"{seconds / 1e-9:.3g} ns"


def milliseconds(seconds: float) -> str:
    return f"{seconds * 1e3:.3g} ms" if seconds < 1 else f"{seconds:.3g} s"


def of_step(avoidable_seconds: float, step_seconds: float, device: str) -> str:
    """Say which part of a measured step can be avoided: ``avoidable: 3.1 ms of 41.0 ms a step``.

    Args:
      avoidable_seconds: the median over the steps.
      step_seconds: the median step.
      device: the name of one that was measured.
    """
    of = f"avoidable: {milliseconds(avoidable_seconds)} of {milliseconds(step_seconds)} a step"
    share = f" ({avoidable_seconds / step_seconds:.1%})" if step_seconds else ""
    # Eight devices on a few cores wait for each other, and what they send is a copy in memory.
    return f"{of}{share}{', on CPU, unlike TPU or GPU' if 'CPU' in device else ''}"


def took(timing: Timing | None, step_seconds: float) -> str:
    if timing is None:
        return "not measured: the profile has no event of it"
    share = f", {timing.seconds / step_seconds:.1%} of it" if step_seconds else ""
    exposed = milliseconds(timing.exposed_seconds)
    return f"{milliseconds(timing.seconds)} a step{share}; {exposed} exposed"


def spread(timing: Timing | None) -> str:
    """Name the fastest device where the slowest one is far behind it; empty elsewhere."""
    if timing is None or not timing.spread:
        return ""
    return f" (fastest: {milliseconds(timing.fastest_seconds)}, {timing.fastest_device})"


def alike(items: Iterable[T], key: Callable[[T], Hashable]) -> list[tuple[T, ...]]:
    """Gather what has the same key, in the order in which each key comes first."""
    groups: dict[Hashable, list[T]] = {}
    for item in items:
        groups.setdefault(key(item), []).append(item)
    return [tuple(members) for members in groups.values()]


@dataclasses.dataclass(frozen=True)
class Row:
    """Collectives that differ in nothing that a table shows."""

    entries: tuple[accounts.Entry, ...]  # theirs in the account, in the order of the text

    @property
    def numbers(self) -> tuple[int, ...]:
        """Return where each stands in the account."""
        return tuple(entry.number for entry in self.entries)

    @property
    def first(self) -> accounts.Entry:
        """Return one for all."""
        return self.entries[0]

    @property
    def sites(self) -> int:
        """Count the places in the program."""
        return len(self.entries)

    @property
    def total(self) -> accounts.Totals:
        """Sum up all runs of all of them."""
        return functools.reduce(accounts.Totals.plus, self.entries, accounts.Totals())


def rows(account: accounts.Account) -> tuple[Row, ...]:
    def shown(entry: accounts.Entry) -> accounts.Entry:
        return dataclasses.replace(entry, reason="", groups="", loop_depth=0)

    return tuple(map(Row, alike(account.entries, shown)))
