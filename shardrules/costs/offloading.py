"""Find the buffers that a compiled program keeps in host memory, with their stores and loads."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable
from typing import NamedTuple

from shardrules import hlo
from shardrules.costs import walk


class Access(NamedTuple):
    """One store to a host buffer, or one load from it."""

    bytes: int  # in one run, on one device
    # The most runs in one execution; None if a loop's count isn't known.
    runs: int | None
    loop_depth: int  # the number of while loops around it
    source: str  # its source line, or JAX's name for it


@dataclasses.dataclass
class HostBuffer:
    """A buffer in host memory, followed through all loops that carry it."""

    shape: str  # on one device, as HLO prints it
    bytes: int  # of the whole buffer, on one device
    kind: str  # ``temporary``, ``argument`` or ``output``
    # stores, loads: from and to device memory
    stores: list[Access] = dataclasses.field(default_factory=list)
    loads: list[Access] = dataclasses.field(default_factory=list)


_Array = tuple[str, int, int]  # computation, position of the instruction, leaf of its shape


def read(module: hlo.Module) -> list[HostBuffer]:
    """Return a program's buffers in host memory, largest first; none on CPU."""
    if walk.HOST_SPACE not in module.text:
        return []
    # First join the arrays that are one buffer, through all loops and calls that carry it. Then
    # give each move between host and device memory to its buffer, as a store or a load.
    places = list(walk.executed(module))
    buffers = _Buffers(module)
    for place in places:
        buffers.add(place.computation, place.instruction, buffers.leaves(*place[:2]))
    of_array = buffers.of_array()
    for place in places:
        moved = walk.moved(module, place)
        if moved is None:
            continue
        access = Access(moved.bytes, place.runs, place.loop_depth, walk.where(module, place))
        held = [(place.computation.name, operand, 0) for operand in place.instruction.operands]
        if moved.to_host:
            leaves = buffers.leaves(*place[:2])
            held = [leaves[n] for n in walk.result_leaves(place.instruction)]
        for buffer in {id(b): b for array in held if (b := of_array.get(array))}.values():
            (buffer.stores if moved.to_host else buffer.loads).append(access)
    return sorted({id(b): b for b in of_array.values()}.values(), key=lambda b: -b.bytes)


class _Buffers:
    """Finds the arrays that are one buffer in host memory, with a union-find structure."""

    def __init__(self, module: hlo.Module):
        self._module = module
        self._parent: dict[_Array, _Array] = {}

    def leaves(self, computation: hlo.Computation, position: int) -> list[_Array]:
        """Return the arrays of an instruction's shape."""
        count = len(computation.instructions[position].shape.leaves())
        return [(computation.name, position, leaf) for leaf in range(count)]

    def _shape(self, array: _Array) -> hlo.Shape:
        return self._module.computations[array[0]].instructions[array[1]].shape.leaves()[array[2]]

    def of_array(self) -> dict[_Array, HostBuffer]:
        """Return the buffer of each array."""
        buffers: dict[_Array, HostBuffer] = {}
        entry = self._module.entry
        for array in list(self._parent):
            shape, (name, position, _) = self._shape(array), array
            new = HostBuffer(str(shape), shape.bytes, "temporary")
            buffers[array] = buffer = buffers.setdefault(self._root(array), new)
            if name == entry.name and entry.instructions[position].opcode == "parameter":
                buffer.kind = "argument"
            elif name == entry.name and position == entry.root and buffer.kind == "temporary":
                buffer.kind = "output"
        return buffers

    def add(
        self, computation: hlo.Computation, instruction: hlo.Instruction, here: list[_Array]
    ) -> None:
        """Add an instruction's buffers; join the ones that it passes on with its operands'."""
        # A tuple and its elements, a loop's or call's operands, parameters and results, the result
        # of a start, and an update in place all have the buffers of their operands.
        opcode = instruction.opcode
        given = [self.leaves(computation, operand) for operand in instruction.operands]
        result = [here[n] for n in walk.result_leaves(instruction)]
        self._join(result, result)
        if opcode == "tuple":
            self._join(itertools.chain(*given), here)
        elif opcode == "get-tuple-element":
            elements = computation.instructions[instruction.operands[0]].shape.elements or ()
            before = elements[: int(instruction.attribute("index") or 0)]
            self._join(here, given[0][sum(len(e.leaves()) for e in before) :])
        elif opcode in ("while", "call", "conditional"):
            if opcode == "while":
                self._join(here, given[0])
            for number, callee in enumerate(instruction.calls):
                called = self._module.computations[callee]
                taken = given[1 + number :][:1] if opcode == "conditional" else given
                for parameter, position in walk.parameters(called).items():
                    if parameter < len(taken):
                        self._join(taken[parameter], self.leaves(called, position))
                if called.instructions[called.root].shape == instruction.shape:
                    self._join(here, self.leaves(called, called.root))
        elif opcode.endswith("-done"):
            started = computation.instructions[instruction.operands[0]]
            self._join(here, given[0][walk.result_leaves(started).start :])
        elif given and (
            opcode in ("copy", "bitcast")
            or walk.written(self._module, computation, instruction) is not None
        ):
            self._join(given[0], result)

    def _join(self, first: Iterable[_Array], second: Iterable[_Array]) -> None:
        """Join the arrays of two lists pair by pair, if both are in host memory."""
        for mine, other in zip(first, second):
            if all(walk.host_buffer(self._shape(array)) for array in (mine, other)):
                self._parent[self._root(mine)] = self._root(other)

    def _root(self, array: _Array) -> _Array:
        """Return the array that represents all arrays of one buffer."""
        while self._parent.setdefault(array, array) != array:
            # Point each array to its grandparent on the way, so that chains stay short.
            self._parent[array] = array = self._parent[self._parent[array]]
        return array
