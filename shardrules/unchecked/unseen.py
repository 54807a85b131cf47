"""Hide from the program the traces that it doesn't ask for.

What they print, log and warn of is dropped, and the Python state that they change is put back. What
other threads print, log and warn of is shown.
"""

from __future__ import annotations

import builtins
import contextlib
import functools
import io
import logging
import sys
import threading
import warnings
from collections.abc import Iterator
from typing import Any
from unittest import mock

from shardrules.unchecked import undo
from shardrules.unchecked.python_state import Kept

_lock = threading.Lock()
# The threads that look, each with the warnings of its that were dropped: (text, category, line).
_looking: dict[int, list[tuple[str, type[Warning], int]]] = {}
_patches = contextlib.ExitStack()  # those of the process, while any thread looks


class WritesToFile(Exception):
    """A body that opens a file to write to it: each look would write once more."""


def _is_looking() -> bool:
    return threading.get_ident() in _looking


class _Elsewhere:
    """A stream that drops what threads write while they look."""

    def __init__(self, stream: Any):
        self._stream = stream

    def write(self, text: str) -> int:
        return len(text) if _is_looking() else self._stream.write(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


@contextlib.contextmanager
def unseen(kept: Kept) -> Iterator[None]:
    """Drop what this thread prints, logs and warns of; put back what it changes."""
    here = threading.get_ident()
    with contextlib.ExitStack() as stack:
        stack.callback(kept.put_back)
        if here not in _looking:  # else a look within a look
            with _lock:
                if not _looking:
                    _patch()
                _looking[here] = []
            stack.callback(_shown_again, here)
        yield


def _shown_again(thread: int) -> None:
    with _lock:
        dropped = _looking.pop(thread)
        if not _looking:
            _patches.close()
    _forget(dropped)


def _patch() -> None:
    """Let prints, logs and warnings ask whether their thread looks; others' go where they went."""
    out: Any = _Elsewhere(sys.stdout)
    err: Any = _Elsewhere(sys.stderr)
    handle, show = logging.Logger.callHandlers, warnings.showwarning

    def handled(self: logging.Logger, record: logging.LogRecord) -> None:
        if not _is_looking():  # handlers hold streams, and write to files
            handle(self, record)

    def shown(message: Any, category: Any, filename: str, lineno: int, *where: Any) -> None:
        dropped = _looking.get(threading.get_ident())
        if dropped is None:
            show(message, category, filename, lineno, *where)
        else:
            dropped.append((str(message), category, lineno))

    open_file = builtins.open

    @functools.wraps(open_file)
    def opened(file: Any, mode: str = "r", *args: Any, **options: Any) -> Any:
        if _is_looking() and not {*"wax+"}.isdisjoint(mode) and not _asked_by_jax():
            raise WritesToFile("its body opens a file to write to it")
        return open_file(file, mode, *args, **options)

    for module in (builtins, io):  # pathlib's is that of io
        _patches.enter_context(mock.patch.object(module, "open", opened))
    _patches.enter_context(contextlib.redirect_stdout(out))
    _patches.enter_context(contextlib.redirect_stderr(err))
    _patches.enter_context(mock.patch.object(logging.Logger, "callHandlers", handled))
    _patches.enter_context(mock.patch.object(warnings, "showwarning", shown))


def _asked_by_jax() -> bool:
    """Return whether JAX opens a file, for its cache say, and not the program."""
    frame = sys._getframe(2)
    while frame.f_back is not None:
        name = str(frame.f_globals.get("__name__"))
        if not undo.is_others(name) or name.startswith("jax"):
            return name.startswith("jax")
        frame = frame.f_back
    return False


def _forget(dropped: list[tuple[str, type[Warning], int]]) -> None:
    """Let Python forget that it has shown these warnings, which it notes in each module."""
    if not dropped:
        return
    notes = [getattr(warnings, "onceregistry", {})]
    for module in tuple(sys.modules.values()):
        with contextlib.suppress(AttributeError):  # a lazy one imports when it is asked
            held = object.__getattribute__(module, "__dict__")
            notes.append(held.get("__warningregistry__", {}))
    for text, category, line in dropped:
        for shown in notes:
            for key in ((text, category), (text, category, 0), (text, category, line)):
                shown.pop(key, None)
