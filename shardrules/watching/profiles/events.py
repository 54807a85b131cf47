"""Read a profile's events: which operation ran where and when.

This module understands three kinds of planes that XLA's profilers write (for names and stats see
xla/tsl/profiler/utils/xplane_schema.cc):

- CPU devices: events of the host's plane with the stats ``hlo_op``, ``hlo_module``,
  ``program_id``, ``run_id`` and ``device_ordinal``.
- GPUs: the planes ``/device:GPU:N``, whose kernels carry ``hlo_op`` and ``hlo_module``.
- TPUs: the planes ``/device:TPU:N``. The line ``XLA Modules`` holds an event for each run of a
  program, ``XLA Ops`` (and ``Async XLA Ops``) one for each operation, named by its HLO.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from shardrules.watching.profiles import wire

UNKNOWN_RUN = np.iinfo(np.int64).min
_HOST = "/host:CPU"
_DEVICE = re.compile(r"/device:(TPU|GPU):\d+")
_OPERATION = re.compile(r"%?([^\s=]+)(?: = |$)")  # %all-reduce.1 = f32[8] all-reduce(...
# jax.profiler.StepTraceAnnotation writes the last one.
_STATS = ("hlo_op", "hlo_module", "program_id", "run_id", "device_ordinal", "step_num")


class Ran(NamedTuple):
    """Executions of operations."""

    operation: np.ndarray  # a number in Events.numbers
    start: np.ndarray  # in nanoseconds
    end: np.ndarray
    run: np.ndarray  # the number of the program's run; UNKNOWN_RUN if the profile doesn't say


class Timeline:
    """The operations that one device ran of one program; ``windows`` holds the runs, if known."""

    def __init__(self) -> None:
        self.parts: list[Ran] = []
        self.windows: dict[int, tuple[float, float]] = {}

    def ran(self) -> Ran:
        if len(self.parts) > 1:
            self.parts = [Ran(*map(np.concatenate, zip(*self.parts)))]
        return self.parts[0]

    def spans(self) -> dict[int, tuple[float, float]]:
        """Return first start and last end of each run of the program, in order of their starts."""
        ran = self.ran()
        runs, of = np.unique(ran.run, return_inverse=True)
        first, last = np.full(len(runs), np.inf), np.full(len(runs), -np.inf)
        np.minimum.at(first, of, ran.start)
        np.maximum.at(last, of, ran.end)
        spans = {}
        for run, start, end in zip(runs.tolist(), first.tolist(), last.tolist()):
            window = self.windows.get(run, (start, end))
            spans[run] = min(start, window[0]), max(end, window[1])
        return dict(sorted(spans.items(), key=lambda item: item[1]))


class Events:
    """The events of one profile, of one or several hosts."""

    def __init__(self) -> None:
        self._origin: int | None = None
        self._programs: list[wire.WireProgram] = []  # the programs of the host that is being read
        # Keyed by device and program; a program without HLO in the profile has no proto.
        self.timelines: dict[tuple[str, wire.WireProgram], Timeline] = {}
        self.numbers: dict[str, int] = {}  # maps an operation's name to its number
        # Start and end of each step, by the host that marked it.
        self.markers: dict[str, list[tuple[float, float]]] = {}
        # The planes that could be read, with the number of their operations.
        self.planes: dict[str, int] = {}

    def read(self, data: memoryview, host: str) -> None:
        """Add the events of one host's serialized XSpace."""
        planes = [wire.Plane(plane) for plane in wire.messages(data, wire.PLANES)]
        self._programs = []
        for plane in planes:
            if plane.name == wire.PROGRAMS:
                self._programs += plane.programs()
        for plane in planes:
            device = _DEVICE.fullmatch(plane.name)
            if device and device[1] == "TPU":
                count = self._tpu(plane, host)
            elif device or plane.name == _HOST:
                count = 0
                for line in plane.lines():
                    for batch in self._batches(line, _STATS):
                        count += self._by_stats(plane, batch, host)
            else:
                continue
            if count:
                name = f"{host} {plane.name}"
                self.planes[name] = self.planes.get(name, 0) + count

    def operations(self, program: wire.WireProgram) -> set[str]:
        """Return the names of a program's operations that ran."""
        names, ran = list(self.numbers), set[str]()
        for (_, other), timeline in self.timelines.items():
            if other is program:
                ran.update(names[number] for number in np.unique(timeline.ran().operation))
        return ran

    def merge(self, into: dict[wire.WireProgram, wire.WireProgram]) -> None:
        """Count one program's operations as another program's."""
        for (device, program), timeline in list(self.timelines.items()):
            if (other := into.get(program, program)) is not program:
                del self.timelines[device, program]
                merged = self.timelines.setdefault((device, other), Timeline())
                merged.parts += timeline.parts
                merged.windows |= timeline.windows

    def _by_stats(self, plane: wire.Plane, batch: wire.Batch, host: str) -> int:
        op, module, number, run, ordinal, step = batch.stats
        of_host = plane.name == _HOST
        if of_host:
            marks = np.flatnonzero(step[0] & ~op[0])
            self.markers.setdefault(host, []).extend(_times(batch, marks))
        where = np.flatnonzero(op[0])
        runs = np.where(run[0], run[1], UNKNOWN_RUN)
        keys = np.stack([module[1], number[1], ordinal[1]], 1)[where]
        for key in np.unique(keys, axis=0):
            rows = where[(keys == key).all(1)]
            device = f"CPU {key[2]}" if of_host else plane.name
            program = self._program(plane.texts.get(int(key[0]), ""), int(key[1]))
            codes = self._codes(op[1][rows], plane.texts)
            timeline = self._timeline(f"{host} {device}", program)
            timeline.parts.append(Ran(codes, batch.start[rows], batch.end[rows], runs[rows]))
        return len(where)

    def _tpu(self, plane: wire.Plane, host: str) -> int:
        # Read the runs of programs first. An operation's event doesn't name its program, so assign
        # it to the last run that started before it.
        lines = {line.name: line for line in plane.lines()}
        runs: list[tuple[float, float, str]] = []
        for batch in self._batches(lines.get("XLA Modules")):
            for (start, end), number in zip(_times(batch), batch.name.tolist()):
                runs.append((start, end, plane.events.get(number, "")))
        runs.sort()
        starts = np.array([start for start, _, _ in runs])
        matches = {event: _OPERATION.match(name) for event, name in plane.events.items()}
        names = {event: match[1] for event, match in matches.items() if match}
        count, seen = 0, np.array([], np.int64)
        for line_name in ("XLA Ops", "Async XLA Ops"):
            of_line = [seen]
            for batch in self._batches(lines.get(line_name)):
                codes = self._codes(batch.name, names)
                at = np.searchsorted(starts, batch.start, side="right") - 1
                # Skip operations that an earlier line holds, since the second line repeats them.
                kept = (at >= 0) & (codes >= 0) & ~np.isin(codes, seen)
                of_line.append(np.unique(codes[kept]))
                count += int(kept.sum())
                for run in np.unique(at[kept]).tolist():
                    rows = np.flatnonzero(kept & (at == run))
                    start, end, title = runs[run]
                    program = self._program(*wire.read_title(title))
                    timeline = self._timeline(f"{host} {plane.name}", program)
                    timeline.windows[run] = start, end
                    timeline.parts.append(
                        Ran(codes[rows], batch.start[rows], batch.end[rows], at[rows])
                    )
            seen = np.concatenate(of_line)
        if "Steps" in lines and host not in self.markers:
            marks = map(_times, self._batches(lines["Steps"]))
            self.markers[host] = list(itertools.chain.from_iterable(marks))
        return count

    def _batches(
        self, line: wire.WireLine | None, stats: Sequence[str] = ()
    ) -> Iterator[wire.Batch]:
        """Yield a line's events, with times relative to the start of the first line read."""
        if line is not None:
            if self._origin is None:
                self._origin = line.start_ns
            yield from line.batches(self._origin, stats)

    def _program(self, name: str, number: int) -> wire.WireProgram:
        """Return the host's program with this name and id, or its only program with this name."""
        named = [program for program in self._programs if program.name == name]
        fitting = [p for p in named if number == p.number][-1:] or [p for p in named if p.proto]
        if len(fitting) != 1:
            fitting = [wire.WireProgram(name, number, b"")]
            self._programs += fitting
        return fitting[0]

    def _timeline(self, device: str, program: wire.WireProgram) -> Timeline:
        return self.timelines.setdefault((device, program), Timeline())

    def _codes(self, column: np.ndarray, names: dict[int, str]) -> np.ndarray:
        """Map a plane's numbers of names to numbers of operations; -1 for other names."""
        distinct, positions = np.unique(column, return_inverse=True)
        codes = [
            self.numbers.setdefault(names[number], len(self.numbers)) if number in names else -1
            for number in distinct.tolist()
        ]
        return np.array(codes, np.int64)[positions]


def _times(batch: wire.Batch, rows: Any = slice(None)) -> list[tuple[float, float]]:
    """Return start and end of the events in some rows, by default in all."""
    return list(zip(batch.start[rows].tolist(), batch.end[rows].tolist()))
