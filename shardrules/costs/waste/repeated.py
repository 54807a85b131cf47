"""A collective in a loop whose operand is the same on every trip: one before the loop does."""

from __future__ import annotations

from collections.abc import Sequence

from shardrules import hlo
from shardrules.costs import sums
from shardrules.costs.waste.shared.program import Hint, Kind, Site

__all__ = ["KIND"]

# Functions of their operands alone: of operands that stay the same they stay the same.
_PURE = sums.PASS_ON | frozenset(
    "constant iota broadcast slice dynamic-slice concatenate pad add subtract multiply divide "
    "negate maximum minimum select compare and or not exponential tanh rsqrt dot fusion tuple "
    "partition-id replica-id all-gather all-gather-start all-gather-done all-reduce "
    "all-reduce-start reduce-scatter collective-permute collective-permute-start "
    "collective-permute-done all-to-all".split()
)
# May give something else on each trip, or do something besides.
_IMPURE = frozenset(
    "rng rng-get-and-update-state custom-call infeed outfeed send recv send-done recv-done".split()
)


def _find(site: Site) -> Hint | None:
    if not site.in_loop:
        return None
    stays = site.program.remembered(_invariant, site.module, site.computation)
    if site.source not in stays:
        return None
    change = "its operand is the same on every trip of the loop: run it before the loop"
    return site.once(KIND.name, change, "the result then stays in memory")


def _invariant(module: hlo.Module, body: hlo.Computation) -> set[int]:
    """List the positions in a loop's body whose values are the same on every trip."""
    root = body.instructions[body.root]
    if root.opcode != "tuple":
        return set()

    def passed_on(position: int) -> int:
        while body.instructions[position].opcode == "copy":
            position = body.instructions[position].operands[0]
        return position

    found: set[int] = set()
    for position, instruction in enumerate(body.instructions):
        operands = instruction.operands
        if (
            instruction.opcode == "get-tuple-element"
            and body.instructions[operands[0]].opcode == "parameter"
        ):
            index = int(instruction.attribute("index") or -1)
            if 0 <= index < len(root.operands):
                back = body.instructions[passed_on(root.operands[index])]
                if (
                    back.opcode == "get-tuple-element"
                    and back.operands == operands
                    and back.attribute("index") == instruction.attribute("index")
                ):
                    found.add(position)
        elif (
            instruction.opcode in _PURE
            and all(o in found for o in operands)
            and _pure(module, instruction.calls)
        ):
            found.add(position)
    return found


def _pure(module: hlo.Module, names: Sequence[str]) -> bool:
    """Tell whether what a fusion or a reduction calls depends on its parameters alone."""
    stack, seen = [*names], {*names}
    while stack:
        for instruction in module.computations[stack.pop()].instructions:
            if instruction.opcode in _IMPURE:
                return False
            fresh = {*instruction.calls} - seen
            seen |= fresh
            stack += fresh
    return True


KIND = Kind(
    "repeated",
    "a collective in a loop whose operand is the same on every trip",
    "run it before the loop and close over the result",
    "constrain the array to the layout that the loop needs before the loop",
    _find,
)
