"""Verdicts as text: for a failing test, and for people."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from shardrules.hlo import Judgement, Verdict

__all__ = ["advice", "describe", "table"]


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


def advice(verdict: Verdict) -> str:
    """Say the one change that removes a finding, or that would let it be judged."""
    if verdict.verdict in ("redundant", "overwide"):
        return ("trace it under jax.shard_map(check_vma=True), with shardrules.install() and a "
                "rule for each kernel: the backward pass then reduces over just the axes that "
                "it needs")
    if verdict.verdict == "unproven":
        names = [b.kernel for b in verdict.blockers if b.kernel]
        if names:
            return ("if the kernel reads no other device and no device id, declare that: "
                    "@shardrules.no_communication above its def, or "
                    f"shardrules.register({names[0]!r}, shardrules.no_communication)")
        if any(b.target for b in verdict.blockers):
            return ("trace the program after shardrules.install(), with a rule for the kernel: "
                    "its custom call then says in the compiled text what it does")
    return ""


def describe(verdict: Verdict) -> str:
    """Return one verdict as an indented block: what, where, why, what to do."""
    collective = verdict.collective
    part = ""
    if verdict.range is not None:
        part = f", elements {verdict.range.start}:{verdict.range.stop} of its operand"
    lines = [f"{verdict.verdict}: {collective.kind} over {over(verdict)}, {verdict.bytes} B"
             f"{part}, {collective.phase} phase ({collective.name})"]
    where = source(verdict)
    if where:
        lines.append(f"at {where}")
    lines.append(f"because {verdict.reason}")
    if verdict.rests_on:
        lines.append("resting on: " + "; ".join(
            s.detail if s.source == "assumption" else str(s) for s in verdict.rests_on))
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
    rule = "-+-".join("-" * width for width in widths)
    lines = []
    for number, row in enumerate(split):
        for i in range(max(map(len, row))):
            cells = [cell[i] if i < len(cell) else "" for cell in row]
            lines.append(" | ".join(c.ljust(w) for c, w in zip(cells, widths)).rstrip())
        if number == 0 or number < len(rows) - 1:
            lines.append(rule)
    return "\n".join(lines)


def summary(judgement: Judgement, verdicts: Iterable[Verdict] | None = None) -> str:
    """Return one line for each collective: verdict, kind, axes, bytes."""
    shown = judgement.verdicts if verdicts is None else verdicts
    return "\n".join(f"{v.collective.kind} over {over(v)}, {v.bytes} B: {v.verdict}"
                     for v in shown) or "no collectives"
