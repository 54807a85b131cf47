"""Run a script, and judge every program that JAX compiles in it when it ends.

Flags stand before the script; what follows it, or -m MODULE, is its own. The run stays as it is:
arguments, output, values, errors. To count the runs, programs are called without JAX's fast path,
some tens of microseconds longer for each array that they take or return: over several devices in
each run, on one device until 8 runs in a row without a read on the host, and so again after each
read. Each such change makes the next call of every jitted function a slow one.
The report goes to stderr, or to a file. One that a machine reads (json, html, markdown, sarif) goes
to stdout, alone: what the script prints there goes to stderr. A program in which a shard_map's
check is off makes all-reduces for nothing is compiled once more for it, with the check on, to say
what that saves.

Exit code: the script's own where it is not 0; else 1 if there are findings, 2 if none was compiled
or one can't be judged, 0 if every collective is needed. Where it is not 0, the last line says which
of them it is. Programs that other processes compile (multiprocessing's workers) are not seen;
shardrules.watch() sees them there.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import functools
import json
import os
import pathlib
import re
import sys
import tempfile
import time
from collections.abc import Iterator
from typing import IO, TYPE_CHECKING

from shardrules import units
from shardrules.commands import closing, flags, rules, script
from shardrules.errors import HloError, ShardrulesError

if TYPE_CHECKING:
    from shardrules.hooks.install import Handle
    from shardrules.hooks.state import Unchecked
    from shardrules.report.several import Several
    from shardrules.watching.profiles.recording import Recorder
    from shardrules.watching.profiles.shown import Profile
    from shardrules.watching.programs import Watched, WatchedProgram
    from shardrules.watching.reads import Reads

_IN_WORDS = "text", "github"  # formats that people read, among other output in a log
_KEPT = re.compile(r"\d{4,}\..*\.hlo")  # files that --keep wrote
_SHOWN = 3  # the most files of an earlier run that a message names
_MANY = 20  # without a terminal, report progress for more programs than this


def _count(text: str) -> int:
    if not text.isdecimal() or not int(text):
        raise argparse.ArgumentTypeError(f"{text!r} is not a count of steps; write --profile 3")
    return int(text)


USAGE = flags.SCRIPT_USAGE
ARGUMENTS: flags.Arguments = {
    **flags.REPORT,
    **flags.RULES,
    "--output": flags.once(
        "FILE",
        "write the report to this file instead of stderr (text, github) or stdout; - is stdout",
    ),
    "--check": flags.switch(
        "install the hooks when JAX is imported; shard_maps that say check_vma=False run with "
        "their check on where values and gradients are equal and no more bytes move; a table "
        "lists them"
    ),
    "--install": flags.switch(
        "install the hooks when JAX is imported, as shardrules.install() in the script would"
    ),
    "--keep": flags.once(
        "DIR", "write the HLO of each program to this folder, for verify, report and diff"
    ),
    "--profile": flags.once(
        "STEPS",
        "record that many steps with jax.profiler once the script has warmed up, and report "
        "the time that each collective took; a step is what jax.profiler.StepTraceAnnotation "
        "marks, else a call of the first program with collectives that is called again. The "
        "script must run 3 more: two warm it up, and the second one may compile anew",
        type=_count,
    ),
    **flags.SCRIPT,
}


def run(arguments: argparse.Namespace) -> int:
    # Import neither jax nor numpy here: the script may set environment variables that they read.
    from shardrules.unchecked import check_off
    from shardrules.watching import programs, reads, runs

    target = script.find(arguments)
    keep = None if arguments.keep is None else pathlib.Path(arguments.keep)
    if keep is not None:
        try:
            keep.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ShardrulesError(f"can't make the folder {keep}: {error.strerror}") from error
        keep = keep.absolute()  # the script may change the working directory
    flags.check_writable(arguments.output)
    rules.check(arguments)
    seen = programs.watch(strict=arguments.strict, allow=dict(arguments.allow))
    seen.target, seen.cheapest = arguments.target, arguments.cheapest
    seen.runs, seen.script = runs.Runs(), script.typed(arguments)
    with contextlib.ExitStack() as stack, contextlib.ExitStack() as contexts:
        contexts.enter_context(seen)
        title = f"-m {target.spec.name}" if target.spec else os.path.basename(target.file)
        began = time.strftime("%Y-%m-%d %H:%M")
        misplaced = closing.behind(target, ARGUMENTS, "run")
        read = contexts.enter_context(reads.Reads(seen.runs))
        alone = arguments.format not in _IN_WORDS and arguments.output in (None, "-")
        out = stack.enter_context(_stdout_alone()) if alone else None
        report = _RunReport(seen, read, arguments, keep, title, began, misplaced, out)
        if arguments.check or arguments.install:
            register = functools.partial(rules.register, arguments)
            unchecked: Unchecked = "check" if arguments.check else "leave"
            hooks = check_off.switching(report.handles, register, flags.say, unchecked)
            contexts.enter_context(hooks)
        if arguments.profile is not None:
            from shardrules.watching.profiles import recording

            folder = stack.enter_context(tempfile.TemporaryDirectory()) if keep is None else keep
            report.recorder = recording.Recorder(arguments.profile, str(folder))
            contexts.enter_context(report.recorder)
        return script.run(target, contexts, report.write)


@contextlib.contextmanager
def _stdout_alone() -> Iterator[IO[str]]:
    """Yield the real stdout; send the script's and its children's output on stdout to stderr."""
    sys.stdout.flush()
    with os.fdopen(os.dup(1), "w", encoding=sys.stdout.encoding, errors=sys.stdout.errors) as out:
        os.dup2(2, 1)
        yield out


@dataclasses.dataclass
class _RunReport:
    """The report on a script's programs; ``handles`` are the handles of the installed hooks."""

    seen: Watched
    reads: Reads
    arguments: argparse.Namespace
    keep: pathlib.Path | None
    title: str = "Programs"
    began: str = ""
    misplaced: str = ""  # a sentence about flags of ours that went to the script
    out: IO[str] | None = None  # the stream that takes only the report
    recorder: Recorder | None = None
    handles: list[Handle] = dataclasses.field(default_factory=list)

    def write(self, ended: script.Ended) -> int:
        if self.recorder is not None:
            self.recorder.end()
        flags.say(*filter(None, (self.misplaced, closing.processes())))
        if not len(self.seen):
            flags.say("the script compiled no program with JAX; nothing was judged")
            return flags.UNUSABLE
        try:
            return self._written(ended)
        except (ShardrulesError, OSError) as error:
            flags.say(str(error))
            return flags.UNUSABLE

    def _written(self, ended: script.Ended) -> int:
        # Only process 0 of a job writes a report. Keep the programs first, so that they survive an
        # error below. Read the profile before judging, since judging takes its times.
        from shardrules.paths import here
        from shardrules.report import WRITERS
        from shardrules.unchecked.migration import decided

        output = self.arguments.output
        # Register rules only now: the script's programs must be traced without them.
        self.seen.registry = registry = rules.Rules(self.arguments, bool(self.handles))
        process, processes = self.seen.process
        if process:  # all processes of a job compile the same programs
            results = self.seen.judged()
            flags.say(
                f"process {process} of {processes}: {results.headline}; process 0 has the report"
            )
            return closing.exit_code(results)
        if self.keep is not None:
            _keep(self.seen, self.keep)
        measured = self._profiled()
        ran = ", ".join([self.began, *self.seen.ran_on])
        results = _judged(self.seen)
        if self.keep is not None and not results.missing:
            _keep_switched(self.seen, self.keep)
        notes = (*results.notes, *map(here, self.reads.notes()))
        results = dataclasses.replace(results, title=self.title, ran=ran, notes=notes)
        results = results.with_reads(self.reads.findings(), self.arguments.allow)
        flags.say(*registry.unused(content.judgement for content in results.contents))
        text = WRITERS[self.arguments.format](results)
        if measured is not None and self.arguments.format == "json":
            text = json.dumps({**json.loads(text), "profile": measured.as_dict()}, indent=1) + "\n"
        of_text = self.arguments.format == "text"
        flags.write(text, None if self.out else output, self.out or sys.stderr, of_text)
        if output not in (None, "-"):
            flags.say(f"{results.headline}; the report is in {output}")
        for handle in self.handles if self.arguments.check else ():
            flags.write(f"\n{decided(handle.unchecked())}\n", None, sys.stderr)
        code, said = closing.exit_code(results), closing.counted(results)
        if self.recorder is not None and measured is None:
            code, said = flags.UNUSABLE, f"{said}, and --profile recorded nothing"
        last = closing.last_line(ended, code, said)
        flags.say(*filter(None, [last]))
        return code

    def _profiled(self) -> Profile | None:
        """Read the recorded profile, which assigns times to the script's programs."""
        if self.recorder is None:
            return None
        if self.recorder.trouble:
            flags.say(f"--profile recorded nothing: {self.recorder.trouble}")
            return None
        flags.say(*filter(None, [self.recorder.shortfall]))
        # A job's other processes write their profiles into subfolders of the same folder.
        keep = None if self.keep is None else str(self.keep)
        shared = keep if self.seen.process[1] > 1 else None
        recorded = shared or str(self.recorder.recorded)
        measured = self.seen.profiled(recorded, keep)
        flags.say(measured.about, *measured.notes)
        return measured


