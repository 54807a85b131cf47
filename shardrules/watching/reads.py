"""Find lines of a script that read arrays on the host in each step, as ``float(loss)`` does."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import os
import pathlib
import sys
import types
from typing import Any

from shardrules.door import watching
from shardrules.errors import UnsupportedJaxError
from shardrules.paths import is_library
from shardrules.watching import compiling
from shardrules.watching.runs import Runs

_OWN = str(pathlib.Path(__file__).parents[1]) + os.sep
_OFTEN = 8  # report a line with this many reads, each after a run
_SHOWN = 3  # the most lines that are reported
_IN_A_TEST = "(shardrules.testing.steady_state finds such reads in a test)"


@dataclasses.dataclass
class _LineReads:
    """The reads at one line; ``first`` and ``last`` count runs before the first and last read."""

    first: list[int]
    last: list[int]
    times: int = 0
    steps: int = 1  # the first read, and each read with a run since the read before it
    is_shared: bool = False  # whether an array was on several devices

    @property
    def follows_each_run(self) -> bool:
        """Return whether there were many reads, with about one run of a program between two."""
        runs = (n - m for n, m in itertools.zip_longest(self.last, self.first, fillvalue=0))
        return self.steps >= _OFTEN and 2 * max(runs, default=0) <= 3 * (self.steps - 1)


class Reads:
    """Counts reads by ``float(x)``, ``print(x)``, ``jax.device_get(x)`` and the like."""

    def __init__(self, runs: Runs) -> None:
        self._runs = runs
        self._lines: dict[tuple[str, str], _LineReads] = {}
        self._hold = contextlib.ExitStack()
        self._is_on = False

    def __enter__(self) -> Reads:
        self._hold.callback(compiling.start(self._begin))
        return self

    def __exit__(self, *exc_info: Any) -> None:
        self._hold.close()

    def _begin(self, executable: Any, traced: compiling.Traced) -> None:
        """Start to count when JAX compiles the first program."""
        if not self._is_on:
            self._is_on = True
            with contextlib.suppress(UnsupportedJaxError):
                self._hold.callback(watching.on_reads(self._count))

    def _count(self, array: Any) -> None:
        shape = ",".join(map(str, array.shape))
        if not self._runs.read(array):
            return  # the array is from an earlier step, so no device waits for the read
        counts = self._runs.counts()
        key = user_line(), f"{array.dtype}[{shape}]"
        line = self._lines.setdefault(key, _LineReads(counts, counts))
        line.steps += counts != line.last
        line.last, line.times = counts, line.times + 1
        line.is_shared |= len(array.sharding.device_set) > 1

    def _often(self, is_shared: bool) -> list[tuple[tuple[str, str], _LineReads]]:
        lines = [(key, line) for key, line in self._lines.items() if key[0]]
        often = [(k, n) for k, n in lines if n.follows_each_run and n.is_shared is is_shared]
        return sorted(often, key=lambda pair: -pair[1].times)

    def findings(self) -> dict[str, str]:
        """Return advice for each line that reads after each run of a program.

        ``notes`` handles arrays on one device, since no other device waits for them.
        """
        return {
            line: f"{line} read an array ({what}) on the host {read.times} times, after each run "
            "of a program, which waits for all devices: keep the arrays and read them after the "
            "loop, or each one once the next step is started, or only every so many steps; where "
            "the loop itself needs the value, compute what follows from it in the program, as a "
            "learning rate, or put the loop into the program by jax.lax.while_loop "
            f"{_IN_A_TEST}"
            for (line, what), read in self._often(True)
        }

    def notes(self) -> list[str]:
        """Return advice for each line that reads from one device in each step."""
        return [
            f"{line} read an array ({what}) on the host {read.times} times, after each run of a "
            "program, which waits for the device: read it only every so many steps, or keep the "
            f"arrays and read them after the loop {_IN_A_TEST}"
            for (line, what), read in self._often(False)[:_SHOWN]
        ]


def user_line() -> str:
    """Return ``FILE:LINE`` of the user's innermost frame; empty if there is none."""
    frame: types.FrameType | None = sys._getframe(1)
    while frame is not None:
        path = frame.f_code.co_filename
        if not (path.startswith((_OWN, "<")) or is_library(path)):
            return f"{path}:{frame.f_lineno}"
        frame = frame.f_back
    return ""
