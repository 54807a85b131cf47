"""A profile's programs, judged: verdicts with milliseconds, the costliest first."""

from __future__ import annotations

import collections
import contextlib
import mmap
import pathlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from shardrules import hlo, report
from shardrules.arguments import checked
from shardrules.costs import findings, timings
from shardrules.errors import HloError, ProfileError, ShardrulesError
from shardrules.hlo.reader import annotate
from shardrules.watching.profiles import dumps, events, measured, wire
from shardrules.watching.profiles.shown import Profile, ProfiledProgram

if TYPE_CHECKING:
    from shardrules.watching.programs import Watched, WatchedProgram

_FILES = "*.xplane.pb"
_KEPT = "*.hlo"  # programs that run --keep wrote beside the profile
_HOW = "run some steps inside of `with jax.profiler.trace(DIR):`"
_NO_HLO = (
    "the profile holds no HLO of it: leave enable_hlo_proto = True of jax.profiler.ProfileOptions, "
    "or pass a folder that XLA_FLAGS='--xla_dump_to=DIR --xla_dump_hlo_as_text' wrote as --hlo DIR "
    "(hlo=)"
)
_NO_OPERATIONS = (
    "it holds no operation of a CPU, GPU or TPU device: in jax.profiler.ProfileOptions leave "
    "host_tracer_level (for CPU) and device_tracer_level (for GPU and TPU) at 1 or more, and let "
    f"whole steps end before the trace does (block_until_ready): {_HOW}"
)
_TOGETHER = 10  # seconds within which hosts write the files of one trace
_BUSY = 2000  # intervals that are drawn; shorter gaps are closed first

# From a program and its HLO text to its judgement.
Judge = Callable[[wire.Program, str], hlo.Judgement]


@checked
def profile(
    path: str | pathlib.Path,
    *,
    mesh: Mapping[str, int] | None = None,
    hlo: str | pathlib.Path | None = None,
    strict: bool = False,
    allow: Mapping[str, str] | None = None,
    registry: Any = None,
) -> Profile:
    """Judge the programs of a profile, and say what each collective took.

    Args:
      path: a folder in which ``jax.profiler.trace`` wrote, or one of its ``.xplane.pb`` files. Of
        several traces in a folder, the last one is read.
      mesh: axis names and sizes in the order of the devices; a profile holds none.
      hlo: a folder of ``--xla_dump_to`` or ``run --keep``, for programs whose HLO or mesh the
        profile lacks; the path itself if it holds any.
      strict: accept proofs alone: verdicts that rest on declared rules are findings too.
      allow: known findings, with their reasons.
      registry: rules for custom calls that carry no tag; the default registry if None.

    Returns:
      The verdicts with their times; ``print`` it.

    Raises:
      ProfileError: there is no profile, it can't be read, or it lacks what verdicts take.

    Examples:
      >>> print(shardrules.profile("/tmp/trace"))  # doctest: +SKIP
      avoidable: 3.1 ms of 41.0 ms a step (7.6%)
    """
    notes: list[str] = []
    judge = judging(mesh, registry, notes)
    return read(path, judge, folder=hlo, notes=notes, strict=strict, allow=allow)


