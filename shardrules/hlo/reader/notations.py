"""The notation of device groups, meshes and shardings.

``{{0,1},{2,3}}``, ``[2,4]<=[4,2]T(1,0)``, ``mesh['data'=4,'model'=2] {'model'}``.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
import re
import zlib
from collections.abc import Sequence

import numpy as np

_NUMBERS = re.compile(r"\d+")
_IOTA = re.compile(r"\[([\d,\s]*)\]\s*<=\s*\[([\d,\s]*)\]\s*(?:T\(([\d,\s]*)\))?")
_ROW = r"\{(?:\d{1,9}(?:,\d{1,9})*+)?\}"
_LIST = re.compile(rf"\{{(?:{_ROW}(?:,{_ROW})*+)?\}}")
_FILLED = re.compile(r"\{(\d[\d,]*)\}")
_AS_LISTED = str.maketrans("[]()", "{}{}", " ")
_MESH = re.compile(r"mesh\[([^\]]*?)(?:,\s*(device_ids=\(.*?\)\)?))?\]")
_IDS_AFTER = re.compile(r"\s*,\s*(?=device_ids=)")
_AXIS = re.compile(r"'((?:[^'\\]|\\.)*)'\s*=\s*(\d+)")
_DEVICE_IDS = re.compile(
    r"device_ids=\(\s*+(?:\[([\d,\s]*)\]\s*+(?:T\(([\d,\s]*)\))?|([\d,\s]*+))\s*+\)"
)
_AXIS_REF = re.compile(r"'((?:[^'\\]|\\.)*)'(?::\((\d+)\)(\d+))?")
_TILED = re.compile(  # possessive, since spaces could be split in many ways
    r"devices\s*+=\s*+(\[[\d,\s]*\])\s*+(<=\s*+\[[\d,\s]*\]\s*+(?:T\([\d,\s]*\))?|[\d,\s]++)"
    r"\s*+(last_tile_dim_replicate|last_tile_dims=\{([^}]*)\})?\s*+"
    r"(?:shard_(?:as|like)\s++\d++)?\s*+"
)
_ALIKE = re.compile(r"(?<!\s)\s*+shard_(?:as|like)\s++\d++\s*$")
_METADATA = re.compile(r"metadata=\{(?:[^{}\"]|\"(?:[^\"\\]|\\.)*\"|\{[^{}]*\})*\}")
_INVENTED = re.compile(r"_?axis_\d+")
_MAX_DEVICES = 1 << 20
# Lists of ids: all lists concatenated, and the length of each.
IdLists = tuple[np.ndarray, np.ndarray]


class NotationError(ValueError):
    """A group list, a mesh or a sharding in a notation that we don't read."""


def read_ints(text: str) -> list[int]:
    """Return the numbers in a text; raise NotationError if one is too large."""
    values = [int(n) for n in _NUMBERS.findall(text) if len(n) < 10]
    if len(values) != len(_NUMBERS.findall(text)):
        raise NotationError(f"a number in {text[:60]!r} is too large")
    return values


def iota_tiles(text: str) -> np.ndarray:
    """Read ``[4,2]<=[2,4]T(1,0)``: an iota, reshaped, transposed and reshaped again."""
    match = _IOTA.match(text)
    if not match:
        raise NotationError(f"expected [..]<=[..], got {text[:60]!r}")
    tiles, shape = read_ints(match[1]), read_ints(match[2])
    total = int(np.prod(shape, dtype=np.float64)) if shape else 1
    if total > _MAX_DEVICES or int(np.prod(tiles, dtype=np.float64)) != total:
        raise NotationError(f"{text[:60]!r}: the two lists of sizes have different products")
    array = np.arange(total).reshape(shape or [1])
    if match[3]:
        order = read_ints(match[3])
        if sorted(order) != list(range(len(shape))):
            raise NotationError(f"{text[:60]!r}: T(...) does not order {len(shape)} dimensions")
        array = array.transpose(order)
    return array.reshape(tiles)


@dataclasses.dataclass(frozen=True, eq=False)
class TextMesh:
    """A mesh in the text: its axes in order, and the device at each position."""

    axes: tuple[tuple[str, int], ...]
    devices: np.ndarray

    @property
    def is_invented(self) -> bool:
        """Return whether XLA invented the names axis_0 and axis_1 for shardings without names."""
        return any(_INVENTED.fullmatch(name) for name, _ in self.axes)

    @property
    def is_row_major(self) -> bool:
        return bool((self.devices.reshape(-1) == np.arange(self.devices.size)).all())


