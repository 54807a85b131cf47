"""Judge programs' collectives; exit 0 if every one is needed, 1 if there are findings.

FILE is compiled HLO text (what compiled.as_text() returns, or a file of --xla_dump_to, which gzip
may have compressed), a folder of --xla_dump_to, or a pattern of files; - is stdin. Several programs
get one table, the costliest first. Exit 2 if one of them can't be judged.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from shardrules import report
from shardrules.commands import flags, reading, rules
from shardrules.costs import findings
from shardrules.costs.timings import Timings
from shardrules.errors import ShardrulesError
from shardrules.report import several

if TYPE_CHECKING:
    from shardrules.watching.profiles.shown import Profile


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


def run(arguments: argparse.Namespace) -> int:
    """Write the report, and return whether there are findings."""
    text, code = judged(arguments)
    flags.write(text, arguments.output)
    return code


def judged(arguments: argparse.Namespace) -> tuple[str, int]:
    """Judge the files as the flags say; return the report, and what it means as an exit code."""
    allow = flags.allowances(arguments)
    options = {name: getattr(arguments, name) for name in ("strict", "target", "cheapest")}
    if not (arguments.files or arguments.profile):
        raise ShardrulesError(
            "nothing to judge; name a FILE of compiled HLO, or a folder of --xla_dump_to"
        )
    if not arguments.files:
        measured = _of_profile(arguments, allow, options)
        _say_of(measured)
        contents = [program.content for program in measured.programs]
        return _written(arguments.format, contents, [], len(contents) > 1)
    programs, failures = reading.judged(arguments.files, arguments)
    times: Sequence[Timings | None] = [None] * len(programs)
    if arguments.profile:
        from shardrules.watching.profiles import profile

        judgements = [judgement for _, judgement in programs]
        measured, times = profile.of_judged(arguments.profile, judgements, **options)
        _say_of(measured)
    contents = [
        report.content(
            judgement, title=title, allow=findings.Allowances(allow), timings=timings, **options
        )
        for (title, judgement), timings in zip(programs, times)
    ]
    return _written(arguments.format, contents, failures, len(programs) + len(failures) > 1)


def _written(
    format: str, contents: list[report.Content], failures: list[tuple[str, str]], is_several: bool
) -> tuple[str, int]:
    """Write a report of one program, or of several; return its exit code too."""
    if contents and not is_several:
        (content,) = contents
        return report.WRITERS[format](content), flags.CLEAN if content.clean else flags.FOUND
    all_of_them = several.gather(contents, [1] * len(contents), failures, of_process=False)
    code = flags.UNUSABLE if failures else flags.CLEAN if all_of_them.clean else flags.FOUND
    return report.WRITERS[format](all_of_them), code


def _say_of(measured: Profile) -> None:
    for line in (measured.about, *measured.notes):
        flags.say(line)


def _of_profile(
    arguments: argparse.Namespace, allow: dict[str, str], options: dict[str, Any]
) -> Profile:
    """Judge the programs of a profile."""
    from shardrules.watching.profiles import profile

    registry = rules.Rules(arguments)
    if arguments.outputs is not None:
        raise ShardrulesError(
            "--outputs is about the outputs of a FILE; with --profile, name that FILE too"
        )
    mesh = reading.mesh_of(arguments.mesh)
    measured = profile.read(arguments.profile, mesh=mesh, registry=registry, allow=allow, **options)
    for line in registry.unused([program.content.judgement for program in measured.programs]):
        flags.say(line)
    if not measured.programs:
        flags.say("no collectives in any program that ran while the profile was recorded")
    return measured
