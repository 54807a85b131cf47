"""Measure how long each collective took in a step, and how long nothing else ran beside it."""

from __future__ import annotations

import bisect
import collections
import itertools
import re
import statistics
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from shardrules import hlo
from shardrules.costs.timings import Timing, Timings
from shardrules.hlo.proof.collectives import KINDS
from shardrules.watching.profiles.events import UNKNOWN_RUN, Events, Timeline
from shardrules.watching.profiles.wire import WireProgram

# Operations that hide no collective: collectives themselves, and loops and branches, whose inner
# operations have their own events.
_HIDES_NOTHING = re.compile(rf"while|conditional|call|{'|'.join(KINDS)}|.*-(start|done)")
# A profile has events for these instructions, but not for the operations that they call.
_INSIDE = ("fusion", "async-start", "call")
_STEM = re.compile(r"[^a-z-]")  # ends an opcode in an operation's name
_BUSY = 2000  # the most intervals that are drawn; the shortest gaps are closed first


class Times:
    """When the programs of a profile ran, and how long their collectives took in a step."""

    def __init__(self, seen: Events, judged: Mapping[WireProgram, hlo.Judgement]):
        self._seen = seen
        self._sites = {program: sites(judgement) for program, judgement in judged.items()}
        hosts = {device: device.partition(" ")[0] for device, _ in seen.timelines}
        # If the script marks no steps, the steps are the runs of the longest program.
        self.marked = all(seen.markers.get(host) for host in hosts.values())
        self.markers = {  # start and end of each step, by device
            device: sorted(seen.markers[host]) if self.marked else self._longest_runs(device)
            for device, host in hosts.items()
        }
        self.step_seconds = max(map(_step_seconds, self.markers.values()))
        self._covered = self._cover(judged)

    def _longest_runs(self, device: str) -> list[tuple[float, float]]:
        runs = [
            list(timeline.spans().values())
            for (other, _), timeline in self._seen.timelines.items()
            if other == device
        ]
        return max(runs, key=lambda spans: sum(end - start for start, end in spans))

    def _cover(self, judged: Mapping[WireProgram, hlo.Judgement]) -> dict[str, Covered]:
        """Map each device to the times of operations that hide collectives."""
        # If a program couldn't be judged, its opcodes are unknown: guess them from the names of its
        # operations, which begin with the opcode.
        numbers, parts = self._seen.numbers, collections.defaultdict(list)
        for (device, program), timeline in self._seen.timelines.items():
            if program in judged:
                opcodes: dict[str, str] = {}
                for computation in judged[program].module.computations.values():
                    opcodes.update((i.name, i.opcode) for i in computation.instructions)
            else:
                opcodes = {name: _STEM.split(name, maxsplit=1)[0] for name in numbers}
            starts = {site.first for site in self._sites.get(program, {}).values()}
            idle = [
                number
                for name, number in numbers.items()
                if name in starts or _HIDES_NOTHING.fullmatch(opcodes.get(name, ""))
            ]
            ran = timeline.ran()
            busy = ~np.isin(ran.operation, idle)
            parts[device].append((ran.start[busy], ran.end[busy]))
        return {
            device: Covered(*map(np.concatenate, zip(*pairs))) for device, pairs in parts.items()
        }

    def taken(self, program: WireProgram, verdicts: Sequence[hlo.Verdict]) -> Timings:
        """Return the time of each of a program's verdicts, and a step of its slowest device."""
        names = [verdict.collective.name for verdict in verdicts]
        timelines = {d: line for (d, p), line in self._seen.timelines.items() if p is program}
        ran = {}
        for device, timeline in timelines.items():
            starts = [start for start, _ in self.markers[device]]
            ran[device] = executions(timeline, self._seen.numbers, starts, self._sites[program])
        step_counts = {device: len(marks) for device, marks in self.markers.items()}
        took = measure(ran, step_counts, self._covered)
        whole: collections.Counter[str] = collections.Counter()
        for name, verdict in zip(names, verdicts):
            whole[name] += verdict.bytes
        parts: list[Timing | None] = []
        for name, verdict in zip(names, verdicts):
            timing = took.get(name)
            share = verdict.bytes / whole[name] if whole[name] else 1.0
            parts.append(timing and timing.part(share))
        each = tuple(parts)
        if not took:
            return Timings(self.step_seconds, each)
        exposed: collections.Counter[str] = collections.Counter()
        for timing in took.values():
            exposed[timing.device] += timing.exposed_seconds  # type: ignore[assignment]
        device = max(exposed, key=lambda name: exposed[name])
        numbers = {name: names.index(name) for name in names}
        shown, busy = self._drawn(device, numbers, ran[device], timelines[device].spans())
        return Timings(self.step_seconds, each, device, shown, busy)

    def _drawn(
        self,
        device: str,
        numbers: Mapping[str, int],
        ran: Mapping[str, Executions],
        spans: Mapping[int, tuple[float, float]],
    ) -> tuple[tuple[tuple[int, float, float], ...], tuple[tuple[float, float], ...]]:
        """Return a device's collectives in a median step, and when it ran anything else."""
        # Choose the step whose collectives take the median time in all.
        start, end, steps = map(np.concatenate, zip(*ran.values()))
        seen_steps, at = np.unique(steps, return_inverse=True)
        order = np.argsort(np.bincount(at, end - start), kind="stable")
        middle = seen_steps[order[len(seen_steps) // 2]]
        shown: list[tuple[float, float, int]] = []
        for name, (starts, ends, steps) in ran.items():
            here = steps == middle
            for start, end in zip(starts[here].tolist(), ends[here].tolist()):
                shown.append((start, end, numbers[name]))
        shown.sort()
        # Devices lag behind the host. So the host's markers show how long a step is, but not when
        # it begins on a device. So draw from the start of the program's runs to their end, if
        # these are known.
        begin, last = shown[0][0], max(end for _, end, _ in shown)
        if UNKNOWN_RUN not in spans:
            around = [(a, b) for a, b in spans.values() if a < last and b > begin]
            begin = min([begin, *(a for a, _ in around)])
            last = max([last, *(b for _, b in around)])
        in_seconds = tuple((n, (a - begin) / 1e9, (b - begin) / 1e9) for a, b, n in shown)
        return in_seconds, self._covered[device].drawn(begin, last, _BUSY)


class ProfiledSite(NamedTuple):
    """The operations by which a profile shows one collective."""

    first: str  # the collective, or the operation that starts it
    done: str | None  # the operation that waits for its end, if there is one


def sites(judgement: hlo.Judgement) -> dict[str, ProfiledSite]:
    """Map each collective's name to the operations by which a profile shows the collective."""
    callers: dict[str, Any] = {}
    users: dict[str, str] = {}
    for computation in judgement.module.computations.values():
        for position in computation.calling:
            caller = computation.instructions[position]
            if caller.opcode in _INSIDE:
                callers.update(dict.fromkeys(caller.calls, (caller, computation)))
        for instruction in computation.instructions:
            if instruction.opcode.endswith("-done") and instruction.operands:
                started = computation.instructions[instruction.operands[0]].name
                users[started] = instruction.name
    result = {}
    for collective in (verdict.collective for verdict in judgement.verdicts):
        name, inside = collective.name, collective.computation
        while inside in callers:
            caller, around = callers[inside]
            name, inside = caller.name, around.name
        result[collective.name] = ProfiledSite(name, users.get(name))
    return result


def steps_of(starts: Sequence[float], markers: Sequence[float]) -> list[int]:
    """Return the step of each run of a program, given the starts of runs and steps, in order."""
    # If all steps can have equally many runs, assign the runs in order. Devices lag behind the
    # host, so use the clock only if that isn't possible.
    if starts and markers and len(starts) % len(markers) == 0:
        return [number * len(markers) // len(starts) for number in range(len(starts))]
    return [max(bisect.bisect_right(markers, start) - 1, 0) for start in starts]


def _step_seconds(markers: Sequence[tuple[float, float]]) -> float:
    # Measure from a step's start to the next step's start; for the last step, to its end.
    starts = [start for start, _ in markers]
    took = [after - before for before, after in itertools.pairwise(starts)]
    return statistics.median([*took, markers[-1][1] - markers[-1][0]]) / 1e9


class Executions(NamedTuple):
    """All executions of one collective on one device: when, and in which step."""

    start: np.ndarray
    end: np.ndarray
    step: np.ndarray


def executions(
    timeline: Timeline,
    numbers: Mapping[str, int],
    markers: Sequence[float],
    of: Mapping[str, ProfiledSite],
) -> dict[str, Executions]:
    """Return the executions of each collective on a device, from its start to its end."""
    ran = timeline.ran()
    spans = timeline.spans()
    step = dict(zip(spans, steps_of([start for start, _ in spans.values()], markers)))
    result = {}
    for name, site in of.items():
        first, last = (_rows(ran, numbers.get(operation or "", -1)) for operation in site)
        if not len(first):
            continue
        start, end = ran.start[first], ran.end[first]
        if len(first) == len(last):  # if not (on a GPU), the start's kernel is the whole collective
            end = np.maximum(end, ran.end[last])
        runs = ran.run[first]
        if np.any(runs == UNKNOWN_RUN):
            steps = steps_of(start.tolist(), markers)
        else:
            steps = [step[run] for run in runs.tolist()]
        result[name] = Executions(start, end, np.array(steps))
    return result


def _rows(ran: Any, number: int) -> np.ndarray:
    """Return the rows of an operation's executions, in the order of their starts."""
    rows = np.flatnonzero(ran.operation == number)
    return rows[np.argsort(ran.start[rows], kind="stable")]


def measure(
    ran: Mapping[str, Mapping[str, Executions]],
    step_counts: Mapping[str, int],
    covered: Mapping[str, Covered],
) -> dict[str, Timing]:
    """Return the time of each collective of a program in a step; arguments are keyed by device."""
    # On each device, take the median over steps. Report the slowest and the fastest device.
    of_device: dict[str, list[tuple[float, float, float, str]]] = {}
    for device, collectives in ran.items():
        count = max(step_counts[device], 1)
        for name, (start, end, step) in collectives.items():
            took, exposed = (
                float(np.median(np.bincount(step, seconds, count)[:count])) / 1e9
                for seconds in (end - start, end - start - covered[device].within(start, end))
            )
            of_device.setdefault(name, []).append((took, exposed, len(start) / count, device))
    result = {}
    for name, medians in of_device.items():
        (took, exposed, runs, device), fastest = max(medians), min(medians)
        result[name] = Timing(took, exposed, fastest[0], runs, device, fastest[3])
    return result


class Covered:
    """The union of intervals that may overlap, to measure how much of a window it covers."""

    def __init__(self, start: np.ndarray, end: np.ndarray):
        # Sort by start. A new interval of the union begins where an interval starts after the
        # latest end so far.
        order = np.argsort(start, kind="stable")
        start, latest = start[order], np.maximum.accumulate(end[order])
        apart = np.flatnonzero(np.append(True, start[1:] > latest[:-1])[: len(start)])
        self.starts: np.ndarray = start[apart]
        self.ends: np.ndarray = latest[np.append(apart[1:], len(start))[: len(apart)] - 1]
        self._before = np.append(0.0, np.cumsum(self.ends - self.starts))

    def within(self, start: np.ndarray, end: np.ndarray) -> np.ndarray:
        """Return the covered time of each window."""
        between: np.ndarray = self._until(end) - self._until(start)
        return between

    def drawn(self, begin: float, last: float, most: int) -> tuple[tuple[float, float], ...]:
        """Return at most ``most`` intervals between two times, in seconds after the first."""
        inside = (self.ends > begin) & (self.starts < last)
        starts, ends = self.starts[inside], self.ends[inside]
        if len(starts) > most:
            cuts = np.sort(np.argsort(starts[1:] - ends[:-1])[-(most - 1) :])
            starts, ends = starts[np.append(0, cuts + 1)], ends[np.append(cuts, -1)]
        starts, ends = np.maximum(starts - begin, 0) / 1e9, (np.minimum(ends, last) - begin) / 1e9
        return tuple(zip(starts.tolist(), ends.tolist()))

    def _until(self, time: np.ndarray) -> np.ndarray:
        if not len(self.starts):
            return np.zeros(len(time))
        at = np.searchsorted(self.starts, time, side="right")
        last = np.maximum(at - 1, 0)
        part = np.minimum(time, self.ends[last]) - self.starts[last]
        return np.where(at > 0, self._before[last] + part, 0.0)
