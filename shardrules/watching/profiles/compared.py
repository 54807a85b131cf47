"""Compare two profiles: how many milliseconds each change of the collectives saved."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable

from shardrules import report
from shardrules.costs import comparing
from shardrules.report.text import markdown_table
from shardrules.units import counted, duration
from shardrules.watching.profiles.shown import Profile

_SAME = "same"


@dataclasses.dataclass(frozen=True)
class TimedChange(comparing.Change):
    """The collectives of one kind, axes, element type and source in two profiles."""

    seconds: tuple[float, float]  # the time that they took in a step, before and after
    exposed_seconds: tuple[float, float]  # the part of that time when a device did nothing else

    @property
    def saved_seconds(self) -> float:
        return self.exposed_seconds[0] - self.exposed_seconds[1]


@dataclasses.dataclass(frozen=True)
class Compared:
    """The changes between two profiles; the ones that saved or cost most come first."""

    before: Profile
    after: Profile
    changes: tuple[TimedChange, ...]

    @property
    def changed(self) -> list[TimedChange]:
        return [change for change in self.changes if change.status != _SAME]

    @property
    def headline(self) -> str:
        took = [duration(profile.step_seconds) for profile in (self.before, self.after)]
        avoidable = [duration(p.avoidable_seconds) for p in (self.before, self.after)]
        saved = sum(change.saved_seconds for change in self.changed)
        word, changes = "saved" if saved >= 0 else "lost", counted(len(self.changed), "change")
        return (
            f"{word} {duration(abs(saved))} a step by {changes} of collectives; a step took "
            f"{took[0]}, now {took[1]}; avoidable {avoidable[0]}, now {avoidable[1]}"
        )


def compare(before: Profile, after: Profile) -> Compared:
    """Return the changes between two profiles, matched as ``comparing.compare`` matches them."""
    entries_before = [line.entry for line in before.lines]
    entries_after = [line.entry for line in after.lines]
    names = comparing.common_names(entries_before, entries_after)
    times: dict[tuple[str, ...], list[float]] = {}
    for number, profile in enumerate((before, after)):
        for line in profile.lines:
            key = comparing.key_of(line.entry, groups=True, names=names)
            sums = times.setdefault(key, [0.0] * 4)
            sums[number] += line.seconds
            sums[2 + number] += line.exposed_seconds
    totals = [
        comparing.grouped(entries, groups=True, names=names)
        for entries in (entries_before, entries_after)
    ]
    changes = []
    for key, change in comparing.each(*totals):
        was, now, exposed_was, exposed_now = times[key]
        exposed = exposed_was, exposed_now
        changes.append(TimedChange(**vars(change), seconds=(was, now), exposed_seconds=exposed))
    changes.sort(key=lambda change: (change.status == _SAME, -abs(change.saved_seconds)))
    return Compared(before, after, tuple(changes))


_COLUMNS = ("change", "exposed before", "now", "saved", "wire bytes before", "now", "collective")


def _rows(compared: Compared) -> list[tuple[str, ...]]:
    return [
        (
            change.status,
            *(duration(seconds) if seconds else "-" for seconds in change.exposed_seconds),
            ("-" if change.saved_seconds < 0 else "") + duration(abs(change.saved_seconds)),
            report.size(change.before.wire_bytes),
            report.size(change.after.wire_bytes),
            change.what,
        )
        for change in compared.changes
    ]


def _plain(compared: Compared) -> str:
    lines = [compared.headline, f"- {compared.before.source}", f"+ {compared.after.source}"]
    if compared.changes:
        lines += ["", report.table([_COLUMNS, *_rows(compared)])]
    return "\n".join(lines) + "\n"


def _markdown(compared: Compared) -> str:
    title = f"# {compared.before.source} and {compared.after.source}"
    table = markdown_table(_COLUMNS, _rows(compared))
    return "\n".join([title, "", f"{compared.headline}.", "", *table]) + "\n"


def _json(compared: Compared) -> str:
    def side(profile: Profile) -> dict[str, object]:
        values = profile.as_dict()
        return {name: values[name] for name in ("source", "steps", "avoidable_seconds", "notes")}

    changes = [
        {**dataclasses.asdict(change), "saved_seconds": change.saved_seconds}
        for change in compared.changes
    ]
    shown = {"before": side(compared.before), "after": side(compared.after), "changes": changes}
    return json.dumps(shown, indent=1) + "\n"


# Maps a format to the function that writes it.
WRITERS: dict[str, Callable[[Compared], str]] = {
    "text": _plain,
    "markdown": _markdown,
    "json": _json,
}
