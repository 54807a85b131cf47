"""Where values come from and go to in a module: into and out of fusions and loops."""

from __future__ import annotations

import functools
from typing import NamedTuple

from shardrules import hlo
from shardrules.costs.waste.shared import loop_flow
from shardrules.hlo.proof import loops
from shardrules.hlo.reader.module import Users

__all__ = ["Loop", "Outside", "Use", "Values", "reached"]

# Computations from the outermost in, each with the position of the fusion outside that calls it.
Outside = tuple[tuple[hlo.Computation, int], ...]


class Use(NamedTuple):
    """What takes a value: the computations it stands in, its position, and the operand's."""

    outside: Outside
    user: int
    used: int

    @property
    def instruction(self) -> hlo.Instruction:
        """Give the user."""
        return self.outside[-1][0].instructions[self.user]

    @property
    def before(self) -> hlo.Instruction:
        """Give what it takes."""
        return self.outside[-1][0].instructions[self.used]


class Loop(NamedTuple):
    """A while: its body, the computation and the position it stands at, and its conditions."""

    body: str
    around: str
    position: int
    conditions: tuple[hlo.Computation, ...]


class Values:
    """A module, with the users of its values and the loops that carry them."""

    def __init__(self, module: hlo.Module):
        self.module = module
        self._users: dict[str, Users] = {}

    @functools.cached_property
    def loops(self) -> dict[str, Loop]:
        """List the loops by their bodies' names; a body of two loops is none here."""
        found: dict[str, list[Loop]] = {}
        for computation in self.module.computations.values():
            for position in computation.calling:
                if computation.instructions[position].opcode == "while":
                    condition, body = loops.parts(self.module, computation.instructions[position])
                    loop = Loop(body.name, computation.name, position, (condition,))
                    found.setdefault(body.name, []).append(loop)
        return {name: these[0] for name, these in found.items() if len(these) == 1}

    def users(self, name: str) -> Users:
        """Give a computation's users of each instruction."""
        if name not in self._users:
            self._users[name] = self.module.computations[name].users()
        return self._users[name]

    def is_constant(self, computation: hlo.Computation, position: int) -> bool:
        """Tell whether a value is made of constants alone, or is a buffer that nobody filled."""
        stack, seen = [(computation, position)], 0
        while stack and (seen := seen + 1) < 64:
            where, at = stack.pop()
            one = where.instructions[at]
            if one.opcode == "fusion":
                called = self.module.computations[one.calls[0]]
                stack.append((called, called.root))
            elif (
                one.opcode == "custom-call"
                and '"AllocateBuffer"' not in one.text[one.start : one.end]
            ):
                return False
            elif one.opcode not in loop_flow.FUNCTIONS | {"constant", "parameter", "custom-call"}:
                return False
            elif one.opcode == "parameter" and where is computation:
                return False
            stack += [(where, o) for o in one.operands]
        return not stack

    def uses(
        self,
        computation: hlo.Computation,
        position: int,
        element: int,
        through: frozenset[str],
        in_loops: bool = False,
    ) -> list[Use] | None:
        """List what takes a value, in fusions too, behind instructions that are in ``through``.

        None where it leaves its computation, or there are too many. ``in_loops``: also in loops
        that pass it on unchanged.
        """
        ends: list[Use] = []
        stack: list[tuple[Outside, int, int]] = [(((computation, -1),), position, element)]
        steps = 0
        while stack:
            outside, at, part = stack.pop()
            here = outside[-1][0]
            steps += 1
            if steps > 256:
                return None
            if at == here.root:
                if len(outside) == 1:
                    return None
                stack.append((outside[:-1], outside[-1][1], part))
                continue
            for user in self.users(here.name).taking(at, part):
                one = here.instructions[user]
                if one.opcode == "fusion":
                    inner = self.module.computations[one.calls[0]]
                    for n, i in enumerate(inner.instructions):
                        number = int(i.literal) if i.opcode == "parameter" else -1
                        if 0 <= number < len(one.operands) and one.operands[number] == at:
                            stack.append(((*outside, (inner, user)), n, 0))
                elif one.opcode == "tuple" and user == here.root and len(outside) > 1:
                    back = [k for k, o in enumerate(one.operands) if o == at]
                    stack += [(outside[:-1], outside[-1][1], k) for k in back]
                elif one.opcode == "tuple" and in_loops:
                    entered = self._into_loops(here, user, at)
                    if entered is None:
                        return None
                    stack += [(outside if c is here else ((c, -1),), n, k) for c, n, k in entered]
                elif one.opcode == "dynamic-slice" and at in one.operands[1:]:
                    ends.append(Use(outside, user, at))  # as an index
                elif one.opcode in through or one.opcode == "get-tuple-element":
                    stack.append((outside, user, 0))
                else:
                    ends.append(Use(outside, user, at))
        return ends

    def _into_loops(
        self, here: hlo.Computation, position: int, operand: int
    ) -> list[tuple[hlo.Computation, int, int]] | None:
        """Follow an operand of a tuple into the loops that take it and pass it on unchanged."""
        if position == here.root:  # of a loop's body: passed on, or it isn't the same any more
            loop = self.loops.get(here.name)
            back = [k for k, o in enumerate(here.instructions[position].operands) if o == operand]
            kept = here.instructions[operand]
            same = loop is not None and kept.opcode == "get-tuple-element" and len(back) == 1
            return [] if same and self.before_loop(here, operand) is not None else None
        found = []
        elements = [k for k, o in enumerate(here.instructions[position].operands) if o == operand]
        bodies = {(loop.around, loop.position): loop for loop in self.loops.values()}
        for user in self.users(here.name)[position]:
            loop = bodies.get((here.name, user))
            if loop is None:
                return None
            body = self.module.computations[loop.body]
            for element in elements:
                if any(_takes(c, element) for c in loop.conditions):
                    return None
                taken = [
                    n for n, i in enumerate(body.instructions) if _is_element(body, i, element)
                ]
                if any(self.before_loop(body, n) is None for n in taken):
                    return None
                found += [(body, n, 0) for n in taken] + [(here, user, element)]
        return found

    def made_by(
        self, outside: Outside, position: int, through: frozenset[str]
    ) -> tuple[Outside, int]:
        """Follow a value back to what made it, out of and into fusions."""
        for _ in range(64):
            outside, position = self.origin(outside, position)
            one = outside[-1][0].instructions[position]
            if one.opcode == "fusion" and len(one.calls) == 1:
                called = self.module.computations[one.calls[0]]
                if called.instructions[called.root].opcode == "tuple":
                    break
                outside, position = (*outside, (called, position)), called.root
            elif one.opcode in through and one.operands:
                position = one.operands[0]
            elif one.opcode == "get-tuple-element":
                element = self._element(outside, one, through)
                if element is None:
                    break
                outside, position = element
            else:
                break
        return outside, position

    def _element(
        self, outside: Outside, one: hlo.Instruction, through: frozenset[str]
    ) -> tuple[Outside, int] | None:
        """Give what a tuple, a barrier or a fusion with several results has at an element."""
        here, position = outside[-1][0], one.operands[0]
        maker, index = here.instructions[position], int(one.attribute("index") or -1)
        while maker.opcode in through and "barrier" in maker.opcode:
            maker = here.instructions[maker.operands[0]]
        if maker.opcode == "fusion" and len(maker.calls) == 1:
            called = self.module.computations[maker.calls[0]]
            outside, maker = (*outside, (called, position)), called.instructions[called.root]
        if maker.opcode != "tuple" or not 0 <= index < len(maker.operands):
            return None
        return outside, maker.operands[index]

    def origin(self, outside: Outside, position: int) -> tuple[Outside, int]:
        """Follow a fusion's parameter to what it is given outside."""
        while len(outside) > 1:
            here, caller = outside[-1]
            one = here.instructions[position]
            if one.opcode != "parameter":
                break
            outside = outside[:-1]
            position = outside[-1][0].instructions[caller].operands[int(one.literal)]
        return outside, position

    def before_loop(
        self, computation: hlo.Computation, position: int
    ) -> tuple[hlo.Computation, int] | None:
        """Give what a loop starts from, for what its body takes and passes on unchanged."""
        one, loop = computation.instructions[position], self.loops.get(computation.name)
        taken = computation.instructions[one.operands[0]] if one.operands else one
        if one.opcode != "get-tuple-element" or taken.opcode != "parameter" or loop is None:
            return None
        index = int(one.attribute("index") or -1)
        root = computation.instructions[computation.root]
        around = self.module.computations[loop.around]
        start = around.instructions[around.instructions[loop.position].operands[0]]
        if not (root.opcode == start.opcode == "tuple" and 0 <= index < len(root.operands)):
            return None
        back = computation.instructions[root.operands[index]]
        while back.opcode == "copy":
            back = computation.instructions[back.operands[0]]
        same = back.opcode == one.opcode and back.operands == one.operands
        if not same or back.attribute("index") != one.attribute("index"):
            return None
        return around, start.operands[index]


def _is_element(computation: hlo.Computation, one: hlo.Instruction, element: int) -> bool:
    """Tell whether an instruction takes an element of the computation's parameter."""
    return (
        one.opcode == "get-tuple-element"
        and computation.instructions[one.operands[0]].opcode == "parameter"
        and one.attribute("index") == str(element)
    )


def _takes(computation: hlo.Computation, element: int) -> bool:
    return any(_is_element(computation, one, element) for one in computation.instructions)


def reached(computation: hlo.Computation, users: Users, position: int) -> set[int]:
    """List the positions of an instruction, of what it is made of, and of what is made of it."""
    found = {position}
    for follow in (lambda n: computation.instructions[n].operands, lambda n: users[n]):
        seen, stack = {position}, [position]
        while stack:
            fresh = set(follow(stack.pop())) - seen
            seen |= fresh
            stack += fresh
        found |= seen
    return found
