"""Find sharded arrays that XLA gathers whole, because a part at a fixed place is written.

For ``x.at[1:-1].set(v)`` along a sharded dimension, XLA's partitioner gathers x and v on all
devices, writes v there, and each device keeps its own part. For a mask and a pad instead, it
exchanges only the few rows that change their device.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from shardrules.costs.waste.program import WHOLE, Hint, Kind, Program, Site
from shardrules.costs.waste.slices import device_rows
from shardrules.hlo.known import exact
from shardrules.hlo.proof import phases
from shardrules.hlo.reader.flow import Node, made_by

_MOST = 256  # the most steps to follow back from a written value
# Operations by which XLA brings a gathered array to the place where it is written, and operations
# that combine it there with the old values. Behind any other function, a constraint of the program
# made the array whole.
_TO_PLACE = WHOLE | {"slice", "pad"}
_COMBINED = frozenset(["add", "multiply", "minimum", "maximum"])
# For JAX's name of a write: the method of ``x.at[...]``, and the expression that it makes of x, v.
_WRITES = {
    "scatter": ("set", "v"),
    "dynamic_update_slice": ("set", "v"),
    "scatter_add": ("add", "x + v"),
    "scatter_mul": ("multiply", "x * v"),
    "scatter_min": ("min", "jnp.minimum(x, v)"),
    "scatter_max": ("max", "jnp.maximum(x, v)"),
}
_INDICES = "ijklmnop"  # names for the indices into an array's dimensions


class _Write(NamedTuple):
    """A part of a sharded array that is written at a fixed place, and the gathers for it."""

    node: Node  # the dynamic-update-slice
    pads: tuple[tuple[int, int], ...]  # the sizes before and behind the part, in each dimension
    part: tuple[int, ...]  # the sizes of each device's own part of the array
    gathers: list[Site]
    of_values: bool  # whether the written values are gathered, too

    def shards(self, dimension: int) -> int:
        return self.node.shape.dimensions[dimension] // self.part[dimension]

    @property
    def borders(self) -> list[int]:
        """Return the dimensions along which shards exchange rows if the part is padded instead."""
        return [d for d, pad in enumerate(self.pads) if any(pad) and self.shards(d) > 1]

    @property
    def sent(self) -> int:
        """Return the most that a device sends: rows at its borders, to pad the written values."""
        sizes, count = self.node.shape.dimensions, math.prod(self.part)
        kept = self.node.shape.bytes * count // math.prod(sizes)
        rows = sum(2 * sum(self.pads[d]) * kept // self.part[d] for d in self.borders)
        # XLA for TPU makes a mask of several dimensions by permutes of rows (JAX 0.10.2 and 0.12).
        mask = sum(2 * count // self.part[d] for d in self.borders) if self.is_joined else 0
        return mask + (rows if self.of_values else 0)

    @property
    def is_joined(self) -> bool:
        """Return whether the mask is of several dimensions that are sharded."""
        return len(self.borders) > 1

    @property
    def round_trips(self) -> int:
        """Return the most round trips with neighbours: on each side, and at corners."""
        trips, borders = 0, self.borders if self.of_values else []
        for d in borders:
            count, (low, high) = self.shards(d), self.pads[d]
            written = self.node.shape.dimensions[d] - low - high
            moved = (count - 1) * (self.part[d] - -(-written // count))
            trips += (low > 0) + (moved > low)
        return trips * len(borders) + 2 * len(self.borders) * self.is_joined

    @property
    def mask(self) -> tuple[list[str], list[str]]:
        """Return code for the indices into the array, and for the conditions to be in the part."""
        indices: list[str] = []
        inside: list[str] = []
        sizes = self.node.shape.dimensions
        for d, ((low, high), size) in enumerate(zip(self.pads, sizes)):
            if low or high:
                behind = f"[:, {', '.join(['None'] * (len(sizes) - 1 - d))}]"
                i = _INDICES[len(indices)]
                indices.append(f"{i} = jnp.arange({size}){behind if d < len(sizes) - 1 else ''}")
                inside += [f"({i} >= {low})"] if low else []
                inside += [f"({i} < {size - high})"] if high else []
        return indices, inside


def written_whole(site: Site) -> Hint | None:
    """Find the gathers for a part of a sharded array that is written at a fixed place."""
    return site.program.remembered(_written).get(site)


def _written(program: Program) -> dict[Site, Hint]:
    found: dict[Site, Hint] = {}
    homes = {s.computation.name for s in program.sites if _is_partitioners(s)}
    for name in sorted(homes):
        for node in program.flat(name).nodes:
            if node.opcode not in ("dynamic-update-slice", "pad"):
                continue
            is_asked = _kind(program.module.metadata(node.instruction).op_name) in _WRITES
            if is_asked and (write := _write(program, node)):
                found.update(_hints_of(write))
    return found


def _is_partitioners(site: Site) -> bool:
    by_jit = not site.in_shard_map and not site.is_unnamed
    return site.collective.kind == "all-gather" and by_jit and site.needed


def _is_for_write(site: Site) -> bool:
    return _is_partitioners(site) and (site.is_named_by_array or _kind(site.op_name) in _WRITES)


def _kind(op_name: str) -> str:
    return phases.operation(op_name).replace("-", "_")


def _hints_of(write: _Write) -> Iterator[tuple[Site, Hint]]:
    first, *others = sorted(write.gathers, key=lambda site: -site.entry.wire_bytes)
    before = sum(site.entry.wire_bytes for site in write.gathers)
    if not write.borders or 2 * write.sent > before:
        return
    sizes = write.node.shape.dimensions
    kind = _kind(first.program.module.metadata(write.node.instruction).op_name)
    method, made = _WRITES[kind]
    ends = [f"{low or ''}:{n - high if high else ''}" for (low, high), n in zip(write.pads, sizes)]
    written = f"x.at[{', '.join(ends)}].{method}(v)"
    if kind == "dynamic_update_slice":
        written = f"jax.lax.dynamic_update_slice(x, v, {tuple(low for low, _ in write.pads)})"
    axes = itertools.chain(*(site.entry.axes or () for site in write.gathers))
    over = " and ".join(map(repr, dict.fromkeys(axes))) or first.over
    indices, inside = write.mask
    after = f": at most {write.sent} B" if write.sent else ": 0 B"
    if write.of_values:
        after = f", and moves the few rows alone that change their device: at most {write.sent} B"
    advice = (
        f"{written} writes a part of an array x that is sharded over {over}: each device gathers "
        f"all of x{' and of v' if write.of_values else ''}, and keeps its own part. With "
        f"{' and '.join(indices)}, and v = jnp.pad(v.astype(x.dtype), {[*write.pads]}) if v is an "
        f"array, x = jnp.where({' & '.join(inside)}, {made}, x) is the same{after} instead of "
        f"{before} B"
    )
    yield (
        first,
        first.hint(
            advice,
            bytes_after=first.in_all(min(write.sent, first.entry.bytes)),
            trips_after=first.in_all(write.round_trips),
            sent_after=first.in_all(write.sent),
            goes_with=first,
        ),
    )
    for site in others:
        yield site, site.hint(f"goes away with that at {first.where}", goes_with=first)


def _write(program: Program, node: Node) -> _Write | None:
    """Return a write with its gathers, if each device keeps its own part of the array."""
    # All must hold: the place is fixed, each device keeps its own part, nothing else reads the
    # gathered arrays, no combined gather stays for other parts, and a pad moves few rows.
    pads = _pads(program, node)
    if pads is None:
        return None
    # If all elements of the array are one number, XLA for CPU pads the written values with it.
    base, values = node.operands[:2] if node.opcode != "pad" else (None, node.operands[0])
    sizes, written = node.shape.dimensions, values.shape.dimensions
    part = _kept(program, node)
    if part is None:
        return None
    paths = _Paths(program, node)
    of_base = [] if base is None else paths.gathers(base)
    of_values = paths.gathers(values)
    gathers = [*of_base, *of_values]
    if not gathers or paths.are_elsewhere():
        return None
    if any(len(program.parts(s.instruction)) != _met(s, gathers) for s in gathers):
        return None
    for d, pad in enumerate(pads if of_values else ()):
        # Only if the written part is nearly the whole does padding send rows just to the next
        # device.
        if any(pad) and sum(pad) > -(-written[d] // (sizes[d] // part[d])):
            return None
    return _Write(node, pads, part, gathers, bool(of_values))


def _pads(program: Program, node: Node) -> tuple[tuple[int, int], ...] | None:
    """Return the sizes before and behind a part in each dimension; None if they aren't fixed."""
    if node.opcode == "pad":
        each = re.findall(r"[\d_-]+", node.instruction.attribute("padding") or "")
        pads = [tuple(map(int, pad.split("_"))) for pad in each]
        is_plain = all(min(pad) >= 0 and not any(pad[2:]) for pad in pads)
        return tuple((pad[0], pad[1]) for pad in pads) if is_plain else None
    base, values, *index = node.operands
    found: list[tuple[int, int]] = []
    for place, n, w in zip(index, base.shape.dimensions, values.shape.dimensions):
        rows = device_rows(program, place)
        starts = None if rows is None else exact.clamped_index(rows, n - w)
        if starts is None or len(places := {*np.unique(starts).tolist()}) != 1:
            return None
        (low,) = places
        found.append((low, n - w - low))
    return tuple(found)


