"""Find loops over the rows of a sharded array in which each device makes all trips.

XLA's partitioner doesn't split a loop: for ``jax.lax.map(f, x)``, or a scan, over the sharded rows
of x it gathers all of x, and each device computes every row. If no trip needs another trip, each
device could make the trips of its own rows.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from shardrules.costs import accounts, walk
from shardrules.costs.advice import operation
from shardrules.costs.waste import factors
from shardrules.costs.waste.loop_flow import trips_of
from shardrules.costs.waste.program import UNARY, WHOLE, Hint, Kind, Program, Site, Use, is_constant
from shardrules.costs.waste.slices import Rows
from shardrules.hlo.known import exact
from shardrules.hlo.proof import phases
from shardrules.hlo.reader.flow import BARRIERS, Node, made_by

_MOST_TRIPS = 2**14  # the most trips whose places we compare
_NEAR = 64  # the most values to follow
_EACH = WHOLE | BARRIERS | UNARY | {"all-gather-done"}
_ELEMENTWISE = _EACH | frozenset("add subtract multiply divide maximum minimum select".split())
_EFFECTS = frozenset("infeed outfeed send recv rng rng-get-and-update-state".split())
_PASSES = WHOLE | BARRIERS | {"convert"}

# For each trip of a loop, the device whose rows it reads or writes, by its number in a group.
_Owners = tuple[int, ...]


class _RowLoop(NamedTuple):
    """A loop whose trips need no other trip; each trip needs the rows of one device only."""

    node: Node
    trips: int
    added: list[Node]  # the elements of its carry to which each trip adds
    stacked: list[Node]  # the elements into which each trip writes its own rows
    reads_number: bool  # whether a trip computes with its number


def looped_over(site: Site) -> Hint | None:
    """Find the gather of an array whose rows a loop reads, one after the other."""
    return site.program.remembered(_found).get(site)


def _found(program: Program) -> dict[Site, Hint]:
    """Return hints by gathers; one change removes all gathers for the loops of one source line."""
    gathers = {
        site: owners
        for site in program.sites
        if _is_by_partitioner(site) and (owners := _reading(site))
    }
    if not gathers:
        return {}
    bodies_of: dict[str, list[str]] = {}  # by source lines: also those of the backward pass
    for body, loop in program.loops.items():
        line = walk.source(program.module, [loop.instruction]) or body
        bodies_of.setdefault(line, []).append(body)
    found: dict[Site, Hint] = {}
    for line, bodies in bodies_of.items():
        read = {s: owners for s, owners in gathers.items() if not owners.keys().isdisjoint(bodies)}
        if read and all(owners.keys() <= {*bodies} for owners in read.values()):
            loops = [_loop(program, body, read) for body in bodies]
            if None not in loops:
                found.update(_hints(program, line, [*filter(None, loops)], [*read]))
    return found


def _is_by_partitioner(site: Site) -> bool:
    if site.in_shard_map or site.is_unnamed or not (site.needed and site.whole):
        return False
    is_gather = site.collective.kind == "all-gather" and site.collective.group_size > 1
    return is_gather and operation(site.collective) != "sharding_constraint"


# -- the rows that a trip reads and writes --------------------------------------------------------


def _reading(site: Site) -> dict[str, _Owners]:
    """Return the owners of the rows that loops read, by their bodies; none if others read them."""
    found: dict[str, _Owners] = {}
    for use in site.uses(_EACH, True) if site.result is not None else []:
        owners = _read_by_trips(site, use)
        if owners is None or found.setdefault(use.user.home.name, owners) != owners:
            return {}
    return found


def _read_by_trips(site: Site, use: Use) -> _Owners | None:
    """Return the owners of the rows that a loop slices from a gathered array; None if unknown."""
    (taker, taken), program = use, site.program
    if taker.opcode != "dynamic-slice" or taken is not taker.operands[0]:
        return None
    of = _followed(program, site, taken)
    d = _cut(taken, taker)
    if of is None or d is None or len(of[d]) != 1 or site.result is None:
        return None
    # The rows of a trip are neighbours along the dimension that is gathered.
    origin, stride, size = of[d][0]
    if site.collective.dimension != str(origin) or stride * size != site.result.dimensions[origin]:
        return None
    return _owners(program, taken, taker, taker.operands[1 + d], site.collective.group_size)


def _cut(whole: Node, part: Node) -> int | None:
    """Return the dimension in which a part is smaller; None if there are several or none."""
    sizes = zip(whole.shape.dimensions, part.shape.dimensions)
    cut = [d for d, (size, own) in enumerate(sizes) if size != own]
    return cut[0] if len(cut) == 1 else None


def _owners(program: Program, whole: Node, part: Node, index: Node, count: int) -> _Owners | None:
    """Return the owners of a loop's parts, if the trips' parts differ and cover the whole array.

    ``count`` is the number of devices that share the whole array, in order.
    """
    loop, d = program.loops.get(index.home.name), _cut(whole, part)
    trips = None if loop is None else trips_of(program, loop)
    if loop is None or d is None or not trips or trips % count or trips > _MOST_TRIPS:
        return None
    size, own = whole.shape.dimensions[d], part.shape.dimensions[d]
    rows = program.remembered(_trip_rows, index.home.name).of(index)
    starts = None if rows is None else exact.clamped_index(rows, size - own)
    if starts is None or {*starts.tolist()} != {*range(0, trips * own, own)} or trips * own != size:
        return None
    return tuple((starts * count // size).tolist())


def _followed(program: Program, site: Site, taken: Node) -> factors.Factors | None:
    """Return the factors of a gather's result where a loop slices it."""
    ends = [taken]
    while (before := program.before_loop(made_by(ends[-1], factors.MOVES | UNARY))) is not None:
        ends.append(before)
    followed: factors.Factors | None = factors.of(site.result.dimensions if site.result else ())
    for end in reversed(ends):
        followed = factors.followed(followed, end)
    return followed


