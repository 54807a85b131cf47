"""Run a user's script in this process as ``python SCRIPT ARGS`` or ``python -m MODULE`` would."""

from __future__ import annotations

import argparse
import atexit
import contextlib
import importlib.machinery
import importlib.util
import io
import os
import shlex
import signal
import sys
import threading
import types
from collections.abc import Callable
from typing import NamedTuple, NoReturn

from shardrules.errors import ShardrulesError


class Script(NamedTuple):
    code: types.CodeType  # its compiled source
    file: str  # its absolute path
    spec: importlib.machinery.ModuleSpec | None  # a module's spec, None for a script
    argv: list[str]  # its ``sys.argv``
    folder: str  # the first entry of its ``sys.path``


class Ended(NamedTuple):
    """How a script ended."""

    code: int | None = 0  # its exit code; None if a signal ends it
    how: str = ""  # "it raised ValueError"; empty if the code is 0


def typed(arguments: argparse.Namespace) -> str:
    """Return the command line: the rules' flags, then script or module and its arguments."""
    rules: list[str] = []
    for flag, values in (("--import", arguments.rules), ("--rule", arguments.rule)):
        for value in values:
            rules += [flag, value]
    given = ["-m", *arguments.module] if arguments.module else _given(arguments)
    if not arguments.module and given[0].startswith("-"):
        given = ["--", *given]
    return shlex.join([*rules, *given])


def _given(arguments: argparse.Namespace) -> list[str]:
    script: list[str] = arguments.script
    return script[script[:1] == ["--"] :]


def find(arguments: argparse.Namespace) -> Script:
    """Read and compile the script or module that the arguments name."""
    if arguments.module:
        name, *rest = arguments.module
        return _module(name, rest)
    if arguments.module is not None or not _given(arguments):
        raise ShardrulesError("nothing to run; write SCRIPT ARGS, or -m MODULE ARGS")
    given, *rest = _given(arguments)
    path = os.path.abspath(given)
    if given.endswith(".ipynb"):
        name = shlex.quote(given.removesuffix(".ipynb") + ".py")
        raise ShardrulesError(
            f"{given} is a notebook, not a script: convert it with `jupyter nbconvert --to "
            f"script {shlex.quote(given)}` and run {name}; or, in the notebook, put `with "
            "shardrules.watch() as seen:` around the code that compiles, and `seen` in the "
            "cell's last line, which shows the report"
        )
    try:
        with io.open_code(path) as file:
            code = compile(file.read(), path, "exec", dont_inherit=True)
    except OSError as error:
        hint = "; put a flag of shardrules before the script" if given.startswith("-") else ""
        raise ShardrulesError(f"can't read the script {given}: {error.strerror}{hint}") from error
    except (SyntaxError, ValueError) as error:  # up to Python 3.11.3, null bytes raise ValueError
        raise ShardrulesError(f"{path} is not a Python script: {error}") from error
    return Script(code, path, None, [given, *rest], os.path.dirname(os.path.realpath(path)))


def _module(name: str, rest: list[str]) -> Script:
    _search_first(os.getcwd())
    try:
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.submodule_search_locations is not None:
            spec = importlib.util.find_spec(f"{name}.__main__")
    except (ImportError, ValueError) as error:
        raise ShardrulesError(f"can't find the module {name}: {error}") from error
    get_code = getattr(spec.loader if spec else None, "get_code", lambda name: None)
    try:
        code = get_code(spec.name if spec else name)
    except (SyntaxError, ImportError) as error:
        raise ShardrulesError(f"can't read the module {name}: {error}") from error
    if spec is None or code is None or spec.origin is None:
        raise ShardrulesError(
            f"can't find the module {name}, or there is nothing in it to run; -m takes a module's "
            "name, such as package.train, as python -m does"
        )
    return Script(code, spec.origin, spec, [spec.origin, *rest], os.getcwd())


def _search_first(folder: str) -> None:
    if not sys.flags.safe_path:
        sys.path[0] = folder


