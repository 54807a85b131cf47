"""Write a report as one self-contained HTML page, which fetches nothing from elsewhere."""

from __future__ import annotations

import collections
import functools
import html
import os
import pathlib
import re
from collections.abc import Iterable, Iterator, Sequence

from shardrules import units
from shardrules.arguments import checked
from shardrules.costs import accounts, comparing
from shardrules.errors import few
from shardrules.paths import here
from shardrules.report import drawn, treemap
from shardrules.report.content import Content, TableCell
from shardrules.report.drawn import BarLabel, escaped, prose
from shardrules.report.elements import badge, classed, dim, html_table, tiles, titled, whole, wide
from shardrules.report.grouping import Row, alike
from shardrules.report.items import RESTING, resting_on
from shardrules.report.sections import Block, Item
from shardrules.report.several import Several
from shardrules.units import milliseconds, percent, size

VERDICTS = ("needed", "overwide", "redundant", "unproven", "internal")
_PLACE = re.compile(r"(.+?)(:(\d{1,9})(?: \(.*\))?)", re.DOTALL)  # file, and its line
_BARS = 12  # the most mesh axes that are drawn
_MESHES = 6  # sets of groups that are shown at once; the others are folded
_ITEMS = 20  # items of a list that are shown at once
_OPEN = 6  # a list of more items is folded
_SITES = 20  # the most sites of a row that are listed
_AROUND = 2  # the lines shown above and below a source line
_LARGEST = 1 << 20  # larger source files, in bytes, are not read
_UNTIMED = ("share", "exposed")  # columns that are hidden too if times are measured
# Columns of the table of collectives that a narrow screen shows only in the unfolded row.
_HIDDEN = ("sites", "runs", "bytes", "wire bytes", "est. a run", "bandwidth", "source")
_OF_PROGRAMS = (
    "times",
    "devices",
    "collectives",
    "runs",
    "other",
)  # such columns of the table of programs
_LEAST = _HIDDEN[:-1]  # columns that a wide screen hides as well if times are measured


@checked
def page(content: Content | Several) -> str:
    """Return a report as an HTML page: changes to make, a timeline, the collectives, their groups.

    The page quotes source lines if there is a Python file at the path that the program names.

    Args:
      content: the content of the report.

    Examples:
      >>> content = report.content(testing.judge(step, w, x), title="step")
      >>> report.page(content).startswith("<!doctype html>")
      True
    """
    if isinstance(content, Several):
        return _of_several(content)
    head = _head(content, content.about, content.failing)
    return whole(content.title, head, _body(content))


def _head(content: Content, about: str, failing: int) -> list[str]:
    """Return the figures at the top, and the sentences below them."""
    total, avoidable, cost = content.account.total, content.avoidable, content.ledger.total
    figures = [
        ("avoidable", f"{size(avoidable.bytes)}, {percent(avoidable.bytes, cost.bytes)}"),
        ("on the wire, per device", size(cost.bytes)),
        ("collectives run" + (" (and more)" if total.unknown else ""), f"{total.count:,}"),
        ("findings", str(failing)),
        ("could be cheaper", str(len(content.hints))),
    ]
    if content.target is not None:
        part = f"~{units.duration(avoidable.seconds)} of ~{units.duration(cost.seconds)}"
        figures.insert(1, (f"of communication, {content.target.name}", part))
    if content.timings is not None:
        step, saved = content.timings.step_seconds, avoidable.exposed_seconds
        on = " on CPU" if "CPU" in content.timings.device else ""
        of = f"avoidable of {milliseconds(step)} a step, measured{on}"
        figures.insert(0, (of, f"{milliseconds(saved)}, {percent(saved, step)}"))
    worth = f"{content.worth}; " if content.worth else ""
    about = about.replace(worth, "", 1)  # the figures already show it
    if len(content.changes) == 1:  # its first item is the costliest
        about = about.removesuffix(f"; {content.costliest}")
    why = content.measured if avoidable.bytes and not avoidable.exposed_seconds else ""
    return [tiles(figures), dim(*(f"{sentence}." for sentence in (why, about) if sentence))]


def _body(content: Content) -> list[str]:
    changes, others = content.changes, content.blocks[len(content.changes) :]
    return [
        *map(_section, changes),
        *(_pictures(content) if content.account.entries else [dim("No collectives.")]),
        *(_section(block) for block in others if block.title),
    ]


