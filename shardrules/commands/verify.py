"""Judge programs' collectives; exit 0 if every one is needed, 1 if there are findings.

FILE holds compiled HLO text (``compiled.as_text()``, or a file of ``--xla_dump_to``, gzip's too),
or is a folder of --xla_dump_to or a pattern of files; - is stdin. Of several, there is one table,
the costliest first; exit 2 if one of them can't be judged.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from shardrules import hlo, report
from shardrules.commands import flags, reading, rules
from shardrules.costs import findings
from shardrules.costs.timings import Timings
from shardrules.errors import ShardrulesError
from shardrules.report import several

if TYPE_CHECKING:
    from shardrules.watching.profiles.shown import Profile

__all__ = ["add_arguments", "judged", "run"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of ``verify`` and ``report``."""
    parser.add_argument(
        "files",
        metavar="FILE",
        nargs="*",
        help="compiled HLO text, a folder or a pattern of such files, or - for stdin",
    )
    parser.add_argument(
        "--profile",
        action=flags.Once,
        metavar="DIR",
        help="show what each collective took in a profile that JAX wrote there; without FILE, "
        "judge the programs of the profile",
    )
    reading.add_arguments(parser)
    flags.add_arguments(parser)


def judged(arguments: argparse.Namespace) -> tuple[str, int]:
    """Judge the files as the flags say; return the report, and what it means as an exit code."""
    allow = flags.allowances(arguments)
    if not (arguments.files or arguments.profile):
        raise ShardrulesError("the following arguments are required: FILE")
    options = {
        "strict": arguments.strict,
        "target": arguments.target,
        "cheapest": arguments.cheapest,
    }
    measured, found = None, []
    if arguments.files:
        found = reading.judged(arguments.files, arguments)
        judged = [one for one in found if isinstance(one.result, hlo.Judgement)]
        times: Sequence[Timings | None] = [None] * len(judged)
        if arguments.profile:
            from shardrules.watching.profiles import profile

            judgements = [one.judgement for one in judged]
            measured, times = profile.of_judged(arguments.profile, judgements, **options)
        contents = [
            report.content(
                one.judgement,
                title=one.name,
                allow=findings.Allowances(allow),
                timings=timings,
                **options,
            )
            for one, timings in zip(judged, times)
        ]
    else:
        measured = _of_profile(arguments, allow, options)
        contents = [program.content for program in measured.programs]
    for line in (measured.about, *measured.notes) if measured is not None else ():
        reading.say(line)
    if len(contents) == 1 and len(found) < 2:
        (content,) = contents
        text = several.ONE[arguments.format](content)
        return text, reading.CLEAN if content.clean else reading.FOUND
    failures = [(one.name, str(one.result)) for one in found if isinstance(one.result, Exception)]
    all_of_them = several.gather(contents, [1] * len(contents), failures, of_process=False)
    text = several.WRITERS[arguments.format](all_of_them)
    if all_of_them.failures:
        return text, reading.UNUSABLE
    return text, reading.CLEAN if all_of_them.clean else reading.FOUND


def _of_profile(
    arguments: argparse.Namespace, allow: dict[str, str], options: dict[str, Any]
) -> Profile:
    """Judge the programs of a profile."""
    from shardrules.watching.profiles import profile

    registry, notes = rules.Rules(arguments), list[str]()
    if arguments.outputs is not None:
        raise ShardrulesError("--outputs is of one FILE; with --profile, name that file, too")
    judge = profile.judging(reading.mesh_of(arguments.mesh), registry, notes)
    measured = profile.read(arguments.profile, judge, notes=notes, allow=allow, **options)
    for line in registry.unused([program.content.judgement for program in measured.programs]):
        reading.say(line)
    if not measured.programs:
        reading.say("no collectives in any program that ran while the profile was recorded")
    return measured


def run(arguments: argparse.Namespace) -> int:
    """Write the report, and return whether there are findings."""
    text, code = judged(arguments)
    reading.write(text, arguments)
    return code