def run(
    target: Script, around: contextlib.AbstractContextManager[object], end: Callable[[Ended], int]
) -> int:
    """Run the script as ``__main__`` inside ``around``, call ``end``, and return the exit code."""
    # The script may end in four ways: it returns, raises, calls ``os._exit``, or gets SIGTERM. In
    # each, call ``end`` with how the script ended, before the process ends. The result of ``end``
    # is the exit code if the script's own code is 0.
    interrupts: list[bool] = []
    atexit.register(_end_by_sigint, interrupts)  # the first to be registered is called last
    spec = target.spec
    main = types.ModuleType("__main__")
    loader = importlib.machinery.SourceFileLoader("__main__", target.file)
    vars(main).update(
        __file__=target.file,
        __builtins__=__builtins__,
        __spec__=spec,
        __package__=spec.parent if spec else None,
        __cached__=spec.cached if spec else None,
        __loader__=spec.loader if spec else loader,
    )
    sys.modules["__main__"] = main
    sys.argv[:] = target.argv
    _search_first(target.folder)
    process, at_once = os.getpid(), os._exit

    def end_here(ended: Ended) -> int:
        return end(ended) if os.getpid() == process else 0  # a forked child has no report

    def terminated(number: int, frame: types.FrameType | None) -> None:
        signal.signal(number, signal.SIG_DFL)
        try:
            end_here(Ended(None, "SIGTERM ended it"))
        finally:  # take the default action, so that no more code of the script runs
            os.kill(os.getpid(), number)

    def exit_now(status: int) -> NoReturn:
        os._exit = at_once
        report_code = 0
        try:
            report_code = end_here(Ended(status, f"it called os._exit({status})" * bool(status)))
        finally:
            at_once(status or report_code)

    os._exit = exit_now
    # Batch schedulers end a job by SIGTERM. A script that handles it replaces this handler.
    handled = signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
    if handled:
        signal.signal(signal.SIGTERM, terminated)
        _end_forked_at_once(terminated)
    try:
        with around:
            ended = _executed(target.code, main, interrupts)
    finally:
        os._exit = at_once
    _flush()
    report_code = end(ended)
    if handled and signal.getsignal(signal.SIGTERM) is terminated:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
    return ended.code or report_code


def _end_forked_at_once(handler: Callable[..., None]) -> None:
    """Give forked processes the default action for SIGTERM."""
    # Block the signal until the child has the default action again. Otherwise a signal could come
    # before the child's interpreter is ready, and Python drops it if there is a handler.
    if not hasattr(os, "register_at_fork"):  # Windows
        return
    before = threading.local()

    def block() -> None:
        before.mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})

    def restore() -> None:
        signal.pthread_sigmask(signal.SIG_SETMASK, before.mask)

    def restore_in_child() -> None:
        if signal.getsignal(signal.SIGTERM) is handler:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
        restore()

    os.register_at_fork(before=block, after_in_parent=restore, after_in_child=restore_in_child)


def _executed(code: types.CodeType, main: types.ModuleType, interrupts: list[bool]) -> Ended:
    """Run code, report its exception, and wait for its threads, in the same order as Python."""
    ended = Ended()
    try:
        exec(code, vars(main))
    except SystemExit as error:
        if error.code is None or isinstance(error.code, int):
            exit_code = error.code or 0
        else:
            print(error.code, file=sys.stderr)
            exit_code = 1
        ended = Ended(exit_code, "it called sys.exit" if exit_code else "")
    except BaseException as error:  # noqa: BLE001
        trace = error.__traceback__
        while trace is not None and trace.tb_frame.f_code is not code:
            trace = trace.tb_next  # leave out our frames: Python's report begins with the script
        _flush()
        sys.excepthook(type(error), error.with_traceback(trace), trace)
        ended = Ended(1, f"it raised {type(error).__name__}")
        if isinstance(error, KeyboardInterrupt):
            interrupts.append(True)
            ended = Ended(128 + signal.SIGINT, "it was interrupted")
    with contextlib.suppress(KeyboardInterrupt):  # Ctrl-C ends the wait
        for thread in threading.enumerate():
            if not thread.daemon and thread is not threading.current_thread():
                thread.join()
    return ended


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()


def _end_by_sigint(interrupts: list[bool]) -> None:
    """End this process by SIGINT, after its atexit functions, if the script was interrupted."""
    if interrupts:
        _flush()
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
