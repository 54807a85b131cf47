"""An all-to-all that brings back what the one before it sent: neither is needed."""

from __future__ import annotations

import re
from typing import Any

import numpy as np

from shardrules import hlo
from shardrules.costs import walk
from shardrules.costs.waste.shared.program import Hint, Kind, Program, Site
from shardrules.costs.waste.shared.values import UNARY

_MOST = 2**24  # elements, of all devices of a group, that are evaluated


def _find(site: Site) -> Hint | None:
    if site.collective.kind != "all-to-all" or not site.whole:
        return None
    other = site.program.remembered(_pairs, site.program).get(
        (site.computation.name, site.position)
    )
    if other is None:
        return None
    if other.position < site.position:
        what = (
            "it brings each element back to the device that sent it by the all-to-all at "
            f"{other.where}"
        )
    else:
        what = f"only the all-to-all at {other.where} takes its result, and sends each element back"
    size = site.entry.bytes
    advice = f"{what}: do what stands between them on the device itself, and {size} B become 0 B"
    return site.without(KIND.name, advice)


def _pairs(program: Program) -> dict[tuple[str, int], Site]:
    """Give for each all-to-all that is undone, or undoes one, the other one."""
    pairs = {}
    for site in program.sites:
        if site.collective.kind != "all-to-all" or site.operand or not (site.needed and site.whole):
            continue
        before, count = _before(site), site.collective.group_size
        if before is None or before.collective.notation != site.collective.notation:
            continue
        operands = [before.computation.instructions[o].shape for o in before.instruction.operands]
        if count * sum(s.element_count for s in operands) > _MOST:
            continue
        origins = _Origins(site, before, count).result()
        if origins is None or any((rows != place).any() for place, rows in enumerate(origins)):
            continue
        pairs[site.computation.name, site.position] = before
        if _only_for(before, site):
            pairs[before.computation.name, before.position] = site
    return pairs


def _only_for(before: Site, site: Site) -> bool:
    """Tell whether all that reads the first one's result is an operand of the second one."""
    here, last = site.computation, site.position
    makers = walk.reached([last], lambda n: here.instructions[n].operands)
    readers = walk.reached([before.position], lambda n: [] if n == last else site.users[n])
    return readers <= makers and here.root not in readers - {last}


def _before(site: Site) -> Site | None:
    """Find the one all-to-all from which all operands come."""
    here, stack = site.computation, list(site.instruction.operands)
    seen: set[int] = set()
    exchanges = set()
    while stack:
        position = stack.pop()
        if position in seen:
            continue
        seen.add(position)
        maker = here.instructions[position]
        if maker.opcode in ("all-to-all", "all-to-all-start"):
            exchanges.add(position)
        elif (maker.opcode != "constant" and not maker.operands) or len(seen) > 64:
            return None
        else:
            stack += maker.operands
    if len(exchanges) != 1:
        return None
    sites = site.program.parts(here.name, exchanges.pop())
    return sites[0] if sites and sites[0].needed else None


