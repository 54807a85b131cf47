"""Where values come from and go to in a module: into and out of fusions and loops."""

from __future__ import annotations

import functools
import re
from typing import NamedTuple

from shardrules import hlo
from shardrules.costs import walk
from shardrules.hlo.proof import loops
from shardrules.hlo.reader.module import Users

FLOATS = re.compile(r"(bf|f|c)\d")

MOVES = frozenset(
    "bitcast reshape copy transpose slice reverse broadcast copy-start copy-done all-reduce-done "
    "all-gather-done optimization-barrier opt-barrier".split()
)
UNARY = frozenset(
    "abs cbrt ceil convert cosine erf exponential exponential-minus-one floor imag is-finite log "
    "log-plus-one logistic negate not real reduce-precision round-nearest-afz round-nearest-even "
    "rsqrt sign sine sqrt tan tanh".split()
)
ELEMENTWISE = UNARY | frozenset(
    "add and atan2 clamp compare complex divide maximum minimum multiply or power remainder select "
    "subtract xor".split()
)
FUNCTIONS = ELEMENTWISE | MOVES | frozenset("iota concatenate pad reduce dot".split())

# Computations from the outermost in, each with the position of the fusion outside that calls it.
Outside = tuple[tuple[hlo.Computation, int], ...]


class Value(NamedTuple):
    """A value: the computations it stands in, and its position in the innermost one."""

    outside: Outside
    position: int

    @classmethod
    def at(cls, computation: hlo.Computation, position: int) -> Value:
        """Give a value of a computation, outside of all fusions."""
        return cls(((computation, -1),), position)

    @property
    def computation(self) -> hlo.Computation:
        """Give the innermost computation."""
        return self.outside[-1][0]

    @property
    def instruction(self) -> hlo.Instruction:
        """Give the instruction that makes it."""
        return self.computation.instructions[self.position]

    def operand(self, number: int) -> Value:
        """Give an operand of its instruction."""
        return Value(self.outside, self.instruction.operands[number])

    def inside(self, called: hlo.Computation) -> Value:
        """Give the root of what its fusion calls."""
        return Value((*self.outside, (called, self.position)), called.root)


class Use(NamedTuple):
    """An instruction that takes a value: its computations, its position, and the operand's."""

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
    """A while: its body's name, the computation and position where it stands, its condition."""

    body: str
    around: str
    position: int
    condition: hlo.Computation


