"""Group similar collectives into one row with a count, and write the times they took."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Collection, Hashable, Iterable, Sequence
from typing import TypeVar

from shardrules.costs import accounts
from shardrules.costs.timings import Timing
from shardrules.costs.waste.program import CONSTRAINED
from shardrules.costs.worth import Ledger
from shardrules.hlo.proof import phases
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
    """Return how much one device sends; in loops of unknown length, how much on each trip."""
    a_trip = f"{size(total.unknown_wire_bytes)} each trip"
    if total.unknown == total.sites and total.sites:
        return a_trip
    return size(total.wire_bytes) + (f" and {a_trip}" if total.unknown else "")


def of_step(
    avoidable_seconds: float, step_seconds: float, device: str, staying: int = 0, hidden: int = 0
) -> str:
    """Return the avoidable part of a measured step: ``avoidable: 3.1 ms of 41.0 ms a step``.

    Args:
      avoidable_seconds: the median over the steps.
      step_seconds: the median step.
      device: the name of a device that was measured.
      staying: bytes that can be avoided without saving time, since their round trips stay.
      hidden: bytes that can be avoided in collectives for which no device seems to wait.
    """
    of = f"avoidable: {milliseconds(avoidable_seconds)} of {milliseconds(step_seconds)} a step"
    if not avoidable_seconds:
        of = f"avoidable: none of the {milliseconds(step_seconds)} of a step"
    parts = [percent(avoidable_seconds, step_seconds)] if avoidable_seconds and step_seconds else []
    if staying and not avoidable_seconds:
        parts.append(f"the {size(staying)} that can be avoided travel in round trips that stay")
    elif hidden and not avoidable_seconds:
        parts.append(
            f"no device waits for the {size(hidden)} that can be avoided: other work hides them, "
            "or the profile has no event of them"
        )
    share = f" ({'; '.join(parts)})" if parts else ""
    # On CPU, many devices share a few cores and wait for each other, and sending copies memory.
    return f"{of}{share}{', on CPU, unlike TPU or GPU' if 'CPU' in device else ''}"


def took(timing: Timing | None, step_seconds: float) -> str:
    """Return the time that a collective took in a step, in words."""
    if timing is None:
        return "not measured: the profile has no event of it"
    if not timing.seconds:
        return "in fewer than half of the steps"
    share = f", {percent(timing.seconds, step_seconds)} of it" if step_seconds else ""
    exposed = milliseconds(timing.exposed_seconds)
    return f"{milliseconds(timing.seconds)} a step{share}; {exposed} exposed"


def spread(timing: Timing | None) -> str:
    """Return the fastest device and its time if the slowest one is far behind it, else ""."""
    if timing is None or not timing.spread:
        return ""
    return f" (fastest: {milliseconds(timing.fastest_seconds)}, {timing.fastest_device})"


def alike(items: Iterable[T], key: Callable[[T], Hashable]) -> list[tuple[T, ...]]:
    """Return items grouped by key, in the order in which the keys first occur."""
    groups: dict[Hashable, list[T]] = {}
    for item in items:
        groups.setdefault(key(item), []).append(item)
    return [tuple(members) for members in groups.values()]


def connected(items: Iterable[T], keys: Callable[[T], Sequence[Hashable]]) -> list[tuple[T, ...]]:
    """Return items grouped if they share a key, directly or through other items."""
    # A union-find structure: ``above`` leads from a key to another key of the same group, and the
    # key at the top stands for the group. Every item has at least one key.
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
    """Collectives that are equal in everything that a table shows."""

    entries: tuple[accounts.Entry, ...]  # their entries in the account, in the order of the text

    @property
    def numbers(self) -> tuple[int, ...]:
        """Return the place of each collective in the account."""
        return tuple(entry.number for entry in self.entries)

    @property
    def first(self) -> accounts.Entry:
        """Return the first collective, as an example of all."""
        return self.entries[0]

    @property
    def sites(self) -> int:
        """Return the number of places in the program."""
        return len(self.entries)

    @property
    def total(self) -> accounts.Totals:
        """Return the sums over all runs of all collectives in the row."""
        return functools.reduce(accounts.Totals.plus, self.entries, accounts.Totals())


def rows(account: accounts.Account) -> tuple[Row, ...]:
    """Return an account's collectives, grouped into rows."""

    def shown(entry: accounts.Entry) -> accounts.Entry:
        return dataclasses.replace(entry, reason="", groups="", loop_depth=0)

    return tuple(map(Row, alike(account.entries, shown)))


def most(
    rows: Sequence[Row], ledger: Ledger, least: float = 0.0, known: Collection[int] = ()
) -> str:
    """Return a text on the row that costs most: its share, and the partitioner if XLA made it.

    Return "" if nothing is sent, if the row costs less than ``least`` of the program's bytes, or if
    ``known`` has the number of one of its collectives.
    """
    costs = [sum(ledger.cost(number).bytes for number in row.numbers) for row in rows]
    sent, row = max(costs), rows[costs.index(max(costs))]
    entry = row.first
    if not {*row.numbers}.isdisjoint(known):
        return ""
    if not sent or entry.judged is None or sent < least * ledger.total.bytes:
        return ""
    made = phases.operation(name := entry.judged.collective.op_name)
    # A name without a path is an argument's name.
    is_asked = phases.is_written(name) or made in CONSTRAINED or "/" not in name
    what = entry.what if entry.axes else f"{entry.phase} {entry.kind}"
    by = "" if ledger.measured is None else " of the bytes"  # rows are sorted by time
    by += "" if is_asked else f", by XLA's partitioner for {made}"
    return f"the most: {what}, {percent(sent, ledger.total.bytes)}{by}"
