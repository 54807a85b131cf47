"""A minimum cut between two labels for each tangent, and what a cut pays."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from shardrules.hooks.casts.labels import Labels, Limits, parts
from shardrules.hooks.casts.linear import NONE, Axes, Graph, Step, Value
from shardrules.hooks.casts.mincut import Network

_SCALE = 1 << 40  # among choices of equal bytes, fewer psums win


class _Factors(dict[Axes, int]):
    """Maps the axes of a psum to its cost per byte."""

    def __init__(self, graph: Graph, wire: bool):
        super().__init__({NONE: 0})
        self._graph, self._wire = graph, wire

    def __missing__(self, axes: Axes) -> int:
        count = self._graph.device_count
        every = count(frozenset(self._graph.door.manual_axes()))
        factor = 2 * (count(axes) - 1) * (every // count(axes)) if self._wire else 1
        return self.setdefault(axes, factor)


class Prices:
    """The prices of psums; a psum over none of the ``counted`` axes is free."""

    # ``wire`` counts the bytes sent in a ring instead of the operands'. ``left`` is for a lower
    # bound: the bytes that are still unpaid. Without it, fewer psums win among equal bytes.

    def __init__(self, graph: Graph, counted: Axes, wire: bool = False, left: Any = None):
        self.counted, self.factors = counted, _Factors(graph, wire)
        self.left = {} if left is None else left
        self.scale, self.tie = (1, 0) if left is not None else (_SCALE, 1)

    def of(self, key: Any, size_bytes: int, runs: int, sets: Iterable[Axes]) -> list[int]:
        """Return the price of a psum of that many bytes over each set of axes."""
        size = self.left[key] if key in self.left else size_bytes * self.scale
        factors = [self.factors[axes & self.counted] for axes in sets]
        return [factor * size + runs * self.tie if factor else 0 for factor in factors]


class Cut:
    """The cheapest choice between two labels, ``low`` and ``high``, for each tangent and step."""

    # Both choices suit the program, and no label of ``high`` is smaller than that of ``low``.

    def __init__(self, limits: Limits, low: Labels, high: Labels, prices: Prices):
        self.limits, self.low, self.high, self.prices = limits, low, high, prices
        self.net = Network()
        self.always = 0  # what every choice pays
        # For each tangent, residual, or sum of a step: what every choice pays, and its edges.
        self.paid: list[tuple[Any, int, list[int]]] = []
        self._nodes = [
            {key: self.net.node() for key in free if own[key] != others[key]}
            for free, own, others in zip(limits.free, parts(low), parts(high))
        ]
        for value in limits.free[1]:
            self._value(value)
        for step in limits.free[2]:
            self._sums(step)
        for tail, head, over in limits.rules:
            self._rule(tail, head, over)
        self._residuals()

    def labels(self) -> Labels:
        """Return the cheapest choice; among equals, the one with the latest casts."""
        varies = self.net.sink_side()
        return Labels(
            *(
                {**low, **{key: high[key] for key, node in nodes.items() if node in varies}}
                for low, high, nodes in zip(parts(self.low), parts(self.high), self._nodes)
            )
        )

    def _pay(self, key: Any, always: int, edges: list[tuple[int, int, int]]) -> None:
        self.always += always
        self.paid.append((key, always, [self.net.edge(*edge) for edge in edges if edge[2] > 0]))

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
        """Make ``then`` vary over those axes in ``over`` that ``first`` varies over."""
        head, tail = self._nodes[first[0]].get(first[1]), self._nodes[then[0]].get(then[1])
        if tail is None or head is None:
            return
        high = parts(self.high)[first[0]][first[1]]
        if (high & over) - parts(self.low)[then[0]][then[1]]:
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
                NONE.union(*(labels.steps[step] for step in residual.steps)) - residual.varying
                for labels in (self.low, self.high)
            ]
            low, high = self.prices.of(residual, residual.cast_bytes, 1, over)
            cast = self.net.node()
            self._pay(residual, low, [(self.net.source, cast, high - low)])
            for step in residual.steps:
                if step in self._nodes[2]:
                    self.net.edge(cast, self._nodes[2][step])
