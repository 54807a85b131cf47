"""Device groups, meshes, and the relation "devices i and j hold the same value".

A device is a position, ``replica * num_partitions + partition``: what HLO calls a flattened id. A
relation is an equivalence of devices, kept as an array that gives each device the lowest device of
its class, and interned: equal relations have equal small ids, so that comparing and combining them
costs a dictionary look-up however many devices there are.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import json
import re
import zlib
from collections.abc import Mapping, Sequence

import numpy as np

from shardrules import errors

EQUAL = 0  # the relation in which all devices hold the same value
_FEW = 64  # devices for which a loop is quicker than numpy
_DIRECT = 1 << 20  # labels below it are looked up in an array, others are sorted
DISTINCT = 1  # the relation in which every device holds its own


class Relations:
    """The interned relations over a number of devices.

    Attributes:
      device_count: how many there are.
      told: somebody said how many; else it is the most that the text names.
    """

    def __init__(self, device_count: int, told: bool = True):
        self.device_count = device_count
        self.told = told
        self._ids: dict[bytes, int] = {}
        self._arrays: list[np.ndarray] = []
        self._refined: dict[tuple[int, int], int] = {}
        self._constant: dict[tuple[int, int], bool] = {}
        self._lowest = np.empty(0, np.int32)  # by label, its lowest device
        self._falling = np.arange(device_count - 1, -1, -1, dtype=np.int32)
        self.intern(np.zeros(device_count, np.int64))
        self.intern(np.arange(device_count))
        if device_count == 1:  # one device: equal and distinct are the same array
            self._arrays.append(self._arrays[0])

    def intern(self, labels: np.ndarray) -> int:
        """Give the id of the relation in which devices of equal labels (none below 0) are equal."""
        if self.device_count <= _FEW:
            first: dict[int, int] = {}
            numbers = [first.setdefault(v, k) for k, v in enumerate(labels.tolist())]
            canonical = np.array(numbers, dtype=np.int32)
        else:
            most = int(labels.max())
            if most >= _DIRECT:
                labels = np.unique(labels, return_inverse=True)[1].reshape(-1)
                most = self.device_count
            if most >= self._lowest.size:
                self._lowest = np.empty(most + 1, np.int32)
            # The last one written stays: in falling order the lowest device of each class.
            self._lowest[labels[::-1]] = self._falling
            canonical = self._lowest[labels]
        key = canonical.tobytes()
        known = self._ids.get(key)
        if known is None:
            known = self._ids[key] = len(self._arrays)
            self._arrays.append(canonical)
        return known

    def labels(self, relation: int) -> np.ndarray:
        """Give each device's class, by its lowest member."""
        return self._arrays[relation]

    def refine(self, a: int, b: int) -> int:
        """Combine: devices are equal if they are so under both."""
        if a == b or b == EQUAL:
            return a
        if a == EQUAL:
            return b
        if a == DISTINCT or b == DISTINCT:
            return DISTINCT
        key = (a, b) if a < b else (b, a)
        known = self._refined.get(key)
        if known is None:
            joined = self._arrays[a].astype(np.int64) * self.device_count + self._arrays[b]
            known = self._refined[key] = self.intern(joined)
        return known

    def refines(self, fine: int, coarse: int) -> bool:
        """Tell whether devices that are equal under ``fine`` are so under ``coarse``."""
        return self.refine(fine, coarse) == fine

    def linked(self, ends: np.ndarray) -> int:
        """Give the relation in which sources and targets are equal, no target being one twice."""
        before = np.arange(self.device_count)
        before[ends[1]] = ends[0]
        lowest = np.arange(self.device_count)
        for _ in range(self.device_count.bit_length()):  # twice as many steps back each time
            lowest = np.minimum(lowest, lowest[before])
            before = before[before]
        return self.intern(lowest[before])  # of the circle that a device's path ends in


