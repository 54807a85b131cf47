"""Verdicts as text: for a failing test, and for people."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from shardrules.costs.accounts import CONVENTION
from shardrules.costs.findings import advice
from shardrules.costs.hints import Hint
from shardrules.hlo import Judgement, Verdict
from shardrules.report.content import Content

__all__ = ["advice", "describe", "describe_hint", "over", "plain", "source", "summary", "table"]


def over(verdict: Verdict) -> str:
    """Return the mesh axes that a collective runs over, or its device groups."""
    collective = verdict.collective
    if collective.axes is not None:
        return "{" + ", ".join(collective.axes) + "}"
    groups = [list(map(int, group)) for group in collective.groups]
    shown = " ".join("{" + ",".join(map(str, group)) + "}" for group in groups[:4])
    return f"device groups {shown}" + (f" ... ({len(groups)} groups)" if len(groups) > 4 else "")


def source(verdict: Verdict) -> str:
    """Return ``file:line`` and function of a collective, or its op_name, or nothing."""
    frame = verdict.collective.source
    return str(frame) if frame is not None else verdict.collective.op_name


def describe(verdict: Verdict) -> str:
    """Return one verdict as an indented block: what, where, why, what to do."""
    collective = verdict.collective
    part = ""
    if verdict.range is not None:
        part = f", elements {verdict.range.start}:{verdict.range.stop} of its operand"
    lines = [
        f"{verdict.verdict}: {collective.kind} over {over(verdict)}, {verdict.bytes} B"
        f"{part}, {collective.phase} phase ({collective.name})"
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


def summary(judgement: Judgement, verdicts: Iterable[Verdict] | None = None) -> str:
    """Return one line for each collective: verdict, kind, axes, bytes."""
    shown = judgement.verdicts if verdicts is None else verdicts
    return (
        "\n".join(f"{v.collective.kind} over {over(v)}, {v.bytes} B: {v.verdict}" for v in shown)
        or "no collectives"
    )


def describe_hint(hint: Hint) -> str:
    """Return one hint as an indented block."""
    where = f"\n    at {hint.entry.source}" if hint.entry.source else ""
    return (
        f"  {hint.kind}: {hint.entry.what}, {hint.entry.bytes} B{where}\n    to do: {hint.advice}"
    )


def plain(content: Content) -> str:
    """Return a whole report as text."""
    lines = [content.headline, ""]
    rows = [["collective", "verdict", "runs", "bytes", "wire bytes", "source"]]
    rows += [
        [
            r["collective"],
            r["verdict"],
            "?" if r["runs"] is None else r["runs"],
            r["bytes"],
            r["wire_bytes"],
            r["source"],
        ]
        for r in content.rows
    ]
    if content.rows:
        lines += [table(rows), "", f"({CONVENTION}; of one run)", ""]
    for title, blocks in (
        (
            "findings",
            [
                describe(f.verdict)
                if f.kind != "declared"
                else describe(f.verdict) + f"\n    strict: {f.advice}"
                for f in content.findings
            ],
        ),
        (
            "allowed",
            [describe(f.verdict) + f"\n    allowed: {reason}" for f, reason in content.allowed],
        ),
        ("allowances that match nothing", [f"  {what}" for what in content.unused]),
        ("could be cheaper", [describe_hint(h) for h in content.hints]),
    ):
        if blocks:
            lines += [f"{title}:", *blocks, ""]
    for section in content.costs:
        cells = [["?" if cell is None else cell for cell in row] for row in section.rows]
        lines += [f"{section.title.lower()}:", table([section.columns, *cells])]
        lines += [f"({section.note})", ""]
    return "\n".join(lines).rstrip() + "\n"
