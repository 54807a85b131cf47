"""Which shard_maps can have their check on, the patch for that, and what it saves."""

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
    """How a run of the script ended: ``commands.trial.Outcome``."""

    @property
    def failure(self) -> str: ...
    @property
    def sent(self) -> Mapping[str, int]: ...


def tried(
    found: Sequence[Row],
    before: _Outcome,
    edit: Callable[[Sequence[Row]], Edits],
    run: Callable[[Edits], _Outcome] | None,
) -> tuple[list[Row], _Outcome | None]:
    """Run the script with its patch, and return the sites' verdicts and its last good run."""
    # All sites are tried at once. If that fails or sends more, each is tried with those before it
    # that passed.
    # What a site really sends is measured: the program may not differentiate as the look did.
    candidates = [r._replace(verdict=SWITCH) if r.verdict == MORE else r for r in found]
    sites = edit(candidates).sites
    verdicts = {
        row.site: (BY_HAND, "") for row in found if row.verdict == SWITCH and row.site not in sites
    }

    def settled(some: Mapping[Site, tuple[str, str]]) -> list[Row]:
        return [
            row
            if row.site not in some
            else row._replace(verdict=some[row.site][0], note=some[row.site][1])
            for row in found
        ]

    if run is None or before.failure:
        why = f"the script as it is fails: {before.failure}" if before.failure else ""
        looked = {r.site: (UNTRIED, why) for r in found if r.verdict == SWITCH and r.site in sites}
        return settled(verdicts | looked), None
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
            for row in found
        ]
        outcome = run(edit(trial))
        verdict = _judged(before, outcome)
        if verdict[0] == SWITCH:
            passed, last = [*passed, *group], outcome
        elif len(group) == len(sites) and len(parts := _together(sites, found)) > 1:
            groups = parts
            continue
        verdicts |= {site: verdict for site in group}
    return settled(verdicts), last


def _judged(before: _Outcome, after: _Outcome) -> tuple[str, str]:
    """Return the verdict that a run with the patch gives, and what it did."""
    if after.failure:
        return RAISES, f"with this switched on, the script fails: {after.failure}"
    now, then = sum(before.sent.values()), sum(after.sent.values())
    if then > now:
        return MORE, f"the script's programs send {size(now)} now, and {size(then)} with this on"
    return SWITCH, ""


def _together(sites: Sequence[Site], found: Sequence[Row]) -> list[list[Site]]:
    """Split sites into groups that are switched together."""
    groups = {site: [site] for site in sites}
    for one, other in pairs(found):
        if one in groups and other in groups and groups[one] is not groups[other]:
            groups[one] += groups[other]
            for site in groups[other]:
                groups[site] = groups[one]
    return list({id(group): group for group in groups.values()}.values())
