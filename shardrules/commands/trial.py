"""Run a script in its own process, unchanged or with edits, and count what its programs send.

The accelerators are free for the next run once the process ends. Edits live in memory: modules are
compiled from the edited text under their own paths, and no file changes.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import importlib.machinery
import io
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
from shardrules.commands import flags, rules, script
from shardrules.errors import ShardrulesError, first_line
from shardrules.paths import is_here
from shardrules.unchecked.results import Outcome, Sent

if TYPE_CHECKING:
    from shardrules.watching.programs import WatchedProgram


def run(
    arguments: argparse.Namespace, look: bool, texts: Mapping[str, Sequence[str]] | None = None
) -> Outcome:
    """Run the script with edited ``texts``; with ``look``, retrace unchecked shard_maps.

    Without ``look``, the script's output is dropped.
    """
    # The job is pickled to a file, and the child pickles its outcome to another one, so that the
    # script's stdin, stdout and stderr stay its own.
    with tempfile.TemporaryDirectory() as folder:
        job, result = os.path.join(folder, "job"), os.path.join(folder, "result")
        edited = {os.path.abspath(file): "".join(lines) for file, lines in (texts or {}).items()}
        own_arguments = argparse.Namespace(
            **{name: getattr(arguments, name) for name in ("module", "script", "rule", "rules")}
        )
        pathlib.Path(job).write_bytes(pickle.dumps((own_arguments, result, look, edited)))
        code = f"from shardrules.commands import trial; raise SystemExit(trial.child({job!r}))"
        flags: list[str] = getattr(subprocess, "_args_from_interpreter_flags", list)()
        stream = None if look else subprocess.DEVNULL
        process = subprocess.Popen(
            [sys.executable, *flags, "-c", code], stdin=stream, stdout=stream, stderr=stream
        )
        _wait(process, look)
        outcome = Outcome()
        with contextlib.suppress(OSError):  # a killed run leaves no result
            outcome = pickle.loads(pathlib.Path(result).read_bytes())
    outcome.code = process.returncode
    return outcome


def _wait(process: subprocess.Popen[Any], look: bool) -> None:
    """Wait for a process, and forward SIGTERM and a SIGINT that the terminal didn't send it."""
    interrupts: list[int] = []

    def forward(number: int, frame: types.FrameType | None) -> None:
        process.send_signal(number)

    def interrupt(number: int, frame: types.FrameType | None) -> None:
        interrupts.append(number)
        # A terminal sends Ctrl-C to both processes, so don't forward the first SIGINT if it may
        # come from the terminal. Forward any others.
        if len(interrupts) > 1 or not _in_foreground():
            process.send_signal(number)

    handlers = {signal.SIGTERM: forward}
    if look and signal.getsignal(signal.SIGINT) != signal.SIG_IGN:
        handlers[signal.SIGINT] = interrupt
    # Python can't put back a handler that it didn't install, such as that of a program that embeds
    # Python; ``getsignal`` then returns None. Leave it.
    known = [number for number in handlers if signal.getsignal(number) is not None]
    before = {number: signal.signal(number, handlers[number]) for number in known}
    try:
        process.wait()
    except KeyboardInterrupt:  # an interrupt ends a run with edits at once
        process.kill()
        process.wait()
        raise
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _in_foreground() -> bool:
    """Return whether a terminal sends Ctrl-C to this process and its children."""
    try:
        terminal = os.open("/dev/tty", os.O_RDONLY | os.O_NOCTTY)
    except OSError:  # no terminal; or Windows, whose consoles send Ctrl-C to all processes
        return os.name == "nt"
    try:
        return os.tcgetpgrp(terminal) == os.getpgrp()
    except OSError:
        return False
    finally:
        os.close(terminal)


# -- in the process of the script ------------------------------------------------------------------


