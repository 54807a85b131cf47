"""Hide from the program the traces that it doesn't ask for.

What they print, log and warn of is dropped, and the Python state that they change is put back. What
other threads print, log and warn of is shown.
"""

from __future__ import annotations

import contextlib
import logging
import sys
import threading
import warnings
from collections.abc import Iterator
from typing import Any
from unittest import mock

from shardrules.unchecked.python_state import Kept


class _Elsewhere:
    """A stream that drops what one thread writes."""

    def __init__(self, stream: Any):
        self._stream = stream
        self._thread = threading.get_ident()

    def write(self, text: str) -> int:
        return len(text) if threading.get_ident() == self._thread else self._stream.write(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


@contextlib.contextmanager
def unseen(kept: Kept) -> Iterator[None]:
    """Drop what this thread prints, logs and warns of; put back what it changes."""
    out: Any = _Elsewhere(sys.stdout)
    err: Any = _Elsewhere(sys.stderr)
    streams = contextlib.redirect_stdout(out), contextlib.redirect_stderr(err)
    try:
        with streams[0], streams[1], _no_logs(), _no_warnings():
            yield
    finally:
        kept.put_back()


@contextlib.contextmanager
def _no_logs() -> Iterator[None]:
    """Drop this thread's log records: handlers hold streams, and write to files."""
    here, original = threading.get_ident(), logging.Logger.callHandlers

    def call_handlers(self: logging.Logger, record: logging.LogRecord) -> None:
        if threading.get_ident() != here:
            original(self, record)

    with mock.patch.object(logging.Logger, "callHandlers", call_handlers):
        yield


@contextlib.contextmanager
def _no_warnings() -> Iterator[None]:
    """Drop this thread's warnings, and let Python forget that it has shown them."""
    here, original = threading.get_ident(), warnings.showwarning
    dropped: list[tuple[str, type[Warning], int]] = []

    def show(
        message: Any, category: Any, filename: str, lineno: int, *args: Any, **kw: Any
    ) -> None:
        if threading.get_ident() != here:
            original(message, category, filename, lineno, *args, **kw)
        else:
            dropped.append((str(message), category, lineno))

    with mock.patch.object(warnings, "showwarning", show):
        yield
    # Python notes what it has shown in each module and for all: by text, category and line or none.
    modules = (getattr(module, "__dict__", {}) for module in tuple(sys.modules.values()))
    notes = [held["__warningregistry__"] for held in modules if "__warningregistry__" in held]
    for text, category, line in dropped:
        for shown in (*notes, getattr(warnings, "onceregistry", {})):
            for key in ((text, category), (text, category, 0), (text, category, line)):
                shown.pop(key, None)
