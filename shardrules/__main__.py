"""The command line: ``shardrules COMMAND``, or ``python -m shardrules COMMAND``.

It runs where no JAX is installed. Exit 2: what is to be read can't be, or the command can't.
"""

from __future__ import annotations

import importlib
import os
import signal
import sys
from collections.abc import Sequence
from typing import Any, NoReturn

import shardrules
from shardrules.errors import ShardrulesError

COMMANDS = ("verify", "report", "diff", "run", "migrate", "profile", "doctor")
UNUSABLE = 2
INTERRUPTED = 128 + signal.SIGINT
_NEEDED = {"absl": "absl-py", "numpy": "numpy"}  # from modules to what pip calls them


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code.

    Args:
      argv: arguments without the program's name; those of the process if None.
    """
    try:
        given = sys.argv[1:] if argv is None else list(argv)
        arguments = _parser(given[0] if given else "").parse_args(given)
        return arguments.run(arguments)
    except BrokenPipeError:  # the reader of stdout has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return UNUSABLE
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] not in _NEEDED:
            raise
        missing = [package for module, package in _NEEDED.items() if not _is_there(module)]
        print(
            f"shardrules: not installed, and needed: {', '.join(missing)}; "
            f"pip install {' '.join(missing)}",
            file=sys.stderr,
        )
        return UNUSABLE
    except (ShardrulesError, OSError) as error:
        print(f"shardrules: {error}", file=sys.stderr)
        return UNUSABLE
    except KeyboardInterrupt:  # not a script's own, which run and migrate report as Python does
        print("shardrules: interrupted", file=sys.stderr)
        return INTERRUPTED


def _is_there(module: str) -> bool:
    try:
        importlib.import_module(module)
    except ImportError:
        return False
    return True


def _parser(given: str) -> Any:
    """Make the parser of a command, or of all; each has its own flags, and knows no others."""
    import argparse

    from absl.flags import argparse_flags

    class Parser(argparse_flags.ArgumentParser):
        """One whose errors are said as all of ours are."""

        def error(self, message: str) -> NoReturn:
            raise ShardrulesError(f"{message}\n({self.prog} --help says what it takes)")

    # Without the process's absl flags, no command takes --flagfile or --undefok.
    options: dict[str, Any] = {
        "inherited_absl_flags": None,
        "allow_abbrev": False,
        "add_help": False,  # absl's comes with a flag for the help of all flags of the process
        "formatter_class": argparse.RawDescriptionHelpFormatter,
    }
    parser = Parser(
        prog="shardrules", description="Verdicts on what a compiled program moves.", **options
    )
    _add_help(parser)
    parser.add_argument(
        "--version", action="version", version=f"shardrules {shardrules.__version__}"
    )
    commands = parser.add_subparsers(metavar="COMMAND", required=True, parser_class=Parser)
    # A command that runs a script imports nothing that the others need: the script may set first
    # what NumPy reads from its environment.
    for name in [given] if given in COMMANDS else COMMANDS:
        module = importlib.import_module(f"shardrules.commands.{name}")
        text = module.__doc__ or ""
        one = commands.add_parser(name, help=text.splitlines()[0], description=text, **options)
        _add_help(one)
        module.add_arguments(one)
        one.set_defaults(run=module.run)
    return parser


def _add_help(parser: Any) -> None:
    parser.add_argument("-h", "--help", action="help", help="show this and exit")


if __name__ == "__main__":
    sys.exit(main())
