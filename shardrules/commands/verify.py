"""Judge programs' collectives; exit 0 if every one is needed, 1 if there are findings.

FILE holds compiled HLO text (``compiled.as_text()``, or a file of ``--xla_dump_to``, gzip's too),
or is a folder of --xla_dump_to or a pattern of files; - is stdin. Of several, there is one table,
the costliest first; exit 2 if one of them can't be judged.
"""

from __future__ import annotations

import argparse

from shardrules import hlo, report
from shardrules.commands import flags, reading
from shardrules.costs import findings
from shardrules.report import several

__all__ = ["add_arguments", "judged", "run"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of ``verify`` and ``report``."""
    parser.add_argument(
        "files",
        metavar="FILE",
        nargs="+",
        help="compiled HLO text, a folder or a pattern of such files, or - for stdin",
    )
    reading.add_arguments(parser)
    flags.add_arguments(parser)


def judged(arguments: argparse.Namespace) -> tuple[str, int]:
    """Judge the files as the flags say; return the report, and what it means as an exit code."""
    allow = flags.allowances(arguments)
    found = reading.judged(arguments.files, arguments)
    contents = [
        report.content(
            one.judgement,
            title=one.name,
            strict=arguments.strict,
            allow=findings.Allowances(allow),
            target=arguments.target,
            cheapest=arguments.cheapest,
        )
        for one in found
        if isinstance(one.result, hlo.Judgement)
    ]
    if len(found) == 1:
        (content,) = contents
        text = several.ONE[arguments.format](content)
        return text, reading.CLEAN if content.clean else reading.FOUND
    failures = [(one.name, str(one.result)) for one in found if isinstance(one.result, Exception)]
    all_of_them = several.gather(contents, [1] * len(contents), failures, of_process=False)
    text = several.WRITERS[arguments.format](all_of_them)
    if all_of_them.failures:
        return text, reading.UNUSABLE
    return text, reading.CLEAN if all_of_them.clean else reading.FOUND


def run(arguments: argparse.Namespace) -> int:
    """Write the report, and return whether there are findings."""
    text, code = judged(arguments)
    reading.write(text, arguments)
    return code
