"""Budgets: a program's collectives in a small file that is checked in, reviewed and compared.

A budget holds no instruction names and no line numbers, and its paths are relative, so it stays the
same across recompiles and machines. It is TOML, of which this reads just what it writes: comments,
``key = "string"``, ``key = 123`` and ``[[table]]`` (Python has a reader from 3.11 only).
"""

from __future__ import annotations

import dataclasses
import json
import pathlib
import re
from typing import Any

from shardrules.costs import accounts
from shardrules.errors import BudgetError

__all__ = ["Budget", "dump", "load", "of", "root_of"]

VERSION = 1
_HEAD = (
    "# What a program's collectives may cost; pytest --update-budgets rewrites it.\n"
    "# Bytes are of one execution on one device; [[allow]] is written by hand and kept.\n"
)
_ROW = ("what", "element_type", "source", "sites", "count", "bytes", "wire_bytes", "unknown")
_PAIR = re.compile(r'([a-z_]+)\s*=\s*("(?:[^"\\]|\\.)*"|\d{1,18})\s*(?:#.*)?')


class Budget:
    """What a budget file holds.

    Attributes:
      level: ``"compiled"`` or ``"logical"``.
      mesh: ``"data=4,model=2"``, empty where no mesh is known.
      rows: sums by what, element type and source, as ``accounts.grouped`` gives them.
      allow: findings that may stay, with reasons.
    """

    def __init__(
        self,
        level: str,
        mesh: str,
        rows: dict[tuple[str, ...], accounts.Totals],
        allow: dict[str, str] | None = None,
    ):
        self.level = level
        self.mesh = mesh
        self.rows = rows
        self.allow = dict(allow or {})

    def differences(self, now: Budget) -> list[str]:
        """Say line by line how another budget differs from this one; allowances don't count."""
        lines = [
            f"~ {name} is {new or 'not known'}, was {old or 'not known'}"
            for name, old, new in (("level", self.level, now.level), ("mesh", self.mesh, now.mesh))
            if old != new
        ]
        return lines + [str(c) for c in accounts.compare(self.rows, now.rows)]


def root_of(path: pathlib.Path) -> str:
    """Return the folder that a budget's paths are relative to: the project's that holds it."""
    folder = path.resolve().parent
    for parent in (folder, *folder.parents):
        if any(
            (parent / name).exists() for name in ("pyproject.toml", "setup.cfg", "setup.py", ".git")
        ):
            return str(parent)
    return str(folder)


def of(account: accounts.Account, root: str) -> Budget:
    """Make the budget that a program just meets."""
    mesh = ",".join(f"{a}={n}" for a, n in (account.mesh or {}).items())
    return Budget(account.level, mesh, accounts.grouped(account, root))


def dump(budget: Budget) -> str:
    """Write a budget, rows in alphabetical order."""
    parts = [
        _HEAD,
        f"version = {VERSION}\nlevel = {_quoted(budget.level)}\nmesh = {_quoted(budget.mesh)}\n",
    ]
    for (what, element_type, source), totals in sorted(budget.rows.items()):
        values = {
            "what": what,
            "element_type": element_type,
            "source": source,
            **dataclasses.asdict(totals),
        }
        lines = [
            f"{key} = {_quoted(values[key]) if isinstance(values[key], str) else values[key]}"
            for key in _ROW
            if values[key] not in ("", 0) or key in ("count", "bytes")
        ]
        parts.append("[[collective]]\n" + "\n".join(lines) + "\n")
    for what, reason in sorted(budget.allow.items()):
        parts.append(f"[[allow]]\nwhat = {_quoted(what)}\nreason = {_quoted(reason)}\n")
    return "\n".join(parts)


def _quoted(text: str) -> str:
    # A JSON string is a TOML basic string, but for DEL, which TOML wants escaped.
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


def load(path: pathlib.Path) -> Budget:
    """Read a budget.

    Raises:
      BudgetError: it can't be read; the message gives the line.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise BudgetError(f"can't read the budget {path}: {error.strerror}", path=path) from error
    except UnicodeDecodeError as error:
        raise BudgetError(
            f"the budget {path} is not UTF-8 (byte {error.start})", path=path
        ) from error
    head: dict[str, Any] = {}
    tables: list[tuple[int, str, dict[str, Any]]] = [(1, "", head)]

    def fail(line: int, why: str) -> BudgetError:
        return BudgetError(
            f"{path}, line {line}: {why}; repair it, or delete the file and run "
            "pytest --update-budgets",
            path=path,
            line=line,
        )

    for number, line in enumerate(text.splitlines(), 1):
        line = line.strip()
        if not line or line.startswith("#"):
            continue
        if line.startswith("[["):
            name = line.partition("#")[0].strip()
            if name not in ("[[collective]]", "[[allow]]"):
                raise fail(number, f"{name} is none of [[collective]] and [[allow]]")
            tables.append((number, name[2:-2], {}))
            continue
        pair = _PAIR.fullmatch(line)
        if pair is None:
            raise fail(number, f'expected key = "text" or key = 123, got {line[:60]!r}')
        if pair[1] in tables[-1][2]:
            raise fail(number, f"{pair[1]!r} is given twice")
        try:
            value = json.loads(pair[2])
        except ValueError:
            raise fail(number, f"{pair[2][:60]} is no string") from None
        tables[-1][2][pair[1]] = value
    if head.get("version") != VERSION:
        raise fail(1, f"version is {head.get('version')!r}, and this shardrules reads {VERSION}")
    _check(fail, 1, head, {"version": int, "level": str, "mesh": str})
    budget = Budget(head["level"], head["mesh"], {})
    for number, name, table in tables[1:]:
        if name == "allow":
            _check(fail, number, table, {"what": str, "reason": str})
            budget.allow[table["what"]] = table["reason"]
            continue
        row = {key: "" if key in _ROW[:3] else 0 for key in _ROW} | table
        _check(fail, number, row, {key: str if key in _ROW[:3] else int for key in _ROW})
        key = (row["what"], row["element_type"], row["source"])
        if key in budget.rows:
            raise fail(number, f"{row['what']!r} at {row['source']!r} is given twice")
        budget.rows[key] = accounts.Totals(
            row["sites"], row["count"], row["bytes"], row["wire_bytes"], row["unknown"]
        )
    return budget


def _check(fail: Any, line: int, table: dict[str, Any], types: dict[str, type]) -> None:
    for key, value in table.items():
        if key not in types:
            raise fail(line, f"{key!r} is not among {', '.join(types)}")
        if not isinstance(value, types[key]):
            raise fail(line, f"{key!r} is {value!r}, no {types[key].__name__}")
    for key in types:
        if key not in table:
            raise fail(line, f"{key!r} is missing")