def read(
    path: str | pathlib.Path,
    judge: Judge,
    *,
    folder: str | pathlib.Path | None = None,
    dumped: dumps.Dumps | None = None,
    notes: list[str] | None = None,
    source: str = "",
    **options: Any,
) -> Profile:
    """Read a profile's programs and times, and put each program's judgement beside them."""
    # ``folder`` or ``dumped`` has HLO that the profile lacks; an HloError of ``judge`` becomes one
    # of the ``notes``; ``options`` are those of ``report.content``, with ``allow`` as a mapping.
    notes = [] if notes is None else notes
    if folder is None and dumped is None and next(pathlib.Path(path).glob(_KEPT), None) is not None:
        folder = path
    seen = events.Events()
    for file in _files(pathlib.Path(path)):
        with _mapped(file) as data:
            seen.read(data, file.name.removesuffix(".xplane.pb"), list(wire.programs(data)))
    if not seen.timelines:
        raise ProfileError(f"{path}: {_NO_OPERATIONS}")
    if folder is not None:
        dumped = dumps.Dumps.of_folder(pathlib.Path(folder))
    texts = _texts(seen, dumped, notes)
    if not texts:
        names = ", ".join(sorted({program.name for _, program in seen.timelines}))
        lacks = _NO_HLO
        if dumped is not None:
            lacks = f"{dumped.where} holds none with these operations, either"
        lacks = notes[0] if notes else lacks
        raise ProfileError(f"{path}: no program can be judged ({names}); {lacks}")
    judged = {}
    for program, text in texts.items():
        try:
            judged[program] = judge(program, text)
        except HloError as error:
            notes.append(f"{program.name} is not judged: {str(error).splitlines()[0]}")
    allow = findings.Allowances(options.pop("allow", None))
    times = _Measured(seen, judged)
    programs = []
    for program, judgement in judged.items():
        if judgement.verdicts:
            took = times.taken(program, judgement.verdicts)
            content = report.content(
                judgement, title=program.name, allow=allow, timings=took, **options
            )
            programs.append(ProfiledProgram(program.name, content))
    return Profile(
        source=source or str(path),
        programs=tuple(programs),
        step_count=max(map(len, times.markers.values())),
        step_seconds=times.step_seconds,
        marked=times.marked,
        planes=seen.planes,
        notes=tuple(dict.fromkeys(notes)),
    )


def of_watched(folder: str, seen: Watched, **options: Any) -> Profile:
    """Read the profile of a process whose programs were watched, which get their times."""
    watched: dict[str, WatchedProgram] = {}
    for program in seen:
        with contextlib.suppress(ShardrulesError):
            watched.setdefault(dumps.body(program.text), program)
    notes: list[str] = []
    judge_alone = judging(None, seen.registry, notes)
    bodies: dict[int, str] = {}

    def judge(program: wire.Program, text: str) -> hlo.Judgement:
        body = dumps.body(text)
        judgement = watched[body].judgement if body in watched else judge_alone(program, text)
        bodies[id(judgement)] = body
        return judgement

    # What --keep wrote beside the profile has the mesh in its text; these programs know theirs.
    none = dumps.Dumps([], "the script")
    result = read(folder, judge, dumped=none, notes=notes, source="the script", **options)
    seen.timings = {bodies[id(p.content.judgement)]: p.timings for p in result.programs}
    return result


def of_judged(
    path: str, judgements: Sequence[hlo.Judgement], **options: Any
) -> tuple[Profile, list[timings.Timings | None]]:
    """Read a profile of programs that are judged already, and what each of them took."""
    dumped = dumps.Dumps([(None, judgement.module) for judgement in judgements], "FILE")
    by_text = {judgement.module.text: judgement for judgement in judgements}

    def judge(program: wire.Program, text: str) -> hlo.Judgement:
        if text not in by_text:
            raise HloError("none of the files holds it")
        return by_text[text]

    result = read(path, judge, dumped=dumped, **options)
    if not result.programs:
        ran = "; ".join(result.notes)
        raise ProfileError(f"{path}: no program of the files ran there with a collective; {ran}")
    times = {p.content.judgement.module.text: p.timings for p in result.programs}
    return result, [times.get(judgement.module.text) for judgement in judgements]


def judging(mesh: Mapping[str, int] | None, registry: Any, notes: list[str]) -> Judge:
    """Make what judges a profile's programs alone, as well as the profile knows them."""
    from shardrules.door.compiled import sharding_text

    def judge(program: wire.Program, text: str) -> hlo.Judgement:
        module = hlo.parse(text, name=program.name)
        if len(program.shardings) == len(module.entry.parameters):
            shardings = list(map(sharding_text, program.shardings))
            full_text = annotate.annotated(module, None, shardings)
            if full_text != module.text:
                module = hlo.parse(full_text, name=program.name)
        try:
            return hlo.judge(module, mesh=mesh, registry=registry, unpartitioned=True)
        except HloError as error:  # a program of fewer devices, say
            if mesh is None:
                raise
            given = ", ".join(f"{axis}={size}" for axis, size in dict(mesh).items())
            notes.append(
                f"{program.name} is judged without the mesh ({given}), which does not fit it: "
                f"{str(error).splitlines()[0]}"
            )
            return hlo.judge(module, registry=registry, unpartitioned=True)

    return judge


