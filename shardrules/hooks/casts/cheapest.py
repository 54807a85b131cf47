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

from shardrules.hooks.casts.linear import Graph, Step, Value
from shardrules.hooks.casts.mincut import Network

__all__ = ["Cost", "Labels", "cheapest", "cost", "cost_as_traced", "cost_unchecked", "least_bytes"]

Axes = frozenset[str]
_NONE: Axes = frozenset()
_SCALE = 1 << 40  # of two that cost the same bytes, the one with fewer psums


@dataclasses.dataclass(frozen=True, order=True)
class Cost:
    """What the cotangents' psums move on each device: operand bytes, and by ring algorithms."""

    bytes: int
    wire_bytes: fractions.Fraction

    def within(self, other: Cost) -> bool:
        """Whether it is no more than another, of both."""
        return self.bytes <= other.bytes and self.wire_bytes <= other.wire_bytes


@dataclasses.dataclass
class Labels:
    """Over which axes each tangent varies where it is made and where it is used, and each step.

    What is used as less is what stood before the cast.
    """

    made: dict[Value, Axes]
    used: dict[Value, Axes]
    steps: dict[Step, Axes]

    def with_axes(self, axes: Axes, other: Labels) -> Labels:
        """Return these labels, over ``axes`` replaced by another's."""
        mine, others = _parts(self), _parts(other)
        return Labels(
            *(
                {key: (label - axes) | (its[key] & axes) for key, label in own.items()}
                for own, its in zip(mine, others)
            )
        )


def _parts(labels: Labels) -> tuple[dict[Any, Axes], dict[Any, Axes], dict[Any, Axes]]:
    return labels.made, labels.used, labels.steps


def _pairs(low: Labels, high: Labels) -> Iterator[tuple[dict[Any, Axes], dict[Any, Axes]]]:
    return zip(_parts(low), _parts(high))


