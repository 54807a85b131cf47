"""Define the result of reading a profile, and write it."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import json
from collections.abc import Mapping, Sequence
from typing import Any

from shardrules import hlo, paths, report, units
from shardrules.costs import accounts, findings
from shardrules.costs.timings import Timing, Timings
from shardrules.report import grouping, several
from shardrules.report.page import in_notebook
from shardrules.report.text import described
from shardrules.units import counted

_SHOWN_COUNT = 30  # rows of needed collectives


@dataclasses.dataclass(frozen=True)
class Line:
    """One verdict, with the time that its collective took."""

    program: str  # its program's name
    entry: accounts.Entry
    finding: findings.Finding | None
    timing: Timing | None  # its time in a step; None if the profile has no event of it
    avoidable_seconds: float  # the exposed seconds that the finding's advice saves in each step

    @property
    def verdict(self) -> hlo.Verdict:
        return self.entry.judged

    @property
    def seconds(self) -> float:
        return self.timing.seconds if self.timing else 0.0

    @property
    def exposed_seconds(self) -> float:
        return self.timing.exposed_seconds if self.timing else 0.0

    @property
    def bytes_per_s(self) -> float | None:
        """Return the bytes per second that a device sends while this runs; None if unknown."""
        if self.timing is None or not self.seconds:
            return None
        return self.entry.wire_bytes * self.timing.runs / self.seconds


@dataclasses.dataclass(frozen=True)
class ProfiledProgram:
    """One program of a profile."""

    name: str
    content: report.Content  # its report, with the time of each verdict

    @property
    def timings(self) -> Timings:
        assert self.content.timings is not None
        return self.content.timings

    @property
    def lines(self) -> tuple[Line, ...]:
        wrong = {finding.entry.number: finding for finding in self.content.findings}
        lines = []
        for entry in self.content.account:
            timing = self.timings.of[entry.number]
            finding, saved = wrong.get(entry.number), 0.0
            if finding is not None and (worth := self.content.ledger.worth(finding)).is_sure:
                saved = worth.exposed_seconds
            lines.append(Line(self.name, entry, finding, timing, saved))
        return tuple(lines)


@dataclasses.dataclass(frozen=True)
class Profile:
    """The verdicts on a profile's collectives, with their times; ``str`` is the report."""

    source: str  # the path that it was read from
    programs: tuple[ProfiledProgram, ...]  # the programs that ran and have collectives
    step_count: int
    step_seconds: float  # the median step
    marked: bool  # whether the script marked steps; if not, they are runs of the longest program
    planes: Mapping[str, int]  # the planes that could be read, with their number of operations
    notes: tuple[str, ...]  # sentences about what the profile lacks

    def _repr_html_(self) -> str:
        contents = [program.content for program in self.programs]
        if len(contents) == 1:
            return in_notebook(contents[0])
        both = several.gather(contents, [1] * len(contents), of_process=False)
        return in_notebook(dataclasses.replace(both, title=self.source))

    @functools.cached_property
    def lines(self) -> tuple[Line, ...]:
        """Return all verdicts: findings first, then by exposed time, the longest first."""
        lines = list(itertools.chain.from_iterable(program.lines for program in self.programs))
        lines.sort(key=lambda line: (line.finding is None, -line.exposed_seconds, -line.seconds))
        return tuple(lines)

    @property
    def findings(self) -> tuple[Line, ...]:
        return tuple(line for line in self.lines if line.finding is not None)

    @property
    def avoidable_seconds(self) -> float:
        """Return the exposed time that the advice of all findings would save in each step."""
        return sum(line.avoidable_seconds for line in self.findings)

    @property
    def cheaper_seconds(self) -> float:
        """Return the exposed time that all hints would save in each step beyond findings."""
        each = {id(p.timings): p.content for p in self.programs}.values()
        both = sum(content.avoidable.exposed_seconds for content in each)
        return max(0.0, both - self.avoidable_seconds)

    @property
    def headline(self) -> str:
        return grouping.of_step(self.avoidable_seconds, self.step_seconds, " ".join(self.planes))

    @property
    def about(self) -> str:
        steps = "marked by the profile" if self.marked else "runs of the longest program"
        hosts = len({plane.partition(" ")[0] for plane in self.planes})
        planes = (f"{name.partition(' ')[2]} ({n} events)" for name, n in self.planes.items())
        held = f"{counted(self.step_count, 'step')} ({steps}), {counted(hosts, 'host')}"
        return f"{self.source}: {held}, {', '.join(planes)}"

    def __str__(self) -> str:
        lines = [self.headline, self.about, *(f"note: {note}" for note in self.notes)]
        if self.cheaper_seconds:
            lines.append(
                f"note: {units.milliseconds(self.cheaper_seconds)} more a step are spent in "
                "needed collectives that could be cheaper: shardrules report --profile "
                f"{self.source}"
            )
        if any(program.lines and not program.content.judgement.mesh for program in self.programs):
            lines.append(
                "note: the mesh is not known; name its axes: --mesh data=4,model=2 (mesh=)"
            )
        if not self.lines:
            return "\n".join([*lines, "no collectives in any program that ran"]) + "\n"
        groups = []
        for program in self.programs:
            groups += [(program, same) for same in findings.alike(program.content.findings)]
        groups.sort(key=lambda pair: -pair[0].content.ledger.exposed_seconds(pair[1]))
        blocks, resting = described([same for _, same in groups])
        seldom = 0
        for (program, same), block in zip(groups, blocks):
            timing = program.content.ledger.timing(same)
            if timing is not None and not timing.seconds:
                seldom += len(same)
            else:
                took = grouping.took(timing, self.step_seconds) + grouping.spread(timing)
                lines += ["", f"{took} ({program.name})", block]
        if seldom:
            what = counted(seldom, "finding")
            lines += ["", f"and {what} that ran in fewer than half of the steps"]
        needed = [line for line in self.lines if line.finding is None]
        if needed:
            lines += ["", "needed, or allowed:", report.table(_table(needed, self.step_seconds))]
            if len(needed) > _SHOWN_COUNT:
                lines.append(f"and {len(needed) - _SHOWN_COUNT} more, which took less")
        lines += ["", *resting] if resting else []
        return "\n".join(lines) + "\n"

    def as_dict(self) -> dict[str, Any]:
        return {
            "source": self.source,
            "steps": {
                "count": self.step_count,
                "seconds": self.step_seconds,
                "marked": self.marked,
            },
            "avoidable_seconds": self.avoidable_seconds,
            "cheaper_seconds": self.cheaper_seconds,
            "planes": dict(self.planes),
            "notes": list(self.notes),
            "collectives": [_json(line) for line in self.lines],
        }

    def as_json(self) -> str:
        return json.dumps(self.as_dict(), indent=2)


