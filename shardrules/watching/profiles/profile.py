"""A profile's programs, judged: verdicts with milliseconds, the costliest first."""

from __future__ import annotations

import pathlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from shardrules import hlo, report
from shardrules.arguments import checked
from shardrules.costs import accounts, findings
from shardrules.errors import HloError, ProfileError
from shardrules.report.grouping import counted
from shardrules.watching.profiles import events, measured, wire
from shardrules.watching.profiles.shown import Line, Profile, ProfiledProgram

__all__ = ["profile"]

_FILES = "*.xplane.pb"
_HOW = "with jax.profiler.trace(DIR): run some steps"
_NO_HLO = (
    "it holds no program's HLO: set enable_hlo_proto = True of jax.profiler.ProfileOptions if it "
    "was switched off, or pass a folder that XLA_FLAGS='--xla_dump_to=DIR --xla_dump_hlo_as_text' "
    "wrote, as --hlo DIR (hlo=)"
)


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
      hlo: a folder of ``--xla_dump_to``, for programs whose HLO the profile lacks.
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
    files = _files(pathlib.Path(path))
    texts: dict[str, wire.Program] = {}
    kept: dict[tuple[str, str], wire.Program] = {}
    for file in files:
        for program in _read(file, lambda data: wire.programs(memoryview(data))):
            text = _text(program)
            same = kept.setdefault((program.name, _body(text)), program)
            same.ids.update(program.ids)
            if same is program:
                texts[text] = program
    if hlo is not None:
        texts |= _dumped(pathlib.Path(hlo), {program.name for program in texts.values()})
    if not texts:
        raise ProfileError(f"{path}: {_NO_HLO}")
    notes: list[str] = []
    judged = [
        (program, *_judged(text, program, mesh, registry, notes)) for text, program in texts.items()
    ]
    judged = [one for one in judged if one[1] is not None]
    seen = events.Events(
        (program, frozenset(_operations(of)), measured.covering_nothing(judgement.module, of))
        for program, judgement, of in judged
    )
    from shardrules.door.compiled import profile_data

    for file in files:
        host = file.name.removesuffix(".xplane.pb")
        seen.read(_read(file, profile_data), host)
    if not seen.timelines:
        raise ProfileError(
            f"{path}: no operation of its {counted(len(judged), 'program')} ran in it; "
            f"planes of CPU, GPU and TPU are understood. Trace whole steps: {_HOW}"
        )
    if seen.unknown:
        notes.append(
            "ran, and is not judged, since the profile has no HLO of it: "
            + ", ".join(sorted(seen.unknown))
        )
    return _profile(str(path), judged, seen, notes, strict, allow)


def _profile(
    source: str,
    judged: Sequence[tuple[wire.Program, Any, Mapping[str, measured.Site]]],
    seen: events.Events,
    notes: list[str],
    strict: bool,
    allow: Mapping[str, str] | None,
) -> Profile:
    """Put verdicts and times together."""
    marked, markers = _markers(seen)
    programs = []
    for program, judgement, of in judged:
        timelines = {
            device: one for (device, other), one in seen.timelines.items() if other is program
        }
        if not timelines or not judgement.verdicts:
            continue
        starts = {device: [start for start, _ in markers[device]] for device in timelines}
        took = measured.measure(timelines, starts, of)
        content = report.content(
            judgement, title=program.name, strict=strict, allow=findings.Allowances(allow)
        )
        programs.append(ProfiledProgram(program.name, content, _lines(program, content, took)))
    steps = max(markers.values(), key=len)
    return Profile(
        source=source,
        programs=tuple(programs),
        step_count=len(steps),
        step_seconds=max(map(measured.step_seconds, markers.values())),
        marked=marked,
        planes=seen.planes,
        notes=tuple(dict.fromkeys(notes)),
    )


def _markers(seen: events.Events) -> tuple[bool, dict[str, list[tuple[float, float]]]]:
    """Return whether steps are marked, and when each began and ended, by device.

    Without markers, the runs of the program that took longest are the steps.
    """
    hosts = {device: device.partition(" ")[0] for device, _ in seen.timelines}
    if all(seen.markers.get(host) for host in hosts.values()):
        return True, {device: sorted(seen.markers[host]) for device, host in hosts.items()}
    found: dict[str, list[tuple[float, float]]] = {}
    for device in hosts:
        runs = [
            sorted(timeline.spans.values())
            for (other, _), timeline in seen.timelines.items()
            if other == device
        ]
        found[device] = max(runs, key=lambda spans: sum(end - start for start, end in spans))
    return False, found