class Limits:
    """The least and the most that each label can be.

    Raises:
      ValueError: if no labels suit the program.
    """

    def __init__(self, graph: Graph):
        self.every = frozenset(graph.door.manual_axes())
        self.graph = graph
        self.values = list(graph.values.values())
        self.fixed = {s: self.every if s.fixed is None else s.fixed for s in graph.steps}
        # Over these, what is used as varying has to be made so.
        self.stuck = {v: v.narrow if v.castable else self.every for v in self.values}
        self.low = self._least()
        self.high = self._most()
        for low, high in _pairs(self.low, self.high):
            if any(label - high[key] for key, label in low.items()):
                raise ValueError("no casts suit the program")
        # What there is a choice of: tangents, where they are made and used, and steps.
        self.free = [
            [key for key, label in low.items() if label != high[key]]
            for low, high in _pairs(self.low, self.high)
        ]
        self.free[1] = list(dict.fromkeys(self.free[1] + self.free[0]))
        some = _NONE.union(
            *(
                most[k] - axes
                for low, most in _pairs(self.low, self.high)
                for k, axes in low.items()
            )
        )
        self.axes = [axis for axis in graph.door.manual_axes() if axis in some]
        self.rules = list(self._rules())

    def _rules(self) -> Iterator[tuple[tuple[int, Any], tuple[int, Any], Axes]]:
        """Yield which label takes which one's axes, and of which: 0 made, 1 used, 2 a step's."""
        made, used, steps = map(set, self.free)
        for value in self.free[1]:
            if self.stuck[value]:
                yield (1, value), (0, value), self.stuck[value]
        for step in self.free[2]:
            free, me = self.every - self.fixed[step], (2, step)
            for value in step.inputs:
                if value in used:
                    yield me, (0 if step.ties else 1, value), free
                    # What was not invariant as traced can't come back.
                    yield (0, value), me, free if step.ties else free & value.varying
            for value in step.outputs:
                if value in made:
                    yield me, (0, value), free - step.moves
                    yield (0, value), me, free - step.moves

    def _least(self) -> Labels:
        made, used = dict.fromkeys(self.values, _NONE), dict.fromkeys(self.values, _NONE)
        steps = dict.fromkeys(self.graph.steps, _NONE)
        for value in self.graph.inputs:
            made[value] = used[value] = value.varying
        for value in self.graph.ends:
            used[value] |= value.varying
            made[value] |= used[value] & self.stuck[value]
        order, changed = self.graph.steps, True
        while changed:
            changed = False
            for step in order:
                fixed, before = self.fixed[step], steps[step]
                over = before | (step.needed - fixed)
                for value in step.inputs:
                    over |= (made[value] if step.ties else made[value] & value.varying) - fixed
                for value in step.outputs:
                    over |= made[value] - fixed - step.moves
                given = fixed | step.moves
                for value in step.inputs:
                    more = made[value] | (over if step.ties else _NONE)
                    want = used[value] | over | (value.varying & fixed) | more
                    more |= want & self.stuck[value]
                    if want != used[value] or more != made[value]:
                        used[value], made[value], changed = want, more, True
                for value in step.outputs:
                    more = made[value] | (over - given) | (value.varying & given)
                    more |= used[value] & self.stuck[value]
                    if more != made[value]:
                        made[value], changed = more, True
                        used[value] |= more
                if over != before:
                    steps[step], changed = over, True
            order = order[::-1]
        return Labels(made, used, steps)

    def _most(self) -> Labels:
        made = dict.fromkeys(self.values, self.every)
        used = {value: self.every - value.stays for value in self.values}
        steps = {step: self.every - self.fixed[step] for step in self.graph.steps}
        for value in self.graph.inputs:
            made[value] = value.varying
        for step in self.graph.steps:
            given = self.fixed[step] | step.moves
            for value in step.outputs:
                made[value] &= value.varying | (self.every - given)
        order, changed = self.graph.steps, True
        while changed:
            changed = False
            for step in order:
                fixed, over = self.fixed[step], steps[step]
                for value in step.inputs:
                    over &= made[value] if step.ties else used[value]
                for value in step.outputs:
                    over &= made[value] | fixed | step.moves
                free = self.every - fixed - step.moves
                for value in step.inputs:
                    # What was not invariant as traced can't come back.
                    tied = self.every - fixed if step.ties else value.varying - fixed
                    less = made[value] & used[value] & (over | (self.every - tied))
                    some = used[value] & (less | (self.every - self.stuck[value]))
                    if less != made[value] or some != used[value]:
                        made[value], used[value], changed = less, some, True
                for value in step.outputs:
                    less = made[value] & used[value] & (over | (self.every - free))
                    some = used[value] & (less | (self.every - self.stuck[value]))
                    if less != made[value] or some != used[value]:
                        made[value], used[value], changed = less, some, True
                if over != steps[step]:
                    steps[step], changed = over, True
            order = order[::-1]
        return Labels(made, used, steps)