def rows_of_trips(program: Program, node: Node) -> np.ndarray | None:
    """Return an integer's value on each trip of a loop that is around it, or None."""
    body = node.home.name
    while (loop := program.loops.get(body)) is not None:
        rows = program.remembered(_trip_rows, body).of(node)
        if rows is not None:
            return rows
        body = loop.home.name
    return None


def _trip_rows(program: Program, body: str) -> Rows:
    loop = program.loops[body]
    trips = trips_of(program, loop) or 0
    return Rows(program, dict(_counters(program, loop, trips)) if trips <= _MOST_TRIPS else {})


def _counters(program: Program, loop: Node, trips: int) -> Iterator[tuple[Node, np.ndarray]]:
    """Yield the elements of a loop's carry that count, with their values on each trip."""
    body = program.flat(loop.instruction.calls[1])
    for k, start in enumerate(program.start(loop)[: len(body.end.operands)]):
        element, end = body.parameter.elements.get(k), made_by(body.end.operands[k], _PASSES)
        if element is None or end.opcode != "add" or element.shape.element_type[:1] not in "su":
            continue
        steps = [made_by(operand, _PASSES) for operand in end.operands]
        if element not in steps:
            continue
        steps.remove(element)
        first, step = (Rows(program, {}).of(node) for node in (start, *steps))
        if first is not None and step is not None and first.size == step.size == 1:
            numbers = np.arange(trips, dtype=first.dtype)
            yield element, first.reshape(-1) + step.reshape(-1) * numbers


# -- whether a trip needs another trip ------------------------------------------------------------


