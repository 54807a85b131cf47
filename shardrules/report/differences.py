"""What changed between two programs, as text, Markdown and JSON."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Sequence

from shardrules.arguments import checked
from shardrules.costs.comparing import Change
from shardrules.report.blocks import Block, as_markdown
from shardrules.report.compared import compared
from shardrules.report.content import Content
from shardrules.report.data import SCHEMA
from shardrules.report.grouping import size

__all__ = ["DIFFS"]


def _total(what: Content) -> str:
    total = what.account.total
    return f"{total}, {size(total.wire_bytes)} on the wire"


@checked
def _plain(before: Content, after: Content, changes: Sequence[Change]) -> str:
    if not changes:
        return f"the same collectives: {before.account.total}\n"
    lines = [f"- {before.title}: {_total(before)}", f"+ {after.title}: {_total(after)}", ""]
    return "\n".join([*lines, *map(str, changes)]) + "\n"


@checked
def _markdown(before: Content, after: Content, changes: Sequence[Change]) -> str:
    lines = [f"# {before.title} and {after.title}", ""]
    if not changes:
        return "\n".join([*lines, f"The same collectives: {before.account.total}."]) + "\n"
    rows = [("", "before", "after"), ("**all**", _total(before), _total(after))]
    rows += [
        (
            f"{change.status}: {change.what}",
            str(change.before) if change.status != "came" else "",
            str(change.after) if change.status != "went" else "",
        )
        for change in changes
    ]
    (heads, *cells) = rows
    return "\n".join([*lines, *as_markdown([Block("", columns=heads, rows=cells)])]).rstrip() + "\n"


@checked
def _json(before: Content, after: Content, changes: Sequence[Change]) -> str:
    found = {
        "schema": SCHEMA,
        "before": {"title": before.title, "total": dataclasses.asdict(before.account.total)},
        "after": {"title": after.title, "total": dataclasses.asdict(after.account.total)},
        "changes": [dataclasses.asdict(change) for change in changes],
    }
    return json.dumps(found, indent=1) + "\n"


# From a format to what writes it of both programs and the changes that ``compare`` found.
DIFFS: dict[str, Callable[[Content, Content, Sequence[Change]], str]] = {
    "text": _plain,
    "markdown": _markdown,
    "json": _json,
    "html": compared,
}