@dataclasses.dataclass(frozen=True)
class Groups:
    """The device groups of one collective, as flattened device ids.

    Attributes:
      rows: one tuple per group, in the order in which the collective takes its members; of a
        permute the sets of devices that its pairs connect.
      relation: the relation in which the members of a group are equal; devices of no group are
        each their own.
      complete: every device is in exactly one group.
      pairs: source and target devices of a permute, else None.
    """

    rows: tuple[tuple[int, ...], ...]
    relation: int
    complete: bool
    pairs: tuple[tuple[int, int], ...] | None = None

    @functools.cached_property
    def matrix(self) -> np.ndarray | None:
        """Give the rows as an array, None where they are of unequal lengths."""
        if not self.rows or (self.sizes != self.sizes[0]).any():
            return None
        return self.members.reshape(len(self.rows), -1)

    @functools.cached_property
    def ends(self) -> np.ndarray:
        """Give the sources and the targets of the pairs."""
        return np.array(self.pairs, np.int64).reshape(-1, 2).T

    @functools.cached_property
    def members(self) -> np.ndarray:
        """List the members of all groups, group by group."""
        return np.array([m for row in self.rows for m in row], np.int64)

    @functools.cached_property
    def sizes(self) -> np.ndarray:
        """Count the members of each group."""
        return np.array([len(row) for row in self.rows], np.int64)

    @functools.cached_property
    def places(self) -> np.ndarray:
        """Give each member's place in its group, in the order of ``members``."""
        return np.concatenate([np.arange(size) for size in self.sizes])

    @functools.cached_property
    def size(self) -> int:
        """Count the members of the largest group."""
        return int(self.sizes.max(initial=0))

    @functools.cached_property
    def moves(self) -> bool:
        """Tell whether a permute moves anything to another device."""
        return self.pairs is None or any(s != t for s, t in self.pairs)

    @functools.cached_property
    def in_order(self) -> str:
        """Write the pairs, or groups in which a device's place says which part it has."""
        if self.pairs is not None:
            return listed(sorted(self.pairs))
        return notation(self.rows, ordered=True)

    @functools.cached_property
    def in_any_order(self) -> str:
        """Write the groups as sets of devices."""
        return notation(self.rows)


_NUMBERS = re.compile(r"\d+")
_IOTA = re.compile(r"\[([\d,\s]*)\]\s*<=\s*\[([\d,\s]*)\]\s*(?:T\(([\d,\s]*)\))?")
# Possessive: spaces between groups could be split in 2**n ways.
_LIST = re.compile(r"\{\s*+(?:\{[\d,\s]*+\}\s*+,?\s*+)*+\}")
_AS_LISTED = str.maketrans("[]()", "{}{}", " ")
_AS_JSON = str.maketrans("{}", "[]")
_INNER = re.compile(r"\{([\d,\s]*)\}")
_MESH = re.compile(r"mesh\[([^\]]*?)(?:,\s*(device_ids=\(.*?\)\)?))?\]")
_AXIS = re.compile(r"'((?:[^'\\]|\\.)*)'\s*=\s*(\d+)")
_DEVICE_IDS = re.compile(
    r"device_ids=\(\s*+(?:\[([\d,\s]*)\]\s*+(?:T\(([\d,\s]*)\))?|([\d,\s]*+))\s*+\)"
)
AXIS_REF = re.compile(r"'((?:[^'\\]|\\.)*)'(?::\((\d+)\)(\d+))?")
_MAX_DEVICES = 1 << 20


class NotationError(ValueError):
    """A group list, a mesh or a sharding in a notation that this module doesn't read."""


def read_ints(text: str) -> list[int]:
    """Read all numbers in a text.

    Raises:
      NotationError: one has ten digits or more.
    """
    values = [int(n) for n in _NUMBERS.findall(text) if len(n) < 10]
    if len(values) != len(_NUMBERS.findall(text)):
        raise NotationError(f"a number in {text[:60]!r} is too large")
    return values


