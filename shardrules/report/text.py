"""Write reports as text and as Markdown, and verdicts as text for a failing test."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from shardrules.arguments import checked
from shardrules.costs.accounts import Entry
from shardrules.costs.advice import advice
from shardrules.costs.findings import Finding
from shardrules.hlo import Verdict
from shardrules.paths import here
from shardrules.report.content import Content
from shardrules.report.grouping import alike
from shardrules.report.items import BETWEEN, RESTING, TODO, item
from shardrules.report.sections import Block, Item
from shardrules.report.several import Several
from shardrules.units import sizes

_LONG = 60  # advice with at least so many characters is written once
_BLOCKS, _LINES = 3, 12  # the most blocks or lines on collectives in a failing test's message


@checked
def table(rows: Sequence[Sequence[Any]]) -> str:
    """Return an aligned table; the first row is the heading, and a cell may have several lines.

    Args:
      rows: equally long sequences of cells.
    """
    split: list[list[list[str]]] = []
    widths = [0] * len(rows[0])
    ruled = False  # put rules between rows only if a cell has several lines
    for row in rows:
        split.append([str(cell).split("\n") for cell in row])
        for i, lines_of_cell in enumerate(split[-1]):
            widths[i] = max(widths[i], *map(len, lines_of_cell))
            ruled = ruled or len(lines_of_cell) > 1
    rule = "-+-".join("-" * width for width in widths)
    lines = []
    for number, parts in enumerate(split):
        for i in range(max(map(len, parts))):
            cells = [cell[i] if i < len(cell) else "" for cell in parts]
            lines.append(" | ".join(c.ljust(w) for c, w in zip(cells, widths)).rstrip())
        if number == 0 or (ruled and number < len(rows) - 1):
            lines.append(rule)
    return "\n".join(lines)


def _shown(cell: object) -> str:
    return "?" if cell is None else here(str(cell))


def _as_text(blocks: Iterable[Block]) -> list[str]:
    lines: list[str] = []
    for block in (block.told for block in blocks):
        lines += [f"{block.title.lower()}:"] if block.title else []
        if block.rows:
            lines.append(table([block.columns, *([*map(_shown, row)] for row in block.rows)]))
        lines += map(_text_of, _advised_once(block.items))
        lines += [f"  {block.rest}"] if block.rest else []
        lines += [f"({note})" for note in block.note.splitlines()]
        lines.append("")
    return lines


def _advised_once(items: Iterable[Item]) -> Iterator[Item]:
    """Yield the items; replace repeated long advice by the name of the collective that has it."""
    first: dict[str, str] = {}
    for said in items:
        advice = dict(said.lines).get(TODO, "")
        if said.entry is None or said.entry.judged is None or len(advice) < _LONG:
            yield said
            continue
        name = said.entry.judged.collective.name
        above = first.setdefault(advice, name)
        same = (TODO, f"the same as for {above}")
        yield (
            said
            if above == name
            else said._replace(
                lines=tuple(same if label == TODO else (label, text) for label, text in said.lines)
            )
        )


def _text_of(said: Item) -> str:
    lines = [f"{said.kind}: {said.what}" if said.kind else said.what]
    lines += [f"at {said.source}"] if said.source else []
    lines += [f"{label} {text}" for label, text in said.lines]
    return "  " + "\n    ".join(lines)


def markdown_table(
    columns: Sequence[str], rows: Iterable[Sequence[object]], numbers: int = 0
) -> list[str]:
    """Return the lines of a table; ``numbers`` columns before the last one have numbers."""
    lines = []
    for row in (columns, *rows):
        cells = [_shown(cell).replace("|", "\\|").replace("\n", " ") for cell in row]
        lines.append(f"| {' | '.join(cells)} |")
    lines.insert(1, "|---" * (len(columns) - numbers - 1) + "|--:" * numbers + "|---|")
    return lines


def _as_markdown(blocks: Iterable[Block], level: str) -> list[str]:
    lines: list[str] = []
    for block in (block.told for block in blocks):
        lines += [f"{level} {block.title}", ""] if block.title else []
        if block.rows:
            lines += markdown_table(block.columns, block.rows, block.numbers)
            lines += [""] if block.note else []
        for each in block.items:
            kind = f"**{each.kind}**: " if each.kind else ""
            where = f", `{each.source}`" if each.source else ""
            lines.append(f"- {kind}{each.what}{where}")
            lines += [f"  - {label} {text}" for label, text in each.lines]
        lines += [f"- {block.rest}"] if block.rest else []
        lines += [*block.notes, ""]
    return lines


@checked
def plain(content: Content | Several) -> str:
    """Return a whole report as text, without wrapping lines."""
    each_one = content.detailed if isinstance(content, Several) else [content]
    items: list[Item] = []
    for one in each_one:
        for block in one.changes:
            items += block.items
    common = _common(items)
    lines = _plain(content, content.headline, common)
    if isinstance(content, Several):
        for each in content.detailed:
            own = _plain(each, f"{each.title}: {content.about_of(each)}", common)
            own = own[1:] if own[0] == content.measured else own  # the report begins with it
            lines += ["=" * 72, "\n".join(own).rstrip(), ""]
        lines += _as_text(content.ends)
    lines += _resting(common)
    return "\n".join(lines).rstrip() + "\n"


def _plain(content: Content | Several, headline: str, common: Sequence[str]) -> list[str]:
    first = filter(None, (content.measured, headline))
    return [*first, "", *_as_text(_without(content.blocks, common))]


def _parts(said: Item) -> list[str]:
    """Return the statements that a finding depends on."""
    return dict(said.lines).get(RESTING, "").split(BETWEEN) if said.kind else []


def _common(items: Iterable[Item]) -> list[str]:
    """Return the statements that all findings depend on, to write them once."""
    each = [_parts(said) for said in items if RESTING in dict(said.lines)]
    common = each[0] if each else []
    for other in each[1:]:
        common = [part for part in common if part in other]
    return common


def _resting(common: Sequence[str]) -> list[str]:
    return ["what all findings rest on:", *(f"  {part}" for part in common)] if common else []


def described(groups: Iterable[Sequence[Finding]]) -> tuple[list[str], list[str]]:
    """Return each group of similar findings as a block, and lines on their common assumptions."""
    items = [item(same) for same in groups]
    common = _common(items)
    (block,) = _without([Block("", items=tuple(items))], common)
    return [_text_of(said) for said in block.items], _resting(common)


def _without(blocks: Iterable[Block], common: Sequence[str]) -> Iterable[Block]:
    """Yield the blocks without the statements that the report writes once for all findings."""
    for block in blocks:
        items = []
        for said in block.items:
            rest = BETWEEN.join(part for part in _parts(said) if part not in common)
            lines = ((label, rest if label == RESTING else text) for label, text in said.lines)
            items.append(said._replace(lines=tuple(line for line in lines if line[1])))
        yield block._replace(items=tuple(items))


@checked
def markdown(content: Content | Several) -> str:
    """Return a report as GitHub's Markdown."""
    return _markdown(content, content.about, "#")