def _table(lines: Sequence[Line], step_seconds: float) -> list[list[str]]:
    names = ("measured, a step", "of it exposed", "share", "collective", "bytes", "bandwidth", "at")
    rows = [list(names)]
    for line in lines[:_SHOWN_COUNT]:
        took = exposed = "?"
        if line.timing:
            took = units.milliseconds(line.seconds) + grouping.spread(line.timing)
            exposed = units.milliseconds(line.exposed_seconds)
        known = line.timing is not None and step_seconds
        share = units.percent(line.seconds, step_seconds) if known else "?"
        speed = "?" if line.bytes_per_s is None else f"{units.size(line.bytes_per_s)}/s"
        what, size = line.entry.what, units.size(line.entry.bytes)
        rows.append([took, exposed, share, what, size, speed, paths.here(line.entry.place)])
    return rows


def _json(line: Line) -> dict[str, Any]:
    timing = line.timing
    return {
        "program": line.program,
        "instruction": line.verdict.collective.name,
        "what": line.entry.what,
        "verdict": line.verdict.verdict,
        "finding": line.finding and line.finding.kind,
        "advice": line.finding and line.finding.advice,
        "bytes": line.entry.bytes,
        "wire_bytes": line.entry.wire_bytes,
        "source": line.entry.source,
        "seconds": line.seconds if timing else None,
        "exposed_seconds": line.exposed_seconds if timing else None,
        "fastest_seconds": timing.fastest_seconds if timing else None,
        "runs": timing.runs if timing else None,
        "bytes_per_s": line.bytes_per_s,
        "avoidable_seconds": line.avoidable_seconds,
        "slowest_device": timing.device if timing else None,
        "fastest_device": timing.fastest_device if timing else None,
    }
