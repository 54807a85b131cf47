"""A module's values as a graph, in which fusions are dissolved and tuples are taken apart."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable
from typing import NamedTuple

from shardrules import hlo
from shardrules.costs import walk
from shardrules.hlo.proof import loops

FLOATS = re.compile(r"(bf|f|c)\d")

BARRIERS = frozenset(["optimization-barrier", "opt-barrier"])
# What brings all elements elsewhere; and what moves or repeats some of them.
WHOLE = frozenset("bitcast reshape copy transpose copy-start copy-done".split())
MOVES = WHOLE | BARRIERS | {"slice", "reverse", "broadcast", "all-reduce-done", "all-gather-done"}
UNARY = frozenset(
    "abs cbrt ceil convert cosine erf exponential exponential-minus-one floor imag is-finite log "
    "log-plus-one logistic negate not real reduce-precision round-nearest-afz round-nearest-even "
    "rsqrt sign sine sqrt tan tanh".split()
)
FUNCTIONS = frozenset(
    "add and atan2 clamp compare complex divide maximum minimum multiply or power remainder select "
    "subtract xor iota concatenate pad reduce dot".split()
).union(UNARY, MOVES)
_MOST = 256  # steps on the way of one value
_DEPTH = 4  # of fusions in fusions: those deeper stay, as each may hold the same one twice


class Node:
    """What one instruction makes."""

    __slots__ = tuple("elements fused home index instruction opcode operands shape users".split())

    def __init__(
        self,
        home: hlo.Computation,
        instruction: hlo.Instruction,
        operands: list[Node],
        fused: bool = False,
        opcode: str = "",
    ):
        self.home = home  # the computation that runs it, outside of all fusions
        self.instruction = instruction
        self.opcode = opcode or instruction.opcode  # ``return`` for what takes a computation's root
        self.shape = instruction.shape
        self.fused = fused  # a fusion holds it
        self.operands = operands  # of a return, the elements of the root's tuple
        self.users: list[Node] = []  # what takes it, each once; of a tuple, what takes all of it
        self.elements: dict[int, Node] = {}  # what takes one element of a tuple, by its number
        self.index = -1  # the number of the element that it takes

    @property
    def takers(self) -> list[Node]:
        return [*self.users, *self.elements.values()]

    def enlist(self) -> None:
        """Make it a user of its operands; a tuple once something takes all of it."""
        for operand in dict.fromkeys(self.operands):
            if operand.opcode == "tuple" and not operand.users:
                operand.enlist()
            operand.users.append(self)


class Use(NamedTuple):
    """A node that takes another one."""

    user: Node
    taken: Node


class Flat:
    """One computation's nodes, operands first."""

    def __init__(self, module: hlo.Module, computation: hlo.Computation):
        self._module = module
        self._home = computation
        self.nodes: list[Node] = []
        # By an instruction's position; of a fusion, what its root makes.
        self.at = self._dissolved(computation, [])
        self.root = root = self.at[computation.root]
        returned = root.operands if root.opcode == "tuple" else [root]
        self.end = self._new(root.instruction, returned, opcode="return")
        for node in self.nodes:
            if node.opcode not in ("tuple", "get-tuple-element"):
                node.enlist()

    @property
    def parameter(self) -> Node:
        return self.at[walk.parameters(self._home)[0]]

    def _new(
        self,
        instruction: hlo.Instruction,
        operands: list[Node],
        fused: bool = False,
        opcode: str = "",
    ) -> Node:
        self.nodes.append(Node(self._home, instruction, operands, fused, opcode))
        return self.nodes[-1]

    def _dissolved(
        self, computation: hlo.Computation, given: list[Node], depth: int = 0
    ) -> list[Node]:
        """List a computation's nodes by position; ``given`` is what its fusion takes."""
        fused = depth > 0
        nodes: list[Node] = []
        for i in computation.instructions:
            operands = [nodes[o] for o in i.operands]
            if fused and i.opcode == "parameter":
                known = int(i.literal) < len(given)
                node = given[int(i.literal)] if known else self._new(i, [], True, "unknown")
            elif i.opcode == "fusion" and len(i.calls) == 1 and depth < _DEPTH:
                called = self._module.computations[i.calls[0]]
                node = self._dissolved(called, operands, depth + 1)[called.root]
            elif i.opcode == "get-tuple-element":
                index = int(i.attribute("index") or -1)
                node = self._element(i, operands[0], index, i.shape, fused)
            elif i.opcode in BARRIERS and operands and operands[0].shape.elements:
                node = self._held(i, operands[0], operands[0].shape.elements, fused)
            else:
                node = self._new(i, operands, fused)
            nodes.append(node)
        return nodes

    def _element(
        self, instruction: hlo.Instruction, whole: Node, index: int, shape: hlo.Shape, fused: bool
    ) -> Node:
        if whole.opcode == "tuple" and 0 <= index < len(whole.operands):
            return whole.operands[index]
        if index not in whole.elements:
            element = self._new(instruction, [whole], fused, "get-tuple-element")
            element.index, element.shape = index, shape
            whole.elements[index] = element
        return whole.elements[index]

    def _held(
        self, barrier: hlo.Instruction, whole: Node, shapes: Iterable[hlo.Shape], fused: bool
    ) -> Node:
        """Hold each element of a tuple by a barrier of its own."""
        held = []
        for index, shape in enumerate(shapes):
            element = self._element(barrier, whole, index, shape, fused)
            held.append(self._new(barrier, [element], fused))
            held[-1].shape = shape
        return self._new(barrier, held, fused, "tuple")


