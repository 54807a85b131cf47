"""Draw the pictures of a report's page: a collective's groups on the mesh, and the timeline."""

from __future__ import annotations

import html
import itertools
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from shardrules import hlo
from shardrules.hlo.proof import loops
from shardrules.units import counted, milliseconds

_CELLS = 256  # the most devices that are drawn; a larger mesh shows its first ones
_ACROSS = 16  # the most devices in a line
_COLOURS = 8  # the number of colours for groups; more groups use them again in turn
_MEMBERS = 16  # the most members of a group that are listed
_HEIGHT = 90  # the height of the timeline's highest bar
_LETTER = 6.8  # the width of a letter below the timeline
_LOWEST = 2.0  # the least height of a bar
_WIDTH = 1080  # the width of a step that is drawn to time
_LANE = 24  # the height of a lane, in which collectives don't overlap
_NARROWEST = 0.5  # the least width of a bar in a lane
_ELSE = "anything else"  # the label of work that hides a collective
_MOST = 4000  # the most runs of collectives in a step; the longest are drawn

_Span = tuple[float, float]
# Characters that browsers reject, or that change the direction of the text after them.
_CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f\u202a-\u202e\u2066-\u2069]")
_CODE = re.compile("`([^`]+)`")


class BarLabel(NamedTuple):
    """The label of a bar: the id of its row in a table, or nothing; its verdict; its text."""

    row: str
    verdict: str
    says: str
    lane: str = ""  # the label of its lane in a step that is drawn to time


def escaped(value: object) -> str:
    """Return text from a program with escapes, so that a browser shows it as text."""
    return html.escape(_CONTROL.sub("\N{REPLACEMENT CHARACTER}", str(value)))


def prose(sentence: object) -> str:
    """Return a sentence for a browser; commands between backticks become code."""
    return _CODE.sub(r"<code>\1</code>", escaped(sentence))


def _svg(
    width: float, height: float, label: str, kind: str, parts: Iterable[str], role: str = "img"
) -> str:
    return (
        f'<svg role="{role}" aria-label="{escaped(label)}" class="{kind}" '
        f'viewBox="0 0 {width:.0f} {height:.0f}" width="{width:.0f}" height="{height:.0f}">'
        f"{''.join(parts)}</svg>"
    )


def _text(x: float, y: float, inside: str, more: str = "") -> str:
    return f'<text class="dim" x="{x:g}" y="{y:g}"{more}>{inside}</text>'


