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
import shlex
import signal
import sys
from collections.abc import Sequence

from shardrules.commands import closing, flags, rules, script, trial
from shardrules.errors import ShardrulesError
from shardrules.unchecked import migration
from shardrules.unchecked.migration import BY_HAND, SWITCH, UNTRIED, Edits, SiteRow
from shardrules.unchecked.results import Outcome
from shardrules.unchecked.tried import tried
from shardrules.units import counted

USAGE = flags.SCRIPT_USAGE
ARGUMENTS: flags.Arguments = {
    **flags.RULES,
    "--diff": flags.once(
        "FILE",
        "write a patch to this file that switches on every check that can be (patch "
        "-p1 < FILE); - is stdout",
    ),
    "--output": flags.once("FILE", "write the table to this file instead of stderr; - is stdout"),
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
    if -before.code in (signal.SIGINT, signal.SIGTERM):  # end by the same signal as the script
        signal.signal(-before.code, signal.SIG_DFL)
        os.kill(os.getpid(), -before.code)
    return (before.code if before.code >= 0 else 128 - before.code) or code


def _report(arguments: argparse.Namespace, file: str, before: Outcome) -> int:
    flags.say(*before.notes)
    lines = [rules.to_write(flag) for flag in before.used]

    def edit(rows: Sequence[SiteRow]) -> Edits:
        return migration.edited(rows, file, lines)

    runs = 0

    def again(patch: Edits) -> Outcome:
        nonlocal runs
        runs += 1
        flags.say(f"running the script again with {counted(len(patch.sites), 'site')} switched on")
        # Leave out the flags for rules that the patched script registers itself.
        text = "".join(patch.after.get(file, ()))
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
    text = migration.written(rows, (before, after) if after else None, before.compiled)
    if before.failure and not rows:
        text = f"until the script failed ({before.failure}), {text}"
    patch = edit(rows)
    if patch.left:
        text += "".join(["\nnot in the patch:\n", *(f"  {line}\n" for line in patch.left)])
    if arguments.diff is not None:
        flags.write(migration.diff(patch), arguments.diff, of_text=False)
        if arguments.diff != "-":
            no_site = "no shard_map was seen before the script failed"
            no_site = no_site if before.failure else "no check is off"
            said.append(_applied(patch, arguments.diff, len(rows), runs, no_site))
    elif any(row.verdict in (SWITCH, UNTRIED) for row in rows):
        said.append("for a patch that switches them on, add --diff on.patch before the script")
    flags.write(text, arguments.output, sys.stderr)
    flags.say(*said)
    accepted = SWITCH, BY_HAND
    return 0 if all(row.verdict in accepted for row in rows) else 1


def _applied(patch: Edits, file: str, sites: int, runs: int, no_site: str) -> str:
    """Say how to apply a patch, or why it is empty, given the number of sites and of runs."""
    count = counted(len(patch.sites) or sites, "shard_map")
    if patch.sites:
        folder = migration.folder_of(patch)
        is_here = folder == os.getcwd()
        said = "in this folder, apply it" if is_here else "apply it"
        to = "" if is_here else f"-d {shlex.quote(os.path.relpath(folder))} "
        return f"{file} switches on the check of {count}; {said}: `patch -p1 {to}< {file}`"
    if not sites:
        return f"{file} is empty: {no_site}"
    compared = (
        f"{counted(runs, 'run')} with a patch failed, sent more or returned something else"
        if runs
        else "the script did not run with a patch, and nothing was compared"
    )
    return f"{file} is empty, as a patch can't switch on the check of {count}: {compared}"
