"""Which steps may make data equal again that differ between devices, though nobody can prove it.

"Not proven equal" is not "different". An output is said to *differ* only where its value comes from
different data by steps that keep data different. These don't, and end that claim (``State.apart``):

- collectives within their groups: what a permute or an all-to-all moved may be summed up with what
  stayed, as a ring of permutes does (``State.moved``). Between groups a reduction keeps sums of
  different data different;
- a single yes or no, or a single number that is cut off or rounded: ``isfinite(loss)`` is true on
  every device, ``minimum(1, c / norm)`` is 1 on most. Of an array of them some will differ;
- any, all, max and min of integers and booleans: the largest label is the same in most shards;
- what cancels out: ``x - x``, ``x / x``, ``x == x``, and a product with zero;
- what overwrites: a buffer into which a slice is written may be overwritten wholly;
- what is chosen: one of two values is apart only where both are; of values that are chosen by
  ``axis_index``, two of one state may be one value;
- steps with several results that are made of operands which vary over other axes (sort, argmax, a
  kernel with a rule): which result depends on which operand is not told;
- loops of unknown length that devices may leave at different iterations. One that all leave
  together counts as run: what its body makes of different data differs;
- random numbers and infeeds that each device draws for itself, and what is opaque.

Float arithmetic, sums, max of floats, sort, gather and select of arrays keep data different. By
chance they may give the same; a program that rests on that says so by an allowance.
"""

from __future__ import annotations

import re

from shardrules.hlo.reader import module as hm

__all__ = ["HANDLED", "cancels", "rounds"]

_ROUNDS = frozenset(
    "and ceil clamp compare convert count-leading-zeros floor is-finite maximum minimum or popcnt "
    "remainder round-nearest-afz round-nearest-even shift-right-arithmetic shift-right-logical "
    "sign".split()
)
_SAME = frozenset("compare divide remainder subtract xor".split())
_ZERO = frozenset("and divide multiply power".split())
HANDLED = _ROUNDS | _SAME | _ZERO

_EXTREMES = frozenset("and or maximum minimum".split())
_FLOAT = re.compile(r"b?f\d|c\d")
_MOVES = frozenset("bitcast broadcast convert copy reshape".split())
_ZEROS = re.compile(r"[\s{},]*(?:(?:-?0(?:\.0*)?|false)[\s{},]*)+")


def rounds(reduction: str, shape: hm.Shape) -> bool:
    """Tell whether a reduction picks one of a few values: any, all, max and min of integers."""
    kinds = shape.leaves()
    return reduction in _EXTREMES and not all(_FLOAT.match(s.element_type) for s in kinds)


def cancels(computation: hm.Computation, instruction: hm.Instruction) -> bool:
    """Tell whether an elementwise step may make different data equal."""
    opcode, shape = instruction.opcode, instruction.shape
    operands = instruction.operands
    if opcode in _ROUNDS and shape.elements is None and shape.element_count <= 1:
        return opcode != "convert" or _FLOAT.match(shape.element_type) is None
    if len(operands) != 2:
        return False
    if opcode in _SAME and operands[0] == operands[1]:
        return True
    zeros = [_is_zero(computation, o) for o in operands] if opcode in _ZERO else [False, False]
    return zeros[0] and opcode != "power" or zeros[1] and opcode != "divide"


def _is_zero(computation: hm.Computation, position: int) -> bool:
    instruction = computation.instructions[position]
    while instruction.opcode in _MOVES and instruction.operands:
        instruction = computation.instructions[instruction.operands[0]]
    return instruction.opcode == "constant" and bool(_ZEROS.fullmatch(instruction.literal))
