"""Walk the instructions that a compiled program executes, without those inside fusions."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Collection, Iterable, Iterator
from typing import NamedTuple, TypeVar

from shardrules import hlo
from shardrules.hlo.proof import loops, phases
from shardrules.hlo.proof.collectives import reduction_of
from shardrules.hlo.reader.module import users

_T = TypeVar("_T")

# Instructions that run a computation's instructions one by one. The computations of fusions,
# reductions, sorts and scatters are part of one kernel.
CALLS = ("call", "call-start", "async-start")
_CONTROL = ("while", "conditional", *CALLS)
_NEAR = 40  # the most instructions around a collective to look at
HOST_SPACE = "S(5)"  # xla::Layout::kHostMemorySpace
# Opcodes that pass numbers on, at most rounding them.
PASS_ON = frozenset(
    "bitcast reshape transpose copy convert get-tuple-element all-reduce-done copy-start "
    "copy-done".split()
)
# Opcodes that only name values, hold constants, or wait: they launch and move nothing.
NO_WORK = frozenset(
    "parameter constant tuple get-tuple-element bitcast after-all add-dependency opt-barrier "
    "optimization-barrier domain partition-id replica-id".split()
)


class Place(NamedTuple):
    """An instruction that runs, and how often."""

    computation: hlo.Computation  # its computation
    position: int  # its position in the computation's instructions
    loop_depth: int  # the number of while loops around it
    # The most runs in one execution; None if a loop's count isn't known.
    runs: int | None

    @property
    def instruction(self) -> hlo.Instruction:
        return self.computation.instructions[self.position]


def executed(module: hlo.Module) -> Iterator[Place]:
    """Yield each instruction that runs once; a called computation's follow their caller."""
    runs = loops.executions(module)
    seen: set[str] = set()
    stack = [(module.entry.name, 0)]  # computations, and where to go on in each
    while stack:
        name, start = stack.pop()
        if start == 0 and name in seen:
            continue
        seen.add(name)
        computation, run = module.computations[name], runs[name]
        for position in range(start, len(computation.instructions)):
            yield Place(computation, position, run.depth, run.count)
            instruction = computation.instructions[position]
            if instruction.opcode in _CONTROL and instruction.calls:
                stack.append((name, position + 1))
                stack += [(callee, 0) for callee in reversed(instruction.calls)]
                break


def where(module: hlo.Module, place: Place) -> str:
    """Return an instruction's source line, or else JAX's name for it or an operand, or its name."""
    instructions = place.computation.instructions
    operands = [instructions[o] for o in place.instruction.operands]
    return source(module, [place.instruction, *operands]) or place.instruction.name


def source(module: hlo.Module, instructions: Iterable[hlo.Instruction]) -> str:
    """Return the source line, or JAX's name, of the first instruction that has one, or ""."""
    for instruction in instructions:
        metadata = module.metadata(instruction)
        if metadata.frames or metadata.op_name:
            return str(users(metadata.frames)) if metadata.frames else metadata.op_name
    return ""


def line(module: hlo.Module, instructions: Iterable[hlo.Instruction]) -> str:
    """Return the source line of the first instruction that has one, or ""."""
    named = (i for i in instructions if module.metadata(i).frames)
    return source(module, itertools.islice(named, 1))


# The ends of op_names whose line is a loop's or a checkpoint's line (JAX 0.4.28 to 0.12).
_AROUND = frozenset("while remat remat2 checkpoint rematted_computation".split())


def loop_lines(module: hlo.Module) -> frozenset[tuple[str, int]]:
    """Return the source lines of while loops, each as (file, line)."""
    lines: set[tuple[str, int]] = set()
    for computation in module.computations.values():
        for position in computation.calling:
            instruction = computation.instructions[position]
            if instruction.opcode == "while":
                lines |= {frame[:2] for frame in module.metadata(instruction).frames[:1]}
    return frozenset(lines)


def line_within(
    module: hlo.Module, collective: hlo.Collective, of_loops: Collection[tuple[str, int]]
) -> str:
    """Return a more exact line for a collective whose own line is only a loop's, or "".

    XLA may give only the loop's line to a collective that it made in a loop, in a checkpoint or for
    a loop's result. Then return a line that the loop's line calls: the line that makes the operand,
    or the line that takes an all-gather's result. For a loop's result, return a line that takes it.
    A collective that the program asks for has its own line, even if an interpreted kernel's loop
    stands on the same line. ``of_loops`` is the result of ``loop_lines``.
    """
    own, operation = collective.frames, phases.operation(collective.op_name)
    of_result = operation == "while"
    is_around = own[:1] and own[0][:2] in of_loops and not phases.is_written(collective.op_name)
    if not own or not (operation in _AROUND or is_around):
        return ""
    computation = module.computations[collective.computation]
    instructions, takers = computation.instructions, computation.users()
    place = computation.places[collective.name]
    # An all-gather is named after its reader, any other collective after its operand. Search from
    # the collective in this direction, through instructions without a line or with the loop's line.
    gathers = collective.kind == "all-gather"
    seen, left = {place}, [place]
    while left and len(seen) < _NEAR:
        here = left.pop(0)
        for n in takers[here] if gathers else instructions[here].operands:
            if n in seen:
                continue
            seen.add(n)
            frames = phases.lines(module, computation, module.metadata(instructions[n]))
            calls = own[0] in frames[1:] or (of_result and gathers)
            if frames and calls and frames[0] not in own:
                return str(frames[0])
            if not frames or frames[0] == own[0]:
                left.append(n)
    return ""


