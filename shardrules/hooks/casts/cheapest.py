"""The cheapest casts of a linear program: minimum cuts, each over one mesh axis or several.

A tangent is invariant or varying where it is made and where it is used; it costs its bytes, times
the runs of the loops around, if it is used as varying over any axis over which it is made
invariant. Over one axis that is a minimum cut. Casts of one tangent over several axes share one
psum, which no single cut expresses: so cuts over several axes at once move labels to cheaper ones
until none does (``_descend``), and a bound from below says where to stop (``least_bytes``).
"""

from __future__ import annotations

import dataclasses
import fractions
import itertools
from collections.abc import Iterable, Iterator
from typing import Any

from shardrules.hooks.casts.cuts import Cut, Prices
from shardrules.hooks.casts.labels import NONE, Labels, Limits, parts
from shardrules.hooks.casts.linear import Axes, Graph

__all__ = ["Cost", "cheapest", "cost", "cost_as_traced", "cost_unchecked", "least_bytes"]


@dataclasses.dataclass(frozen=True, order=True)
class Cost:
    """What the cotangents' psums move on each device: operand bytes, and by ring algorithms."""

    bytes: int
    wire_bytes: fractions.Fraction

    def within(self, other: Cost) -> bool:
        """Whether it is no more than another, of both."""
        return self.bytes <= other.bytes and self.wire_bytes <= other.wire_bytes


def cheapest(graph: Graph) -> Labels:
    """Return the labels of the fewest bytes.

    The fewest bytes summed are not always the fewest on the wire: of labels that are within what
    JAX's late casts cost, and the check being off, the fewest bytes summed.

    Raises:
      ValueError: if no labels suit the program.
    """
    limits = Limits(graph)
    axes = limits.axes
    if not axes:
        return limits.low
    late, off = cost_as_traced(graph), cost_unchecked(graph)
    bound = Cost(min(late.bytes, off.bytes), min(late.wire_bytes, off.wire_bytes))
    fewest = least_bytes(graph, limits)
    tried: list[Labels] = []
    for labels in _candidates(limits, axes):
        tried.append(labels)
        costs = cost(graph, labels)
        if costs.bytes == fewest and costs.within(bound):
            return labels

    def rank(labels: Labels) -> tuple[bool, Cost]:
        one = cost(graph, labels)
        return not one.within(bound), one

    return min(tried, key=rank)


def _candidates(limits: Limits, axes: list[str]) -> Iterator[Labels]:
    """Yield labels that no move makes cheaper, from several starts; the likeliest come first."""
    graph, every = limits.graph, limits.every
    whole = Prices(graph, every)
    orders = [axes] if len(axes) == 1 else list(itertools.permutations(axes))
    starts: list[Labels] = []
    for order in orders:
        labels, counted = limits.low, NONE
        for axis in order:
            counted |= {axis}
            labels = _cut(limits, labels, frozenset({axis}), Prices(graph, counted))
        starts.append(labels)
        yield labels
    if len(axes) == 1:
        return
    best = min(starts, key=lambda labels: cost(graph, labels))
    for start in (best, limits.low, limits.high):
        yield _descend(limits, start, axes, whole)
    on_the_wire = Prices(graph, every, wire=True)
    for start in (best, limits.low):
        yield _descend(limits, start, axes, on_the_wire)


def _descend(limits: Limits, labels: Labels, axes: list[str], prices: Prices) -> Labels:
    """Move to cheaper labels while a cut over some of the axes finds any."""
    now = _total(limits.graph, labels, prices)
    groups = [
        frozenset(group)
        for count in (len(axes), *range(1, len(axes)))
        for group in itertools.combinations(axes, count)
    ]
    improved = True
    while improved:
        improved = False
        for group in groups:
            for both in (False,) if len(group) == 1 else (False, True):
                new = _cut(limits, labels, group, prices, both)
                then = _total(limits.graph, new, prices)
                if then < now:
                    labels, now, improved = new, then, True
    return labels


def _total(graph: Graph, labels: Labels, prices: Prices) -> int:
    return sum(
        prices.of(None, count, runs, (axes,))[0] for count, axes, runs in _sums(graph, labels)
    )


