"""Find arrays that XLA gathers whole and slices, on the way from one sharding to another.

From one sharding, XLA's partitioner can reach some other shardings by one collective. To reach the
rest, it replicates the array, and its log warns of an involuntary full rematerialization. With a
constraint to a sharding in between, each step takes one collective.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from shardrules import hlo
from shardrules.costs import accounts, walk
from shardrules.costs.advice import operation
from shardrules.costs.waste import factors, slices
from shardrules.costs.waste.program import (
    CONSTRAINED,
    SMALL,
    UNARY,
    WHOLE,
    Hint,
    Kind,
    Program,
    Site,
)
from shardrules.hlo.reader.flow import BARRIERS, Node, made_by

_MOST_AXES = 4  # the most mesh axes, since we compare the ways between all shardings
_MOST_STEPS = 2  # collectives: XLA replaced longer ways by others (JAX 0.10.2, three axes, CPU)

# Such a gather has the name of the constraint, or of an elementwise operation before or after it.
_BESIDE = CONSTRAINED.union(["add", "sub", "mul", "div", "max", "min", "select_n"])

_DEVICES = -1  # the origin of the last gather's factor; -2 for the gather before it, and so on

# The axes over which each of an array's dimensions is split, the major one first.
_Spec = tuple[tuple[str, ...], ...]


class _Way(NamedTuple):
    """Steps from one sharding to another, and the bytes that one device sends for them."""

    sent: int
    round_trips: int
    specs: tuple[_Spec, ...]  # after each step; several slices in a row count as one step
    moved: int  # the bytes of all steps' operands
    sliced: bool  # the last step is a slice


class _Chain(NamedTuple):
    """The gathers for one constraint; each device keeps a slice of the result."""

    gathers: list[Site]  # the last one first
    array: hlo.Shape  # the whole array, with its dimensions in the program
    start: _Spec
    end: _Spec


def find(site: Site) -> Hint | None:
    """Find a gather for a constraint, if each device keeps only a slice of the result."""
    return site.program.remembered(_all).get(site) if _is_constraint(site) else None


def _all(program: Program) -> dict[Site, Hint]:
    found: dict[Site, Hint] = {}
    for first in filter(_is_constraint, program.sites):
        if chain := _chain(first):
            found.update(_hints(chain))
    return found


def _hints(chain: _Chain) -> Iterator[tuple[Site, Hint]]:
    """Yield a hint for each gather of a chain; the hint on the largest one has the advice."""
    gathers = sorted(chain.gathers, key=lambda site: -site.entry.wire_bytes)
    array, sent = chain.array, sum(site.entry.wire_bytes for site in gathers)
    way = _cheapest(gathers[0].program.mesh, chain.start, chain.end, array)
    more = way.round_trips - len(gathers) if way else 0
    if way is None or sent - way.sent <= max(0, SMALL * more):
        return
    maker = chain.gathers[-1].made_by(WHOLE | BARRIERS).instruction
    made = walk.source(gathers[0].program.module, [maker])
    start, end, between = written(chain.start), written(chain.end), way.specs[:-1]
    lines = "; ".join(
        "x = jax.lax.with_sharding_constraint(x, jax.sharding.NamedSharding(mesh, "
        f"{written(spec)}))"
        for spec in between
    )
    advice = (
        f"XLA gathers all of {array}{f' of {made}' if made else ''} to bring it from {start} "
        f"to {end}, and each device keeps a slice (an involuntary full rematerialization): by "
        f"way of {' and '.join(map(written, between))} it sends {way.sent} B instead of {sent} "
        f"B. Before the constraint to {end} write {lines}"
    )
    # Share out the bytes and round trips of the new way among the gathers: each takes at most as
    # much as it costs now, and the last one takes the rest.
    left, trips = way.sent, way.round_trips
    for number, site in enumerate(gathers):
        is_last = number == len(gathers) - 1
        part = left if is_last else min(left, site.entry.wire_bytes)
        share = trips if is_last else min(trips, 1)
        left, trips = left - part, trips - share
        yield (
            site,
            site.hint(
                advice
                if not number
                else f"goes away with the gather at {gathers[0].where}: {lines}",
                bytes_after=site.in_all(part * site.entry.bytes // site.entry.wire_bytes),
                trips_after=site.in_all(share),
                sent_after=site.in_all(part),
                goes_with=gathers[0],
            ),
        )


def written(spec: _Spec) -> str:
    """Return a PartitionSpec as code."""
    parts = [repr(axes[0]) if len(axes) == 1 else repr(axes or None) for axes in spec]
    while parts and parts[-1] == "None":
        parts.pop()
    return f"P({', '.join(parts)})"


def _is_constraint(site: Site) -> bool:
    return (
        site.collective.kind == "all-gather"
        and operation(site.collective) in _BESIDE
        and site.entry.phase == "forward"  # otherwise another way has costs not computed here
        and site.whole
        and not site.in_shard_map
        and site.collective.group_size > 1
    )


def _chain(site: Site) -> _Chain | None:
    """Return the gathers up to one whose result is sliced, and the shardings at both ends."""
    part, program = slices.read_part(site), site.program
    mesh = {axis: size for axis, size in program.mesh.items() if size > 1}
    if part is None or len(mesh) > _MOST_AXES or math.prod(mesh.values()) != program.device_count:
        return None
    starts, sizes = np.array(part.starts), part.sizes
    after = None if (starts % part.size).any() else _axes(mesh, starts // part.size)
    if after is None or part.size * math.prod(mesh[a] for a in after) != sizes[part.dimension]:
        return None
    gathers, ends = [site], [part.node]
    while True:
        source = gathers[-1].source
        maker = made_by(source, factors.MOVES | WHOLE | UNARY)
        parts = [] if maker.fused else program.parts(maker.instruction)
        if not parts:
            break
        # An array from another collective has a sharding in between that XLA chose.
        alone = maker is made_by(source, factors.MOVES) and len(slices.uses_of(parts[0])) == 1
        if not alone or not _is_constraint(parts[0]):
            return None
        ends.append(source)
        gathers.append(parts[0])
    start = _start(mesh, gathers, ends)
    # If the array is neither gathered nor sliced along an axis, this axis may split another
    # dimension.
    if start is None or {*after, *itertools.chain(*start)} != set(mesh):
        return None
    end: _Spec = tuple(after if d == part.dimension else () for d in range(len(sizes)))
    # If the array is only transposed before the slice, it is gathered with the dimensions that it
    # has in the program.
    order = part.order(site.result) if site.result else None
    if order is not None:
        start, end = (tuple(spec[d] for d in order) for spec in (start, end))
        sizes = tuple(sizes[d] for d in order)
    return _Chain(gathers, site.taken._replace(dimensions=sizes), start, end)


def _start(mesh: dict[str, int], gathers: list[Site], ends: list[Node]) -> _Spec | None:
    """Return the sharding before gathers (last one first), in the dimensions of the last end."""
    # Follow each device's own part as factors. Each gather adds a factor for its devices, which
    # then moves through the reshapes. In the end, these factors show which axes split which
    # dimension: compute each device's shard number, and look for axes that count in this order.
    own = factors.of(gathers[-1].taken.dimensions)
    array: factors.Factors | None = own
    for number, (site, end) in reversed([*enumerate(zip(gathers, ends))]):
        along = site.collective.dimension
        if array is None or not along.isdecimal():
            return None
        devices = factors.Factor(_DEVICES - number, 1, site.collective.group_size)
        gathered = [[devices, *f] if d == int(along) else f for d, f in enumerate(array)]
        array = factors.followed(gathered, end)
    spec = []
    for dimension in array or ():
        # A dimension must have the shards first, then one dimension of each device's part.
        split = [factor for factor in dimension if factor.origin <= _DEVICES]
        if dimension[: len(split)] != split or dimension[len(split) :] not in own:
            return None
        shards = np.zeros(math.prod(mesh.values()), int)
        for origin, stride, size in split:
            places = np.zeros_like(shards)
            for group in gathers[_DEVICES - origin].collective.groups:
                places[list(group)] = range(len(group))
            shards = shards * size + places // stride % size
        axes = _axes(mesh, shards) if split else ()
        if axes is None:
            return None
        spec.append(axes)
    return tuple(spec) or None


def _axes(mesh: dict[str, int], places: np.ndarray) -> tuple[str, ...] | None:
    """Return the axes whose coordinates, the major one first, give each device's shard number."""
    at = dict(zip(mesh, np.unravel_index(np.arange(places.size), tuple(mesh.values()))))
    for count in range(1, len(mesh) + 1):
        for axes in itertools.permutations(mesh, count):
            number = np.zeros(places.size, int)
            for axis in axes:
                number = number * mesh[axis] + at[axis]
            if np.array_equal(number, places):
                return axes
    return None


