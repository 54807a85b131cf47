"""From which pass a collective is, and where its source asks for it: op_names, part by part.

XLA combines collectives, and names the combined one after its first part, all parts or nothing.
Each part's own metadata stays on what takes it out again (the get-tuple-element; on GPU, what
follows a slice of the flat array), and is asked first: so the combiner makes no difference.
"""

from __future__ import annotations

import functools
import re

from shardrules.hlo.reader import module as hm

__all__ = ["PartNames", "find_phase", "phase_of"]

_SAME = frozenset("bitcast reshape copy get-tuple-element fusion call".split())
_SLICE = re.compile(r"\{\[(\d+):(\d+)\]\}")


@functools.lru_cache(maxsize=4096)
def phase_of(op_name: str) -> str:
    """Tell the phase from an op_name; XLA joins two names into one with ';', ':' or ' '."""
    if not op_name:
        return "unknown"
    found = set()
    for part in re.split(r";|\s(?=\w+\()|:(?=\w+[/(])", op_name):
        if "rematted_computation" in part:
            found.add("recompute")
        elif "transpose(" in part:
            found.add("backward")
        else:
            found.add("forward")
    return found.pop() if len(found) == 1 else "mixed"


def find_phase(
    module: hm.Module, computation: hm.Computation, queue: list[int], limit: int = 64
) -> str:
    """Tell the phase of values that have no op_name, from those that they are made of."""
    phases: set[str] = set()
    queue = list(queue)
    seen = set(queue)
    while queue and len(seen) < limit:
        current = computation.instructions[queue.pop(0)]
        phase = phase_of(module.metadata(current).op_name)
        if phase != "unknown" and current.opcode != "parameter":
            phases.add(phase)
            continue
        for operand in current.operands:
            if operand not in seen:
                seen.add(operand)
                queue.append(operand)
    if not phases:
        return "unknown"
    return phases.pop() if len(phases) == 1 else "mixed"


class PartNames:
    """What the text says of each part of a module's combined collectives.

    Args:
      module: the module.
    """

    def __init__(self, module: hm.Module):
        self._module = module
        self._users: dict[str, list[list[int]]] = {}
        # By where a collective stands, what takes its elements, and ranges of its flat array.
        self._elements: dict[tuple[str, int], dict[str | None, list[int]]] = {}
        self._cuts: dict[tuple[str, int], list[tuple[int, tuple[int, int]]]] = {}

    def whole(self, computation: hm.Computation, position: int) -> str:
        """Return the phase of a collective that is not combined."""
        instruction = computation.instructions[position]
        op_name = self._module.metadata(instruction).op_name
        if op_name:
            return phase_of(op_name)
        return find_phase(self._module, computation, list(instruction.operands))

    def part(
        self,
        computation: hm.Computation,
        position: int,
        operand: int,
        elements: tuple[int, int] | None = None,
    ) -> tuple[str, hm.Metadata]:
        """Return the phase and the metadata of one part.

        Args:
          computation: the one that holds the collective.
          position: the collective's.
          operand: the number of its operand.
          elements: of a flat operand, the first of the part's and the one after its last.
        """
        if computation.name not in self._users:
            self._users[computation.name] = computation.users()
        found = self._results(computation, position, operand, elements)
        phases = {phase_of(one.op_name) for one in found}
        if len(phases) == 1:
            return phases.pop(), found[0]
        if phases:
            return "mixed", found[0]
        made_of = computation.instructions[position].operands[operand]
        return find_phase(self._module, computation, [made_of]), hm.Metadata()

    def _results(self, computation, position, operand, elements) -> list[hm.Metadata]:
        """List the metadata of what takes a part out of the result."""
        users = self._users[computation.name]
        instructions = computation.instructions
        where = (computation.name, position)  # what its takers take is read once for all parts
        if elements is None:
            if where not in self._elements:
                by_index = self._elements.setdefault(where, {})
                for taker in self._past_done(users, instructions, position):
                    if instructions[taker].opcode == "get-tuple-element":
                        index = instructions[taker].attribute("index")
                        by_index.setdefault(index, []).append(taker)
            queue = self._elements[where].get(str(operand), [])
        else:
            if where not in self._cuts:
                takers = self._past_done(users, instructions, position)
                cuts = [(taker, self._slice(instructions[taker])) for taker in takers]
                self._cuts[where] = [(taker, cut) for taker, cut in cuts if cut is not None]
            first, end = elements
            queue = [taker for taker, cut in self._cuts[where] if cut[0] < end and first < cut[1]]
        found = []
        for start in queue:
            for _ in range(16):  # nothing but the part itself, in another form
                metadata = self._module.metadata(instructions[start])
                if metadata.op_name:
                    found.append(metadata)
                    break
                following = users[start]
                if len(following) != 1 or instructions[following[0]].opcode not in _SAME:
                    break
                (start,) = following
        return found

    @staticmethod
    def _past_done(users, instructions, position: int) -> list[int]:
        found, queue = [], list(users[position])
        while queue:
            one = queue.pop(0)
            if instructions[one].opcode.endswith("-done"):
                queue += users[one]
            else:
                found.append(one)
        return found

    def _slice(self, instruction: hm.Instruction) -> tuple[int, int] | None:
        """Return the elements of a flat array that a slice takes, one in a fusion too."""
        if (
            instruction.opcode == "fusion"
            and len(instruction.operands) == len(instruction.calls) == 1
        ):
            inner = self._module.computations[instruction.calls[0]]
            instruction = inner.instructions[inner.root]
            while instruction.opcode in ("bitcast", "reshape", "copy"):
                instruction = inner.instructions[instruction.operands[0]]
            if (
                instruction.opcode != "slice"
                or inner.instructions[instruction.operands[0]].opcode != "parameter"
            ):
                return None
        if instruction.opcode != "slice":
            return None
        match = _SLICE.fullmatch((instruction.attribute("slice") or "").replace(" ", ""))
        return (int(match[1]), int(match[2])) if match else None