class Values:
    """A module, with the users of its values and the loops that carry them."""

    def __init__(self, module: hlo.Module):
        self.module = module
        self._users: dict[str, Users] = {}

    @functools.cached_property
    def loops(self) -> dict[str, Loop]:
        """List the loops by their bodies' names, without bodies that two loops share."""
        loops_of: dict[str, list[Loop]] = {}
        for computation in self.module.computations.values():
            for position in computation.calling:
                if computation.instructions[position].opcode == "while":
                    condition, body = loops.parts(self.module, computation.instructions[position])
                    loop = Loop(body.name, computation.name, position, condition)
                    loops_of.setdefault(body.name, []).append(loop)
        return {name: these[0] for name, these in loops_of.items() if len(these) == 1}

    def users(self, name: str) -> Users:
        """Give a computation's users of each instruction."""
        if name not in self._users:
            self._users[name] = self.module.computations[name].users()
        return self._users[name]

    def is_constant(self, value: Value) -> bool:
        """Tell whether a value is made of constants and unfilled buffers alone."""
        stack, steps = [value], 0
        while stack and (steps := steps + 1) < 64:
            value = self.origin(stack.pop())
            maker = value.instruction
            if maker.opcode == "fusion":
                stack.append(value.inside(self.module.computations[maker.calls[0]]))
                continue
            if maker.opcode == "custom-call":
                if walk.target(maker) != "AllocateBuffer":
                    return False
            elif maker.opcode != "constant" and maker.opcode not in FUNCTIONS:
                return False
            stack += [value.operand(n) for n in range(len(maker.operands))]
        return not stack

    def is_zero(self, value: Value) -> bool:
        """Tell whether a value is zero in all of its elements."""
        spread = frozenset("bitcast reshape copy transpose broadcast convert".split())
        return walk.is_zero(self.made_by(value, spread).instruction)

    def uses(
        self,
        computation: hlo.Computation,
        position: int,
        element: int,
        through: frozenset[str],
        in_loops: bool = False,
    ) -> list[Use] | None:
        """List what takes a value, in fusions and behind ``through`` too; None where it leaves."""
        # ``in_loops`` follows it into the loops that pass it on unchanged as well.
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
                taker = here.instructions[user]
                operands = taker.operands
                if taker.opcode == "fusion":
                    inner = self.module.computations[taker.calls[0]]
                    for number, n in walk.parameters(inner).items():
                        if number < len(operands) and operands[number] == at:
                            stack.append(((*outside, (inner, user)), n, 0))
                elif taker.opcode == "tuple" and user == here.root and len(outside) > 1:
                    back = [k for k, o in enumerate(operands) if o == at]
                    stack += [(outside[:-1], outside[-1][1], k) for k in back]
                elif taker.opcode == "tuple" and in_loops:
                    entered = self._into_loops(here, user, at)
                    if entered is None:
                        return None
                    stack += [(outside if c is here else ((c, -1),), n, k) for c, n, k in entered]
                elif taker.opcode == "dynamic-slice" and at in operands[1:]:
                    ends.append(Use(outside, user, at))  # as an index
                elif taker.opcode == "get-tuple-element":
                    stack.append((outside, user, 0))
                elif taker.opcode in through and _keeps_numbers(here.instructions[at], taker):
                    stack.append((outside, user, part if taker.shape.is_tuple else 0))
                else:
                    ends.append(Use(outside, user, at))
        return ends

    def _into_loops(
        self, here: hlo.Computation, position: int, operand: int
    ) -> list[tuple[hlo.Computation, int, int]] | None:
        """Follow an operand of a tuple into the loops that take it and pass it on unchanged."""
        elements = [k for k, o in enumerate(here.instructions[position].operands) if o == operand]
        if position == here.root:  # of a loop's body, which may pass it on in its own place
            passed_on = len(elements) == 1 and self.before_loop(here, operand) is not None
            return [] if passed_on else None
        entered = []
        bodies = {(loop.around, loop.position): loop for loop in self.loops.values()}
        for user in self.users(here.name)[position]:
            loop = bodies.get((here.name, user))
            if loop is None:
                return None
            body = self.module.computations[loop.body]
            for element in elements:
                taken = _taking(body, element)
                if _taking(loop.condition, element) or any(
                    self.before_loop(body, n) is None for n in taken
                ):
                    return None
                entered += [(body, n, 0) for n in taken] + [(here, user, element)]
        return entered

    def made_by(self, value: Value, through: frozenset[str]) -> Value:
        """Follow a value back to what made it, out of and into fusions."""
        for _ in range(64):
            value = self.origin(value)
            maker = value.instruction
            if maker.opcode == "fusion" and len(maker.calls) == 1:
                called = self.module.computations[maker.calls[0]]
                if called.instructions[called.root].opcode == "tuple":
                    break
                value = value.inside(called)
            elif maker.opcode in through and maker.operands:
                value = value.operand(0)
            elif maker.opcode == "get-tuple-element":
                element = self._element(value, through)
                if element is None:
                    break
                value = element
            else:
                break
        return value

    def _element(self, value: Value, through: frozenset[str]) -> Value | None:
        """Give what a tuple, a barrier or a fusion with several results has at an element."""
        index, maker = int(value.instruction.attribute("index") or -1), value.operand(0)
        while maker.instruction.opcode in through and "barrier" in maker.instruction.opcode:
            maker = maker.operand(0)
        if maker.instruction.opcode == "fusion" and len(maker.instruction.calls) == 1:
            maker = maker.inside(self.module.computations[maker.instruction.calls[0]])
        is_tuple = maker.instruction.opcode == "tuple"
        exists = is_tuple and 0 <= index < len(maker.instruction.operands)
        return maker.operand(index) if exists else None

    def origin(self, value: Value) -> Value:
        """Follow a fusion's parameter to its value outside."""
        while len(value.outside) > 1 and value.instruction.opcode == "parameter":
            fusion = Value(value.outside[:-1], value.outside[-1][1])
            value = fusion.operand(int(value.instruction.literal))
        return value

    def before_loop(self, computation: hlo.Computation, position: int) -> Value | None:
        """Give the value before the loop of what its body takes and passes on unchanged."""
        loop, element = self.loops.get(computation.name), unchanged(computation, position)
        if loop is None or element is None:
            return None
        around = self.module.computations[loop.around]
        start = around.instructions[around.instructions[loop.position].operands[0]]
        return Value.at(around, start.operands[element]) if start.opcode == "tuple" else None


def _keeps_numbers(taken: hlo.Instruction, taker: hlo.Instruction) -> bool:
    """Tell whether a bitcast or a conversion gives the same numbers, rounded at most."""
    if taker.opcode == "bitcast":  # to another element type it takes their bits for other numbers
        return taken.shape.element_type == taker.shape.element_type
    return taker.opcode != "convert" or FLOATS.match(taker.shape.element_type) is not None


def unchanged(body: hlo.Computation, position: int) -> int | None:
    """Give the element of the carry that an instruction takes, if each trip passes it on."""
    element, root = _element_taken(body, position), body.instructions[body.root]
    if element is None or root.opcode != "tuple" or not 0 <= element < len(root.operands):
        return None
    returned = root.operands[element]
    while body.instructions[returned].opcode == "copy":
        (returned,) = body.instructions[returned].operands
    return element if _element_taken(body, returned) == element else None


def _element_taken(computation: hlo.Computation, position: int) -> int | None:
    """Give the element of the computation's parameter that an instruction takes, if it does."""
    instruction = computation.instructions[position]
    if (
        instruction.opcode != "get-tuple-element"
        or computation.instructions[instruction.operands[0]].opcode != "parameter"
    ):
        return None
    return int(instruction.attribute("index") or -1)


def _taking(computation: hlo.Computation, element: int) -> list[int]:
    """List what takes an element of the computation's parameter."""
    positions = range(len(computation.instructions))
    return [n for n in positions if _element_taken(computation, n) == element]
