"""Reports as text and as Markdown; verdicts as text, for a failing test."""

from __future__ import annotations

import collections
from collections.abc import Iterable, Sequence

from shardrules.arguments import checked
from shardrules.costs.accounts import Entry
from shardrules.costs.findings import Finding, advice
from shardrules.hlo import Judgement, Verdict
from shardrules.report.blocks import as_markdown, as_text, text_of
from shardrules.report.content import Content, item
from shardrules.report.grouping import alike, here, size, sizes

__all__ = ["advice", "describe_finding", "listed", "markdown", "over", "plain", "source", "summary"]


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
    return text_of(item(same))


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
        return [
            describe_finding(*(Finding(v.verdict, v, e, advice(v)) for e, v in same))
            for same in blocks
        ]
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


@checked
def plain(content: Content) -> str:
    """Return a whole report as text."""
    first = filter(None, (content.measured, content.headline))
    return "\n".join([*first, "", *as_text(content.blocks)]).rstrip() + "\n"


@checked
def markdown(content: Content) -> str:
    """Return a report as GitHub's Markdown."""
    about = content.headline[len(content.title) + 2 :]
    first = [f"{content.measured}.", ""] if content.measured else []
    lines = [f"# {content.title}", "", *first, f"{about}.", "", *as_markdown(content.blocks)]
    return "\n".join(lines).rstrip() + "\n"
