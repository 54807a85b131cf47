"""Write the changes between two programs as text, Markdown, JSON, or a page of both."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict

from shardrules.arguments import checked
from shardrules.costs.comparing import Change
from shardrules.report.content import Content
from shardrules.report.data import SCHEMA
from shardrules.report.drawn import escaped
from shardrules.report.elements import badge, dim, html_table, tiles, titled, whole, wide
from shardrules.report.grouping import sent
from shardrules.report.page import meshes, timeline
from shardrules.report.text import markdown_table
from shardrules.units import size

# For each status of a change, the verdict whose colour the page uses.
_COLOURS = {
    "came": "redundant",
    "grew": "overwide",
    "moved": "unproven",
    "shrank": "needed",
    "went": "needed",
}


def _total(content: Content) -> str:
    total = content.account.total
    return f"{total}, {sent(total)} on the wire"


@checked
def _plain(before: Content, after: Content, changes: Sequence[Change]) -> str:
    if not changes:
        return f"the same collectives: {before.account.total}\n"
    sides = [f"{sign} {c.title}: {_total(c)}" for sign, c in (("-", before), ("+", after))]
    return "\n".join([*sides, "", *map(str, changes)]) + "\n"


@checked
def _markdown(before: Content, after: Content, changes: Sequence[Change]) -> str:
    rows = [("**all**", _total(before), _total(after))]
    for change in changes:
        was = "" if change.status == "came" else str(change.before)
        now = "" if change.status == "went" else str(change.after)
        rows.append((f"{change.status}: {change.what}", was, now))
    same = [f"The same collectives: {before.account.total}."]
    lines = markdown_table(("", "before", "after"), rows) if changes else same
    return "\n".join([f"# {before.title} and {after.title}", "", *lines]) + "\n"


@checked
def _json(before: Content, after: Content, changes: Sequence[Change]) -> str:
    data: dict[str, object] = {"schema": SCHEMA}
    for name, content in (("before", before), ("after", after)):
        data[name] = {"title": content.title, "total": asdict(content.account.total)}
    return json.dumps({**data, "changes": [*map(asdict, changes)]}, indent=1) + "\n"


@checked
def compared(before: Content, after: Content, changes: Sequence[Change]) -> str:
    """Return a page of two reports: the changes, the groups on the mesh, and both timelines.

    Args:
      before: the report of the first program.
      after: the report of the second program.
      changes: what ``comparing.compare`` returned for the two.
    """
    named = {"before": before, "after": after}
    totals = [content.account.total for content in named.values()]
    figures = (
        ("collectives run", [f"{total.count:,}" for total in totals]),
        ("on the wire, per device", [sent(total) for total in totals]),
        ("findings", [str(len(content.findings)) for content in named.values()]),
    )
    head = [
        dim(*(f"{name}: {content.headline}." for name, content in named.items())),
        tiles((name, f"{a} \N{RIGHTWARDS ARROW} {b}") for name, (a, b) in figures),
    ]
    body = [
        titled("Changes", _table(changes) if changes else "<p>The same collectives.</p>"),
        meshes(named) if any(total.sites for total in totals) else "",
        *(
            timeline(content, f"{name.capitalize()}, in program order", False)
            for name, content in named.items()
            if content.account.entries
        ),
    ]
    return whole(f"{before.title} and {after.title}", head, body)


def _table(changes: Sequence[Change]) -> str:
    columns = {
        "change": "",
        "collective, element type and source": "",
        "before": "n less",
        "after": "n less",
        "wire bytes": "n",
    }
    rows = []
    for change in changes:
        more = change.after.wire_bytes - change.before.wire_bytes
        sign = "+" if more > 0 else "-" if more < 0 else ""
        rows.append(
            f"<tr><td>{badge(_COLOURS[change.status], change.status)}</td>"
            f"<td>{escaped(change.what)}</td>"
            f'<td class="n less">{escaped(change.before)}</td>'
            f'<td class="n less">{escaped(change.after)}</td>'
            f'<td class="n">{sign}{size(abs(more))}</td></tr>'
        )
    return wide("changes", html_table("Changes, the costliest first", columns, rows))


# For each format, the function that writes both programs and the changes from ``compare``.
DIFFS: dict[str, Callable[[Content, Content, Sequence[Change]], str]] = {
    "text": _plain,
    "markdown": _markdown,
    "json": _json,
    "html": compared,
}
