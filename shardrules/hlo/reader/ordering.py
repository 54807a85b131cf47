"""Puts operands before users and callees before callers; finds cycles."""

from __future__ import annotations

from collections.abc import Callable

from shardrules.hlo.reader import module as hm


def _order(edges: list[list[int]], cycle: Callable[[int, int], Exception]) -> list[int]:
    """Order nodes so that each one comes after the targets of its edges."""
    order: list[int] = []
    state = [0] * len(edges)
    for first in range(len(edges)):
        stack = [(first, 0)]
        while stack:
            node, child = stack.pop()
            if child == 0:
                if state[node]:
                    continue
                state[node] = 1
            if child < len(edges[node]):
                stack.append((node, child + 1))
                target = edges[node][child]
                if state[target] == 1:
                    raise cycle(node, target)
                if not state[target]:
                    stack.append((target, 0))
            else:
                state[node] = 2
                order.append(node)
    return order


def operands_first(
    error,
    name: str,
    instructions: list[hm.Instruction],
    late: list[tuple[int, list[str]]],
    index: dict[str, int],
    root: int,
) -> tuple[list[hm.Instruction], int]:
    """Put operands before their users in text that was written by hand."""
    edges = [list(i.operands) for i in instructions]
    for position, labels in late:
        for label in labels:
            if label not in index:
                raise error(
                    instructions[position].start,
                    f"operand {label!r} of {instructions[position].name!r} is not defined in "
                    f"computation {name!r}",
                )
        edges[position] = [index[label] for label in labels]
    order = _order(
        edges,
        lambda node, _: error(
            instructions[node].start, f"{instructions[node].name!r} depends on itself"
        ),
    )
    place = {old: new for new, old in enumerate(order)}
    ordered = [
        instructions[old]._replace(operands=tuple([place[o] for o in edges[old]])) for old in order
    ]
    return ordered, place[root if root >= 0 else len(instructions) - 1]


def callees_first(error, computations: dict[str, hm.Computation]) -> tuple[str, ...]:
    """Check calls for missing targets and cycles; give the names with callees first."""
    names = list(computations)
    place = {name: number for number, name in enumerate(names)}
    edges: list[list[int]] = []
    for computation in computations.values():
        callees: list[int] = []
        for caller in computation.calling:
            instruction = computation.instructions[caller]
            for name in instruction.calls:
                if name not in place:
                    raise error(
                        instruction.start,
                        f"{instruction.name!r} calls computation "
                        f"{name!r}, which is not in the text",
                    )
                callees.append(place[name])
        edges.append(callees)
    order = _order(
        edges,
        lambda node, target: error(
            computations[names[node]].instructions[0].start,
            f"computation {names[node]!r} calls itself through {names[target]!r}",
        ),
    )
    return tuple([names[number] for number in order])
