"""Verdicts and accounts for people: text, Markdown, JSON, SARIF, and a page with a picture."""

from __future__ import annotations

from shardrules.report.annotations import github, sarif
from shardrules.report.blocks import Block, Item
from shardrules.report.content import Content, content
from shardrules.report.data import as_json
from shardrules.report.differences import DIFFS, compared
from shardrules.report.grouping import Row, size
from shardrules.report.page import page
from shardrules.report.text import describe_finding, listed, markdown, over, plain, table

__all__ = [
    "Block",
    "Content",
    "DIFFS",
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
