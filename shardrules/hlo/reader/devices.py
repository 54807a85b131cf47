"""Device groups, meshes, and the relation "devices i and j hold the same value".

A device is its flattened id in HLO, ``replica * num_partitions + partition``. The text of a program
for several TPU slices is one slice's program: the number of a device of slice s is its id in this
text plus s times the number of devices in a slice. A relation is an equivalence relation on the
devices: an array that gives each device the lowest device of its class. Relations are interned as
small ids, so comparing or combining two costs one dictionary look-up for any number of devices.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from shardrules import errors
from shardrules.hlo.reader import notations

EQUAL = 0  # the relation in which all devices hold the same value
_FEW = 64  # up to this number of devices, a loop is faster than numpy
_DIRECT = 1 << 20  # labels below this are looked up in an array, others are sorted
DISTINCT = 1  # the relation in which no two devices are equal


# For each device in the mesh's order: its slice and its id.
SliceOrder = Sequence[tuple[int, int]]


class Relations:
    """The interned relations on the devices of one program."""

    def __init__(
        self,
        partitions: int,
        replicas: int = 1,
        counts_stated: bool = True,
        slices: int = 1,
        order: SliceOrder | None = None,
    ):
        # These are the partitions and replicas of one slice.
        self.partitions = partitions
        self.replicas = replicas
        self.slices = slices
        self.device_count = device_count = partitions * replicas * slices
        self.counts_stated = counts_stated  # if not, they are counted from ids in the text
        # The device at each place of the mesh; by default, one slice after the other.
        self.devices = np.arange(device_count)
        self.order_known = True  # if not, the text doesn't say how the mesh orders the slices
        self.by_id: dict[int, int] = {}  # devices of several slices, by their ids
        if order is not None:
            self._lay_out(order)
        self.places = np.argsort(self.devices)  # the place of each device in the mesh
        self._ids: dict[Any, int] = {}  # by the labels, as a tuple or in bytes
        self._arrays: list[np.ndarray] = []
        self._refined: dict[tuple[int, int], int] = {}
        self._constant: dict[tuple[int, int], bool] = {}
        self._lowest = np.empty(0, np.int32)  # the lowest device of each label
        self._falling = np.arange(device_count - 1, -1, -1, dtype=np.int32)
        self.intern(np.zeros(device_count, np.int64))
        self.intern(np.arange(device_count))
        if device_count == 1:  # one device: equal and distinct are the same array
            self._arrays.append(self._arrays[0])

    def _lay_out(self, order: SliceOrder) -> None:
        """Give the devices of each slice numbers by their places in the mesh, as XLA does."""
        slices = {number: k for k, number in enumerate(sorted({s for s, _ in order}))}
        each = self.partitions * self.replicas
        filled = [0] * len(slices)
        for place, (number, own_id) in enumerate(order):
            mine = slices[number]
            self.devices[place] = self.by_id[own_id] = mine * each + filled[mine]
            filled[mine] += 1

    @property
    def all_partitions(self) -> int:
        """Return the number of partitions of all slices."""
        return self.partitions * self.slices

    def tiles_on_devices(self, tiles: Sequence[int]) -> np.ndarray:
        """Return the number of each device's tile."""
        return np.array(tiles)[self.places % self.all_partitions]

    def intern(self, labels: np.ndarray) -> int:
        """Return the relation in which devices with the same label (0 or more) are equal."""
        if self.device_count <= _FEW:
            first: dict[int, int] = {}
            key: Any = tuple(map(first.setdefault, labels.tolist(), itertools.count()))
            if key in self._ids:
                return self._ids[key]
            canonical = np.array(key, dtype=np.int32)
        else:
            most = int(labels.max())
            if most >= _DIRECT:
                labels = np.unique(labels, return_inverse=True)[1].reshape(-1)
                most = self.device_count
            if most >= self._lowest.size:
                self._lowest = np.empty(most + 1, np.int32)
            # The last write wins. Devices are written in descending order, so the lowest stays.
            self._lowest[labels[::-1]] = self._falling
            canonical = self._lowest[labels]
            key = canonical.tobytes()
            if key in self._ids:
                return self._ids[key]
        number = self._ids[key] = len(self._arrays)
        self._arrays.append(canonical)
        return number

    def labels(self, relation: int) -> np.ndarray:
        return self._arrays[relation]

    def refine(self, a: int, b: int) -> int:
        """Combine two relations: devices are equal if they are equal in both."""
        if a == b or b == EQUAL:
            return a
        if a == EQUAL:
            return b
        if a == DISTINCT or b == DISTINCT:
            return DISTINCT
        key = (a, b) if a < b else (b, a)
        number = self._refined.get(key)
        if number is None:
            joined = self._arrays[a].astype(np.int64) * self.device_count + self._arrays[b]
            number = self._refined[key] = self.intern(joined)
        return number

    def coarsen(self, a: int, b: int) -> int:
        """Combine two relations: devices are equal if a chain of equal pairs links them."""
        if a == b or EQUAL in (a, b):
            return min(a, b)
        if DISTINCT in (a, b):
            return b if a == DISTINCT else a
        # Give all devices of a class the lowest label in it, alternately by the classes of b and of
        # a, until no label changes: labels spread along chains of equal pairs.
        labels = lowest = self._arrays[a]
        while True:
            for by in (self._arrays[b], self._arrays[a]):
                least = np.full(self.device_count, self.device_count, np.int64)
                np.minimum.at(least, by, lowest)
                lowest = least[by]
            if (lowest == labels).all():
                return self.intern(lowest)
            labels = lowest

    def refines(self, fine: int, coarse: int) -> bool:
        return self.refine(fine, coarse) == fine

    def linked(self, ends: np.ndarray) -> int:
        """Return the relation in which sources and targets are equal; each target occurs once."""
        # Each device has at most one source, so the path back from a device ends in a cycle (of one
        # device, if that has no source). All paths of one class end in the same cycle. Each round
        # doubles the steps: ``before`` is the device at the end of them, ``lowest`` the lowest
        # device on the way.
        before = np.arange(self.device_count)
        before[ends[1]] = ends[0]
        lowest = np.arange(self.device_count)
        for _ in range(self.device_count.bit_length()):
            lowest = np.minimum(lowest, lowest[before])
            before = before[before]
        return self.intern(lowest[before])  # the lowest device of the cycle


