"""The cheapest casts of a linear program: a minimum cut for each mesh axis.

A tangent is invariant or varying where it is made and where it is used; it costs its bytes, times
the runs of the loops around, if it is invariant where it is made and varying where it is used.
"""

from __future__ import annotations

import dataclasses
import itertools

from shardrules.hooks.autodiff.linear import Graph, Step, Value
from shardrules.hooks.autodiff.mincut import INFINITE, Network

__all__ = ["Labels", "cheapest", "cost", "cost_as_traced"]

_SCALE = 1 << 20  # of two that cost the same bytes, the one with fewer psums


@dataclasses.dataclass
class Labels:
    """Over which axes each tangent varies where it is made and where it is used.

    Args:
      made: by tangent.
      used: by tangent; what is used as less is what stood before the cast.
      steps: by step, the axes over which it varies.
    """

    made: dict[Value, frozenset[str]]
    used: dict[Value, frozenset[str]]
    steps: dict[Step, frozenset[str]]


def cheapest(graph: Graph) -> Labels:
    """Return the cheapest labels: axis by axis in each order, what is cut already being free.

    Casts of one tangent over several axes share one psum. That is not submodular, so no single
    cut expresses it.
    """
    axes = [
        axis
        for axis in graph.jax.manual_axes()
        if any(axis in made.varying - value.varying for value, made in graph.casts)
        or any(axis in step.sums_bytes for step in graph.steps)
    ]
    best = None
    for order in itertools.permutations(axes):
        labels = _as_traced(graph)
        cut: set[Value] = set()
        for axis in order:
            cut |= _cut(graph, axis, labels, cut)
        size_bytes = cost(graph, labels)
        if best is None or size_bytes < best[0]:
            best = size_bytes, labels
    return best[1] if best else _as_traced(graph)


def _as_traced(graph: Graph) -> Labels:
    made = {value: value.varying for value in graph.values.values()}
    steps = {
        step: frozenset().union(step.needed, *(value.varying for value in step.inputs))
        for step in graph.steps
    }
    return Labels(made, dict(made), steps)


def _cut(graph: Graph, axis: str, labels: Labels, free: set[Value]) -> set[Value]:
    """Label everything for one axis by a minimum cut; return the tangents that are cast."""
    net = Network()
    makes = {value: net.node() for value in graph.values.values()}
    uses = {value: net.node() for value in makes}
    for value, made in makes.items():
        net.edge(made, uses[value], _price(value, free))
        net.edge(uses[value], made)
        if value.stays and axis not in value.varying:
            net.edge(net.source, uses[value])
    for value in graph.inputs:
        _fix(net, makes[value], axis in value.varying)
    for value in graph.ends:
        if axis in value.varying:
            net.edge(uses[value], net.sink)
    nodes = {step: net.node() for step in graph.steps}
    for step, node in nodes.items():
        if step.fixes(axis):
            for value in step.inputs:
                if axis in value.varying:
                    net.edge(uses[value], net.sink)
            for value in step.outputs:
                _fix(net, makes[value], axis in value.varying)
            continue
        if axis in step.sums_bytes:
            # Results keep their types; operands are all cast before, or summed by the step.
            net.edge(node, net.sink, step.sums_bytes[axis] * _SCALE + 1)
            for value in step.outputs:
                _fix(net, makes[value], axis in value.varying)
        else:
            if axis in step.needed:
                net.edge(node, net.sink)
            for value in step.outputs:
                net.edge(node, makes[value])
                net.edge(makes[value], node)
        for value in step.inputs:
            net.edge((makes if step.ties else uses)[value], node)
            if (
                step.ties or axis in value.varying
            ):  # what was not invariant as traced can't come back
                net.edge(node, makes[value])
    varies = net.sink_side()
    for value in makes:
        labels.made[value] = _with(labels.made[value], axis, makes[value] in varies)
        labels.used[value] = _with(labels.used[value], axis, uses[value] in varies)
    for step, node in nodes.items():
        if not step.fixes(axis):
            labels.steps[step] = _with(labels.steps[step], axis, node in varies)
    return {
        value
        for value in makes
        if value.live and uses[value] in varies and makes[value] not in varies
    }


def _fix(net: Network, node: int, varies: bool) -> None:
    if varies:
        net.edge(node, net.sink)
    else:
        net.edge(net.source, node)


def _price(value: Value, free: set[Value]) -> int:
    if not value.live:
        return 0
    if not value.castable:
        return INFINITE
    # Of two that cost the same bytes, the one with fewer psums.
    return value.runs if value in free else value.cast_bytes * _SCALE + value.runs


def cost(graph: Graph, labels: Labels) -> int:
    """Return the bytes that the cotangents' psums sum, on each device, under these labels."""
    total = sum(
        value.cast_bytes
        for value in graph.values.values()
        if value.live and labels.used[value] - labels.made[value]
    )
    for step in graph.steps:
        stay = [count for axis, count in step.sums_bytes.items() if axis not in labels.steps[step]]
        total += max(stay, default=0)
    return total


def cost_as_traced(graph: Graph) -> int:
    """Return the bytes that they sum where the casts stand now."""
    return sum(value.cast_bytes for value, made in graph.casts if made.live) + sum(
        max(step.sums_bytes.values(), default=0) for step in graph.steps
    )


def _with(axes: frozenset[str], axis: str, varies: bool) -> frozenset[str]:
    return axes | {axis} if varies else axes - {axis}
