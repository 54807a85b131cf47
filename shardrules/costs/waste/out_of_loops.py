"""Find collectives in loops that could run before or after the loop, or not at all."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from shardrules.costs import accounts, walk
from shardrules.costs.advice import operation
from shardrules.costs.waste.loop_flow import Unread, unread
from shardrules.costs.waste.program import (
    FLOATS,
    SMALL,
    WHOLE,
    WITHIN_SHARDS,
    Hint,
    Kind,
    Program,
    Site,
    is_constant,
)
from shardrules.hlo.proof.collectives import KINDS, OPCODES
from shardrules.hlo.proof.evaluation import CallGraph
from shardrules.hlo.reader.flow import Node, made_by

# -- the same operand on every trip ---------------------------------------------------------------

# Besides deterministic operations, these opcodes give the same result on each trip if their
# operands are the same.
_SAME = OPCODES.keys() | {f"{kind}-done" for kind in KINDS}
_SAME |= frozenset("copy-start copy-done partition-id replica-id".split())


def repeated(site: Site) -> Hint | None:
    if not site.in_loop:
        return None
    stays = site.program.remembered(_invariant, site.computation.name)
    if not stays.issuperset(site.sources):
        return None
    times = site.runs_of(site.program.loops[site.computation.name].home.name)
    before, after = site.in_all(site.entry.bytes), site.entry.bytes * times
    if before is not None and before <= after:
        return None
    # A combined collective's round trips stay unless all of its parts leave the loop.
    whole = stays.issuperset(site.node.operands)
    if not whole and not site.pays_alone(after):
        return None
    now = f"{site.entry.bytes} B on every trip" if before is None else f"{before} B"
    change = "run it before the loop"
    if site.in_inner_shard_map:
        change += ", in a shard_map of its own, and give the loop's shard_map its result"
    elif not site.in_shard_map and not site.is_unnamed:
        if site.entry.axes is None:
            return None  # no spec describes the partitioner's gathers over parts of an axis
        change = "compute what it makes before the loop"
        if site.collective.kind == "all-gather":
            change = (
                "give the array the layout that the loop needs, by "
                "jax.lax.with_sharding_constraint before it"
            )
    advice = (
        f"its operand is the same on every trip of the loop: {change}, and "
        f"{now} become {after} B (the result then stays in memory)"
    )
    return site.hint(advice, bytes_after=after, trips_after=times, together=whole)


def _invariant(program: Program, body: str) -> set[Node]:
    """Return the values in a loop's body that are the same on every trip."""
    # Operands come first, so one pass finds all of them: elements of the carry that no trip
    # changes, and deterministic functions of values that are the same.
    same: set[Node] = set()
    reach = CallGraph(program.module)
    for node in program.flat(body).nodes:
        stays = node.opcode in _SAME or reach.deterministic(node.instruction)
        computed = stays and node.opcode != "parameter" and same.issuperset(node.operands)
        if computed or program.unchanged(node):
            same.add(node)
    return same


# -- results that no trip reads -------------------------------------------------------------------

_NOTE = " (equal up to rounding)"


def after_loop(site: Site) -> Hint | None:
    return _after(site) if site.is_written else None


def accumulated(site: Site) -> Hint | None:
    """Find a gradient that each microbatch reduces, and that the loop only adds up."""
    return site.program.remembered(_accumulated).get(site)


def _accumulated(program: Program) -> dict[Site, Hint]:
    """Return hints on gradients; one change removes all gradients of a loop from the loop."""
    found: dict[Site, Hint] = {}
    if not program.remembered(_are_apart):
        return found
    reads = program.remembered(unread)
    first: dict[str, Site] = {}  # the costliest gradient of each loop
    for site in sorted(program.sites, key=lambda s: -(s.in_all(s.entry.wire_bytes) or 0)):
        # Without a spec, it isn't known how the batch is sharded.
        is_known = not program.mesh or site.entry.axes is not None or site.split
        if not site.is_gradient or not is_known:
            continue
        if (hint := _after(site, is_added=True)) is not None:
            costliest = first.setdefault(reads[site.key].around, site)
            found[site] = dataclasses.replace(hint, goes_with=costliest.collective)
    return found


