"""Look up JAX's private names, and say what is wrong with those that are not as they were."""

from __future__ import annotations

import dataclasses
import importlib
import inspect
from typing import Any

from shardrules.errors import UnsupportedJaxError

__all__ = ["Symbol", "find", "is_cached", "look", "unsupported"]


@dataclasses.dataclass(frozen=True)
class Symbol:
    """One private name of JAX. Several with one key are alternatives, the first that fits wins.

    Args:
      key: what this package calls it.
      path: ``module:attribute``.
      versions: the JAX versions that were read for it.
      parameters: parameter names that the hooks pass or read; checked before use.
      reason: what it is needed for.
      optional: whether None will do where it is missing.
    """

    key: str
    path: str
    versions: str
    parameters: tuple[str, ...]
    reason: str
    optional: bool = False


def is_cached(function: Any) -> bool:
    """Whether this is one of JAX's C++ caches around a function."""
    return hasattr(function, "cache_info")


def look(symbol: Symbol) -> tuple[Any, tuple[Any, str], str]:
    """Return a symbol, its owner, and what is wrong with it (empty if nothing is)."""
    module, _, attribute = symbol.path.partition(":")
    try:
        owner = importlib.import_module(module)
        found: Any = getattr(owner, attribute) if attribute else owner
    except (ImportError, AttributeError):
        return None, (None, ""), "is missing"
    if symbol.parameters:
        try:
            have = tuple(inspect.signature(found).parameters)
        except (TypeError, ValueError):
            if is_cached(found):  # one of JAX's C++ caches around a function: it tells no names
                return found, (owner, attribute), ""
            have = ()
        lost = [
            p
            for p in symbol.parameters
            if p not in have and p not in getattr(found, "__slots__", ())
        ]
        if lost:
            return (
                None,
                (owner, attribute),
                (f"no longer takes {', '.join(lost)} (it takes {', '.join(have) or 'nothing'})"),
            )
    return found, (owner, attribute), ""


def unsupported(version: str, what: str, **data: Any) -> UnsupportedJaxError:
    """Return the error for a JAX that the hooks don't fit."""
    return UnsupportedJaxError(
        f"shardrules has no hooks for JAX {version}: {what} Nothing was changed. Install a JAX "
        "that the README's table of versions lists, or a newer shardrules.",
        version=version,
        **data,
    )


def find(version: str, symbols: tuple[Symbol, ...]) -> tuple[dict, dict]:
    """Look up a group of symbols.

    Raises:
      UnsupportedJaxError: if one is missing or has other parameters.
    """
    found: dict[str, Any] = {}
    owners: dict[str, tuple[Any, str]] = {}
    wrong: dict[str, tuple[Symbol, str]] = {}
    for symbol in symbols:
        if found.get(symbol.key) is not None:
            continue
        value, owner, problem = look(symbol)
        if not problem:
            found[symbol.key], owners[symbol.key] = value, owner
            wrong.pop(symbol.key, None)
        elif symbol.optional:
            found.setdefault(symbol.key, None)
        else:
            wrong.setdefault(symbol.key, (symbol, problem))
    for symbol, problem in wrong.values():
        raise unsupported(
            version,
            f"{symbol.path} {problem}. It is used for: {symbol.reason} (read in JAX "
            f"{symbol.versions}).",
            symbol=symbol.path,
        )
    return found, owners