def _markdown(content: Content | Several, about: str, level: str) -> str:
    lines = [f"{level} {content.title}", ""]
    if isinstance(content, Several) and content.ran:
        lines += [f"{content.ran}.", ""]
    lines += [f"{content.measured}.", ""] if content.measured else []
    lines += [f"{about}.", "", *_as_markdown(content.blocks, f"{level}#")]
    if isinstance(content, Several):
        parts = ((each, content.about_of(each)) for each in content.detailed)
        lines += [_markdown(each, own, f"{level}#") for each, own in parts]
        lines += _as_markdown(content.ends, f"{level}#")
    return "\n".join(lines).rstrip() + "\n"


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
    """Return similar findings as an indented block."""
    return _text_of(item(same))


@checked
def listed(entries: Sequence[Entry]) -> list[str]:
    """Return a few collectives as blocks, or many as a line for each kind, verdict and source.

    Args:
      entries: collectives of an account.
    """
    blocks = alike(entries, lambda e: (e.what, e.verdict, e.place, e.reason))
    if len(blocks) <= _BLOCKS and all(entry.verdict for entry in entries):
        described = []
        for same in blocks:
            found = [Finding(entry.verdict, entry, advice(entry.judged)) for entry in same]
            described.append(describe_finding(*found))
        return described
    lines = []
    for same in alike(entries, lambda e: (e.what, e.verdict, e.place)):
        first, count = same[0], f"{len(same)} x " if len(same) > 1 else ""
        verdict = f": {first.verdict}" if first.verdict else ""
        where = f" at {here(first.place)}" if first.place else ""
        lines.append(f"    {count}{first.what}, {sizes([e.bytes for e in same])}{verdict}{where}")
    left = len(lines) - _LINES
    return lines if left <= 0 else [*lines[:_LINES], f"    and {left} more lines like these"]
