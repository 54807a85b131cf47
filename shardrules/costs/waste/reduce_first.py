"""An all-reduce whose result is only summed up on each device: the sum may come first.

What a broadcast or a repeat becomes in the backward pass is a reduce, and what a gather does, a
scatter that adds.
"""

from __future__ import annotations

from shardrules import hlo
from shardrules.costs import walk
from shardrules.costs.waste.shared.program import Hint, Kind, Site, line
from shardrules.costs.waste.shared.values import Value


def _find(site: Site) -> Hint | None:
    entry = site.entry
    if not (site.adds and site.whole and site.is_written):
        return None
    size = _size_after(site)
    if size is None or size >= entry.bytes:
        return None
    change = "reduce before you psum" if site.in_shard_map else KIND.jit
    advice = (
        f"its result is only summed up on each device: {change}, and {entry.bytes} B become "
        f"{size} B{line(site, 'before it is broadcast')}"
    )
    return site.smaller(KIND.name, advice, size)


def _size_after(site: Site) -> int | None:
    """Give the bytes of the sum that is all that is made of the result; None if it isn't."""
    uses = site.program.uses(site.computation, site.position, site.operand, walk.PASS_ON)
    if uses is None or len(uses) != 1:
        return None
    (use,) = uses
    taker, operands = use.instruction, use.instruction.operands
    is_sum = taker.opcode in ("reduce", "scatter") and walk.applied(site.module, taker) == "add"
    if not is_sum or operands.count(use.used) != 1:
        return None
    start, at = (1, 0) if taker.opcode == "reduce" else (0, 2)
    if len(operands) != (2, 3)[at // 2] or operands[at] != use.used:
        return None
    # Places that differ by device would get other shares, and what it starts from would be summed.
    given = [Value(use.outside, o) for o in operands]
    if taker.opcode == "scatter" and not site.program.is_constant(given[1]):
        return None
    return _summed_in(site.taken, taker.shape) if site.program.is_zero(given[start]) else None


def _summed_in(operand: hlo.Shape, result: hlo.Shape) -> int | None:
    """Count the bytes of a result; what was wider before is summed in that type."""
    # XLA of JAX 0.12 wraps an array into a tuple of one.
    array = result.elements[0] if result.elements and len(result.elements) == 1 else result
    if array.elements is not None:
        return None
    return (array.element_count * max(operand.bits, array.bits) + 7) // 8


KIND = Kind(
    "reduce first",
    "an all-reduce whose result each device only sums up, or scatters into fewer places",
    "reduce before the psum, or cast with shardrules.vary before the broadcast",
    "sum over all of these dimensions at once, x.sum((0, 1))",
    _find,
)