def groups_on_mesh(
    groups: Sequence[Sequence[int]],
    pairs: Sequence[tuple[int, int]] | None,
    mesh: Mapping[str, int] | None,
    device_count: int,
    label: str,
) -> str:
    """Return a picture of devices, with a colour for each group and an arrow for each pair.

    The last mesh axis runs from left to right.
    """
    # Devices are numbered row by row, as in the mesh, so a device's place follows from its number:
    # the last axis is across, and all other axes are down.
    axes = dict(mesh) if mesh else {"devices": device_count}
    *down, right = axes
    across = axes[right]
    if not down and across > _ACROSS:
        across = math.isqrt(device_count - 1) + 1
    across = max(1, min(across, _ACROSS, device_count))
    shown = min(device_count, _CELLS)
    side = 30 if shown <= 64 else 16
    step, left, top = side + 4, 8, 20
    head = f"{' x '.join(down)} \N{DOWNWARDS ARROW} " if down else ""
    head += f"{right} \N{RIGHTWARDS ARROW}"
    group_of: dict[int, int] = {}
    for n, members in enumerate(groups):
        group_of.update(dict.fromkeys(members, n))

    def place(device: int) -> tuple[float, float]:
        return left + device % across * step + side / 2, top + device // across * step + side / 2

    parts = [_text(left, 12, escaped(head))]
    for device in range(shown):
        (x, y), group = place(device), group_of.get(device)
        says = f"device {device}" + (_coordinates(device, axes) if mesh else "")
        colour, marks = "none", ""
        if group is not None:
            members, marks = groups[group], f' data-g="{group}"'
            shown_members = ", ".join(map(str, members[:_MEMBERS]))
            more = ", ..." if len(members) > _MEMBERS else ""
            says += f": group {group} of {len(groups)}: {shown_members}{more}"
            colour = f"g{group % _COLOURS}" if len(members) > 1 else "none"
        parts.append(
            f'<rect class="cell {colour}"{marks} x="{x - side / 2:g}" y="{y - side / 2:g}" '
            f'width="{side}" height="{side}" rx="4"><title>{escaped(says)}</title></rect>'
        )
        if side > 20:
            parts.append(
                f'<text x="{x:g}" y="{y + 4:g}" text-anchor="middle" pointer-events="none">'
                f"{device}</text>"
            )
    for source, target in pairs or ():
        if source != target and max(source, target) < shown:
            parts.append(_arrow(place(source), place(target), side))
    height = top + -(-shown // across) * step
    if shown < device_count:
        height += 16
        parts.append(_text(left, height - 4, f"the first {shown} of {device_count:,} devices"))
    return _svg(max(left + across * step, 8 * len(head)) + 4, height, label, "mesh", parts)


def _coordinates(device: int, axes: Mapping[str, int]) -> str:
    parts: list[str] = []
    for name, count in reversed([*axes.items()]):
        parts.insert(0, f"{name}={device % count}")
        device //= count
    return f" ({', '.join(parts)})"


def _arrow(start: tuple[float, float], end: tuple[float, float], side: float) -> str:
    """Return a bent arrow between two cells, so that arrows in both directions stay apart."""
    first, last = complex(*start), complex(*end)
    along = (last - first) / abs(last - first)
    first, last = first + along * side * 0.3, last - along * side * 0.3
    bend = (first + last) / 2 + along * 1j * side * 0.35
    back = (last - bend) / abs(last - bend) * 5

    def at(*points: complex) -> str:
        return " ".join(f"{point.real:.1f} {point.imag:.1f}" for point in points)

    barbs = last - back + back * 0.6j, last - back - back * 0.6j
    return (
        f'<path class="edge" d="M{at(first)}Q{at(bend, last)}M{at(barbs[0])}L{at(last)}'
        f'L{at(barbs[1])}"/>'
    )


def _bar(mark: BarLabel, x: float, wide: float, bar: _Span, column: _Span, log: float) -> str:
    """Return a bar, in a column that reacts to the pointer; each is a pair of top and height."""
    (y, high), (top, tall), says = bar, column, escaped(mark.says)
    link = f'a href="#{mark.row}"' if mark.row else "g"
    return (
        f'<{link} tabindex="0" aria-label="{says}">'
        f'<path class="back" d="M{x:.2f} {top}h{wide:.2f}v{tall}h-{wide:.2f}z"/>'
        f'<rect data-row="{mark.row}" data-log="{log:.1f}" class="{mark.verdict}" x="{x:.2f}" '
        f'y="{round(y, 1):g}" width="{wide:.2f}" height="{high:.1f}"><title>{says}</title></rect>'
        f"</{link[0]}>"
    )


# -- the timeline ---------------------------------------------------------------------------------


class Event(NamedTuple):
    """A collective, or the begin or end of a loop or branch, in program order."""

    kind: str  # ``collective``; ``loop`` or ``branch`` at its begin, ``end`` at its end
    number: int = -1  # a collective's place among the verdicts
    label: str = ""  # for a loop, how often it runs each time; for a branch, its number


_END = Event("end")


def events(judgement: hlo.Judgement) -> list[Event]:
    """Return events in program order, without loops and branches that contain no collective."""
    module = judgement.module
    numbers: dict[tuple[str, str], list[int]] = {}
    for number, verdict in enumerate(judgement.verdicts):
        place = verdict.collective.computation, verdict.collective.name
        numbers.setdefault(place, []).append(number)
    kept: list[Event] = []
    seen = set()  # a computation with several callers is shown at its first caller

    def inside(event: Event, callees: Iterable[str]) -> None:
        kept.append(event)
        walk(callees)
        if kept[-1] is event:
            kept.pop()  # it contains no collective
        else:
            kept.append(_END)

    def walk(names: Iterable[str]) -> None:
        for name in names:
            if name in seen:
                continue
            seen.add(name)
            for instruction in module.computations[name].instructions:
                held = numbers.pop((name, instruction.name), ())
                kept.extend(Event("collective", number) for number in held)
                if instruction.opcode == "while":
                    trips = loops.trip_count(module, module.computations[name], instruction)
                    count = "?" if trips is None else f"{trips:,}"
                    times = f"{count} time{'' if trips == 1 else 's'}"
                    inside(Event("loop", label=f"loop, {times}"), instruction.calls)
                elif instruction.opcode == "conditional":
                    for branch, callee in enumerate(instruction.calls):
                        inside(Event("branch", label=f"branch {branch}"), [callee])
                else:
                    walk(instruction.calls)

    walk([module.entry.name])
    left = sorted(itertools.chain.from_iterable(numbers.values()))
    return [*kept, *(Event("collective", number) for number in left)]


def strip(
    events: Sequence[Event], marks: Sequence[BarLabel], sizes: Sequence[int], phases: Sequence[str]
) -> str:
    """Return a picture of the collectives in program order, with loops above and phases below."""
    # Go from left to right: ``x`` is the next free place. ``opened`` has the starts of the loops
    # and branches that are open there. ``spans`` has the phases so far; equal neighbours become one
    # span.
    count = sum(event.kind == "collective" for event in events)
    pitch = max(3.0, min(58.0, _WIDTH / max(1, count)))
    gap = min(3.0, pitch / 4)
    wide = pitch - gap
    most = max(sizes, default=0) or 1
    nesting = itertools.accumulate({"collective": 0, "end": -1}.get(e.kind, 1) for e in events)
    top, x = 18 * max(nesting, default=0) + 6, 4.0
    base = top + _HEIGHT
    parts: list[str] = []
    opened: list[tuple[float, str]] = []
    spans: list[tuple[str, float, float]] = []
    for event in events:
        if event.kind == "collective":
            size, phase = sizes[event.number], phases[event.number]
            high = max(_LOWEST, _HEIGHT * size / most)
            log = max(_LOWEST, _HEIGHT * math.log1p(size) / math.log1p(most))
            parts.append(
                _bar(marks[event.number], x, wide, (base - high, high), (top, _HEIGHT), log)
            )
            start = spans.pop()[1] if spans and spans[-1][0] == phase else x
            spans.append((phase, start, x + wide))
            x += wide + gap
        elif event.kind == "end":
            start, label = opened.pop()
            y, end = 18 * len(opened) + 4, max(x - gap, start + wide)
            parts.append(
                f'<path class="edge" d="M{start:.1f} {base:g}V{y + 12}H{end:.1f}V{base:g}" '
                f'stroke-dasharray="2 3"/>{_text(start + 2, y + 8, escaped(label))}'
            )
            x = max(x, start + 6.2 * len(label)) + 5
        else:
            opened.append((x, event.label))
            x += 4
    parts += [_span(phase, start, end, base) for phase, start, end in spans]
    label = f"{count} collectives in program order, each with its wire bytes; listed in the table"
    return _svg(max(x + 4, 200), base + 24, label, "strip", parts, "group")


def _span(phase: str, start: float, end: float, base: float) -> str:
    """Return a line along a phase, with its name, or its first letter if there is no room."""
    title = f"<title>{escaped(phase)}</title>"
    line = f'<path class="edge" d="M{start:.1f} {base + 5}H{end:.1f}">{title}</path>'
    shown = phase if end - start > _LETTER * len(phase) else phase[:1]
    if end - start <= _LETTER * len(shown):
        return line
    return line + _text(start, base + 18, f"{title}{escaped(shown)}")


def timed(runs: Sequence[tuple[BarLabel, float, float]], busy: Sequence[_Span]) -> str:
    """Return a picture of runs from start to end in seconds, and of the device's other work."""
    last = max([*(end for *_, end in runs), *(end for _, end in busy), 1e-9])
    # Each kind of collective over the same axes has a lane, and more lanes if its runs overlap: a
    # run goes into the first lane that is free when the run starts.
    lanes: list[tuple[str, float]] = []  # each lane's label, and when its last run ended
    bars: list[tuple[float, str]] = []
    labels = list(dict.fromkeys(mark.lane for mark, *_ in sorted(runs, key=lambda run: run[1])))
    left = 6 + 6.2 * max(map(len, (*labels, _ELSE)))
    scale = (_WIDTH - left) / last
    for mark, start, end in sorted(runs, key=lambda run: (labels.index(run[0].lane), run[1])):
        free = (n for n, (of, until) in enumerate(lanes) if of == mark.lane and until <= start)
        lane = next(free, len(lanes))
        lanes[lane : lane + 1] = [(mark.lane, end)]
        place, wide = (4 + lane * _LANE, _LANE - 4), max(_NARROWEST, (end - start) * scale)
        bar = _bar(mark, left + start * scale, wide, place, place, _LANE - 4)
        bars.append((end - start, bar))
    shortest = min(sorted((took for took, _ in bars), reverse=True)[:_MOST], default=0.0)
    parts = [bar for took, bar in bars if took >= shortest]
    for n, (label, _) in enumerate(lanes):
        if n == 0 or lanes[n - 1][0] != label:
            parts.append(_text(0, n * _LANE + 18, escaped(label)))
    base = 4 + len(lanes) * _LANE
    lines = "".join(
        f"M{left + a * scale:.2f} {base + 5}h{max(_NARROWEST, (b - a) * scale):.2f}"
        for a, b in busy
    )
    parts.append(f'<path class="busy" d="{lines}"><title>{_ELSE}</title></path>')
    parts.append(_text(0, base + 9, _ELSE))
    for quarter, anchor in enumerate(("start", "middle", "middle", "middle", "end")):
        x = left + (_WIDTH - left) * quarter / 4
        parts.append(f'<path class="edge" d="M{x:g} {base + 12}v4"/>')
        time = milliseconds(last * quarter / 4)
        parts.append(_text(x, base + 28, time, f' text-anchor="{anchor}"'))
    label = f"{counted(len(runs), 'run')} of collectives in a measured step, drawn to time"
    return _svg(_WIDTH + 8, base + 32, label, "strip", parts, "group")