def read_mesh(text: str) -> tuple[TextMesh, int]:
    """Read ``mesh['data'=4,'model'=2]``, with device ids inside or after it; return its end too."""
    # First read the axes, which give the number of devices. Then read the device ids, as a list or
    # as a transposed iota; without them, the devices are in order.
    match = _MESH.match(text)
    if not match:
        raise NotationError(f"expected mesh['axis'=size,...], got {text[:60]!r}")
    axes = tuple((name, int(size)) for name, size in _AXIS.findall(match[1]) if len(size) < 10)
    leftover = _AXIS.sub("", match[1]).replace(",", "").strip()
    if leftover:
        raise NotationError(f"can't read {leftover[:40]!r} in {match[0][:60]!r}")
    sizes = [size for _, size in axes]
    total = math.prod(sizes)
    if total > _MAX_DEVICES or total < 1:
        raise NotationError(f"{match[0][:60]!r} has {total} devices")
    devices, end = np.arange(total), match.end()
    after = _IDS_AFTER.match(text, end)
    if match[2] or after:
        parts = _DEVICE_IDS.match(text, after.end() if after else match.start(2))
        if not parts:
            raise NotationError(f"can't read the device ids in {text[:80]!r}")
        end = max(end, parts.end())
        if parts[3] is not None:
            devices = np.array(read_ints(parts[3]), dtype=np.int64)
        else:
            shape = ",".join(map(str, read_ints(parts[1])))
            devices = iota_tiles(f"[{total}]<=[{shape}]" + (f"T({parts[2]})" if parts[2] else ""))
    if sorted(devices.reshape(-1).tolist()) != list(range(total)):
        raise NotationError(f"the device ids in {text[:80]!r} are not 0 to {total - 1}, each once")
    return TextMesh(axes, devices.reshape(sizes)), end


