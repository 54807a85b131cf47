"""Register the rules of --rule and --import, and record which of them matched a kernel.

Like ``flags``, this module imports neither jax nor NumPy.
"""

from __future__ import annotations

import argparse
import contextlib
import difflib
import importlib
import importlib.util
import itertools
import os
import re
import sys
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from shardrules import registry
from shardrules.commands import flags
from shardrules.errors import ShardrulesError, few
from shardrules.registry import builtin

if TYPE_CHECKING:
    from shardrules import hlo

# The rules whose effect does not depend on a call's types.
_RULES = (
    "no_communication all_gather all_gather_invariant all_reduce all_to_all per_device permute "
    "reduce_scatter unreduced"
).split()
_RULE_FLAG = "--rule="
_RULE = re.compile(r"(?:shardrules\.|sr\.)?(\w+)\s*(?:\(([^()]*)\))?")


def check(arguments: argparse.Namespace) -> None:
    """Raise the errors of ``Rules`` before a long run, without registering or importing."""
    for text in arguments.rule:
        _read(text)
    before = list(sys.path)  # restored afterwards: the script gets a path of its own
    try:
        for name in arguments.rules:
            with _importable(name):
                if importlib.util.find_spec(name) is None:
                    raise ModuleNotFoundError(f"No module named {name!r}")
    finally:
        sys.path[:] = before


def register(arguments: argparse.Namespace) -> dict[str, list[registry.Registration]]:
    """Register the rules of the flags, and return each flag's registrations."""
    given: dict[str, list[registry.Registration]] = {}
    for name in arguments.rules:
        before, is_new = registry.default.own(), name not in sys.modules
        with _importable(name):
            importlib.import_module(name)
        entries = [entry for entry in registry.default.own() if entry not in before]
        given[f"--import={name}"] = entries
        if is_new and not entries:
            flags.say(f"--import={name} registers no rule")
    for text in arguments.rule:
        name, rule = _read(text)
        flag = _RULE_FLAG + text
        given[flag] = [registry.default.register(name, rule, where=flag, replace=True)]
    return given


@contextlib.contextmanager
def _importable(name: str) -> Iterator[None]:
    """Make the working directory importable; if an import fails, raise an error with the flag."""
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        yield
    except ShardrulesError:
        raise
    except Exception as error:  # the user's module may raise anything
        raise ShardrulesError(
            f"--import={name} can't be imported: {type(error).__name__}: {error}"
        ) from error


class Rules:
    """The default registry with the flags' rules; it records which entries it returned.

    ``is_traced`` says that the script was traced under these rules. Then kernels may have matched
    them already, even kernels that the HLO doesn't name (in interpret mode).
    """

    def __init__(self, arguments: argparse.Namespace, is_traced: bool = False):
        self._matched = {*registry.default.matched} if is_traced else set()
        self._given = register(arguments)
        self._used: list[registry.Registration] = []

    def find(self, name: str) -> registry.Registration | None:
        return self._record(registry.default.find(name))

    def find_by_op_name(self, op_name: str) -> registry.Registration | None:
        patterns: list[str] = []
        for flag, entries in self._given.items():
            if flag.startswith(_RULE_FLAG):
                patterns += [entry.name for entry in entries]
        return self._record(registry.default.find_by_op_name(op_name, functions=patterns))

    def _record(self, entry: registry.Registration | None) -> registry.Registration | None:
        if entry is not None and entry not in self._used:
            self._used.append(entry)
        return entry

    def unused(self, judgements: Iterable[hlo.Judgement]) -> list[str]:
        """Return a message for each flag whose rules matched no kernel."""
        calls = [*itertools.chain.from_iterable(judgement.opaque for judgement in judgements)]
        # Identify a call without a kernel's name by its op_name.
        kernels = [call.kernel or call.where.partition(" (")[0] or call.target for call in calls]
        named = list(dict.fromkeys(filter(None, kernels)))
        messages = []
        for flag, entries in self._given.items():
            used = (entry in self._used or entry.where in self._matched for entry in entries)
            if entries and not any(used):
                messages.append(unmatched(flag, entries[0].name, named))
        return messages


def unmatched(flag: str, name: str, kernels: Sequence[str]) -> str:
    """Return the message for a flag that matched no kernel, with the kernels without a rule."""
    without = f"without a rule: {few(kernels, 6)}"
    without = without if kernels else "every kernel has a rule"
    return f"{flag} matches no kernel{_near(name, kernels)}; {without}"


def _near(name: str, names: Sequence[str]) -> str:
    near = difflib.get_close_matches(name, names, 1)
    return f"; did you mean {near[0]!r}?" if near else ""


def to_write(flag: str) -> str:
    """Return the line of a program that registers a flag's rules."""
    if not flag.startswith(_RULE_FLAG):
        return f"import {flag.partition('=')[2]}  # registers rules"
    name, rule = _read(flag.removeprefix(_RULE_FLAG))
    return f"shardrules.register({name!r}, shardrules.{rule!r})"


def _read(text: str) -> tuple[str, Any]:
    """Read ``NAME=RULE``."""
    name, equals, written = (part.strip() for part in text.rpartition("="))
    match = _RULE.fullmatch(written)
    if not equals or not name or match is None:
        raise ShardrulesError(
            f"--rule={text} is not a rule; write --rule='kernel=no_communication' or "
            "--rule='kernel=all_gather(model)' (a module that registers rules: --import MODULE)"
        )
    rule = match[1]
    axes = [axis.strip().strip("'\"") for axis in (match[2] or "").split(",") if axis.strip()]
    takes_axes, wrong = rule != "no_communication", ""
    if rule not in _RULES:
        wrong = f"{rule!r} is not a rule{_near(rule, _RULES)}; there are {', '.join(_RULES)}"
    elif axes and not takes_axes:
        wrong = f"{rule} takes no mesh axes"
    elif takes_axes and not axes:
        wrong = f"{rule} takes mesh axes, --rule='{name}={rule}(model)'"
    if wrong:
        raise ShardrulesError(f"--rule={text}: {wrong}")
    return name, getattr(builtin, rule)(*axes) if takes_axes else builtin.no_communication
