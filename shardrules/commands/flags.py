"""Define the flags that several commands share, and write the output of all commands.

This module imports neither jax nor NumPy: a script that a command runs may first set environment
variables that these two read at import.
"""

from __future__ import annotations

import argparse
import difflib
import os
import pathlib
import sys
from collections.abc import Sequence
from typing import IO, Any

from shardrules import fitting
from shardrules.arguments import allowance
from shardrules.costs.estimates import TARGETS
from shardrules.errors import ShardrulesError

CLEAN, FOUND, UNUSABLE = 0, 1, 2  # exit codes
_SUFFIXES = {
    ".html": "html",
    ".htm": "html",
    ".md": "markdown",
    ".json": "json",
    ".sarif": "sarif",
    ".txt": "text",
}
Arguments = dict[str, dict[str, Any]]  # maps an argument's name to its options for argparse


class _Once(argparse.Action):
    """Store a flag's value, and reject a second one, which would silently replace the first."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        option_string: str | None = None,
    ) -> None:
        if self.dest in vars(namespace).setdefault("given", set()):
            parser.error(f"{option_string} was given twice; give it once")
        namespace.given.add(self.dest)
        setattr(namespace, self.dest, values)


def once(metavar: str | None, help: str, **options: Any) -> dict[str, Any]:
    return {"action": _Once, "metavar": metavar, "help": help, **options}


def switch(help: str) -> dict[str, Any]:
    return {"action": "store_true", "help": help}


def repeated(metavar: str, help: str, **options: Any) -> dict[str, Any]:
    help += "; may be repeated"
    return {"action": "append", "metavar": metavar, "default": [], "help": help, **options}


def format_of(choices: Any, help: str) -> dict[str, Any]:
    help += "; by default, --output's suffix decides, or it is text"
    return once(None, help, choices=list(choices), default="text")


def settle_format(arguments: argparse.Namespace, choices: Sequence[str]) -> None:
    """Choose the format by the suffix of --output, if --format is not given."""
    file = getattr(arguments, "output", None)
    suffix = os.path.splitext(file or "")[1].lower()
    wanted = _SUFFIXES.get(suffix)
    if "format" in vars(arguments).get("given", ()):
        return
    if wanted is None:
        if near := difflib.get_close_matches(suffix, _SUFFIXES, 1, 0.75):
            raise ShardrulesError(
                f"--output {file}: did you mean {near[0]}? To write text to a file of that name, "
                "give --format text"
            )
        return
    if wanted not in choices:
        raise ShardrulesError(
            f"--output {file} looks like {wanted}, but this command writes "
            f"{', '.join(choices)}; name another file, or give --format"
        )
    arguments.format = wanted


def _mesh(text: str) -> dict[str, int]:
    mesh: dict[str, int] = {}
    for part in text.split(","):
        name, equals, size = (p.strip() for p in part.partition("="))
        if name in mesh:
            raise ShardrulesError(f"--mesh={text} names the axis {name!r} twice")
        if not equals or not name or not size.isdecimal() or not int(size):
            raise ShardrulesError(f"--mesh={text} is not a mesh; write --mesh=data=4,model=2")
        mesh[name] = int(size)
    return mesh


def _specs(text: str) -> list[str]:
    from shardrules.hlo.reader import shardings  # late: it imports NumPy

    try:
        return shardings.read_specs(text)
    except ShardrulesError as error:
        raise ShardrulesError(f"--in={text[:200]}: {error}") from None


def _slices(text: str) -> int:
    if not text.isdecimal() or not 0 < int(text[:9]) < 10_000:
        raise ShardrulesError(f"--slices={text[:200]} is not a number of slices; write --slices=2")
    return int(text)


def _shardings(text: str) -> list[str]:
    shardings = [part.strip() for part in text.split(";")]
    for part in shardings:
        if not (part.startswith("{") and part.endswith("}") and len(part) > 2):
            raise ShardrulesError(
                f"--out-shardings={text}: {part!r} is not a sharding; write "
                "--out-shardings='{replicated}' for all outputs, or one for each, separated by "
                "semicolons"
            )
    return shardings


JUDGING: Arguments = {
    "--strict": switch("accept only proofs: verdicts that rest on declared rules are findings"),
    "--allow": repeated(
        "'FINDING: REASON'",
        "a known finding and why it stays, 'redundant all-reduce(model) at model.py: issue 12'",
        type=allowance,
    ),
}
REPORT: Arguments = {
    "--format": format_of(
        ("text", "markdown", "json", "html", "github", "sarif"),
        "how the report is written; github: workflow annotations; sarif: for code scanning",
    ),
    "--target": once(
        None,
        "estimate times from bandwidth and latency of this accelerator's links",
        choices=list(TARGETS),
    ),
    "--cheapest": switch(
        "every needed all-reduce that would move fewer bytes at another place is a finding; by "
        "default, only one that a single all-reduce outside of its loop replaces, if it moves "
        "more than 1%% of the program's bytes"
    ),
    **JUDGING,
}
RULES: Arguments = {
    "--import": repeated(
        "MODULE", "a module to import that registers rules for kernels", dest="rules"
    ),
    "--rule": repeated(
        "NAME=RULE",
        "the rule of a kernel, 'flash*=no_communication' or 'ring=all_gather(model)'; where "
        "the text does not name the kernel, NAME is its op_name, a pattern of it, or the scope "
        "nearest to the call",
    ),
}
READING: Arguments = {
    "--mesh": once(
        "AXES",
        "axis names and sizes in the order of the devices: data=4,model=2; taken from the "
        "text's tags or mesh notation if it has any",
        type=_mesh,
    ),
    "--in": once(
        "SPECS",
        "how each parameter is sharded, \"P('data'); P()\" or HLO's shardings, or one for all; "
        "compiled text of JAX 0.12 doesn't say it (testing.verify_flags prints it)",
        type=_specs,
        dest="specs",
    ),
    "--parameters": once(
        "FILE",
        "another text of the program that says it, such as the *before_optimizations.txt of "
        "its dump, which is read without this flag where it is beside FILE",
    ),
    "--slices": once(
        "N",
        "how many TPU slices the program runs on, for the text of one slice, if the mesh takes "
        "the slices one after the other, and the devices of each in the same order",
        type=_slices,
    ),
    "--out-shardings": once(
        "SHARDINGS",
        "the HLO sharding of each output, '{replicated}; {devices=[8]<=[8]}', or one for all: "
        "an output that is called replicated and differs is a finding",
        type=_shardings,
        dest="outputs",
    ),
    **RULES,
    "--output": once("FILE", "write the report to this file instead of stdout"),
}
SCRIPT: Arguments = {
    "-m": {"dest": "module", "nargs": argparse.REMAINDER, "help": "run a module"},
    "script": {"nargs": argparse.REMAINDER, "metavar": "SCRIPT [ARGS ...]", "help": "run a script"},
}
SCRIPT_USAGE = "%(prog)s [FLAGS] (SCRIPT | -m MODULE) [ARGS ...]"


def say(*messages: str) -> None:
    """Write messages to stderr, apart from the report."""
    for message in messages:
        line = f"shardrules: {message}"
        if "COLUMNS" in os.environ or fitting.is_terminal(sys.stderr):  # logs keep whole lines
            line = fitting.fitted(line, fitting.width(sys.stderr))
        print(line, file=sys.stderr, flush=True)


def check_writable(*files: str | None) -> None:
    """Raise the errors of ``write`` before a long run."""
    for file in files:
        if file not in (None, "-"):
            _put(file, "", "a")


def write(text: str, file: str | None, stream: IO[str] | None = None, of_text: bool = True) -> None:
    """Write text to a file, to stdout for ``-``, or for None to ``stream``, by default stdout."""
    # With ``of_text``, people read it: fit its lines to the width, and colour it on a terminal.
    out = stream if stream is not None and file is None else sys.stdout
    if of_text:
        text = fitting.fitted(text, fitting.width(out if file in (None, "-") else None))
        if file in (None, "-") and fitting.has_colours(out):
            text = fitting.coloured(text)
    if file not in (None, "-"):
        _put(file, text, "w")
        return
    out.write(text)
    out.flush()


def _put(file: str, text: str, mode: str) -> None:
    try:
        with pathlib.Path(file).open(mode, encoding="utf-8") as out:
            out.write(text)
    except OSError as error:
        raise ShardrulesError(f"can't write {file}: {error.strerror}") from error
