"""Which operation ran where and when: the events of a profile's planes.

Three kinds of planes are understood, as XLA's profilers write them (names and stats are those of
xla/tsl/profiler/utils/xplane_schema.cc):

- CPU devices: events of the host's plane with the stats ``hlo_op``, ``hlo_module``,
  ``program_id``, ``run_id`` and ``device_ordinal``.
- GPUs: the planes ``/device:GPU:N``, whose kernels carry ``hlo_op`` and ``hlo_module``.
- TPUs: the planes ``/device:TPU:N``; in the line ``XLA Modules`` an event for each run of a
  program, in ``XLA Ops`` (and ``Async XLA Ops``) one for each operation, named by its HLO.
"""

from __future__ import annotations

import array
import bisect
import collections
import dataclasses
import re
from collections.abc import Iterable
from typing import Any, NamedTuple

from shardrules.watching.profiles.wire import Program

__all__ = ["Events", "Run", "Timeline"]

_DEVICE = re.compile(r"/device:(TPU|GPU):\d+")
_OPERATION = re.compile(r"%?([^\s=]+)(?: = |$)")  # %all-reduce.1 = f32[8] all-reduce(...
_MODULE = re.compile(r"(.*)\((\d+)\)")
_STEP = "step_num"  # of jax.profiler.StepTraceAnnotation
# Named by the Python function that was called; only step markers among them say anything here.
_PYTHON_CALL = "$"


class Run(NamedTuple):
    """One execution of an operation, in nanoseconds, and the run of the program it was part of.

    Attributes:
      start, end: in nanoseconds.
      run: equal for operations of one run of the program; None where the profile doesn't say.
    """

    start: float
    end: float
    run: Any


@dataclasses.dataclass
class Timeline:
    """What one device did for one program.

    Attributes:
      wanted: the executions of each operation that was asked for.
      spans: from each run of the program to its first start and last end.
      busy: starts and ends of what else ran, in turns.
    """

    wanted: dict[str, list[Run]] = dataclasses.field(
        default_factory=lambda: collections.defaultdict(list)
    )
    spans: dict[Any, tuple[float, float]] = dataclasses.field(default_factory=dict)
    busy: array.array = dataclasses.field(default_factory=lambda: array.array("d"))

    def add(
        self,
        operation: str,
        run: Run,
        wanted: bool,
        covers: bool,
        span: tuple[float, float] | None = None,
    ) -> None:
        """Add one execution.

        Args:
          operation: the instruction's name.
          run: when it ran.
          wanted: whether it was asked for.
          covers: whether it hides a collective that runs at the same time.
          span: when the program's run began and ended, where the profile says so.
        """
        first, last = self.spans.get(run.run, span or (run.start, run.end))
        self.spans[run.run] = min(first, run.start), max(last, run.end)
        if wanted:
            self.wanted[operation].append(run)
        if covers:
            self.busy.extend((run.start, run.end))


class Events:
    """The events of one profile, of one or several hosts.

    Args:
      programs: those that are judged, with the operations asked for and those that hide nothing.

    Attributes:
      timelines: by device and program.
      markers: when each step began and ended, as the host marked it; of each host.
      planes: the planes that were understood, with how many events of operations they held.
      unknown: names of programs that ran and are not among those that are judged.
    """

    def __init__(self, programs: Iterable[tuple[Program, frozenset[str], frozenset[str]]]):
        self._wanted = {program: (wanted, idle) for program, wanted, idle in programs}
        self._by_id = {number: p for p in self._wanted for number in p.ids}
        names = collections.Counter(p.name for p in self._wanted)
        self._by_name = {p.name: p for p in self._wanted if names[p.name] == 1}
        self.timelines: dict[tuple[str, Program], Timeline] = {}
        self.markers: dict[str, list[tuple[float, float]]] = {}
        self.planes: dict[str, int] = {}
        self.unknown: set[str] = set()

    def read(self, profile: Any, host: str) -> None:
        """Add the events of one host's profile.

        Args:
          profile: a ``jax.profiler.ProfileData``.
          host: its name, which tells its devices from those of others.
        """
        for plane in profile.planes:
            device = _DEVICE.fullmatch(plane.name)
            if device and device[1] == "TPU":
                count = self._tpu(plane, host)
            elif device or plane.name == "/host:CPU":
                count = self._by_stats(plane, host)
            else:
                continue
            if count:
                name = f"{host} {plane.name}"
                self.planes[name] = self.planes.get(name, 0) + count

    def _by_stats(self, plane: Any, host: str) -> int:
        count = 0
        of_host = plane.name == "/host:CPU"
        for line in plane.lines:
            for event in line.events:
                if event.name.startswith(_PYTHON_CALL):
                    continue
                stats = dict(event.stats)
                operation = stats.get("hlo_op")
                if operation is None:
                    if of_host and _STEP in stats:
                        end = event.start_ns + event.duration_ns
                        self.markers.setdefault(host, []).append((event.start_ns, end))
                    continue
                name = plane.name
                if of_host:
                    name = f"CPU {stats.get('device_ordinal', 0)}"
                module, number = stats.get("hlo_module", ""), stats.get("program_id")
                run = Run(event.start_ns, event.start_ns + event.duration_ns, stats.get("run_id"))
                count += self._add(f"{host} {name}", module, number, operation, run)
        return count

    def _tpu(self, plane: Any, host: str) -> int:
        lines = {line.name: line for line in plane.lines}
        windows = []
        for event in lines["XLA Modules"].events if "XLA Modules" in lines else ():
            known = _MODULE.fullmatch(event.name)
            name, number = (known[1], int(known[2])) if known else (event.name, None)
            windows.append((event.start_ns, event.start_ns + event.duration_ns, name, number))
        windows.sort()
        starts = [window[0] for window in windows]
        count, seen = 0, set()
        for line_name in ("XLA Ops", "Async XLA Ops"):
            of_line = set()
            for event in lines[line_name].events if line_name in lines else ():
                found = _OPERATION.match(event.name)
                at = bisect.bisect_right(starts, event.start_ns) - 1
                if found is None or at < 0 or found[1] in seen:
                    continue  # the second line tells again of what the first one holds
                of_line.add(found[1])
                run = Run(event.start_ns, event.start_ns + event.duration_ns, at)
                start, end, name, number = windows[at]
                device = f"{host} {plane.name}"
                count += self._add(device, name, number, found[1], run, (start, end))
            seen |= of_line
        if "Steps" in lines and host not in self.markers:
            self.markers[host] = [
                (event.start_ns, event.start_ns + event.duration_ns)
                for event in lines["Steps"].events
            ]
        return count

    def _add(
        self, device: str, name: str, number: Any, operation: str, run: Run, span: Any = None
    ) -> int:
        program = self._by_id.get(number) or self._by_name.get(name)
        if program is None or program.name != name:
            self.unknown.add(name)
            return 1
        wanted, idle = self._wanted[program]
        timeline = self.timelines.setdefault((device, program), Timeline())
        timeline.add(operation, run, operation in wanted, operation not in idle, span)
        return 1
