"""Run a script, and judge every program that JAX compiles in it when it ends.

Flags stand before the script; what follows it, or -m MODULE, is its own. The run stays as it is:
arguments, output, values, errors. The report goes to stderr, or to a file.

Exit code: the script's own where it is not 0; else 1 if there are findings, 2 if none was compiled
or one can't be judged, 0 if every collective is needed. Programs that other processes compile
(multiprocessing's workers) are not seen; shardrules.watch() sees them there.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import json
import pathlib
import re
import sys
import tempfile
from collections.abc import Sequence
from typing import TYPE_CHECKING

from shardrules.commands import flags, rules, script
from shardrules.errors import HloError, ShardrulesError

if TYPE_CHECKING:
    from shardrules.hooks.install import Handle
    from shardrules.report.several import Several
    from shardrules.watching.profiles.recording import Recorder
    from shardrules.watching.profiles.shown import Profile
    from shardrules.watching.programs import Watched

__all__ = ["add_arguments", "run"]

CLEAN, FOUND, UNUSABLE = 0, 1, 2
_MANY = 20  # without a terminal, report progress for more programs than this


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of ``run``."""
    flags.add_arguments(parser)
    rules.add_arguments(parser)
    parser.add_argument(
        "--output",
        action=flags.Once,
        metavar="FILE",
        help="write the report there instead of to stderr; - is stdout",
    )
    parser.add_argument(
        "--check",
        action="store_true",
        help="install the hooks when JAX is imported; shard_maps that say check_vma=False run with "
        "their check on where values and gradients are equal and no more bytes move; a table "
        "tells which",
    )
    parser.add_argument(
        "--install",
        action="store_true",
        help="install the hooks when JAX is imported, as shardrules.install() in the script would",
    )
    parser.add_argument(
        "--keep",
        action=flags.Once,
        metavar="DIR",
        help="write the HLO of each program there, for verify, report and diff",
    )
    parser.add_argument(
        "--profile",
        action=flags.Once,
        type=_count,
        metavar="STEPS",
        help="record that many steps with jax.profiler once the script has warmed up, and say what "
        "each collective took; a step is what jax.profiler.StepTraceAnnotation marks, else a call "
        "of the first program with collectives that is called again",
    )
    script.add_arguments(parser)


def _count(text: str) -> int:
    if not text.isdecimal() or not int(text):
        raise argparse.ArgumentTypeError(f"{text!r} is not a count of steps; write --profile 3")
    return int(text)


def run(arguments: argparse.Namespace) -> int:
    """Run the script, write the report, and return the exit code."""
    # Import neither jax nor numpy here: the script may set environment variables that they read.
    from shardrules.watching import check_off, programs

    target = script.find(arguments)
    keep = None if arguments.keep is None else pathlib.Path(arguments.keep)
    if keep is not None:
        keep.mkdir(parents=True, exist_ok=True)
    if arguments.output not in (None, "-"):
        pathlib.Path(arguments.output).open("a").close()  # fail now if it can't be written
    rules.check(arguments)
    seen = programs.watch(strict=arguments.strict, allow=flags.allowances(arguments))
    seen.target, seen.cheapest = arguments.target, arguments.cheapest
    with contextlib.ExitStack() as stack, contextlib.ExitStack() as contexts:
        contexts.enter_context(seen)
        handles: list[Handle] = []
        if arguments.check or arguments.install:
            register = functools.partial(rules.register, arguments)
            unchecked = "check" if arguments.check else "leave"
            contexts.enter_context(check_off.switching(handles, register, _say, unchecked))
        recorder = None
        if arguments.profile is not None:
            from shardrules.watching.profiles import recording

            folder = stack.enter_context(tempfile.TemporaryDirectory()) if keep is None else keep
            recorder = recording.Recorder(arguments.profile, str(folder))
            contexts.enter_context(recorder)
        end = functools.partial(_report, seen, arguments, keep, recorder, handles)
        code = script.run(target, contexts, end)
    if code == script.INTERRUPTED:
        script.end_by_interrupt()
    return code