def in_notebook(content: Content | Several) -> str:
    """Return the page in a frame, as a notebook shows a cell's value."""
    own = html.escape(page(content))
    return f'<iframe srcdoc="{own}" style="width:100%;height:42rem;border:0"></iframe>'


def _of_several(several: Several) -> str:
    spends = several.spends
    quiet = several.quiet[: len(spends.items)]  # one for each line
    head = [dim(f"{several.ran}.") if several.ran else ""]
    said = f"<p>{escaped(several.headline)}.</p>"
    notes = several.programs.notes
    body = [_section(several.on_host)]
    if len(several.detailed) + len(quiet) == 1:
        (content,) = several.detailed or quiet
        about = f"{content.title}: {several.about_of(content)}"
        head += [said, *_head(content, about, several.findings)]
        body += [*_body(content), _section(several.alike)]
        notes = notes[1:]  # the first is on the table of programs
    else:
        head += [f"<p><b>{escaped(several.measured)}.</b></p>" if several.measured else "", said]
        body.insert(0, _section(several.programs._replace(note="")))
        for content in several.detailed:
            named = f"{content.title}{content.axes}"
            body.append(_frame(content, several.about_of(content), named, is_open=True))
        body.append(_section(several.alike))
        frames = [_frame(c, c.about, i.what, is_open=False) for c, i in zip(quiet, spends.items)]
        rest = dim(f"{spends.rest}.") if spends.rest else ""
        body.append(titled(spends.title, *frames, rest) if frames else "")
    body += [*map(_section, several.ends), dim(*notes)]
    return whole(several.title, head, body, f": {several.ran}" if several.ran else "")


def _frame(content: Content, about: str, summary: str, is_open: bool) -> str:
    """Return a program's page, folded below one line."""
    own = whole(content.title, _head(content, about, content.failing), _body(content))
    # Each page is in a frame, which keeps its names and styles separate. Without the base, its
    # links to #row would lead to the outer page, which the frame may not load.
    own = own.replace("<head>", '<head><base href="about:srcdoc">', 1)
    own = own.replace("<body>", '<body class="framed">', 1)  # the summary above has its title
    return (
        f"<details{' open' if is_open else ''}><summary>{escaped(summary)}</summary>"
        f'<iframe title="{escaped(content.title)}" srcdoc="{html.escape(own)}"></iframe></details>'
    )


# -- what is drawn --------------------------------------------------------------------------------


def _pictures(content: Content) -> Iterator[str]:
    entries = list(enumerate(content.account.entries))
    axes = ((entry.over or "one device", n) for n, entry in entries)
    lines = ((_where(entry) or "(no source line)", n) for n, entry in entries)
    tree = treemap.treemap(_sums(content, lines))
    boxes = "".join(
        f'<label><input type="checkbox" class="verdict" checked value="{v}"> {v}</label>'
        for v in _present(content)
    )
    # The tools filter the timeline and the table together.
    yield (
        '<div class="tools" role="search"><input type="search" placeholder="kind, axis, file ..." '
        f'aria-label="search the collectives">{boxes}'
        '<label><input type="checkbox" class="log"> logarithmic bars</label><output></output></div>'
    )
    yield timeline(content, "In program order", True)
    yield _timed(content)
    yield _bars("By mesh axes (wire bytes per device)", _sums(content, axes))
    yield titled("By source line (wire bytes per device)", tree) if tree else ""
    yield _table(content)
    yield meshes({"": content})


def _present(content: Content) -> list[str]:
    there = {entry.verdict for entry in content.account.entries}
    return [verdict for verdict in VERDICTS if verdict in there]


def _where(entry: accounts.Entry) -> str:
    """Return file, line and function, without the folders that differ between machines."""
    match = _PLACE.fullmatch(entry.place)
    if match is None:
        return comparing.relative_file(entry.place, os.getcwd())
    return f"{comparing.relative_file(match[1], os.getcwd())}{match[2]}"


def _ids(*programs: Content) -> dict[str, str]:
    """Return an id for each distinct set of device groups, ordered by the bytes they move."""
    moved: dict[str, int] = {}
    for content in programs:
        for number, entry in enumerate(content.account):
            moved[entry.groups] = moved.get(entry.groups, 0) + content.ledger.cost(number).bytes
    order = sorted(moved, key=lambda groups: -moved[groups])
    return {groups: f"mesh{n}" for n, groups in enumerate(order)}