def row_numbers(rows: np.ndarray) -> np.ndarray:
    """Return a number for each row; equal rows have the same number."""
    if rows.shape[1] <= 1:
        return np.unique(rows.sum(axis=1), return_inverse=True)[1].reshape(-1)
    width = rows.shape[1] * rows.itemsize
    numbers: dict[bytes, int] = {}  # np.unique would sort whole rows, which is fifty times slower
    keys = np.ascontiguousarray(rows).view(f"V{width}").reshape(-1).tolist()
    return np.array([numbers.setdefault(key, len(numbers)) for key in keys])


@dataclasses.dataclass(frozen=True, eq=False)
class Groups:
    """The device groups of one collective, as flattened device ids."""

    # The members group by group, in the collective's order; for a permute, the sets of devices that
    # its pairs connect.
    members: np.ndarray
    sizes: np.ndarray  # the number of members of each group
    # The relation in which members of a group are equal; a device in no group is a class alone.
    relation: int
    complete: bool  # every device is in exactly one group
    ends: np.ndarray | None = (
        None  # an array of a permute's sources and targets; None for other kinds
    )

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Groups) and self._key == other._key

    def __hash__(self) -> int:
        return hash(self._key)

    @functools.cached_property
    def _key(self) -> tuple[Any, ...]:
        return self.rows, self.pairs, self.complete

    @functools.cached_property
    def rows(self) -> tuple[tuple[int, ...], ...]:
        members, stops = self.members.tolist(), np.cumsum(self.sizes).tolist()
        return tuple([tuple(members[a:b]) for a, b in zip([0, *stops], stops)])

    @functools.cached_property
    def pairs(self) -> tuple[tuple[int, int], ...] | None:
        """Return a permute's source and target devices; None for other kinds."""
        return None if self.ends is None else tuple(zip(*self.ends.tolist()))

    @functools.cached_property
    def matrix(self) -> np.ndarray | None:
        """Return the groups as rows of an array; None if their sizes differ."""
        if not self.sizes.size or (self.sizes != self.sizes[0]).any():
            return None
        return self.members.reshape(self.sizes.size, -1)

    @functools.cached_property
    def starts(self) -> np.ndarray:
        starts: np.ndarray = np.cumsum(self.sizes) - self.sizes
        return starts

    @functools.cached_property
    def places(self) -> np.ndarray:
        """Return each member's place in its group, in the order of ``members``."""
        places: np.ndarray = np.arange(self.members.size) - np.repeat(self.starts, self.sizes)
        return places

    @functools.cached_property
    def size(self) -> int:
        """Return the number of members of the largest group."""
        return int(self.sizes.max(initial=0))

    @functools.cached_property
    def moves(self) -> bool:
        """Return whether data moves; False for a permute whose pairs all send to themselves."""
        return self.ends is None or bool((self.ends[0] != self.ends[1]).any())

    @functools.cached_property
    def reaches_all(self) -> bool:
        """Return whether every device receives data; a permute fills the others with zeros."""
        targets = self.members if self.ends is None else self.ends[1]
        return self.complete and np.unique(targets).size == self.members.size

    @functools.cached_property
    def in_order(self) -> str:
        if self.pairs is not None:
            return notations.listed(sorted(self.pairs))
        return notations.notation(self.rows, ordered=True)

    @functools.cached_property
    def in_any_order(self) -> str:
        return notations.notation(self.rows)


