"""What becomes of an all-reduce's sum: reduced, scattered or added to another one.

A psum is linear: what is made of its result by linear operations, the same on every device, may as
well be made of its operand.
"""

from __future__ import annotations

import re

from shardrules import hlo
from shardrules.costs import walk
from shardrules.hlo.reader.module import Users

__all__ = ["LINEAR", "PASS_ON", "added_to_another", "adds", "followed", "reduced_after", "scales"]

PASS_ON = frozenset(
    "bitcast reshape transpose copy convert get-tuple-element all-reduce-done "
    "copy-start copy-done".split()
)

# Of these a sum of results is the result of the sum.
LINEAR = frozenset("bitcast reshape copy get-tuple-element all-reduce-done".split())

# Computations, each with the fusion that calls it, innermost last.
_Callers = list[tuple[hlo.Computation, hlo.Instruction | None]]

_MOVES = LINEAR | {"transpose"}
_FLOATS = re.compile(r"(bf|f|c)\d")
_CONSTANT = frozenset(
    "constant iota broadcast reshape bitcast copy convert add subtract multiply compare select "
    "clamp concatenate slice transpose maximum minimum and or".split()
)


def _moves(computation: hlo.Computation, position: int, moving: frozenset[str]) -> bool:
    """Tell whether an instruction is of these, and keeps numbers what they are.

    A bitcast to another element type takes their bits for other numbers.
    """
    one = computation.instructions[position]
    if one.opcode == "bitcast" and one.operands:
        before = computation.instructions[one.operands[0]].shape
        return before.element_type == one.shape.element_type
    return one.opcode in moving


def followed(
    computation: hlo.Computation, users: Users, position: int, element: int, through: frozenset[str]
) -> tuple[int, int] | None:
    """Follow a value to the one use that isn't in ``through``: the user and what it uses.

    None where it is used twice, or is the root.
    """
    for _ in range(64):
        following = users.taking(position, element)
        if position == computation.root or len(following) != 1:
            return None
        following_one = computation.instructions[following[0]]
        rounds = following_one.opcode == "convert" and not _FLOATS.match(str(following_one.shape))
        if not _moves(computation, following[0], through) or rounds:
            return following[0], position
        position = following[0]
    return None


def reduced_after(
    module: hlo.Module, computation: hlo.Computation, users: Users, position: int, element: int
) -> int | None:
    """Give the bytes of a sum that is all that is made of an all-reduce's result, else None.

    What a broadcast or a repeat becomes in the backward pass is a reduce, and what a gather does, a
    scatter that adds; one at places that are constant, since those may not differ by device.
    """
    callers: _Callers = [(computation, None)]
    shape = computation.instructions[position].shape
    parts = shape.elements or ()
    size = parts[element] if element < len(parts) else shape
    for _ in range(64):
        end = followed(computation, users, position, element, PASS_ON)
        if end is None:
            return None
        user, position = end
        instruction = computation.instructions[user]
        if instruction.opcode == "fusion" and instruction.operands.count(position) == 1:
            number = instruction.operands.index(position)
            computation = module.computations[instruction.calls[0]]
            callers.append((computation, instruction))
            users = computation.users()
            inside = walk.parameters(computation).get(number)
            if inside is None:
                return None
            position = inside
        elif (
            instruction.opcode == "reduce"
            and instruction.operands[0] == position
            and (len(instruction.operands) == 2 and walk.applied(module, instruction) == "add")
            # What it starts from would be summed as well, once for each device.
            and _zero(module, callers, instruction.operands[1])
        ):
            return _summed_in(size, instruction.shape)
        elif (
            instruction.opcode == "scatter"
            and len(instruction.operands) == 3
            and instruction.operands[2] == position
            and position not in instruction.operands[:2]
            and walk.applied(module, instruction) == "add"
            and _constant(module, callers, instruction.operands[1])
            and _zero(module, callers, instruction.operands[0])
        ):
            return _summed_in(size, instruction.shape)
        else:
            return None
    return None