def child(path: str) -> int:
    # Import neither jax nor numpy here: the script may set environment variables that they read.
    from shardrules.door.patching import WhenImported
    from shardrules.unchecked import check_off, results
    from shardrules.watching import programs

    arguments, result, look, texts = pickle.loads(pathlib.Path(path).read_bytes())
    _compile_from(texts)
    target = script.find(arguments)
    if target.file in texts:
        target = target._replace(code=_compiled(texts, target.file))
    if target.spec is not None and target.spec.parent == "pytest":
        own = ["-p", "no:shardrules.PytestWatch"]  # its findings would set the exit code
        # To rewrite asserts, pytest compiles test files from disk, without the edits.
        own += ["--assert=plain"] * bool(texts)
        target = target._replace(argv=[target.argv[0], *own, *target.argv[1:]])
    outcome = Outcome()
    registered: dict[str, list[registry.Registration]] = {}

    def register(*_: object) -> None:
        registered.update(rules.register(arguments))

    seen = programs.watch()
    contexts = contextlib.ExitStack()
    contexts.enter_context(seen)
    contexts.callback(results.start(outcome.results))
    if look:
        contexts.callback(check_off.start(outcome.calls.append, register))
    elif target.file in texts or is_here(target.file, target.file):  # it installs the hooks itself
        contexts.callback(WhenImported("jax", register).stop)
    else:
        contexts.enter_context(check_off.switching([], register, flags.say, "leave"))
    report = sys.excepthook

    def record_error(kind: type, error: BaseException, trace: Any) -> None:
        outcome.raised = first_line(error)
        report(kind, error, trace)

    sys.excepthook = record_error

    def end(_: script.Ended) -> int:
        outcome.compiled = len(seen)
        _add_rules(outcome, registered)
        _write(result, outcome)  # write this before judging: after SIGTERM, little time is left
        outcome.sent, outcome.launched = _sent(seen)
        _write(result, outcome)
        return 0

    return script.run(target, contexts, end)


def _write(path: str, outcome: Outcome) -> None:
    new = pathlib.Path(path + ".new")
    new.write_bytes(pickle.dumps(outcome))
    new.replace(path)


def _add_rules(outcome: Outcome, registered: Mapping[str, Sequence[registry.Registration]]) -> None:
    """Record the flags whose rules a kernel used, and a note for each other flag."""
    declared: set[str] = set()
    kernels: list[str] = []
    for call in outcome.calls:
        declared.update(call.declared)
        kernels += [rule.kernel for rule in call.missing]
    missing = list(dict.fromkeys(kernels))
    for flag, entries in registered.items():
        if declared & {entry.where for entry in entries}:
            outcome.used.append(flag)
        elif entries:
            outcome.notes.append(rules.unmatched(flag, entries[0].name, missing))


def _sent(seen: Iterable[WatchedProgram]) -> tuple[Sent, Sent]:
    """Return the bytes that one device sends, and the number of its collectives, by program.

    A loop of unknown length counts once.
    """
    from shardrules.costs import accounts

    # Both runs number the functions of one name and kind of arguments alike; the lines of their
    # definitions move with the patch.
    functions: dict[tuple[str, tuple[str, ...]], list[str]] = collections.defaultdict(list)
    sent: Sent = collections.defaultdict(list)
    launched: Sent = collections.defaultdict(list)
    for program in seen:
        with contextlib.suppress(ShardrulesError):  # its backend does not return its HLO
            name, arguments = program.name, tuple(program.arguments)
            count, launches = 0, dict[tuple[str, str], int]()
            for entry in accounts.of(program.judgement).entries:
                runs, of = entry.each if entry.runs is None else entry.runs, entry.judged.collective
                count += runs * entry.wire_bytes
                launches[of.computation, of.name] = runs  # counts a combined collective once
            known = functions[name, arguments]
            if program.definition not in known:
                known.append(program.definition)
            key = name, arguments, known.index(program.definition)
            sent[key].append(count)
            launched[key].append(sum(launches.values()))
    return dict(sent), dict(launched)


def _compiled(texts: Mapping[str, str], file: str) -> types.CodeType:
    return compile(texts[file].removeprefix("\ufeff"), file, "exec", dont_inherit=True)


def _compile_from(texts: Mapping[str, str]) -> None:
    """Make imports, runpy and tracebacks read these files from the given texts."""
    loader: Any = importlib.machinery.SourceFileLoader
    get_code = loader.get_code

    def code_of(self: Any, name: str) -> Any:
        file = os.path.abspath(self.path)
        return _compiled(texts, file) if file in texts else get_code(self, name)

    open_code = io.open_code

    def opened(path: str) -> Any:  # called by runpy.run_path
        file = os.path.abspath(path)
        return io.BytesIO(texts[file].encode()) if file in texts else open_code(path)

    if texts:
        loader.get_code = code_of
        io.open_code = opened
    for file, text in texts.items():
        linecache.cache[file] = len(text), None, text.splitlines(keepends=True), file
