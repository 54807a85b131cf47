"""Read and write budgets: a program's collectives in a small TOML file that people review."""

# A budget holds no instruction names or line numbers, and its paths are relative, so that it is the
# same after each compilation and on each machine.

from __future__ import annotations

import dataclasses
import json
import pathlib
import tomllib
from typing import Any

from shardrules.costs import accounts, comparing
from shardrules.errors import BudgetError

VERSION = 1
_HEAD = (
    "# What a program's collectives may cost; pytest --update-budgets rewrites it.\n"
    "# Bytes are of one execution on one device; [[allow]] is written by hand and kept.\n"
)
_TEXTS = ("what", "element_type", "source")
_COUNTS = ("sites", "count", "bytes", "wire_bytes", "unknown", "unknown_bytes")
_ROOT_FILES = ("pyproject.toml", "setup.cfg", "setup.py", ".git")


@dataclasses.dataclass
class Budget:
    """The contents of a budget file."""

    level: str
    mesh: str
    rows: dict[tuple[str, ...], accounts.Totals]
    allow: dict[str, str] = dataclasses.field(default_factory=dict)

    def differences(self, now: Budget) -> list[str]:
        """Return a line for each difference from another budget, except in allowances."""
        lines = [
            f"~ {name} is {new or 'not known'}, was {old or 'not known'}"
            for name, old, new in (("level", self.level, now.level), ("mesh", self.mesh, now.mesh))
            if old != new
        ]
        return lines + [str(c) for c in comparing.compare(self.rows, now.rows)]


def of(account: accounts.Account, path: pathlib.Path) -> Budget:
    """Return the budget that a program meets exactly; sources are relative to the project."""
    mesh = ",".join(f"{a}={n}" for a, n in (account.mesh or {}).items())
    rows = comparing.grouped(account, str(_root(path)))
    return Budget(account.level, mesh, rows)


def _root(path: pathlib.Path) -> pathlib.Path:
    """Return the nearest enclosing folder that is a project's root, or else the file's folder."""
    folders = path.resolve().parents
    for folder in folders:
        if any((folder / name).exists() for name in _ROOT_FILES):
            return folder
    return folders[0]


def dump(budget: Budget) -> str:
    """Return a budget as TOML, with rows in alphabetical order."""
    parts = [
        _HEAD,
        f"version = {VERSION}\nlevel = {_quoted(budget.level)}\nmesh = {_quoted(budget.mesh)}\n",
    ]
    for texts, totals in sorted(budget.rows.items()):
        counts = {key: getattr(totals, key) for key in _COUNTS}
        lines = [f"{key} = {_quoted(text)}" for key, text in zip(_TEXTS, texts) if text]
        lines += [f"{key} = {n}" for key, n in counts.items() if n or key in ("count", "bytes")]
        parts.append("[[collective]]\n" + "\n".join(lines) + "\n")
    parts += [allowed(what, reason) for what, reason in sorted(budget.allow.items())]
    return "\n".join(parts)


def allowed(what: str, reason: str) -> str:
    return f"[[allow]]\nwhat = {_quoted(what)}\nreason = {_quoted(reason)}\n"


def _quoted(text: str) -> str:
    # A JSON string is a TOML basic string, but TOML requires DEL to be escaped.
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


def load(path: pathlib.Path) -> Budget:
    content = _read(path)
    if content.get("version") != VERSION:
        version = content.get("version")
        raise _fail(path, f"version is {version!r}, but this shardrules reads {VERSION}")
    head = {k: value for k, value in content.items() if k not in ("collective", "allow")}
    _check(path, "the head", head, {"version": int, "level": str, "mesh": str})
    budget = Budget(head["level"], head["mesh"], {}, _allowances(path, content))
    for where, table in _tables(path, content, "collective"):
        row = dict.fromkeys(_TEXTS, "") | dict.fromkeys(_COUNTS, 0) | table
        _check(path, where, row, dict.fromkeys(_TEXTS, str) | dict.fromkeys(_COUNTS, int))
        key = tuple(row[name] for name in _TEXTS)
        if key in budget.rows:
            raise _fail(path, f"{where}: {row['what']!r} at {row['source']!r} is given twice")
        budget.rows[key] = accounts.Totals(**{name: row[name] for name in _COUNTS})
    return budget


def allowances(path: pathlib.Path) -> dict[str, str]:
    """Return the allowances of a budget file; the file may contain nothing else."""
    return _allowances(path, _read(path)) if path.exists() else {}


def _fail(path: pathlib.Path, why: str) -> BudgetError:
    return BudgetError(
        f"{path}: {why}; repair it, or delete the file and run pytest --update-budgets", path=path
    )


def _read(path: pathlib.Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise BudgetError(f"can't read the budget {path}: {error.strerror}", path=path) from error
    except UnicodeDecodeError as error:
        where = f"(byte {error.start})"
        raise BudgetError(f"the budget {path} is not UTF-8 {where}", path=path) from error
    except tomllib.TOMLDecodeError as error:
        raise _fail(path, f"it is not TOML: {error}") from error


def _tables(
    path: pathlib.Path, content: dict[str, Any], name: str
) -> list[tuple[str, dict[str, Any]]]:
    tables = content.get(name, [])
    if not isinstance(tables, list) or not all(isinstance(table, dict) for table in tables):
        raise _fail(path, f"{name!r} is not a list of tables; each begins with [[{name}]]")
    return [(f"[[{name}]] number {number}", table) for number, table in enumerate(tables, 1)]


def _allowances(path: pathlib.Path, content: dict[str, Any]) -> dict[str, str]:
    reasons = {}
    for where, table in _tables(path, content, "allow"):
        _check(path, where, table, {"what": str, "reason": str})
        reasons[table["what"]] = table["reason"]
    return reasons


def _check(path: pathlib.Path, where: str, table: dict[str, Any], types: dict[str, type]) -> None:
    for key, value in table.items():
        if key not in types:
            raise _fail(path, f"{where}: {key!r} is not one of {', '.join(types)}")
        if type(value) is not types[key] or (isinstance(value, int) and value < 0):
            wanted = "text" if types[key] is str else "a count"
            raise _fail(path, f"{where}: {key!r} is {value!r}, not {wanted}")
    for key in types:
        if key not in table:
            raise _fail(path, f"{where}: {key!r} is missing")
