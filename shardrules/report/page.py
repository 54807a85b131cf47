"""A report as one self-contained HTML page: nothing is fetched, and no script but its own runs."""

from __future__ import annotations

import base64
import functools
import hashlib
import os
import pathlib
from collections.abc import Iterable

from shardrules import hlo
from shardrules.arguments import checked
from shardrules.costs import accounts, comparing
from shardrules.report import drawn
from shardrules.report.content import ESTIMATED, Content
from shardrules.report.drawn import escaped
from shardrules.report.grouping import Remark, Row, alike, size, sizes
from shardrules.report.sections import Section
from shardrules.report.timeline import events

__all__ = ["page"]

VERDICTS = ("needed", "overwide", "redundant", "unproven")
_BARS = 12  # source lines that are drawn
_MESHES = 6  # sets of groups that are drawn at once; the others are folded away
_SITES = 20  # of a row that are listed
_AROUND = 2  # lines above and below one that is shown
_LARGEST = 1 << 20  # bytes of a source file that is read


@checked
def page(what: Content) -> str:
    """Return a report as an HTML page: groups on the mesh, a timeline, findings, a table.

    Source lines are quoted where a Python file stands at the path that the program names.

    Args:
      what: the report's content.

    Examples:
      >>> content = report.content(testing.judge(step, w, x), title="step")
      >>> report.page(content).startswith("<!doctype html>")
      True
    """
    total = what.account.total
    figures = [
        ("collectives run" + (" (and more)" if total.unknown else ""), f"{total.count:,}"),
        ("on the wire, per device", size(total.wire_bytes)),
        ("findings", str(what.failing)),
        ("could be cheaper", str(len(what.hints))),
    ]
    body = [
        f"<header><h1>{escaped(what.title)}</h1>",
        f'<p class="dim">{escaped(what.headline[len(what.title) + 2 :])}.</p>',
        tiles(figures),
        "</header><main>",
        _replicas(what),
        _pictures(what),
        _remarks(what),
        _table(what),
        *map(_section, what.costs),
        "</main>",
    ]
    return whole(f"{what.title}: collectives", body)


def whole(title: str, body: Iterable[str]) -> str:
    """Return a page of this look: one style and one script, both inside of it.

    Its content security policy lets no other script run, whatever a program's names hold.
    """
    style, script = _asset("page.css"), _asset("page.js")
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    policy = f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}'"
    parts = [
        "<!doctype html>",
        '<html lang="en"><head><meta charset="utf-8">',
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        f"<title>{escaped(title)}</title><style>{style}</style></head><body>",
        *filter(None, body),
        f"<script>{script}</script>",
        "</body></html>",
    ]
    return "\n".join(parts) + "\n"


@functools.cache
def _asset(name: str) -> str:
    return pathlib.Path(__file__).with_name(name).read_text(encoding="utf-8")


def tiles(pairs: Iterable[tuple[str, str]]) -> str:
    """Write what comes first: figures, each with what it is."""
    shown = "".join(f"<li><b>{escaped(v)}</b>{escaped(k)}</li>" for k, v in pairs)
    return f'<ul class="tiles">{shown}</ul>'


def _badge(verdict: str, kind: str = "") -> str:
    return f'<span class="badge {verdict}">{escaped(kind or verdict)}</span>'


# -- what is drawn --------------------------------------------------------------------------------


def _pictures(what: Content) -> str:
    if not what.account.entries:
        return '<p class="dim">No collectives.</p>'
    found = [meshes({"": what}), timeline(what, "In program order", True), '<div class="side">']
    for title, sums in (
        ("By mesh axes", _sums((e.over or "one device", e) for e in what.account)),
        ("Costly source lines", _sums((_where(e) or "(no source line)", e) for e in what.account)),
    ):
        found.append(_bars(f"{title} (wire bytes per device)", sums))
    return "\n".join([*found, "</div>"])


def _key(verdicts: Iterable[str]) -> str:
    held = set(verdicts)
    shown = "".join(f'<li><i class="{v}"></i>{v}</li>' for v in VERDICTS if v in held)
    return f'<ul class="key">{shown}</ul>'


def _where(entry: accounts.Entry) -> str:
    """Give file, line and function, without the folders that every machine has its own of."""
    if not entry.file:
        return ""
    file = comparing.relative_file(entry.file, os.getcwd())
    return str(hlo.Frame(file, entry.line, entry.function))


def _wire(entry: accounts.Entry) -> int:
    return entry.wire_bytes * (1 if entry.runs is None else entry.runs)


