"""Record a few steps of a running script after its warm-up, for ``run --profile``."""

from __future__ import annotations

import collections
import contextlib
import pathlib
import re
import tempfile
import threading
import weakref
from collections.abc import Callable
from typing import Any

from shardrules.door import compiled, seams, watching
from shardrules.errors import UnsupportedJaxError, first_line
from shardrules.hlo.proof.collectives import KINDS
from shardrules.watching import compiling
from shardrules.watching.profiles.profile import UNFINISHED

_CALLS = 2  # the script is warm after this many calls of a program without a compilation
_RESTARTS = 9  # the most recordings that a compilation may end before the last one
_COLLECTIVE = re.compile(rf" (?:{'|'.join(KINDS)})(?:-start)?\(")

_Folder = tempfile.TemporaryDirectory[str]  # deletes only what it made itself


class Recorder(watching.Listener):
    """Starts JAX's profiler when a script has warmed up, and stops it some steps later.

    The script may mark steps with ``jax.profiler.StepTraceAnnotation``. Otherwise, a step is a call
    of the first program with collectives that is called again. Only calls in the main thread count.
    If something is compiled while it records, the warm-up starts again, a few times. At the end,
    the recording with the most steps is moved into ``folder``, which other processes may also write
    to.
    """

    # ``returned`` counts the calls of each program since the last compilation. Once a program has
    # been called _CALLS times, ``_start`` begins to record: at that call, or at the next marker if
    # the script marks steps. ``_count`` ends the recording after the wanted steps. ``compiling``
    # ends it early, and the calls are counted from zero.

    def __init__(self, step_count: int, folder: str):
        self.left = self._wanted = step_count  # the number of steps still to record
        # the reason why nothing is recorded
        self.trouble: str = "no program with collectives was called in the main thread"
        self.recorded: pathlib.Path | None = None  # the profile, once recording is over
        self._folder = pathlib.Path(folder)
        self._calls: collections.Counter[int] = collections.Counter()  # by the id of XLA's program
        self._communicating: weakref.WeakKeyDictionary[Any, bool] = weakref.WeakKeyDictionary()
        self._program: Any = None  # the program whose calls are the steps
        self._results: Any = None  # the results of the last call, if steps are marked
        self._marked = False
        self._recording = False
        self._looks = False
        self._own: _Folder | None = None  # the folder of the current recording
        # of the best recording so far: how many steps were left, and its folder
        self._best: tuple[int, _Folder] | None = None
        self._restarts = 0
        self._ended = "the script ended"
        self._hold = contextlib.ExitStack()

    def __enter__(self) -> Recorder:
        self._hold.callback(compiling.start(self._begin))
        return self

    def __exit__(self, *exc_info: Any) -> None:
        self.end()

    def end(self) -> None:
        """End the recording, if one is on, and stop watching the script."""
        if self._recording:
            self._stop()
        if self._best is not None:  # few steps are better than none
            self.left, own = self._best
            if self.left == self._wanted:
                self.trouble = f"{self._ended} before a step did; {self.advice}"
            else:
                self.trouble = "JAX's profiler wrote no file"
                try:  # don't raise inside a call of the script
                    self.recorded = _moved(pathlib.Path(own.name), self._folder)
                except OSError as error:
                    self.trouble = first_line(error)
                self.trouble = "" if self.recorded else self.trouble
            own.cleanup()
            self._best = None
        self._hold.close()

    @property
    def shortfall(self) -> str:
        """Say why fewer steps were recorded than wanted; empty if all were."""
        if not self.left:
            return ""
        recorded = f"{self._wanted - self.left} of --profile's {self._wanted} steps"
        return f"{self._ended} after {recorded}; {self.advice}"

    @property
    def advice(self) -> str:
        """Say how long a script must run."""
        return (
            f"it has warmed up once a program with collectives was called {_CALLS} times without "
            "a compilation between, and each call of that program is a step unless "
            "jax.profiler.StepTraceAnnotation marks the steps; let the script run "
            f"{self._wanted + _CALLS} steps or more after its last compilation"
        )

    def _begin(self, executable: Any, traced: compiling.Traced) -> None:
        """Start to watch calls when JAX compiles the first program."""
        if threading.current_thread() is not threading.main_thread() or self._looks:
            return
        self._looks = True
        try:
            self._hold.callback(watching.start(self))
            self._hold.callback(seams.intercept("step_begins", self._mark_begins))
            self._hold.callback(seams.intercept("step_ends", self._mark_ends))
        except UnsupportedJaxError as error:
            self.trouble = str(error)

    def compiling(self, name: str) -> None:
        if self._recording:
            self._stop()
            if self.left and self._restarts == _RESTARTS:
                self._ended = (
                    f"recording ended, since the script compiled in each of {_RESTARTS + 1} "
                    "recordings,"
                )
                self.end()
            elif self.left:
                self._restarts += 1
                self.left = self._wanted
        self._calls.clear()

    def returned(
        self, name: str, arguments: list[watching.Argument], executable: Any, results: Any
    ) -> None:
        if not self.left or executable is None or not self._communicates(executable):
            return
        program = compiled.loaded(executable)
        self._calls[id(program)] += 1
        if not self._recording:
            self.trouble = f"the script ended before it had warmed up; {self.advice}"
        if self._marked:
            self._results = results
        elif self._recording and program is self._program:
            self._count(results)
        elif not self._recording and self._calls[id(program)] == _CALLS:
            self._program = program
            self._start(results)

    def _mark_begins(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if not self._recording:
            self._marked = True
            if self.left and max(self._calls.values(), default=0) >= _CALLS:
                self._start(self._results)
        return original(*args, **kwargs)

    def _mark_ends(self, original: Callable[..., Any], marker: Any, *error: Any) -> Any:
        result = original(marker, *error)
        if self._recording and self._marked:
            self._count(self._results)
        return result

    def _communicates(self, executable: Any) -> bool:
        if executable not in self._communicating:
            text = compiled.executable_text(executable) or ""
            self._communicating[executable] = _COLLECTIVE.search(text) is not None
        return self._communicating[executable]

    def _count(self, results: Any) -> None:
        self.left -= 1
        if not self.left:
            _wait(results)
            self.end()

    def _start(self, results: Any) -> None:
        import jax

        _wait(results)
        options: dict[str, Any] = {}
        if hasattr(jax.profiler, "ProfileOptions"):
            options["profiler_options"] = jax.profiler.ProfileOptions()
            options["profiler_options"].python_tracer_level = 0  # Python's calls take time and room
        try:
            self._own = _Folder(prefix=UNFINISHED, dir=self._folder, ignore_cleanup_errors=True)
            jax.profiler.start_trace(self._own.name, **options)
        except Exception as error:  # the script may record a profile itself  # noqa: BLE001
            self.trouble, self.left = first_line(error), 0
            if self._own is not None:
                self._own.cleanup()
                self._own = None
            return
        self._recording, self.trouble = True, ""

    def _stop(self) -> None:
        import jax

        self._recording = False
        worse, self._own = self._own, None
        try:
            jax.profiler.stop_trace()
            if worse is not None and (self._best is None or self.left < self._best[0]):
                best, worse = (self.left, worse), self._best[1] if self._best else None
                self._best = best
        except Exception as error:  # the script may have ended it  # noqa: BLE001
            self.trouble, self.left = first_line(error), 0
        if worse is not None:
            worse.cleanup()


def _moved(recorded: pathlib.Path, folder: pathlib.Path) -> pathlib.Path | None:
    """Move a profile's files into a folder that may hold others; return their folder, or None."""
    into = None
    for file in [*recorded.glob("plugins/profile/*/*")]:
        into = into or folder / file.parent.relative_to(recorded)
        while (into / file.name).exists():  # from another process in the same second
            into = into.with_name(f"{into.name}_1")
        into.mkdir(parents=True, exist_ok=True)
        file.replace(into / file.name)
    return into


def _wait(results: Any) -> None:
    import jax

    for leaf in jax.tree_util.tree_leaves(results):
        if isinstance(leaf, jax.Array) and not leaf.is_deleted():
            leaf.block_until_ready()