class Graph:
    """A module's computations, each dissolved once, with the loops that carry values."""

    def __init__(self, module: hlo.Module):
        self.module = module
        self.flat = functools.cache(lambda name: Flat(module, module.computations[name]))

    @functools.cached_property
    def loops(self) -> dict[str, Node]:
        """List the loops by their bodies' names, without bodies that two loops share."""
        loops_of: dict[str, list[Node]] = {}
        for name, computation in self.module.computations.items():
            for position, (caller, _) in zip(computation.calling, computation.calls()):
                if caller.opcode != "while":
                    continue
                loop = computation.instructions[position]
                condition, body = loops.parts(self.module, loop)
                if len(condition.parameters) == len(body.parameters) == 1:
                    loops_of.setdefault(body.name, []).append(self.flat(name).at[position])
        return {name: these[0] for name, these in loops_of.items() if len(these) == 1}

    def start(self, loop: Node) -> list[Node]:
        """List what the elements of a loop's carry start from; nothing where that isn't shown."""
        start = loop.operands[0]
        return start.operands if start.opcode == "tuple" else []

    def unchanged(self, node: Node) -> bool:
        """Tell whether a body takes it out of the carry, and each trip passes it on."""
        if node.opcode != "get-tuple-element" or node.operands[0].opcode != "parameter":
            return False
        end = self.flat(node.home.name).end.operands
        return 0 <= node.index < len(end) and made_by(end[node.index], {"copy"}) is node

    def before_loop(self, node: Node) -> Node | None:
        """Give the value before the loop of what its body takes and passes on unchanged."""
        loop = self.loops.get(node.home.name)
        start = self.start(loop) if loop and self.unchanged(node) else []
        return dict(enumerate(start)).get(node.index)

    def uses(
        self, node: Node, element: int, through: frozenset[str], in_loops: bool = False
    ) -> list[Use]:
        """List what takes a value, behind ``through`` too; nothing where there are too many."""
        # ``in_loops`` follows it into the loops that pass it on unchanged as well.
        ends: list[Use] = []
        stack, steps = [(node, element)], 0
        while stack:
            taken, part = stack.pop()
            steps += 1
            if steps > _MOST:
                return []
            if part in taken.elements:
                stack.append((taken.elements[part], 0))
            for user in taken.users:
                if in_loops and user.opcode in ("tuple", "return"):
                    entered = self._into_loops(user, taken)
                    if entered is None:
                        return []
                    stack += entered
                elif user.opcode == "dynamic-slice" and taken in user.operands[1:]:
                    ends.append(Use(user, taken))  # as an index
                elif user.opcode in through and _keeps_numbers(taken, user):
                    stack.append((user, part if user.shape.is_tuple else 0))
                else:
                    ends.append(Use(user, taken))
        return ends

    def _into_loops(self, user: Node, taken: Node) -> list[tuple[Node, int]] | None:
        """Follow an operand of a tuple into the loops that take it and pass it on unchanged."""
        elements = [k for k, operand in enumerate(user.operands) if operand is taken]
        if user.opcode == "return":  # of a loop's body, which may pass it on in its own place
            passed_on = len(elements) == 1 and self.before_loop(taken) is not None
            return [] if passed_on else None
        entered = []
        for taker in user.users:
            if taker not in self.loops.values():
                return None
            read, carry = (self.flat(name).parameter for name in taker.instruction.calls)
            for element in elements:
                inside = carry.elements.get(element)
                if inside is None or self.before_loop(inside) is None:
                    return None
                if carry.users or read.users or element in read.elements:
                    return None
                entered += [(inside, 0), (taker, element)]
        return entered


def made_by(node: Node, through: frozenset[str] | set[str]) -> Node:
    while node.opcode in through and node.operands:
        node = node.operands[0]
    return node


def is_constant(node: Node) -> bool:
    """Tell whether a value is made of constants and unfilled buffers alone."""
    stack, steps = [node], 0
    while stack and (steps := steps + 1) < _MOST:
        maker = stack.pop()
        stack += maker.operands
        if maker.opcode not in FUNCTIONS | {"constant"} and not is_unfilled(maker):
            return False
    return not stack


def is_unfilled(node: Node) -> bool:
    """Tell whether it is a buffer whose content is never read: on TPU a stack starts so."""
    return node.opcode == "custom-call" and walk.target(node.instruction) == "AllocateBuffer"


def is_zero(node: Node) -> bool:
    spread = frozenset("bitcast reshape copy transpose broadcast convert".split())
    maker = made_by(node, spread)
    return maker.opcode == "constant" and walk.is_zero(maker.instruction)


def _keeps_numbers(taken: Node, taker: Node) -> bool:
    """Tell whether a bitcast or a conversion gives the same numbers, rounded at most."""
    if taker.opcode == "bitcast":  # to another element type it takes their bits for other numbers
        return taken.shape.element_type == taker.shape.element_type
    return taker.opcode != "convert" or FLOATS.match(taker.shape.element_type) is not None
