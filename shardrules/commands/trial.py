"""Runs a script in a process of its own, as it is or with edits, and says what its programs send.

A process of its own leaves the accelerators free for the next run. Edits live in memory: modules
are compiled from the edited text under their own paths, and no file changes.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import importlib.machinery
import linecache
import os
import pathlib
import pickle
import signal
import subprocess
import sys
import tempfile
import types
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from shardrules import registry
from shardrules.commands import rules, script

if TYPE_CHECKING:
    from shardrules.hooks.unchecked import Call
    from shardrules.watching.programs import WatchedProgram

__all__ = ["Outcome", "child", "run"]


@dataclasses.dataclass
class Outcome:
    """How a run of the script ended.

    Attributes:
      code: the exit code; a signal's number below 0.
      raised: the first line of the error that ended it, empty if none did.
      calls: the calls of shard_maps whose check is off, if they were looked at.
      sent: what one device sends for each compiled program, by name, each run once.
      used: the flags whose rules a kernel found.
      notes: what is said of the other flags.
    """

    code: int = 0
    raised: str = ""
    calls: list[Call] = dataclasses.field(default_factory=list)
    sent: dict[str, int] = dataclasses.field(default_factory=dict)
    used: list[str] = dataclasses.field(default_factory=list)
    notes: list[str] = dataclasses.field(default_factory=list)

    @property
    def failure(self) -> str:
        """Say how it failed, empty if it did not."""
        if not self.code:
            return ""
        return self.raised or (
            f"exit code {self.code}" if self.code > 0 else f"signal {-self.code}"
        )


@dataclasses.dataclass(frozen=True)
class _Job:
    arguments: argparse.Namespace
    result: str
    look: bool
    texts: dict[str, str]


def run(
    arguments: argparse.Namespace, look: bool, texts: Mapping[str, Sequence[str]] | None = None
) -> Outcome:
    """Run the script that the arguments name, and wait for it.

    Args:
      arguments: the command's: the script with its arguments, and the rules to register.
      look: look at its shard_maps whose check is off; else what it prints is dropped.
      texts: the lines of the files that are edited.
    """
    with tempfile.TemporaryDirectory() as folder:
        job, result = os.path.join(folder, "job"), os.path.join(folder, "result")
        edited = {os.path.abspath(file): "".join(lines) for file, lines in (texts or {}).items()}
        plain = argparse.Namespace(
            **{name: getattr(arguments, name) for name in ("module", "script", "rule", "rules")}
        )
        pathlib.Path(job).write_bytes(pickle.dumps(_Job(plain, result, look, edited)))
        code = f"from shardrules.commands import trial; raise SystemExit(trial.child({job!r}))"
        flags: list[str] = getattr(subprocess, "_args_from_interpreter_flags", list)()
        given = None if look else subprocess.DEVNULL
        process = subprocess.Popen(
            [sys.executable, *flags, "-c", code], stdin=given, stdout=given, stderr=given
        )
        _wait(process, look)
        outcome = Outcome()
        with contextlib.suppress(OSError):  # it was killed
            outcome = pickle.loads(pathlib.Path(result).read_bytes())
    outcome.code = process.returncode
    return outcome


def _wait(process: subprocess.Popen, look: bool) -> None:
    """Wait for a process, and pass SIGTERM on; Ctrl-C reaches it from the terminal."""

    def terminated(number: int, frame: types.FrameType | None) -> None:
        process.send_signal(number)

    before = {signal.SIGTERM: signal.signal(signal.SIGTERM, terminated)}
    if look:
        before[signal.SIGINT] = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        process.wait()
    except KeyboardInterrupt:  # a run with edits is not worth waiting for
        process.kill()
        process.wait()
        raise
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


# -- in the process of the script ------------------------------------------------------------------


def child(path: str) -> int:
    """Run the job that a file holds, and return the script's exit code."""
    # Nothing here may import jax or numpy: the script sets what they read from its environment.
    from shardrules.hooks import retrace
    from shardrules.watching import check_off, importing, programs

    job = pickle.loads(pathlib.Path(path).read_bytes())
    _compile_from(job.texts)
    target = script.find(job.arguments)
    if target.file in job.texts:
        target = target._replace(code=_compiled(job.texts, target.file))
    outcome = Outcome()
    given: dict[str, list[registry.Registration]] = {}
    seen = programs.watch()

    def register(*_: object) -> None:
        given.update(rules.register(job.arguments))

    around = contextlib.ExitStack()
    around.enter_context(seen)
    if job.look:
        around.callback(check_off.start(outcome.calls.append, register))
    else:
        imported = importing.WhenImported(("jax",), register)
        imported.start()
        around.callback(imported.stop)
    report = sys.excepthook

    def noted(kind: type, error: BaseException, trace: Any) -> None:
        outcome.raised = retrace.first_line(error)
        report(kind, error, trace)

    sys.excepthook = noted

    def end() -> int:
        _tell_of_rules(outcome, given)
        _write(job.result, outcome)  # before judging: a job that is being ended has little time
        outcome.sent = _sent(seen)
        _write(job.result, outcome)
        return 0

    code = script.run(target, around, end)
    if code == script.INTERRUPTED:
        script.end_by_interrupt()
    return code


def _write(path: str, outcome: Outcome) -> None:
    written = pathlib.Path(path + ".new")
    written.write_bytes(pickle.dumps(outcome))
    written.replace(path)


def _tell_of_rules(outcome: Outcome, given: Mapping[str, Sequence[registry.Registration]]) -> None:
    declared = {where for call in outcome.calls for where in call.declared}
    missing = list(dict.fromkeys(one.kernel for call in outcome.calls for one in call.missing))
    for flag, entries in given.items():
        if declared & {entry.where for entry in entries}:
            outcome.used.append(flag)
        elif entries:
            outcome.notes.append(rules.unmatched(flag, entries[0].name, missing))


def _sent(seen: Iterable[WatchedProgram]) -> dict[str, int]:
    """Sum up what one device sends, by program; a loop of unknown length makes one trip."""
    from shardrules.costs import accounts
    from shardrules.errors import ShardrulesError

    sums: dict[str, int] = {}
    for program in seen:
        with contextlib.suppress(ShardrulesError):  # its backend does not give its HLO
            entries = accounts.of(program.judgement).entries
            sums[program.name] = sums.get(program.name, 0) + sum(
                (entry.each if entry.runs is None else entry.runs) * entry.wire_bytes
                for entry in entries
            )
    return sums


def _compiled(texts: Mapping[str, str], file: str) -> types.CodeType:
    return compile(texts[file].removeprefix("\ufeff"), file, "exec", dont_inherit=True)


def _compile_from(texts: Mapping[str, str]) -> None:
    """Let imports compile these files from other texts, and let tracebacks show those."""
    loader: Any = importlib.machinery.SourceFileLoader
    get_code = loader.get_code

    def code_of(self: Any, name: str) -> Any:
        file = os.path.abspath(self.path)
        return _compiled(texts, file) if file in texts else get_code(self, name)

    if texts:
        loader.get_code = code_of
    for file, text in texts.items():
        linecache.cache[file] = len(text), None, text.splitlines(keepends=True), file
