"""Steps that may make different data equal again, without a proof that they do.

"Not proven equal" is not "different". The report says that an output *differs* only if its value
comes from different data and every step keeps the data different. The following steps may not, so
they end the claim (``State.apart``):

- Collectives, within their groups: a later step may add moved data to data that stayed, as a ring
  of permutes does (``State.moved``). Between groups, sums of different data stay different.
- One boolean, or one number that is clipped or rounded: ``isfinite(loss)`` is true on every device,
  ``minimum(1, c / norm)`` is 1 on most. In an array of them some elements will differ.
- any, all, max and min of integers and booleans: most shards have the same largest label.
- Operations that cancel: ``x - x``, ``x / x``, ``x == x``, and a product with zero.
- Updates: slices may overwrite a whole buffer.
- Choices: one of two values is apart only where both are. Of the values that ``axis_index``
  chooses between, two with the same state may be one value.
- Steps with several results whose operands vary over different axes (sort, argmax, a kernel with a
  rule): the text does not say which result depends on which operand.
- Loops of unknown length that devices may leave at different iterations. If all devices leave
  together, the loop counts as run, and its body keeps different data different.
- Random numbers and infeeds that each device draws for itself, and opaque calls.

Float arithmetic, sums, max of floats, sort, gather and select of arrays keep data different. If a
program relies on them giving equal results by chance, it needs an allowance.
"""

from __future__ import annotations

import re

from shardrules.hlo.reader import module as hm

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
    instruction = hm.behind(computation, position, _MOVES)
    return instruction.opcode == "constant" and bool(_ZEROS.fullmatch(instruction.literal))
