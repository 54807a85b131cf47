"""Decide which shard_maps can have their check on, write the patch, and measure what it saves."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from shardrules.hooks.unchecked import Site
from shardrules.migration.edits import Edits, diff, edited, pairs, patch
from shardrules.migration.sites import (
    BY_HAND,
    GRADIENTS,
    LIMIT,
    MORE,
    OUTPUTS,
    RAISES,
    RULE,
    SWITCH,
    UNTRIED,
    Row,
    decided,
    rows,
    written,
)
from shardrules.report.grouping import size

__all__ = [
    "BY_HAND",
    "GRADIENTS",
    "LIMIT",
    "MORE",
    "OUTPUTS",
    "RAISES",
    "RULE",
    "SWITCH",
    "UNTRIED",
    "Edits",
    "Row",
    "decided",
    "diff",
    "edited",
    "patch",
    "rows",
    "tried",
    "written",
]

_NOT_IN_TRIAL = "not in this trial"


class _Outcome(Protocol):
    """The parts of ``commands.trial.Outcome`` that this package reads."""

    @property
    def failure(self) -> str: ...
    @property
    def sent(self) -> Mapping[str, int]: ...


def tried(
    all_rows: Sequence[Row],
    before: _Outcome,
    edit: Callable[[Sequence[Row]], Edits],
    run: Callable[[Edits], _Outcome] | None,
) -> tuple[list[Row], _Outcome | None]:
    """Run the script with its patch, and return the sites' verdicts and its last good run."""
    # Try all sites at once. If that fails or sends more, try each with those before it that passed.
    # MORE is tried too: the script may not differentiate as the retracing did.
    candidates = [r._replace(verdict=SWITCH) if r.verdict == MORE else r for r in all_rows]
    sites = edit(candidates).sites
    verdicts = {
        row.site: (BY_HAND, "")
        for row in all_rows
        if row.verdict == SWITCH and row.site not in sites
    }

    def updated(changes: Mapping[Site, tuple[str, str]]) -> list[Row]:
        return [
            row
            if row.site not in changes
            else row._replace(verdict=changes[row.site][0], note=changes[row.site][1])
            for row in all_rows
        ]

    if run is None or before.failure:
        reason = f"the script as it is fails: {before.failure}" if before.failure else ""
        untried = {
            r.site: (UNTRIED, reason) for r in all_rows if r.verdict == SWITCH and r.site in sites
        }
        return updated(verdicts | untried), None
    passed: list[Site] = []
    last = None
    groups = [list(sites)] if sites else []
    while groups:
        group = groups.pop(0)
        chosen = {*passed, *group}
        trial = [
            row._replace(verdict=SWITCH if row.site in chosen else _NOT_IN_TRIAL)
            if row.site in sites
            else row
            for row in all_rows
        ]
        outcome = run(edit(trial))
        verdict = _judged(before, outcome)
        if verdict[0] == SWITCH:
            passed, last = [*passed, *group], outcome
        elif len(group) == len(sites) and len(parts := _joined(sites, all_rows)) > 1:
            groups = parts
            continue
        verdicts |= {site: verdict for site in group}
    return updated(verdicts), last


def _judged(before: _Outcome, after: _Outcome) -> tuple[str, str]:
    """Return the verdict of a run with the patch, and the reason."""
    if after.failure:
        return RAISES, f"with this switched on, the script fails: {after.failure}"
    now, then = sum(before.sent.values()), sum(after.sent.values())
    if then > now:
        return MORE, f"the script's programs send {size(now)} now, and {size(then)} with this on"
    return SWITCH, ""


def _joined(sites: Sequence[Site], all_rows: Sequence[Row]) -> list[list[Site]]:
    """Split sites into groups that are switched together."""
    groups = {site: [site] for site in sites}
    for first, second in pairs(all_rows):
        if first in groups and second in groups and groups[first] is not groups[second]:
            groups[first] += groups[second]
            for site in groups[second]:
                groups[site] = groups[first]
    return list({id(group): group for group in groups.values()}.values())