def _are_apart(program: Program) -> bool:
    """Return whether no example needs another in a loop, since no trip reads a reduced value."""
    # A squared mean over the batch, a batch norm and a mask do read their reductions in the loop.
    reads = program.remembered(unread)
    return all(s.is_gradient or s.key in reads for s in program.sites if s.needed and s.in_loop)


def _after(site: Site, is_added: bool = False) -> Hint | None:
    if not site.in_loop or site.in_inner_shard_map:
        return None
    sites = site.program.parts(site.instruction)
    results = [site.program.remembered(unread).get(s.key) for s in sites]
    own = results[sites.index(site)]
    if own is None or (site.entry.runs is None and "keeps the last of" in own.ways):
        return None  # if the loop makes no trip, the result is the carry's initial value
    # An inner loop, over layers, may stack the results that this loop adds up. But if this loop
    # also stacks them, or a norm of each gradient, it needs each result whole.
    if is_added and not ({"adds up"} <= own.ways <= {"adds up", "stacks"} and own.one_each):
        return None
    only_stacks = "stacks" in own.ways and not is_added
    size = site.entry.bytes
    outer = [r.around for r in results if r is not None]
    # A combined collective's round trips stay unless all of its parts leave the loop.
    leaves = all(s.is_written or (is_added and s.is_gradient) for s in sites)
    whole = len(outer) == len(sites) and leaves
    times = max(map(site.runs_of, outer))
    after = None if own.copies is None else size * own.copies * site.runs_of(own.around)
    if whole:
        if only_stacks and sum(s.entry.bytes for s in sites) > SMALL:
            return None
    elif only_stacks or not site.pays_alone(after):
        return None
    advice = _advice(site, own, after, times) + site.cast("before the loop")
    sent = None
    if site.split and after is not None:  # after the change, it runs over the whole axis
        sent = accounts.wire_bytes(site.collective.kind, after, site.program.mesh[site.split[0]])
    return site.hint(advice, bytes_after=after, trips_after=times, sent_after=sent, together=whole)


def _advice(site: Site, own: Unread, after: int | None, times: int) -> str:
    runs, size = site.entry.runs, site.entry.bytes
    name = "psum" if site.adds else "reduce"
    if site.collective.kind == "all-gather":
        name = "all_gather"
    if own.ways == {"adds up"}:
        what = "its results are only added up over the loop's trips"
        change = f"carry the sum of its operands and {name} that once after the loop"
    elif own.ways == {"keeps the last of"}:
        what = "the loop only keeps its last result"
        change = f"carry its operand instead and {name} that once after the loop"
    else:
        what = "no trip of the loop reads its results, which are only stacked or added up"
        change = (
            "return its operand from the scan's body instead, and "
            f"{name} the stack of them once after the scan"
        )
    if not site.in_shard_map:
        change = (
            "XLA's partitioner makes it from a reduction over a sharded dimension: in the "
            f"body, {WITHIN_SHARDS}, and reduce over that after the loop"
        )
        if len({s.over for s in site.program.sites if s.entry.source == site.entry.source}) > 1:
            change += (
                "; where two dimensions are sharded, give each its own: x.reshape(n, -1, m, "
                "x.shape[1] // m, *x.shape[2:]) over all but n and m"
            )
    if site.is_gradient:
        change = site.own_gradients("a carry", "after the loop")
    if site.split:
        change = (
            f"a trip's batch is over parts of {site.split[0]} alone, as a reshape to (steps, batch "
            "/ steps, ...) leaves it, and several devices compute the same: split it by "
            f"x.reshape(-1, steps, *x.shape[1:]).swapaxes(0, 1) first; then {change}"
        )
    then = f"{'?' if after is None else after} B in {times}"
    if runs is None:
        return f"{what}: {change}, and {size} B on every trip become {then} round trips{_NOTE}"
    trips = "1 round trip" if runs == 1 else f"{runs} round trips"
    return f"{what}: {change}, and {runs * size} B in {trips} become {then}{_NOTE}"


