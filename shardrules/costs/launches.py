"""What each loop of a compiled program costs per trip: kernels launched, bytes copied, decisions.

On a GPU each instruction of a scheduled computation that computes is one kernel, one call of a
library or one copy. A while loop whose trip count XLA knows runs as so many launches of its body.
If XLA does not know it, the GPU computes the predicate and copies it to the host, which waits for
it and decides, trip by trip (xla/backends/gpu/runtime, WhileThunk). Instructions in a command
buffer are recorded once and launched as one graph.
"""

from __future__ import annotations

import collections
from typing import NamedTuple

from shardrules import hlo
from shardrules.costs import walk
from shardrules.hlo.proof import loops
from shardrules.hlo.reader.module import behind, parameter_element

_LIBRARY = ("__cublas", "__cudnn", "__cub", "__cusolver", "__cufft")


class Loop(NamedTuple):
    """One while loop.

    Attributes:
      name: of its instruction.
      source: its source line, or JAX's name for it.
      depth: the number of loops around it.
      trip_count: of one run; None where the compiled program holds no static one.
      unknown: what made it unknown.
      launches: kernels, library calls, copies and graphs of one trip, and of its condition where
        the host reads it; None with a loop of unknown length inside, and on other platforms.
      kinds: the launches by kind.
      host_decides: whether the host waits for the predicate on each trip.
      copied_bytes: by copies, of one trip; None with a loop of unknown length inside.
      graphs: command buffers launched on one trip, each counted as one launch.
    """

    name: str
    source: str
    depth: int
    trip_count: int | None
    unknown: str
    launches: int | None
    kinds: tuple[tuple[str, int], ...]
    host_decides: bool
    copied_bytes: int | None
    graphs: int


class _Sum(NamedTuple):
    """Launches by kind, bytes and graphs; ``known`` is false with a loop of unknown length."""

    kinds: collections.Counter
    bytes: int
    graphs: int
    known: bool

    def plus(self, other: _Sum, times: int = 1) -> _Sum:
        kinds = self.kinds + collections.Counter({k: n * times for k, n in other.kinds.items()})
        return _Sum(
            kinds,
            self.bytes + other.bytes * times,
            self.graphs + other.graphs * times,
            self.known and other.known,
        )


def platform(module: hlo.Module) -> str | None:
    """Tell which platform a compiled module is for, by what only its compiler writes; else None."""
    hints = module.header.get("frontend_attributes", "")
    if "fingerprint_before_lhs" in hints or "operation_queue_id" in module.text:
        return "gpu"
    return "tpu" if ":T(" in module.text else None


def read(module: hlo.Module, on: str | None = None) -> list[Loop]:
    """List a module's loops, outermost first, with what one trip launches if it is for a GPU."""
    # A TPU runs a whole program, and a CPU launches nothing.
    gpu = (on or platform(module)) == "gpu"
    sums = _sums(module)
    return [
        _loop(module, place, sums, gpu)
        for place in walk.executed(module)
        if place.instruction.opcode == "while"
    ]


def in_all(module: hlo.Module) -> int | None:
    """Count what one execution launches on a GPU; None with a loop of unknown length."""
    total = _sums(module)[module.entry.name]
    return sum(total.kinds.values()) if total.known else None


def _loop(module: hlo.Module, place: walk.Place, sums: dict[str, _Sum], gpu: bool) -> Loop:
    instruction = place.instruction
    trips = loops.trip_count(module, place.computation, instruction)
    condition, body = loops.parts(module, instruction)
    total = sums[body.name]
    # The count that the compiler wrote down decides how the loop runs, not one that we found.
    asked = gpu and "known_trip_count" not in (instruction.attribute("backend_config") or "")
    if asked:
        total = total.plus(sums[condition.name])
        total.kinds["copy of the predicate"] += 1
    launches = total.known and gpu
    return Loop(
        instruction.name,
        walk.where(module, place),
        place.loop_depth,
        trips,
        "" if trips is not None else _unknown(module, place, condition, body),
        sum(total.kinds.values()) if launches else None,
        tuple(sorted(total.kinds.items())) if gpu else (),
        asked,
        total.bytes if total.known else None,
        total.graphs,
    )


def _sums(module: hlo.Module) -> dict[str, _Sum]:
    """Count what one run of each computation launches, with all that it calls."""
    sums: dict[str, _Sum] = {}
    for name in module.computations:  # callees first
        sums[name] = _sum(module, module.computations[name], sums)
    return sums