def _cheapest(mesh: dict[str, int], start: _Spec, end: _Spec, array: hlo.Shape) -> _Way | None:
    """Return the way from one sharding to another on which a device sends the fewest bytes."""
    # Dijkstra's algorithm: the shardings are the nodes, and the bytes sent are the distances. No
    # step sends a negative number of bytes, so the first way to ``end`` that the queue gives is the
    # cheapest. It ends, since each sharding is expanded once. If the cheapest way takes more than
    # ``_MOST_STEPS`` collectives, there is no answer, even if another way takes fewer.
    among = [d for d, axes in enumerate(zip(start, end)) if any(axes)]  # the others stay whole
    queue: list[tuple[int, int, int, _Spec, _Way]] = []
    count = itertools.count()  # breaks ties, so that no two ways are compared
    heapq.heappush(queue, (0, 0, next(count), start, _Way(0, 0, (), 0, False)))
    done = set()
    while queue:
        *_, spec, way = heapq.heappop(queue)
        if spec == end:
            within = way.round_trips <= _MOST_STEPS and len(way.specs) > 1
            return way if within else None
        if spec in done or way.round_trips > _MOST_STEPS:
            continue
        done.add(spec)
        shard = array.bytes // math.prod(mesh[axis] for axis in itertools.chain(*spec))
        for after, kind, devices in _steps(mesh, spec, among):
            counts = (math.prod(mesh[axis] for axis in axes) for axes in after)
            if any(size % count for size, count in zip(array.dimensions, counts)):
                continue  # JAX rejects a constraint to this sharding
            sent = accounts.wire_bytes(kind, shard, devices) if kind else 0
            before = way.specs[:-1] if way.sliced and not kind else way.specs
            on = _Way(
                way.sent + sent,
                way.round_trips + bool(kind),
                (*before, after),
                way.moved + (shard if kind else 0),
                not kind,
            )
            heapq.heappush(queue, (on.sent, on.round_trips, next(count), after, on))
    return None