def iota_tiles(text: str) -> np.ndarray:
    """Read ``[4,2]<=[2,4]T(1,0)``: numbers counted up, reshaped, transposed, reshaped."""
    found = _IOTA.match(text)
    if not found:
        raise NotationError(f"expected [..]<=[..], got {text[:60]!r}")
    tiles, shape = read_ints(found[1]), read_ints(found[2])
    total = int(np.prod(shape, dtype=np.float64)) if shape else 1
    if total > _MAX_DEVICES or int(np.prod(tiles, dtype=np.float64)) != total:
        raise NotationError(f"{text[:60]!r}: the two lists of sizes don't hold as many devices")
    array = np.arange(total).reshape(shape or [1])
    if found[3]:
        order = read_ints(found[3])
        if sorted(order) != list(range(len(shape))):
            raise NotationError(f"{text[:60]!r}: T(...) does not order {len(shape)} dimensions")
        array = array.transpose(order)
    return array.reshape(tiles)


@dataclasses.dataclass(frozen=True, eq=False)
class TextMesh:
    """A mesh as the text writes it: axes in order, and the device at each position."""

    axes: tuple[tuple[str, int], ...]
    devices: np.ndarray

    @property
    def is_row_major(self) -> bool:
        """Tell whether position and device id are the same."""
        return bool((self.devices.reshape(-1) == np.arange(self.devices.size)).all())


def read_mesh(text: str) -> tuple[TextMesh, int]:
    """Read ``mesh['data'=4,'model'=2]``, with device ids inside or after; give also its end."""
    found = _MESH.match(text)
    if not found:
        raise NotationError(f"expected mesh['axis'=size,...], got {text[:60]!r}")
    axes = tuple((name, int(size)) for name, size in _AXIS.findall(found[1]) if len(size) < 10)
    leftover = _AXIS.sub("", found[1]).replace(",", "").strip()
    if leftover:
        raise NotationError(f"can't read {leftover[:40]!r} in {found[0][:60]!r}")
    end = found.end()
    sizes = [size for _, size in axes]
    total = 1
    for size in sizes:
        total *= size
    if total > _MAX_DEVICES or total < 1:
        raise NotationError(f"{found[0][:60]!r} has {total} devices")
    ids = found[2]
    if ids is None:
        after = re.match(r"\s*,\s*(?=device_ids=)", text[end:])
        if after:
            outside = _DEVICE_IDS.match(text, end + after.end())
            if not outside:
                raise NotationError(f"can't read the device ids in {text[:80]!r}")
            ids, end = outside[0], outside.end()
    devices = np.arange(total)
    if ids is not None:
        parts = _DEVICE_IDS.match(ids)
        if not parts:
            raise NotationError(f"can't read {ids[:60]!r}")
        if parts[3] is not None:
            devices = np.array(read_ints(parts[3]), dtype=np.int64)
        else:
            shape = read_ints(parts[1])
            order = f"T({parts[2]})" if parts[2] else ""
            devices = iota_tiles(f"[{total}]<=[{','.join(map(str, shape))}]{order}")
    if sorted(devices.reshape(-1).tolist()) != list(range(total)):
        raise NotationError(f"the device ids in {text[:80]!r} are not 0 to {total - 1}, each once")
    return TextMesh(axes, devices.reshape(sizes)), end


def axis_groups(mesh: TextMesh, refs: Sequence[tuple[str, str, str]]) -> np.ndarray:
    """Group a mesh's devices over axes and sub-axes.

    ``'a':(2)2`` is the factor of size 2 that has 2 before it.
    """
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
        for low, high in zip(edges, edges[1:]):
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
    width = 1
    for i in grouped:
        width *= sizes[i]
    return mesh.devices.reshape(sizes).transpose(rest + grouped).reshape(-1, width)


def read_groups(text: str) -> tuple[list[list[int]], TextMesh | None]:
    """Read a ``replica_groups`` value into lists of ids, and the mesh if it names one."""
    text = text.strip()
    if text.startswith("mesh"):
        mesh, end = read_mesh(text)
        rest = text[end:].strip().lstrip(",").strip()
        if not (rest.startswith("{") and rest.endswith("}")):
            raise NotationError(f"expected {{'axis',...}} after the mesh in {text[:80]!r}")
        return axis_groups(mesh, AXIS_REF.findall(rest)).tolist(), mesh
    if text.startswith("["):
        found = _IOTA.fullmatch(text)
        tiles = iota_tiles(text)
        if not found or tiles.ndim != 2:
            raise NotationError(f"expected [groups,members]<=[...], got {text[:60]!r}")
        return tiles.tolist(), None
    if not _LIST.fullmatch(text):
        raise NotationError(
            f"expected {{{{0,1}},{{2,3}}}}, [2,2]<=[4] or mesh[...] {{...}}, got {text[:60]!r}"
        )
    try:
        rows = json.loads(text.translate(_AS_JSON))
    except ValueError:  # it has commas that XLA's parser takes, or leading zeros
        rows = None
    if rows is None or max(map(max, filter(None, rows)), default=0) >= 10**9:
        rows = [read_ints(m[1]) for m in _INNER.finditer(text, 1)]
    return [r for r in rows if r], None


