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
from shardrules.report.blocks import Block, Item
from shardrules.report.content import ESTIMATED, MEASURED, SHARE, Content
from shardrules.report.drawn import escaped
from shardrules.report.grouping import (
    Row,
    alike,
    duration,
    here,
    milliseconds,
    percent,
    size,
    sizes,
)
from shardrules.report.timeline import events

__all__ = ["meshes", "page", "section", "tiles", "timeline", "whole"]

VERDICTS = ("needed", "overwide", "redundant", "unproven")
_BARS = 12  # source lines that are drawn
_MESHES = 6  # sets of groups that are drawn at once; the others are folded away
_OPEN = 6  # items of a list up to which all are unfolded
_SITES = 20  # of a row that are listed
_AROUND = 2  # lines above and below one that is shown
_LARGEST = 1 << 20  # bytes of a source file that is read


@checked
def page(what: Content) -> str:
    """Return a report as an HTML page: what to change, a timeline, the collectives, their groups.

    Source lines are quoted where a Python file stands at the path that the program names.

    Args:
      what: the report's content.

    Examples:
      >>> content = report.content(testing.judge(step, w, x), title="step")
      >>> report.page(content).startswith("<!doctype html>")
      True
    """
    total, avoidable, cost = what.account.total, what.avoidable, what.ledger.total
    figures = [
        ("avoidable", f"{size(avoidable.bytes)}, {percent(avoidable.bytes, cost.bytes)}"),
        ("on the wire, per device", size(cost.bytes)),
        ("collectives run" + (" (and more)" if total.unknown else ""), f"{total.count:,}"),
        ("findings", str(what.failing)),
        ("could be cheaper", str(len(what.hints))),
    ]
    if what.target is not None:
        about = f"~{duration(avoidable.seconds)} of ~{duration(cost.seconds)}"
        figures.insert(1, (f"of communication, {what.target.name}", about))
    if what.timings is not None:
        figures.insert(0, ("avoidable, measured", what.measured.removeprefix("avoidable: ")))
    body = [
        f"<header><h1>{escaped(what.title)}</h1>",
        tiles(figures),
        f'<p class="dim">{escaped(what.headline[len(what.title) + 2 :])}.</p>',
        "</header><main>",
        *map(section, what.changes),
        _pictures(what),
        *(section(block) for block in what.blocks if block not in what.changes and block.title),
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
    found = [_tools(what), timeline(what, "In program order", True), _timed(what)]
    found.append('<div class="side">')
    numbers = range(len(what.account.entries))
    axes = ((what.account.entries[n].over or "one device", n) for n in numbers)
    lines = ((_where(what.account.entries[n]) or "(no source line)", n) for n in numbers)
    for title, pairs in (("By mesh axes", axes), ("Costly source lines", lines)):
        found.append(_bars(f"{title} (wire bytes per device)", _sums(what, pairs)))
    return "\n".join([*found, "</div>", _table(what), meshes({"": what})])


def _tools(what: Content) -> str:
    """Write what filters the timeline and the table together."""
    held = {row.first.verdict for row in what.rows}
    boxes = "".join(
        f'<label><input type="checkbox" class="verdict" checked value="{v}"> {v}</label>'
        for v in VERDICTS
        if v in held
    )
    return (
        '<div class="tools" role="search"><input type="search" placeholder="kind, axis, file ..." '
        f'aria-label="search the collectives">{boxes}'
        '<label><input type="checkbox" class="log"> logarithmic bars</label><output></output></div>'
    )


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


def _notations(*programs: Content) -> dict[str, str]:
    """List the distinct device groups, those that move most first, each with an id."""
    found: dict[str, int] = {}
    for what in programs:
        for number, entry in enumerate(what.account):
            found[entry.groups] = found.get(entry.groups, 0) + what.ledger.cost(number).bytes
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
            sums = _sums(what, ((over, n) for n in numbers))[over]
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
    whole_bytes = what.ledger.total.bytes
    bars = []
    for n, e in enumerate(what.account):
        moved = what.ledger.cost(n).bytes
        says = f"{e.what}: {e.verdict}, {size(moved)} on the wire, {percent(moved, whole_bytes)}"
        says += f", at {_where(e)}" if e.file else ""
        bars.append((rows[n] if linked else "", e.verdict, says, moved))
    picture = drawn.strip(events(what.judgement), bars, [e.phase for e in what.account])
    name = escaped(title)
    phases = ", ".join(dict.fromkeys(e.phase for e in what.account))
    return (
        f"<section><h2>{name}</h2>"
        f'<div class="wide" tabindex="0" role="region" aria-label="{name}">{picture}</div>'
        '<p class="point" aria-live="polite"></p>'
        + _key(e.verdict for e in what.account)
        + '<p class="dim">Heights are wire bytes of all runs; below stand the '
        f"phases, or their first letters ({phases}).</p></section>"
    )


def _timed(what: Content) -> str:
    """Draw the step that a profile measured, its collectives linked to their rows."""
    if what.timings is None or not what.timings.ran:
        return ""
    rows = {number: f"row{n}" for n, row in enumerate(what.rows) for number in row.numbers}
    runs = []
    for number, start, end in what.timings.ran:
        entry = what.account.entries[number]
        says = f"{entry.what}: {entry.verdict}, {milliseconds(end - start)} from "
        says += f"{milliseconds(start)} on" + (f", at {_where(entry)}" if entry.file else "")
        runs.append((rows[number], entry.verdict, says, start, end))
    picture = drawn.timed(runs, what.timings.busy)
    return (
        "<section><h2>A step as it ran</h2>"
        f'<div class="wide" tabindex="0" role="region" aria-label="A step as it ran">{picture}'
        '</div><p class="point" aria-live="polite"></p>'
        f'<p class="dim">Measured on {escaped(what.timings.device)}, whose collectives took '
        "longest in all. The grey line is when it ran anything else: what "
        "it covers of a collective is hidden.</p></section>"
    )


def _sums(what: Content, pairs: Iterable[tuple[str, int]]) -> dict[str, dict[str, int]]:
    """Sum wire bytes up by label and verdict, the costliest first."""
    found: dict[str, dict[str, int]] = {}
    for label, number in pairs:
        line = found.setdefault(label, dict.fromkeys(VERDICTS, 0))
        line[what.account.entries[number].verdict] += what.ledger.cost(number).bytes
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
    every = [sum(line.values()) for line in sums.values()]
    most = max(every)
    rows = "\n".join(
        f'<tr><th scope="row">{escaped(label)}</th><td>{_bar(line, most)}</td>'
        f'<td class="n">{size(sum(line.values()))}</td>'
        f'<td class="n">{percent(sum(line.values()), sum(every))}</td></tr>'
        for label, line in list(sums.items())[:_BARS]
    )
    more = f'<p class="dim">and {len(sums) - _BARS} more</p>' if len(sums) > _BARS else ""
    return (
        f'<section><h2>{escaped(title)}</h2><table class="bars"><caption class="said">'
        f'{escaped(title)}</caption><thead class="said"><tr><th scope="col">of</th>'
        '<th scope="col">by verdict</th><th scope="col">bytes</th><th scope="col">share</th></tr>'
        "</thead>"
        f"<tbody>{rows}</tbody></table>{more}</section>"
    )


# -- what is written ------------------------------------------------------------------------------


def section(block: Block) -> str:
    """Write a part of a report: a list, or a table."""
    if not block.rows and not block.items:
        return f'<p class="dim">{escaped(block.note)}</p>' if block.note else ""
    title = escaped(block.title)
    shown = f"<section><h2>{title}</h2>" if title else "<section>"
    if block.items:
        items = "".join(_item(item, len(block.items) <= _OPEN) for item in block.items)
        rest = f'<li class="dim">{escaped(block.rest)}</li>' if block.rest else ""
        shown += f'<ul class="remarks">{items}{rest}</ul>'
    if block.rows:
        heads = "".join(f'<th scope="col">{escaped(c)}</th>' for c in block.columns)
        rows = "\n".join("<tr>" + "".join(map(_cell, row)) + "</tr>" for row in block.rows)
        name = title or "programs"
        shown += (
            f'<div class="wide" tabindex="0" role="region" aria-label="{name}"><table>'
            f'<caption class="said">{name}</caption><thead><tr>{heads}</tr></thead>'
            f"<tbody>{rows}</tbody></table></div>"
        )
    notes = (f"{note[0].upper()}{note[1:]}." for note in block.note.splitlines())
    return shown + "".join(f'<p class="dim">{escaped(n)}</p>' for n in notes) + "</section>"


def _cell(cell: object) -> str:
    shown = "?" if cell is None else f"{cell:,}" if type(cell) is int else here(str(cell))
    return f"<td>{escaped(shown)}</td>"


def _item(item: Item, is_open: bool) -> str:
    if not item.kind:
        return f"<li><code>{escaped(item.what)}</code></li>"
    where = f" at <code>{escaped(item.source)}</code>" if item.source else ""
    saves = "".join(
        f"<b>saves {escaped(text)}</b>: " for label, text in item.lines if label == "saves"
    )
    verdict = item.entry.verdict if item.entry else "unproven"
    lines = "".join(
        f"<p><b>{escaped(label)}</b> {escaped(text)}</p>"
        for label, text in sorted(item.lines, key=lambda line: line[0] == "resting on:")
        if label != "saves"
    )
    return (
        f"<li><details{' open' if is_open else ''}><summary>{_badge(verdict, item.kind)} "
        f'{saves}{escaped(item.what)}{where}</summary><div class="fold">'
        + (_excerpt(item.entry) if item.entry else "")
        + f"{lines}</div></details></li>"
    )


# Of the table's columns, what hides one on a narrow screen, and what sorts it as a number.
_CLASSES = {
    **dict.fromkeys(("sites", "runs", "bytes", "wire bytes", ESTIMATED[0]), "n less"),
    **dict.fromkeys(("in all", SHARE, MEASURED[1], ESTIMATED[1]), "n"),
    MEASURED[0]: "n measured",
    MEASURED[2]: "n less",
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
    return (
        '<section><h2>Collectives</h2><button type="button" class="unfold">Unfold all</button>'
        '<div class="wide" tabindex="0" role="region" aria-label="collectives">'
        '<table class="collectives"><caption class="said">Collectives; those that are alike are '
        f"one row</caption><thead><tr>{heads}</tr></thead><tbody>{rows}</tbody></table></div>"
        + "".join(
            f'<p class="dim">{escaped(n[0].upper() + n[1:])}.</p>' for n in what.note.splitlines()
        )
        + '<p class="dim">Not proven equal is not proven different. Source lines are quoted from '
        "the files as they are now.</p></section>"
    )


def _row(what: Content, number: int, row: Row, groups: dict[str, str]) -> str:
    one = row.first
    ids = " ".join(dict.fromkeys(groups[e.groups] for e in row.entries))
    shown = what.cells(row)
    numbers = list(zip(what.columns[2:-1], shown[2:-1], what.keys(row)))
    hidden = ", ".join(f"{name}: {text}" for name, text, _ in numbers if "less" in _CLASSES[name])
    about = "" if what.target is None else f", {shown[-3]} a run"
    says = (
        f"{one.what}: {one.verdict}, {row.sites} x {size(one.wire_bytes * (one.runs or 1))} on the "
        f"wire{about}, {one.source}"
    )
    return (
        f'<tr id="row{number}" data-groups="{ids}" data-verdict="{one.verdict}" '
        f'data-says="{escaped(says)}"><td data-key="{escaped(one.what)}"><details><summary>'
        f"{escaped(one.what)} {escaped(one.element_type)}</summary>{_fold(what, row, hidden)}"
        "</details>"
        f"</td><td>{_badge(one.verdict)}</td>"
        + "".join(
            f'<td class="{_CLASSES[name]}" data-key="{key}">{escaped(text)}</td>'
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
