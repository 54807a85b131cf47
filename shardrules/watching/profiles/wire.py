"""Reads the few fields of a profile's protocol buffers that are needed; no library, no copies.

The schema is XLA's: ``XSpace`` and its parts of xla/tsl/profiler/protobuf/xplane.proto, and
``HloProto`` of xla/service/hlo.proto. xprof ships classes for them, and installs TensorBoard's
server with these.
"""

from __future__ import annotations

import array
import re
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import numpy as np

from shardrules.errors import ProfileError

# From what is read to its field's number.
PLANES = 1  # XSpace.planes
PLANE_NAME, LINES, EVENT_METADATA, STAT_METADATA = 2, 3, 4, 5  # XPlane
MAP_KEY, MAP_VALUE = 1, 2  # of a map's entry
METADATA_NAME, METADATA_STATS = 2, 5  # XEventMetadata, and XStatMetadata.name
LINE_NAME, LINE_START, LINE_EVENTS, LINE_DISPLAY_NAME = 2, 3, 4, 11  # XLine
EVENT_NAME, EVENT_OFFSET, EVENT_DURATION, EVENT_STATS = 1, 2, 3, 4  # XEvent
STAT_NAME, STAT_TEXT, STAT_BYTES = 1, 5, 6  # XStat
STAT_NUMBERS = (3, 4, 7)  # XStat: unsigned, signed, and the text's number in the plane's table
HLO_MODULE = 1  # HloProto
SHARDINGS = 14  # HloModuleProto.spmd_parameters_shardings

PROGRAMS = "/host:metadata"  # the plane whose events' metadata are programs
PROGRAM_NAME = re.compile(r"(.*)\((\d+)\)")  # jit_step(8): the module's name, its program id
_VARINT_BYTES = 10  # at most
_FIXED = {1: 8, 5: 4}  # wire types of numbers of a fixed size, to their bytes
_MOST_FIELDS = 256  # of an event; those that profilers write have about ten
_MOST_PLANES = 1 << 12


class Program:
    """One program of a profile, by its name, ``jit_step``, and its serialized HloModuleProto."""

    def __init__(self, name: str, ids: Iterable[int], proto: bytes):
        self.name: str = name
        self.ids: set[int] = set(ids)  # by which events name it
        self.proto: bytes = proto
        # each parameter's serialized OpSharding, which JAX 0.11 and newer print no more
        self.shardings: list[bytes] = list(map(bytes, messages(memoryview(proto), SHARDINGS)))


def _varint(data: memoryview, at: int, end: int) -> tuple[int, int]:
    """Read a number, and return it and where it ends."""
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


def _field(data: memoryview, at: int, end: int) -> tuple[int, int, int, int]:
    """Read a field: its number, its value as ``spans`` yields it, and where the next one begins."""
    key, at = _varint(data, at, end)
    number, kind = key >> 3, key & 7
    if kind == 0:
        value, at = _varint(data, at, end)
        return number, value, -1, at
    if kind == 2:
        size, at = _varint(data, at, end)
    else:
        size = _FIXED.get(kind, -1)
    if size < 0 or not number:
        raise ProfileError(f"no field begins at byte {at} of {end}")
    if size > end - at:
        raise ProfileError(f"a field of {size} bytes stands {end - at} bytes before the end")
    return number, at, at + size, at + size


def spans(data: memoryview, at: int, end: int) -> Iterator[tuple[int, int, int]]:
    """Yield each field of a message: its number, start and end; or a number's value, and -1."""
    while at < end:
        number, value, stop, at = _field(data, at, end)
        yield number, value, stop


def places(
    data: memoryview, at: int, end: int, number: int
) -> tuple[np.ndarray, np.ndarray, list[tuple[int, int, int]]]:
    """Return starts and ends of a field that a message holds many of, and a few of the others."""
    key = number << 3 | 2
    starts, ends = array.array("q"), array.array("q")
    others: list[tuple[int, int, int]] = []
    while at < end:
        if data[at] == key and end - at > 3:  # quickly over sizes of one or two bytes
            size, start = data[at + 1], at + 2
            if size > 127:
                size, start = size & 127 | data[start] << 7, start + 1
            if size < 1 << 14 and size <= end - start:
                at = start + size
                starts.append(start)
                ends.append(at)
                continue
        other, start, stop, at = _field(data, at, end)
        if other == number and stop >= 0:
            starts.append(start)
            ends.append(stop)
        elif len(others) < _MOST_FIELDS:
            others.append((other, start, stop))
    return np.array(starts), np.array(ends), others


