"""What every report is made of, tables and lists of items, and how both are written."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from shardrules.arguments import checked
from shardrules.costs import accounts
from shardrules.report.grouping import here

__all__ = ["Block", "Item", "as_markdown", "as_text", "cell", "table"]


class Item(NamedTuple):
    """One thing that a report says: a finding, a hint, an output.

    Attributes:
      kind: ``redundant`` and so on.
      what: what it is about.
      source: ``file:line (function)``, empty where the text has none.
      lines: more to say, each with its label: ``("because", ...)``, ``("to do:", ...)``.
      entry: the collective's line in the account, None where it is about something else.
    """

    kind: str
    what: str
    source: str
    lines: tuple[tuple[str, str], ...]
    entry: accounts.Entry | None = None


class Block(NamedTuple):
    """A part of a report under its own title: a table, or a list.

    Attributes:
      title: what it is about.
      note: how to read it, a sentence a line, each without a full stop.
      columns: the names of a table's cells.
      rows: the cells; None is not known.
      numbers: how many columns before the last one hold numbers.
      items: of a list.
      rest: one sentence on the items that are left out.
    """

    title: str
    note: str = ""
    columns: tuple[str, ...] = ()
    rows: Sequence[Sequence[Any]] = ()
    numbers: int = 0
    items: tuple[Item, ...] = ()
    rest: str = ""


@checked
def table(rows: Sequence[Sequence[Any]]) -> str:
    """Align rows of cells, the first of which is the heading; a cell may have several lines.

    Args:
      rows: equally long sequences of cells.
    """
    split = [[str(cell).split("\n") for cell in row] for row in rows]
    widths = [max(len(line) for row in split for line in row[i]) for i in range(len(rows[0]))]
    several = any(len(cell) > 1 for row in split for cell in row)
    rule = "-+-".join("-" * width for width in widths)
    lines = []
    for number, row in enumerate(split):
        for i in range(max(map(len, row))):
            cells = [cell[i] if i < len(cell) else "" for cell in row]
            lines.append(" | ".join(c.ljust(w) for c, w in zip(cells, widths)).rstrip())
        # Rows of one line each need no rule between them.
        if number == 0 or (several and number < len(rows) - 1):
            lines.append(rule)
    return "\n".join(lines)


def as_text(blocks: Iterable[Block]) -> list[str]:
    """Write blocks as lines of text."""
    lines: list[str] = []
    for block in blocks:
        lines += [f"{block.title.lower()}:"] if block.title else []
        if block.rows:
            shown = [[here(str("?" if c is None else c)) for c in row] for row in block.rows]
            lines.append(table([block.columns, *shown]))
        for item in block.items:
            lines.append(text_of(item))
        lines += [f"  {block.rest}"] if block.rest else []
        lines += [f"({note})" for note in block.note.splitlines()]
        lines.append("")
    return lines


def text_of(item: Item) -> str:
    """Write an item as an indented block of text."""
    lines = [f"{item.kind}: {item.what}" if item.kind else item.what]
    lines += [f"at {item.source}"] if item.source else []
    lines += [f"{label} {text}" for label, text in item.lines]
    return "  " + "\n    ".join(lines)


def cell(value: Any) -> str:
    """Write a cell of a Markdown table."""
    text = here(str("?" if value is None else value))
    return text.replace("|", "\\|").replace("\n", " ")


def as_markdown(blocks: Iterable[Block], level: str = "##") -> list[str]:
    """Write blocks as lines of GitHub's Markdown, with headings of a level."""
    lines: list[str] = []
    for block in blocks:
        lines += [f"{level} {block.title}", ""] if block.title else []
        if block.rows:
            words = len(block.columns) - block.numbers - 1
            marks = "|---" * words + "|--:" * block.numbers + "|---|"
            lines += ["| " + " | ".join(block.columns) + " |", marks]
            lines += ["| " + " | ".join(map(cell, row)) + " |" for row in block.rows]
            lines += [""] if block.note else []
        for item in block.items:
            where = f", `{item.source}`" if item.source else ""
            lines.append(
                f"- **{item.kind}**: {item.what}{where}" if item.kind else f"- {item.what}"
            )
            lines += [f"  - {label} {text}" for label, text in item.lines]
        lines += [f"- {block.rest}"] if block.rest else []
        lines += [f"{note[0].upper()}{note[1:]}." for note in block.note.splitlines()]
        lines.append("")
    return lines
