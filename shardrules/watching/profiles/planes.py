"""The events of a profile's planes, many at a time, as columns."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from shardrules.errors import ProfileError
from shardrules.watching.profiles import wire

_BATCH = 1 << 16  # events that are read at once
_NONE = -1  # no stat's number
_MOST_PARTS = 1 << 21  # lines of a plane, and names of its events
_SILENT = ("$", "end: ")  # calls of Python functions, and ends of operations on CPU


class Batch(NamedTuple):
    """Some events of a line."""

    name: np.ndarray  # numbers of Plane.events
    start: np.ndarray  # in nanoseconds after the origin
    end: np.ndarray
    # from a stat's name to which events have it, and the values (of texts, numbers of Plane.texts)
    stats: dict[str, tuple[np.ndarray, np.ndarray]]


class Line:
    """One line of a plane: a device's queue, or a thread of the host; it began at ``start_ns``."""

    def __init__(self, plane: Plane, start: int, end: int):
        self._plane = plane
        self._starts, self._ends, others = wire.places(plane.data, start, end, wire.LINE_EVENTS)
        held = {number: (at, to) for number, at, to in others}
        at, to = held.get(wire.LINE_NAME, (0, 0))
        self.name = wire.text(plane.data[at:to])
        self.start_ns = held.get(wire.LINE_START, (0, -1))[0]

    def batches(self, origin: int, stats: Sequence[str] = ()) -> Iterator[Batch]:
        """Yield its events, with some of their stats; times are after ``origin``."""
        # A float of nanoseconds since 1970 could hold multiples of 256 only.
        silent = np.array(sorted(self._plane.silent))
        for at in range(0, len(self._starts), _BATCH):
            starts, ends = (places[at : at + _BATCH] for places in (self._starts, self._ends))
            # An event begins with its name's number.
            first = next(wire.fields_of_many(self._plane.bytes, starts, ends), None)
            if first and len(first.of) == len(starts) and np.all(first.number == wire.EVENT_NAME):
                kept = ~np.isin(first.value, silent)
                starts, ends = starts[kept], ends[kept]
            if len(starts):
                yield self._batch(starts, ends, self.start_ns - origin, stats)

    def _batch(
        self, starts: np.ndarray, ends: np.ndarray, begin: int, stats: Sequence[str]
    ) -> Batch:
        count = len(starts)
        columns = {
            number: np.zeros(count, np.int64)
            for number in (wire.EVENT_NAME, wire.EVENT_OFFSET, wire.EVENT_DURATION)
        }
        held = []
        for some in wire.fields_of_many(self._plane.bytes, starts, ends):
            for number, column in columns.items():
                chosen = some.numbers(number)
                column[chosen.of] = chosen.value
            if stats:
                held.append(some.bytes(wire.EVENT_STATS))
        start = begin + columns[wire.EVENT_OFFSET] / 1e3
        return Batch(
            columns[wire.EVENT_NAME],
            start,
            start + columns[wire.EVENT_DURATION] / 1e3,
            self._stats(count, held, stats),
        )

    def _stats(
        self, count: int, held: Sequence[wire.Fields], names: Sequence[str]
    ) -> dict[str, tuple[np.ndarray, np.ndarray]]:
        if not held:
            return {}
        of, _, starts, ends = (np.concatenate(column) for column in zip(*held))
        name = np.zeros(len(of), np.int64)
        value = np.zeros(len(of), np.int64)
        for some in wire.fields_of_many(self._plane.bytes, starts, ends):
            chosen = some.numbers(wire.STAT_NAME)
            name[chosen.of] = chosen.value
            chosen = some.numbers(*wire.STAT_NUMBERS)
            value[chosen.of] = chosen.value
            texts = some.bytes(wire.STAT_TEXT)
            for at, start, end in zip(*(c.tolist() for c in (texts.of, texts.value, texts.end))):
                value[at] = self._plane.number_of(wire.text(self._plane.data[start:end]))
        columns = {}
        for wanted in names:
            mask = name == self._plane.stats.get(wanted, _NONE)
            if mask.any():
                has, column = np.zeros(count, bool), np.zeros(count, np.int64)
                has[of[mask]] = True
                column[of[mask]] = value[mask]
                columns[wanted] = has, column
        return columns


class Plane:
    """One plane: a device, or the host.

    Attributes:
      name: ``/device:TPU:0``, say.
      events: from numbers to events' names.
      texts: from numbers to stats' names, and to texts that are stats' values.
      stats: from a stat's name to its number.
      silent: numbers of events that are left out.
    """

    def __init__(self, data: memoryview, place: slice):
        self.data = data
        self.bytes = np.frombuffer(data, np.uint8)
        self._lines: list[tuple[int, int]] = []
        self.name: str = ""
        self.events: dict[int, str] = {}
        self.texts: dict[int, str] = {}
        names = {wire.EVENT_METADATA: self.events, wire.STAT_METADATA: self.texts}
        for count, (number, start, end) in enumerate(wire.spans(data, place.start, place.stop)):
            if count > _MOST_PARTS:
                raise ProfileError(f"the plane {self.name!r} has more than {_MOST_PARTS} parts")
            if number == wire.PLANE_NAME and end >= 0:
                self.name = wire.text(data[start:end])
            elif number == wire.LINES and end >= 0:
                self._lines.append((start, end))
            elif number in names and end >= 0:
                key, value = wire.map_entry(data[start:end])
                named = wire.messages(value, wire.METADATA_NAME)
                names[number][key] = wire.text(next(named, memoryview(b"")))
        self.stats: dict[str, int] = {name: number for number, name in self.texts.items()}
        self._added: dict[str, int] = {}
        self.silent: set[int] = {n for n, name in self.events.items() if name.startswith(_SILENT)}

    def number_of(self, text: str) -> int:
        """Give a text that stands in an event itself a number of ``texts``, below zero."""
        number = self._added.setdefault(text, -1 - len(self._added))
        self.texts[number] = text
        return number

    def lines(self) -> Iterator[Line]:
        """Yield its lines."""
        for start, end in self._lines:
            yield Line(self, start, end)
