"""Write verdicts and accounts for people: text, Markdown, JSON, SARIF, and an HTML page."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from shardrules.report.annotations import github, sarif
from shardrules.report.content import Content, content
from shardrules.report.data import as_json
from shardrules.report.differences import DIFFS, compared
from shardrules.report.grouping import Row
from shardrules.report.page import page
from shardrules.report.sections import Block, Item
from shardrules.report.several import Several
from shardrules.report.several import as_json as _as_json
from shardrules.report.text import describe_finding, listed, markdown, over, plain, table
from shardrules.units import size

__all__ = [
    "DIFFS",
    "Block",
    "Content",
    "Item",
    "Row",
    "as_json",
    "compared",
    "content",
    "describe_finding",
    "github",
    "listed",
    "markdown",
    "over",
    "page",
    "plain",
    "sarif",
    "size",
    "table",
]


def _contents(of: Content | Several) -> Sequence[Content]:
    return [of] if isinstance(of, Content) else of.contents


# For each format, the function that writes the report of one program or several.
WRITERS: dict[str, Callable[[Content | Several], str]] = {
    "text": plain,
    "markdown": markdown,
    "json": _as_json,
    "html": page,
    "github": lambda of: github(_contents(of)),
    "sarif": lambda of: sarif(_contents(of)),
}
