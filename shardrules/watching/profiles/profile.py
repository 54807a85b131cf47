"""Judge a profile's programs, and give each verdict its milliseconds, the costliest first."""

from __future__ import annotations

import contextlib
import itertools
import mmap
import pathlib
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from shardrules import hlo, report
from shardrules import program as programs
from shardrules.arguments import checked
from shardrules.costs import findings, timings
from shardrules.costs.worth import Switched
from shardrules.door.compiled import hlo_text, sharding_text
from shardrules.errors import HloError, ProfileError
from shardrules.hlo.reader import annotate
from shardrules.hlo.reader.attributes import blanked
from shardrules.watching.profiles import events, measured, wire
from shardrules.watching.profiles.shown import Profile, ProfiledProgram

_FILES = "*.xplane.pb"
UNFINISHED = ".recording"  # the prefix of a folder that a process is recording into
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
_DUMPS = ("*after_optimizations.txt", "*after_optimizations.txt.gz", "*.hlo", "*.hlo.gz")
_NUMBER = re.compile(r"module_0*(\d+)\.")  # XLA's number of the module; on CPU the program's id
_FRAME = re.compile(r"\bstack_frame_id=\d+")  # an index into tables that differ between copies
_TOGETHER = 10  # all hosts write the files of one trace within this many seconds


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
    """Judge the programs of a profile, and say how long each collective took.

    Args:
      path: a folder into which ``jax.profiler.trace`` wrote, or one of its ``.xplane.pb`` files. If
        a folder holds several traces, the last one is read.
      mesh: axis names and sizes in the order of the devices; a profile holds none.
      hlo: a folder of ``--xla_dump_to`` or ``run --keep``, for programs whose HLO or mesh the
        profile lacks; the path itself if it holds any.
      strict: accept only proofs: verdicts that rest on declared rules are findings, too.
      allow: known findings, with their reasons.
      registry: rules for custom calls that carry no tag; the default registry if None.

    Returns:
      The verdicts with their times; ``print`` it.

    Raises:
      ProfileError: there is no profile, it can't be read, or it lacks data that verdicts need.

    Examples:
      >>> print(shardrules.profile("/tmp/trace"))  # doctest: +SKIP
      avoidable: 3.1 ms of 41.0 ms a step (7.6%)
    """
    dumped = None if hlo is None else Dumps.of_folder(pathlib.Path(hlo))
    return read(path, mesh=mesh, registry=registry, dumped=dumped, strict=strict, allow=allow)


