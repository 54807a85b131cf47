"""Look up JAX's private names, and say what has changed about them."""

from __future__ import annotations

import importlib
import inspect
import re
from typing import Any, NamedTuple

from shardrules.door import versions
from shardrules.errors import UnsupportedJaxError


class Symbol(NamedTuple):
    """One private name of JAX, and the versions that have it."""

    key: str  # its name in this package
    path: str  # ``module:attribute``, or a module
    first: str  # the first release with this path and parameters
    last: str | None  # the last such release (``0.9``: all of 0.9); None if newer ones have it too
    parameters: tuple[str, ...]  # parameter names that the hooks pass or read; checked before use
    reason: str  # why we need it

    @property
    def versions(self) -> str:
        last = self.last or versions.NEWEST
        return self.first if last == self.first else f"{self.first}-{last}"

    def exists_in(self, version: str) -> bool:
        """Return whether this version of JAX must have it."""
        release = versions.release(version)
        if self.last is None:
            return release >= versions.release(self.first)
        last = tuple(map(int, self.last.split(".")))
        return versions.release(self.first) <= release and (*release, 0, 0)[: len(last)] <= last


_ROW = re.compile(r" +(\w+) +([\d.]+)(?:-([\d.]+)|(\+))?\s+([\w.]+(?::[\w.]+)?)(?:\(([^)]*)\))?\n")


def read(table: str) -> tuple[Symbol, ...]:
    """Return the symbols of a table in the format that ``symbols.py`` describes."""
    symbols, reason, at = [], "", 0
    while at < len(table):
        if row := _ROW.match(table, at):
            key, first, last, and_newer, path, parameters = row.groups()
            path = f"jax._src{path}" if path.startswith(".") else path
            names = tuple(re.findall(r"\w+", parameters or ""))
            last = None if and_newer else last or first
            symbols.append(Symbol(key, path, first, last, names, reason))
            at = row.end()
            continue
        reason, end, _ = table[at:].partition("\n")
        if reason.startswith(" "):
            raise ValueError(f"no row of the table of symbols: {reason!r}")
        at += len(reason + end)
    return tuple(symbols)


def is_cached(function: Any) -> bool:
    """Return whether a function is one of JAX's C++ caches, which hide its parameters."""
    return hasattr(function, "cache_info")


def look(symbol: Symbol) -> tuple[Any, tuple[Any, str], str]:
    """Return a symbol, its owner, and the problem with it (empty if there is none)."""
    # Import the module, follow the attributes, and compare the parameters that the hooks use with
    # the signature. A class may have them as slots. JAX's C++ caches hide their signature, so trust
    # these.
    module, _, path = symbol.path.partition(":")
    *classes, attribute = path.split(".")
    try:
        owner: Any = importlib.import_module(module)
        for name in classes:
            owner = getattr(owner, name)
        value: Any = getattr(owner, attribute) if attribute else owner
    except (ImportError, AttributeError):
        return None, (None, ""), "is missing"
    have: tuple[str, ...] = ()
    try:
        have = tuple(inspect.signature(value).parameters) if symbol.parameters else ()
    except (TypeError, ValueError):
        if is_cached(value):
            return value, (owner, attribute), ""
    there = {*have, *getattr(value, "__slots__", ())}
    lost = ", ".join(p for p in symbol.parameters if p not in there)
    wrong = f"no longer takes {lost} (it takes {', '.join(have) or 'nothing'})" if lost else ""
    return value, (owner, attribute), wrong


def unsupported(version: str, what: str, **data: Any) -> UnsupportedJaxError:
    return UnsupportedJaxError(
        f"shardrules has no hooks for JAX {version}: {what} Nothing was changed. Install JAX "
        f"{versions.TESTED}, or a newer shardrules.",
        version=version,
        **data,
    )


def find(
    version: str, symbols: tuple[Symbol, ...]
) -> tuple[dict[str, Any], dict[str, tuple[Any, str]]]:
    """Look up all symbols; return them (None if this version has none) and their owners."""
    values: dict[str, Any] = {symbol.key: None for symbol in symbols}
    owners: dict[str, tuple[Any, str]] = {}
    for symbol in symbols:
        if not symbol.exists_in(version):
            continue
        values[symbol.key], owners[symbol.key], problem = look(symbol)
        if problem:
            raise unsupported(
                version,
                f"{symbol.path} {problem}. It is used for: {symbol.reason} (read in JAX "
                f"{symbol.versions}).",
                symbol=symbol.path,
            )
    return values, owners
