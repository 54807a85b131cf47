"""Compare two programs' collectives; exit 1 if any came, went, grew or shrank.

A and B hold compiled HLO text (``compiled.as_text()``, or files of ``--xla_dump_to``); - is stdin.
"""

from __future__ import annotations

import argparse

from shardrules.commands import reading
from shardrules.costs import accounts
from shardrules.errors import ShardrulesError

__all__ = ["add_arguments", "run"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of ``diff``."""
    parser.add_argument("before", metavar="A", help="compiled HLO text, or - for stdin")
    parser.add_argument("after", metavar="B", help="the other program")
    reading.add_arguments(parser)


def run(arguments: argparse.Namespace) -> int:
    """Write the differences, and return whether there are any."""
    files = arguments.before, arguments.after
    if files.count("-") > 1:
        raise ShardrulesError("only one of the two programs can be read from stdin")
    before, after = (accounts.of(reading.judge(file, arguments)) for file in files)
    changes = accounts.compare(
        accounts.grouped(before, groups=True), accounts.grouped(after, groups=True)
    )
    if not changes:
        reading.write(f"the same collectives: {before.total}\n", arguments)
        return reading.CLEAN
    lines = [
        f"- {files[0]}: {before.total}, {before.total.wire_bytes} wire bytes",
        f"+ {files[1]}: {after.total}, {after.total.wire_bytes} wire bytes",
        "",
    ]
    reading.write("\n".join([*lines, *map(str, changes)]) + "\n", arguments)
    return reading.FOUND