class Mesh:
    """A mesh over flattened device ids: names the axes of groups and relations."""

    def __init__(self, axes: Mapping[str, int] | Sequence[tuple[str, int]], relations: Relations):
        self.axes = tuple(dict(axes).items())
        self.names = tuple(name for name, _ in self.axes)
        self._relations = relations
        self._ids = relations.devices.reshape([s for _, s in self.axes])
        self._along: dict[int, tuple[str, ...] | None] = {}
        self._varying: dict[int, tuple[str, ...]] = {}

    def lines(self, names: Sequence[str]) -> np.ndarray:
        """Return the groups along some axes, one per row, members in row-major order."""
        grouped = [i for i, name in enumerate(self.names) if name in names]
        order = [i for i in range(len(self.names)) if i not in grouped]
        size = math.prod(self.axes[i][1] for i in grouped)
        return self._ids.transpose(order + grouped).reshape(-1, size)

    def constant_along(self, labels: np.ndarray) -> tuple[str, ...]:
        """Return the axes along which the devices' labels are equal."""
        grid, axes = labels[self._ids], enumerate(self.names)
        return tuple(name for i, name in axes if (grid == grid.take([0], axis=i)).all())

    def varying(self, relation: int) -> tuple[str, ...]:
        """Return the axes along which devices are not all equal."""
        if relation not in self._varying:
            same = self.constant_along(self._relations.labels(relation))
            self._varying[relation] = tuple(name for name in self.names if name not in same)
        return self._varying[relation]

    def axes_of(self, groups: Groups) -> tuple[str, ...] | None:
        return self.along(groups.relation) if groups.complete else None

    def along(self, relation: int) -> tuple[str, ...] | None:
        """Return the axes whose lines are the relation's classes, or None if it follows no axes."""
        # Only axes along which devices are equal may be in a line. The lines along all of these
        # axes must then be exactly the classes.
        if relation not in self._along:
            varying = self.varying(relation)
            names = tuple(n for n, size in self.axes if size > 1 and n not in varying)
            rows, labels = self.lines(names), np.empty(self._relations.device_count, np.int64)
            labels[rows] = np.arange(len(rows))[:, None]
            exact = self._relations.intern(labels) == relation
            self._along[relation] = names if exact else None
        return self._along[relation]

    def better_order(self, relations: Sequence[int]) -> tuple[tuple[str, int], ...] | None:
        """Return an order of the axes under which more of these relations follow axes, or None."""
        explained = [r for r in set(relations) if self.along(r) is not None]
        rest = [r for r in set(relations) if self.along(r) is None]
        best, most = None, 0
        if rest and len(self.axes) <= 6:
            for order in itertools.permutations(self.axes):
                reordered = Mesh(order, self._relations)
                if all(reordered.along(r) is not None for r in explained):
                    more = sum(reordered.along(r) is not None for r in rest)
                    if more > most:
                        best, most = order, more
        return best


