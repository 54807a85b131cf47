"""Count what each trip of a compiled program's loops costs: launches, copied bytes, decisions.

On a GPU, each instruction that does work in a scheduled computation is one kernel, one library call
or one copy. If XLA knows a while loop's trip count, it launches the loop's body that many times. If
XLA does not know the count, the GPU computes the predicate and copies it to the host, and the host
waits for it and decides, trip by trip (xla/backends/gpu/runtime, WhileThunk). Instructions in a
command buffer are recorded once and launched as one graph.
"""

from __future__ import annotations

import collections
import functools
from collections.abc import Sequence
from typing import NamedTuple

from shardrules import hlo
from shardrules.costs import walk
from shardrules.hlo.proof import loops
from shardrules.hlo.reader.module import behind, parameter_element, users

_LIBRARY = ("__cublas", "__cudnn", "__cub", "__cusolver", "__cufft")


class Loop(NamedTuple):
    """One while loop."""

    name: str  # the name of its instruction
    source: str  # its source line, or JAX's name for it
    depth: int  # the number of loops around it
    trip_count: int | None  # of one run; None if the compiled program has no static count
    unknown: str  # why the trip count is unknown
    # Kernels, library calls, copies and graphs in one trip, and in the condition if the host reads
    # it; None if the loop contains a loop of unknown length, and on other platforms.
    launches: int | None
    kinds: tuple[tuple[str, int], ...]  # the launches by kind
    host_decides: bool  # whether the host waits for the predicate on each trip
    copied_bytes: int | None  # in one trip; None if it contains a loop of unknown length
    graphs: int  # command buffers launched on one trip, each counted as one launch


# The launches of one run of a computation, by kind. Two more keys count other things.
_Sum = collections.Counter[str]
_BYTES, _UNKNOWN = "bytes copied", "loops of unknown length"
_GRAPH = "graph"


def platform(module: hlo.Module) -> str | None:
    """Return the platform whose compiler wrote a module; None if the text doesn't show it."""
    hints = module.header.get("frontend_attributes", "")
    if "fingerprint_before_lhs" in hints or "operation_queue_id" in module.text:
        return "gpu"
    return "tpu" if ":T(" in module.text else None


def read(module: hlo.Module, on: str | None = None) -> list[Loop]:
    """Return a module's loops, outermost first; on a GPU, with the launches of one trip."""
    # A TPU runs a whole program, and a CPU launches nothing.
    gpu = (on or platform(module)) == "gpu"
    sums = _sums(module)
    return [
        _loop(module, place, sums, gpu)
        for place in walk.executed(module)
        if place.instruction.opcode == "while"
    ]


def in_all(module: hlo.Module) -> int | None:
    """Return the launches of one execution on a GPU; None if it has a loop of unknown length."""
    total = _sums(module)[module.entry.name]
    return None if total[_UNKNOWN] else _launched(total)


def _launched(total: _Sum) -> int:
    return total.total() - total[_BYTES] - total[_UNKNOWN]


def _loop(module: hlo.Module, place: walk.Place, sums: dict[str, _Sum], gpu: bool) -> Loop:
    instruction = place.instruction
    trips = loops.trip_count(module, place.computation, instruction)
    condition, body = loops.parts(module, instruction)
    total = sums[body.name]
    # Only a count in the text decides how the loop runs; XLA doesn't know a count that we derived.
    asked = gpu and "known_trip_count" not in (instruction.attribute("backend_config") or "")
    if asked:
        total = total + sums[condition.name] + _Sum(["copy of the predicate"])
    known, other = not total[_UNKNOWN], (_BYTES, _UNKNOWN)
    return Loop(
        instruction.name,
        walk.where(module, place),
        place.loop_depth,
        trips,
        "" if trips is not None else _unknown(module, place, condition, body),
        _launched(total) if known and gpu else None,
        tuple(sorted((k, n) for k, n in total.items() if k not in other)) if gpu else (),
        asked,
        total[_BYTES] if known else None,
        total[_GRAPH],
    )


def _sums(module: hlo.Module) -> dict[str, _Sum]:
    """Return the launches of one run of each computation, including its callees' launches."""
    sums: dict[str, _Sum] = {}
    for name, computation in module.computations.items():  # callees first
        if computation.original is not computation and not computation.called:
            sums[name] = sums[computation.original.name]
            continue
        sums[name] = _Sum()
        for instruction in computation.instructions:
            sums[name] += _sum(module, computation, instruction, sums)
    return sums


