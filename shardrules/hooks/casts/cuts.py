"""Bound the labels of a linear program, and choose between two labellings by a minimum cut.

A label is a set of axes. A ``Value`` has two: the axes over which it varies where it is made, and
(keyed by its ``use``) the axes over which it varies where it is used. A ``Step`` has one. A use
that needs fewer axes reads the value before the cast.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator
from typing import Any

from shardrules.hooks.casts.linear import NONE, Axes, Graph, Residual, Step, Value
from shardrules.hooks.casts.mincut import Network

Labels = dict[Any, Axes]

_SCALE = 1 << 40  # the price of a byte, so large that the number of psums only breaks ties


class Limits:
    """The least and the most of each label; raises ValueError if no labels suit the program."""

    def __init__(self, graph: Graph):
        # Start with the bounds that each value and step sets by itself. Then apply the rules until
        # nothing changes: a least label only grows, a most label only shrinks, and both are sets of
        # the mesh's axes, so this ends. Each set of labels that suits the program lies between.
        self.graph = graph
        self.values = list(graph.values.values())
        self.rules = list(self._rules())
        low, high = self._starts()
        self.low, self.high = self._settled(low, grow=True), self._settled(high, grow=False)
        if any(label - high[key] for key, label in low.items()):
            raise ValueError("no casts suit the program")
        # The labels that still have a choice, and the values, steps and rules that depend on them.
        self.free = [key for key, label in low.items() if label != high[key]]
        free = set(self.free)
        self.free_values = [v for v in self.values if v in free or v.use in free]
        self.free_steps = [step for step in graph.steps if step in free]
        self.rules = [rule for rule in self.rules if rule[0] in free and rule[1] in free]
        some = NONE.union(*(high[key] - low[key] for key in self.free))
        # If nothing has to vary over an axis, it is cheapest to cast nothing over it. So consider
        # only the other axes: ``uncounted`` holds the axes of one device, ``groups`` the rest.
        self.uncounted = (some & NONE.union(*low.values())).difference(graph.counted)
        self.groups = self._alike([axis for axis in graph.counted if axis in some])

    @functools.cached_property
    def least_bytes(self) -> int:
        """Return a lower bound on the bytes that any labels sum."""
        # Add up the maximum flows over one group of axes after another. A psum over several axes is
        # paid only once, so each flow can use only the part of a price that earlier flows left
        # over. For a single group, the bound is the cost of the cheapest cut.
        graph = self.graph
        sure: dict[Any, int] = {}  # the bytes that every choice sums
        for value in self.values:
            if value.live and graph.counts(self.low[value.use] - self.high[value]):
                sure[value] = value.cast_bytes
        for step in graph.steps:
            for own, (count, axes) in enumerate(step.sums):
                if graph.counts(axes - (self.high[step] & step.moves)):
                    sure[step, own] = count
        total, left = sum(sure.values()), dict.fromkeys(sure, 0)
        for over in self.groups:
            low = {key: label & over for key, label in self.low.items()}
            high = {key: label & over for key, label in self.high.items()}
            cut = Cut(self, low, high, Prices(graph, over, left=left), of_all=True)
            total += cut.always + cut.net.flow()
            for key, always, edges in cut.paid:
                paid = always + sum(map(cut.net.sent, edges))
                if paid:
                    if key not in left:
                        left[key] = key[0].sums[key[1]][0] if type(key) is tuple else key.cast_bytes
                    left[key] -= paid
        return total

    def mixed(self, labels: Labels, axes: Axes, other: Labels) -> Labels:
        """Return ``labels`` with their part over ``axes`` taken from ``other``."""
        mixed = dict(labels)
        for key in self.free:  # the other labels are equal in both
            mixed[key] = (labels[key] - axes) | (other[key] & axes)
        return mixed

    def below(self, labels: Labels, fixed: Iterable[Any]) -> Labels:
        """Return the most of each label if the ``fixed`` keys keep their ``labels``."""
        most = {**self.high, **{key: labels[key] for key in fixed}}
        return self._settled(most, grow=False)

    def _alike(self, axes: list[str]) -> list[Axes]:
        """Return groups of axes that only occur together: the same choice is best for a group."""
        # For example, a batch that is split over seven axes varies over all of them or over none.
        graph = self.graph
        if len(axes) < 2:
            return [frozenset(axes)] if axes else []
        sets = {*self.low.values(), *self.high.values(), *(over for _, _, over in self.rules)}
        for step in graph.steps:
            sets |= {step.moves, *(axes for _, axes in step.sums)}
        sets.update(residual.varying for residual in graph.residuals.values())
        distinct, groups = list(sets), dict[Any, list[str]]()
        for axis in axes:
            groups.setdefault(tuple(axis in each for each in distinct), []).append(axis)
        return [frozenset(group) for group in groups.values()]

    def _free(self, step: Step) -> Axes:
        return NONE if step.fixed is None else self.graph.every - step.fixed

    def _rules(self) -> Iterator[tuple[Any, Any, Axes]]:
        """Yield (first, then, axes): if ``first`` varies over one of the axes, so does ``then``."""
        for value in self.values:
            yield value, value.use, self.graph.every
            # Where no cast is allowed, a tangent that is used as varying must be made varying.
            yield value.use, value, value.narrow if value.castable else self.graph.every
        for step in self.graph.steps:
            free = self._free(step)
            for value in step.inputs:
                yield step, value if step.ties else value.use, free
                # A use can't be invariant again if the value was varying as traced.
                yield value, step, free if step.ties else free & value.varying
            for value in step.outputs:
                yield step, value, free - step.moves
                yield value, step, free - step.moves

    def _starts(self) -> tuple[Labels, Labels]:
        """Return the least and the most of each label, regarded by itself."""
        keys = [*self.values, *(value.use for value in self.values), *self.graph.steps]
        low, high = dict.fromkeys(keys, NONE), dict.fromkeys(keys, self.graph.every)
        for value in self.values:
            high[value.use] -= value.stays
        for value in self.graph.inputs:
            low[value] = high[value] = value.varying
        for value in self.graph.ends:
            low[value.use] |= value.varying
        for step in self.graph.steps:
            high[step] = self._free(step)
            low[step] = step.needed & high[step]
            fixed = self.graph.every - high[step]
            for value in step.inputs:
                low[value.use] |= value.varying & fixed
            for value in step.outputs:
                low[value] |= value.varying & (fixed | step.moves)
                high[value] &= value.varying | (high[step] - step.moves)
        return low, high

    def _settled(self, labels: Labels, grow: bool) -> Labels:
        """Return labels grown, or shrunk, until all rules hold."""
        rules, changed = self.rules, True
        while changed:
            changed = False
            for first, then, over in rules:
                if grow:
                    key, label = then, labels[then] | (labels[first] & over)
                else:
                    key, label = first, labels[first] - (over - labels[then])
                if label != labels[key]:
                    labels[key], changed = label, True
            rules = rules[::-1]
        return labels


def sent_by_all(graph: Graph, axes: Axes) -> int:
    """Return the bytes that all devices together send in a ring psum for each operand byte."""
    n = graph.device_count(axes)
    return 2 * (n - 1) * (graph.device_count(graph.every) // n)


class Prices:
    """The prices of psums; a psum over none of the ``counted`` axes is free."""

    # By default the price is the operands' bytes, and among equal bytes fewer psums are cheaper.
    # With ``wire`` it is the bytes sent in a ring. ``left`` is for a lower bound: it maps psums to
    # the bytes that earlier flows left unpaid.

    def __init__(self, graph: Graph, counted: Axes, wire: bool = False, left: Any = None):
        self._left = {} if left is None else left
        self._scale, self._tie = (1, 0) if left is not None else (_SCALE, 1)

        @functools.cache
        def factor(axes: Axes) -> int:  # the cost per byte
            axes &= counted
            return sent_by_all(graph, axes) if wire else int(graph.device_count(axes) > 1)

        self._factor = factor

    def of(self, key: Any, size_bytes: int, runs: int, sets: Iterable[Axes]) -> list[int]:
        """Return the price of a psum of that many bytes over each set of axes."""
        size = self._left[key] if key in self._left else size_bytes * self._scale
        factors = map(self._factor, sets)
        return [factor * size + runs * self._tie if factor else 0 for factor in factors]


class Count:
    """Prices that count psums: each run costs one, whatever its bytes and axes."""

    def of(self, key: Any, size_bytes: int, runs: int, sets: Iterable[Axes]) -> list[int]:
        return [runs if axes else 0 for axes in sets]


class Cut:
    """The cheapest choice between two labels, ``low`` and ``high``, for each tangent and step."""

    # Both labellings suit the program, and each label in ``high`` contains the one in ``low``. A
    # label that differs between them is a node: on the source's side of the cut it is low
    # (invariant), on the sink's side it is high (varying). A cut pays for an edge if only the
    # edge's tail is on the source's side. So each psum gets edges that make every choice pay that
    # choice's price. A rule is an edge of infinite capacity, which no finite cut pays for. The
    # minimum cut is then the cheapest choice.

    def __init__(
        self,
        limits: Limits,
        low: Labels,
        high: Labels,
        prices: Prices | Count,
        of_all: bool = False,  # whether to price values and steps without a choice, too
    ):
        self._low, self._high, self._prices = low, high, prices
        self.net = Network()
        self.always = 0  # the price that every choice pays
        # For each tangent, residual, or sum of a step: the price of every choice, and its edges.
        self.paid: list[tuple[Any, int, list[int]]] = []
        nodes = {key: self.net.node() for key in limits.free if low[key] != high[key]}
        self._nodes = nodes
        for value in limits.free_values:
            if of_all or value in nodes or value.use in nodes:
                self._value(value)
        for step in limits.free_steps:
            if of_all or step in nodes:
                self._sums(step)
        for first, then, over in limits.rules:
            if first in nodes and then in nodes and (high[first] & over) - low[then]:
                self.net.edge(nodes[then], nodes[first])
        for residual in limits.graph.residuals.values():
            self._residual(residual)

    def labels(self) -> Labels:
        """Return the cheapest choice; among equals, the one with the latest casts."""
        varies = self.net.sink_side()
        return self._chosen(key for key, node in self._nodes.items() if node in varies)

    def earliest(self) -> Labels:
        """Return the cheapest choice; among equals, the one with the earliest casts."""
        invariant = self.net.source_side()
        return self._chosen(key for key, node in self._nodes.items() if node not in invariant)

    def _chosen(self, keys: Iterable[Any]) -> Labels:
        return {**self._low, **{key: self._high[key] for key in keys}}

    def _pay(self, key: Any, always: int, edges: list[tuple[int, int, int]]) -> None:
        self.always += always
        self.paid.append((key, always, [self.net.edge(*edge) for edge in edges if edge[2] > 0]))

    def _value(self, value: Value) -> None:
        # A cast is over the axes that the use has and the value lacks. Price the four choices: both
        # low; made low and used high (a late cast); made high and used low; both high (no cast
        # here).
        makes, uses = self._nodes.get(value), self._nodes.get(value.use)
        made = self._low[value], self._high[value]
        used = self._low[value.use], self._high[value.use]
        both, late, early, none = self._prices.of(
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
            possible = made[1] <= used[0]  # whether it can be made high and used low
            # The three edges add ``both - least`` if it is made low, ``none - least`` if it is used
            # high, and if both hold, what makes the sum ``late``.
            least = min(both, none, early) if possible else min(both, none)
            edges = [(makes, sink, both - least), (source, uses, none - least)]
            self._pay(value, least, [*edges, (makes, uses, late + least - both - none)])

    def _sums(self, step: Step) -> None:
        node = self._nodes.get(step)
        labels = self._low[step] & step.moves, self._high[step] & step.moves
        for own, (count, axes) in enumerate(step.sums):
            low, high = self._prices.of((step, own), count, 1, [axes - label for label in labels])
            edge = [] if node is None else [(node, self.net.sink, low - high)]
            self._pay((step, own), high, edge)

    def _residual(self, residual: Residual) -> None:
        over = [residual.casts(labels) for labels in (self._low, self._high)]
        low, high = self._prices.of(residual, residual.cast_bytes, 1, over)
        cast = self.net.node()
        self._pay(residual, low, [(self.net.source, cast, high - low)])
        for step in residual.steps:
            if step in self._nodes:
                self.net.edge(cast, self._nodes[step])