def _notations(*programs: Content) -> dict[str, str]:
    """List the distinct device groups, those that move most first, each with an id."""
    found: dict[str, int] = {}
    for what in programs:
        for entry in what.account:
            found[entry.groups] = found.get(entry.groups, 0) + _wire(entry)
    order = sorted(found, key=lambda notation: -found[notation])
    return {notation: f"mesh{n}" for n, notation in enumerate(order)}


def meshes(programs: dict[str, Content]) -> str:
    """Draw each distinct set of groups on the mesh, with what each program runs over it.

    Args:
      programs: by what they are called; a lone one by nothing.
    """
    figures = []
    for notation, name in _notations(*programs.values()).items():
        picture, captions = "", []
        for called, what in programs.items():
            numbers = [n for n, e in enumerate(what.account) if e.groups == notation]
            entries = [what.account.entries[n] for n in numbers]
            if not entries:
                captions.append(f"<br>{escaped(called)}: none")
                continue
            over = entries[0].over or "one device"
            if not picture:
                collective = what.judgement.verdicts[numbers[0]].collective
                picture = drawn.groups_on_mesh(
                    collective.groups,
                    collective.pairs,
                    what.account.mesh,
                    what.account.device_count,
                    f"device groups of collectives over {over}",
                )
                captions.insert(0, f"over <b>{escaped(over)}</b>")
            kinds = alike(entries, lambda e: e.kind)
            sums = _sums((over, e) for e in entries)[over]
            captions.append(
                f"{'<br>' if called else ''}{escaped(called)}: "
                + ", ".join(f"{len(same)} {same[0].kind}" for same in kinds)
                + f"; {size(sum(sums.values()))} on the wire per device"
                + _bar(sums, sum(sums.values()))
            )
        figures.append(
            f'<figure id="{name}">{picture}<figcaption>{"".join(captions)}</figcaption></figure>'
        )
    more = figures[_MESHES:]
    return (
        '<section><h2>Groups on the mesh</h2><div class="meshes">'
        + "\n".join(figures[:_MESHES])
        + "</div>"
        + (
            f"<details><summary>{len(more)} more</summary>"
            f'<div class="meshes">{"".join(more)}</div></details>'
            if more
            else ""
        )
        + "</section>"
    )


def timeline(what: Content, title: str, linked: bool) -> str:
    """Draw the collectives in program order, each linked to its row of the table if wanted."""
    rows = {number: f"row{n}" for n, row in enumerate(what.rows) for number in row.numbers}
    bars = [
        (
            rows[n] if linked else "",
            e.verdict,
            f"{e.what}: {e.verdict}, {size(_wire(e))} on the wire"
            + (f", at {_where(e)}" if e.file else ""),
            _wire(e),
        )
        for n, e in enumerate(what.account)
    ]
    picture = drawn.strip(events(what.judgement), bars, [e.phase for e in what.account])
    name = escaped(title)
    phases = ", ".join(dict.fromkeys(e.phase for e in what.account))
    return (
        f"<section><h2>{name}</h2>"
        f'<div class="wide" tabindex="0" role="region" aria-label="{name}">{picture}</div>'
        + _key(e.verdict for e in what.account)
        + '<p class="dim">Heights are logarithms of the wire bytes of all runs; below stand the '
        f"phases, or their first letters ({phases}).</p>"
        + ('<p class="point" aria-live="polite"></p>' if linked else "")
        + "</section>"
    )


def _sums(pairs: Iterable[tuple[str, accounts.Entry]]) -> dict[str, dict[str, int]]:
    """Sum wire bytes up by label and verdict, the costliest first."""
    found: dict[str, dict[str, int]] = {}
    for label, entry in pairs:
        line = found.setdefault(label, dict.fromkeys(VERDICTS, 0))
        line[entry.verdict] += _wire(entry)
    return dict(sorted(found.items(), key=lambda item: -sum(item[1].values())))


def _bar(line: dict[str, int], most: int) -> str:
    parts = "".join(
        f'<span class="{v}" style="width:{100 * n / max(1, most):.2f}%" title="{v}: {size(n)}">'
        "</span>"
        for v, n in line.items()
        if n
    )
    return f'<div class="bar">{parts}</div>'


