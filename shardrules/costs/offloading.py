"""Buffers that a compiled program keeps in host memory: what is stored there, and loaded again."""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

from shardrules import hlo
from shardrules.costs import walk


class Access(NamedTuple):
    """One store to a host buffer, or one load from it.

    Attributes:
      bytes: of one run, on one device.
      runs: how often one execution runs it at most; None where a loop's count isn't known.
      loop_depth: the number of while loops around it.
      source: its source line, or JAX's name for it.
    """

    bytes: int
    runs: int | None
    loop_depth: int
    source: str


@dataclasses.dataclass
class HostBuffer:
    """A buffer in host memory, through all loops that carry it.

    Attributes:
      shape: on one device, as HLO prints it.
      bytes: of the whole buffer, on one device.
      kind: ``temporary``, ``argument`` or ``output``.
      stores, loads: from and to device memory.
    """

    shape: str
    bytes: int
    kind: str
    stores: list[Access] = dataclasses.field(default_factory=list)
    loads: list[Access] = dataclasses.field(default_factory=list)


_Place = tuple[str, int, int]  # of an array: computation, instruction, which leaf of its shape


def read(module: hlo.Module) -> list[HostBuffer]:
    """List a program's buffers in host memory, the largest first; CPU has one memory, and none."""
    places = list(walk.executed(module))
    buffers = _Buffers(module)
    for place in places:
        buffers.add(place.computation, place.position)
    by_place = buffers.by_place()
    for place in places:
        moved = walk.moved(module, place)
        if moved is None:
            continue
        name, instruction = place.computation.name, place.instruction
        access = Access(moved.bytes, place.runs, place.loop_depth, walk.where(module, place))
        if moved.to_host:
            held = [(name, place.position, n) for n in walk.result_leaves(instruction)]
        else:
            held = [(name, operand, 0) for operand in instruction.operands]
        for buffer in {id(b): b for array in held if (b := by_place.get(array))}.values():
            (buffer.stores if moved.to_host else buffer.loads).append(access)
    return sorted({id(b): b for b in by_place.values()}.values(), key=lambda b: -b.bytes)


class _Buffers:
    """Which places hold the same buffer in host memory."""

    def __init__(self, module: hlo.Module):
        self._module = module
        self._parent: dict[_Place, _Place] = {}

    def by_place(self) -> dict[_Place, HostBuffer]:
        """Give the buffer of each place."""
        buffers: dict[_Place, HostBuffer] = {}
        entry = self._module.entry
        for name, position, leaf in list(self._parent):
            place = (name, position, leaf)
            instruction = self._module.computations[name].instructions[position]
            shape = instruction.shape.leaves()[leaf]
            buffer = buffers.setdefault(
                self._root(place), HostBuffer(str(shape), shape.bytes, "temporary")
            )
            buffers[place] = buffer
            if name == entry.name and instruction.opcode == "parameter":
                buffer.kind = "argument"
            elif name == entry.name and position == entry.root and buffer.kind == "temporary":
                buffer.kind = "output"
        return buffers

    def add(self, computation: hlo.Computation, position: int) -> None:
        """Add the buffers of one instruction, and join them with those that it passes on."""
        instruction = computation.instructions[position]
        name, opcode, operands = computation.name, instruction.opcode, instruction.operands
        here = (name, position)
        for leaf in walk.result_leaves(instruction):
            if walk.host_buffer(instruction.shape.leaves()[leaf]):
                self._root((*here, leaf))
        if opcode == "tuple":
            first = 0
            for operand in operands:
                self._same((name, operand), here, second_first=first)
                first += len(self._leaves(name, operand))
        elif opcode == "get-tuple-element":
            elements = computation.instructions[operands[0]].shape.elements or ()
            before = elements[: int(instruction.attribute("index") or 0)]
            self._same(here, (name, operands[0]), second_first=sum(len(e.leaves()) for e in before))
        elif opcode in ("while", "call", "conditional"):
            if opcode == "while":
                self._same(here, (name, operands[0]))
            for number, callee in enumerate(instruction.calls):
                called = self._module.computations[callee]
                given = operands[1 + number :][:1] if opcode == "conditional" else operands
                for parameter, operand in zip(called.parameters, given):
                    inside = called.instructions.index(parameter)
                    self._same((name, operand), (callee, inside))
                if called.instructions[called.root].shape == instruction.shape:
                    self._same(here, (callee, called.root))
        elif opcode.endswith("-done"):
            started = computation.instructions[operands[0]]
            self._same(here, (name, operands[0]), second_first=walk.result_leaves(started).start)
        elif operands and (
            opcode in ("copy", "bitcast")
            or walk.written(self._module, computation, instruction) is not None
        ):
            first = walk.result_leaves(instruction).start
            self._same((name, operands[0]), here, second_first=first)

    def _leaves(self, name: str, position: int) -> list[hlo.Shape]:
        return self._module.computations[name].instructions[position].shape.leaves()

    def _same(self, first: tuple[str, int], second: tuple[str, int], second_first: int = 0) -> None:
        """Join all leaves of one value with those of another from ``second_first`` on."""
        theirs = self._leaves(*second)[second_first:]
        for leaf, (mine, other) in enumerate(zip(self._leaves(*first), theirs)):
            if walk.host_buffer(mine) and walk.host_buffer(other):
                root = self._root((*first, leaf))
                self._parent[root] = self._root((*second, second_first + leaf))

    def _root(self, place: _Place) -> _Place:
        while self._parent.setdefault(place, place) != place:
            # Point to the grandparent on the way: chains stay short.
            self._parent[place] = place = self._parent[self._parent[place]]
        return place
