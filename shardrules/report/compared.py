"""Two programs' collectives beside each other, as one self-contained HTML page."""

from __future__ import annotations

from collections.abc import Sequence

from shardrules.arguments import checked
from shardrules.costs import comparing
from shardrules.report.content import Content
from shardrules.report.drawn import escaped
from shardrules.report.grouping import size
from shardrules.report.page import meshes, tiles, timeline, whole

__all__ = ["compared"]

# What a change is called, and the colour that it has elsewhere on such pages.
_STATUS = {
    "came": "redundant",
    "grew": "overwide",
    "moved": "unproven",
    "shrank": "needed",
    "went": "needed",
}


@checked
def compared(before: Content, after: Content, changes: Sequence[comparing.Change]) -> str:
    """Return a page of two reports: what changed, groups on the mesh, both timelines.

    Args:
      before: of the first program.
      after: of the second.
      changes: what ``comparing.compare`` returned of the two.
    """
    named = {"before": before, "after": after}
    totals = [what.account.total for what in named.values()]
    rows = (
        ("collectives run", [f"{t.count:,}" for t in totals]),
        ("on the wire, per device", [size(t.wire_bytes) for t in totals]),
        ("findings", [str(len(what.findings)) for what in named.values()]),
    )
    body = [
        f"<header><h1>{escaped(before.title)} and {escaped(after.title)}</h1>",
        *(f'<p class="dim">{name}: {escaped(what.headline)}.</p>' for name, what in named.items()),
        tiles((name, f"{a} \N{RIGHTWARDS ARROW} {b}") for name, (a, b) in rows),
        "</header><main>",
        _changes(changes),
        meshes(named) if any(t.sites for t in totals) else "",
        *(
            timeline(what, f"{name.capitalize()}, in program order", False)
            for name, what in named.items()
            if what.account.entries
        ),
        "</main>",
    ]
    return whole(f"{before.title} and {after.title}: collectives", body)


def _changes(changes: Sequence[comparing.Change]) -> str:
    if not changes:
        return "<section><h2>Changes</h2><p>The same collectives.</p></section>"
    rows = "\n".join(
        f'<tr><td><span class="badge {_STATUS[c.status]}">{c.status}</span></td>'
        f"<td>{escaped(c.what)}</td>"
        f'<td class="n less">{escaped(c.before)}</td><td class="n less">{escaped(c.after)}</td>'
        f'<td class="n">{_signed(c.after.wire_bytes - c.before.wire_bytes)}</td></tr>'
        for c in changes
    )
    heads = "".join(
        f'<th scope="col" class="{kind}">{name}</th>'
        for name, kind in (
            ("change", ""),
            ("collective, element type and source", ""),
            ("before", "n less"),
            ("after", "n less"),
            ("wire bytes", "n"),
        )
    )
    return (
        '<section><h2>Changes</h2><div class="wide" tabindex="0" role="region" '
        'aria-label="changes"><table><caption class="said">Changes, the costliest first'
        f"</caption><thead><tr>{heads}</tr></thead><tbody>{rows}</tbody></table></div></section>"
    )


def _signed(count: int) -> str:
    return f"{'+' if count > 0 else '-' if count < 0 else ''}{size(abs(count))}"
