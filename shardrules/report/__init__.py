"""Verdicts and accounts for people: text, Markdown, JSON, and a page with a picture."""

from __future__ import annotations

from shardrules.report.compared import compared
from shardrules.report.content import Content, as_json, content, markdown
from shardrules.report.differences import DIFFS
from shardrules.report.grouping import Remark, Row, size
from shardrules.report.page import page
from shardrules.report.text import (
    advice,
    describe,
    describe_finding,
    listed,
    over,
    plain,
    source,
    summary,
    table,
)

__all__ = [
    "Content",
    "DIFFS",
    "Remark",
    "Row",
    "advice",
    "as_json",
    "compared",
    "content",
    "describe",
    "describe_finding",
    "listed",
    "markdown",
    "over",
    "page",
    "plain",
    "size",
    "source",
    "summary",
    "table",
]