def _bars(title: str, sums: dict[str, dict[str, int]]) -> str:
    """Write a table whose middle column is drawn."""
    most = max(sum(line.values()) for line in sums.values())
    rows = "\n".join(
        f'<tr><th scope="row">{escaped(label)}</th><td>{_bar(line, most)}</td>'
        f'<td class="n">{size(sum(line.values()))}</td></tr>'
        for label, line in list(sums.items())[:_BARS]
    )
    more = f'<p class="dim">and {len(sums) - _BARS} more</p>' if len(sums) > _BARS else ""
    return (
        f'<section><h2>{escaped(title)}</h2><table class="bars"><caption class="said">'
        f'{escaped(title)}</caption><thead class="said"><tr><th scope="col">of</th>'
        '<th scope="col">by verdict</th><th scope="col">bytes</th></tr></thead>'
        f"<tbody>{rows}</tbody></table>{more}</section>"
    )


# -- what is written ------------------------------------------------------------------------------


def _replicas(what: Content) -> str:
    """List the outputs that aren't proven equal: a missing reduction is the worst finding."""
    return "\n".join(
        f'<section><h2>{escaped(title)}</h2><ul class="remarks">'
        + "".join(
            f"<li><details open><summary>{_badge('unproven', one.kind)} {escaped(one.what)}"
            f'</summary><div class="fold"><p>because {escaped(one.because)}</p>'
            f"<p><b>{escaped(label)}</b>: {escaped(todo)}</p></div></details></li>"
            for one, label, todo in unequal
        )
        + "</ul></section>"
        for title, unequal in what.replicas
    )


def _remarks(what: Content) -> str:
    parts = []
    for title, remarks in what.remarks:
        parts.append(f'<section><h2>{escaped(title)}</h2><ul class="remarks">')
        parts += [_remark(remark, len(remarks) <= _MESHES) for remark in remarks]
        parts.append("</ul></section>")
    if what.unused:
        parts.append(
            "<section><h2>Allowances that match nothing</h2><ul>"
            + "".join(f"<li><code>{escaped(w)}</code></li>" for w in what.unused)
            + "</ul></section>"
        )
    return "\n".join(parts)


def _remark(remark: Remark, shown: bool) -> str:
    where = f" at <code>{escaped(remark.source)}</code>" if remark.source else ""
    return (
        f"<li><details{' open' if shown else ''}><summary>"
        f"{_badge(remark.entries[0].verdict, remark.kind)} {escaped(remark.what)}{where}</summary>"
        '<div class="fold">'
        + (f"<p>because {escaped(remark.reason)}</p>" if remark.reason else "")
        + (
            f"<p><b>{escaped(remark.label)}</b>: {escaped(remark.todo)}</p>"
            if remark.label and remark.todo
            else ""
        )
        + _excerpt(remark.entries[0])
        + "</div></details></li>"
    )


# Of the table's columns, what hides one on a narrow screen, and what sorts it as a number.
_CLASSES = {
    **dict.fromkeys(("sites", "runs", "bytes", "wire bytes", ESTIMATED[0]), "n less"),
    **dict.fromkeys(("in all", ESTIMATED[1]), "n"),
    "source": "less",
}


def _table(what: Content) -> str:
    if not what.rows:
        return ""
    heads = "".join(
        f'<th scope="col" class="{_CLASSES.get(name, "")}"><button type="button">{name}</button>'
        "</th>"
        for name in what.columns
    )
    groups = _notations(what)
    rows = "\n".join(_row(what, n, row, groups) for n, row in enumerate(what.rows))
    held = {row.first.verdict for row in what.rows}
    boxes = "".join(
        f'<label><input type="checkbox" checked value="{v}"> {v}</label>'
        for v in VERDICTS
        if v in held
    )
    return (
        '<section><h2>Collectives</h2><div class="tools"><input type="search" '
        f'placeholder="kind, axis, file ..." aria-label="filter the rows">{boxes}'
        '<button type="button">Unfold all</button><output></output></div>'
        '<div class="wide" tabindex="0" role="region" aria-label="collectives">'
        '<table class="collectives"><caption class="said">Collectives; those that are alike are '
        f"one row</caption><thead><tr>{heads}</tr></thead><tbody>{rows}</tbody></table></div>"
        + "".join(f'<p class="dim">{escaped(n[0].upper() + n[1:])}.</p>' for n in what.notes)
        + '<p class="dim">Not proven equal is not proven different. Source lines are quoted from '
        "the files as they are now.</p></section>"
    )