# Files.


def is_profile(name: str) -> bool:
    """Tell whether a path is a file of JAX's profiler, or a folder that holds one."""
    path = pathlib.Path(name)
    if path.is_dir():
        return next(path.rglob(_FILES), None) is not None
    return name.endswith(_FILES[1:])


def _files(path: pathlib.Path) -> list[pathlib.Path]:
    """Return the files of a trace, one for each host."""
    if path.is_file():
        return [path]
    if not path.is_dir():
        raise ProfileError(f"{path}: there is no such file or folder; to record a profile, {_HOW}")
    files = sorted(path.rglob(_FILES))
    if not files:
        raise ProfileError(f"{path} holds no profile ({_FILES}); to record one, {_HOW}")
    ended = {file: file.stat().st_mtime for file in files}
    last = max(files, key=lambda file: (ended[file], file.parent.name))
    chosen = {file.name: file for file in files if file.parent == last.parent}
    # Each host names the folder by its own clock, which may be in another second.
    for file in sorted(files, key=lambda file: -ended[file]):
        if ended[last] - ended[file] < _TOGETHER:
            chosen.setdefault(file.name, file)
    return sorted(chosen.values())


@contextlib.contextmanager
def _mapped(file: pathlib.Path) -> Iterator[memoryview]:
    """Map a file into memory; name it where it can't be read."""
    try:
        with file.open("rb") as opened:
            if not file.stat().st_size:
                raise ProfileError("it is empty")
            # No `with`: arrays of its bytes may live on in a traceback.
            yield memoryview(mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ))
    except OSError as error:
        raise ProfileError(f"can't read {file}: {error.strerror}") from error
    except ProfileError as error:
        raise ProfileError(
            f"{file} is not a whole profile of JAX's: {error}; give the .xplane.pb of a trace that "
            "has ended, or its folder"
        ) from error


def _texts(
    seen: events.Events, dumped: dumps.Dumps | None, notes: list[str]
) -> dict[wire.Program, str]:
    """Return the HLO of each program that ran; programs of one text become one."""
    from shardrules.door.compiled import hlo_text

    texts: dict[wire.Program, str] = {}
    first: dict[tuple[str, str], wire.Program] = {}
    kept: dict[wire.Program, wire.Program] = {}
    lacking = []
    for program in dict.fromkeys(program for _, program in seen.timelines):
        text = None
        try:
            if dumped is not None:  # it may say more than the profile: run --keep writes the mesh
                text = dumped.text(program.name, program.ids, seen.operations(program))
        except ProfileError as error:
            notes += [] if program.proto else [str(error)]
        try:
            if text is None and program.proto:
                text = hlo_text(program.proto)
        except ProfileError as error:
            notes.append(str(error))
        if text is None:
            lacking.append(program)
        else:
            kept[program] = first.setdefault((program.name, dumps.body(text)), program)
            texts.setdefault(kept[program], text)
    for (device, program), timeline in list(seen.timelines.items()):
        if kept.get(program, program) is not program:
            del seen.timelines[device, program]
            seen.timelines.setdefault((device, kept[program]), events.Timeline()).merge(timeline)
    if lacking and texts:
        names = ", ".join(sorted({program.name for program in lacking}))
        notes.append(f"ran, and is not judged: {names}; {_NO_HLO}")
    return texts


# Times.


