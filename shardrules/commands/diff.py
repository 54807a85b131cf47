"""Compare two programs' collectives; exit 1 if any came, went, grew or shrank.

A and B hold compiled HLO text (``compiled.as_text()``, or files of ``--xla_dump_to``, gzip's too);
- is stdin.
"""

from __future__ import annotations

import argparse

from shardrules import report
from shardrules.commands import flags, reading
from shardrules.costs import comparing
from shardrules.errors import ShardrulesError

__all__ = ["add_arguments", "run"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of ``diff``."""
    parser.add_argument("before", metavar="A", help="compiled HLO text, or - for stdin")
    parser.add_argument("after", metavar="B", help="the other program")
    reading.add_arguments(parser)
    parser.add_argument(
        "--format",
        action=flags.Once,
        choices=list(report.DIFFS),
        default="text",
        help="how the differences are written",
    )


def run(arguments: argparse.Namespace) -> int:
    """Write the differences, and return whether there are any."""
    given = arguments.before, arguments.after
    if given.count("-") > 1:
        raise ShardrulesError("only one of the two programs can be read from stdin")
    found = reading.judged(given, arguments, each_alone=True)
    before, after = (report.content(one.judgement, title=one.name) for one in found)
    names = comparing.common_names(before.account, after.account)
    changes = comparing.compare(
        *(comparing.grouped(c.account, groups=True, names=names) for c in (before, after))
    )
    reading.write(report.DIFFS[arguments.format](before, after, changes), arguments)
    return reading.FOUND if changes else reading.CLEAN
