"""Write the parts that all pages share: the page with its style and script, titles, tables."""

from __future__ import annotations

import base64
import functools
import hashlib
import pathlib
import string
from collections.abc import Iterable, Mapping

from shardrules.report.drawn import escaped, prose


def whole(
    heading: str, head: Iterable[str], body: Iterable[str], about: str = ": collectives"
) -> str:
    """Return a whole page that contains its style and its script."""
    # With the digest, a browser runs only this script, whatever text a program's names contain.
    script = _asset("page.js")
    return string.Template(_asset("page.html")).substitute(
        title=escaped(heading + about),
        heading=escaped(heading),
        style=_asset("page.css"),
        head="\n".join(head),
        body="\n".join(filter(None, body)),
        script=script,
        digest=base64.b64encode(hashlib.sha256(script.encode()).digest()).decode(),
    )


@functools.cache
def _asset(name: str) -> str:
    return pathlib.Path(__file__).with_name(name).read_text(encoding="utf-8")


def titled(title: str, *parts: str) -> str:
    heading = f"<h2>{escaped(title)}</h2>" if title else ""
    return f"<section>{heading}{''.join(parts)}</section>"


def tiles(pairs: Iterable[tuple[str, str]]) -> str:
    """Return the figures at the top, each with its label."""
    shown = "".join(f"<li><b>{escaped(v)}</b>{escaped(k)}</li>" for k, v in pairs)
    return f'<ul class="tiles">{shown}</ul>'


def wide(name: str, inside: str) -> str:
    """Return a wide part that scrolls separately, also by keyboard."""
    name = escaped(name)
    return f'<div class="wide" tabindex="0" role="region" aria-label="{name}">{inside}</div>'


def html_table(says: str, columns: Mapping[str, str], rows: Iterable[str], kind: str = "") -> str:
    """Return a table with a hidden caption; ``columns`` maps names to CSS classes."""
    start, end = ('<button type="button">', "</button>") if kind == "collectives" else ("", "")
    heads = "".join(
        f'<th scope="col"{classed(classes)}>{start}{escaped(column)}{end}</th>'
        for column, classes in columns.items()
    )
    body = "\n".join(rows)
    return (
        f'<table{classed(kind)}><caption class="said">{escaped(says)}</caption>'
        f"<thead><tr>{heads}</tr></thead><tbody>{body}</tbody></table>"
    )


def classed(names: str) -> str:
    """Return an element's class attribute; empty without classes."""
    return f' class="{names}"' if names else ""


def dim(*lines: str) -> str:
    return "".join(f'<p class="dim">{prose(line)}</p>' for line in lines)


def badge(verdict: str, kind: str) -> str:
    return f'<span class="badge {verdict}">{escaped(kind)}</span>'
