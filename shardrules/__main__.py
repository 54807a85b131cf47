"""Run the command line: ``shardrules COMMAND``, or ``python -m shardrules COMMAND``.

It works without JAX. Exit code 2: an input can't be read, or the command can't run here.
"""

from __future__ import annotations

import importlib
import os
import signal
import sys
from collections.abc import Sequence
from typing import Any, NoReturn

import shardrules
from shardrules.commands import flags
from shardrules.errors import ShardrulesError

COMMANDS = ("verify", "report", "diff", "run", "migrate", "profile", "doctor")
UNUSABLE = 2
INTERRUPTED = 128 + signal.SIGINT


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code.

    Args:
      argv: arguments without the program's name; ``sys.argv[1:]`` if None.
    """
    try:
        given = sys.argv[1:] if argv is None else list(argv)
        arguments = _parser(given[0] if given else "").parse_args(given)
        if "format" in vars(arguments):
            flags.settle_format(arguments, arguments.formats)
        status: int = arguments.run(arguments)
        return status
    except BrokenPipeError:  # the reader of stdout has closed it
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return UNUSABLE
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != "numpy":
            raise
        print("shardrules: not installed, and needed: numpy; pip install numpy", file=sys.stderr)
        return UNUSABLE
    except (ShardrulesError, OSError) as error:
        flags.say(str(error))
        return UNUSABLE
    except KeyboardInterrupt:  # an interrupt of a script is reported by run and migrate
        print("shardrules: interrupted", file=sys.stderr)
        return INTERRUPTED


def _meant(given: str, message: str) -> str:
    """Return the question "did you mean ...?" with a similar command or flag, if there is one."""
    import difflib

    if given in COMMANDS:
        _, _, words = message.partition("unrecognized arguments: ")
        wrong = [word.partition("=")[0] for word in words.split() if word.startswith("--")]
        module = importlib.import_module(f"shardrules.commands.{given}")
        known = [name for name in module.ARGUMENTS if name.startswith("--")]
    else:
        wrong, known = [given], list(COMMANDS)
    near = []
    for word in wrong:
        near += difflib.get_close_matches(word, known, 1, 0.75 if given in COMMANDS else 0.65)
    return f"; did you mean {' and '.join(near)}?" if near else ""


def _parser(given: str) -> Any:
    """Make the parser of one command, or of all commands if the name is unknown."""
    import argparse

    class Paragraphs(argparse.HelpFormatter):
        """A formatter that wraps each paragraph of a description by itself."""

        def _fill_text(self, text: str, width: int, indent: str) -> str:
            fill = super()._fill_text
            return "\n\n".join(fill(part, width, indent) for part in text.strip().split("\n\n"))

    class Parser(argparse.ArgumentParser):
        """A parser whose errors are ShardrulesErrors."""

        def __init__(self, **options: Any):
            super().__init__(allow_abbrev=False, formatter_class=Paragraphs, **options)

        def error(self, message: str) -> NoReturn:
            command = f" {given}" if given in COMMANDS and " " not in self.prog else ""
            help_ = f"({self.prog}{command} --help says what it takes)"
            raise ShardrulesError(f"{message}{_meant(given, message)}\n{help_}")

    about = "Find the collectives that a JAX program doesn't need."
    parser = Parser(prog="shardrules", description=about)
    version = f"shardrules {shardrules.__version__}"
    parser.add_argument("--version", action="version", version=version)
    commands = parser.add_subparsers(metavar="COMMAND", required=True, parser_class=Parser)
    # Import only the given command: it may run a script that sets environment variables, which
    # NumPy reads at import.
    for name in [given] if given in COMMANDS else COMMANDS:
        module = importlib.import_module(f"shardrules.commands.{name}")
        text = module.__doc__ or ""
        usage = getattr(module, "USAGE", None)
        command = commands.add_parser(
            name, help=text.splitlines()[0], description=text, usage=usage
        )
        for argument, how in module.ARGUMENTS.items():
            command.add_argument(argument, **how)
        formats = module.ARGUMENTS.get("--format", {}).get("choices", [])
        command.set_defaults(run=module.run, formats=formats)
    return parser


if __name__ == "__main__":
    sys.exit(main())
