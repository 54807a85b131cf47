"""Read the few fields that we need of a profile's protocol buffers, without a library or copies.

The schema is XLA's: ``XSpace`` and its parts in xla/tsl/profiler/protobuf/xplane.proto, and
``HloProto`` in xla/service/hlo.proto. xprof ships classes for them, but also installs TensorBoard's
server. Events are read many at a time, as columns.
"""

from __future__ import annotations

import array
import re
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from shardrules.errors import ProfileError

# The numbers of the fields that are read.
PLANES = 1  # XSpace.planes
PLANE_NAME, LINES, EVENT_METADATA, STAT_METADATA = 2, 3, 4, 5  # XPlane
MAP_KEY, MAP_VALUE = 1, 2  # an entry of a map
METADATA_NAME, METADATA_STATS = 2, 5  # XEventMetadata, and XStatMetadata.name
LINE_NAME, LINE_START, LINE_EVENTS = 2, 3, 4  # XLine
EVENT_NAME, EVENT_OFFSET, EVENT_DURATION, EVENT_STATS = 1, 2, 3, 4  # XEvent
STAT_NAME, STAT_TEXT, STAT_BYTES = 1, 5, 6  # XStat
STAT_NUMBERS = (3, 4, 7)  # XStat: unsigned, signed, and the text's number in the plane's table
HLO_MODULE = 1  # HloProto
SHARDINGS = 14  # HloModuleProto.spmd_parameters_shardings

PROGRAMS = "/host:metadata"  # the plane whose events' metadata are programs
_TITLE = re.compile(r"(.*)\((\d+)\)")
_VARINT_BYTES = 10  # at most
_FIXED = {1: 8, 5: 4}  # maps the wire types of numbers with a fixed size to their bytes
_MOST_FIELDS = 256  # the most fields of an event; profilers write about ten
_BATCH = 1 << 16  # how many events are read at once


# One message.


def _varint(data: memoryview, at: int, end: int) -> tuple[int, int]:
    """Return the number at a position, and the position after it."""
    if at < end and data[at] < 128:
        return data[at], at + 1
    value = 0
    for shift in range(0, 7 * _VARINT_BYTES, 7):
        if at >= end:
            break
        byte = data[at]
        at += 1
        value |= (byte & 127) << shift
        if byte < 128:
            return value, at
    raise ProfileError(f"byte {at} of {end} ends in a number")


def _field(data: memoryview, at: int, end: int) -> tuple[int, int | memoryview, int]:
    """Return a field's number and value, and the position after it."""
    key, at = _varint(data, at, end)
    number, kind = key >> 3, key & 7
    if kind == 0:
        value, at = _varint(data, at, end)
        return number, value, at
    if kind == 2:
        size, at = _varint(data, at, end)
    else:
        size = _FIXED.get(kind, -1)
    if size < 0 or not number:
        raise ProfileError(f"no field begins at byte {at} of {end}")
    if size > end - at:
        raise ProfileError(f"a field of {size} bytes stands {end - at} bytes before the end")
    return number, data[at : at + size], at + size


def fields(data: memoryview) -> Iterator[tuple[int, int | memoryview, int]]:
    """Yield number and value of each field of a message, and the position after it."""
    at, end = 0, len(data)
    while at < end:
        number, value, at = _field(data, at, end)
        yield number, value, at


def messages(data: memoryview, number: int, *inner: int) -> Iterator[memoryview]:
    """Yield the bytes of each field with this number, or follow the path ``inner`` inside them."""
    for field, value, _ in fields(data):
        if field == number and not isinstance(value, int):
            yield from messages(value, *inner) if inner else (value,)


def text(data: bytes | memoryview) -> str:
    return bytes(data).decode("utf-8", "replace")


# Many messages.


