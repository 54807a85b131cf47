"""Flags that more than one command has, and what all commands write.

Imports neither jax nor NumPy: a command that runs a script leaves both to it, which may set first
what they read from its environment.
"""

from __future__ import annotations

import argparse
import pathlib
import sys
from typing import IO, Any

from shardrules.costs.estimates import TARGETS
from shardrules.errors import ShardrulesError

FORMATS = ("text", "markdown", "json", "html", "github", "sarif")
CLEAN, FOUND, UNUSABLE = 0, 1, 2  # exit codes


class Once(argparse.Action):
    """Store a flag's value; a second one would silently replace the first."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        option_string: str | None = None,
    ) -> None:
        """Store it, or say that it is there already."""
        if self.dest in vars(namespace).setdefault("given", set()):
            parser.error(f"{option_string} was given twice; give it once")
        namespace.given.add(self.dest)
        setattr(namespace, self.dest, values)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags that say what a report is to hold, and how it is written."""
    parser.add_argument(
        "--format",
        action=Once,
        choices=FORMATS,
        default="text",
        help="how the report is written; github: workflow annotations; sarif: for code scanning",
    )
    parser.add_argument(
        "--target",
        action=Once,
        choices=list(TARGETS),
        help="estimate times from bandwidth and latency of this accelerator's links",
    )
    parser.add_argument(
        "--cheapest",
        action="store_true",
        help="each needed all-reduce that would move fewer bytes at another place is a finding; "
        "without this flag only one in a loop that a single one outside of the loop replaces, "
        "above 1%% of the program's bytes",
    )
    add_judging(parser)


def add_judging(parser: argparse.ArgumentParser) -> None:
    """Add the flags that say what a finding is."""
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


def add_output(parser: argparse.ArgumentParser, what: str, stream: str) -> None:
    """Add the flag that names the file for what goes to a stream otherwise."""
    where = "" if stream == "stdout" else "; - is stdout"
    parser.add_argument(
        "--output",
        action=Once,
        metavar="FILE",
        help=f"write {what} there instead of to {stream}{where}",
    )


def allowances(arguments: argparse.Namespace) -> dict[str, str]:
    """Read what ``--allow`` was given, from findings to reasons."""
    reasons = {}
    for text in arguments.allow:
        what, colon, reason = text.partition(": ")
        if not colon:
            raise ShardrulesError(
                f"--allow={text!r} gives no reason; write --allow='redundant "
                "all-reduce(model): issue 12'"
            )
        reasons[what.strip()] = reason.strip()
    return reasons


def say(message: str) -> None:
    """Write a line beside the report, to stderr."""
    print(f"shardrules: {message}", file=sys.stderr, flush=True)


def check_writable(*files: str | None) -> None:
    """Raise now what ``write`` would raise after a long run."""
    for file in files:
        if file not in (None, "-"):
            _put(file, "", "a")


def write(text: str, file: str | None, stream: IO[str] | None = None) -> None:
    """Write to a file; to stdout for ``-``; to a stream, else stdout, for None."""
    if file is not None and file != "-":
        _put(file, text, "w")
        return
    out = stream if stream is not None and file is None else sys.stdout
    out.write(text)
    out.flush()


def _put(file: str, text: str, mode: str) -> None:
    try:
        with pathlib.Path(file).open(mode, encoding="utf-8") as out:
            out.write(text)
    except OSError as error:
        raise ShardrulesError(f"can't write {file}: {error.strerror}") from error
