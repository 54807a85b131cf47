"""Run a script again with its patch, and with parts of it, to see which checks can be on."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from shardrules.unchecked.migration import (
    BY_HAND,
    CHANGES,
    MORE,
    RAISES,
    SWITCH,
    UNTRIED,
    Edits,
    SiteRow,
    joined,
)
from shardrules.unchecked.results import Outcome, different, sent_by_name
from shardrules.unchecked.sites import Site
from shardrules.units import size


def tried(
    rows: Sequence[SiteRow],
    before: Outcome,
    edit: Callable[[Sequence[SiteRow]], Edits],
    run: Callable[[Edits], Outcome] | None,
) -> tuple[list[SiteRow], Outcome | None]:
    """Run the script with its patch, and return the sites' verdicts and its last good run."""
    # Try all sites at once. If that run fails, sends more or changes results, try the sites in
    # groups, each together with the groups that passed before it. So each group costs one run, and
    # the passed groups are known to work together. Also try sites whose retrace would send more
    # (MORE), since the script may not differentiate as the retrace did.
    hopeful = [row._replace(verdict=SWITCH) if row.verdict == MORE else row for row in rows]
    patched = edit(hopeful).sites
    switched = [row.site for row in rows if row.verdict == SWITCH]
    verdicts = {site: (BY_HAND, "") for site in switched if site not in patched}
    groups, passed, last = [list(patched)] if patched else [], set[Site](), None
    if run is None or before.failure:
        reason = f"the script as it is fails: {before.failure}" if before.failure else ""
        verdicts |= {site: (UNTRIED, reason) for site in switched if site in patched}
        groups = []
    while groups and run is not None:
        group = groups.pop(0)
        on = passed.union(group)
        verdict_of = {site: SWITCH if site in on else "not in this trial" for site in patched}
        trial_rows = [row._replace(verdict=verdict_of.get(row.site, row.verdict)) for row in rows]
        outcome = run(edit(trial_rows))
        sums = sent_by_name(before.sent, outcome.sent)
        now, then = sum(each.before for each in sums), sum(each.after for each in sums)
        judged = SWITCH, ""
        if outcome.failure:
            judged = RAISES, f"with this switched on, the script fails: {outcome.failure}"
        elif then > now:
            sent = f"the script's programs send {size(now)} now, and {size(then)} with this on"
            judged = MORE, sent
        elif changed := different(before.results, outcome.results):
            judged = CHANGES, f"with this switched on, {changed}"
        if judged[0] == SWITCH:
            passed, last = on, outcome
        elif len(group) == len(patched) and len(parts := joined(patched, rows)) > 1:
            groups = parts
            continue
        verdicts |= dict.fromkeys(group, judged)
    decided = []
    for row in rows:
        verdict, note = verdicts.get(row.site, (row.verdict, row.note))
        decided.append(row._replace(verdict=verdict, note=note))
    return decided, last