def id_count(mode: str, partitions: int, replicas: int) -> int:
    """Count the ids that groups may hold in a mode (see ``flatten_groups``)."""
    counts = {"cross_partition": partitions, "flattened": partitions * replicas}
    return counts.get(mode, replicas)


def flatten_groups(
    rows: list[list[int]], mode: str, partitions: int, replicas: int
) -> list[list[int]]:
    """Turn the ids of a collective's groups into flattened device ids.

    Args:
      rows: the ids of each group.
      partitions: how many the module is for.
      replicas: how many the module is for.
      mode: which ids the groups hold, by XLA's GetCollectiveOpGroupMode: ``"cross_replica"``,
        ``"cross_partition"``, ``"cross_replica_and_partition"`` or ``"flattened"``.
    """
    limit = id_count(mode, partitions, replicas)
    members = [member for row in rows for member in row]
    if len(set(members)) < len(members) or max(members, default=0) >= limit:
        used: set[int] = set()
        for member in members:
            if member >= limit:
                raise NotationError(f"id {member} is beyond the {limit} that the module has")
            if member in used:
                raise NotationError(f"id {member} stands in two places")
            used.add(member)
    if not rows:
        rows = [list(range(limit))]
    if mode == "flattened":
        return rows
    if mode == "cross_partition":
        return [[r * partitions + p for p in row] for r in range(replicas) for row in rows]
    if mode == "cross_replica":
        return [[r * partitions + p for r in row] for row in rows for p in range(partitions)]
    return [[r * partitions + p for r in row for p in range(partitions)] for row in rows]


# -- the caller's mesh ---------------------------------------------------------------------------


class Mesh:
    """A mesh over flattened device ids: names the axes of groups and relations."""

    def __init__(self, axes: Mapping[str, int] | Sequence[tuple[str, int]], relations: Relations):
        self.axes = tuple(dict(axes).items())
        self._relations = relations
        self._ids = np.arange(relations.device_count).reshape([s for _, s in self.axes])
        self._names: dict[int, tuple[str, ...] | None] = {}
        self._over: dict[tuple[str, ...], int] = {}
        self._varying: dict[int, tuple[str, ...]] = {}

    @property
    def names(self) -> tuple[str, ...]:
        """List the axis names in order."""
        return tuple(name for name, _ in self.axes)

    def lines(self, names: Sequence[str]) -> np.ndarray:
        """Give the groups along some axes, one per row, members in row-major order."""
        order = [i for i, (n, _) in enumerate(self.axes) if n not in names]
        grouped = [self.names.index(n) for n in self.names if n in names]
        size = 1
        for i in grouped:
            size *= self.axes[i][1]
        return self._ids.transpose(order + grouped).reshape(-1, size)

    def relation(self, names: Sequence[str]) -> int:
        """Give the relation in which devices along these axes are equal."""
        key = tuple(n for n in self.names if n in names)
        known = self._over.get(key)
        if known is None:
            rows = self.lines(key)
            labels = np.empty(self._relations.device_count, np.int64)
            labels[rows.reshape(-1)] = np.repeat(np.arange(rows.shape[0]), rows.shape[1])
            known = self._over[key] = self._relations.intern(labels)
        return known

    def varying(self, relation: int) -> tuple[str, ...]:
        """List the axes over which a value with this relation may vary."""
        if relation not in self._varying:
            labels = self._relations.labels(relation)[self._ids]
            self._varying[relation] = tuple(
                name
                for i, (name, _) in enumerate(self.axes)
                if (labels != labels.take([0], axis=i)).any()
            )
        return self._varying[relation]

    def axes_of(self, groups: Groups) -> tuple[str, ...] | None:
        """Name the axes whose lines are exactly these groups; None where there are no such."""
        return self.along(groups.relation) if groups.complete else None

    def along(self, relation: int) -> tuple[str, ...] | None:
        """Name the axes along whose lines, and no others, devices are equal; None for no such."""
        if relation not in self._names:
            labels = self._relations.labels(relation)[self._ids]
            names = tuple(
                name
                for i, (name, size) in enumerate(self.axes)
                if size > 1 and (labels == labels.take([0], axis=i)).all()
            )
            exact = self.relation(names) == relation
            self._names[relation] = names if exact else None
        return self._names[relation]

    def better_order(self, relations: Sequence[int]) -> tuple[tuple[str, int], ...] | None:
        """Give an order of the axes under which all these relations, and more, are along axes.

        None where this order explains as many as any other that explains the same.
        """
        explained = [r for r in set(relations) if self.along(r) is not None]
        rest = [r for r in set(relations) if self.along(r) is None]
        best, most = None, 0
        if rest and len(self.axes) <= 6:
            for order in itertools.permutations(self.axes):
                other = Mesh(order, self._relations)
                if all(other.along(r) is not None for r in explained):
                    more = sum(other.along(r) is not None for r in rest)
                    if more > most:
                        best, most = order, more
        return best