class Table(NamedTuple):
    """The fields of many messages: all messages' first fields, then all second fields, ..."""

    of: np.ndarray  # the index of the message
    number: np.ndarray
    value: np.ndarray  # a number, or the position where bytes start
    end: np.ndarray  # -1 for a number, or the position where bytes end

    def column(self, count: int, *numbers: int) -> np.ndarray:
        """Return the number that each of ``count`` messages holds in one of these fields, or 0."""
        column = np.zeros(count, np.int64)
        chosen = np.isin(self.number, numbers) & (self.end < 0)
        column[self.of[chosen]] = self.value[chosen]
        return column

    def bytes(self, number: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return messages, starts and ends of a field that holds bytes."""
        chosen = (self.number == number) & (self.end >= 0)
        return self.of[chosen], self.value[chosen], self.end[chosen]


def table(data: np.ndarray, starts: np.ndarray, ends: np.ndarray) -> Table:
    """Return the fields of many messages ``data[start:end]``."""
    # Read one field of all messages at once, and go on with the messages that have more fields. So
    # the Python loop runs once per field of the longest message, not once per message.
    of, at = np.arange(len(starts)), starts
    parts = [Table(*np.zeros((4, 0), np.int64))]
    for _ in range(_MOST_FIELDS + 1):
        inside = at < ends[of]
        of, at = of[inside], at[inside]
        if not len(of):
            return Table(*map(np.concatenate, zip(*parts)))
        end = ends[of]
        key, at = _varints(data, at, end)
        kind = key & 7
        fixed = np.select([kind == wire for wire in _FIXED], list(_FIXED.values()), 0)
        value, after = _varints(data, at, np.where(fixed > 0, at, end))
        is_bytes = kind == 2
        size = np.where(is_bytes, value, fixed)
        after = np.where(fixed > 0, at, after)
        if np.any((kind == 0) & (after == at)):
            raise ProfileError("an event of it ends in a number")
        if np.any((kind > 5) | (kind == 3) | (kind == 4) | (size < 0) | (size > end - after)):
            raise ProfileError("an event of it has a field that is none, or that is cut off")
        is_number = kind == 0
        value, stop = np.where(is_number, value, after), np.where(is_number, -1, after + size)
        parts.append(Table(of, key >> 3, value, stop))
        at = after + size
    raise ProfileError(f"an event of it has more than {_MOST_FIELDS} fields")


def _varints(data: np.ndarray, at: np.ndarray, end: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the numbers at many positions, and the positions after them; 0 at a message's end."""
    value = np.zeros(len(at), np.int64)
    at = at.copy()
    left = np.flatnonzero(at < end)
    for shift in range(0, 7 * _VARINT_BYTES, 7):
        byte = data[at[left]].astype(np.int64)
        value[left] |= (byte & 127) << shift
        at[left] += 1
        left = left[byte > 127]
        if not len(left):
            return value, at
        if np.any(at[left] >= end[left]):
            break
    raise ProfileError("an event of it ends in a number")


# A profile's planes, lines and programs.


class WireProgram:
    """One program of a profile, by its name, ``jit_step``, and its serialized HloModuleProto."""

    def __init__(self, name: str, number: int, proto: bytes):
        self.name = name
        self.number = number  # the number by which events name it; 0 if unknown
        self.proto = proto
        # each parameter's serialized OpSharding, which programs' text lacks since JAX 0.11
        self.shardings = list(map(bytes, messages(memoryview(proto), SHARDINGS)))


def read_title(title: str) -> tuple[str, int]:
    """Return name and number of a program from its title, ``jit_step(8)``; 0 if it has none."""
    match = _TITLE.fullmatch(title)
    # Events hold the same 64 bits as a signed number.
    return (match[1], (int(match[2]) + (1 << 63)) % (1 << 64) - (1 << 63)) if match else (title, 0)


class Plane:
    """One plane: a device, or the host."""

    def __init__(self, data: memoryview):
        self.name = ""  # such as ``/device:TPU:0``
        self.events: dict[int, str] = {}  # maps numbers to names of events
        self.texts: dict[int, str] = {}  # maps numbers to names of stats, and to texts of values
        self._lines: list[memoryview] = []
        self._metadata: list[tuple[str, memoryview]] = []  # the events' names and metadata
        self._added: dict[str, int] = {}
        names = {EVENT_METADATA: self.events, STAT_METADATA: self.texts}
        for number, part, _ in fields(data):
            if isinstance(part, int):
                continue
            if number == PLANE_NAME:
                self.name = text(part)
            elif number == LINES:
                self._lines.append(part)
            elif number in names:
                entry = {inner: value for inner, value, _ in fields(part)}
                key, value = entry.get(MAP_KEY, 0), entry.get(MAP_VALUE, memoryview(b""))
                if isinstance(key, int) and not isinstance(value, int):
                    name = text(next(messages(value, METADATA_NAME), b""))
                    names[number][key] = name
                    self._metadata += [(name, value)] if number == EVENT_METADATA else []
        self.stats = {name: number for number, name in self.texts.items()}  # maps names to numbers

    def programs(self) -> Iterator[WireProgram]:
        """Yield the programs that the plane ``PROGRAMS`` holds."""
        for name, metadata in self._metadata:
            for module in messages(metadata, METADATA_STATS, STAT_BYTES, HLO_MODULE):
                yield WireProgram(*read_title(name), bytes(module))

    def number_of(self, text: str) -> int:
        """Add an event's own text to ``texts``, and return its negative number."""
        number = self._added.setdefault(text, -1 - len(self._added))
        self.texts[number] = text
        return number

    def lines(self) -> Iterator[WireLine]:
        return (WireLine(self, data) for data in self._lines)


class Batch(NamedTuple):
    """Some events of a line."""

    name: np.ndarray  # numbers of Plane.events
    start: np.ndarray  # in nanoseconds after the origin
    end: np.ndarray
    # for each stat, which events have it, and its values (for texts, numbers in Plane.texts)
    stats: list[tuple[np.ndarray, np.ndarray]]


class WireLine:
    """One line of a plane (a device's queue or a host's thread), which began at ``start_ns``."""

    def __init__(self, plane: Plane, data: memoryview):
        self._plane = plane
        self._bytes = np.frombuffer(data, np.uint8)
        self.name, self.start_ns = "", 0
        starts, ends = array.array("q"), array.array("q")
        for number, value, at in fields(data):
            if isinstance(value, int):
                self.start_ns = value if number == LINE_START else self.start_ns
            elif number == LINE_NAME:
                self.name = text(value)
            elif number == LINE_EVENTS:
                starts.append(at - len(value))
                ends.append(at)
        self._starts, self._ends = np.array(starts), np.array(ends)

    def batches(self, origin: int, stats: Sequence[str] = ()) -> Iterator[Batch]:
        """Yield its events, with some of their stats, and times relative to ``origin``."""
        # Subtract the origin first: a float would round nanoseconds since 1970 to multiples of 256.
        for at in range(0, len(self._starts), _BATCH):
            starts, ends = (places[at : at + _BATCH] for places in (self._starts, self._ends))
            read, count = table(self._bytes, starts, ends), len(starts)
            name = read.column(count, EVENT_NAME)
            start = self.start_ns - origin + read.column(count, EVENT_OFFSET) / 1e3
            end = start + read.column(count, EVENT_DURATION) / 1e3
            yield Batch(name, start, end, self._stats(name, read, stats) if stats else [])

    def _stats(
        self, event: np.ndarray, read: Table, names: Sequence[str]
    ) -> list[tuple[np.ndarray, np.ndarray]]:
        of, starts, ends = read.bytes(EVENT_STATS)
        stats = table(self._bytes, starts, ends)
        name, value = stats.column(len(of), STAT_NAME), stats.column(len(of), *STAT_NUMBERS)
        for at, start, end in zip(*(column.tolist() for column in stats.bytes(STAT_TEXT))):
            value[at] = self._plane.number_of(text(self._bytes[start:end].data))
        columns = []
        for wanted in names:
            chosen = name == self._plane.stats.get(wanted, -1)
            has, column = np.zeros(len(event), bool), np.zeros(len(event), np.int64)
            has[of[chosen]] = True
            column[of[chosen]] = value[chosen]
            columns.append((has, column))
        return columns