def _report(
    seen: Watched,
    arguments: argparse.Namespace,
    keep: pathlib.Path | None,
    recorder: Recorder | None,
    handles: Sequence[Handle],
) -> int:
    """Judge the compiled programs, write the report, and return the exit code."""
    if recorder is not None:
        recorder.end()
    if not len(seen):
        _say("the script compiled no program with JAX; nothing was judged")
        return UNUSABLE
    try:
        return _written(seen, arguments, keep, recorder, handles)
    except (ShardrulesError, OSError) as error:
        _say(str(error))
        return UNUSABLE


def _written(
    seen: Watched,
    arguments: argparse.Namespace,
    keep: pathlib.Path | None,
    recorder: Recorder | None,
    handles: Sequence[Handle],
) -> int:
    from shardrules import migration
    from shardrules.report import several

    # Register rules only now: the script's programs must be traced without them.
    registry = rules.Rules(arguments)
    seen.registry = registry
    process, processes = seen.process
    if process:  # all of a job's processes compile the same programs
        results = seen.judged()
        _say(f"process {process} of {processes}: {results.headline}; process 0 has the report")
        return _exit_code(results)
    if keep is not None:
        _keep(seen, keep)
    measured = None
    if recorder is not None and recorder.trouble:
        _say(f"--profile recorded nothing: {recorder.trouble}")
    elif recorder is not None:
        measured = _profiled(seen, arguments, recorder)
    progress = _Progress(len(seen))
    results = seen.judged(progress)
    progress.done()
    for line in registry.unused(content.judgement for content in results.contents):
        _say(line)
    text = several.WRITERS[arguments.format](results)
    if measured is not None and arguments.format == "json":
        text = json.dumps({**json.loads(text), "profile": measured.as_dict()}, indent=1) + "\n"
    code = _exit_code(results) if recorder is None or measured is not None else UNUSABLE
    if arguments.output is None:
        sys.stderr.write(text)
        sys.stderr.flush()
    elif arguments.output == "-":
        sys.stdout.write(text)
        sys.stdout.flush()
    else:
        pathlib.Path(arguments.output).write_text(text, encoding="utf-8")
        _say(f"{results.headline}; the report is in {arguments.output}")
    for handle in handles if arguments.check else ():
        print(f"\n{migration.decided(handle.unchecked())}", file=sys.stderr, flush=True)
    return code


def _exit_code(results: Several) -> int:
    if results.findings or results.unused:
        return FOUND
    return CLEAN if results.clean else UNUSABLE


def _profiled(seen: Watched, arguments: argparse.Namespace, recorder: Recorder) -> Profile:
    """Read what was recorded, which gives the script's programs their times."""
    from shardrules.watching.profiles import profile

    if recorder.left:
        recorded = arguments.profile - recorder.left
        _say(f"the script ended after {recorded} of --profile's {arguments.profile} steps")
    measured = profile.of_watched(
        recorder.folder,
        seen,
        strict=arguments.strict,
        allow=flags.allowances(arguments),
        target=arguments.target,
        cheapest=arguments.cheapest,
    )
    for line in (measured.about, *measured.notes):
        _say(line)
    return measured


def _keep(seen: Watched, folder: pathlib.Path) -> None:
    for number, program in enumerate(seen, 1):
        name = re.sub(r"[^\w.-]", "_", program.name)[:100]
        try:
            try:
                text = program.told()
            except HloError:  # keep unreadable text for a bug report
                text = program.text
        except ShardrulesError:
            continue  # the report lists it
        (folder / f"{number:04}.{name}.hlo").write_text(text, encoding="utf-8")


class _Progress:
    """Show progress: an overwritten line on a terminal, else one line for many programs."""

    def __init__(self, count: int):
        self._terminal = sys.stderr.isatty() and count > 1
        self._width = 0
        if not sys.stderr.isatty() and count > _MANY:
            _say(f"judging {count} programs")

    def __call__(self, number: int, count: int) -> None:
        if self._terminal:
            line = f"shardrules: judging program {number + 1} of {count}"
            self._width = len(line)
            sys.stderr.write("\r" + line)
            sys.stderr.flush()

    def done(self) -> None:
        """Wipe the line."""
        if self._terminal:
            sys.stderr.write("\r" + " " * self._width + "\r")


def _say(message: str) -> None:
    print(f"shardrules: {message}", file=sys.stderr, flush=True)
