"""Verdicts as text: for a failing test, and for people."""

from __future__ import annotations

import collections
from collections.abc import Iterable, Sequence
from typing import Any

from shardrules.arguments import checked
from shardrules.costs.accounts import Entry
from shardrules.costs.findings import Finding, advice
from shardrules.costs.waste import KINDS
from shardrules.hlo import Judgement, Verdict
from shardrules.report.content import Content
from shardrules.report.grouping import Remark, alike, here, size, sizes

__all__ = ["advice", "describe", "describe_finding", "over", "plain", "source", "summary", "table"]


_BLOCKS, _LINES = 3, 12  # of the collectives that a failing test's message is about


@checked
def over(verdict: Verdict) -> str:
    """Return the mesh axes that a collective runs over, or its device groups."""
    collective = verdict.collective
    if collective.axes is not None:
        return "{" + ", ".join(collective.axes) + "}"
    groups = [list(map(int, group)) for group in collective.groups]
    shown = " ".join("{" + ",".join(map(str, group)) + "}" for group in groups[:4])
    return f"device groups {shown}" + (f" ... ({len(groups)} groups)" if len(groups) > 4 else "")


@checked
def source(verdict: Verdict) -> str:
    """Return ``file:line`` and function of a collective, or its op_name, or nothing."""
    frame = verdict.collective.source
    return here(str(frame)) if frame is not None else verdict.collective.op_name


@checked
def describe(verdict: Verdict, *others: Verdict) -> str:
    """Return a verdict as an indented block: what, where, why, what to do.

    Args:
      verdict: one of those that are described.
      *others: those that differ from it in their bytes and their place in the program alone.
    """
    collective = verdict.collective
    part, count, name = "", "", collective.name
    if others:
        count, name = f"{len(others) + 1} x ", f"{name} and {len(others)} like it"
    elif verdict.range is not None:
        part = f", elements {verdict.range.start}:{verdict.range.stop} of its operand"
    lines = [
        f"{verdict.verdict}: {count}{collective.kind} over {over(verdict)}, "
        f"{sizes([v.bytes for v in (verdict, *others)])}{part}, {collective.phase} phase ({name})"
    ]
    where = source(verdict)
    if where:
        lines.append(f"at {where}")
    lines.append(f"because {verdict.reason}")
    if verdict.rests_on:
        lines.append(
            "resting on: "
            + "; ".join(s.detail if s.source == "assumption" else str(s) for s in verdict.rests_on)
        )
    hint = advice(verdict)
    if hint:
        lines.append(f"to do: {hint}")
    return "  " + "\n    ".join(lines)


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


@checked
def summary(judgement: Judgement, verdicts: Iterable[Verdict] | None = None) -> str:
    """Return a line for each kind, axes, bytes and verdict, with a count where there are more."""
    shown = judgement.verdicts if verdicts is None else verdicts
    lines = collections.Counter(
        f"{v.collective.kind} over {over(v)}, {size(v.bytes)}: {v.verdict}" for v in shown
    )
    return (
        "\n".join(f"{n} x {line}" if n > 1 else line for line, n in lines.items())
        or "no collectives"
    )


@checked
def describe_finding(*same: Finding) -> str:
    """Return findings that are alike as an indented block."""
    text = describe(*(f.verdict for f in same))
    if same[0].verdict.verdict == "needed":
        word = "strict" if same[0].kind == "declared" else same[0].kind
        text += f"\n    {word}: {same[0].advice}"
    return text


@checked
def listed(entries: Sequence[Entry], verdicts: Sequence[Verdict]) -> list[str]:
    """Return a few collectives as blocks, many as a line for each kind, axes, verdict and source.

    Args:
      entries: collectives of an account.
      verdicts: the verifier's on them; of a logical account they say nothing.
    """
    pairs = list(zip(entries, verdicts))
    blocks = alike(pairs, lambda p: (p[0].what, p[0].verdict, p[0].source, p[1].reason))
    if len(blocks) <= _BLOCKS and all(e.verdict for e in entries):
        return [describe(*(v for _, v in same)) for same in blocks]
    lines = []
    for same in alike(entries, lambda e: (e.what, e.verdict, e.source)):
        count, one = f"{len(same)} x " if len(same) > 1 else "", same[0]
        lines.append(
            f"    {count}{one.what}, {sizes([e.bytes for e in same])}"
            + (f": {one.verdict}" if one.verdict else "")
            + (f" at {here(one.source)}" if one.source else "")
        )
    left = len(lines) - _LINES
    return lines if left <= 0 else [*lines[:_LINES], f"    and {left} more lines like these"]


def _remark(remark: Remark) -> str:
    if not remark.reason:  # a hint
        where = f"\n    at {remark.source}" if remark.source else ""
        return f"  {remark.kind}: {remark.what}{where}\n    to do: {remark.todo}"
    text = describe(*remark.verdicts)
    if remark.label == "reason":
        return f"{text}\n    allowed: {remark.todo}"
    word = {"declared": "strict", **{kind: kind for kind in KINDS}}.get(remark.kind)
    return f"{text}\n    {word}: {remark.todo}" if word else text


@checked
def plain(content: Content) -> str:
    """Return a whole report as text."""
    lines = [content.headline, ""]
    for title, unequal in content.replicas:
        lines += [f"{title.lower()}:"]
        for one, label, todo in unequal:
            word = "allowed" if label == "reason" else label
            lines += [f"  {one.kind}: {one.what}", f"    because {one.because}"]
            lines.append(f"    {word}: {todo}")
        lines.append("")
    if content.rows:
        lines += [table([content.columns, *map(content.cells, content.rows)]), ""]
        lines += [line for note in content.notes for line in (f"({note})", "")]
    for title, remarks in content.remarks:
        lines += [f"{title.lower()}:", *map(_remark, remarks), ""]
    if content.unused:
        lines += ["allowances that match nothing:", *(f"  {what}" for what in content.unused), ""]
    for section in content.costs:
        shown = [["?" if cell is None else here(str(cell)) for cell in row] for row in section.rows]
        lines += [f"{section.title.lower()}:", table([section.columns, *shown])]
        lines += [f"({section.note})", ""]
    return "\n".join(lines).rstrip() + "\n"
