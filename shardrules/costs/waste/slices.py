"""Find collectives whose result each device reads in part, at an index from its own number."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from shardrules import hlo
from shardrules.costs import accounts
from shardrules.costs.waste import factors
from shardrules.costs.waste.program import UNARY, Hint, Kind, Program, Site, Use
from shardrules.hlo.known import exact
from shardrules.hlo.reader.flow import Node


class _Part(NamedTuple):
    """The only part of a result that each device reads."""

    sizes: tuple[int, ...]  # the sizes of the array that is sliced
    dimension: int  # the dimension of the slice; the others are read whole
    size: int  # the size of the slice in this dimension
    starts: tuple[int, ...]  # where each device's slice begins
    of: tuple[tuple[factors.Factor, ...], ...]  # each dimension, as factors of the result
    node: Node  # the node that is sliced

    def follows(self, groups: Sequence[Sequence[int]]) -> bool:
        """Return whether each device's slice is at its own place in its group."""
        for group in groups:
            for place, device in enumerate(group):
                if self.starts[device] != place * self.size:
                    return False
        return True

    def along(self, result: hlo.Shape) -> int | None:
        """Return the dimension of the result that is sliced; None if it isn't a whole dimension."""
        whole = factors.of(result.dimensions)
        sliced = [*self.of[self.dimension]]
        return whole.index(sliced) if sliced in whole else None

    def order(self, result: hlo.Shape) -> list[int] | None:
        """Return the place of each dimension of the result; None unless it is only transposed."""
        whole = factors.of(result.dimensions)
        of = [*map(list, self.of)]
        return [of.index(d) for d in whole] if sorted(of) == sorted(whole) else None


def uses_of(site: Site) -> list[Use]:
    """Return a result's uses behind moves; for an all-gather, also behind elementwise functions.

    Elementwise functions commute with gathering.
    """
    each = UNARY if site.collective.kind == "all-gather" else frozenset()
    return site.uses(factors.MOVES | each)


def read_part(site: Site) -> _Part | None:
    """Return the only part of a result that each device reads; None if it reads several or all."""
    parts = [_part(site, use) for use in uses_of(site)]
    return parts[0] if len({part and part[:-1] for part in parts}) == 1 else None


def _part(site: Site, use: Use) -> _Part | None:
    (taker, taken), program = use, site.program
    sizes = taken.shape.dimensions
    if taker.opcode != "dynamic-slice" or site.result is None:
        return None
    if taken is not taker.operands[0] or taken in taker.operands[1:]:
        return None
    cut = [d for d, size in enumerate(taker.shape.dimensions) if size != sizes[d]]
    if len(cut) != 1:
        return None
    (dimension,) = cut
    size = taker.shape.dimensions[dimension]
    index = device_rows(program, taker.operands[1 + dimension])
    starts = None if index is None else exact.clamped_index(index, sizes[dimension] - size)
    as_sliced = factors.followed(factors.of(site.result.dimensions), taken)
    if starts is None or as_sliced is None:
        return None
    places = np.broadcast_to(starts, (program.device_count,))
    of = tuple(map(tuple, as_sliced))
    return _Part(sizes, dimension, size, tuple(map(int, places)), of, taken)


def device_rows(program: Program, node: Node) -> np.ndarray | None:
    """Return an integer's value on each device, also through loops that pass it on, or None."""
    return program.remembered(Rows).of(node)


class Rows:
    """The values of integers, with a row for each device, or for each trip of a loop."""

    def __init__(self, program: Program, counters: dict[Node, np.ndarray] | None = None):
        """Read rows for devices, or for a loop's trips, given the rows of its ``counters``."""
        self._program = program
        self._of_devices = counters is None
        # Remember each value, since a chain of n sums a + a has 2 ** n paths.
        self._known: dict[Node, np.ndarray | None] = {**(counters or {})}

    def of(self, node: Node, depth: int = 0) -> np.ndarray | None:
        if node not in self._known:
            self._known[node] = self._read(node, depth) if depth <= 64 else None
        return self._known[node]

    def _read(self, node: Node, depth: int) -> np.ndarray | None:
        if node.opcode == "constant":
            return exact.literal(node.instruction.literal, node.shape)
        if node.opcode in ("partition-id", "replica-id") and self._of_devices:
            ids = np.arange(self._program.device_count, dtype=np.uint32)
            count = self._program.partitions
            return ids % count if node.opcode == "partition-id" else ids // count
        if node.opcode == "iota" and len(node.shape.dimensions) == 1:
            kind = exact.dtype(node.shape)
            return None if kind is None else np.arange(node.shape.element_count, dtype=kind)[None]
        if node.opcode == "get-tuple-element":
            before = self._program.before_loop(node)
            return None if before is None else self.of(before, depth + 1)
        if node.opcode in factors.COPIES:  # on TPU a table of places is copied to faster memory
            return self.of(node.operands[0], depth + 1)
        if node.opcode not in exact.OPCODES or not node.operands:
            return None
        given = []
        for operand in node.operands:
            rows = self.of(operand, depth + 1)
            if rows is None:
                return None
            given.append(rows)
        shapes = [operand.shape for operand in node.operands]
        return exact.evaluate(node.instruction, given, shapes)