def mesh_of(named: notations.TextMesh | None, relations: Relations) -> Mesh | None:
    """Return the mesh in a collective's notation; None if it is not the program's own."""
    if named is None or named.is_invented or not named.is_row_major:
        return None
    if named.devices.size != relations.device_count:
        return None
    return Mesh(named.axes, relations)


def axes_of(mesh: object) -> dict[str, int] | None:
    """Return the axes of a caller's mesh: a mapping, a jax Mesh (its ``shape``) or None."""
    if mesh is None:
        return None
    shape = mesh if isinstance(mesh, Mapping) else getattr(mesh, "shape", None)
    if isinstance(shape, Mapping):
        return dict(shape)
    raise errors.HloError(
        f"mesh={mesh!r} is not a mesh; pass axis names and sizes, mesh={{'data': 4, 'model': 2}}, "
        "or the jax.sharding.Mesh"
    )


def make_mesh(axes: Mapping[str, int], relations: Relations, module_name: str) -> Mesh:
    """Return the mesh of these axes; raise HloError if it doesn't fit the program."""
    for name, length in dict(axes).items():
        if not isinstance(length, (int, np.integer)) or length < 1:
            raise errors.HloError(
                f"mesh axis {name!r} has size {length!r}; sizes are positive "
                "integers, mesh={'data': 4, 'model': 2}."
            )
    size = math.prod(map(int, dict(axes).values()))
    if size != relations.device_count:
        shown = ", ".join(f"{n}={s}" for n, s in dict(axes).items())
        slices = f" x {relations.slices} slices" if relations.slices > 1 else ""
        raise errors.HloError(
            f"the mesh ({shown}) has {size} devices, but module {module_name!r} was compiled for "
            f"{relations.device_count} ({relations.partitions} partitions x "
            f"{relations.replicas} replicas{slices}); pass the mesh that the program "
            "was compiled for.",
            mesh=dict(axes),
            device_count=relations.device_count,
        )
    return Mesh(axes, relations)


def check_order(
    mesh: Mesh, relations: Relations, seen: Sequence[int], groups: Mapping[str, Groups]
) -> None:
    """Raise HloError if the groups follow the mesh's axes only in another order."""
    groups = {n: g for n, g in groups.items() if g.pairs is None and g.complete}
    order = mesh.better_order([*seen, *(g.relation for g in groups.values())])
    if order is None:
        return
    reordered = Mesh(order, relations)
    for name, group in groups.items():
        along = reordered.along(group.relation)
        if mesh.along(group.relation) is None and along is not None:
            shown = ", ".join(f"{n}={s}" for n, s in mesh.axes)
            right = ",".join(f"{n}={s}" for n, s in order)
            raise errors.HloError(
                f"the mesh ({shown}) contradicts the program: the groups of {name!r}, "
                f"{notations.notation(group.rows)}, follow none of its axes, but "
                f"{','.join(along)} of ({right.replace(',', ', ')}). The order of the axes is "
                f"that of the devices, and the last axis changes fastest: pass --mesh={right} "
                f"or mesh={dict(order)}, or no mesh if these groups follow no axes "
                "(axis_index_groups).",
                mesh=dict(mesh.axes),
            )
