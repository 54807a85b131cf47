"""Judge a program's collectives; exit 0 if every one is needed, 1 if there are findings.

FILE holds compiled HLO text (``compiled.as_text()``, or a file of ``--xla_dump_to``); - is stdin.
"""

from __future__ import annotations

import argparse

from shardrules import report
from shardrules.commands import reading
from shardrules.costs import findings
from shardrules.errors import ShardrulesError

__all__ = ["add_arguments", "content", "run", "written"]

_FORMATS = {
    "text": report.plain,
    "markdown": report.markdown,
    "json": report.as_json,
    "html": report.page,
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of ``verify`` and ``report``."""
    parser.add_argument("file", metavar="FILE", help="compiled HLO text, or - for stdin")
    reading.add_arguments(parser)
    parser.add_argument(
        "--format",
        action=reading.Once,
        choices=list(_FORMATS),
        default="text",
        help="how the report is written",
    )
    parser.add_argument(
        "--strict",
        action="store_true",
        help="accept proofs alone: verdicts that rest on declared rules are findings",
    )
    parser.add_argument(
        "--allow",
        metavar="'FINDING: REASON'",
        action="append",
        default=[],
        help="a known finding and why it stays, 'redundant all-reduce(model) at model.py: issue "
        "12'; may be repeated",
    )


def content(arguments: argparse.Namespace) -> report.Content:
    """Judge the file as the flags say."""
    allow = findings.Allowances(dict(_allowance(text) for text in arguments.allow))
    (one,) = reading.judged([arguments.file], arguments)
    return report.content(one.judgement, title=one.name, strict=arguments.strict, allow=allow)


def written(found: report.Content, arguments: argparse.Namespace) -> str:
    """Return a report in the format that the flags name."""
    return _FORMATS[arguments.format](found)


def run(arguments: argparse.Namespace) -> int:
    """Write the report, and return whether there are findings."""
    found = content(arguments)
    reading.write(written(found, arguments), arguments)
    return reading.CLEAN if found.clean else reading.FOUND


def _allowance(text: str) -> tuple[str, str]:
    what, colon, reason = text.partition(": ")
    if not colon:
        raise ShardrulesError(
            f"--allow={text!r} gives no reason; write --allow='redundant "
            "all-reduce(model): issue 12'"
        )
    return what.strip(), reason.strip()
