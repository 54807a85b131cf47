"""Reads the few fields of a profile's protocol buffers that hold the programs.

The schema is XLA's: ``XSpace``, ``XPlane``, ``XEventMetadata`` and ``XStat`` of
xla/tsl/profiler/protobuf/xplane.proto, ``HloProto`` of xla/service/hlo.proto. Reading two numbers
of each takes no library; xprof, which ships the classes, installs TensorBoard's server with them.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

from shardrules.errors import ProfileError

__all__ = ["Program", "fields", "programs"]

# From what is read to its field's number.
_PLANES = 1  # XSpace.planes
_NAME, _EVENT_METADATA = 2, 4  # XPlane
_MAP_VALUE = 2  # of a map's entry
_METADATA_NAME, _METADATA_STATS = 2, 5  # XEventMetadata
_BYTES = 6  # XStat.bytes_value
_HLO_MODULE = 1  # HloProto.hlo_module

_PROGRAMS = b"/host:metadata"  # the plane whose events' metadata are programs
_PROGRAM_NAME = re.compile(r"(.*)\((\d+)\)")  # jit_step(8): the module's name, its program id
_VARINT_BYTES = 10  # at most
_FIXED = {1: 8, 5: 4}  # wire types of numbers of a fixed size, to their bytes


class Program:
    """One program of a profile.

    Attributes:
      name: the module's, ``jit_step``.
      ids: by which events name it; several where one text was compiled several times.
      proto: its serialized HloModuleProto.
    """

    def __init__(self, name: str, ids: Iterable[int], proto: bytes):
        self.name: str = name
        self.ids: set[int] = set(ids)
        self.proto: bytes = proto


def fields(data: memoryview) -> Iterator[tuple[int, int | memoryview]]:
    """Yield the number and the value of each field of a message; nothing is copied.

    Raises:
      ProfileError: the bytes are not a message, or end too early.
    """
    at, end = 0, len(data)

    def varint() -> int:
        nonlocal at
        value = 0
        for shift in range(0, 7 * _VARINT_BYTES, 7):
            if at >= end:
                break
            byte = data[at]
            at += 1
            value |= (byte & 127) << shift
            if byte < 128:
                return value
        raise ProfileError(f"it ends in a number, after {at} of a message's {end} bytes")

    while at < end:
        key = varint()
        number, kind = key >> 3, key & 7
        if kind == 0:
            yield number, varint()
            continue
        size = varint() if kind == 2 else _FIXED.get(kind)
        if size is None or not number:
            raise ProfileError(f"byte {at} of a message of {end} bytes begins no field")
        if size > end - at:
            raise ProfileError(f"a field of {size} bytes stands {end - at} bytes before the end")
        yield number, data[at : at + size]
        at += size


def programs(data: memoryview) -> list[Program]:
    """Return the programs that a serialized XSpace holds.

    Raises:
      ProfileError: it is no XSpace, or is cut off.
    """
    found: list[Program] = []
    for plane in _messages(data, _PLANES):
        if _PROGRAMS not in map(bytes, _messages(plane, _NAME)):
            continue
        for entry in _messages(plane, _EVENT_METADATA):
            for metadata in _messages(entry, _MAP_VALUE):
                found += _programs_of(metadata)
    return found


def _programs_of(metadata: memoryview) -> Iterator[Program]:
    name = b"".join(map(bytes, _messages(metadata, _METADATA_NAME))).decode("utf-8", "replace")
    for stat in _messages(metadata, _METADATA_STATS):
        for proto in _messages(stat, _BYTES):
            for module in _messages(proto, _HLO_MODULE):
                known = _PROGRAM_NAME.fullmatch(name)
                ids = [int(known[2])] if known else []
                yield Program(known[1] if known else name, ids, bytes(module))


def _messages(data: memoryview, number: int) -> Iterator[memoryview]:
    """Yield the fields of one number that hold bytes."""
    for found, value in fields(data):
        if found == number and not isinstance(value, int):
            yield value
