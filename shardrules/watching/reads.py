"""Lines of a script that read arrays on the host often, as ``float(loss)`` in each step does."""

from __future__ import annotations

import collections
import contextlib
import os
import pathlib
import sys
import types
from typing import Any

from shardrules.door import watching
from shardrules.errors import UnsupportedJaxError
from shardrules.paths import is_library
from shardrules.watching import compiling

_OWN = str(pathlib.Path(__file__).parents[1]) + os.sep
_OFTEN = 8  # reads at one line of which it is said
_SHOWN = 3  # lines


class Reads:
    """Counts reads by ``float(x)``, ``print(x)`` and the like, without ``jax.device_get``."""

    def __init__(self) -> None:
        self._counts: collections.Counter[tuple[str, str]] = collections.Counter()
        self._hold = contextlib.ExitStack()
        self._is_on = False

    def __enter__(self) -> Reads:
        self._hold.callback(compiling.start(self._begin))
        return self

    def __exit__(self, *exc_info: Any) -> None:
        self._hold.close()

    def _begin(self, executable: Any, traced: compiling.Traced) -> None:
        """Count once JAX is there and compiles the first program."""
        if not self._is_on:
            self._is_on = True
            with contextlib.suppress(UnsupportedJaxError):
                self._hold.callback(watching.on_reads(self._count))

    def _count(self, array: Any) -> None:
        shape = ",".join(map(str, array.shape))
        self._counts[user_line(), f"{array.dtype}[{shape}]"] += 1

    def notes(self) -> list[str]:
        """Say of each line that reads often what that costs, and what to do."""
        often = [(key, n) for key, n in self._counts.most_common() if n >= _OFTEN and key[0]]
        return [
            f"{line} read an array ({what}) on the host {n} times, which waits for the devices: in "
            "a loop, read it only every so many steps, or keep the arrays and read them after the "
            "loop (shardrules.testing.steady_state finds such reads in a test)"
            for (line, what), n in often[:_SHOWN]
        ]


def user_line() -> str:
    """Return ``FILE:LINE`` of the user's innermost frame; empty where there is none."""
    frame: types.FrameType | None = sys._getframe(1)
    while frame is not None:
        path = frame.f_code.co_filename
        if not (path.startswith((_OWN, "<")) or is_library(path)):
            return f"{path}:{frame.f_lineno}"
        frame = frame.f_back
    return ""