def _sum(module: hlo.Module, computation: hlo.Computation, sums: dict[str, _Sum]) -> _Sum:
    total = _Sum(collections.Counter(), 0, 0, True)
    for instruction in computation.instructions:
        opcode = instruction.opcode
        if opcode in walk.NO_WORK or opcode.endswith("-done"):
            continue
        if opcode == "while":
            trips = loops.trip_count(module, computation, instruction)
            inner = sums[loops.parts(module, instruction)[1].name]
            total = total.plus(inner, trips) if trips is not None else total._replace(known=False)
        elif opcode == "conditional" and instruction.calls:
            total.kinds["branch that the host chooses"] += 1
            branches = [sums[name] for name in instruction.calls]
            # At most: the branch that launches most.
            total = total.plus(max(branches, key=lambda b: sum(b.kinds.values())))
        elif opcode in ("call", "async-start") and instruction.calls:
            called = instruction.calls[0]
            if opcode == "call" and called.startswith("command_buffer"):
                total.kinds["graph"] += 1
                total = total._replace(graphs=total.graphs + 1)
            else:
                total = total.plus(sums[called])
        else:
            kind, size = _launch(instruction)
            if kind:
                total.kinds[kind] += 1
                total = total._replace(bytes=total.bytes + size)
    return total


def _launch(instruction: hlo.Instruction) -> tuple[str, int]:
    """Name what one instruction launches, with the bytes that it copies."""
    opcode = instruction.opcode.removesuffix("-start")
    if opcode == "custom-call":
        target = walk.target(instruction)
        if target == "AllocateBuffer":
            return "", 0
        return ("library call" if target.startswith(_LIBRARY) else "custom call"), 0
    if opcode == "copy":
        leaves = instruction.shape.leaves()
        return "copy", sum(leaves[n].bytes for n in walk.result_leaves(instruction))
    return "fusion" if opcode == "fusion" else f"{opcode} kernel", 0


# -- what made a trip count unknown ---------------------------------------------------------------


def _unknown(
    module: hlo.Module, place: walk.Place, condition: hlo.Computation, body: hlo.Computation
) -> str:
    """Say which value of the condition the compiler does not know."""
    read = sorted(_elements(condition, condition.root))
    root = body.instructions[body.root]
    if not body.parameters:
        return "the text does not show its carry"
    if root.opcode == "tuple":
        after = [_element(body, operand) for operand in root.operands]
        elements = body.parameters[0].shape.elements or ()
    else:  # a carry of one array is no tuple
        after, elements = [_element(body, body.root)], (body.parameters[0].shape,)
    if any(number >= min(len(after), len(elements)) for number in read):
        return "the text does not show how its carry is made"
    bounds = [
        said
        for number in read
        if after[number] == number and (said := _origin(module, place, number))
    ]
    if bounds:
        return "its bound is " + " and ".join(bounds)
    changing = [str(elements[number]) for number in read if after[number] != number]
    if changing:
        return "its condition reads what each trip computes: " + ", ".join(changing)
    return "its condition reads nothing of its carry"


def _elements(computation: hlo.Computation, position: int) -> set[int]:
    """Give the elements of the loop's carry that a value of its condition is computed from."""

    def made_of(current: int) -> tuple[int, ...]:
        carried = _element(computation, current) is not None
        return () if carried else computation.instructions[current].operands

    elements = (_element(computation, n) for n in walk.reached([position], made_of))
    return {number for number in elements if number is not None}


def _element(computation: hlo.Computation, position: int) -> int | None:
    """Give the element of the computation's parameter that a value is, unchanged; else None."""
    instruction = behind(computation, position, ("copy", "bitcast"))
    if instruction.opcode == "parameter" and not instruction.shape.is_tuple:
        return 0
    return parameter_element(computation, instruction)


def _origin(module: hlo.Module, place: walk.Place, number: int) -> str:
    """Name the value from outside that a loop carries unchanged; empty for a constant."""
    computation = place.computation
    path = [number] if place.instruction.shape.is_tuple else []
    instruction = computation.instructions[place.instruction.operands[0]]
    while True:
        if instruction.opcode == "tuple" and path:
            instruction = computation.instructions[instruction.operands[path.pop()]]
        elif instruction.opcode == "get-tuple-element":
            path.append(int(instruction.attribute("index") or 0))
            instruction = computation.instructions[instruction.operands[0]]
        elif instruction.opcode in ("copy", "bitcast") and instruction.operands:
            instruction = computation.instructions[instruction.operands[0]]
        elif instruction.opcode == "parameter" and (caller := _caller(module, computation)):
            # XLA's CPU compiler puts small loops into calls.
            computation, call = caller
            instruction = computation.instructions[call.operands[int(instruction.literal)]]
        else:
            break
    if instruction.opcode == "constant":
        return ""
    metadata = module.metadata(instruction)
    if instruction.opcode == "parameter" and computation.is_entry:
        return f"the argument {metadata.op_name or instruction.literal} ({instruction.shape})"
    name = metadata.op_name.rpartition("/")[2] or instruction.name
    at = f" at {metadata.frames[0]}" if metadata.frames else ""
    return f"computed outside of it ({name}, {instruction.shape}{at})"


def _caller(
    module: hlo.Module, computation: hlo.Computation
) -> tuple[hlo.Computation, hlo.Instruction] | None:
    """Find the one call of a computation; None if there are several callers, or a loop."""
    callers = [
        (caller, instruction)
        for caller in module.computations.values()
        for instruction in caller.instructions
        if computation.name in instruction.calls
    ]
    return callers[0] if len(callers) == 1 and callers[0][1].opcode == "call" else None