def _row(what: Content, number: int, row: Row, groups: dict[str, str]) -> str:
    one = row.first
    ids = " ".join(dict.fromkeys(groups[e.groups] for e in row.entries))
    times = () if what.target is None else what.seconds(row)
    keys = (row.sites, one.runs or 0, one.bytes, one.wire_bytes, row.total.wire_bytes, *times)
    numbers = list(zip(what.columns[2:-1], what.cells(row)[2:-1], keys))
    hidden = ", ".join(f"{name}: {text}" for name, text, _ in numbers if "less" in _CLASSES[name])
    about = f", {numbers[-2][1]} a run" if times else ""
    says = (
        f"{one.what}: {one.verdict}, {row.sites} x {size(_wire(one))} on the wire{about}, "
        f"{one.source}"
    )
    return (
        f'<tr id="row{number}" data-groups="{ids}" data-verdict="{one.verdict}" '
        f'data-says="{escaped(says)}"><td data-key="{escaped(one.what)}"><details><summary>'
        f"{escaped(one.what)} {escaped(one.element_type)}</summary>{_fold(what, row, hidden)}"
        "</details>"
        f"</td><td>{_badge(one.verdict)}</td>"
        + "".join(
            f'<td class="{_CLASSES[name]}" data-key="{key or 0}">{text}</td>'
            for name, text, key in numbers
        )
        + f'<td class="less"><code>{escaped(_where(one))}</code></td></tr>'
    )


def _fold(what: Content, row: Row, hidden: str) -> str:
    """Write what a row holds: why, what it rests on, the instructions, its groups, its source.

    On a narrow screen also the cells that are hidden there.
    """
    verdicts = [what.judgement.verdicts[n] for n in row.numbers]
    parts = [f'<p class="narrow">{escaped(hidden)}</p>']
    for same in alike(verdicts, lambda v: (v.reason, v.rests_on)):
        count = f"{len(same)} of {len(verdicts)}: " if len(same) < len(verdicts) else ""
        parts.append(f"<p>{count}because {escaped(same[0].reason)}</p>")
        if same[0].rests_on:
            rests = "; ".join(
                s.detail if s.source == "assumption" else str(s) for s in same[0].rests_on
            )
            parts.append(f'<p class="dim">resting on: {escaped(rests)}</p>')
    if row.first.source:
        parts.append(f"<p>at <code>{escaped(row.first.source)}</code></p>")
    parts.append(_excerpt(row.first))
    groups = list(dict.fromkeys(e.groups for e in row.entries))
    parts += [f'<p class="dim">groups <code>{escaped(g)}</code></p>' for g in groups[:_SITES]]
    names = list(dict.fromkeys(v.collective.name for v in verdicts))
    more = f" and {len(names) - _SITES} more" if len(names) > _SITES else ""
    shown = ", ".join(names[:_SITES]) + more
    parts.append(f'<p class="dim">in the compiled text: <code>{escaped(shown)}</code></p>')
    each = sizes([e.bytes for e in row.entries])
    parts.append(f'<p class="dim">operands of {escaped(each)}</p>' if row.sites > 1 else "")
    return f'<div class="fold">{"".join(parts)}<div class="here"></div></div>'


@functools.lru_cache(maxsize=256)
def _lines(file: str) -> tuple[str, ...]:
    """Read a Python file that is at hand; of any other that a text may name, nothing."""
    path = pathlib.Path(file)
    try:
        if path.suffix != ".py" or not path.is_file() or os.path.getsize(path) > _LARGEST:
            return ()
        return tuple(path.read_text(encoding="utf-8").splitlines())
    except (OSError, ValueError):  # a name with a null byte, text that is no UTF-8
        return ()


def _excerpt(entry: accounts.Entry) -> str:
    lines = _lines(entry.file) if entry.file else ()
    if not 0 < entry.line <= len(lines):
        return ""
    start, stop = max(1, entry.line - _AROUND), min(len(lines), entry.line + _AROUND)
    shown = "\n".join(
        ("<mark>{}</mark>" if n == entry.line else "{}").format(f"{n:5}  {escaped(lines[n - 1])}")
        for n in range(start, stop + 1)
    )
    return f"<pre>{shown}</pre>"


def _section(section: Section) -> str:
    """Write the table of one of the other costs."""

    def line(cells: Iterable[object], start: str, end: str) -> str:
        shown = (
            "?" if cell is None else f"{cell:,}" if type(cell) is int else cell for cell in cells
        )
        return "<tr>" + "".join(f"{start}{escaped(cell)}{end}" for cell in shown) + "</tr>"

    rows = "\n".join(line(row, "<td>", "</td>") for row in section.rows)
    title = escaped(section.title)
    return (
        f'<section><h2>{title}</h2><div class="wide" tabindex="0" role="region" '
        f'aria-label="{title}"><table><caption class="said">{title}</caption>'
        f"<thead>{line(section.columns, '<th scope=col>', '</th>')}</thead><tbody>{rows}</tbody>"
        f'</table></div><p class="dim">{escaped(section.note)}.</p></section>'
    )
