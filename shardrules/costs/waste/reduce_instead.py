"""An all-gather whose result is only reduced over the gathered dimension: all-reduce instead."""

from __future__ import annotations

import re

from shardrules import hlo
from shardrules.costs import accounts, walk
from shardrules.costs.waste.shared import parts
from shardrules.costs.waste.shared.program import Hint, Kind, Site
from shardrules.costs.waste.shared.values import Use, Value

_NAMES = {"add": "psum", "maximum": "pmax", "minimum": "pmin"}


def _find(site: Site) -> Hint | None:
    entry, size = site.entry, site.collective.group_size
    along = site.collective.dimension
    if site.collective.kind != "all-gather" or size < 2 or not along.isdecimal():
        return None
    if not site.is_written:
        return None
    result = site.result
    uses = parts.array_uses(site)
    if result is None or not uses or len(uses) != 1:
        return None
    (use,) = uses
    reduce = use.instruction
    if reduce.opcode != "reduce" or len(reduce.operands) != 2 or reduce.operands[0] != use.used:
        return None
    if not _is_result(use.before.shape, result, int(along), size):
        return None
    over = re.findall(r"\d+", reduce.attribute("dimensions") or "")
    operation = walk.applied(site.module, reduce)
    if along not in over or operation not in _NAMES or not _starts_neutral(site, use, operation):
        return None
    after = reduce.shape.bytes
    sent = accounts.wire_bytes("all-reduce", after, size)
    if sent >= entry.wire_bytes:
        return None
    note = " (equal up to rounding)" if operation == "add" else ""
    change = f"reduce on each device and {_NAMES[operation]} that"
    if not site.in_shard_map:
        change = KIND.jit
    advice = (
        f"its result is only reduced over what it gathered: {change}, and a device sends {sent} B "
        f"where it sends {entry.wire_bytes} B{note}"
    )
    return site.smaller(KIND.name, advice, after, sent)


def _is_result(shape: hlo.Shape, result: hlo.Shape, along: int, size: int) -> bool:
    """Tell whether an array is the result, or the result with its shards along one dimension."""
    own = result.dimensions
    split = (*own[:along], size, own[along] // size, *own[along + 1 :])
    return shape.dimensions == own or (shape.dimensions == split and own[along] % size == 0)


def _starts_neutral(site: Site, use: Use, operation: str) -> bool:
    """Tell whether each device may start its reduction from the same value."""
    start = site.program.origin(Value(use.outside, use.instruction.operands[1])).instruction
    # A maximum or a minimum takes the same start any number of times.
    return start.opcode == "constant" and (operation != "add" or walk.is_zero(start))


KIND = Kind(
    "reduce instead",
    "an all-gather whose result is only summed up, or whose maximum or minimum is taken, over what "
    "it gathered",
    "reduce on each device, then psum, pmax or pmin",
    "reduce the sharded array itself, without a constraint that replicates it",
    _find,
)
