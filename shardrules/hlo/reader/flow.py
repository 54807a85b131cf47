"""The flow of values through a computation whose fusions are dissolved.

The instructions of a fusion replace it, separately at each call. A loop replaces a call that runs
nothing else. The value that was put into a tuple replaces an element of the tuple. A computation's
flow is computed on demand and cached.
"""

from __future__ import annotations

from collections.abc import Sequence

from shardrules.hlo.reader import module as hm

BARRIERS = frozenset(["optimization-barrier", "opt-barrier"])
_FUSIONS = ("fusion", "fusion-start")  # XLA for GPUs starts some asynchronously
_DEPTH = 4  # levels of nested fusions to dissolve, since the nodes may double with each level


def of(module: hm.Module, name: str) -> Flat:
    """Return the nodes of a computation."""
    if name not in module.flows:
        module.flows[name] = Flat(module, module.computations[name])
    flat: Flat = module.flows[name]
    return flat


def made_by(node: Node, through: frozenset[str] | set[str]) -> Node:
    """Follow first operands through these opcodes; return the first other node."""
    while node.opcode in through and node.operands:
        node = node.operands[0]
    return node


def called_loop(module: hm.Module, call: hm.Instruction) -> hm.Instruction | None:
    """Return the loop if a call runs one loop and nothing else; None otherwise.

    XLA for CPU puts small loops into such calls since JAX 0.12.
    """
    if len(call.calls) != 1:
        return None
    inside = module.computations[call.calls[0]].instructions
    return inside[1] if [i.opcode for i in inside] == ["parameter", "while"] else None


class Node:
    """The value that one instruction makes."""

    __slots__ = tuple("elements fused home index instruction opcode operands shape users".split())

    def __init__(
        self,
        home: hm.Computation,
        instruction: hm.Instruction,
        operands: list[Node],
        fused: bool = False,
        opcode: str = "",
    ):
        self.home = home  # the computation that runs it, outside of all fusions
        self.instruction = instruction
        self.opcode = opcode or instruction.opcode  # ``return`` for the node that takes the root
        self.shape = instruction.shape
        self.fused = fused  # whether its instruction is in a fusion
        self.operands = operands  # for a return, the elements of the root's tuple
        self.users: list[Node] = []  # its users, each once; for a tuple, the users of all of it
        self.elements: dict[int, Node] = {}  # the users of one element of a tuple, by its number
        self.index = -1  # for a get-tuple-element, the element's number

    @property
    def takers(self) -> list[Node]:
        """Return all nodes that take this value or an element of it."""
        return [*self.users, *self.elements.values()]

    def enlist(self) -> None:
        """Add this node to its operands' users.

        A tuple becomes a user of its elements only when some node takes the whole tuple.
        """
        for operand in dict.fromkeys(self.operands):
            if operand.opcode == "tuple" and not operand.users:
                operand.enlist()
            operand.users.append(self)


class Flat:
    """One computation's nodes, operands first."""

    def __init__(self, module: hm.Module, computation: hm.Computation):
        self._module = module
        self._home = computation
        self.nodes: list[Node] = []
        # The node of each instruction by its position; for a fusion, its root's node.
        self.at = self._dissolved(computation, [])
        self.root = root = self.at[computation.root]
        returned = root.operands if root.opcode == "tuple" else [root]
        self.end = self._new(root.instruction, returned, opcode="return")
        for node in self.nodes:
            if node.opcode not in ("tuple", "get-tuple-element"):
                node.enlist()

    @property
    def parameter(self) -> Node:
        """Return the only parameter of a loop's body or condition."""
        return self.at[[i.opcode for i in self._home.instructions].index("parameter")]

    def _new(
        self,
        instruction: hm.Instruction,
        operands: list[Node],
        fused: bool = False,
        opcode: str = "",
    ) -> Node:
        self.nodes.append(Node(self._home, instruction, operands, fused, opcode))
        return self.nodes[-1]

    def _dissolved(
        self, computation: hm.Computation, given: list[Node], depth: int = 0
    ) -> list[Node]:
        """Return a computation's nodes by position; a fusion's operands are ``given``."""
        fused = depth > 0
        nodes: list[Node] = []
        for i in computation.instructions:
            operands = [nodes[o] for o in i.operands]
            if fused and i.opcode == "parameter":
                known = int(i.literal) < len(given)
                node = given[int(i.literal)] if known else self._new(i, [], True, "unknown")
            elif i.opcode in _FUSIONS and len(i.calls) == 1 and depth < _DEPTH:
                called = self._module.computations[i.calls[0]]
                node = self._dissolved(called, operands, depth + 1)[called.root]
            elif i.opcode == "call" and (loop := called_loop(self._module, i)) is not None:
                node = self._new(loop, operands, fused)
            elif i.opcode == "fusion-done" and not operands[0].opcode.startswith("fusion"):
                node = operands[0]
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
        self, instruction: hm.Instruction, whole: Node, index: int, shape: hm.Shape, fused: bool
    ) -> Node:
        """Return the value of a tuple's element if it is known, else the node that takes it."""
        if whole.opcode == "tuple" and 0 <= index < len(whole.operands):
            return whole.operands[index]
        if index not in whole.elements:
            element = self._new(instruction, [whole], fused, "get-tuple-element")
            element.index, element.shape = index, shape
            whole.elements[index] = element
        return whole.elements[index]

    def _held(
        self, barrier: hm.Instruction, whole: Node, shapes: Sequence[hm.Shape], fused: bool
    ) -> Node:
        """Return a barrier around a tuple as a tuple of barriers, one around each element."""
        held = []
        for index, shape in enumerate(shapes):
            element = self._element(barrier, whole, index, shape, fused)
            held.append(self._new(barrier, [element], fused))
            held[-1].shape = shape
        return self._new(barrier, held, fused, "tuple")
