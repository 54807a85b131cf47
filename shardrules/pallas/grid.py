"""The grid of a pallas_call: the ids of its programs, and which blocks of an output they visit."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable
from typing import Any

from shardrules.pallas.events import Scope, Walk, place_of
from shardrules.pallas.regions import Box, Undecided, left_out, whole_box
from shardrules.pallas.values import Ids, Values

__all__ = ["Grid", "Window", "every"]

_MOST_PROGRAMS = 4096  # a bound on the work, where every program of a grid is tried


def every(sizes: Iterable[int | None]):
    """Return an iterator over the places of a small grid, in order.

    Raises:
      Undecided: if a size is not known, or the grid is not small.
    """
    sizes = tuple(sizes)
    if None in sizes or math.prod(sizes) > _MOST_PROGRAMS:
        raise Undecided
    return itertools.product(*map(range, sizes))


class Window:
    """The blocks of one output.

    Args:
      walk: the walk, which has been over the index map.
      scope: the scope of the index map.
      block: the block mapping.
      grid: all of the grid, axes that stem from vmap too; None for a dynamic size.
    """

    def __init__(self, walk: Walk, scope: Scope, block: Any, grid: tuple[int | None, ...]):
        self.walk = walk
        self.scope = scope
        self.grid = grid
        self.place = place_of(scope.jaxpr)
        self.shape = tuple(_array(block).shape)
        self._mode = type(getattr(block, "indexing_mode", None)).__name__  # to JAX 0.6
        self._parts = tuple(block.block_shape)
        axes = {var: i for i, var in enumerate(scope.jaxpr.invars[: len(grid)])}
        # For each dimension, the axes of the grid that its index follows from.
        self.axes = [_axes_behind(walk, scope, out, axes) for out in scope.jaxpr.outvars]
        self._tables: dict[int, dict] = {}
        self._parts_read: list[tuple[int, int, bool]] | None = None

    @property
    def last_axis(self) -> int:
        """The last axis of the grid that the blocks move with, or -1."""
        return max(itertools.chain([-1], *self.axes))

    def _dims(self) -> list[tuple[int, int, bool]]:
        """Return for each dimension how many elements a block and an index are, and if it's kept.

        Raises:
          Undecided: for dimensions whose blocks do not lie where an index of the map says.
        """
        if self._parts_read is not None:
            return self._parts_read
        if self._mode not in ("NoneType", "Blocked") or not (
            len(self._parts) == len(self.shape) == len(self.axes)
        ):
            raise Undecided
        found = []
        for part in self._parts:
            kind, size = type(part).__name__, getattr(part, "block_size", part)
            if kind in ("NoneType", "Mapped", "Squeezed"):
                found.append((1, 1, False))
            elif (
                type(size) is not int
                or kind not in ("int", "Blocked", "Element")
                or any(getattr(part, "padding", ()))
            ):
                raise Undecided
            else:
                found.append((size, 1 if kind == "Element" else size, True))
        self._parts_read = found
        return found

    def starts(self) -> list[dict[tuple[int, ...], int]]:
        """Return for each dimension where a block starts, by the ids along ``axes``.

        Raises:
          Undecided: where that isn't known, or is too much work.
        """
        return [self._table(d, step) for d, (_, step, _) in enumerate(self._dims())]

    def _table(self, d: int, step: int) -> dict[tuple[int, ...], int]:
        if d not in self._tables:
            axes, invars, table = self.axes[d], self.scope.jaxpr.invars, {}
            for ids in every(self.grid[a] for a in axes):
                index: Any = Values(
                    self.walk, Ids({}, ()), {self.scope: {invars[a]: i for a, i in zip(axes, ids)}}
                ).of(self.scope, self.scope.jaxpr.outvars[d])
                if index is None or index < 0:
                    raise Undecided
                table[ids] = index * step
            self._tables[d] = table
        return self._tables[d]

    def missed(self) -> Box | None:
        """Return a part of the array that no program visits, or None if they visit all of it.

        Raises:
          Undecided: where that isn't known, or is too much work.
        """
        dims = self._dims()
        if 0 in self.grid:
            return None if 0 in self.shape else whole_box(self.shape)
        if None in self.grid:  # it may have no programs
            raise Undecided
        used = [a for axes in self.axes for a in axes]
        axes = sorted(set(used))
        if len(used) == len(axes):  # each dimension goes its own way
            for d, ((size, step, _), full) in enumerate(zip(dims, self.shape)):
                end = self._end_of_row(d, size, step)
                if end is not None and type(full) is int and full <= end:
                    continue
                gap = left_out(
                    (((0, end),),)
                    if end is not None
                    else (((start, size),) for start in self._table(d, step).values()),
                    ((0, full),),
                )
                if gap is not None:
                    whole = whole_box(self.shape)
                    return (*whole[:d], *gap, *whole[d + 1 :])
            return None
        whole = whole_box(self.shape)
        sizes = [size for size, _, _ in dims]
        blocks = {self.block(dict(zip(axes, ids))) for ids in every(self.grid[a] for a in axes)}
        return left_out((tuple(zip(block, sizes)) for block in blocks), whole)

    def _end_of_row(self, d: int, size: int, step: int) -> int | None:
        """Return where blocks end that stand in a row from 0 on, one for each id of an axis."""
        out, axes = self.scope.jaxpr.outvars[d], self.axes[d]
        if not axes:
            literal = isinstance(out, self.walk.names.Literal) and not out.val
            return size if literal else None
        if out is not self.scope.jaxpr.invars[axes[0]]:
            return None
        return (self.grid[axes[0]] - 1) * step + size

    def block(self, ids: dict[int, int]) -> tuple[int, ...]:
        """Return where the block starts that a program visits.

        Raises:
          Undecided: as ``starts``.
        """
        return tuple(
            [table[tuple([ids[a] for a in axes])] for table, axes in zip(self.starts(), self.axes)]
        )

    def elements(self, block: tuple[int, ...]) -> Box:
        """Return the elements of the array that a block which starts there holds."""
        return tuple(
            (start, max(0, min(size, full - start)))
            for start, (size, _, _), full in zip(block, self._dims(), self.shape)
        )

    def inside(self, block: tuple[int, ...], shape: tuple[int, ...]) -> Box:
        """Return the part of a block, a ref of this shape, that isn't beyond the array's edge.

        Raises:
          Undecided: if the ref is not shaped as the block.
        """
        dims = self._dims()
        if shape != tuple(size for size, _, kept in dims if kept):
            raise Undecided
        return tuple(
            (0, size) for (_, size), (_, _, kept) in zip(self.elements(block), dims) if kept
        )


def _array(block: Any) -> Any:
    return getattr(block, "array_aval", None) or block.array_shape_dtype  # before JAX 0.8


def _axes_behind(walk: Walk, scope: Scope, atom: Any, axes: dict) -> tuple[int, ...]:
    """Return the axes of the grid that an index map's result follows from."""
    found, todo, seen = set(), [atom], set()
    while todo:
        atom = todo.pop()
        if isinstance(atom, walk.names.Literal) or atom in seen:
            continue
        seen.add(atom)
        if atom in axes:
            found.add(axes[atom])
        elif atom in scope.defs:
            todo += scope.defs[atom].invars
    return tuple(sorted(found))