class _Factors(dict[Axes, int]):
    """From the axes of a psum to what it costs for each byte."""

    def __init__(self, graph: Graph, wire: bool):
        super().__init__({_NONE: 0})
        self._graph, self._wire = graph, wire

    def __missing__(self, axes: Axes) -> int:
        count = self._graph.device_count
        every = count(frozenset(self._graph.door.manual_axes()))
        factor = 2 * (count(axes) - 1) * (every // count(axes)) if self._wire else 1
        return self.setdefault(axes, factor)


class Prices:
    """What is paid for a psum over some axes.

    Args:
      graph: the graph.
      counted: the axes that count; a psum over others alone is free.
      wire: whether to count what is sent, and not the operands.
      left: for a bound, the bytes that are still to be paid of some; None for all, and of two that
        cost the same bytes, the one with fewer psums.
    """

    def __init__(self, graph: Graph, counted: Axes, wire: bool = False, left: Any = None):
        self.counted, self.factors = counted, _Factors(graph, wire)
        self.left = {} if left is None else left
        self.scale, self.tie = (1, 0) if left is not None else (_SCALE, 1)

    def of(self, key: Any, size_bytes: int, runs: int, sets: Iterable[Axes]) -> list[int]:
        """Return the price of a psum of that many bytes, over each of these axes."""
        size = self.left[key] if key in self.left else size_bytes * self.scale
        factors = [self.factors[axes & self.counted] for axes in sets]
        return [factor * size + runs * self.tie if factor else 0 for factor in factors]


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
        labels, counted = limits.low, _NONE
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


class Cut:
    """A choice between two labels for each tangent and step, at the least price.

    Args:
      limits: of the graph's labels.
      low: one choice, which suits the program.
      high: the other, which suits it too, and is nowhere less.
      prices: what is paid.

    Attributes:
      always: what is paid for any choice, of what may be chosen at all.
      paid: from a tangent, residual, or sum of a step to what is always paid, and to edges.
    """

    def __init__(self, limits: Limits, low: Labels, high: Labels, prices: Prices):
        self.limits, self.low, self.high, self.prices = limits, low, high, prices
        self.net = Network()
        self.always = 0
        self.paid: list[tuple[Any, int, list[int]]] = []
        self._nodes = [
            {key: self.net.node() for key in free if own[key] != others[key]}
            for free, own, others in zip(limits.free, _parts(low), _parts(high))
        ]
        for value in limits.free[1]:
            self._value(value)
        for step in limits.free[2]:
            self._sums(step)
        for tail, head, over in limits.rules:
            self._rule(tail, head, over)
        self._residuals()

    def labels(self) -> Labels:
        """Return the cheapest choice; of several the one that casts the latest."""
        varies = self.net.sink_side()
        return Labels(
            *(
                {**low, **{key: high[key] for key, node in nodes.items() if node in varies}}
                for low, high, nodes in zip(_parts(self.low), _parts(self.high), self._nodes)
            )
        )

    def _pay(self, key: Any, always: int, edges: list[tuple[int, int, int]]) -> None:
        self.always += always
        self.paid.append((key, always, [self.net.edge(*one) for one in edges if one[2] > 0]))

    def _value(self, value: Value) -> None:
        makes, uses = self._nodes[0].get(value), self._nodes[1].get(value)
        made = self.low.made[value], self.high.made[value]
        used = self.low.used[value], self.high.used[value]
        both, late, early, none = self.prices.of(
            value,
            value.cast_bytes if value.live else 0,
            value.runs,
            (used[0] - made[0], used[1] - made[0], used[0] - made[1], used[1] - made[1]),
        )
        source, sink = self.net.source, self.net.sink
        if makes is None:
            edge = [] if uses is None else [(source, uses, late - both)]
            self._pay(value, both, edge)
        elif uses is None:
            self._pay(value, early, [(makes, sink, both - early)])
        else:
            possible = made[1] <= used[0]  # made as the most, used as the least
            least = min(both, none, early) if possible else min(both, none)
            edges = [(makes, sink, both - least), (source, uses, none - least)]
            self._pay(value, least, [*edges, (makes, uses, late + least - both - none)])
            if not possible:
                self.net.edge(uses, makes)

    def _rule(self, first: tuple[int, Any], then: tuple[int, Any], over: Axes) -> None:
        """Let ``then`` vary over what ``first`` varies over, of these axes."""
        head, tail = self._nodes[first[0]].get(first[1]), self._nodes[then[0]].get(then[1])
        if tail is None or head is None:
            return
        high = _parts(self.high)[first[0]][first[1]]
        if (high & over) - _parts(self.low)[then[0]][then[1]]:
            self.net.edge(tail, head)

    def _sums(self, step: Step) -> None:
        node = self._nodes[2].get(step)
        labels = self.low.steps[step] & step.moves, self.high.steps[step] & step.moves
        for own, (count, axes) in enumerate(step.sums):
            low, high = self.prices.of((step, own), count, 1, [axes - label for label in labels])
            edge = [] if node is None else [(node, self.net.sink, low - high)]
            self._pay((step, own), high, edge)

    def _residuals(self) -> None:
        for residual in self.limits.graph.residuals.values():
            over = [
                _NONE.union(*(labels.steps[step] for step in residual.steps)) - residual.varying
                for labels in (self.low, self.high)
            ]
            low, high = self.prices.of(residual, residual.cast_bytes, 1, over)
            cast = self.net.node()
            self._pay(residual, low, [(self.net.source, cast, high - low)])
            for step in residual.steps:
                if step in self._nodes[2]:
                    self.net.edge(cast, self._nodes[2][step])


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
            Labels(*({key: label & one for key, label in own.items()} for own in _parts(labels)))
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
        over = _NONE.union(*(labels.steps[step] for step in residual.steps))
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
    return _cost(graph, [*casts, *(one for step in graph.steps for one in step.left(_NONE))])


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