def meshes(programs: dict[str, Content]) -> str:
    """Return a picture of each set of groups, with each program's collectives over these groups."""
    figures = []
    for groups, figure_id in _ids(*programs.values()).items():
        numbers: dict[str, list[int]] = {}
        for name, content in programs.items():
            own = enumerate(content.account)
            numbers[name] = [n for n, entry in own if entry.groups == groups]
        content, number = next((programs[name], held[0]) for name, held in numbers.items() if held)
        over = content.account.entries[number].over or "one device"
        collective = content.account.entries[number].judged.collective
        picture = drawn.groups_on_mesh(
            collective.groups,
            collective.pairs,
            content.account.mesh,
            content.account.device_count,
            f"device groups of collectives over {over}",
        )
        captions = [_caption(name, programs[name], held) for name, held in numbers.items()]
        figures.append(
            f'<figure id="{figure_id}">{picture}<figcaption>over <b>{escaped(over)}</b>'
            f"{''.join(captions)}</figcaption></figure>"
        )
    first, rest = (
        f'<div class="meshes">{"".join(some)}</div>'
        for some in (figures[:_MESHES], figures[_MESHES:])
    )
    more = f"<details><summary>{len(figures) - _MESHES} more</summary>{rest}</details>"
    return titled("Groups on the mesh", first, more if len(figures) > _MESHES else "")


def _caption(called: str, content: Content, numbers: Sequence[int]) -> str:
    head = f"{'<br>' if called else ''}{escaped(called)}: "
    if not numbers:
        return f"{head}none"
    kinds = collections.Counter(content.account.entries[n].kind for n in numbers)
    counts = ", ".join(f"{count} {kind}" for kind, count in kinds.items())
    (sums,) = _sums(content, (("", n) for n in numbers)).values()
    total = sum(sums.values())
    return f"{head}{counts}; {size(total)} on the wire per device{_bar(sums, total)}"


def _marks(
    content: Content, amounts: Iterable[tuple[int, str]], linked: bool = True
) -> list[BarLabel]:
    rows: dict[int, str] = {}
    for n, together in enumerate(content.rows):
        rows.update(dict.fromkeys(together.numbers, f"row{n}"))
    marks = []
    for number, amount in amounts:
        entry = content.account.entries[number]
        where = f", at {_where(entry)}" if entry.file else ""
        says = f"{entry.what}: {entry.verdict}, {amount}{where}"
        row, lane = (rows[number] if linked else ""), f"{entry.kind}({entry.over})"
        marks.append(BarLabel(row, entry.verdict, says, lane))
    return marks


def _picture(title: str, picture: str, below: str) -> str:
    return titled(title, wide(title, picture), '<p class="point" aria-live="polite"></p>', below)


def timeline(content: Content, title: str, linked: bool) -> str:
    """Return a picture of the collectives in program order, linked to the table if ``linked``."""
    moved = [content.ledger.cost(n).bytes for n in range(len(content.account.entries))]
    total = content.ledger.total.bytes
    amounts = [f"{size(n)} on the wire, {percent(n, total)}" for n in moved]
    marks = _marks(content, enumerate(amounts), linked)
    phases = [entry.phase for entry in content.account]
    picture = drawn.strip(drawn.events(content.judgement), marks, moved, phases)
    key = "".join(f'<li><i class="{v}"></i>{v}</li>' for v in _present(content))
    note = (
        "Heights are wire bytes of all runs; below stand the phases, or their first letters "
        f"({', '.join(dict.fromkeys(phases))})."
    )
    return _picture(title, picture, f'<ul class="key">{key}</ul>{dim(note)}')


def _timed(content: Content) -> str:
    if content.timings is None or not content.timings.ran:
        return ""
    ran = content.timings.ran
    took = ((n, f"{milliseconds(b - a)} from {milliseconds(a)} on") for n, a, b in ran)
    marks = _marks(content, took)
    runs = [(mark, start, end) for mark, (_, start, end) in zip(marks, ran)]
    note = (
        f"Measured on {content.timings.device}, whose collectives took longest. Each kind of "
        "collective has a lane; the grey line below shows when it ran anything else, which hides "
        "that part of a collective."
    )
    return _picture("A step as it ran", drawn.timed(runs, content.timings.busy), dim(note))


