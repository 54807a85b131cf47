"""Finds sums that each call of a program makes, and that a loop on the host only adds up."""

from __future__ import annotations

from collections.abc import Iterator

from shardrules.costs.waste.program import FLOATS, WHOLE, Hint, Kind, Program, Site, is_constant
from shardrules.hlo.reader.flow import Node, made_by

_THROUGH = WHOLE | {"all-reduce-done"}
_LEAST = 3  # the fewest calls for each total: two calls are hardly a loop


def find(site: Site) -> Hint | None:
    """Find an all-reduce that is only added to an argument, which the next call takes again."""
    if not (site.program.fed and site.adds and site.whole and site.computation.is_entry):
        return None
    if not site.in_shard_map and not site.program.remembered(_are_apart):
        return None
    place = _added(site)
    runs, first = site.program.fed.get(place, (0, 1)) if place else (0, 1)
    if runs < _LEAST * first:
        return None
    size, sent = site.entry.bytes, site.entry.wire_bytes
    after = f"{first} all-reduce{'s' * (first > 1)}"
    sums = "one sum" if first == 1 else f"{first} sums"
    return site.hint(
        "each call only adds its result to an argument that it returns, and the next call "
        f"takes that sum, so {runs} calls build up {sums}. {_change(site)}, and reduce once after "
        f"the loop, where the total is used: {after} instead of {runs}. Each device keeps a whole "
        "sum until then (equal up to rounding)",
        bytes_after=-(-size * first // runs),
        sent_after=-(-sent * first // runs),
        trips_after=0,
    )


def _change(site: Site) -> str:
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


def _are_apart(program: Program) -> bool:
    """Return whether no example needs another: sums are only returned or added to arguments."""
    needed = (site for site in program.sites if site.needed)
    return all(
        site.adds and site.computation.is_entry and (_added(site) or _is_returned(site))
        for site in needed
    )


def _added(site: Site) -> tuple[int, int] | None:
    """Return the output and the parameter of a sum that is only added to that parameter."""
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
    """Yield a result's only user, then that one's, as long as they scale it by constants."""
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


ROWS = {
    "each call": Kind(
        find,
        looks_like=(
            "`run` alone: an all-reduce that a program only adds to an argument, in a loop on the "
            "host that gives it its own result again, as `accumulate(grads, batch)` does"
        ),
        in_shard_map=(
            "keep each device's own sum, with the axis in its in_specs and out_specs, and psum "
            "after the loop"
        ),
        under_jit="add up each shard's own gradient by jax.vmap over the shards, and reduce once",
    )
}
