"""Judge the programs of a profile, and print what each collective took in a step.

DIR is a folder in which jax.profiler.trace wrote, or one .xplane.pb file; nothing else is needed.
Exit 0 if every collective is needed, 1 if there are findings, 2 if the profile can't be read.
"""

from __future__ import annotations

import argparse

from shardrules.commands import flags, rules
from shardrules.watching.profiles.profile import profile

ARGUMENTS: flags.Arguments = {
    "directory": {"metavar": "DIR", "help": "a profile that JAX wrote"},
    "--hlo": flags.once(
        "DIR", "a folder of --xla_dump_to, for programs whose HLO the profile lacks"
    ),
    **flags.JUDGING,
    "--format": flags.format_of(["text", "json"], "how the report is written"),
    **flags.READING,
}


def run(arguments: argparse.Namespace) -> int:
    measured = profile(
        arguments.directory,
        mesh=arguments.mesh,
        hlo=arguments.hlo,
        strict=arguments.strict,
        allow=dict(arguments.allow),
        registry=rules.Rules(arguments),
    )
    text = str(measured) if arguments.format == "text" else measured.as_json() + "\n"
    flags.write(text, arguments.output, of_text=arguments.format == "text")
    return flags.FOUND if measured.findings else flags.CLEAN