def _lines(
    program: wire.Program, content: report.Content, took: Mapping[str, measured.Measured]
) -> tuple[Line, ...]:
    wrong = {id(finding.verdict): finding for finding in content.findings}
    verdicts, entries = content.judgement.verdicts, content.account.entries
    whole: dict[str, int] = {}
    for verdict in verdicts:
        name = verdict.collective.name
        whole[name] = whole.get(name, 0) + verdict.bytes
    return tuple(
        Line(
            program.name,
            verdict,
            entry,
            wrong.get(id(verdict)),
            took.get(verdict.collective.name),
            verdict.bytes / whole[verdict.collective.name] if whole[verdict.collective.name] else 1,
            _avoidable(verdict, entry),
        )
        for verdict, entry in zip(verdicts, entries)
    )


def _avoidable(verdict: hlo.Verdict, entry: accounts.Entry) -> float:
    """Return the part of a collective's wire bytes that its verdict shows to be for nothing."""
    if verdict.verdict == "redundant":
        return 1.0
    if verdict.verdict != "overwide" or not entry.wire_bytes:
        return 0.0
    needed_count = verdict.collective.group_size // verdict.copies
    needed = accounts.wire_bytes(entry.kind, verdict.bytes, needed_count)
    return max(0.0, 1 - needed / entry.wire_bytes)


def _operations(of: Mapping[str, measured.Site]) -> Iterable[str]:
    for site in of.values():
        yield site.first
        if site.done is not None:
            yield site.done


# Reading.


def _files(path: pathlib.Path) -> list[pathlib.Path]:
    """Return the files of a trace, one for each host."""
    if path.is_file():
        return [path]
    if not path.is_dir():
        raise ProfileError(
            f"{path}: there is no such file or folder; a profile is written by {_HOW}"
        )
    found = sorted(path.rglob(_FILES))
    if not found:
        raise ProfileError(f"{path} holds no profile ({_FILES}); it is written by {_HOW}")
    last = max(found, key=lambda file: (file.stat().st_mtime, file.parent.name)).parent
    return [file for file in found if file.parent == last]


def _read(file: pathlib.Path, reader):
    """Return what a reader makes of a file's bytes; name the file where it can't."""
    try:
        return reader(file.read_bytes())
    except OSError as error:
        raise ProfileError(f"can't read {file}: {error.strerror}") from error
    except ProfileError as error:
        raise ProfileError(
            f"{file} is not a whole profile of JAX's: {error}; give the .xplane.pb of a trace that "
            "has ended, or its folder"
        ) from error


def _body(text: str) -> str:
    """Return a module's computations without its tables of source lines.

    One step compiled twice, for the first call and for the others, differs in these alone.
    """
    return text[max(text.find("\n%"), 0) :]


def _text(program: wire.Program) -> str:
    from shardrules.door.compiled import hlo_text

    return hlo_text(program.proto)


def _dumped(folder: pathlib.Path, known: set[str]) -> dict[str, wire.Program]:
    """Return the programs of a folder of dumps that the profile lacks, by their texts."""
    from shardrules import program as programs

    found = {}
    for file in sorted(folder.glob("*after_optimizations.txt")):
        read = programs.read_file(file)
        name = hlo.parse(read.text, name=read.name).name
        if name not in known:
            found[read.text] = wire.Program(name, [], b"")
    return found


def _judged(text: str, program: wire.Program, mesh: Any, registry: Any, notes: list[str]):
    """Return a program's judgement and its collectives' sites; None where it can't be judged."""
    try:
        module = hlo.parse(text, name=program.name)
        try:
            judgement = hlo.judge(module, registry=registry, mesh=mesh, unpartitioned=True)
        except HloError as error:  # a program of fewer devices, say
            if mesh is None:
                raise
            notes.append(f"{program.name} is judged without the mesh: {_first_line(error)}")
            judgement = hlo.judge(module, registry=registry, unpartitioned=True)
    except HloError as error:
        notes.append(f"{program.name} is not judged: {_first_line(error)}")
        return None, {}
    collectives = [verdict.collective for verdict in judgement.verdicts]
    return judgement, measured.sites(judgement.module, collectives)


def _first_line(error: Exception) -> str:
    return str(error).splitlines()[0]