class Grid:
    """The grid of a pallas_call, as its kernel counts its axes.

    Args:
      walk: where what is not allowed in an index map is noted.
      mapping: the grid mapping, or None.
      operands: the buffers of the operands.
    """

    def __init__(self, walk: Walk, mapping: Any, operands: list):
        self.sizes: tuple = ()
        self.counted: list[int] = []  # the axes that the kernel counts: the others stem from vmap
        self.windows: list[Window] = []
        self.all_sizes: tuple = ()
        self.overhangs = False
        if mapping is None:
            return
        self.all_sizes = tuple(n if isinstance(n, int) else None for n in mapping.grid)
        batched = set(mapping.vmapped_dims)
        self.counted = [a for a in range(len(mapping.grid)) if a not in batched]
        self.sizes = tuple(self.all_sizes[a] for a in self.counted)
        for i, block in enumerate(mapping.block_mappings):
            closed = block.index_map_jaxpr
            scope = Scope(closed.jaxpr)
            for var, root in zip(closed.jaxpr.invars[len(mapping.grid) :], operands):
                if root is not None:
                    scope.refs[var] = root
            if closed.jaxpr.eqns:
                walk.walk(scope)
            if i < mapping.num_inputs:
                self.overhangs = self.overhangs or _overhangs(block)
            else:
                self.windows.append(Window(walk, scope, block, self.all_sizes))

    @property
    def axes(self) -> tuple[int, ...]:
        """Every axis."""
        return tuple(range(len(self.sizes)))

    def trailing(self, output: int) -> tuple[int, ...]:
        """Return the innermost axes that an output's blocks do not move with."""
        last = self.windows[output].last_axis
        return tuple(n for n, a in enumerate(self.counted) if a > last)

    def ids(self, axes: Iterable[int], last: bool = False) -> Ids:
        """Return program ids that are the first, or the last, along ``axes``."""
        known = {a: 0 for a, size in enumerate(self.sizes) if size == 1}
        for axis in axes:
            if not last:
                known[axis] = 0
            elif self.sizes[axis] is not None:
                known[axis] = self.sizes[axis] - 1
        return Ids(known, self.sizes)


def _overhangs(block: Any) -> bool:
    for part, size in zip(block.block_shape, _array(block).shape):
        part = getattr(part, "block_size", part)
        if isinstance(part, int) and isinstance(size, int) and part and size % part:
            return True
    return False