def _sum(
    module: hlo.Module,
    computation: hlo.Computation,
    instruction: hlo.Instruction,
    sums: dict[str, _Sum],
) -> _Sum:
    opcode, calls = instruction.opcode, instruction.calls
    if opcode in walk.NO_WORK or opcode.endswith(("-update", "-done")):
        return _Sum()
    if opcode == "while":
        trips = loops.trip_count(module, computation, instruction)
        inner = sums[loops.parts(module, instruction)[1].name]
        return _Sum([_UNKNOWN] if trips is None else {k: n * trips for k, n in inner.items()})
    if opcode == "conditional" and calls:
        # The most that it may launch: the branch with the most launches.
        most = max((sums[name] for name in calls), key=_launched)
        return most + _Sum(["branch that the host chooses"])
    if opcode == "call" and calls and calls[0].startswith("command_buffer"):
        return _Sum([_GRAPH])
    if opcode in walk.CALLS and calls:
        return sums[calls[0]]
    opcode = opcode.removesuffix("-start")
    if opcode == "custom-call":
        target = walk.target(instruction)
        kind = "library call" if target.startswith(_LIBRARY) else "custom call"
        return _Sum([] if target == "AllocateBuffer" else [kind])
    if opcode == "copy":
        leaves = instruction.shape.leaves()
        copied = sum(leaves[n].bytes for n in walk.result_leaves(instruction))
        return _Sum({"copy": 1, _BYTES: copied})
    return _Sum(["fusion" if opcode == "fusion" else f"{opcode} kernel"])


def _unknown(
    module: hlo.Module, place: walk.Place, condition: hlo.Computation, body: hlo.Computation
) -> str:
    """Return a text on the value in the condition that the compiler does not know."""
    taken = functools.partial(_element, condition)

    def made_of(position: int) -> tuple[int, ...]:
        return condition.instructions[position].operands if taken(position) is None else ()

    elements_read = map(taken, walk.reached([condition.root], made_of))
    read = sorted(number for number in {*elements_read} if number is not None)
    root = body.instructions[body.root]
    if not body.parameters:
        return "the text does not show its carry"
    if root.opcode == "tuple":
        after = [_element(body, operand) for operand in root.operands]
        elements = body.parameters[0].shape.elements or ()
    else:  # a carry of one array is not a tuple
        after, elements = [_element(body, body.root)], (body.parameters[0].shape,)
    if any(number >= min(len(after), len(elements)) for number in read):
        return "the text does not show how its carry is made"
    kept = [_origin(module, place, number) for number in read if after[number] == number]
    if any(kept):
        return "its bound is " + " and ".join(filter(None, kept))
    changing = [str(elements[number]) for number in read if after[number] != number]
    if changing:
        return "its condition reads what each trip computes: " + ", ".join(changing)
    return "its condition does not read its carry"


def _element(computation: hlo.Computation, position: int) -> int | None:
    """Return the element of the parameter that a value is, unchanged; None for any other value."""
    instruction = behind(computation, position, ("copy", "bitcast"))
    if instruction.opcode == "parameter" and not instruction.shape.is_tuple:
        return 0
    return parameter_element(computation, instruction)


def _origin(module: hlo.Module, place: walk.Place, number: int) -> str:
    """Return a text on the outside value that a loop carries unchanged; empty for a constant."""
    # Go back through tuples and copies, and to what callers pass. ``path`` has the numbers of the
    # tuple elements that are still to be taken, the next one last.
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
        elif instruction.opcode == "parameter":
            given = _given(module, computation, instruction, path)
            if given is None:
                break
            computation, instruction = given
        else:
            break
    if instruction.opcode == "constant":
        return ""
    shape, metadata = instruction.shape, module.metadata(instruction)
    for element in reversed(path):
        shape = shape.elements[element] if shape.elements else shape
    if instruction.opcode == "parameter" and computation.is_entry:
        return f"the argument {metadata.op_name or instruction.literal} ({shape})"
    if instruction.opcode == "parameter":
        around = {caller.opcode for _, caller in walk.callers(module, computation)}
        of_loop = around == {"while"}
        return f"{'carried by the loop around it' if of_loop else 'passed to it'} ({shape})"
    name = metadata.op_name.rpartition("/")[2] or instruction.name
    at = f" at {users(metadata.frames)}" if metadata.frames else ""
    return f"computed outside of it ({name}, {shape}{at})"


def _given(
    module: hlo.Module,
    computation: hlo.Computation,
    parameter: hlo.Instruction,
    path: Sequence[int],
) -> tuple[hlo.Computation, hlo.Instruction] | None:
    """Return what the only caller passes for a parameter; None if a loop changes it."""
    callers = walk.callers(module, computation)
    if len(callers) != 1:
        return None
    ((around, caller),) = callers
    number = int(parameter.literal)
    if caller.opcode == "while":
        body, element = loops.parts(module, caller)[1], path[-1] if path else 0
        root = body.instructions[body.root]
        after = root.operands if root.opcode == "tuple" else (body.root,)
        if element >= len(after) or _element(body, after[element]) != element:
            return None
    elif caller.opcode == "conditional":
        if caller.calls.count(computation.name) > 1:
            return None
        number = 1 + caller.calls.index(computation.name)
    elif caller.opcode not in walk.CALLS:  # XLA's CPU compiler puts small loops into calls
        return None
    if number >= len(caller.operands):
        return None
    return around, around.instructions[caller.operands[number]]