def _steps(
    mesh: dict[str, int], spec: _Spec, among: Sequence[int]
) -> Iterator[tuple[_Spec, str, int]]:
    """Yield the sharding after each possible step, its kind ("" for a slice) and group size."""
    used = {*itertools.chain(*spec)}
    free = [axis for axis in mesh if axis not in used]
    for d, axes in enumerate(spec):
        if d not in among:
            continue
        for axis in free:
            yield _with(spec, {d: (*axes, axis)}), "", 1
        for kept in range(len(axes)):
            moved = axes[kept:]
            devices = math.prod(mesh[axis] for axis in moved)
            yield _with(spec, {d: axes[:kept]}), "all-gather", devices
            for e, others in enumerate(spec):
                if (
                    e != d and e in among and (not others or len(moved) == 1)
                ):  # XLA reaches other shardings in another way
                    yield _with(spec, {d: axes[:kept], e: others + moved}), "all-to-all", devices


def _with(spec: _Spec, changed: dict[int, Sequence[str]]) -> _Spec:
    return tuple(tuple(changed.get(d, axes)) for d, axes in enumerate(spec))


ROWS = {
    "resharded": Kind(
        find,
        looks_like=(
            "an all-gather for a sharding constraint, of whose result each device keeps a slice: "
            "XLA's log warns of an involuntary full rematerialization"
        ),
        in_shard_map="does not occur",
        under_jit=(
            "a constraint between the two shardings, which the report names: each step is then "
            "one all-to-all, slice or smaller gather"
        ),
    )
}
