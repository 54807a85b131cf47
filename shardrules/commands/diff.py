"""Compare two programs' collectives; exit 1 if any came, went, grew or shrank.

A and B are compiled HLO text (what compiled.as_text() returns, or files of --xla_dump_to, which
gzip may have compressed); - is stdin. Of two profiles that JAX wrote (folders, or .xplane.pb
files), the report says what each change saved, in milliseconds.
"""

from __future__ import annotations

import argparse
from typing import Any

from shardrules import report
from shardrules.commands import flags, reading, rules
from shardrules.costs import comparing
from shardrules.errors import ShardrulesError
from shardrules.watching.profiles import compared, profile

ARGUMENTS: flags.Arguments = {
    "before": {"metavar": "A", "help": "compiled HLO text, or - for stdin"},
    "after": {"metavar": "B", "help": "the other program"},
    **flags.READING,
    "--format": flags.format_of(report.DIFFS, "how the differences are written"),
}


def run(arguments: argparse.Namespace) -> int:
    given = arguments.before, arguments.after
    if given.count("-") > 1:
        raise ShardrulesError("only one of the two programs can be read from stdin")
    if any(map(profile.is_profile, given)):
        text, changes = _of_profiles(given, arguments)
    else:
        programs, _ = reading.judged(given, arguments, each_alone=True)
        before, after = (report.content(judgement, title=title) for title, judgement in programs)
        names = comparing.common_names(before.account, after.account)
        changes = comparing.compare(
            *(comparing.grouped(c.account, groups=True, names=names) for c in (before, after))
        )
        text = report.DIFFS[arguments.format](before, after, changes)
    flags.write(text, arguments.output, of_text=arguments.format == "text")
    return flags.FOUND if changes else flags.CLEAN


def _of_profiles(given: tuple[str, str], arguments: argparse.Namespace) -> tuple[str, list[Any]]:
    for name in given:
        if not profile.is_profile(name):
            raise ShardrulesError(
                f"{name} is not a profile, but the other one is; give two profiles"
            )
    if arguments.format not in compared.WRITERS:
        raise ShardrulesError(
            f"profiles can be compared as {', '.join(compared.WRITERS)}, not as {arguments.format}"
        )
    registry = rules.Rules(arguments)
    comparison = compared.compare(
        *(profile.profile(name, mesh=arguments.mesh, registry=registry) for name in given)
    )
    return compared.WRITERS[arguments.format](comparison), comparison.changed
