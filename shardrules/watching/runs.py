"""Count how often a process's programs ran, and whose results they took as arguments."""

from __future__ import annotations

import collections
import contextlib
import functools
import weakref
from collections.abc import Callable, Collection, Sequence
from typing import Any, NamedTuple

from shardrules.door import compiled, watching
from shardrules.door.places import owns
from shardrules.errors import UnsupportedJaxError

_UNREAD = 8  # after this many runs in a row without a read by the host, stop following a program


def _forget_fast_paths() -> None:
    with contextlib.suppress(UnsupportedJaxError):  # inside of the user's program
        watching.forget_fast_paths()


class RunRecord:
    """The runs of one executable."""

    def __init__(self, kept: Sequence[int] | None = None, is_step: bool = True):
        self.runs = 0
        self.is_step = is_step  # False for JAX's own operations outside jit
        # Counts arguments by the program that made them, the number of its result, and the
        # parameter in this program's HLO.
        self.took: collections.Counter[tuple[RunRecord, int, int]] = collections.Counter()
        self._kept = kept  # the arguments that are parameters; None for all

    def take(self, maker: RunRecord, result: int, argument: int) -> None:
        if self._kept is None:
            self.took[maker, result, argument] += 1
        elif argument in self._kept:
            self.took[maker, result, self._kept.index(argument)] += 1


class _Made(NamedTuple):
    """Which run made an array."""

    by: RunRecord
    result: int
    run: int  # its number; 1 is the first

    @property
    def is_late(self) -> bool:
        """Return whether the step that made the array has started again since."""
        return self.by.is_step and self.by.runs > self.run


class Runs:
    """Follows programs over several devices, and the script's own programs on one device.

    Programs over several devices never get JAX's fast path. On one device, JAX's operations outside
    jit keep it. The script's own programs get it back after 8 runs in a row without a read, and
    lose it at the next read. (In a loop that reads in each step they don't get it back.) Each such
    change clears the fast paths of all functions; the next call of each function makes it again.
    """

    def __init__(self) -> None:
        self.records: list[RunRecord] = []
        self._reads = 0
        self._resting: list[Callable[[], None]] = []  # functions that follow a program again
        self._host = RunRecord()
        self._made: dict[int, tuple[weakref.ref[Any], _Made]] = {}

    def follow(
        self, executable: Any, definition: str, record: RunRecord | None = None
    ) -> RunRecord | None:
        """Count an executable's runs from now on; return None if it isn't followed.

        Args:
          executable: JAX's executable.
          definition: ``NAME at FILE:LINE`` of its function.
          record: the record of another executable that runs the same program.
        """
        is_step = not owns(definition.rpartition(" at ")[2])
        devices = compiled.device_count(executable)
        if devices < (1 if is_step and definition else 2):
            return None
        if record is None:
            record = RunRecord(compiled.kept_arguments(executable), is_step)
            self.records.append(record)
        if devices == 1:
            self._count(weakref.ref(executable), record)
        else:
            compiled.after_each_run(executable, functools.partial(self._ran, record))
        return record

    def _count(self, kept: weakref.ref[Any], record: RunRecord) -> None:
        """Count the runs of a program on one device, until many runs come without a read."""
        if (executable := kept()) is None:
            return
        unread, reads = 0, self._reads

        def ran(arguments: Sequence[Any], results: Sequence[Any]) -> None:
            nonlocal unread, reads
            self._ended(record, results)
            unread, reads = unread + 1 if reads == self._reads else 1, self._reads
            if unread >= _UNREAD and stop():
                self._resting.append(lambda: self._count(kept, record))
                _forget_fast_paths()  # C++ has cached that this program has no fast path

        stop = compiled.after_each_run(executable, ran)

    def counts(self) -> list[int]:
        """Return how often each step's executable ran, in the order in which following began."""
        return [record.runs for record in self.records if record.is_step]

    def read(self, array: Any) -> bool:
        """Record that the host reads an array; return whether the devices may be idle meanwhile.

        If the program that made the array was started again since, the devices have that run to do.
        The host then waits for an earlier run only.
        """
        made = self._take(self._host, array, 0)
        self._reads += 1
        if self._resting:
            resting, self._resting = self._resting, []
            for follow in resting:
                follow()
            _forget_fast_paths()
        return made is None or not made.is_late

    def fed(self, same: Collection[RunRecord]) -> dict[tuple[int, int], tuple[int, int]]:
        """Return runs and first runs of a program, by a result and the parameter that it becomes.

        The result is that parameter in the next run. Otherwise it is used at most once after each
        series of such runs. A first run begins a series: its parameter isn't the program's result.
        """
        runs = sum(record.runs for record in same)
        fed: collections.Counter[tuple[int, int]] = collections.Counter()
        used: collections.Counter[int] = collections.Counter()
        for record in (*self.records, self._host):
            for (maker, result, parameter), count in record.took.items():
                if maker in same and record in same:
                    fed[result, parameter] += count
                elif maker in same:
                    used[result] += count
        first = {place: runs - count for place, count in fed.items()}
        return {place: (runs, n) for place, n in first.items() if n > 0 and used[place[0]] <= n}

    def _take(self, record: RunRecord, array: Any, argument: int) -> _Made | None:
        ref, made = self._made.get(id(array), (None, None))
        if ref is None or made is None or ref() is not array:
            return None
        record.take(made.by, made.result, argument)
        return made

    def _ran(self, record: RunRecord, arguments: Sequence[Any], results: Sequence[Any]) -> None:
        for number, array in enumerate(arguments):
            self._take(record, array, number)
        self._ended(record, results)

    def _ended(self, record: RunRecord, results: Sequence[Any]) -> None:
        record.runs += 1
        for number, array in enumerate(results):
            key = id(array)
            made = _Made(record, number, record.runs)
            self._made[key] = (weakref.ref(array, self._forgets(key)), made)

    def _forgets(self, key: int) -> Any:
        def forget(ref: Any) -> None:
            if key in self._made and self._made[key][0] is ref:
                del self._made[key]

        return forget