def _sums(content: Content, pairs: Iterable[tuple[str, int]]) -> dict[str, dict[str, int]]:
    """Return sums of wire bytes by label and verdict, the costliest first."""
    sums: dict[str, dict[str, int]] = {}
    for label, number in pairs:
        of_label = sums.setdefault(label, dict.fromkeys(VERDICTS, 0))
        of_label[content.account.entries[number].verdict] += content.ledger.cost(number).bytes
    return dict(sorted(sums.items(), key=lambda pair: -sum(pair[1].values())))


def _bar(sums: dict[str, int], most: int) -> str:
    parts = "".join(
        f'<span class="{v}" style="width:{100 * n / max(1, most):.2f}%" title="{v}: {size(n)}">'
        "</span>"
        for v, n in sums.items()
        if n
    )
    return f'<div class="bar">{parts}</div>'


def _bars(title: str, sums: dict[str, dict[str, int]]) -> str:
    """Return a table with a column of bars."""
    totals = [sum(of_label.values()) for of_label in sums.values()]
    rows = (
        f'<tr><th scope="row">{escaped(label)}</th><td>{_bar(of_label, max(totals))}</td>'
        f'<td class="n">{size(n)}</td><td class="n">{percent(n, sum(totals))}</td></tr>'
        for (label, of_label), n in list(zip(sums.items(), totals))[:_BARS]
    )
    columns = dict.fromkeys(("of", "by verdict", "bytes", "share"), "")
    more = dim(f"and {len(sums) - _BARS} more") if len(sums) > _BARS else ""
    return titled(title, html_table(title, columns, rows, "bars"), more)


# -- what is written ------------------------------------------------------------------------------


def _section(block: Block) -> str:
    if block.items:
        items = [_item(i, n == 0 or len(block.items) <= _OPEN) for n, i in enumerate(block.items)]
        if len(items) > _ITEMS + 1:
            more = f"<summary>{len(items) - _ITEMS} more</summary>"
            left = "".join(items[_ITEMS:])
            items[_ITEMS:] = [f'<li><details>{more}<ul class="remarks">{left}</ul></details></li>']
        rest = f'<li class="dim">{prose(block.rest)}</li>' if block.rest else ""
        return titled(block.title, f'<ul class="remarks">{"".join(items)}{rest}</ul>')
    if not block.rows:
        return dim(block.note) if block.note else ""
    name = block.title or "programs"
    least, block = () if block.title else _OF_PROGRAMS, block.told
    columns = {column: "less" if column in least else "" for column in block.columns}
    rows = (f"<tr>{''.join(map(_cell, row, columns.values()))}</tr>" for row in block.rows)
    table = html_table(name, columns, rows)
    return titled(block.title, wide(name, table), dim(*block.notes))


def _cell(cell: object, classes: str) -> str:
    shown = "?" if cell is None else f"{cell:,}" if type(cell) is int else here(str(cell))
    return f"<td{classed(classes)}>{escaped(shown)}</td>"


def _item(item: Item, is_open: bool) -> str:
    if not item.kind:
        return f"<li>{escaped(item.what)}</li>"
    where = f" at <code>{escaped(item.source)}</code>" if item.source else ""
    lines = dict(item.lines)
    saves = f"<b>saves {escaped(lines.pop('saves'))}</b>: " if "saves" in lines else ""
    verdict = item.entry.verdict if item.entry else "unproven"
    written = "".join(
        f"<p><b>{escaped(label)}</b> {prose(text)}</p>"
        for label, text in sorted(lines.items(), key=lambda line: line[0] == RESTING)
    )
    return (
        f"<li><details{' open' if is_open else ''}><summary>{badge(verdict, item.kind)} "
        f'{saves}{escaped(item.what)}{where}</summary><div class="fold">'
        f"{_excerpt(item.entry) if item.entry else ''}{written}</div></details></li>"
    )


def _table(content: Content) -> str:
    columns = {cell.column: _classes(cell) for cell in content.cells(content.rows[0])}
    ids = _ids(content)
    rows = (_row(content, n, row, ids) for n, row in enumerate(content.rows))
    caption = "Collectives; those that are alike are one row"
    note = (
        "Not proven equal is not proven different. Source lines are quoted from the files as they "
        "are now."
    )
    return titled(
        "Collectives",
        '<button type="button" class="unfold">Unfold all</button>',
        wide("collectives", html_table(caption, columns, rows, "collectives")),
        dim(*Block("", content.note).notes, note),
    )


