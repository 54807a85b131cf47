"""Fit text to a terminal: wrap lines, narrow tables, colour verdicts.

This module imports neither jax nor NumPy: a script that a command runs may first set environment
variables that they read at import.
"""

from __future__ import annotations

import itertools
import os
import re
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

WIDTH = 100  # the width without a terminal
_NARROWEST = 40  # the least width of lines, even in a narrower terminal
_CELL = 4  # the least width of a column
_SHORT = 16  # columns of paths are narrowed to this width before other columns are narrowed
_PATH = 24  # paths are shortened to this length before columns are left out
_RULE = re.compile(r"-+(?:-\+-+)+")
_FASTEST = re.compile(r"(?<=s), [^(),]*\)$")  # the device in "2 ms (fastest: 1 ms, vm CPU 7)"
_INDENT = re.compile(r"(?: *\((?=\w)| *[-+] (?=\S)| *)")
# The heads of the columns that are left out if a table is too wide, in this order.
_LEAST = (
    "times sites devices runs bandwidth".split()
    + ["est. a run", "of it exposed", "exposed", "collectives", "copied bytes", "launches", "bytes"]
    + ["trips unknown because", "share", "other"]
)
_CODE = re.compile(r"`[^`]+`[^\s]*")
_KEPT = "\0"  # a space at which no line ends
_PATHS = ("source", "at", "shard_map", "used at", "called at", "loop")
_COLOURS = {"redundant": 31, "overwide": 31, "differs": 31, "may hang": 31}
_COLOURS |= {"unproven": 33, "declared": 33, "needed": 32}
_WORDS = "|".join(_COLOURS)
# A verdict before a colon, or alone in the cell of a table.
_VERDICT = re.compile(rf"^  ({_WORDS})(?=: )|(?<=\| )({_WORDS})(?= *(?:\||$))", re.MULTILINE)


def width(stream: Any = None) -> int:
    """Return the most columns of a line: COLUMNS, or the terminal's width, or 100."""
    given = os.environ.get("COLUMNS", "")
    if given.isdecimal() and int(given[:6]):
        return max(int(given[:6]), _NARROWEST)
    try:
        columns = os.get_terminal_size(stream.fileno()).columns if stream is not None else 0
    except (OSError, ValueError, AttributeError):  # the stream is not a terminal, or not a file
        columns = 0
    return max(columns, _NARROWEST) if columns else WIDTH


def has_colours(stream: Any) -> bool:
    """Return whether a stream is a terminal, and NO_COLOR isn't set."""
    plain = os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb"
    return is_terminal(stream) and not plain


def is_terminal(stream: Any) -> bool:
    try:
        return bool(stream.isatty())
    except (AttributeError, ValueError):  # the stream is not a file, or is closed
        return False


def coloured(text: str) -> str:
    """Colour the verdicts of a report for a terminal."""
    return _VERDICT.sub(lambda match: f"\x1b[{_COLOURS[match[0].strip()]}m{match[0]}\x1b[0m", text)


def fitted(text: str, columns: int) -> str:
    """Fit each line of a report: narrow the tables, wrap other lines with a hanging indent."""
    lines = text.split("\n")
    new: list[str] = []
    number = 0
    gone: list[str] = []  # columns of the table above
    while number < len(lines):
        line = lines[number]
        rule = lines[number + 1] if number + 1 < len(lines) else ""
        if _RULE.fullmatch(rule):
            end = number + 2
            while end < len(lines) and _is_row(lines[end], rule):
                end += 1
            table, gone = _table(lines[number:end], columns)
            new += table
            number = end
        else:
            if gone and line.startswith("(") and line.endswith(")"):
                line = _without(line, gone)
            else:
                gone = []
            new += _wrapped(line, columns) if line or not gone else []
            number += 1
    return "\n".join(new)


def _without(note: str, gone: Sequence[str]) -> str:
    """Remove from the note below a table the parts about columns that were left out."""
    parts = [part for part in note[1:-1].split("; ") if part.partition(":")[0] not in gone]
    return f"({'; '.join(parts)})" if parts else ""


def _wrapped(line: str, columns: int) -> list[str]:
    if len(line) <= columns:
        return [line]
    if set(line) <= {"="}:
        return [line[:columns]]
    if line.startswith("    at ") and " " not in line[7:].partition(" (")[0]:
        return [line[:7] + _shortened(line[7:], columns - 7)]
    match = _INDENT.match(line)
    start = match[0] if match else ""
    deeper = 0 if start.strip() else 2
    room = columns - len(start) - deeper

    def whole(code: re.Match[str]) -> str:
        """Keep a command on one line if it fits, so that it can be copied and run."""
        return code[0].replace(" ", _KEPT) if len(code[0]) < room else code[0]

    wrapped = textwrap.wrap(
        _CODE.sub(whole, line[len(start) :]),
        columns,
        initial_indent=start,
        subsequent_indent=" " * (len(start) + deeper),
        break_on_hyphens=False,
    )
    return [part.replace(_KEPT, " ") for part in wrapped]