# -- a slice of a sum -----------------------------------------------------------------------------

# XLA for TPUs turns a smaller reduce-scatter into an all-reduce (JAX 0.10.2: 64 KiB, not 1 MiB).
_LEAST_ON_TPU = 2**20
# XLA also turns a larger reduce-scatter into an all-reduce if a shard is smaller than a tile (JAX
# 0.10.2, v5e: 18 shapes compiled). Rows as long as a tile, scattered whole, stay a reduce-scatter.
_LANES = 128


def only_a_slice(site: Site) -> Hint | None:
    entry, size = site.entry, site.collective.group_size
    if site.program.platform == "tpu" and entry.bytes < _LEAST_ON_TPU:
        return None
    if site.program.platform is None and not site.in_shard_map:
        return None  # XLA for TPUs and GPUs makes the reduce-scatter by itself
    part = read_part(site) if site.adds and site.whole and size > 1 else None
    if part is None or site.result is None or not part.follows(site.collective.groups):
        return None
    dimension = part.along(site.result)
    if dimension is None or part.sizes[part.dimension] != size * part.size:
        return None
    sent = accounts.wire_bytes("reduce-scatter", entry.bytes, size)
    what = f"each device reads only its own 1/{size} of the result"
    change = (
        f"jax.lax.psum_scatter(x, {site.over}, scatter_dimension={dimension}, tiled=True) "
        "instead of the psum and the dynamic_slice"
    )
    if not site.in_shard_map:
        change = (
            "XLA's partitioner made it: under jax.shard_map, jax.lax.psum_scatter of each "
            "device's own sum"
        )
        if site.is_unnamed:
            change = "a reduce-scatter instead of it (jax.lax.psum_scatter of the same operand)"
    elif entry.phase != "forward":
        change = (
            "where it is the gradient of an array that the shard_map takes whole, pass that "
            "array sharded, by its in_specs, and jax.lax.all_gather it inside: the gradient of "
            "that"
        )
    if _was_scattered(site):
        if site.result.element_count % (size * _LANES):
            return None
        what = "XLA for TPU made it, and a slice of its result, from a jax.lax.psum_scatter"
        change = (
            f"with the shards first and in rows of {_LANES}, p = jnp.moveaxis(x.reshape("
            f"{_split(site.result.dimensions, dimension, size)}), {dimension}, 0), "
            f"jax.lax.psum_scatter(p.reshape(-1, {_LANES}), {site.over}, scatter_dimension=0, "
            "tiled=True).reshape(p.shape[1:]) stays one, and"
        )
    advice = f"{what}: {change} sends {sent} B instead of {entry.wire_bytes} B"
    return site.smaller(advice, entry.bytes, sent)


def _was_scattered(site: Site) -> bool:
    """Return whether the source asks for a reduce-scatter; the names in its reduction show it."""
    # A sum between TPU slices is a send, which has no reduction.
    module = site.program.module
    for name in site.instruction.calls:
        for instruction in module.computations[name].instructions:
            if module.metadata(instruction).op_name.rpartition("/")[2] == "reduce_scatter":
                return True
    return False


def _split(sizes: tuple[int, ...], dimension: int, count: int) -> str:
    """Return an array's sizes with a dimension for the shards before the one that they divide."""
    part = sizes[dimension] // count
    return ", ".join(map(str, (*sizes[:dimension], count, part, *sizes[dimension + 1 :])))


# -- a part of a gathered array -------------------------------------------------------------------


