"""Draw bytes by source file and line as a treemap: areas are bytes; a click enlarges a file."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from shardrules.report.drawn import escaped
from shardrules.units import percent, size

_PLACE = re.compile(r"(.+):(\d+)(?: \((.*)\))?")
_MOST = 60  # the most lines that are drawn, by bytes; the other lines of a file are one area


class _Area(NamedTuple):
    label: str
    verdicts: Mapping[str, int]  # bytes by verdict

    @property
    def bytes(self) -> int:
        return sum(self.verdicts.values())


def treemap(lines: Mapping[str, Mapping[str, int]]) -> str:
    """Return the treemap of bytes by ``file:line (function)`` and verdict; empty without bytes."""
    # Give each of the largest lines an area in its file. Sum the other lines of each file.
    areas = {line: _Area(line, verdicts) for line, verdicts in lines.items()}
    total = sum(area.bytes for area in areas.values())
    shown = sorted(areas, key=lambda line: -areas[line].bytes)[:_MOST]
    files: dict[str, list[_Area]] = {}
    others: dict[str, dict[str, int]] = {}
    for line, area in areas.items():
        match = _PLACE.fullmatch(line)
        file = match[1] if match else line
        if line in shown:
            name = f"line {match[2]}" + (f", {match[3]}" if match[3] else "") if match else line
            files.setdefault(file, []).append(area._replace(label=name))
        else:
            rest = others.setdefault(file, {})
            rest.update({v: rest.get(v, 0) + n for v, n in area.verdicts.items()})
    for file, rest in others.items():
        files.setdefault(file, []).append(_Area("other lines", rest))
    sums = dict.fromkeys(files, 0)
    for file, parts in files.items():
        for area in parts:
            sums[file] += area.bytes
    if not total:
        return ""
    return '<div class="tree">{}</div>'.format(
        "".join(
            f'<div class="file"{_at(box)}><button type="button" aria-pressed="false" '
            f'title="{escaped(f"{file}: {size(sums[file])}, {percent(sums[file], total)}")}">'
            f"{escaped(file)} <b>{size(sums[file])}</b></button>"
            f'<div class="lines">{_lines(files[file], file, total)}</div></div>'
            for file, box in _placed(sums)
        )
    )


def _lines(areas: Sequence[_Area], file: str, total: int) -> str:
    by_label = {area.label: area for area in areas}
    written = []
    for label, box in _placed({label: area.bytes for label, area in by_label.items()}):
        area = by_label[label]
        said = f"{size(area.bytes)}, {percent(area.bytes, total)}"
        kinds = ", ".join(f"{v} {size(n)}" for v, n in area.verdicts.items() if n)
        most = max(area.verdicts, key=lambda verdict: area.verdicts[verdict])
        whole = escaped(f"{file}, {label}: {said} ({kinds})")
        written.append(
            f'<div class="{most}"{_at(box)} role="img" aria-label="{whole}" title="{whole}">'
            f"<span>{escaped(label)}<br>{said}</span></div>"
        )
    return "".join(written)


_Box = tuple[float, float, float, float]  # left, top, width, height, in percent of the outer box


def _at(box: _Box) -> str:
    names = ("left", "top", "width", "height")
    return ' style="{}"'.format(";".join(f"{n}:{v:.2f}%" for n, v in zip(names, box)))


def _placed(sizes: Mapping[str, int], wide: float = 3.0) -> Iterable[tuple[str, _Box]]:
    """Yield boxes, as square as possible, that fill a box of height 1 and width ``wide``."""
    # A squarified treemap (Bruls, Huizing and van Wijk, 2000): cut strips off the rest, each as
    # long as the shorter side, the largest areas first. A strip takes the next area as long as its
    # worst box gets squarer.
    left = sorted((name for name, n in sizes.items() if n), key=lambda name: -sizes[name])
    x, y, width, height = 0.0, 0.0, wide, 1.0
    scale = width * height / max(1, sum(sizes.values()))
    while left:
        along = min(width, height)
        row: list[str] = []
        worst = float("inf")
        for name in left:
            areas = [sizes[each] * scale for each in (*row, name)]
            thick = sum(areas) / along
            now = max(max(thick / (a / thick), (a / thick) / thick) for a in areas)
            if now > worst:
                break
            row, worst = [*row, name], now
        thick = sum(sizes[name] for name in row) * scale / along
        at = 0.0
        for name in row:
            length = sizes[name] * scale / thick
            box = (x, y + at, thick, length) if width > height else (x + at, y, length, thick)
            yield name, (box[0] / wide * 100, box[1] * 100, box[2] / wide * 100, box[3] * 100)
            at += length
        # The rest's own area gives its side. ``width - thick`` would be rounding, or even zero or
        # negative, if the rest is tiny.
        left = left[len(row) :]
        rest = sum(sizes[name] for name in left) * scale
        if width > height:
            width = rest / height
            x = wide - width
        else:
            height = rest / width
            y = 1 - height
