"""Run a script, say which of its shard_maps can have their check on, and run it again with that.

Flags stand before the script; what follows it, or -m MODULE, is its own. Each call of a shard_map
whose check is off (check_vma=False, check_rep=False) is traced again with the check on, and so is
its derivative, under the rules that are registered. Then the script runs once more with the patch,
in a process of its own, to measure what it sends and to compare what its programs return; its
output is dropped, and no source file changes. If that run fails, sends more or returns something
else, the script runs once for each site. The table goes to stderr, or to a file.

Exit code: the script's own where it is not 0; else 0 if every check that is off can be switched on
(or if none is off), 1 if not, 2 if the script can't be read.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
from collections.abc import Callable, Sequence

from shardrules import migration
from shardrules.commands import closing, flags, rules, script, trial
from shardrules.errors import ShardrulesError
from shardrules.hooks.sites import Site
from shardrules.migration import BY_HAND, CHANGES, MORE, RAISES, SWITCH, UNTRIED, Edits, SiteRow
from shardrules.report.grouping import counted, size
from shardrules.watching.results import different

USAGE = flags.SCRIPT_USAGE
ARGUMENTS: flags.Arguments = {
    **flags.RULES,
    "--diff": flags.once(
        "FILE", "write a patch there (patch -p1 < FILE) that switches on what can be; - is stdout"
    ),
    "--output": flags.once("FILE", "write the table there instead of to stderr; - is stdout"),
    "--once": flags.switch("do not run the script a second time with the patch: no site is tried"),
    **flags.SCRIPT,
}


def run(arguments: argparse.Namespace) -> int:
    target = script.find(arguments)
    flags.check_writable(arguments.diff, arguments.output)
    if arguments.diff is not None and arguments.diff == arguments.output:
        raise ShardrulesError(f"--diff and --output both name {arguments.diff}; name two files")
    rules.check(arguments)
    before = trial.run(arguments, look=True)
    flags.say(*filter(None, [closing.behind(target, ARGUMENTS, "migrate")]))
    code = _report(arguments, target.file, before)
    if -before.code in (signal.SIGINT, signal.SIGTERM):  # end by the signal that ended the script
        signal.signal(-before.code, signal.SIG_DFL)
        os.kill(os.getpid(), -before.code)
    return (before.code if before.code >= 0 else 128 - before.code) or code


def _report(arguments: argparse.Namespace, file: str, before: trial.Outcome) -> int:
    flags.say(*before.notes)
    lines = [rules.to_write(flag) for flag in before.used]

    def edit(rows: Sequence[SiteRow]) -> Edits:
        return migration.edited(rows, file, lines)

    def again(patch: Edits) -> trial.Outcome:
        flags.say(f"running the script again with {counted(len(patch.sites), 'site')} switched on")
        text = "".join(patch.after.get(file, ()))  # the patched script registers some rules itself
        left = {
            flag: [v for v in values if rules.to_write(f"--{flag}={v}") not in text]
            for flag, values in (("rule", arguments.rule), ("rules", arguments.rules))
        }
        trial_arguments = argparse.Namespace(**{**vars(arguments), **left})
        return trial.run(trial_arguments, look=False, texts=patch.after)

    untried = migration.rows(before.calls)
    try:
        rows, after = tried(untried, before, edit, None if arguments.once else again)
    except KeyboardInterrupt:
        flags.say("the run with the patch was interrupted: no site was tried")
        rows, after = tried(untried, before, edit, None)
    said: list[str] = []
    text = migration.written(rows, before.sent, after.sent if after else None)
    if arguments.diff is not None:
        patch = edit(rows)
        flags.write(migration.diff(patch), arguments.diff, of_text=False)
        if arguments.diff != "-":
            said.append(_applied(patch, arguments.diff))
        if patch.left:
            text += "".join(["\nnot in the patch:\n", *(f"  {line}\n" for line in patch.left)])
    elif any(row.verdict in (SWITCH, UNTRIED) for row in rows):
        said.append("for a patch that switches them on, add --diff on.patch before the script")
    flags.write(text, arguments.output, sys.stderr)
    flags.say(*said)
    accepted = SWITCH, BY_HAND
    return 0 if all(row.verdict in accepted for row in rows) else 1


def _applied(patch: Edits, file: str) -> str:
    """Say how to apply a patch, or that there is nothing in it."""
    if not patch.sites:
        return f"{file} is empty: no check can be switched on by a patch"
    count = counted(len(patch.sites), "shard_map")
    return f"{file} switches on the check of {count}; in this folder, apply it: patch -p1 < {file}"


def tried(
    rows: Sequence[SiteRow],
    before: trial.Outcome,
    edit: Callable[[Sequence[SiteRow]], Edits],
    run: Callable[[Edits], trial.Outcome] | None,
) -> tuple[list[SiteRow], trial.Outcome | None]:
    """Run the script with its patch, and return the sites' verdicts and its last good run."""
    # Try all sites at once. If that fails or sends more, try each with those before it that passed.
    # MORE is tried too: the script may not differentiate as the retracing did.
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
        now, then = sum(before.sent.values()), sum(outcome.sent.values())
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
        elif len(group) == len(patched) and len(parts := migration.joined(patched, rows)) > 1:
            groups = parts
            continue
        verdicts |= dict.fromkeys(group, judged)
    decided = []
    for row in rows:
        verdict, note = verdicts.get(row.site, (row.verdict, row.note))
        decided.append(row._replace(verdict=verdict, note=note))
    return decided, last