class _Measured:
    """When the programs of a profile ran, and what their collectives took in a step.

    Attributes:
      marked: whether the script marked its steps; else they are the runs of the longest program.
      markers: when each step began and ended, by device.
      step_seconds: the median step of the slowest device.
    """

    def __init__(self, seen: events.Events, judged: Mapping[wire.Program, hlo.Judgement]):
        self._seen = seen
        self._sites = {
            program: measured.sites(judgement.module, [v.collective for v in judgement.verdicts])
            for program, judgement in judged.items()
        }
        hosts = {device: device.partition(" ")[0] for device, _ in seen.timelines}
        self.marked = all(seen.markers.get(host) for host in hosts.values())
        self.markers: dict[str, list[tuple[float, float]]] = {
            device: sorted(seen.markers[host]) if self.marked else self._longest_runs(device)
            for device, host in hosts.items()
        }
        self.step_seconds = max(map(measured.step_seconds, self.markers.values()))
        self._covered = self._cover(judged)

    def _longest_runs(self, device: str) -> list[tuple[float, float]]:
        runs = [
            list(timeline.spans().values())
            for (other, _), timeline in self._seen.timelines.items()
            if other == device
        ]
        return max(runs, key=lambda spans: sum(end - start for start, end in spans))

    def _cover(self, judged: Mapping[wire.Program, hlo.Judgement]) -> dict[str, measured.Covered]:
        """Return by device when anything ran that hides collectives."""
        numbers, parts = self._seen.numbers, collections.defaultdict(list)
        for (device, program), timeline in self._seen.timelines.items():
            if program in judged:
                idle = measured.covering_nothing(judged[program].module, self._sites[program])
            else:
                idle = set(filter(measured.covers_nothing, numbers))
            ran = timeline.ran()
            busy = ~np.isin(ran.operation, [numbers[name] for name in idle if name in numbers])
            parts[device].append((ran.start[busy], ran.end[busy]))
        return {
            device: measured.Covered(*map(np.concatenate, zip(*pairs)))
            for device, pairs in parts.items()
        }

    def taken(self, program: wire.Program, verdicts: Sequence[hlo.Verdict]) -> timings.Timings:
        """Return what each of a program's verdicts took, and one step of its slowest device."""
        timelines = {d: line for (d, p), line in self._seen.timelines.items() if p is program}
        ran = {
            device: measured.executions(
                timeline,
                self._seen.numbers,
                [start for start, _ in self.markers[device]],
                self._sites[program],
            )
            for device, timeline in timelines.items()
        }
        step_counts = {device: len(marks) for device, marks in self.markers.items()}
        took = measured.measure(ran, step_counts, self._covered)
        whole: collections.Counter[str] = collections.Counter()
        for verdict in verdicts:
            whole[verdict.collective.name] += verdict.bytes
        each: list[timings.Timing | None] = []
        for verdict in verdicts:
            timing, total = took.get(verdict.collective.name), whole[verdict.collective.name]
            each.append(timing and timing.part(verdict.bytes / total if total else 1.0))
        numbers: dict[str, int] = {}
        for number, verdict in enumerate(verdicts):
            numbers.setdefault(verdict.collective.name, number)
        drawn = self._drawn(numbers, took, ran, timelines) if took else {}
        return timings.Timings(self.step_seconds, tuple(each), **drawn)

    def _drawn(
        self,
        numbers: Mapping[str, int],
        took: Mapping[str, timings.Timing],
        ran: Mapping[str, Mapping[str, measured.Executions]],
        timelines: Mapping[str, events.Timeline],
    ) -> dict[str, Any]:
        """Return the step of median length of the device that waits longest."""
        exposed: collections.Counter[str] = collections.Counter()
        for timing in took.values():
            exposed[timing.device] += timing.exposed_seconds  # type: ignore[assignment]
        device = max(exposed, key=lambda name: exposed[name])
        start, end, steps = map(np.concatenate, zip(*ran[device].values()))
        seen_steps, at = np.unique(steps, return_inverse=True)
        order = np.argsort(np.bincount(at, end - start), kind="stable")
        middle = seen_steps[order[len(seen_steps) // 2]]
        shown = sorted(
            (start, end, numbers[name])
            for name, (starts, ends, steps) in ran[device].items()
            for start, end in zip(starts[steps == middle].tolist(), ends[steps == middle].tolist())
        )
        # Devices lag behind the host, whose markers say how long a step is and not where it begins:
        # draw from the start of the program's runs to their end, where the runs are known.
        begin, last = shown[0][0], max(end for _, end, _ in shown)
        spans = timelines[device].spans()
        if events.UNKNOWN_RUN not in spans:
            around = [(a, b) for a, b in spans.values() if a < last and b > begin]
            begin = min([begin, *(a for a, _ in around)])
            last = max([last, *(b for _, b in around)])
        return {
            "device": device,
            "ran": tuple((n, (a - begin) / 1e9, (b - begin) / 1e9) for a, b, n in shown),
            "busy": self._covered[device].drawn(begin, last, _BUSY),
        }