def argument(module: hlo.Module, collective: hlo.Collective, arguments: Collection[str]) -> str:
    """Return JAX's name for the argument that a collective without a line moves, or "".

    XLA gives the all-gather of a sharded argument the argument's own name, and no line.
    """
    if collective.frames or collective.op_name not in arguments:
        return ""
    computation = module.computations[collective.computation]
    operands = computation.instructions[computation.places[collective.name]].operands
    return collective.op_name if len(operands) == 1 else ""  # combined ones have only one name


def callers(
    module: hlo.Module, called: hlo.Computation
) -> list[tuple[hlo.Computation, hlo.Instruction]]:
    """Return the instructions that call a computation, each with its own computation."""
    found: list[tuple[hlo.Computation, hlo.Instruction]] = []
    for computation in module.computations.values():
        for position in computation.calling:
            instruction = computation.instructions[position]
            if called.name in instruction.calls:
                found.append((computation, instruction))
    return found


def reached(start: Iterable[_T], follow: Callable[[_T], Iterable[_T]]) -> set[_T]:
    """Return the places in ``start``, and all places that ``follow`` reaches from them."""
    seen = set(start)
    stack = [*seen]
    while stack:
        new = set(follow(stack.pop())) - seen
        seen |= new
        stack += new
    return seen


def parameters(computation: hlo.Computation) -> dict[int, int]:
    """Return the position of each parameter by its number."""
    return {
        int(instruction.literal): position
        for position, instruction in enumerate(computation.instructions)
        if instruction.opcode == "parameter"
    }


def applied(module: hlo.Module, reduction: hlo.Instruction) -> str:
    """Return the name of the operation that a reduction applies, ``"add"``."""
    called = module.computations.get((reduction.attribute("to_apply") or "").lstrip("%"))
    return reduction_of(called) if called else ""


def is_zero(constant: hlo.Instruction) -> bool:
    """Return whether a constant is written as a single zero."""
    return re.fullmatch(r"-?0(\.0*)?|\(-?0, -?0\)|false", constant.literal.strip()) is not None


def target(call: hlo.Instruction) -> str:
    return (call.attribute("custom_call_target") or "").strip('"')


def host_buffer(shape: hlo.Shape) -> bool:
    """Return whether this is the shape of an array in host memory."""
    return not shape.is_tuple and HOST_SPACE in shape.layout


class Moved(NamedTuple):
    """A move between host and device memory, with the bytes of one run."""

    to_host: bool
    bytes: int


def moved(module: hlo.Module, place: Place) -> Moved | None:
    """Return an instruction's move between host and device memory, or None."""
    # On TPU and GPU, layouts contain the memory space. CPU has one memory and prints none.
    instruction = place.instruction
    opcode = instruction.opcode
    if opcode in NO_WORK or opcode in _CONTROL or opcode.endswith("-done"):
        return None  # ``executed`` yields the body of a call separately
    result = [instruction.shape.leaves()[n] for n in result_leaves(instruction)]
    size = sum(leaf.bytes for leaf in result)
    operands = [place.computation.instructions[o].shape for o in instruction.operands]
    if any(map(host_buffer, result)):
        if not any(not host_buffer(s) and s.bytes for s in operands):
            return None  # an allocation, or host to host
        update = written(module, place.computation, instruction)
        return Moved(True, size if update is None else update.bytes)
    if any(map(host_buffer, operands)):
        return Moved(False, size)
    return None


def result_leaves(instruction: hlo.Instruction) -> range:
    """Return the array leaves of an instruction's shape that are its result."""
    # copy-start gives (result, operand, context), other starts ((operands), result, context).
    elements = instruction.shape.elements
    if not instruction.opcode.endswith("-start") or not elements or len(elements) < 2:
        return range(len(instruction.shape.leaves()))
    which = 0 if instruction.opcode == "copy-start" else 1
    first = sum(len(e.leaves()) for e in elements[:which])
    return range(first, first + len(elements[which].leaves()))


def written(
    module: hlo.Module, computation: hlo.Computation, instruction: hlo.Instruction
) -> hlo.Shape | None:
    """Return the shape of the part that is written in place; None if the whole result is new."""
    while True:
        if instruction.opcode.startswith("dynamic-update-slice") and instruction.operands[1:]:
            return computation.instructions[instruction.operands[1]].shape
        if instruction.opcode in ("bitcast", "copy") and instruction.operands:
            instruction = computation.instructions[instruction.operands[0]]
        elif instruction.opcode.startswith("fusion") and len(instruction.calls) == 1:
            computation = module.computations[instruction.calls[0]]
            instruction = computation.instructions[computation.root]
        else:
            return None
