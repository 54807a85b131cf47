"""Reports as text and as Markdown; verdicts as text, for a failing test."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from shardrules.arguments import checked
from shardrules.costs.accounts import Entry
from shardrules.costs.findings import Finding, advice
from shardrules.hlo import Verdict
from shardrules.report.blocks import Block, Item
from shardrules.report.content import Content
from shardrules.report.content import item as item_of
from shardrules.report.grouping import alike, here, sizes

_BLOCKS, _LINES = 3, 12  # of the collectives that a failing test's message is about


@checked
def table(rows: Sequence[Sequence[Any]]) -> str:
    """Align rows of cells, the first of which is the heading; a cell may have several lines.

    Args:
      rows: equally long sequences of cells.
    """
    split = [[str(cell).split("\n") for cell in row] for row in rows]
    widths = [max(len(line) for row in split for line in row[i]) for i in range(len(rows[0]))]
    # Rows of one line each need no rule between them.
    ruled = any(len(cell) > 1 for row in split for cell in row)
    rule = "-+-".join("-" * width for width in widths)
    lines = []
    for number, row in enumerate(split):
        for i in range(max(map(len, row))):
            cells = [cell[i] if i < len(cell) else "" for cell in row]
            lines.append(" | ".join(c.ljust(w) for c, w in zip(cells, widths)).rstrip())
        if number == 0 or (ruled and number < len(rows) - 1):
            lines.append(rule)
    return "\n".join(lines)


def shown(cell: object) -> str:
    """Write a cell; None is not known."""
    return "?" if cell is None else here(str(cell))


def as_text(blocks: Iterable[Block]) -> list[str]:
    """Write blocks as lines of text."""
    lines: list[str] = []
    for block in blocks:
        lines += [f"{block.title.lower()}:"] if block.title else []
        if block.rows:
            lines.append(table([block.columns, *([*map(shown, row)] for row in block.rows)]))
        lines += map(_text_of, block.items)
        lines += [f"  {block.rest}"] if block.rest else []
        lines += [f"({note})" for note in block.note.splitlines()]
        lines.append("")
    return lines


def _text_of(item: Item) -> str:
    """Write an item as an indented block of text."""
    lines = [f"{item.kind}: {item.what}" if item.kind else item.what]
    lines += [f"at {item.source}"] if item.source else []
    lines += [f"{label} {text}" for label, text in item.lines]
    return "  " + "\n    ".join(lines)


def _markdown_row(cells: Iterable[object]) -> str:
    written = (shown(cell).replace("|", "\\|").replace("\n", " ") for cell in cells)
    return f"| {' | '.join(written)} |"


def as_markdown(blocks: Iterable[Block], level: str = "##") -> list[str]:
    """Write blocks as lines of GitHub's Markdown, with headings of a level."""
    lines: list[str] = []
    for block in blocks:
        lines += [f"{level} {block.title}", ""] if block.title else []
        if block.rows:
            words = len(block.columns) - block.numbers - 1
            lines.append(_markdown_row(block.columns))
            lines.append("|---" * words + "|--:" * block.numbers + "|---|")
            lines += map(_markdown_row, block.rows)
            lines += [""] if block.note else []
        for item in block.items:
            kind = f"**{item.kind}**: " if item.kind else ""
            where = f", `{item.source}`" if item.source else ""
            lines.append(f"- {kind}{item.what}{where}")
            lines += [f"  - {label} {text}" for label, text in item.lines]
        lines += [f"- {block.rest}"] if block.rest else []
        lines += [*block.notes, ""]
    return lines


@checked
def plain(content: Content) -> str:
    """Return a whole report as text."""
    first = filter(None, (content.measured, content.headline))
    return "\n".join([*first, "", *as_text(content.blocks)]).rstrip() + "\n"


@checked
def markdown(content: Content) -> str:
    """Return a report as GitHub's Markdown."""
    first = [f"{content.measured}.", ""] if content.measured else []
    lines = [f"# {content.title}", "", *first, f"{content.about}.", ""]
    return "\n".join([*lines, *as_markdown(content.blocks)]).rstrip() + "\n"


# -- verdicts, for a failing test ------------------------------------------------------------------


@checked
def over(verdict: Verdict) -> str:
    """Return the mesh axes that a collective runs over, or its device groups."""
    collective = verdict.collective
    if collective.axes is not None:
        return "{" + ", ".join(collective.axes) + "}"
    groups = ["{" + ",".join(map(str, map(int, group))) + "}" for group in collective.groups[:4]]
    more = f" ... ({len(collective.groups)} groups)" if len(collective.groups) > 4 else ""
    return f"device groups {' '.join(groups)}{more}"


@checked
def describe_finding(*same: Finding) -> str:
    """Return findings that are alike as an indented block."""
    return _text_of(item_of(same))


@checked
def listed(entries: Sequence[Entry], verdicts: Sequence[Verdict]) -> list[str]:
    """Return a few collectives as blocks, many as a line for each kind, axes, verdict and source.

    Args:
      entries: collectives of an account.
      verdicts: the verifier's on them; of a logical account they say nothing.
    """
    pairs = list(zip(entries, verdicts))
    blocks = alike(pairs, lambda p: (p[0].what, p[0].verdict, p[0].source, p[1].reason))
    if len(blocks) <= _BLOCKS and all(entry.verdict for entry in entries):
        return [
            describe_finding(*(Finding(v.verdict, v, e, advice(v)) for e, v in same))
            for same in blocks
        ]
    lines = []
    for same in alike(entries, lambda e: (e.what, e.verdict, e.source)):
        first, count = same[0], f"{len(same)} x " if len(same) > 1 else ""
        verdict = f": {first.verdict}" if first.verdict else ""
        where = f" at {here(first.source)}" if first.source else ""
        lines.append(f"    {count}{first.what}, {sizes([e.bytes for e in same])}{verdict}{where}")
    left = len(lines) - _LINES
    return lines if left <= 0 else [*lines[:_LINES], f"    and {left} more lines like these"]