def _axis_groups(mesh: TextMesh, refs: Sequence[tuple[str, str, str]]) -> np.ndarray:
    """Return the groups along some axes or sub-axes of a mesh, one per row."""
    # 'a':(2)2 is the factor of size 2 of axis 'a' after a major factor of size 2. Split each axis
    # at the borders of its sub-axes, so that each reference is one dimension, and move the
    # referenced dimensions to the end: then each row is a group.
    names = [name for name, _ in mesh.axes]
    sizes: list[int] = []
    slots: dict[tuple[int, int, int], int] = {}
    cuts: dict[int, set[int]] = {}
    wanted: list[tuple[int, int, int]] = []
    for name, pre, size in refs:
        if name not in names:
            raise NotationError(f"axis {name!r} is not in the mesh of {', '.join(names)}")
        axis = names.index(name)
        full = mesh.axes[axis][1]
        before, width = (int(pre[:9]), int(size[:9])) if pre else (1, full)
        if before < 1 or width < 1 or full % (before * width):
            raise NotationError(
                f"sub-axis ({before}){width} does not divide axis {name!r} of size {full}"
            )
        wanted.append((axis, before, width))
        cuts.setdefault(axis, set()).update((before, before * width))
    for axis, (_, full) in enumerate(mesh.axes):
        edges = sorted(cuts.get(axis, set()) | {1, full})
        for low, high in itertools.pairwise(edges):
            if high % low:
                raise NotationError("sub-axes that don't nest")
            slots[(axis, low, high // low)] = len(sizes)
            sizes.append(high // low)
    grouped = []
    for axis, before, width in wanted:
        if width == 1:
            continue
        if (axis, before, width) not in slots:
            raise NotationError("sub-axes that overlap")
        grouped.append(slots[(axis, before, width)])
    if len(set(grouped)) != len(grouped):
        raise NotationError("an axis is named twice")
    rest = [i for i in range(len(sizes)) if i not in grouped]
    width = math.prod(sizes[i] for i in grouped)
    return mesh.devices.reshape(sizes).transpose(rest + grouped).reshape(-1, width)


def read_groups(text: str) -> tuple[IdLists, TextMesh | None]:
    """Read a ``replica_groups`` value: lists of ids, and the mesh if the text names one."""
    text = text.strip()
    if text.startswith("mesh"):
        mesh, end = read_mesh(text)
        rest = text[end:].strip().lstrip(",").strip()
        if not (rest.startswith("{") and rest.endswith("}")):
            raise NotationError(f"expected {{'axis',...}} after the mesh in {text[:80]!r}")
        return _lists_of(_axis_groups(mesh, _AXIS_REF.findall(rest))), mesh
    if text.startswith("["):
        match = _IOTA.fullmatch(text)
        tiles = iota_tiles(text)
        if not match or tiles.ndim != 2:
            raise NotationError(f"expected [groups,members]<=[...], got {text[:60]!r}")
        return _lists_of(tiles), None
    rows = "".join(text.split())
    if not _LIST.fullmatch(rows):
        raise NotationError(
            f"expected {{{{0,1}},{{2,3}}}}, [2,2]<=[4] or mesh[...] {{...}}, got {text[:60]!r}"
        )
    filled = _FILLED.findall(rows)
    members = np.fromstring(",".join(filled), np.int64, sep=",")
    return (members, np.array([row.count(",") + 1 for row in filled], np.int64)), None


def _lists_of(matrix: np.ndarray) -> IdLists:
    return matrix.reshape(-1).astype(np.int64), np.full(len(matrix), matrix.shape[1], np.int64)


def id_count(mode: str, partitions: int, replicas: int) -> int:
    """Return the number of ids that a mode's groups choose from (see ``flatten_groups``)."""
    counts = {"cross_partition": partitions, "flattened": partitions * replicas}
    return counts.get(mode, replicas)


def flatten_groups(groups: IdLists, mode: str, partitions: int, replicas: int) -> IdLists:
    """Return a collective's groups with flattened device ids.

    The mode says what the given ids mean, as in XLA's GetCollectiveOpGroupMode.
    """
    members, sizes = groups
    limit = id_count(mode, partitions, replicas)
    beyond = members[members >= limit]
    if beyond.size:
        raise NotationError(f"id {beyond[0]} is beyond the {limit} that the module has")
    counts = np.bincount(members, minlength=1)
    if counts.max() > 1:
        raise NotationError(f"id {counts.argmax()} occurs twice")
    if not members.size:
        members, sizes = np.arange(limit), np.array([limit])
    if mode == "cross_partition" and replicas > 1:
        members = (np.arange(replicas)[:, None] * partitions + members).reshape(-1)
        sizes = np.tile(sizes, replicas)
    elif mode == "cross_replica_and_partition" and partitions > 1:
        members = (members[:, None] * partitions + np.arange(partitions)).reshape(-1)
        sizes = sizes * partitions
    elif mode == "cross_replica" and partitions > 1:
        row = np.repeat(np.arange(sizes.size), sizes)
        copies = np.arange(partitions)
        order = np.argsort((row[:, None] * partitions + copies).reshape(-1), kind="stable")
        members = (members[:, None] * partitions + copies).reshape(-1)[order]
        sizes = np.repeat(sizes, partitions)
    return members, sizes


@functools.lru_cache(maxsize=256)
def split_tuple_sharding(text: str) -> tuple[str, ...]:
    """Split ``{{replicated}, {devices=...}}`` into its leaves; return a single leaf alone."""
    text = re.sub(r"/\*.*?\*/", "", text).strip()
    if not text.startswith("{"):
        text = "{" + text + "}"
    inner = text[1:-1].strip()
    if not inner.startswith("{"):
        return (text,)
    leaves = []
    depth = start = 0
    for position, letter in enumerate(inner):
        if letter == "{":
            start = start if depth else position
            depth += 1
        elif letter == "}":
            depth -= 1
            if not depth:
                leaves.append(inner[start : position + 1])
    return tuple(leaves)


def sharding_tiles(text: str, partitions: int) -> tuple[int, ...] | None:
    """Return the number of each partition's tile in one leaf's sharding.

    Return None if each device may have data of its own (maximal, manual, unreduced, unknown).
    """
    inner = _METADATA.sub("", text.strip())
    if inner.startswith("{") and inner.endswith("}"):
        inner = inner[1:-1]
    inner = _ALIKE.sub("", inner.strip().rstrip(",").strip())
    if inner == "replicated":
        return (0,) * partitions
    if inner.startswith("mesh["):
        holders = _named_holders(text, inner, partitions)
    elif inner.startswith("devices"):
        holders = _tiled_holders(text, inner, partitions)
    elif inner.startswith(("maximal", "manual", "unknown", "unreduced")):
        return None
    else:
        raise NotationError(f"can't read the sharding {text[:80]!r}")
    if holders is None:
        return None
    numbers = np.empty(partitions, np.int64)
    numbers[holders] = np.arange(len(holders))[:, None]
    return tuple(numbers.tolist())


def _tiled_holders(text: str, inner: str, partitions: int) -> np.ndarray | None:
    """Return the partitions that hold each tile, one tile per row; None if copies may differ."""
    match = _TILED.fullmatch(inner)
    if not match:
        raise NotationError(f"can't read the sharding {text[:80]!r}")
    if match[2].startswith("<="):
        tiles = iota_tiles(match[1] + match[2])
    else:
        sizes, ids = read_ints(match[1]), read_ints(match[2])
        if int(np.prod(sizes, dtype=np.float64)) != len(ids):
            raise NotationError(f"the sharding {text[:80]!r} lists {len(ids)} devices")
        tiles = np.array(ids, dtype=np.int64).reshape(sizes)
    if sorted(tiles.reshape(-1).tolist()) != list(range(partitions)):
        raise _wrong_size(text, tiles.size, partitions)
    kinds = ["replicated"] if match[3] == "last_tile_dim_replicate" else []
    if match[4]:
        kinds = [k.strip() for k in match[4].split(",") if k.strip()]
    if len(kinds) > tiles.ndim:
        raise NotationError(f"the sharding {text[:80]!r} has too few dimensions")
    if any(k != "replicated" for k in kinds):
        # If we read `{unreduced, replicated}` as replicated, a needed psum would seem redundant.
        return None
    return tiles.reshape(-1, math.prod(tiles.shape[tiles.ndim - len(kinds) :]))


def _named_holders(text: str, inner: str, partitions: int) -> np.ndarray | None:
    """Return the partitions that hold each tile, one tile per row; None if copies may differ."""
    mesh, end = read_mesh(inner)
    rest = inner[end:].strip().lstrip(",").strip()
    if rest == "replicated":
        return np.arange(partitions).reshape(1, -1)
    if mesh.devices.size != partitions:
        raise _wrong_size(text, mesh.devices.size, partitions)
    dims, _, tail = rest.partition("]")
    leftover = re.sub(r"replicated=\{[^}]*\}", "", tail).replace(",", "").strip()
    if (
        not dims.startswith("[") or leftover or "?" in dims
    ):  # unreduced=, manual=, an open dimension
        return None
    # A group along the sharded axes has one partition of each tile, so the columns are the tiles.
    return _axis_groups(mesh, _AXIS_REF.findall(dims)).T


def _wrong_size(text: str, devices: int, partitions: int) -> NotationError:
    return NotationError(
        f"the sharding {text[:80]!r} is for {devices} devices, the module has "
        f"{partitions} partitions"
    )


def notation(rows: Sequence[Sequence[int]], ordered: bool = False) -> str:
    """Return groups as XLA writes them, ``[4,2]<=[8]`` or ``{{0,3},{1,2}}``, in canonical order."""
    # ``ordered``: the order within a group matters, as in an all-gather. If the groups are an iota
    # with one step, write that; the first group gives the step.
    rows = sorted(list(r) if ordered else sorted(r) for r in rows)
    count, width = len(rows), len(rows[0]) if rows else 0
    total = count * width
    step = rows[0][1] - rows[0][0] if width > 1 else 1
    if total and rows[-1][-1] == total - 1 and step > 0 and total % (width * step) == 0:
        shape = [total // (width * step), width, step]
        counted = np.arange(total).reshape(shape).transpose(0, 2, 1).reshape(count, width)
        if counted.tolist() == rows:
            if step == 1:
                return f"[{count},{width}]<=[{total}]"
            if shape[0] == 1:
                return f"[{count},{width}]<=[{width},{step}]T(1,0)"
            return f"[{count},{width}]<=[{','.join(map(str, shape))}]T(0,2,1)"
    return listed(rows)


def listed(rows: Sequence[Sequence[int]]) -> str:
    """Return lists of devices as text, ``{{0,3},{1,2}}``; shorten long text, with a checksum."""
    text = str(list(map(tuple, rows))).replace(",)", ")").translate(_AS_LISTED)
    if len(text) <= 80:
        return text
    return f"{text[: text.rfind('}', 0, 60) + 1]},... #{zlib.crc32(text.encode()):08x}}}"