def fields(data: memoryview) -> Iterator[tuple[int, int | memoryview]]:
    """Yield the number and the value of each field of a message."""
    for number, start, end in spans(data, 0, len(data)):
        yield number, start if end < 0 else data[start:end]


class Fields(NamedTuple):
    """One field of each of many messages."""

    of: np.ndarray  # which message
    number: np.ndarray
    value: np.ndarray  # a number, or where bytes start
    end: np.ndarray  # -1, or where bytes end

    def numbers(self, *fields: int) -> Fields:
        """Return those of some fields that hold a number."""
        return self._chosen(fields, self.end < 0)

    def bytes(self, field: int) -> Fields:
        """Return those of a field that hold bytes."""
        return self._chosen((field,), self.end >= 0)

    def _chosen(self, fields: tuple[int, ...], mask: np.ndarray) -> Fields:
        mask = mask & np.logical_or.reduce([self.number == field for field in fields])
        return Fields(*(column[mask] for column in self))


def fields_of_many(data: np.ndarray, starts: np.ndarray, ends: np.ndarray) -> Iterator[Fields]:
    """Yield the first fields of many messages ``data[start:end]``, then their second ones, ..."""
    of, at = np.arange(len(starts)), starts
    for _ in range(_MOST_FIELDS + 1):
        inside = at < ends[of]
        of, at = of[inside], at[inside]
        if not len(of):
            return
        end = ends[of]
        key, at = varints(data, at, end)
        kind = key & 7
        fixed = np.select([kind == wire for wire in _FIXED], list(_FIXED.values()), 0)
        value, after = varints(data, at, np.where(fixed > 0, at, end))
        is_bytes = kind == 2
        size = np.where(is_bytes, value, fixed)
        after = np.where(fixed > 0, at, after)
        if np.any((kind == 0) & (after == at)):
            raise ProfileError("an event of it ends in a number")
        if np.any((kind > 5) | (kind == 3) | (kind == 4) | (size < 0) | (size > end - after)):
            raise ProfileError("an event of it has a field that is none, or that is cut off")
        number = kind == 0
        yield Fields(
            of, key >> 3, np.where(number, value, after), np.where(number, -1, after + size)
        )
        at = after + size
    raise ProfileError(f"an event of it has more than {_MOST_FIELDS} fields")


def varints(data: np.ndarray, at: np.ndarray, end: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Read a number at each of many places before its end; where that comes first, nothing."""
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


def text(data: memoryview) -> str:
    """Decode a string."""
    return bytes(data).decode("utf-8", "replace")


def messages(data: memoryview, number: int) -> Iterator[memoryview]:
    """Yield the fields of one number that hold bytes."""
    for field, start, end in spans(data, 0, len(data)):
        if field == number and end >= 0:
            yield data[start:end]


def map_entry(entry: memoryview) -> tuple[int, memoryview]:
    """Return key and value of an entry of a map."""
    key, value = 0, memoryview(b"")
    for number, held in fields(entry):
        if number == MAP_KEY and isinstance(held, int):
            key = held
        elif number == MAP_VALUE and not isinstance(held, int):
            value = held
    return key, value


def planes(data: memoryview, *names: str) -> Iterator[slice]:
    """Yield where the planes stand that have one of some names, or any without them."""
    count = 0
    for number, start, end in spans(data, 0, len(data)):
        if number != PLANES or end < 0:
            continue
        count += 1
        if count > _MOST_PLANES:
            raise ProfileError(f"it has more than {_MOST_PLANES} planes")
        name = text(next(messages(data[start:end], PLANE_NAME), memoryview(b"")))
        if not names or name in names:
            yield slice(start, end)


def programs(data: memoryview) -> Iterator[Program]:
    """Yield the programs that a serialized XSpace holds."""
    for plane in map(data.__getitem__, planes(data, PROGRAMS)):
        for _, metadata in map(map_entry, messages(plane, EVENT_METADATA)):
            name = "".join(map(text, messages(metadata, METADATA_NAME)))
            match = PROGRAM_NAME.fullmatch(name)
            for stat in messages(metadata, METADATA_STATS):
                for proto in messages(stat, STAT_BYTES):
                    for module in messages(proto, HLO_MODULE):
                        ids = [int(match[2])] if match else []
                        yield Program(match[1] if match else name, ids, bytes(module))
