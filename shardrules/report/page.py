"""A report as one self-contained HTML page: no script, no font, nothing fetched."""

from __future__ import annotations

import html
from collections.abc import Iterable

from shardrules.costs import accounts
from shardrules.report.content import Content
from shardrules.report.sections import Section

__all__ = ["page"]

VERDICTS = ("needed", "overwide", "redundant", "unproven")
_CELLS = 256  # devices that are drawn; a larger mesh shows its first ones
_BARS = 16  # source lines that are drawn

_STYLE = """
:root { --bg: #ffffff; --ink: #1d2129; --dim: #5c6470; --line: #d9dde3; --cell: #eef1f5;
  --needed: #4a7fb5; --overwide: #d98a1f; --redundant: #c8453b; --unproven: #8a6fb0; }
@media (prefers-color-scheme: dark) {
  :root { --bg: #15181d; --ink: #e6e8ec; --dim: #9aa3b0; --line: #333944; --cell: #232830; } }
body { background: var(--bg); color: var(--ink); font: 15px/1.45 system-ui, sans-serif;
  margin: 2rem auto; max-width: 68rem; padding: 0 1.25rem; }
h1 { font-size: 1.4rem; margin: 0 0 .25rem; overflow-wrap: anywhere; }
h2 { font-size: 1.05rem; margin: 2rem 0 .6rem; }
p.dim, .dim { color: var(--dim); }
.tiles { display: flex; flex-wrap: wrap; gap: .75rem; margin: 1.25rem 0; }
.tile { border: 1px solid var(--line); border-radius: .5rem; padding: .6rem 1rem; }
.tile b { display: block; font-size: 1.35rem; font-variant-numeric: tabular-nums; }
.pictures { display: flex; flex-wrap: wrap; gap: 2.5rem; align-items: flex-start; }
svg { max-width: 100%; height: auto; }
svg text { fill: var(--ink); font: 12px system-ui, sans-serif; }
svg text.dim { fill: var(--dim); }
table { border-collapse: collapse; width: 100%; font-size: .87rem; }
th, td { border-bottom: 1px solid var(--line); padding: .35rem .6rem; text-align: left;
  vertical-align: top; overflow-wrap: anywhere; }
th.n, td.n { text-align: right; font-variant-numeric: tabular-nums; white-space: nowrap; }
.wide { overflow-x: auto; }
.badge { border-radius: .3rem; color: #fff; font-size: .8rem; padding: .1rem .45rem;
  white-space: nowrap; }
.needed { background: var(--needed); fill: var(--needed); }
.overwide { background: var(--overwide); fill: var(--overwide); }
.redundant { background: var(--redundant); fill: var(--redundant); }
.unproven { background: var(--unproven); fill: var(--unproven); }
li { margin: .55rem 0; } li p { margin: .15rem 0; }
code { font: .87em ui-monospace, monospace; overflow-wrap: anywhere; }
"""


def page(what: Content) -> str:
    """Return a report as an HTML page with pictures: the mesh, bytes per axis, costly lines."""
    total = what.account.total
    tiles = [
        ("collectives run" + (" (and more)" if total.unknown else ""), f"{total.count:,}"),
        ("wire bytes per device", _size(total.wire_bytes)),
        ("findings", str(len(what.findings))),
        ("could be cheaper", str(len(what.hints))),
    ]
    parts = [
        "<!doctype html>",
        '<html lang="en"><head><meta charset="utf-8">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        f"<title>{_text(what.title)}: collectives</title><style>{_STYLE}</style></head><body>",
        f"<h1>{_text(what.title)}</h1>",
        f'<p class="dim">{_text(what.headline[len(what.title) + 2 :])}.</p>',
        '<div class="tiles">',
        *(f'<div class="tile"><b>{_text(v)}</b>{_text(k)}</div>' for k, v in tiles),
        "</div>",
        '<div class="pictures">',
        _figure("Mesh", _mesh(what)),
        _figure("Wire bytes per device, by mesh axes", _bars(what, _by_axes(what))),
        "</div>",
        "<h2>Costly source lines (wire bytes per device)</h2>",
        _bars(what, _by_source(what), 420),
        _findings(what),
        _table(what),
        *map(_section, what.costs),
        f'<p class="dim">{_text(accounts.CONVENTION)}. Not proven equal is not proven different.'
        "</p>",
        "</body></html>",
    ]
    return "\n".join(parts) + "\n"


