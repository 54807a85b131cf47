"""Look up JAX's private names, and say what is wrong with those that are not as they were."""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import re
from typing import Any

from shardrules.door import versions
from shardrules.errors import UnsupportedJaxError


@dataclasses.dataclass(frozen=True)
class Symbol:
    """One private name of JAX, and the versions that have it."""

    key: str  # what this package calls it
    path: str  # ``module:attribute``, or a module
    first: str  # the first release that has it so
    last: str | None  # the last one (``0.9``: all of 0.9), or None: all newer ones, too
    parameters: tuple[str, ...]  # parameter names that the hooks pass or read; checked before use
    reason: str  # what it is needed for

    @property
    def versions(self) -> str:
        """The versions of JAX in which it was read, as text."""
        last = self.last or ".".join(map(str, versions.NEWEST))
        return self.first if last == self.first else f"{self.first}-{last}"

    def exists_in(self, version: str) -> bool:
        """Whether this version of JAX must have it."""
        release = versions.release(version)
        if release < versions.release(self.first):
            return False
        if self.last is None:
            return True
        last = tuple(map(int, self.last.split(".")))
        return (*release, 0, 0)[: len(last)] <= last


_ROW = re.compile(r" +(\w+) +([\d.]+)(?:-([\d.]+)|(\+))?\s+([\w.]+(?::\w+)?)(?:\(([^)]*)\))?\n")


def read(table: str) -> tuple[Symbol, ...]:
    """Return the symbols of a table; ``symbols.py`` says how it is written."""
    symbols, reason, at = [], "", 0
    while at < len(table):
        row = _ROW.match(table, at)
        if row:
            key, first, last, and_newer, path, parameters = row.groups()
            path = f"jax._src{path}" if path.startswith(".") else path
            names = tuple(re.findall(r"\w+", parameters or ""))
            symbols.append(
                Symbol(key, path, first, None if and_newer else last or first, names, reason)
            )
            at = row.end()
            continue
        reason, end, _ = table[at:].partition("\n")
        if reason.startswith(" "):
            raise ValueError(f"no row of the table of symbols: {reason!r}")
        at += len(reason + end)
    return tuple(symbols)


def is_cached(function: Any) -> bool:
    """Whether this is one of JAX's C++ caches around a function."""
    return hasattr(function, "cache_info")


def look(symbol: Symbol) -> tuple[Any, tuple[Any, str], str]:
    """Return a symbol, its owner, and what is wrong with it (empty if nothing)."""
    module, _, attribute = symbol.path.partition(":")
    try:
        owner = importlib.import_module(module)
        value: Any = getattr(owner, attribute) if attribute else owner
    except (ImportError, AttributeError):
        return None, (None, ""), "is missing"
    if symbol.parameters:
        try:
            have = tuple(inspect.signature(value).parameters)
        except (TypeError, ValueError):
            if is_cached(value):  # one of JAX's C++ caches around a function: it tells no names
                return value, (owner, attribute), ""
            have = ()
        slots = getattr(value, "__slots__", ())
        lost = [p for p in symbol.parameters if p not in have and p not in slots]
        if lost:
            takes = ", ".join(have) or "nothing"
            wrong = f"no longer takes {', '.join(lost)} (it takes {takes})"
            return None, (owner, attribute), wrong
    return value, (owner, attribute), ""


def unsupported(version: str, what: str, **data: Any) -> UnsupportedJaxError:
    """Return the error for a JAX that the hooks don't fit."""
    return UnsupportedJaxError(
        f"shardrules has no hooks for JAX {version}: {what} Nothing was changed. Install JAX "
        f"{versions.tested()}, or a newer shardrules.",
        version=version,
        **data,
    )


def find(version: str, symbols: tuple[Symbol, ...]) -> tuple[dict, dict]:
    """Look up all symbols that exist in a version of JAX; return them and their owners."""
    # A symbol that this version does not have is None.
    values: dict[str, Any] = {symbol.key: None for symbol in symbols}
    owners: dict[str, tuple[Any, str]] = {}
    for symbol in symbols:
        if not symbol.exists_in(version):
            continue
        value, owner, problem = look(symbol)
        if problem:
            raise unsupported(
                version,
                f"{symbol.path} {problem}. It is used for: {symbol.reason} (read in JAX "
                f"{symbol.versions}).",
                symbol=symbol.path,
            )
        values[symbol.key], owners[symbol.key] = value, owner
    return values, owners
