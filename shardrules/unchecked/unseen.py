"""Hide retraces from the program, which didn't ask for them.

A retrace's prints, logs and warnings are dropped, and the Python state that it changes is restored.
If it would change something outside of Python's objects, the change is prevented and the retrace
fails. Other threads are not affected.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging
import sys
import threading
import warnings
from collections.abc import Iterable, Iterator
from typing import Any
from unittest import mock

from shardrules.unchecked import outside, retrace
from shardrules.unchecked.python_state import Kept


@dataclasses.dataclass
class _Look:
    """The warnings and changes that were suppressed while a thread retraced."""

    # The warnings that were dropped: text, category, line.
    warnings: list[tuple[str, type[Warning], int]] = dataclasses.field(default_factory=list)
    refused: str = ""  # the first change outside of Python's objects


_lock = threading.Lock()
_looking: dict[int, _Look] = {}  # by thread
_patches = contextlib.ExitStack()  # the process's patches while any thread retraces


def _is_looking() -> bool:
    return threading.get_ident() in _looking


class _Elsewhere:
    """A stream that drops what threads write while they retrace."""

    def __init__(self, stream: Any):
        self._stream = stream

    def write(self, text: Any) -> Any:
        return len(text) if _is_looking() else self._stream.write(text)

    def writelines(self, lines: Iterable[Any]) -> None:
        for line in lines:
            self.write(line)

    @property
    def buffer(self) -> Any:
        return _Elsewhere(self._stream.buffer)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


@contextlib.contextmanager
def unseen(kept: Kept) -> Iterator[None]:
    """Drop this thread's prints, logs and warnings, and restore the state that it changes.

    Raises:
      retrace.Unseeable: if the thread would change something outside of Python's objects.
    """
    here = threading.get_ident()
    with contextlib.ExitStack() as stack:
        stack.callback(kept.put_back)
        if here not in _looking:  # if the thread is there, this retrace is inside another one
            with _lock:
                _listen()
                if not _looking:
                    _patch()
                _looking[here] = _Look()
            stack.callback(_shown_again, here)
        look = _looking[here]
        try:
            yield
        except Exception:
            if not look.refused:
                raise
        if look.refused:  # raise even if the body caught the error
            raise retrace.Unseeable(look.refused)


def _shown_again(thread: int) -> None:
    with _lock:
        look = _looking.pop(thread)
        if not _looking:
            _patches.close()
    _forget(look.warnings)


@functools.cache
def _listen() -> None:
    """Register the audit hook once per process, since Python can't remove one."""
    _heard.__cantrace__ = True  # type: ignore[attr-defined]  # a debugger may step into it
    sys.addaudithook(_heard)


def _heard(event: str, args: tuple[Any, ...]) -> None:
    if not _looking or (look := _looking.get(threading.get_ident())) is None:
        return
    change = outside.change(event, args)
    if change and outside.is_asked_for(sys._getframe(1)):
        look.refused = look.refused or f"its body {change}"
        raise retrace.Unseeable(look.refused)


def _patch() -> None:
    """Patch prints, logs and warnings to drop the output of threads that retrace, and no other."""
    out: Any = _Elsewhere(sys.stdout)
    err: Any = _Elsewhere(sys.stderr)
    handle, show = logging.Logger.callHandlers, warnings.showwarning

    def handled(self: logging.Logger, record: logging.LogRecord) -> None:
        if not _is_looking():  # drop the record: handlers write to files and other streams
            handle(self, record)

    def shown(message: Any, category: Any, filename: str, lineno: int, *where: Any) -> None:
        look = _looking.get(threading.get_ident())
        if look is None:
            show(message, category, filename, lineno, *where)
        else:
            look.warnings.append((str(message), category, lineno))

    _patches.enter_context(contextlib.redirect_stdout(out))
    _patches.enter_context(contextlib.redirect_stderr(err))
    _patches.enter_context(mock.patch.object(logging.Logger, "callHandlers", handled))
    _patches.enter_context(mock.patch.object(warnings, "showwarning", shown))


def _forget(dropped: list[tuple[str, type[Warning], int]]) -> None:
    """Make Python forget that it showed these warnings: remove them from modules' registries."""
    if not dropped:
        return
    notes = [getattr(warnings, "onceregistry", {})]
    for module in tuple(sys.modules.values()):
        with contextlib.suppress(AttributeError):  # read a lazy module without importing it
            held = object.__getattribute__(module, "__dict__")
            notes.append(held.get("__warningregistry__", {}))
    for text, category, line in dropped:
        for shown in notes:
            for key in ((text, category), (text, category, 0), (text, category, line)):
                shown.pop(key, None)
