"""What the commands share: the programs that they read, and where they write."""

from __future__ import annotations

import argparse
import importlib
import os
import pathlib
import sys
from typing import Any

from shardrules import hlo, program
from shardrules.errors import ShardrulesError

__all__ = ["CLEAN", "FOUND", "Once", "add_arguments", "judge", "mesh_of", "title", "write"]

CLEAN, FOUND = 0, 1  # exit codes; 2 is __main__'s


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
    """Add the flags of every command that reads compiled programs."""
    parser.add_argument(
        "--mesh",
        action=Once,
        metavar="AXES",
        help="axis names and sizes in the order of the devices: data=4,model=2; taken from the "
        "text's tags or mesh notation if it has any",
    )
    parser.add_argument(
        "--rules",
        metavar="MODULE",
        action="append",
        default=[],
        help="a module to import that registers rules for kernels; may be repeated",
    )
    parser.add_argument(
        "--output", action=Once, metavar="FILE", help="write there instead of to stdout"
    )


def judge(file: str, arguments: argparse.Namespace) -> hlo.Judgement:
    """Read a program and judge it under the rules and the mesh that the flags name.

    Args:
      file: its path, or ``-`` for stdin.
      arguments: the command's.
    """
    mesh = mesh_of(arguments.mesh)
    for name in arguments.rules:
        _import(name)
    if file == "-":
        try:
            text = sys.stdin.buffer.read().decode()
        except UnicodeDecodeError as error:
            raise ShardrulesError(f"stdin is not text (byte {error.start})") from error
        found = program.Program(program.read_text(text, "stdin"), "stdin", None)
    else:
        found = program.read(pathlib.Path(file))
    return program.judged(found, mesh=mesh)


def title(file: str) -> str:
    """Return what a program is called in a report."""
    return "stdin" if file == "-" else os.path.basename(file)


def write(text: str, arguments: argparse.Namespace) -> None:
    """Write to stdout, or to the file that the flags name."""
    if arguments.output is None:
        sys.stdout.write(text)
        sys.stdout.flush()
    else:
        pathlib.Path(arguments.output).write_text(text, encoding="utf-8")


def mesh_of(text: str | None) -> dict[str, int] | None:
    """Read ``data=4,model=2``.

    Raises:
      ShardrulesError: it is no mesh.
    """
    if text is None:
        return None
    mesh: dict[str, int] = {}
    for part in text.split(","):
        name, equals, size = (p.strip() for p in part.partition("="))
        if not equals or not name or name in mesh or not size.isdecimal() or not int(size):
            raise ShardrulesError(f"--mesh={text} is no mesh; write --mesh=data=4,model=2")
        mesh[name] = int(size)
    return mesh


def _import(name: str) -> None:
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        importlib.import_module(name)
    except ShardrulesError:
        raise
    except Exception as error:  # the module is the user's, and raises what it likes
        raise ShardrulesError(
            f"--rules={name} can't be imported: {type(error).__name__}: {error}"
        ) from error