# -- sums in each call that a loop on the host adds up --------------------------------------------

_THROUGH = WHOLE | {"all-reduce-done"}
_LEAST_CALLS = 3  # the fewest calls for each total: two calls are hardly a loop


def each_call(site: Site) -> Hint | None:
    """Find an all-reduce that is only added to an argument, whose new value the next call takes."""
    if not (site.program.fed and site.adds and site.whole and site.computation.is_entry):
        return None
    if not site.in_shard_map and not site.program.remembered(_only_adds):
        return None
    place = _added_to(site)
    runs, first = site.program.fed.get(place, (0, 1)) if place else (0, 1)
    if runs < _LEAST_CALLS * first:
        return None
    size, sent = site.entry.bytes, site.entry.wire_bytes
    after = f"{first} all-reduce{'s' * (first > 1)}"
    sums = "one sum" if first == 1 else f"{first} sums"
    return site.hint(
        "each call only adds its result to an argument that it returns, and the next call "
        f"takes that sum, so {runs} calls build up {sums}. {_own_sums(site)}, and reduce once "
        f"after the loop, where the total is used: {after} instead of {runs}. Each device keeps a "
        "whole sum until then (equal up to rounding)",
        bytes_after=-(-size * first // runs),
        sent_after=-(-sent * first // runs),
        trips_after=0,
    )


def _own_sums(site: Site) -> str:
    if site.in_shard_map:
        return (
            f"Keep each device's own sum, of shape (1, ...) there: total + g[None] without the "
            f"psum, with P({site.and_own}) for the total in in_specs and out_specs{site.own_spec}"
        )
    f = "f = jax.grad(loss)" if site.entry.phase == "backward" else "f(w, x)"
    return (
        "Keep each shard's own sum: for n shards of the batch add jax.vmap(f, (None, 0))(w, "
        f"x.reshape(n, -1, *x.shape[1:])), {f} being what is added now, to a total of shape "
        f"(n, ...) that is sharded by P({site.and_own}){site.own_spec}, take the mean over the "
        "shards where f is a mean over the batch"
    )


def _only_adds(program: Program) -> bool:
    """Return whether no example needs another: sums are only returned or added to arguments."""
    needed = (site for site in program.sites if site.needed)
    return all(
        site.adds and site.computation.is_entry and (_added_to(site) or _is_returned(site))
        for site in needed
    )


def _added_to(site: Site) -> tuple[int, int] | None:
    """Return the numbers of the output and the parameter, if a sum is only added to a parameter."""
    *_, (node, taken) = _scaled(site)
    if node is None or node.opcode != "add" or len({*node.operands}) < 2:
        return None
    (other,) = {*node.operands} - {taken}
    whole = made_by(other, WHOLE)
    uses = site.program.uses(whole, 0, WHOLE)
    if whole.opcode != "parameter" or whole.fused or [use.user for use in uses] != [node]:
        return None
    ends = site.program.uses(node, 0, WHOLE)
    if len(ends) != 1 or ends[0].user.opcode != "return":
        return None
    places = [k for k, o in enumerate(ends[0].user.operands) if o is ends[0].taken]
    return (places[0], int(whole.instruction.literal)) if len(places) == 1 else None


def _is_returned(site: Site) -> bool:
    *_, (node, _) = _scaled(site)
    return node is not None and node.opcode == "return"


def _scaled(site: Site) -> Iterator[tuple[Node, Node] | tuple[None, None]]:
    """Yield a result's only user, then this user's only user, and so on through constant scales."""
    uses = site.uses(_THROUGH)
    while len(uses) == 1:
        ((node, taken),) = uses
        yield node, taken
        others = [o for o in node.operands if o is not taken]
        scales = node.opcode in ("multiply", "divide") and node.operands[0] is taken
        scales |= node.opcode == "multiply" or (
            node.opcode == "convert" and FLOATS.match(node.shape.element_type) is not None
        )
        if not (scales or node.opcode == "negate") or not all(map(is_constant, others)):
            return
        if node.operands.count(taken) != 1:
            return
        uses = site.program.uses(node, 0, WHOLE)
    yield None, None


# -- a predicate that all devices exchange on each trip --------------------------------------------

# XLA for TPU writes "or" as several operations on whole numbers.
_OTHER = ("add", "multiply", "and", "minimum")


def asked_each_trip(site: Site) -> Hint | None:
    """Find the predicate of a vmapped while loop, which combines the examples' predicates."""
    if not _is_predicate(site) or not site.program.remembered(_alone).get(site.computation.name):
        return None
    spec = f"P({site.over})"
    advice = (
        "jax.vmap of a while loop runs until the examples of all devices are done, and asks "
        "the other devices on every trip: jax.shard_map(jax.vmap(f), mesh=mesh, "
        f"in_specs={spec}, out_specs={spec}), with the axis at the dimension that vmap maps "
        "and P() for what all examples share, after shardrules.install(), which casts what a carry "
        "starts from, lets each device stop by itself, and saves that round trip on every trip"
    )
    return site.hint(advice)


def _is_predicate(site: Site) -> bool:
    # If the program's own condition has a reduction, the collective has this reduction's name.
    collective = site.collective
    return (
        collective.kind == "all-reduce"
        and collective.reduction not in _OTHER
        and site.taken.element_count == 1
        and site.taken.element_type.startswith(("pred", "s", "u"))
        and not site.in_shard_map
        and site.op_name.count("vmap(") == 1
        and operation(collective) == "while"
    )


def _alone(program: Program) -> dict[str, bool]:
    """Return, by computation, whether the loops around it communicate only by predicates."""
    computations = program.module.computations
    others = {s.computation.name for s in program.sites if not _is_predicate(s)}

    def called(name: str) -> set[str]:
        names: set[str] = set()
        for position in computations[name].calling:
            names.update(computations[name].instructions[position].calls)
        return names

    alone: dict[str, bool] = {}
    for computation in computations.values():
        for position in computation.calling:
            loop = computation.instructions[position]
            if loop.opcode == "while":
                inside = walk.reached(loop.calls, called)
                for name in inside:
                    alone[name] = alone.get(name, True) and not inside & others
    return alone


ROWS = {
    "repeated": Kind(
        repeated,
        looks_like="a collective in a loop whose operand is the same on every trip",
        in_shard_map="run it before the loop and close over the result",
        under_jit=(
            "give the array the layout that the loop needs, by jax.lax.with_sharding_constraint "
            "before it"
        ),
    ),
    "after the loop": Kind(
        after_loop,
        looks_like=(
            "an all-reduce or all-gather in a loop that only stacks, adds up, scales, converts or"
            " passes on its results"
        ),
        in_shard_map=(
            "return the operand from the scan's body, or carry the sum of operands, and run one "
            "collective after the scan"
        ),
        under_jit="reduce within the shards in the body, and over the shards after the loop",
    ),
    "accumulated": Kind(
        accumulated,
        looks_like=(
            "under jit on CPU, the gradient of each microbatch that a scan only adds up: XLA for "
            "TPU and GPU moves it behind the loop by itself"
        ),
        in_shard_map="*after the loop*",
        under_jit=(
            "accumulate each shard's own gradient by jax.vmap over the shards, and reduce once"
        ),
    ),
    "each call": Kind(
        each_call,
        looks_like=(
            "`run` alone: an all-reduce that a program only adds to an argument, in a loop on the "
            "host that gives it its own result again, as `accumulate(grads, batch)` does"
        ),
        in_shard_map=(
            "keep each device's own sum, with the axis in its in_specs and out_specs, and psum "
            "after the loop"
        ),
        under_jit="add up each shard's own gradient by jax.vmap over the shards, and reduce once",
    ),
    "asked each trip": Kind(
        asked_each_trip,
        looks_like=(
            "an all-reduce of a predicate in the condition of `jax.vmap` of a while loop over a "
            "sharded batch: the loop goes on until all devices are done"
        ),
        in_shard_map="does not occur",
        under_jit="a shard_map around the vmap: each device stops by itself",
    ),
}