class _Origins:
    """The device of a group from which each element comes, on each of its devices."""

    def __init__(self, site: Site, before: Site, count: int):
        self.site = site
        self.before = before
        self.count = count

    def result(self) -> list[np.ndarray] | None:
        """Give, for each device, the devices from which the second one's elements come."""
        here = self.site.computation
        values: dict[int, Any] = {}
        given = [self._value(here, values, o) for o in self.site.instruction.operands]
        if any(not isinstance(v, np.ndarray) for v in given):
            return None
        results = self._exchange(self.site, given)
        if results is None:
            return None
        return [np.concatenate([r[d].ravel() for r in results]) for d in range(self.count)]

    def _exchange(self, site: Site, operands: list[np.ndarray]) -> list[np.ndarray] | None:
        """Apply an all-to-all; arrays have the devices as their first dimension."""
        count = self.count
        if len(operands) == count:
            return [np.stack([operands[d][k] for d in range(count)]) for k in range(count)]
        along = site.collective.dimension
        if len(operands) != 1 or not along.isdecimal():
            return None
        axis, (array,) = int(along), operands
        if array.shape[axis + 1] % count:
            return None
        pieces = [np.split(array[k], count, axis) for k in range(count)]
        return [
            np.stack(
                [np.concatenate([pieces[k][d] for k in range(count)], axis) for d in range(count)]
            )
        ]

    def _value(self, here: hlo.Computation, values: dict[int, Any], position: int) -> Any:
        """Evaluate an instruction: an array, a list for a tuple, None where it isn't followed."""
        if position in values:
            return values[position]
        instruction = here.instructions[position]
        if here is self.before.computation and position == self.before.position:
            shapes = [here.instructions[o].shape.dimensions for o in instruction.operands]
            devices = range(self.count)
            operands = [np.stack([np.full(s, d, np.int16) for d in devices]) for s in shapes]
            results = self._exchange(self.before, operands)
            array = instruction.shape.elements is None or instruction.opcode.endswith("-start")
            value = results and (results[0] if array and len(results) == 1 else results)
        elif instruction.opcode == "parameter":
            value = None
        else:
            given = [self._value(here, values, o) for o in instruction.operands]
            value = self._apply(here, instruction, given)
        values[position] = value
        return value

    def _apply(self, here: hlo.Computation, instruction: hlo.Instruction, given: list[Any]) -> Any:
        opcode = instruction.opcode
        if opcode == "get-tuple-element":
            index = int(instruction.attribute("index") or -1)
            return given[0][index] if isinstance(given[0], list) else None
        if opcode == "fusion" and len(instruction.calls) == 1:
            called = self.site.module.computations[instruction.calls[0]]
            arguments = {n: given[k] for k, n in walk.parameters(called).items()}
            return self._value(called, arguments, called.root)
        if not given or any(not isinstance(v, np.ndarray) for v in given):
            return None
        if opcode == "concatenate":
            return np.concatenate(given, _dimensions(instruction)[0] + 1)
        if len(given) != 1:
            return None
        (array,), sizes = given, (self.count, *instruction.shape.dimensions)
        if opcode in ("all-to-all-done", "copy", "copy-start", "copy-done") or opcode in UNARY:
            return array if array.shape == sizes else None
        if opcode == "reshape":
            return array.reshape(sizes)
        if opcode == "bitcast":
            return _bitcast(
                array, here.instructions[instruction.operands[0]].shape, instruction.shape
            )
        if opcode == "transpose":
            return array.transpose([0, *(d + 1 for d in _dimensions(instruction))])
        if opcode == "slice":
            text = instruction.attribute("slice") or ""
            cuts = re.findall(r"\[(\d+):(\d+)(?::(\d+))?\]", text)
            return array[(slice(None), *(slice(int(a), int(b), int(c or 1)) for a, b, c in cuts))]
        return None


def _dimensions(instruction: hlo.Instruction) -> list[int]:
    return [int(d) for d in re.findall(r"\d+", instruction.attribute("dimensions") or "0")]


def _bitcast(array: np.ndarray, before: hlo.Shape, after: hlo.Shape) -> np.ndarray | None:
    """Read the same memory as another array, by both layouts."""
    orders, lanes = [], []
    for shape in (before, after):
        order, _, tiles = shape.layout.partition(":")
        major = [int(d) for d in order.split(",") if d][::-1]
        rank = len(shape.dimensions)
        if sorted(major) != list(range(rank)):
            return None
        orders.append(major)
        lanes.append((shape.dimensions[major[-1]] if major else 1, tiles))
    if (
        before.element_type != after.element_type
        or lanes[0][0] != lanes[1][0]
        and "T(" in lanes[0][1]
    ):
        return None
    if lanes[0][0] > 128 and lanes[0][1] != lanes[1][1]:  # rows would be in another order
        return None
    memory = array.transpose([0, *(d + 1 for d in orders[0])])
    sizes = [after.dimensions[d] for d in orders[1]]
    placed = memory.reshape([array.shape[0], *sizes])
    return placed.transpose([0, *(orders[1].index(d) + 1 for d in range(len(sizes)))])


KIND = Kind(
    "undone",
    "an all-to-all that brings each element back to the device from which the one before sent it",
    "do what stands between the two before the first, and drop both",
    "constrain the array to one layout, and drop the constraint between",
    _find,
)