def _loop(program: Program, body: str, read: dict[Site, dict[str, _Owners]]) -> _RowLoop | None:
    """Return a loop if no trip needs another trip, or other devices except by these gathers."""
    # First, the loop must have no effects and no collectives besides these gathers. Then follow
    # each element of the carry through the body, from its place in the parameter to its place in
    # the result. Each element must be a counter, unchanged, a sum that trips only add to, or a
    # stack in which each trip writes its own rows; nothing else may read it.
    loop, flat = program.loops[body], program.flat(body)
    inside = walk.reached([body], lambda name: _called(program, name))
    gathers = {site.instruction.start for site in read}
    within = (s.instruction.start for s in program.sites if s.computation.name in inside)
    trips = trips_of(program, loop)
    if any(_has_effect(program, name) for name in inside):
        return None
    if not trips or not gathers.issuperset(within) or flat.root.opcode != "tuple":
        return None
    counters = dict(_counters(program, loop, trips))
    owners = {of[body] for of in read.values() if body in of}
    counts = {site.collective.group_size for site in read}
    made = _RowLoop(loop, trips, [], [], _reads_number(counters))
    if flat.parameter.users or len(owners) > 1 or len(counts) > 1:
        return None
    for k, end in enumerate(flat.end.operands):
        element = flat.parameter.elements.get(k)
        if element is None and k in loop.elements:
            return None  # the last trip's result
        if element is None or element in counters or program.unchanged(element):
            continue
        written: set[_Owners | None] = set()
        is_added, node = False, element
        while node is not end:
            if len(node.users) != 1:
                return None  # something else reads the results of earlier trips
            (user,) = node.users
            if user.opcode == "dynamic-update-slice" and user.operands[0] is node:
                d, part = _cut(node, user.operands[1]), user.operands[1]
                if d is None:
                    return None
                written.add(_owners(program, node, part, user.operands[2 + d], *counts))
            elif user.opcode == "add" and user.operands.count(node) == 1:
                is_added = True
            elif not _passes(program, counters, node, user):
                return None
            node = user
        if (
            end.users != [flat.end]
            or bool(written) == is_added
            or not written <= (owners or written)
        ):
            return None
        (made.added if is_added else made.stacked).append(element)
    return made


def _called(program: Program, name: str) -> set[str]:
    computation = program.module.computations[name]
    calls = (computation.instructions[place].calls for place in computation.calling)
    return {*itertools.chain(*calls)}


def _has_effect(program: Program, name: str) -> bool:
    """Return whether a computation has an effect besides its result, such as printing."""
    opcodes = program.module.opcodes[name]
    instructions = program.module.computations[name].instructions
    return not _EFFECTS.isdisjoint(opcodes) or (
        "custom-call" in opcodes
        and any(i.attribute("custom_call_has_side_effect") == "true" for i in instructions)
    )


def _passes(program: Program, counters: dict[Node, np.ndarray], node: Node, user: Node) -> bool:
    """Return whether an operation passes on an element of the carry, except for rounding."""
    if user.opcode != "select" or node is user.operands[0]:
        return user.opcode in _PASSES
    # On TPU the first trip selects the carry's initial value.
    start = next(operand for operand in user.operands[1:] if operand is not node)
    return Rows(program, counters).of(user.operands[0]) is not None and is_constant(start)


def _reads_number(counters: dict[Node, np.ndarray]) -> bool:
    """Return whether a trip computes with its number, besides using it as a place."""
    left = [*counters]
    for node in left:  # the list grows meanwhile
        for user in node.users:
            if user.opcode in exact.OPCODES - {"dynamic-slice"} and user.shape.element_count == 1:
                left += [user] if user not in left else []
            elif user.opcode not in ("return", "dynamic-slice", "dynamic-update-slice"):
                return True
    return False


# -- the advice -----------------------------------------------------------------------------------