def _text(value: object) -> str:
    return html.escape(str(value))


def _size(count: int) -> str:
    """Write bytes with a unit and three digits."""
    value = float(count)
    for unit in ("B", "kB", "MB", "GB"):
        if value < 1000:
            return f"{value:.3g} {unit}" if unit != "B" else f"{count} B"
        value /= 1000
    return f"{value:.3g} TB"


def _figure(title: str, svg: str) -> str:
    return f"<div><h2>{_text(title)}</h2>{svg}</div>"


def _svg(width: int, height: int, label: str, parts: Iterable[str]) -> str:
    return (
        f'<svg role="img" aria-label="{_text(label)}" viewBox="0 0 {width} {height}" '
        f'width="{width}" height="{height}" xmlns="http://www.w3.org/2000/svg">'
        + "".join(parts)
        + "</svg>"
    )


def _mesh(what: Content) -> str:
    """Draw the devices, the first axis downwards, the others to the right."""
    mesh = what.account.mesh or {"devices": what.account.device_count}
    names = list(mesh)
    rows = mesh[names[0]] if len(names) > 1 else 1
    columns = what.account.device_count // rows
    inner = mesh[names[-1]]
    across = names[1:] if len(names) > 1 else names
    shown_columns = min(columns, 32)
    shown_rows = min(rows, max(1, _CELLS // shown_columns))
    side, gap, left, top = 34, 4, 78, 26
    parts = [
        f'<text x="{left}" y="14">{_text(", ".join(f"{a} ({mesh[a]})" for a in across))} '
        "&#8594;</text>"
    ]
    if len(names) > 1:
        parts.append(
            f'<text x="0" y="{top + side / 2 + 4}">{_text(names[0][:9])} ({rows}) &#8595;</text>'
        )
    # A little air between the lines along the last axis, where there are more than two.
    air = lambda column: 8 * (column // inner) if len(names) > 2 else 0  # noqa: E731
    for row in range(shown_rows):
        for column in range(shown_columns):
            x, y = left + column * (side + gap) + air(column), top + row * (side + gap)
            parts.append(
                f'<rect x="{x}" y="{y}" width="{side}" height="{side}" rx="5" '
                'fill="var(--cell)" stroke="var(--line)"/>'
                f'<text x="{x + side / 2}" y="{y + side / 2 + 4}" '
                f'text-anchor="middle">{row * columns + column}</text>'
            )
    width = left + shown_columns * (side + gap) + air(shown_columns - 1)
    height = top + shown_rows * (side + gap)
    if shown_rows < rows or shown_columns < columns:
        height += 18
        parts.append(
            f'<text class="dim" x="{left}" y="{height - 4}">the first '
            f"{shown_rows} x {shown_columns} of {rows} x {columns}</text>"
        )
    return _svg(max(width, 220), height, "the mesh of devices", parts)


def _sums(pairs: Iterable[tuple[str, accounts.Entry]]) -> dict[str, dict[str, int]]:
    """Sum wire bytes up by label and verdict, the costliest first."""
    found: dict[str, dict[str, int]] = {}
    for label, entry in pairs:
        line = found.setdefault(label, dict.fromkeys(VERDICTS, 0))
        line[entry.verdict] += entry.wire_bytes * (1 if entry.runs is None else entry.runs)
    return dict(sorted(found.items(), key=lambda item: -sum(item[1].values())))


def _by_axes(what: Content) -> dict[str, dict[str, int]]:
    return _sums((e.over or "one device", e) for e in what.account)


def _by_source(what: Content) -> dict[str, dict[str, int]]:
    found = _sums((e.source or "(no source line in the text)", e) for e in what.account)
    return dict(list(found.items())[:_BARS])


def _bars(what: Content, sums: dict[str, dict[str, int]], label_width: int = 150) -> str:
    """Draw horizontal bars, a colour for each verdict."""
    if not sums:
        return '<p class="dim">No collectives.</p>'
    bar, room, height = 300, 80, 24
    most = max(1, *(sum(line.values()) for line in sums.values()))
    keys = [v for v in VERDICTS if any(line[v] for line in sums.values())]
    letters = max(8, label_width // 7)
    parts = []
    for number, (label, line) in enumerate(sums.items()):
        y, x = number * height, float(label_width)
        shown = label if len(label) <= letters else "..." + label[3 - letters :]
        parts.append(
            f'<text x="{label_width - 8}" y="{y + 16}" text-anchor="end">'
            f"<title>{_text(label)}</title>{_text(shown)}</text>"
        )
        for verdict in keys:
            if line[verdict]:
                width = max(1.0, bar * line[verdict] / most)
                parts.append(
                    f'<rect class="{verdict}" x="{x:.1f}" y="{y + 4}" '
                    f'width="{width:.1f}" height="16"><title>{verdict}: '
                    f"{_size(line[verdict])}</title></rect>"
                )
                x += width
        parts.append(
            f'<text class="dim" x="{x + 6:.1f}" y="{y + 16}">{_size(sum(line.values()))}</text>'
        )
    y = len(sums) * height + 10
    for number, verdict in enumerate(keys):
        x = label_width + number * 96
        parts.append(
            f'<rect class="{verdict}" x="{x}" y="{y}" width="11" height="11"/>'
            f'<text class="dim" x="{x + 16}" y="{y + 10}">{verdict}</text>'
        )
    width = label_width + max(bar + room, 96 * len(keys))
    return _svg(width, y + 18, "wire bytes per device", parts)


def _findings(what: Content) -> str:
    parts = []
    for title, blocks in (
        (
            "Findings",
            [
                (f.kind, f.verdict.verdict, f.entry, f.verdict.reason, "To do", f.advice)
                for f in what.findings
            ],
        ),
        (
            "Allowed",
            [
                (f.kind, f.verdict.verdict, f.entry, f.verdict.reason, "Reason", reason)
                for f, reason in what.allowed
            ],
        ),
        (
            "Could be cheaper",
            [(h.kind, "needed", h.entry, "", "To do", h.advice) for h in what.hints],
        ),
    ):
        if not blocks:
            continue
        parts.append(f"<h2>{title}</h2><ul>")
        for kind, verdict, entry, reason, label, todo in blocks:
            parts.append(
                f'<li><span class="badge {verdict}">{_text(kind)}</span> '
                f"{_text(entry.what)}, {_size(entry.bytes)}"
                + (f" at <code>{_text(entry.source)}</code>" if entry.source else "")
                + (f'<p class="dim">because {_text(reason)}</p>' if reason else "")
                + (f"<p>{label}: {_text(todo)}</p>" if todo else "")
                + "</li>"
            )
        parts.append("</ul>")
    if what.unused:
        parts.append(
            "<h2>Allowances that match nothing</h2><ul>"
            + "".join(f"<li><code>{_text(w)}</code></li>" for w in what.unused)
            + "</ul>"
        )
    return "\n".join(parts)


def _section(section: Section) -> str:
    """Write the table of one of the other costs."""

    def line(cells: Iterable[object], tag: str) -> str:
        shown = (
            "?" if cell is None else f"{cell:,}" if type(cell) is int else cell for cell in cells
        )
        return "<tr>" + "".join(f"<{tag}>{_text(cell)}</{tag}>" for cell in shown) + "</tr>"

    rows = "\n".join(line(row, "td") for row in section.rows)
    return (
        f'<h2>{_text(section.title)}</h2><div class="wide"><table>'
        f"{line(section.columns, 'th')}{rows}</table></div>"
        f'<p class="dim">{_text(section.note)}.</p>'
    )


def _table(what: Content) -> str:
    if not what.account.entries:
        return ""
    rows = []
    for entry in what.account:
        runs = "?" if entry.runs is None else f"{'≤ ' if entry.at_most else ''}{entry.runs:,}"
        rows.append(
            f'<tr><td>{_text(entry.what)}</td><td><span class="badge {entry.verdict}">'
            f"{entry.verdict}</span></td><td>{_text(entry.element_type)}</td>"
            f'<td class="n">{runs}</td><td class="n">{entry.bytes:,}</td>'
            f'<td class="n">{entry.wire_bytes:,}</td><td><code>{_text(entry.source)}</code>'
            "</td></tr>"
        )
    return (
        '<h2>Collectives</h2><div class="wide"><table><tr><th>collective</th><th>verdict</th>'
        '<th>type</th><th class="n">runs</th><th class="n">bytes</th>'
        '<th class="n">wire bytes</th><th>source</th></tr>' + "\n".join(rows) + "</table></div>"
    )