def _summed_in(operand: hlo.Shape, result: hlo.Shape) -> int | None:
    """Count the bytes of a result; what was wider before is summed in that type."""
    arrays = []
    for shape in (operand, result):
        # XLA of JAX 0.12 wraps an array into a tuple of one.
        array = shape.elements[0] if shape.elements and len(shape.elements) == 1 else shape
        if array.elements is not None:
            return None
        arrays.append(array)
    return (arrays[1].element_count * max(array.bits for array in arrays) + 7) // 8


def _constant(module: hlo.Module, callers: _Callers, position: int) -> bool:
    """Tell whether a value is made of constants alone, in fusions too.

    Args:
      module: the module.
      callers: its computation, and what called that, innermost last.
      position: the value's.
    """
    computation, fusion = callers[-1]
    queue = [position]
    seen = set(queue)
    while queue:
        instruction = computation.instructions[queue.pop()]
        if instruction.opcode == "parameter":
            if fusion is None:
                return False
            if not _constant(module, callers[:-1], fusion.operands[int(instruction.literal)]):
                return False
            continue
        if instruction.opcode == "fusion":
            inner = module.computations[instruction.calls[0]].instructions
            if any(i.opcode not in _CONSTANT | {"parameter"} for i in inner):
                return False
        elif instruction.opcode not in _CONSTANT:
            return False
        new = set(instruction.operands) - seen
        seen |= new
        queue += new
        if len(seen) > 64:
            return False
    return True


def _zero(module: hlo.Module, callers: _Callers, position: int) -> bool:
    """Tell whether a value is zero in all of its elements, in fusions too; as ``_constant``."""
    for _ in range(64):
        computation, fusion = callers[-1]
        instruction = computation.instructions[position]
        if instruction.opcode == "constant":
            return walk.is_zero(instruction)
        if instruction.opcode == "parameter" and fusion is not None:
            callers = callers[:-1]
            position = fusion.operands[int(instruction.literal)]
        elif instruction.opcode == "fusion":
            inner = module.computations[instruction.calls[0]]
            callers = [*callers, (inner, instruction)]
            position = inner.root
        elif instruction.opcode in _MOVES | {"broadcast", "convert"}:
            position = instruction.operands[0]
        else:
            return False
    return False


def adds(module: hlo.Module, computation: hlo.Computation, position: int, used: int) -> int | None:
    """Return what an instruction adds to one of its operands, scaled or not; None if it doesn't.

    Args:
      module: the module.
      computation: where it stands.
      position: the instruction's.
      used: the operand's.
    """
    instruction = computation.instructions[position]
    if len(instruction.operands) != 2 or len(set(instruction.operands)) != 2:
        return None
    (other,) = set(instruction.operands) - {used}
    if instruction.opcode == "add":
        return other
    if instruction.opcode != "fusion" or len(instruction.calls) != 1:
        return None
    inner = module.computations[instruction.calls[0]]
    position = inner.root
    while _moves(inner, position, LINEAR):
        position = inner.instructions[position].operands[0]
    root = inner.instructions[position]
    if root.opcode != "add" or len(set(root.operands)) != 2:
        return None
    numbers = walk.parameters(inner)
    callers: _Callers = [(computation, None), (inner, instruction)]
    mine, its = (numbers[instruction.operands.index(one)] for one in (used, other))
    for one, rest in (root.operands, root.operands[::-1]):
        while _moves(inner, rest, LINEAR):
            rest = inner.instructions[rest].operands[0]
        while (before := _unscaled(module, callers, one)) is not None:
            one = before
        if (one, rest) == (mine, its):
            return other
    return None


def scales(module: hlo.Module, computation: hlo.Computation, position: int, used: int) -> bool:
    """Tell whether an instruction only multiplies an operand by constants; as ``adds``."""
    instruction = computation.instructions[position]
    callers: _Callers = [(computation, None)]
    if instruction.opcode != "fusion":
        return _unscaled(module, callers, position) == used
    if instruction.operands.count(used) != 1 or len(instruction.calls) != 1:
        return False
    inner = module.computations[instruction.calls[0]]
    callers.append((inner, instruction))
    position = inner.root
    while (before := _unscaled(module, callers, position)) is not None:
        position = before
    one = inner.instructions[position]
    return one.opcode == "parameter" and instruction.operands[int(one.literal)] == used


