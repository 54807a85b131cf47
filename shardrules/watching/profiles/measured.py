"""How long each collective took in a step, and how much of that nothing else covered."""

from __future__ import annotations

import bisect
import collections
import itertools
import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from shardrules import hlo
from shardrules.watching.profiles.events import Run, Timeline

__all__ = ["Measured", "Site", "covering_nothing", "measure", "sites", "step_seconds", "steps_of"]

# These run other operations, which have events of their own.
_CONTAINERS = {"while", "conditional", "call"}
_INSIDE = ("fusion", "async-start", "call")  # an event of theirs is that of what they call


class Site(NamedTuple):
    """The operations by which a profile names one collective.

    Attributes:
      first: whose events are the collective's, or its start's.
      done: the operation that waits for its end; None where ``first`` does.
    """

    first: str
    done: str | None


class Measured(NamedTuple):
    """What one collective took in a step.

    Attributes:
      seconds: the median over steps, on the slowest device.
      exposed_seconds: the part of it in which that device did nothing else.
      fastest_seconds: the same median on the fastest device.
      runs: how often it ran, on one device in one step.
    """

    seconds: float
    exposed_seconds: float
    fastest_seconds: float
    runs: float


def sites(module: hlo.Module, collectives: Iterable[hlo.Collective]) -> dict[str, Site]:
    """Return, by a collective's name, the operations that a profile has events of."""
    callers: dict[str, Any] = {}
    users: dict[str, str] = {}
    for computation in module.computations.values():
        for position in computation.calling:
            caller = computation.instructions[position]
            if caller.opcode in _INSIDE:
                callers.update(dict.fromkeys(caller.calls, (caller, computation)))
        for instruction in computation.instructions:
            if instruction.opcode.endswith("-done") and instruction.operands:
                started = computation.instructions[instruction.operands[0]].name
                users[started] = instruction.name
    found = {}
    for one in collectives:
        name, inside = one.name, one.computation
        while inside in callers:
            caller, around = callers[inside]
            name, inside = caller.name, around.name
        found[one.name] = Site(name, users.get(name))
    return found


def covering_nothing(module: hlo.Module, of: Mapping[str, Site]) -> frozenset[str]:
    """Return the operations that hide no collective: loops and branches, starts and ends."""
    names = {
        instruction.name
        for computation in module.computations.values()
        for instruction in computation.instructions
        if instruction.opcode in _CONTAINERS or instruction.opcode.endswith(("-start", "-done"))
    }
    return frozenset(names) | {site.first for site in of.values()}


def steps_of(starts: Sequence[float], markers: Sequence[float]) -> list[int]:
    """Return the step of each run of a program.

    Devices lag behind the host: where each step has as many runs, they are counted, and only
    otherwise the clock decides.

    Args:
      starts: of the runs, in order.
      markers: when the steps began, in order.
    """
    if starts and markers and len(starts) % len(markers) == 0:
        return [number * len(markers) // len(starts) for number in range(len(starts))]
    return [max(bisect.bisect_right(markers, start) - 1, 0) for start in starts]


def step_seconds(markers: Sequence[tuple[float, float]]) -> float:
    """Return the median time from a step's start to the next one's; of the last, to its end."""
    starts = [start for start, _ in markers]
    took = [after - before for before, after in itertools.pairwise(starts)]
    return statistics.median([*took, markers[-1][1] - markers[-1][0]]) / 1e9


def measure(
    timelines: Mapping[str, Timeline],
    markers: Mapping[str, Sequence[float]],
    of: Mapping[str, Site],
) -> dict[str, Measured]:
    """Return what each collective took in a step.

    Args:
      timelines: of one program, by device.
      markers: when the steps began, by device.
      of: the collectives' sites.
    """
    found = {}
    covered = {device: _Covered(timeline.busy) for device, timeline in timelines.items()}
    for name, site in of.items():
        of_device = {}
        for device, timeline in timelines.items():
            runs = _executions(timeline, site)
            if runs:
                step_count = max(len(markers[device]), 1)
                of_device[device] = _medians(
                    runs, _steps(timeline, site, runs, markers[device]), covered[device], step_count
                )
        if of_device:
            slowest = max(of_device.values())
            fastest = min(of_device.values())
            found[name] = Measured(slowest[0], slowest[1], fastest[0], slowest[2])
    return found


def _executions(timeline: Timeline, site: Site) -> list[Run]:
    """Return each execution of a collective, from its start to its end."""
    first = sorted(timeline.wanted.get(site.first, ()))
    last = sorted(timeline.wanted.get(site.done or "", ()))
    if len(first) != len(last):  # on a GPU, the start's kernel is the whole of it
        return first
    return [Run(a.start, max(a.end, b.end), a.run) for a, b in zip(first, last)]


def _steps(timeline: Timeline, site: Site, runs: list[Run], markers: Sequence[float]) -> list[int]:
    """Return the step of each execution."""
    if all(run.run is not None for run in runs):
        keys = sorted(timeline.spans, key=lambda key: timeline.spans[key])
        starts = [timeline.spans[key][0] for key in keys]
        step = dict(zip(keys, steps_of(starts, markers)))
        return [step[run.run] for run in runs]
    return steps_of([run.start for run in runs], markers)


def _medians(
    runs: list[Run], steps: list[int], covered: _Covered, step_count: int
) -> tuple[float, float, float]:
    """Return the median over steps of the seconds, the exposed ones, and the count of runs."""
    took: dict[int, float] = collections.defaultdict(float)
    exposed: dict[int, float] = collections.defaultdict(float)
    for run, step in zip(runs, steps):
        took[step] += run.end - run.start
        exposed[step] += run.end - run.start - covered.within(run.start, run.end)
    known = range(step_count)
    return (
        statistics.median(took[step] for step in known) / 1e9,
        statistics.median(exposed[step] for step in known) / 1e9,
        len(runs) / step_count,
    )


class _Covered:
    """How long anything ran within a window.

    Args:
      busy: starts and ends of executions, in turns, which may overlap.
    """

    def __init__(self, busy: Sequence[float]):
        self._starts: list[float] = []
        self._ends: list[float] = []
        for start, end in sorted(zip(busy[::2], busy[1::2])):
            if self._ends and start <= self._ends[-1]:
                self._ends[-1] = max(self._ends[-1], end)
            else:
                self._starts.append(start)
                self._ends.append(end)
        lengths = (end - start for start, end in zip(self._starts, self._ends))
        self._before = [0.0, *itertools.accumulate(lengths)]

    def within(self, start: float, end: float) -> float:
        """Return the covered part of a window."""
        return self._until(end) - self._until(start)

    def _until(self, time: float) -> float:
        at = bisect.bisect_right(self._starts, time)
        if not at:
            return 0.0
        return self._before[at - 1] + min(time, self._ends[at - 1]) - self._starts[at - 1]
