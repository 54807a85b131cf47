"""Which part of a collective's result each device reads, at an index made of its number."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from shardrules import hlo
from shardrules.costs.waste.shared.program import Program, Site
from shardrules.costs.waste.shared.values import UNARY, Use, Value
from shardrules.hlo.known import exact
from shardrules.hlo.known.ranges import Exact

_DONE = frozenset("get-tuple-element all-reduce-done all-gather-done".split())
_COPIES = _DONE | frozenset("copy copy-start copy-done optimization-barrier opt-barrier".split())


def array_uses(site: Site) -> list[Use] | None:
    """List what takes a result as it is, or the same memory as another array.

    Of an all-gather's result also what takes a function of each of its elements: that of a shard
    is a shard of that.
    """
    # Copies keep the array and bitcasts keep the memory; both together could transpose it.
    where = (site.computation, site.position, site.operand)
    each = UNARY if site.collective.kind == "all-gather" else frozenset()
    uses = site.program.uses(*where, _COPIES | each)
    if uses and all(use.instruction.opcode != "bitcast" for use in uses):
        return uses
    uses = site.program.uses(*where, _DONE | {"bitcast"})
    order = None if site.result is None else _order(site.result)
    if not uses or order is None or any(_order(use.before.shape) is None for use in uses):
        return None
    return uses


def _order(shape: hlo.Shape) -> str | None:
    """Give the order of dimensions in memory, if it is the default one."""
    order = shape.layout.partition(":")[0]
    default = ",".join(str(d) for d in reversed(range(len(shape.dimensions))))
    return order if order == default else None


class Part(NamedTuple):
    """The only part of a result that each device reads.

    Attributes:
      dimension: along which it is sliced; the others are read whole.
      size: of the slice.
      starts: where each device's slice begins.
    """

    dimension: int
    size: int
    starts: tuple[int, ...]

    def follows(self, groups: Sequence[Sequence[int]]) -> bool:
        """Tell whether each device's slice is at its own place in its group."""
        return all(
            self.starts[device] == place * self.size
            for group in groups
            for place, device in enumerate(group)
        )


def read(site: Site) -> Part | None:
    """Give the one part of a result that each device reads; None if it reads several, or all."""
    result = site.result
    if result is None:
        return None
    parts = {_part(site.program, use, result.dimensions) for use in array_uses(site) or ()}
    return parts.pop() if len(parts) == 1 else None


def _part(program: Program, use: Use, sizes: tuple[int, ...]) -> Part | None:
    taker = use.instruction
    if taker.opcode != "dynamic-slice" or taker.operands[0] != use.used:
        return None
    if use.before.shape.dimensions != sizes or use.used in taker.operands[1:]:
        return None
    cut = [d for d, size in enumerate(taker.shape.dimensions) if size != sizes[d]]
    if len(cut) != 1:
        return None
    (dimension,) = cut
    size = taker.shape.dimensions[dimension]
    index = _device_rows(program, Value(use.outside, taker.operands[1 + dimension]))
    starts = None if index is None else exact.clamped_index(index, sizes[dimension] - size)
    if starts is None:
        return None
    devices = program.device_count
    return Part(dimension, size, tuple(int(n) for n in np.broadcast_to(starts, (devices,))))


def _device_rows(program: Program, value: Value, depth: int = 0) -> Exact | None:
    """Evaluate an integer for each device, out of fusions and of loops that pass it on."""
    value = program.origin(value)
    computation, instruction = value.computation, value.instruction
    if depth > 64:
        return None
    if instruction.opcode == "constant":
        rows = exact.literal(instruction.literal, instruction.shape)
        return None if rows is None else Exact(0, rows, False)
    if instruction.opcode in ("partition-id", "replica-id"):
        ids = np.arange(program.device_count, dtype=np.uint32)
        partition = instruction.opcode == "partition-id"
        rows = ids % program.partitions if partition else ids // program.partitions
        return Exact(0, rows, False)
    if instruction.opcode == "get-tuple-element":
        before = program.before_loop(computation, value.position)
        return None if before is None else _device_rows(program, before, depth + 1)
    if instruction.opcode == "fusion" and len(instruction.calls) == 1:
        called = program.module.computations[instruction.calls[0]]
        return _device_rows(program, value.inside(called), depth + 1)
    if instruction.opcode not in exact.OPCODES:
        return None
    numbers = range(len(instruction.operands))
    operands = [_device_rows(program, value.operand(n), depth + 1) for n in numbers]
    if not operands or any(o is None for o in operands):
        return None
    shapes = [computation.instructions[o].shape for o in instruction.operands]
    given = [o for o in operands if o is not None]
    result = exact.evaluate(instruction, given, shapes, program.device_count)
    return None if result is None else Exact(0, np.ascontiguousarray(result[0]), result[1])
