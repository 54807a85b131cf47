"""The rules that a command's flags give, and which of them matched a kernel.

Imports neither jax nor NumPy, as ``flags``.
"""

from __future__ import annotations

import argparse
import difflib
import importlib
import importlib.util
import os
import re
import sys
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from shardrules import registry
from shardrules.errors import ShardrulesError
from shardrules.registry import builtin

if TYPE_CHECKING:
    from shardrules import hlo

__all__ = ["Rules", "add_arguments", "check", "register", "to_write", "unmatched"]

# Of the rules those that say what they do without the types that a call has.
_RULES = (
    "no_communication",
    "all_gather",
    "all_gather_invariant",
    "all_reduce",
    "all_to_all",
    "per_device",
    "permute",
    "reduce_scatter",
    "unreduced",
)
_RULE_FLAG = "--rule="
_RULE = re.compile(r"(?:shardrules\.|sr\.)?(\w+)\s*(?:\(([^()]*)\))?")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags that give rules."""
    parser.add_argument(
        "--rules",
        metavar="MODULE",
        action="append",
        default=[],
        help="a module to import that registers rules for kernels; may be repeated",
    )
    parser.add_argument(
        "--rule",
        metavar="NAME=RULE",
        action="append",
        default=[],
        help="the rule of a kernel, 'flash*=no_communication' or 'ring=all_gather(model)'; where "
        "the text tells no name of a kernel, NAME is its op_name, a pattern of it, or the scope "
        "nearest to the call; may be repeated",
    )


def check(arguments: argparse.Namespace) -> None:
    """Say now what ``Rules`` would say after a long run; nothing is registered or imported.

    Raises:
      ShardrulesError: a rule can't be read, or a module is not there.
    """
    for text in arguments.rule:
        _read(text)
    before = list(sys.path)  # a script that is run next finds its own
    _search_here(arguments)
    try:
        for name in arguments.rules:
            try:
                found = importlib.util.find_spec(name)
            except (ImportError, ValueError) as error:
                raise _unimportable(name, error) from error
            if found is None:
                raise _unimportable(name, ModuleNotFoundError(f"No module named {name!r}"))
    finally:
        sys.path[:] = before


def register(arguments: argparse.Namespace) -> dict[str, list[registry.Registration]]:
    """Register what the flags give, and return each flag's declarations.

    Raises:
      ShardrulesError: a module can't be imported, or a rule can't be read.
    """
    given: dict[str, list[registry.Registration]] = {}
    _search_here(arguments)
    for name in arguments.rules:
        before = registry.default.own()
        _import(name)
        after = registry.default.own()
        given[f"--rules={name}"] = [e for e in after if e not in before]
    for text in arguments.rule:
        name, rule = _read(text)
        flag = _RULE_FLAG + text
        given[flag] = [registry.default.register(name, rule, where=flag, replace=True)]
    return given


class Rules:
    """A registry that remembers which of the flags' rules it was asked for.

    Args:
      arguments: the command's.

    Raises:
      ShardrulesError: a module can't be imported, or a rule can't be read.
    """

    def __init__(self, arguments: argparse.Namespace):
        self._given = register(arguments)
        self._used: list[registry.Registration] = []

    def find(self, name: str) -> registry.Registration | None:
        """Answer as the default registry does."""
        return self._noted(registry.default.find(name))

    def find_by_op_name(self, op_name: str) -> registry.Registration | None:
        """Answer as the default registry does."""
        asked = [
            e.name for flag, es in self._given.items() if flag.startswith(_RULE_FLAG) for e in es
        ]
        return self._noted(registry.default.find_by_op_name(op_name, functions=asked))

    def _noted(self, found: registry.Registration | None) -> registry.Registration | None:
        if found is not None and found not in self._used:
            self._used.append(found)
        return found

    def unused(self, judgements: Iterable[hlo.Judgement]) -> list[str]:
        """Say of each flag whose rules matched no kernel what the programs' kernels are called."""
        lines = []
        for flag, entries in self._given.items():
            if not entries or any(e in self._used for e in entries):
                continue
            lines.append(unmatched(flag, entries[0].name, _kernels(judgements)))
        return lines


def unmatched(flag: str, name: str, kernels: Sequence[str]) -> str:
    """Say of a flag that it matched no kernel, and which ones are without a rule."""
    near = difflib.get_close_matches(name, kernels, 1)
    there = ", ".join(kernels[:6]) + (f" and {len(kernels) - 6} more" if kernels[6:] else "")
    return (
        f"{flag} matches no kernel"
        + (f"; did you mean {near[0]!r}?" if near else "")
        + (f"; without a rule: {there}" if there else "; none is without a rule")
    )


def to_write(flag: str) -> str:
    """Return the line that says in a program what a flag of ``register`` says."""
    if not flag.startswith(_RULE_FLAG):
        return f"import {flag.partition('=')[2]}  # registers rules"
    name, rule = _read(flag.removeprefix(_RULE_FLAG))
    return f"shardrules.register({name!r}, shardrules.{rule!r})"


def _kernels(judgements: Iterable[hlo.Judgement]) -> list[str]:
    """List what the kernels without a rule are called: their names, or op_names without one."""
    calls = [blocker for judgement in judgements for blocker in judgement.opaque]
    return list(
        dict.fromkeys(b.kernel or b.where.partition(" (")[0] or b.target or "" for b in calls)
    )


def _read(text: str) -> tuple[str, Any]:
    """Read ``NAME=RULE``."""
    name, equals, written = (part.strip() for part in text.rpartition("="))
    found = _RULE.fullmatch(written)
    if not equals or not name or found is None:
        raise ShardrulesError(
            f"--rule={text} is not a rule; write --rule='kernel=no_communication' or "
            "--rule='kernel=all_gather(model)'"
        )
    if found[1] not in _RULES:
        near = difflib.get_close_matches(found[1], _RULES, 1)
        raise ShardrulesError(
            f"--rule={text}: {found[1]!r} is not a rule"
            + (f"; did you mean {near[0]!r}?" if near else "")
            + f"; there are {', '.join(_RULES)}"
        )
    axes = [axis.strip().strip("'\"") for axis in (found[2] or "").split(",") if axis.strip()]
    rule = getattr(builtin, found[1])
    if found[1] == "no_communication":
        if axes:
            raise ShardrulesError(f"--rule={text}: no_communication takes no mesh axes")
        return name, rule
    if not axes:
        raise ShardrulesError(
            f"--rule={text}: {found[1]} takes mesh axes, --rule='{name}={found[1]}(model)'"
        )
    return name, rule(*axes)


def _search_here(arguments: argparse.Namespace) -> None:
    if arguments.rules and os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())


def _import(name: str) -> None:
    try:
        importlib.import_module(name)
    except ShardrulesError:
        raise
    except Exception as error:  # the module is the user's, and raises what it likes
        raise _unimportable(name, error) from error


def _unimportable(name: str, error: Exception) -> ShardrulesError:
    return ShardrulesError(f"--rules={name} can't be imported: {type(error).__name__}: {error}")
