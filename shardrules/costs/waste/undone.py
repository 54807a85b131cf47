"""Find all-to-alls that undo an earlier all-to-all, so that neither of the two is needed."""

from __future__ import annotations

import re
from typing import Any

import numpy as np

from shardrules import hlo
from shardrules.costs import walk
from shardrules.costs.waste import factors
from shardrules.costs.waste.program import UNARY, Hint, Kind, Program, Site
from shardrules.hlo.reader.flow import Node

_MOST = 2**24  # the most elements to evaluate, over all devices of a group
_MOST_STEPS = 256  # the most steps between the two


def find(site: Site) -> Hint | None:
    if site.collective.kind != "all-to-all" or not site.whole:
        return None
    other = site.program.remembered(_pairs).get(site.node)
    if other is None:
        return None
    what = f"only the all-to-all at {other.where} takes its result, and it sends each element back"
    if other.position < site.position:
        what = (
            "it brings each element back to the device that sent it by the all-to-all at "
            f"{other.where}"
        )
    size = site.entry.bytes
    advice = (
        f"{what}: remove both, and apply the steps between them to the array as it was before; "
        f"{size} B become 0 B"
    )
    return site.hint(advice)


def _pairs(program: Program) -> dict[Node, Site]:
    """Return, for each all-to-all, the one that it undoes, or that undoes it."""
    # Evaluate both all-to-alls and the moves between them, with the sender's number in place of
    # each element. The second undoes the first if every element on a device is this device's own
    # number: then each element is back where it came from.
    pairs = {}
    for site in program.sites:
        if site.collective.kind != "all-to-all" or site.operand or not (site.needed and site.whole):
            continue
        before, count = _before(site), site.collective.group_size
        if before is None or before.collective.notation != site.collective.notation:
            continue
        if count * sum(o.shape.element_count for o in before.node.operands) > _MOST:
            continue
        origins = _origins(site, before, count)
        if origins is None or any((rows != place).any() for place, rows in enumerate(origins)):
            continue
        pairs[site.node] = before
        if _only_for(before.node, site.node):
            pairs[before.node] = site
    return pairs


def _only_for(before: Node, last: Node) -> bool:
    """Return whether all values that depend on the first node go into the second node."""
    makers = walk.reached([last], lambda node: node.operands)
    return walk.reached([before], lambda node: [] if node is last else node.takers) <= makers


def _before(site: Site) -> Site | None:
    """Return the only all-to-all that an all-to-all's operands depend on, or None."""
    stack, seen, exchanges = [*site.node.operands], set(), set()
    while stack:
        node = stack.pop()
        if node in seen:
            continue
        seen.add(node)
        if node.opcode in ("all-to-all", "all-to-all-start"):
            exchanges.add(node)
        elif (node.opcode != "constant" and not node.operands) or len(seen) > _MOST_STEPS:
            return None
        else:
            stack += node.operands
    sites = site.program.parts(exchanges.pop().instruction) if len(exchanges) == 1 else []
    return sites[0] if sites and sites[0].needed else None


def _origins(site: Site, before: Site, count: int) -> list[np.ndarray] | None:
    """Return, for each device of a group, the devices that its elements come from in the end."""
    # The first dimension of each array is the device. A list stands for a tuple, and None for a
    # value that we can't follow.
    values: dict[Node, Any] = {}
    node = before.node
    numbers = np.arange(count, dtype=np.int16)
    shapes = [operand.shape.dimensions for operand in node.operands]
    sent = [np.stack([np.full(shape, number) for number in numbers]) for shape in shapes]
    results = _exchanged(before, sent, count)
    array = node.shape.elements is None or node.opcode.endswith("-start")
    values[node] = results and (results[0] if array and len(results) == 1 else results)

    def value(node: Node) -> Any:
        if node not in values:
            values[node] = _moved(node, [value(operand) for operand in node.operands], count)
        return values[node]

    given = [value(operand) for operand in site.node.operands]
    returned = _exchanged(site, given, count) if all(map(_is_array, given)) else None
    if returned is None:
        return None
    return [np.concatenate([r[device].ravel() for r in returned]) for device in range(count)]


def _is_array(value: Any) -> bool:
    return isinstance(value, np.ndarray)


def _exchanged(site: Site, operands: list[np.ndarray], count: int) -> list[np.ndarray] | None:
    """Return an all-to-all's results on all devices; None for an unknown form."""
    devices = range(count)
    if len(operands) == count:
        return [np.stack([operands[d][k] for d in devices]) for k in devices]
    along = site.collective.dimension
    if len(operands) != 1 or not along.isdecimal():
        return None
    axis, (array,) = int(along), operands
    if array.shape[axis + 1] % count:
        return None
    pieces = [np.split(array[k], count, axis) for k in devices]
    return [np.stack([np.concatenate([pieces[k][d] for k in devices], axis) for d in devices])]


def _moved(node: Node, given: list[Any], count: int) -> Any:
    """Return the value of a node that moves elements, or changes each element alone, or None."""
    opcode = node.opcode
    if opcode == "get-tuple-element":
        return given[0][node.index] if isinstance(given[0], list) else None
    if not given or not all(map(_is_array, given)):
        return None
    if opcode == "concatenate":
        return np.concatenate(given, _dimensions(node)[0] + 1)
    if len(given) != 1:
        return None
    (array,), sizes = given, (count, *node.shape.dimensions)
    if opcode in ("all-to-all-done", "copy", "copy-start", "copy-done") or opcode in UNARY:
        return array if array.shape == sizes else None
    if opcode == "reshape":
        return array.reshape(sizes)
    if opcode == "bitcast":
        return _bitcast(array, node.operands[0].shape, node.shape)
    if opcode == "transpose":
        return array.transpose([0, *(d + 1 for d in _dimensions(node))])
    if opcode == "slice":
        text = node.instruction.attribute("slice") or ""
        cuts = re.findall(r"\[(\d+):(\d+)(?::(\d+))?\]", text)
        return array[(slice(None), *(slice(int(a), int(b), int(c or 1)) for a, b, c in cuts))]
    return None


def _dimensions(node: Node) -> list[int]:
    return [int(d) for d in re.findall(r"\d+", node.instruction.attribute("dimensions") or "0")]


def _bitcast(array: np.ndarray, before: hlo.Shape, after: hlo.Shape) -> np.ndarray | None:
    """Return the array that has the same memory under another layout, or None."""
    if not factors.is_same_memory(before, after):
        return None
    orders = [factors.in_memory(shape) for shape in (before, after)]
    memory = array.transpose([0, *(d + 1 for d in orders[0])])
    placed = memory.reshape([array.shape[0], *(after.dimensions[d] for d in orders[1])])
    return placed.transpose([0, *(orders[1].index(d) + 1 for d in range(len(orders[1])))])


ROWS = {
    "undone": Kind(
        find,
        looks_like=(
            "an all-to-all that brings each element back to the device from which the one before "
            "sent it"
        ),
        in_shard_map="remove both, and apply the steps between them before the first one",
        under_jit="constrain the array to one layout, and drop the constraint between",
    )
}