def _hints(
    program: Program, line: str, loops: list[_RowLoop], sites: list[Site]
) -> Iterator[tuple[Site, Hint]]:
    first, *others = sorted(sites, key=lambda site: -(site.in_all(site.entry.wire_bytes) or 0))
    count, trips = first.collective.group_size, loops[0].trips
    before = [site.in_all(site.entry.wire_bytes) for site in sites]
    # After the loop, or the backward pass, all devices' sums are added once.
    added: list[int] = []
    later: list[int] = []
    for loop in loops:
        added += [element.shape.bytes for element in loop.added]
        for element in loop.stacked:
            later += _read_later(program, loop, element, loops)
    runs = max(first.runs_of(loop.node.home.name) for loop in loops)
    total = sum(filter(None, before))
    sent = runs * (sum(later) + sum(accounts.wire_bytes("all-reduce", n, count) for n in added))
    if None in before or 2 * sent > total:
        return
    spec = f"P({first.over})"
    beside = {axis for axis, n in program.mesh.items() if n > 1}.difference(first.entry.axes or ())
    # Without ``vary``, a gradient that f itself takes would be the sum of all devices' gradients.
    axes = ", ".join(map(repr, first.entry.axes or ())) or first.over
    alone = f", axis_names={{{axes}}}" if beside else ""
    numbered = any(loop.reads_number for loop in loops)
    number = f" (jnp.arange({trips}) for the trip's number)" if numbered else ""
    then = ""
    if any(loop.added and _phase(program, loop) == "forward" for loop in loops):
        then = (
            ", then jnp.sum(..., axis=0) of what the loop adds up (or, in the shard_map, "
            "jax.lax.psum of what a scan adds up, after shardrules.install(), which casts what a "
            "carry starts from)"
        )
    advice = (
        f"the loop at {line} goes through the rows of an array that is sharded over {first.over}, "
        "and no trip needs another: each device gathers all rows, and makes all "
        f"{trips} trips. With f(w, x) for a trip, x being its part of xs, all that the loop slices"
        f"{number}, and w the other arrays that it reads, jax.vmap(f, (None, 0))(w, xs) computes "
        "each row where it is; with less memory, jax.shard_map(lambda w, xs: jax.lax.map("
        f"functools.partial(f, shardrules.vary(w, {axes})), xs), mesh=mesh, in_specs=(P(), "
        f"{spec}), out_specs={spec}{alone})(w, xs) makes {trips // count} of the trips on each "
        f"device{then}: {total} B become {f'at most {sent}' if sent else 0} B where what it "
        "returns stays sharded"
    )
    yield (
        first,
        first.hint(
            advice,
            bytes_after=min(first.in_all(first.entry.bytes) or 0, runs * sum(added)),
            trips_after=runs * (len(added) + len(later)),
            sent_after=sent,
            goes_with=first,
        ),
    )
    for site in others:
        yield site, site.hint(f"goes away with that at {first.where}", goes_with=first)


def _phase(program: Program, loop: _RowLoop) -> str:
    return phases.phase_of(program.module.metadata(loop.node.instruction).op_name)


def _read_later(
    program: Program, loop: _RowLoop, element: Node, loops: list[_RowLoop]
) -> list[int]:
    """Return the most that a device sends for each reader of a loop's stacked results."""
    left = [loop.node.elements[k] for k in (element.index,) if k in loop.node.elements]
    count = program.device_count
    sent: list[int] = []
    for node in left:  # the list grows meanwhile
        for user in node.users:
            if user.opcode == "reduce" and node is user.operands[0]:
                # If two functions use a mean, XLA for CPU reduces it for each (JAX 0.10, 0.12).
                sent += 2 * [accounts.wire_bytes("all-reduce", user.shape.bytes, count)]
            elif user.opcode in _ELEMENTWISE and len(left) < _NEAR:
                left += [user] if user not in left else []
            elif not _stays_sharded(user, loops):
                return [accounts.wire_bytes("all-gather", element.shape.bytes // count, count)]
    return sent


def _stays_sharded(user: Node, loops: list[_RowLoop]) -> bool:
    """Return whether a result is only returned, or read by loops that also change."""
    if user.opcode == "tuple":
        nodes = [loop.node for loop in loops]
        return all(taker in nodes for taker in user.users)
    return user.opcode == "return" and user.home.is_entry


ROWS = {
    "looped over": Kind(
        looped_over,
        looks_like=(
            "an all-gather of a sharded array, for `jax.lax.map`, a scan or a fori_loop over its "
            "sharded rows whose trips need no other trip: each device makes all trips"
        ),
        in_shard_map="does not occur: a device loops over its own rows",
        under_jit="`jax.vmap`, or a shard_map around the loop: each device makes its own trips",
    )
}
