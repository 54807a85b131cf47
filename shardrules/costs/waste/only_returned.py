"""An all-gather whose result is only returned: its output can stay sharded."""

from __future__ import annotations

from shardrules import hlo
from shardrules.costs.waste.shared.program import Hint, Kind, Site

_THROUGH = frozenset("copy bitcast get-tuple-element all-gather-done".split())


def _find(site: Site) -> Hint | None:
    if site.collective.kind != "all-gather" or not site.computation.is_entry:
        return None
    if not _only_returned(site):
        return None
    over = f" over {','.join(site.entry.axes)}" if site.entry.axes else ""
    change = "with the axis in its out_specs instead of the all_gather"
    if not site.in_shard_map:
        change = "with the axis in its out_shardings"
    advice = (
        f"its result is only returned: leave that output sharded{over}, {change}, and "
        f"{site.entry.bytes} B become 0 B (the array is the same; a device then holds its shard "
        "of it)"
    )
    return site.without(KIND.name, advice)


def _only_returned(site: Site) -> bool:
    """Tell whether ENTRY returns an all-gather's result as it is, and does nothing else with it."""
    # An output that is computed from the whole array needs it, and one of another shape may be
    # sharded as no spec says.
    entry, position, element = site.computation, site.position, site.operand
    if entry.instructions[position].opcode.endswith("-start"):  # its tuple holds operands too
        if len(site.users[position]) != 1:
            return False
        (position,) = site.users[position]
    shapes = {_part(entry.instructions[position].shape, element)}
    for _ in range(64):
        following = site.users.taking(position, element)
        if position == entry.root:
            return not following and len(shapes) == 1 and None not in shapes
        if len(following) != 1:
            return False
        instruction = entry.instructions[following[0]]
        if following[0] == entry.root and instruction.opcode == "tuple":
            once = instruction.operands.count(position) == 1
            return once and len(shapes) == 1 and None not in shapes
        copied = (
            instruction.opcode == "fusion"
            and len(instruction.operands) == 1
            and all(
                i.opcode in ("parameter", "copy", "bitcast")
                for i in site.module.computations[instruction.calls[0]].instructions
            )
        )
        if instruction.opcode not in _THROUGH and not copied:
            return False
        position = following[0]
        shapes.add(_part(instruction.shape, element))
    return False


def _part(shape: hlo.Shape, element: int) -> tuple[int, ...] | None:
    """Give the sizes of one result of a collective; None where there is no array."""
    if shape.elements is None:
        return shape.dimensions
    if element < len(shape.elements) and not shape.elements[element].is_tuple:
        return shape.elements[element].dimensions
    return None


KIND = Kind(
    "only returned",
    "an all-gather whose result the program returns and does not read",
    "leave the output sharded: the axis in its out_specs instead of the all_gather",
    "leave the output sharded: the axis in its out_shardings",
    _find,
)