def _classes(cell: TableCell) -> str:
    classes = {"n": cell.key is not None, "less": cell.column in _HIDDEN}
    classes["least"] = cell.column in _LEAST
    classes["untimed"] = cell.column in _UNTIMED
    classes["measured"] = cell.column == "measured, a step"
    return " ".join(name for name, is_so in classes.items() if is_so)


def _row(content: Content, number: int, row: Row, ids: dict[str, str]) -> str:
    first = row.first
    cells = {cell.column: cell for cell in content.cells(row)}
    numbers = [cell for cell in cells.values() if cell.key is not None]
    not_shown = _HIDDEN if content.timings is None else (*_HIDDEN, *_UNTIMED)
    hidden = ", ".join(f"{c.column}: {c.text}" for c in numbers if c.column in not_shown)
    estimated = f", {cells['est. a run'].text} a run" if "est. a run" in cells else ""
    says = (
        f"{first.what}: {first.verdict}, {row.sites} x {size(first.wire_bytes * (first.runs or 1))}"
        f" on the wire{estimated}, {_where(first)}"
    )
    groups = " ".join(dict.fromkeys(ids[entry.groups] for entry in row.entries))
    written = "".join(
        f'<td class="{_classes(c)}" data-key="{c.key}">{escaped(c.text)}</td>' for c in numbers
    )
    return (
        f'<tr id="row{number}" data-groups="{groups}" data-verdict="{first.verdict}" '
        f'data-says="{escaped(says)}"><td data-key="{escaped(first.what)}"><details><summary>'
        f"{escaped(first.what)} {escaped(first.element_type)}</summary>"
        f"{_fold(content, row, hidden)}</details></td>"
        f"<td>{badge(first.verdict, first.verdict)}</td>{written}"
        f'<td class="less"><code>{escaped(_where(first))}</code></td></tr>'
    )


def _fold(content: Content, row: Row, hidden: str) -> str:
    verdicts = [entry.judged for entry in row.entries]
    parts = [f'<p class="narrow">{escaped(hidden)}</p>']
    for same in alike(verdicts, lambda v: (v.reason, v.rests_on)):
        count = f"{len(same)} of {len(verdicts)}: " if len(same) < len(verdicts) else ""
        parts.append(f"<p>{count}because {prose(here(same[0].reason))}</p>")
        rests = resting_on(same[0])
        parts.append(dim(f"resting on: {rests}") if rests else "")
    if row.first.place:
        parts.append(f"<p>at <code>{escaped(row.first.place)}</code></p>")
    parts.append(_excerpt(row.first))
    groups = list(dict.fromkeys(entry.groups for entry in row.entries))
    names = list(dict.fromkeys(verdict.collective.name for verdict in verdicts))
    codes = [("groups", group) for group in groups[:_SITES]]
    codes.append(("in the compiled text:", few(names, _SITES)))
    parts += [f'<p class="dim">{what} <code>{escaped(code)}</code></p>' for what, code in codes]
    if row.sites > 1:
        each = units.sizes([entry.bytes for entry in row.entries])
        parts.append(dim(f"operands of {each}"))
    return f'<div class="fold">{"".join(parts)}<div class="here"></div></div>'


@functools.lru_cache(maxsize=256)
def _lines(file: str) -> tuple[str, ...]:
    """Return the lines of a readable Python file; none for any other file."""
    path = pathlib.Path(file)
    try:
        if path.suffix != ".py" or not path.is_file() or os.path.getsize(path) > _LARGEST:
            return ()
        return tuple(path.read_text(encoding="utf-8").splitlines())
    except (OSError, ValueError):  # a name with a null byte, text that is not UTF-8
        return ()


def _excerpt(entry: accounts.Entry) -> str:
    match = _PLACE.fullmatch(entry.place)
    lines, line = (_lines(match[1]), int(match[3])) if match else ((), 0)
    if not 0 < line <= len(lines):
        return ""
    start, stop = max(1, line - _AROUND), min(len(lines), line + _AROUND)
    shown = "\n".join(
        ("<mark>{}</mark>" if n == line else "{}").format(f"{n:5}  {escaped(lines[n - 1])}")
        for n in range(start, stop + 1)
    )
    return f"<pre>{shown}</pre>"