def _unscaled(module: hlo.Module, callers: _Callers, position: int) -> int | None:
    """Return the operand that an instruction moves or multiplies by a constant, a pmean's part."""
    one = callers[-1][0].instructions[position]
    if _moves(callers[-1][0], position, LINEAR):
        return one.operands[0]
    if one.opcode not in ("multiply", "divide") or not _FLOATS.match(str(one.shape)):
        return None
    first, second = one.operands
    if _constant(module, callers, second):
        return first
    return second if one.opcode == "multiply" and _constant(module, callers, first) else None


def added_to_another(
    module: hlo.Module, computation: hlo.Computation, users: Users, position: int, element: int
) -> bool:
    """Tell whether an all-reduce's result is only added to one that stands before it.

    Both add up over the same groups, and each is used there alone.
    """
    end = followed(computation, users, position, element, _MOVES)
    other = None if end is None else _other_side(module, computation, *end)
    number = 0
    while other is not None and len(users[other]) == 1:
        one = computation.instructions[other]
        if one.opcode == "get-tuple-element":
            index = one.attribute("index") or ""
            number = int(index) if index.isdecimal() else -1
        if not _moves(computation, other, _MOVES):
            break
        other = one.operands[0]
        if one.opcode == "get-tuple-element":
            break
    if end is None or other is None:
        return False
    if computation.instructions[other].opcode == "all-reduce-done":
        other = computation.instructions[other].operands[0]
    one, this = computation.instructions[other], computation.instructions[position]
    if (
        one.opcode not in ("all-reduce", "all-reduce-start")
        or (other, number) >= (position, element)
        or not 0 <= number < len(one.operands)
    ):
        return False
    alone = followed(computation, users, other, number, _MOVES)
    shapes = [
        computation.instructions[i.operands[n]].shape for i, n in ((one, number), (this, element))
    ]
    return (
        alone is not None
        and alone[0] == end[0]
        and alone[1] != end[1]
        and _other_side(module, computation, *alone) == end[1]
        and _adds_over(module, one) == _adds_over(module, this) is not None
        and shapes[0].element_type == shapes[1].element_type
        and shapes[0].element_count == shapes[1].element_count
    )


def _other_side(
    module: hlo.Module, computation: hlo.Computation, position: int, used: int
) -> int | None:
    """Return what an addition adds to one of its operands, one in a fusion too; else None."""
    instruction = computation.instructions[position]
    if instruction.opcode == "add" and len(set(instruction.operands)) == 2:
        (other,) = set(instruction.operands) - {used}
        return other
    if instruction.opcode != "fusion" or instruction.operands.count(used) != 1:
        return None
    inner = module.computations[instruction.calls[0]]
    users = inner.users()
    numbers = walk.parameters(inner)
    mine = numbers[instruction.operands.index(used)]
    end = followed(inner, users, mine, 0, _MOVES)
    if end is None or inner.instructions[end[0]].opcode != "add":
        return None
    side = _other_side(module, inner, *end)
    while side is not None and len(users[side]) == 1:
        one = inner.instructions[side]
        if one.opcode == "parameter":
            outer = instruction.operands[int(one.literal)]
            return outer if instruction.operands.count(outer) == 1 else None
        if not _moves(inner, side, _MOVES):
            return None
        (side,) = one.operands
    return None


def _adds_over(module: hlo.Module, instruction: hlo.Instruction) -> tuple[str | None, ...] | None:
    """Return what tells over which devices an all-reduce adds up; None where it does not add."""
    if walk.applied(module, instruction) != "add":
        return None
    keys = ("replica_groups", "use_global_device_ids")
    channel = instruction.attribute("channel_id") is not None
    return (*map(instruction.attribute, keys), str(channel))
