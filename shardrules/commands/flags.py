"""Flags that more than one command has.

Imports neither jax nor NumPy: a command that runs a script leaves both to it, which may set first
what they read from its environment.
"""

from __future__ import annotations

import argparse
from typing import Any

from shardrules.costs.estimates import TARGETS
from shardrules.errors import ShardrulesError

__all__ = ["FORMATS", "Once", "add_arguments", "add_judging", "allowances"]

FORMATS = ("text", "markdown", "json", "html", "github", "sarif")


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
        help="each all-reduce that is needed where it stands and would move fewer bytes elsewhere "
        "is a finding; otherwise only those in loops that one before or after the loop replaces, "
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


def allowances(arguments: argparse.Namespace) -> dict[str, str]:
    """Read what ``--allow`` was given, from findings to reasons.

    Raises:
      ShardrulesError: one has no reason.
    """
    found = {}
    for text in arguments.allow:
        what, colon, reason = text.partition(": ")
        if not colon:
            raise ShardrulesError(
                f"--allow={text!r} gives no reason; write --allow='redundant "
                "all-reduce(model): issue 12'"
            )
        found[what.strip()] = reason.strip()
    return found
