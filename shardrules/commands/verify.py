"""Judge programs' collectives; exit 0 if every one is needed, 1 if there are findings.

FILE is compiled HLO text (what compiled.as_text() returns, or a file of --xla_dump_to, which gzip
may have compressed), a folder of --xla_dump_to, or a pattern of files; - is stdin. Several programs
get one table, the costliest first. Exit 2 if one of them can't be judged.
"""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Sequence
from typing import Any

from shardrules import report
from shardrules.commands import flags, reading, rules
from shardrules.costs import findings
from shardrules.costs.timings import Timings
from shardrules.costs.worth import Switched
from shardrules.errors import ShardrulesError, few
from shardrules.report import several
from shardrules.watching.profiles import profile
from shardrules.watching.profiles.shown import Profile

_NAMED = 3  # files in a report's title
ARGUMENTS: flags.Arguments = {
    "files": {
        "metavar": "FILE",
        "nargs": "*",
        "help": "compiled HLO text, a folder or a pattern of such files, or - for stdin",
    },
    "--profile": flags.once(
        "DIR",
        "show what each collective took in a profile that JAX wrote there; without FILE, "
        "judge the programs of the profile",
    ),
    **flags.READING,
    **flags.REPORT,
}


def run(arguments: argparse.Namespace) -> int:
    if not (arguments.files or arguments.profile):
        raise ShardrulesError(
            "nothing to judge; name a FILE of compiled HLO, or a folder of --xla_dump_to"
        )
    options = {name: getattr(arguments, name) for name in ("strict", "target", "cheapest")}
    failures: list[tuple[str, str]] = []
    if arguments.files:
        programs, failures = reading.judged(arguments.files, arguments)
        times: Sequence[Timings | None] = [None] * len(programs)
        if arguments.profile:
            judgements = [judgement for _, judgement in programs]
            measured, times = profile.of_judged(arguments.profile, judgements, **options)
            flags.say(measured.about, *measured.notes)
        allow = findings.Allowances(dict(arguments.allow))
        contents = []
        for (title, judgement), timings in zip(programs, times):
            content = report.content(
                judgement,
                title=title,
                allow=allow,
                timings=timings,
                switched=Switched.kept(judgement.module),
                **options,
            )
            contents.append(content)
    else:
        measured = _of_profile(arguments, options)
        flags.say(measured.about, *measured.notes)
        contents = [program.content for program in measured.programs]
    if len(contents) == 1 and not failures:
        whole: report.Content | several.Several = contents[0]
    else:
        whole = several.gather(contents, [1] * len(contents), failures, of_process=False)
        named = few(arguments.files or [arguments.profile], _NAMED)
        whole = dataclasses.replace(whole, title=named)
    text = report.WRITERS[arguments.format](whole)
    flags.write(text, arguments.output, of_text=arguments.format == "text")
    return flags.UNUSABLE if failures else flags.CLEAN if whole.clean else flags.FOUND


def _of_profile(arguments: argparse.Namespace, options: dict[str, Any]) -> Profile:
    registry = rules.Rules(arguments)
    about = {
        "out-shardings": "outputs",
        "in": "specs",
        "parameters": "parameters",
        "slices": "slices",
    }
    for flag, name in about.items():
        if getattr(arguments, name) is not None:
            raise ShardrulesError(f"--{flag} describes a FILE; with --profile, name that FILE too")
    measured = profile.read(
        arguments.profile,
        mesh=arguments.mesh,
        registry=registry,
        allow=dict(arguments.allow),
        **options,
    )
    flags.say(*registry.unused([program.content.judgement for program in measured.programs]))
    if not measured.programs:
        flags.say("no collectives in any program that ran while the profile was recorded")
    return measured
