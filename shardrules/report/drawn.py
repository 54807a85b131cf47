"""The pictures of a report's page: a collective's groups on the mesh, and the timeline."""

from __future__ import annotations

import html
import math
import re
from collections.abc import Iterable, Mapping, Sequence

from shardrules.report.grouping import counted, milliseconds
from shardrules.report.timeline import Event

__all__ = ["escaped", "groups_on_mesh", "strip", "timed"]

_CELLS = 256  # devices that are drawn; a larger mesh shows its first ones
_ACROSS = 16  # of them in a line
_COLOURS = 8  # of groups; they come round again
_MEMBERS = 16  # of a group that are listed
_HEIGHT = 90  # of the timeline's highest bar
_LOWEST = 2.0  # of any bar
_WIDTH = 1080  # of a step that is drawn to time
_LANE = 24  # of it, for collectives that don't overlap
_NARROWEST = 0.5
_MOST = 4000  # runs of collectives in it, the longest

# Of text: what a browser refuses, and what turns the direction of the text after it.
_CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f\u202a-\u202e\u2066-\u2069]")


def escaped(value: object) -> str:
    """Write what came from a program so that a browser takes it for text."""
    return html.escape(_CONTROL.sub("\N{REPLACEMENT CHARACTER}", str(value)))


def _svg(
    width: float, height: float, label: str, kind: str, parts: Iterable[str], role: str = "img"
) -> str:
    return (
        f'<svg role="{role}" aria-label="{escaped(label)}" class="{kind}" '
        f'viewBox="0 0 {width:.0f} {height:.0f}" width="{width:.0f}" height="{height:.0f}">'
        + "".join(parts)
        + "</svg>"
    )


def groups_on_mesh(
    groups: Sequence[Sequence[int]],
    pairs: Sequence[tuple[int, int]] | None,
    mesh: Mapping[str, int] | None,
    device_count: int,
    label: str,
) -> str:
    """Draw the devices, each in the colour of its group; a permute's pairs are arrows.

    The last mesh axis runs to the right, the others downwards.
    """
    axes = dict(mesh) if mesh else {"devices": device_count}
    names = list(axes)
    across = axes[names[-1]] if len(names) > 1 else math.isqrt(device_count - 1) + 1
    across = max(1, min(across, _ACROSS, device_count))
    shown = min(device_count, _CELLS)
    side = 30 if shown <= 64 else 16
    step, left, top = side + 4, 8, 20
    group_of = {device: n for n, group in enumerate(groups) for device in group}
    size = {n: len(group) for n, group in enumerate(groups)}

    def place(device: int) -> tuple[float, float]:
        return left + device % across * step + side / 2, top + device // across * step + side / 2

    head = (f"{' x '.join(names[:-1])} \N{DOWNWARDS ARROW} " if names[:-1] else "") + (
        f"{names[-1]} \N{RIGHTWARDS ARROW}"
    )
    parts = [f'<text class="dim" x="{left}" y="12">{escaped(head)}</text>']
    for device in range(shown):
        x, y = place(device)
        group = group_of.get(device)
        alone = group is None or size[group] < 2
        says = f"device {device}"
        if mesh:
            says += " (" + ", ".join(f"{a}={i}" for a, i in _coordinates(device, axes)) + ")"
        if group is not None:
            members = groups[group]
            more = ", ..." if len(members) > _MEMBERS else ""
            says += f": group {group} of {len(groups)}: "
            says += ", ".join(str(m) for m in members[:_MEMBERS]) + more
        marks = f' data-g="{group}"' if group is not None else ""
        colour = "none" if alone or group is None else f"g{group % _COLOURS}"
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
        parts.append(
            f'<text class="dim" x="{left}" y="{height - 4}">the first {shown} of '
            f"{device_count:,} devices</text>"
        )
    return _svg(max(left + across * step, 8 * len(head)) + 4, height, label, "mesh", parts)


def _coordinates(device: int, axes: Mapping[str, int]) -> list[tuple[str, int]]:
    found = []
    for name in reversed(list(axes)):
        found.append((name, device % axes[name]))
        device //= axes[name]
    return found[::-1]


def _arrow(start: tuple[float, float], end: tuple[float, float], side: float) -> str:
    """Draw an arrow between two cells, bent a little, so that two ways stay apart."""
    (x0, y0), (x1, y1) = start, end
    length = math.hypot(x1 - x0, y1 - y0)
    ux, uy = (x1 - x0) / length, (y1 - y0) / length
    x0, y0, x1, y1 = (
        x0 + ux * side * 0.3,
        y0 + uy * side * 0.3,
        x1 - ux * side * 0.3,
        y1 - uy * side * 0.3,
    )
    mx, my = (x0 + x1) / 2 - uy * side * 0.35, (y0 + y1) / 2 + ux * side * 0.35
    tx, ty = x1 - mx, y1 - my
    long = math.hypot(tx, ty) or 1.0
    tx, ty = tx / long * 5, ty / long * 5
    return (
        f'<path class="edge" d="M{x0:.1f} {y0:.1f}Q{mx:.1f} {my:.1f} {x1:.1f} {y1:.1f}'
        f"M{x1 - tx - ty * 0.6:.1f} {y1 - ty + tx * 0.6:.1f}L{x1:.1f} {y1:.1f}"
        f'L{x1 - tx + ty * 0.6:.1f} {y1 - ty - tx * 0.6:.1f}"/>'
    )