def mesh_of(named: TextMesh | None, relations: Relations) -> Mesh | None:
    """Give the mesh that a collective's own notation names, for that collective alone."""
    if named is None or not named.is_row_major or named.devices.size != relations.device_count:
        return None
    return Mesh(named.axes, relations)


def notation(rows: Sequence[Sequence[int]], ordered: bool = False) -> str:
    """Write groups as XLA does, ``[4,2]<=[8]`` or ``{{0,3},{1,2}}``, in any order one way."""
    # ordered: that of the devices within a group says something, as it does of an all-gather.
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
    """Write lists of devices, ``{{0,3},{1,2}}``; a long one by its beginning and a checksum."""
    text = str(list(map(tuple, rows))).replace(",)", ")").translate(_AS_LISTED)
    if len(text) <= 80:
        return text
    return f"{text[: text.rfind('}', 0, 60) + 1]},... #{zlib.crc32(text.encode()):08x}}}"


def axes_of(mesh: object) -> dict[str, int] | None:
    """Return the axes of a mesh that a caller gave: a mapping, a jax Mesh (its ``shape``), None.

    Raises:
      HloError: it is none of these.
    """
    if mesh is None:
        return None
    shape = mesh if isinstance(mesh, Mapping) else getattr(mesh, "shape", None)
    if isinstance(shape, Mapping):
        return dict(shape)
    raise errors.HloError(
        f"mesh={mesh!r} is no mesh; pass axis names and sizes, mesh={{'data': 4, 'model': 2}}, or "
        "the jax.sharding.Mesh"
    )


def make_mesh(
    axes: Mapping[str, int], relations: Relations, module_name: str, partitions: int
) -> Mesh:
    """Check a caller's mesh against the module.

    Raises:
      HloError: its size is not the number of devices.
    """
    size = 1
    for name, length in dict(axes).items():
        if not isinstance(length, (int, np.integer)) or length < 1:
            raise errors.HloError(
                f"mesh axis {name!r} has size {length!r}; sizes are positive "
                "integers, mesh={'data': 4, 'model': 2}."
            )
        size *= int(length)
    if size != relations.device_count:
        shown = ", ".join(f"{n}={s}" for n, s in dict(axes).items())
        raise errors.HloError(
            f"the mesh ({shown}) has {size} devices, but module {module_name!r} was compiled for "
            f"{relations.device_count} ({partitions} partitions x "
            f"{relations.device_count // partitions} replicas); pass the mesh that the program "
            "was compiled for.",
            mesh=dict(axes),
            device_count=relations.device_count,
        )
    return Mesh(axes, relations)