def _met(site: Site, gathers: list[Site]) -> int:
    """Return how many parts of a site's combined collective are among these gathers."""
    return sum(other.instruction is site.instruction for other in gathers)


def _kept(program: Program, node: Node) -> tuple[int, ...] | None:
    """Return the sizes of the part of an array that each device keeps, or None."""
    uses = program.uses(node, 0, WHOLE)
    parts = {use.user.shape.dimensions for use in uses if use.user.opcode == "dynamic-slice"}
    sizes = node.shape.dimensions
    if len(parts) != 1 or len(part := parts.pop()) != len(sizes):
        return None
    for user, taken in uses:
        if user.opcode != "dynamic-slice" or taken in user.operands[1:]:
            return None
        for d, (size, own) in enumerate(zip(sizes, part)):
            rows = device_rows(program, user.operands[1 + d]) if size != own else None
            own_places = None if rows is None else {*np.unique(rows).tolist()}
            if size != own and own_places != {*range(0, size, own)}:
                return None
    return part


class _Paths:
    """The paths from gathers to the place where a part is written."""

    def __init__(self, program: Program, end: Node):
        self._program = program
        self._end = end
        self._seen = {end}
        self._met: set[Node] = set()  # the gathers' nodes

    def gathers(self, operand: Node) -> list[Site]:
        """Return the gathers that make an operand and that weren't returned before."""
        sites: list[Site] = []
        stack = [operand]
        while stack and len(self._seen) < _MOST:
            node = stack.pop()
            if node in self._seen:
                continue
            made = made_by(node, {"get-tuple-element", "all-gather-done"})
            parts = [] if made.fused else self._program.parts(made.instruction)
            if parts and all(map(_is_for_write, parts)):
                # Follow only the element of a combined gather that is read here.
                part = parts[node.index] if 0 <= node.index < len(parts) > 1 else parts[0]
                sites.append(part)
                self._met.add(made)
                while node is not made:
                    self._seen.add(node)
                    node = node.operands[0]
                self._seen.add(made)
                stack.append(made.operands[part.operand])
            elif node.opcode in _TO_PLACE or (node is operand and node.opcode in _COMBINED):
                self._seen.add(node)
                stack += node.operands
        return sites if not stack else []

    def are_elsewhere(self) -> bool:
        """Return whether anything else reads the gathered arrays."""
        forward = [*self._met]
        while forward:
            for taker in forward.pop().takers:
                if taker not in self._seen:
                    return True
                if taker is not self._end and taker not in self._met:
                    forward.append(taker)
        return False


ROWS = {
    "written whole": Kind(
        written_whole,
        looks_like=(
            "all-gathers of a sharded array, and of what is written, for `x.at[1:-1].set(v)` or "
            "`jax.lax.dynamic_update_slice` at a fixed place, as of a boundary"
        ),
        in_shard_map="does not occur: a device writes its own part",
        under_jit=("`jnp.where` with a mask of indices, and `jnp.pad` of what is written"),
    )
}
