"""Collectives that are alike as one row with a count, and what each took."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import TypeVar

from shardrules.costs import accounts
from shardrules.costs.timings import Timing
from shardrules.units import milliseconds, percent, size

T = TypeVar("T")
MEASURED_NOTE = (
    "measured, a step: in the profile, the median over its steps on the slowest device, of all "
    "runs at all sites, shared by bytes among the operands of one collective, blank if it ran in "
    "fewer than half of the steps (jax.profiler.StepTraceAnnotation marks a script's own); "
    "exposed: the part of it during which that device ran nothing else; bandwidth: wire bytes "
    "over that time"
)


def sent(total: accounts.Totals) -> str:
    """Write how much one device sends; for loops of unknown length, how much on each trip."""
    a_trip = f"{size(total.unknown_wire_bytes)} each trip"
    if total.unknown == total.sites and total.sites:
        return a_trip
    return size(total.wire_bytes) + (f" and {a_trip}" if total.unknown else "")


def of_step(
    avoidable_seconds: float, step_seconds: float, device: str, staying: int = 0, hidden: int = 0
) -> str:
    """Say which part of a measured step can be avoided: ``avoidable: 3.1 ms of 41.0 ms a step``.

    Args:
      avoidable_seconds: the median over the steps.
      step_seconds: the median step.
      device: the name of one that was measured.
      staying: bytes that can be avoided and save no time, since their round trips stay.
      hidden: those of collectives for which no device is seen to wait.
    """
    of = f"avoidable: {milliseconds(avoidable_seconds)} of {milliseconds(step_seconds)} a step"
    parts = [percent(avoidable_seconds, step_seconds)] if step_seconds else []
    if staying and not avoidable_seconds:
        parts.append(f"the {size(staying)} that can be avoided travel in round trips that stay")
    elif hidden and not avoidable_seconds:
        parts.append(
            f"no device waits for the {size(hidden)} that can be avoided: other work hides them, "
            "or the profile has no event of them"
        )
    share = f" ({'; '.join(parts)})" if parts else ""
    # Eight devices on a few cores wait for each other, and what they send is a copy in memory.
    return f"{of}{share}{', on CPU, unlike TPU or GPU' if 'CPU' in device else ''}"


def took(timing: Timing | None, step_seconds: float) -> str:
    if timing is None:
        return "not measured: the profile has no event of it"
    if not timing.seconds:
        return "in fewer than half of the steps"
    share = f", {percent(timing.seconds, step_seconds)} of it" if step_seconds else ""
    exposed = milliseconds(timing.exposed_seconds)
    return f"{milliseconds(timing.seconds)} a step{share}; {exposed} exposed"


def spread(timing: Timing | None) -> str:
    """Name the fastest device where the slowest one is far behind it; empty elsewhere."""
    if timing is None or not timing.spread:
        return ""
    return f" (fastest: {milliseconds(timing.fastest_seconds)}, {timing.fastest_device})"


def alike(items: Iterable[T], key: Callable[[T], Hashable]) -> list[tuple[T, ...]]:
    """Group items by key, in the order in which the keys first occur."""
    groups: dict[Hashable, list[T]] = {}
    for item in items:
        groups.setdefault(key(item), []).append(item)
    return [tuple(members) for members in groups.values()]


def connected(items: Iterable[T], keys: Callable[[T], Sequence[Hashable]]) -> list[tuple[T, ...]]:
    """Group items that share a key, also by way of other items; each item has at least one."""
    all_items, above = [*items], dict[Hashable, Hashable]()

    def top(key: Hashable) -> Hashable:
        while key in above:
            key = above[key]
        return key

    for item in all_items:
        first, *others = dict.fromkeys(map(top, keys(item)))
        above.update(dict.fromkeys(others, first))
    return alike(all_items, lambda item: top(keys(item)[0]))


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
        """Return one collective that stands for all."""
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