def strip(
    events: Sequence[Event], bars: Sequence[tuple[str, str, str, int]], phases: Sequence[str]
) -> str:
    """Draw the collectives in program order: loops above them, phases below.

    Args:
      events: in program order.
      bars: for each collective the id of its row in a table, or nothing, its verdict, what it
        is, and the wire bytes of all its runs, which are the heights.
      phases: each collective's.
    """
    count = sum(e.kind == "collective" for e in events)
    pitch = max(3.0, min(27.0, 1080 / max(1, count)))
    gap = min(3.0, pitch / 4)
    wide = pitch - gap
    most = max((b[3] for b in bars), default=0) or 1
    nesting = deepest = 0
    for event in events:
        nesting += {"collective": 0, "end": -1}.get(event.kind, 1)
        deepest = max(deepest, nesting)
    top, x = 18 * deepest + 6, 4.0
    base = top + _HEIGHT
    parts: list[str] = []
    opened: list[tuple[float, Event]] = []
    spans: list[tuple[str, float, float]] = []
    for event in events:
        if event.kind == "collective":
            row, verdict, says, size = bars[event.number]
            high = max(_LOWEST, _HEIGHT * size / most)
            log = max(_LOWEST, _HEIGHT * math.log1p(size) / math.log1p(most))
            bar = (
                f'<rect data-row="{row}" data-log="{log:.1f}" class="{verdict}" x="{x:.2f}" '
                f'y="{base - high:.1f}" width="{wide:.2f}" height="{high:.1f}">'
                f"<title>{escaped(says)}</title></rect>"
            )
            # The whole column takes the pointer, however low its bar is.
            back = f'<path class="back" d="M{x:.2f} {top}h{wide:.2f}v{_HEIGHT}h-{wide:.2f}z"/>'
            link = f'a href="#{row}"' if row else "g"
            label = escaped(says)
            parts.append(f'<{link} tabindex="0" aria-label="{label}">{back}{bar}</{link[0]}>')
            phase = phases[event.number]
            if spans and spans[-1][0] == phase:
                spans[-1] = (phase, spans[-1][1], x + wide)
            else:
                spans.append((phase, x, x + wide))
            x += wide + gap
        elif event.kind == "end":
            start, of = opened.pop()
            y, end = 18 * len(opened) + 4, max(x - gap, start + wide)
            parts.append(
                f'<path class="edge" d="M{start:.1f} {base:g}V{y + 12}H{end:.1f}V{base:g}" '
                f'stroke-dasharray="2 3"/>'
                f'<text class="dim" x="{start + 2:.1f}" y="{y + 8}">{escaped(of.label)}</text>'
            )
            x = max(x, start + 6.2 * len(of.label)) + 5
        else:
            opened.append((x, event))
            x += 4
    for phase, start, end in spans:
        title = f"<title>{escaped(phase)}</title>"
        parts.append(f'<path class="edge" d="M{start:.1f} {base + 5}H{end:.1f}">{title}</path>')
        # Under a few parts of a combined one there is no room for a word.
        shown = phase if end - start > 6 * len(phase) else phase[:1]
        if end - start > 6 * len(shown):
            parts.append(
                f'<text class="dim" x="{start:.1f}" y="{base + 18}">{title}{escaped(shown)}</text>'
            )
    label = f"{count} collectives in program order, each with its wire bytes; listed in the table"
    return _svg(max(x + 4, 200), base + 24, label, "strip", parts, "group")


def timed(
    ran: Sequence[tuple[str, str, str, float, float]], busy: Sequence[tuple[float, float]]
) -> str:
    """Draw a measured step to time: its collectives, those that overlap below each other.

    Args:
      ran: of each the id of its row in a table, its verdict, what it is, start and end in seconds.
      busy: when the device ran anything else, which is drawn below them.
    """
    last = max([*(one[4] for one in ran), *(end for _, end in busy), 1e-9])
    scale = _WIDTH / last
    drawn: list[tuple[float, str]] = []
    free: list[float] = []  # when each lane's last collective ended
    for row, verdict, says, start, end in sorted(ran, key=lambda one: one[3]):
        lane = next((n for n, until in enumerate(free) if until <= start), len(free))
        free[lane : lane + 1] = [end]
        x, wide, y = 4 + start * scale, max(_NARROWEST, (end - start) * scale), 4 + lane * _LANE
        high, label = _LANE - 4, escaped(says)
        back = f'<path class="back" d="M{x:.2f} {y}h{wide:.2f}v{high}h-{wide:.2f}z"/>'
        bar = (
            f'<rect data-row="{row}" data-log="{high}" class="{verdict}" x="{x:.2f}" y="{y}" '
            f'width="{wide:.2f}" height="{high}"><title>{label}</title></rect>'
        )
        link = f'a href="#{row}"'
        drawn.append((end - start, f'<{link} tabindex="0" aria-label="{label}">{back}{bar}</a>'))
    shortest = sorted((took for took, _ in drawn), reverse=True)[:_MOST][-1] if drawn else 0.0
    parts = [part for took, part in drawn if took >= shortest]
    base = 4 + len(free) * _LANE
    lines = "".join(
        f"M{4 + a * scale:.2f} {base + 5}h{max(_NARROWEST, (b - a) * scale):.2f}" for a, b in busy
    )
    parts.append(f'<path class="busy" d="{lines}"><title>anything else</title></path>')
    for part in range(5):
        x = 4 + _WIDTH * part / 4
        anchor = "start" if not part else "end" if part == 4 else "middle"
        parts.append(f'<path class="edge" d="M{x:g} {base + 12}v4"/>')
        parts.append(
            f'<text class="dim" x="{x:g}" y="{base + 28}" text-anchor="{anchor}">'
            f"{milliseconds(last * part / 4)}</text>"
        )
    label = f"{counted(len(ran), 'run')} of collectives in a measured step, drawn to time"
    return _svg(_WIDTH + 8, base + 32, label, "strip", parts, "group")