def read(
    path: str | pathlib.Path,
    *,
    mesh: Mapping[str, int] | None = None,
    registry: Any = None,
    known: Callable[[str], hlo.Judgement | None] = lambda text: None,
    dumped: Dumps | None = None,
    source: str = "",
    allow: Mapping[str, str] | None = None,
    **options: Any,
) -> Profile:
    """Read a profile's programs and times, and judge each program."""
    # ``known`` returns a text's judgement if there is one already. ``dumped`` holds HLO that the
    # profile lacks. ``options`` go to ``report.content``. An HloError becomes a note.
    # First read the events, then the HLO of each program that ran, then judge each program, and
    # last assign the events' times to the verdicts.
    seen = events.Events()
    for file in _files(pathlib.Path(path)):
        with _mapped(file) as data:
            seen.read(data, file.name.removesuffix(".xplane.pb"))
    if not seen.timelines:
        raise ProfileError(f"{path}: {_NO_OPERATIONS}")
    if dumped is None and next(pathlib.Path(path).glob(_KEPT), None) is not None:
        dumped = Dumps.of_folder(pathlib.Path(path))
    notes: list[str] = []
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
            judged[program] = known(text) or _judged(program, text, mesh, registry, notes)
        except HloError as error:
            notes.append(f"{program.name} is not judged: {str(error).splitlines()[0]}")
    allowances = findings.Allowances(allow)
    times = measured.Times(seen, judged)
    programs = []
    for program, judgement in judged.items():
        if judgement.verdicts:
            took = times.taken(program, judgement.verdicts)
            content = report.content(
                judgement,
                title=program.name,
                allow=allowances,
                timings=took,
                switched=Switched.kept(judgement.module),
                **options,
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


def of_judged(
    path: str, judgements: Sequence[hlo.Judgement], **options: Any
) -> tuple[Profile, list[timings.Timings | None]]:
    """Read a profile of programs that are already judged; also return the times of each."""
    by_text = {judgement.module.text: judgement for judgement in judgements}

    def known(text: str) -> hlo.Judgement:
        if text not in by_text:
            raise HloError("none of the files holds it")
        return by_text[text]

    dumped = Dumps([(None, judgement.module) for judgement in judgements], "FILE")
    result = read(path, known=known, dumped=dumped, **options)
    if not result.programs:
        ran = "; ".join(result.notes)
        raise ProfileError(f"{path}: no program of the files ran there with a collective; {ran}")
    times = {p.content.judgement.module.text: p.timings for p in result.programs}
    return result, [times.get(judgement.module.text) for judgement in judgements]


def _judged(
    program: wire.WireProgram,
    text: str,
    mesh: Mapping[str, int] | None,
    registry: Any,
    notes: list[str],
) -> hlo.Judgement:
    """Return the judgement of a program from the facts in the profile alone."""
    module = hlo.parse(text, name=program.name)
    if len(program.shardings) == len(module.entry.parameters):
        shardings = list(map(sharding_text, program.shardings))
        full_text = annotate.annotated(module, None, shardings)
        module = module if full_text == text else hlo.parse(full_text, name=program.name)
    try:
        return hlo.judge(module, mesh=mesh, registry=registry, unpartitioned=True)
    except HloError as error:  # for example, a program for fewer devices
        if mesh is None:
            raise
        given = ", ".join(f"{axis}={size}" for axis, size in dict(mesh).items())
        notes.append(
            f"{program.name} is judged without the mesh ({given}), which does not fit it: "
            f"{str(error).splitlines()[0]}"
        )
        return hlo.judge(module, registry=registry, unpartitioned=True)


# Files.


def body(text: str) -> str:
    """Return a module's computations without comments and pointers to tables of source lines."""
    # If a step is compiled twice (for the first call and for the others), the texts differ only in
    # these pointers. Where XLA prints /*index=5*/ in a tuple, a parsed module's text has blanks.
    return _FRAME.sub("", blanked(text[max(text.find("\n%"), 0) :]))


class Dumps(NamedTuple):
    """The modules in some files, with XLA's number of each."""

    modules: Sequence[tuple[int | None, hlo.Module]]
    where: str
    as_last: bool = False  # whether to use them only for programs whose HLO the profile lacks

    @classmethod
    def of_folder(cls, folder: pathlib.Path) -> Dumps:
        if not folder.is_dir():
            raise ProfileError(f"--hlo {folder} is not a folder")
        files = sorted({*itertools.chain.from_iterable(map(folder.glob, _DUMPS))})
        if not files:
            raise ProfileError(
                f"--hlo {folder} holds no HLO text ({', '.join(_DUMPS[::2])}); write it with "
                "XLA_FLAGS='--xla_dump_to=DIR --xla_dump_hlo_as_text'"
            )
        modules = []
        for file in files:
            text = programs.read_file(file).text
            try:
                module = hlo.parse(text, name=file.name)
            except HloError:
                continue  # other text
            match = _NUMBER.match(file.name)
            modules.append((int(match[1]) if match else None, module))
        return cls(modules, str(folder))

    def text(self, name: str, number: int, operations: Iterable[str]) -> str | None:
        """Return the text of the program with this name and all operations that ran, or None."""
        ran = set(operations)
        fitting: list[tuple[int | None, str]] = []
        for of_file, module in self.modules:
            if module.name == name:
                held: set[str] = set()
                for computation in module.computations.values():
                    held.update(instruction.name for instruction in computation.instructions)
                if ran <= held:
                    fitting.append((of_file, module.text))
        numbered = [text for of_file, text in fitting if of_file == number]
        texts = numbered or [text for _, text in fitting]
        if len({body(text) for text in texts}) > 1:
            if self.as_last:
                return None
            raise ProfileError(
                f"{self.where} holds {len(texts)} programs {name} with the operations that ran; "
                "leave one of them there, or dump the process that was profiled"
            )
        return texts[0] if texts else None


def is_profile(name: str) -> bool:
    """Return whether a path is a file of JAX's profiler, or a folder that holds one."""
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
    found = path.rglob(_FILES)
    # Skip folders into which other processes still record; they move their files at the end.
    files = sorted(f for f in found if not f.relative_to(path).parts[0].startswith(UNFINISHED))
    if not files:
        raise ProfileError(f"{path} holds no profile ({_FILES}); to record one, {_HOW}")
    ended = {file: file.stat().st_mtime for file in files}
    last = max(files, key=lambda file: (ended[file], file.parent.name))
    # Each host names its folder by its own clock, so the names may differ by some seconds.
    near = [f for f in files if f.parent == last.parent or ended[last] - ended[f] < _TOGETHER]
    near.sort(key=lambda file: (file.parent == last.parent, ended[file]))
    return sorted({file.name: file for file in near}.values())


@contextlib.contextmanager
def _mapped(file: pathlib.Path) -> Iterator[memoryview]:
    """Yield a file mapped into memory; raise an error that names it if it can't be read."""
    try:
        with file.open("rb") as opened:
            if not file.stat().st_size:
                raise ProfileError("it is empty")
            # Don't close the map: a traceback may keep arrays of its bytes alive.
            yield memoryview(mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ))
    except OSError as error:
        raise ProfileError(f"can't read {file}: {error.strerror}") from error
    except ProfileError as error:
        raise ProfileError(
            f"{file} is not a whole profile of JAX's: {error}; give the .xplane.pb of a trace that "
            "has ended, or its folder"
        ) from error


def _texts(
    seen: events.Events, dumped: Dumps | None, notes: list[str]
) -> dict[wire.WireProgram, str]:
    """Return the HLO of each program that ran; programs with the same text become one."""
    texts: dict[wire.WireProgram, str] = {}
    first: dict[tuple[str, str], wire.WireProgram] = {}
    kept: dict[wire.WireProgram, wire.WireProgram] = {}
    lacking: set[str] = set()
    for program in dict.fromkeys(program for _, program in seen.timelines):
        text = None
        try:
            # A dump may say more than the profile, since run --keep writes the mesh.
            if dumped is not None and not (dumped.as_last and program.proto):
                text = dumped.text(program.name, program.number, seen.operations(program))
        except ProfileError as error:
            notes += [] if program.proto else [str(error)]
        try:
            if text is None and program.proto:
                text = hlo_text(program.proto)
        except ProfileError as error:
            notes.append(str(error))
        if text is None:
            lacking.add(program.name)
        else:
            kept[program] = first.setdefault((program.name, body(text)), program)
            texts.setdefault(kept[program], text)
    seen.merge(kept)
    if lacking and texts:
        notes.append(f"ran, but was not judged: {', '.join(sorted(lacking))}; {_NO_HLO}")
    return texts
