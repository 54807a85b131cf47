"""Finds arrays whose pieces are all equal.

A reduce-scatter of such an array gives every member of a group the same piece.
"""

from __future__ import annotations

import math
import re

from shardrules.hlo.known import ranges
from shardrules.hlo.reader import module as hm

_STEPS = 200  # instructions to visit for one array
_PLACEWISE = frozenset(
    "abs add and ceil clamp compare complex convert copy cosine divide exponential "
    "exponential-minus-one floor imag log log-plus-one logistic maximum minimum multiply negate "
    "not or power real remainder rsqrt select sign sine sqrt subtract tan tanh xor".split()
)


class _Finder:
    def __init__(self, module: hm.Module, left: list[int]):
        self.module = module
        self.left = left  # shared with the insides of fusions

    def period(self, computation: hm.Computation, position: int, depth: int) -> int:
        """Give the period of an array's row-major elements, or their count if they don't repeat."""
        instruction = computation.instructions[position]
        shape, opcode = instruction.shape, instruction.opcode
        count = max(1, shape.element_count) if shape.elements is None else 0
        self.left[0] -= 1
        if count <= 1 or self.left[0] < 0 or depth > 20:
            return count
        if instruction.start in self.module.strange:  # it may do anything
            return count
        operands = instruction.operands

        def of(index: int) -> int:
            return self.period(computation, operands[index], depth + 1)

        shapes = [computation.instructions[o].shape for o in operands]
        if any(s.elements is not None or s.dynamic for s in shapes):
            return count
        if opcode == "broadcast" and operands:
            places = ranges.read_ints(instruction.attribute("dimensions"))
            own, rank = of(0), len(shape.dimensions)
            trailing = places == list(range(rank - len(places), rank))
            whole = shape.dimensions[rank - len(places) :] == shapes[0].dimensions
            return own if own == 1 or trailing and whole else count
        if opcode in ("reshape", "bitcast") and operands:
            plain = opcode == "reshape" or ranges.keeps_order(shapes[0], shape)
            return of(0) if plain and shapes[0].element_count == count else count
        # A ring starts to sum each piece at another device, which changes float results.
        summed = opcode == "all-reduce" and re.fullmatch(r"[su]\d+|pred", shape.element_type)
        if (
            (opcode in _PLACEWISE or summed)
            and operands
            and all(s.dimensions in (shape.dimensions, ()) for s in shapes)
        ):
            return math.gcd(count, math.lcm(*[max(1, of(k)) for k in range(len(operands))]))
        if opcode == "fusion" and len(instruction.calls) == 1:
            inner = self.module.computations[instruction.calls[0]]
            return _Inner(self, computation, operands, depth).period(inner, inner.root, depth + 1)
        return count


class _Inner(_Finder):
    """The inside of a fusion, whose parameters are the fusion's operands."""

    def __init__(self, outer: _Finder, computation: hm.Computation, operands, depth: int):
        super().__init__(outer.module, outer.left)
        self._outer = outer
        self._computation = computation
        self._operands = operands
        self._depth = depth

    def period(self, computation: hm.Computation, position: int, depth: int) -> int:
        """Give the period; for a parameter, the period of the fusion's operand."""
        instruction = computation.instructions[position]
        if instruction.opcode == "parameter":
            number = int(instruction.literal)
            if number < len(self._operands):
                return self._outer.period(self._computation, self._operands[number], depth + 1)
        return super().period(computation, position, depth)


def pieces_equal(
    module: hm.Module, computation: hm.Computation, position: int, dimension: int, pieces: int
) -> bool:
    """Tell whether an array's pieces along a dimension are equal for all inputs."""
    shape = computation.instructions[position].shape
    if (
        shape.elements is not None
        or not 0 <= dimension < len(shape.dimensions)
        or pieces < 1
        or (any(d != 1 for d in shape.dimensions[:dimension]))
    ):
        return False
    count = shape.element_count
    if not count or count % pieces:
        return False
    return (count // pieces) % _Finder(module, [_STEPS]).period(computation, position, 0) == 0