def _shortened(path: str, room: int) -> str:
    """Shorten the function's name, then drop it, then drop the beginning of the path.

    ``.../model/train.py:12 (step)``
    """
    at, parenthesis, function = path.partition(" (")
    last = function.rstrip(")").rpartition(".")[2]
    for shorter in (path, f"{at} (...{last})", at) if parenthesis else (path,):
        if len(shorter) <= room:
            return shorter
    path = at
    kept = path[-max(room - 4, 1) :]
    _, slash, after = kept.partition("/")
    return f".../{after}" if slash and after else f"...{path[-max(room - 3, 1) :]}"


# -- tables ----------------------------------------------------------------------------------------


def _is_row(line: str, rule: str) -> bool:
    """Return whether a line is a row of the table: it has bars where the rule has crosses."""
    if _RULE.fullmatch(line):
        return len(line) == len(rule)
    bars = [at for at, character in enumerate(rule) if character == "+"]
    inside = [at for at in bars if at < len(line)]
    return bool(inside) and all(line[at] == "|" and line[at - 1] == " " for at in inside)


def _table(lines: Sequence[str], columns: int) -> tuple[list[str], list[str]]:
    """Fit a table; return its lines, and the columns that are left out."""
    # If the table is too wide, try these steps one after another until it fits: drop device names
    # from times, shorten paths, drop empty columns, drop the columns in ``_LEAST``. Then narrow the
    # widest column by one until the table fits or all are as narrow as ``_CELL``; columns of paths
    # come first. Cells that are still too long are wrapped over several lines.
    if max(map(len, lines)) <= columns:
        return list(lines), []
    rule = lines[1]
    ends = [*(at for at, c in enumerate(rule) if c == "+"), max(map(len, lines)) + 2]
    starts = [0, *(at + 2 for at in ends[:-1])]
    ruled = any(_RULE.fullmatch(line) for line in lines[2:])
    cut = [slice(start, end - 1) for start, end in zip(starts, ends)]
    rows = []
    for line in lines:
        if not _RULE.fullmatch(line):
            rows.append([line[column].rstrip() for column in cut])
    heads = rows[0]
    kept = list(range(len(heads)))

    def width_of(column: int) -> int:
        return max(len(row[column]) for row in rows)

    def total() -> int:
        return sum(map(width_of, kept)) + 3 * (len(kept) - 1)

    def shorten_paths(least: int) -> None:
        for column in kept:
            over = total() - columns
            if over > 0 and heads[column] in _PATHS:
                room = max(width_of(column) - over, least)
                for row in rows[1:]:
                    row[column] = _shortened(row[column], room)

    if total() > columns:
        for row in rows[1:]:
            row[:] = [_FASTEST.sub(")", cell) for cell in row]
    shorten_paths(_PATH)
    left_out = []
    for column in range(len(heads)):
        if total() > columns and not any(row[column] for row in rows[1:]):
            kept.remove(column)  # it is empty
    # Wire bytes are of one run; drop them early if a column holds the sum of all runs.
    more = ["wire bytes"] if "in all" in heads else []
    for head in (*_LEAST[:4], *more, *_LEAST[4:]):
        if total() > columns and head in heads and heads.index(head) in kept and len(kept) > 2:
            kept.remove(heads.index(head))
            left_out.append(head)
    widths = {column: width_of(column) for column in kept}
    while sum(widths.values()) + 3 * (len(kept) - 1) > columns:
        paths = [c for c in kept if heads[c] in _PATHS and widths[c] > _SHORT]
        widest = max(paths or kept, key=lambda column: widths[column])
        if widths[widest] <= _CELL:
            break
        widths[widest] -= 1
    for column in kept:
        for row in rows[1:]:
            if heads[column] in _PATHS:
                row[column] = _shortened(row[column], widths[column])
    written = []
    of_rule = "-+-".join("-" * widths[column] for column in kept)
    continued = ruled or any(_is_wrapped(row, widths) for row in rows[1:])
    for number, row in enumerate(rows):
        written += _cells([row[c] for c in kept], [widths[c] for c in kept])
        first_of_next = number + 1 < len(rows) and rows[number + 1][kept[0]]
        if number == 0 or (continued and first_of_next):
            written.append(of_rule)
    if left_out:
        note = f"(left out, to fit {columns} columns: {', '.join(left_out)})"
        written += _wrapped(note, columns)
    return written, left_out


def _is_wrapped(row: Sequence[str], widths: Mapping[int, int]) -> bool:
    return any(len(row[column]) > width for column, width in widths.items())


def _cells(cells: Iterable[str], widths: Sequence[int]) -> list[str]:
    parts = [
        textwrap.wrap(cell, width, break_on_hyphens=False) or [""]
        for cell, width in zip(cells, widths)
    ]
    lines = []
    for of_line in itertools.zip_longest(*parts, fillvalue=""):
        padded = map(str.ljust, of_line, widths)
        lines.append(" | ".join(padded).rstrip())
    return lines
