"""The cheapest casts of a linear program: a minimum cut for each mesh axis.

A tangent is invariant or varying where it is made and where it is used; it costs its bytes, times
the runs of the loops around, if it is invariant where it is made and varying where it is used.
"""

from __future__ import annotations

import dataclasses
import fractions
import itertools
from collections.abc import Iterable, Iterator

from shardrules.hooks.casts.linear import Graph, Step, Value
from shardrules.hooks.casts.mincut import INFINITE, Network

__all__ = ["Cost", "Labels", "cheapest", "cost", "cost_as_traced"]

_SCALE = 1 << 40  # of two that cost the same bytes, the one with fewer psums


@dataclasses.dataclass(frozen=True, order=True)
class Cost:
    """What the cotangents' psums move, on each device.

    Args:
      bytes: what they sum.
      wire_bytes: what a device sends, by ring algorithms (``costs.accounts``).
    """

    bytes: int
    wire_bytes: fractions.Fraction

    def within(self, other: Cost) -> bool:
        """Whether it is no more than another, of both."""
        return self.bytes <= other.bytes and self.wire_bytes <= other.wire_bytes


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
    cut expresses it. Nor is the fewest bytes summed always the fewest on the wire: of labels that
    are within what JAX's late casts cost, and the check being off, the fewest bytes summed.

    Raises:
      ValueError: if no labels suit the program.
    """
    axes = [
        axis
        for axis in graph.door.manual_axes()
        if any(axis in made.varying - value.varying for value, made in graph.casts)
        or any(axis in step.moves for step in graph.steps)
    ]
    if not axes:
        return _as_traced(graph)
    found = [_in_order(graph, order, set()) for order in itertools.permutations(axes)]
    late, off = cost_as_traced(graph), cost_unchecked(graph)
    bound = Cost(min(late.bytes, off.bytes), min(late.wire_bytes, off.wire_bytes))
    if not any(cost(graph, labels).within(bound) for labels in found):
        found.append(_in_order(graph, axes, set(graph.inputs)))
        found += [_again(graph, axes, labels) for labels in found]
        # One psum over more devices moves more on the wire than a large one and a small one.
        found.append(_as_traced(graph))
        for axis in axes:
            _cut(graph, axis, found[-1], set())

    def rank(labels: Labels) -> tuple[bool, Cost]:
        one = cost(graph, labels)
        return not one.within(bound), one

    return min(found, key=rank)


def _in_order(graph: Graph, axes: Iterable[str], free: set[Value]) -> Labels:
    """Cut for one axis after the other; a tangent that is cut, or among ``free``, is free."""
    labels, cut = _as_traced(graph), set(free)
    decided: frozenset[str] = frozenset()
    for axis in axes:
        cut |= _cut(graph, axis, labels, cut, decided)
        decided |= {axis}
    return labels


def _again(graph: Graph, axes: Iterable[str], labels: Labels) -> Labels:
    """Cut for each axis anew, what the others cut being free, while that saves any bytes."""
    while True:
        before = cost(graph, labels)
        new = Labels(dict(labels.made), dict(labels.used), dict(labels.steps))
        for axis in axes:
            others = {
                value
                for value in graph.values.values()
                if value.live and new.used[value] - new.made[value] - {axis}
            }
            _cut(graph, axis, new, others, frozenset(axes) - {axis})
        if cost(graph, new) >= before:
            return labels
        labels = new


def _as_traced(graph: Graph) -> Labels:
    made = {value: value.varying for value in graph.values.values()}
    steps = {
        step: frozenset().union(step.needed, *(value.varying for value in step.inputs))
        for step in graph.steps
    }
    return Labels(made, dict(made), steps)


def _cut(
    graph: Graph, axis: str, labels: Labels, free: set[Value], decided: frozenset[str] = frozenset()
) -> set[Value]:
    """Label everything for one axis by a minimum cut; return the tangents that are cast.

    Args:
      graph: the graph.
      axis: the axis.
      labels: they change.
      free: what is cast over another axis, and at no more bytes over this one.
      decided: the axes whose labels hold: what a step sums over one it sums over this one, too.
    """
    net = Network()
    makes = {value: net.node() for value in graph.values.values()}
    uses = {value: net.node() for value in makes}
    for value, made in makes.items():
        net.edge(made, uses[value], _price(value, axis, free))
        net.edge(uses[value], made)
        if axis in value.stays:
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
        if axis in step.moves:
            # Results keep their types; operands are all cast before, or summed by the step.
            stays = step.moves - (decided - labels.steps[step])  # over the others it sums anyway
            count = sum(one for one, over in step.sums if axis in over and over <= stays)
            net.edge(node, net.sink, count * _SCALE + 1)
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
    for residual in graph.residuals.values():
        if axis not in residual.varying:
            cast = net.node()
            net.edge(net.source, cast, residual.cast_bytes * _SCALE)
            for step in residual.steps:
                if not step.fixes(axis):
                    net.edge(cast, nodes[step])
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


def _price(value: Value, axis: str, free: set[Value]) -> int:
    if not value.castable or axis in value.narrow:
        return INFINITE
    # Also where a cotangent is zero: to JAX 0.7 a loop's or a branch's is summed none the less.
    return value.runs if value in free or not value.live else value.cast_bytes * _SCALE + value.runs


def cost(graph: Graph, labels: Labels) -> Cost:
    """Return what the cotangents' psums move under these labels."""

    def sums() -> Iterator[tuple[int, frozenset[str]]]:
        for value in graph.values.values():
            axes = labels.used[value] - labels.made[value]
            if value.live and axes:
                yield value.cast_bytes, axes
        for step in graph.steps:
            yield from step.left(labels.steps[step])
        for residual in graph.residuals.values():
            axes = frozenset().union(*(labels.steps[step] for step in residual.steps))
            if axes - residual.varying:
                yield residual.cast_bytes, axes - residual.varying

    return _total(graph, sums())


def cost_as_traced(graph: Graph) -> Cost:
    """Return what they move where the casts stand now."""
    casts = [
        (value.cast_bytes, made.varying - value.varying) for value, made in graph.casts if made.live
    ]
    return _total(graph, [*casts, *(one for step in graph.steps for one in step.left(frozenset()))])


def cost_unchecked(graph: Graph) -> Cost:
    """Return what is moved with the check off: each input's cotangent over all it can vary over."""
    every = frozenset(graph.door.manual_axes())
    return _total(
        graph, [(one.cast_bytes, every - one.varying) for one in graph.inputs if one.live]
    )


def _total(graph: Graph, sums: Iterable[tuple[int, frozenset[str]]]) -> Cost:
    size_bytes, wire = 0, fractions.Fraction(0)
    for count, axes in sums:
        n = graph.device_count(axes)
        size_bytes += count
        wire += fractions.Fraction(2 * (n - 1) * count, n)
    return Cost(size_bytes, wire)


def _with(axes: frozenset[str], axis: str, varies: bool) -> frozenset[str]:
    return axes | {axis} if varies else axes - {axis}