def _kept_file(number: int, program: WatchedProgram) -> str:
    name = re.sub(r"[^\w.-]", "_", program.name)[:100]
    return f"{number:04}.{name}.hlo"


def _keep_switched(seen: Watched, folder: pathlib.Path) -> None:
    """Add to the kept files what the programs send with their checks on, which no text shows."""
    from shardrules.costs.worth import SWITCHED
    from shardrules.hlo.reader import annotate

    numbers = {id(program): number for number, program in enumerate(seen, 1)}
    repeated = {id(same) for program in seen for same in program.same_text}
    for program in seen:
        with contextlib.suppress(ShardrulesError):  # the report lists this program
            if id(program) in repeated or isinstance(switched := program.switched, str):
                continue
            for same in (program, *program.same_text):
                path = folder / _kept_file(numbers[id(same)], same)
                text = path.read_text(encoding="utf-8")
                text = annotate.tagged(text, SWITCHED, switched.as_text())
                path.write_text(text, encoding="utf-8")


def _keep(seen: Watched, folder: pathlib.Path) -> None:
    written = set()
    for number, program in enumerate(seen, 1):
        with contextlib.suppress(ShardrulesError):  # the report lists this program
            try:
                text = program.annotated_text()
            except HloError:  # keep unreadable text for a bug report
                text = program.text
            file = _kept_file(number, program)
            (folder / file).write_text(text, encoding="utf-8")
            written.add(file)
    there = {path.name for path in folder.iterdir() if _KEPT.fullmatch(path.name)}
    if older := sorted(there - written):
        names = ", ".join([*older[:_SHOWN], *["..."] * (len(older) > _SHOWN)])
        count = units.counted(len(older), "program")
        flags.say(f"{folder.name} still holds {count} of an earlier run: {names}")


def _judged(seen: Watched) -> Several:
    """Judge, and show progress: a changing line on a terminal, or one line for many programs."""
    count, terminal = len(seen), sys.stderr.isatty()
    if not terminal and count > _MANY:
        flags.say(f"judging {count} programs")
    if not terminal or count < 2:
        return seen.judged()

    def progress(number: int, count: int) -> None:
        sys.stderr.write(f"\rshardrules: judging program {number + 1} of {count}")
        sys.stderr.flush()

    results = seen.judged(progress)
    sys.stderr.write("\r\x1b[K")  # wipe the line
    return results