def _cut(
    limits: Limits, labels: Labels, axes: Axes, prices: Prices, from_here: bool = False
) -> Labels:
    """Choose for each label its least or its most over ``axes``, all of them together.

    Args:
      limits: the least and the most.
      labels: what the labels are over other axes.
      axes: the axes; over one of them this is the best of all choices.
      prices: what is paid.
      from_here: choose between what the labels are and the most, and then the least.
    """
    if from_here:
        above = labels.with_axes(axes, limits.high)
        labels = Cut(limits, labels, above, prices).labels()
        return Cut(limits, labels.with_axes(axes, limits.low), labels, prices).labels()
    low, high = labels.with_axes(axes, limits.low), labels.with_axes(axes, limits.high)
    return Cut(limits, low, high, prices).labels()


def least_bytes(graph: Graph, limits: Limits | None = None) -> int:
    """Return a bound: no labels sum fewer bytes.

    The most that flows over one axis after the other, by what earlier ones left of each price: a
    psum over several axes is paid once. Over a single axis that is what the cheapest cut costs.
    """
    limits = Limits(graph) if limits is None else limits
    sure: dict[Any, int] = {}  # what is summed for any choice
    for value in limits.values:
        if value.live and limits.low.used[value] - limits.high.made[value]:
            sure[value] = value.cast_bytes
    for step in graph.steps:
        for own, (count, axes) in enumerate(step.sums):
            if axes - (limits.high.steps[step] & step.moves):
                sure[step, own] = count
    total, left = sum(sure.values()), dict.fromkeys(sure, 0)
    for axis in limits.axes:
        one = frozenset({axis})
        low, high = (
            Labels(*({key: label & one for key, label in own.items()} for own in parts(labels)))
            for labels in (limits.low, limits.high)
        )
        cut = Cut(limits, low, high, Prices(graph, one, left=left))
        total += cut.always + cut.net.flow()
        for key, always, edges in cut.paid:
            took = always + sum(map(cut.net.sent, edges))
            if took:
                if key not in left:
                    left[key] = key[0].sums[key[1]][0] if type(key) is tuple else key.cast_bytes
                left[key] -= took
    return total


def _sums(graph: Graph, labels: Labels) -> Iterator[tuple[int, Axes, int]]:
    """Yield the bytes, the axes and the runs of each psum under these labels."""
    for value in graph.values.values():
        axes = labels.used[value] - labels.made[value]
        if axes:
            yield (value.cast_bytes if value.live else 0), axes, value.runs
    for step in graph.steps:
        for count, axes in step.left(labels.steps[step]):
            yield count, axes, 1
    for residual in graph.residuals.values():
        over = NONE.union(*(labels.steps[step] for step in residual.steps))
        if over - residual.varying:
            yield residual.cast_bytes, over - residual.varying, 1


def cost(graph: Graph, labels: Labels) -> Cost:
    """Return what the cotangents' psums move under these labels."""
    return _cost(graph, ((count, axes) for count, axes, _ in _sums(graph, labels)))


def cost_as_traced(graph: Graph) -> Cost:
    """Return what they move where the casts stand now."""
    casts = [
        (value.cast_bytes, made.varying - value.varying) for value, made in graph.casts if made.live
    ]
    return _cost(graph, [*casts, *(one for step in graph.steps for one in step.left(NONE))])


def cost_unchecked(graph: Graph) -> Cost:
    """Return what is moved with the check off.

    Each input's cotangent is summed over all that it can vary over; and a psum's transpose is one.
    """
    every = frozenset(graph.door.manual_axes())
    inputs = [(one.cast_bytes, every - one.varying) for one in graph.inputs if one.live]
    sums = [(one.cast_bytes, axes) for one, axes in graph.summed if one.live]
    return _cost(graph, [*inputs, *sums])


def _cost(graph: Graph, sums: Iterable[tuple[int, Axes]]) -> Cost:
    size_bytes, wire = 0, fractions.Fraction(0)
    for count, axes in sums:
        n = graph.device_count(axes)
        if axes:
            size_bytes += count
            wire += fractions.Fraction(2 * (n - 1) * count, n)
    return Cost(size_bytes, wire)