def gather_read_in_part(site: Site) -> Hint | None:
    entry, size = site.entry, site.collective.group_size
    if site.collective.kind != "all-gather" or size < 2 or not site.whole:
        return None
    part, along = read_part(site), site.collective.dimension
    if part is None or site.result is None or not along.isdecimal():
        return None
    groups, dimension = site.collective.groups, part.along(site.result)
    if dimension is None:
        return None
    # A slice along the gathered dimension must be one whole shard, the device's own or one that a
    # permute can bring. A slice along another dimension is what an all-to-all brings.
    if dimension == int(along):
        if part.size != site.taken.dimensions[dimension]:
            return None
        # The shard that each member of a group reads, by its place in the group.
        places = {tuple(part.starts[d] / part.size for d in group) for group in groups}
        own = tuple(range(size))
        if any(tuple(sorted(read)) != own for read in places):
            return None
        sent = 0 if places == {own} else entry.bytes
        change = "which is its own shard: read that"
        if sent:
            perm = sorted((int(source), target) for target, source in enumerate(min(places)))
            change = (
                f"which one permute brings: jax.lax.ppermute(x, {site.over}, perm) with perm="
                f"{perm if len(places) == 1 and size <= 8 else '[...]'}"
            )
    elif part.size * size == site.result.dimensions[dimension] and part.follows(groups):
        sent = accounts.wire_bytes("all-to-all", entry.bytes, size)
        change = (
            f"its own slice of dimension {dimension} of each shard, which one all-to-all "
            f"brings: jax.lax.all_to_all(x, {site.over}, {dimension}, {along}, tiled=True)"
        )
    else:
        return None
    if not site.in_shard_map and not site.is_unnamed:
        change += (
            " (XLA's partitioner gathered it: give both sides one layout, or write a shard_map)"
        )
    advice = (
        f"each device reads only 1/{size} of the result, {change}, and sends {sent} B instead "
        f"of {entry.wire_bytes} B"
    )
    if not sent:
        return site.hint(advice)
    return site.smaller(advice, entry.bytes, sent)


def gather_read_at_an_index(site: Site) -> Hint | None:
    """Find a gather for a few rows that all devices read at an index that the program computes."""
    along, size = site.collective.dimension, site.collective.group_size
    if site.collective.kind != "all-gather" or site.in_shard_map or site.is_unnamed:
        return None
    if not site.whole or size < 2 or not along.isdecimal() or site.result is None:
        return None
    dimension = int(along)
    count = {_rows_at(site, use, dimension) for use in uses_of(site)}
    k = count.pop() if len(count) == 1 else None
    if k is None:
        return None
    rows = site.result.dimensions[dimension]
    taken = site.result.bytes // rows * k
    sent = accounts.wire_bytes("all-reduce", taken, size)
    if sent >= site.entry.wire_bytes:
        return None
    change = f"jnp.take(x, jnp.clip(i, 0, {rows - k}) + jnp.arange({k}), axis={along})"
    if k == 1:  # of one row XLA for GPU makes a slice of jnp.take as well
        mask = f"(jnp.arange({rows}) == i)"
        if behind := len(site.result.dimensions) - dimension - 1:
            mask += f"[:, {', '.join(['None'] * behind)}]"
        change = f"jnp.sum(x, {along}, where={mask})"
    advice = (
        f"each device gathers all {rows} of dimension {along}, and reads {k} of them at an index i "
        f"that is the same on all: for an i that is not negative {change} instead of a slice "
        f"brings these alone, and a device sends {sent} B instead of {site.entry.wire_bytes} B"
    )
    return site.smaller(advice, taken, sent)


def _rows_at(site: Site, use: Use, dimension: int) -> int | None:
    """Return how many gathered rows a slice takes, at an index that is equal on all devices."""
    (taker, taken), result = use, site.result
    if taker.opcode != "dynamic-slice" or taken in taker.operands[1:] or result is None:
        return None
    sizes, whole = taker.shape.dimensions, factors.of(result.dimensions)
    cut = [d for d, n in enumerate(taken.shape.dimensions) if sizes[d] != n]
    of = factors.followed(whole, taken)
    if len(cut) != 1 or of is None or of[cut[0]] != whole[dimension]:
        return None
    stack, seen = [taker.operands[1 + cut[0]]], {taker}
    while stack and len(seen) < _MOST:
        node = stack.pop()
        if node.opcode in ("partition-id", "replica-id"):
            return None
        is_input = node.opcode == "parameter" and node.home.is_entry and not node.fused
        if is_input and not site.is_equal_input(node):
            return None  # each device has its own index, as in a batch under vmap
        stack += (new := {*node.operands} - seen)
        seen |= new
    return None if stack else sizes[cut[0]]


_MOST = 256  # the most steps to follow back from an index


def read_in_part(site: Site) -> Hint | None:
    return gather_read_in_part(site) or gather_read_at_an_index(site)


ROWS = {
    "only a slice": Kind(
        only_a_slice,
        looks_like=(
            "an all-reduce of which each device reads only its own slice; on TPU also one that "
            "XLA made of a psum_scatter"
        ),
        in_shard_map="psum_scatter instead of the psum and the dynamic_slice",
        under_jit=(
            "a shard_map around it, with psum_scatter: on TPU and GPU XLA often makes one itself"
        ),
    ),
    "one part": Kind(
        read_in_part,
        looks_like=(
            "an all-gather of which each device reads only one shard, or its own slice of every "
            "shard; under jit also one for a few rows at an index that the program computes, as of "
            "a sharded cache by `jax.lax.dynamic_slice`"
        ),
        in_shard_map="ppermute for one shard, all_to_all for a slice of each",
        under_jit=(
            "give what makes the array and what reads it one layout, or write a shard_map; "
            "jnp.take of rows at an index, or jnp.sum with where= of one"
        ),
    ),
}
