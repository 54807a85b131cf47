"""A collective in a loop whose operand is the same on every trip: run it before the loop."""

from __future__ import annotations

from collections.abc import Sequence

from shardrules import hlo
from shardrules.costs import walk
from shardrules.costs.waste.shared.program import Hint, Kind, Site
from shardrules.costs.waste.shared.values import FUNCTIONS, unchanged
from shardrules.hlo.proof.collectives import KINDS, OPCODES

# Functions of their operands alone: they give the same on each trip if their operands are the same.
_PURE = FUNCTIONS | {f"{opcode}-done" for opcode in KINDS} | OPCODES.keys()
_PURE |= frozenset(
    "constant copy-start dynamic-slice fusion tuple get-tuple-element partition-id "
    "replica-id".split()
)
# They may give another value on each trip, or have an effect.
_IMPURE = frozenset(
    "rng rng-get-and-update-state custom-call infeed outfeed send recv send-done recv-done".split()
)


def _find(site: Site) -> Hint | None:
    if not site.in_loop:
        return None
    stays = site.program.remembered(_invariant, site.module, site.computation)
    if site.source not in stays:
        return None
    times = site.runs_of(site.program.loops[site.computation.name].around)
    before, after = site.in_all(site.entry.bytes), site.entry.bytes * times
    if before is not None and before <= after:
        return None
    # A combined collective's round trips stay unless all of its parts leave the loop.
    whole = stays.issuperset(site.instruction.operands)
    if not whole and not site.pays_alone(after):
        return None
    now = f"{site.entry.bytes} B on every trip" if before is None else f"{before} B"
    change = "run it before the loop"
    if site.in_inner_shard_map:
        change += ", in a shard_map of its own, and give the loop's shard_map its result"
    elif not site.in_shard_map:
        moves = site.collective.kind == "all-gather"
        change = KIND.jit if moves else "compute what it makes before the loop"
    advice = (
        f"its operand is the same on every trip of the loop: {change}, and "
        f"{now} become {after} B (the result then stays in memory)"
    )
    return site.hint(KIND.name, advice, bytes_after=after, trips_after=times, together=whole)


def _invariant(module: hlo.Module, body: hlo.Computation) -> set[int]:
    """List the positions in a loop's body whose values are the same on every trip."""
    same: set[int] = set()
    for position, instruction in enumerate(body.instructions):
        computed = (
            instruction.opcode in _PURE
            and all(operand in same for operand in instruction.operands)
            and _pure(module, instruction.calls)
        )
        if computed or unchanged(body, position) is not None:
            same.add(position)
    return same


def _pure(module: hlo.Module, names: Sequence[str]) -> bool:
    """Tell whether what a fusion or a reduction calls depends on its parameters alone."""
    called = walk.reached(
        names, lambda name: [c for i in module.computations[name].instructions for c in i.calls]
    )
    return all(i.opcode not in _IMPURE for c in called for i in module.computations[c].instructions)


KIND = Kind(
    "repeated",
    "a collective in a loop whose operand is the same on every trip",
    "run it before the loop and close over the result",
    "give the array the layout that the loop needs, by jax.lax.with_sharding_constraint before it",
    _find,
)
