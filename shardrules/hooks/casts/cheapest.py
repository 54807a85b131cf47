"""Find the cheapest casts of a linear program by minimum cuts, each over one mesh axis or several.

A tangent is labelled as invariant or varying where it is made and where it is used. If it is made
invariant over some axis and used as varying, it is cast, and the cast costs the tangent's bytes
times the runs of the enclosing loops. Over one axis, the cheapest labels are a minimum cut. Casts
of one tangent over several axes share one psum, and no single cut can express that. So cuts over
several axes at once improve the labels until no cut helps (``_descend``). If the labels reach a
lower bound, the search stops early (``Limits.least_bytes``).
"""

from __future__ import annotations

import dataclasses
import fractions
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence

from shardrules.hooks.casts.cuts import Count, Cut, Labels, Limits, Prices, sent_by_all
from shardrules.hooks.casts.linear import NONE, Axes, Graph, Value


@dataclasses.dataclass(frozen=True, order=True)
class Cost:
    """The bytes of the cotangents' psums on each device: of operands, and as sent in a ring."""

    bytes: int
    wire_bytes: fractions.Fraction

    def within(self, other: Cost) -> bool:
        """Return whether neither figure exceeds the other cost's."""
        return self.bytes <= other.bytes and self.wire_bytes <= other.wire_bytes


def cheapest(limits: Limits, bound: Cost | None = None) -> Labels:
    """Return the labels that sum the fewest bytes; prefer labels within a bound."""
    # Labels that sum the fewest bytes don't always send the fewest. So prefer labels that neither
    # sum nor send more than JAX's late casts do, or than the program with the check off does.
    graph = limits.graph
    if not limits.groups:
        return limits.low
    if bound is None:
        late, off = cost_as_traced(graph), cost_unchecked(graph)
        bound = Cost(min(late.bytes, off.bytes), min(late.wire_bytes, off.wire_bytes))
    tried: list[tuple[bool, Cost, Labels]] = []
    search = _Search(limits)
    for labels in search.candidates():
        costs = cost(graph, labels)
        tried.append((not costs.within(bound), costs, labels))
        # With a single group there is only one candidate.
        if len(limits.groups) > 1 and costs.bytes == limits.least_bytes and costs.within(bound):
            break
    best = min(tried, key=lambda each: each[:2])[2]
    return search.together(search.at_borders(best))


def cast_at(values: Iterable[Value], labels: Labels) -> list[Axes]:
    """Return the axes over which each of these values is cast under these labels."""
    return [labels[value.use] - labels[value] for value in values]


# The limit on one search: the number of labels that all its cuts choose, at about 10 us a label.
_WORK = 300_000


class _Search:
    """A local search by cuts, whose work is polynomial in the number of axes, and bounded."""

    def __init__(self, limits: Limits):
        self.limits = limits
        self._left = _WORK
        self._last: Cut | None = None

    def candidates(self) -> Iterator[Labels]:
        """Yield locally cheapest labels from several starts; the most promising come first."""
        # First cut over one group after another, in several orders; each cut also prices the psums
        # over earlier groups. A single group needs no more than that: its cut is optimal. Otherwise
        # improve the best of these labels, and both extremes, by descent.
        limits, graph, groups = self.limits, self.limits.graph, self.limits.groups
        starts: list[Labels] = []
        for order in _orders(groups):
            labels, counted = limits.low, NONE
            for axes in order:
                counted |= axes
                labels = self._cut(labels, axes, Prices(graph, counted))
            starts.append(labels)
            yield labels
            if self._left < 0:
                break
        if len(groups) == 1:
            return
        best = min(starts, key=lambda labels: cost(graph, labels))
        whole, on_the_wire = Prices(graph, graph.every), Prices(graph, graph.every, wire=True)
        for start in (best, limits.low, limits.high):
            yield self._descend(start, whole)
        for start in (best, limits.low):
            yield self._descend(start, on_the_wire)

    def at_borders(self, labels: Labels) -> Labels:
        """Return labels of the same price that cast at shard_map's inputs, before any reorder."""
        # For this, don't move casts past an author's bwd: the gradient would depend on more proofs,
        # and no psum would get cheaper.
        graph, limits = self.limits.graph, self.limits
        borders = graph.borders
        if not borders:
            return labels
        fixed = [step for step, *_ in graph.customs]
        most = limits.below(labels, fixed) if fixed else limits.high
        casts = NONE.union(*cast_at((value for value in limits.values if value.live), labels))
        chosen, prices = dict.fromkeys([casts, *limits.groups]), Prices(graph, graph.every)
        for axes in chosen:
            cut = self._last  # with one group, the only cut so far: it has the earliest choice, too
            if cut is None or fixed or graph.residuals or len(chosen) > 1:
                self._left -= len(limits.free)
                cut = Cut(limits, labels, limits.mixed(labels, axes, most), prices)
            early = cut.earliest()
            before, after = cast_at(borders, labels), cast_at(borders, early)
            gains = any(graph.counts(new - old) for old, new in zip(before, after))
            if gains and cost(graph, early).within(cost(graph, labels)):
                labels = early
        return labels

    def together(self, labels: Labels) -> Labels:
        """Return labels that cast over uncounted axes where other axes are cast, to save psums."""
        axes = self.limits.uncounted
        return self._cut(labels, axes, Count()) if axes else labels

    def _descend(self, labels: Labels, prices: Prices) -> Labels:
        """Return labels improved until no cut makes them cheaper, or the work limit is reached."""
        # Cut over all axes at once, over each group, over each two groups, and over all groups but
        # one. Keep only labels that are strictly cheaper, so the descent ends.
        groups = self.limits.groups
        every = NONE.union(*groups)
        pairs = (first | second for first, second in itertools.combinations(groups, 2))
        chosen = dict.fromkeys([every, *groups, *pairs, *(every - group for group in groups)])

        def total(labels: Labels) -> int:
            sums = _sums(self.limits.graph, labels)
            return sum(prices.of(None, count, runs, (axes,))[0] for count, axes, runs in sums)

        now, improved = total(labels), True
        while improved:
            improved = False
            for axes in chosen:
                for from_here in (False,) if axes in groups else (False, True):
                    if self._left < 0:
                        return labels
                    new = self._cut(labels, axes, prices, from_here)
                    then = total(new)
                    if then < now:
                        labels, now, improved = new, then, True
        return labels

    def _cut(
        self, labels: Labels, axes: Axes, prices: Prices | Count, from_here: bool = False
    ) -> Labels:
        """Return the cheapest choice between each label's least and most over ``axes``."""
        # Over a single group this is the optimum. With ``from_here``, cut twice: first between the
        # present labels and the most, then between that result and the least.
        limits = self.limits
        self._left -= len(limits.free)
        high = limits.mixed(labels, axes, limits.high)
        if from_here:
            high = Cut(limits, labels, high, prices).labels()
            labels = high
        self._last = Cut(limits, limits.mixed(labels, axes, limits.low), high, prices)
        return self._last.labels()


def _orders(groups: Sequence[Axes]) -> list[tuple[Axes, ...]]:
    """Return each rotation of the groups in both directions; up to three, that is all orders."""
    rotated = [(*groups[i:], *groups[:i]) for i in range(len(groups))]
    return list(dict.fromkeys([*rotated, *(order[::-1] for order in rotated)]))


def _sums(graph: Graph, labels: Labels) -> Iterator[tuple[int, Axes, int]]:
    """Yield the bytes (of all runs), the axes and the runs of each psum under these labels.

    Psums of a custom_vjp and of residuals count as one run.
    """
    for value in graph.values.values():
        axes = labels[value.use] - labels[value]
        if axes:
            yield (value.cast_bytes if value.live else 0), axes, value.runs
    for step, *_ in graph.customs:
        for count, axes in step.left(labels[step]):
            yield count, axes, 1
    for residual in graph.residuals.values():
        if axes := residual.casts(labels):
            yield residual.cast_bytes, axes, 1


def cost(graph: Graph, labels: Labels) -> Cost:
    """Return the cost of the cotangents' psums under these labels."""
    return _cost(graph, ((count, axes) for count, axes, _ in _sums(graph, labels)))


def cost_as_traced(graph: Graph) -> Cost:
    """Return the cost of the cotangents' psums with the casts of the program as traced."""
    sums = [
        (value.cast_bytes, made.varying - value.varying) for value, made in graph.casts if made.live
    ]
    for step, *_ in graph.customs:
        sums += step.left(NONE)
    return _cost(graph, sums)


def cost_unchecked(graph: Graph) -> Cost:
    """Return the cost of the cotangents' psums with the check off."""
    # With the check off, JAX sums each input's cotangent over every manual axis over which the
    # input is invariant, and transposes a psum to a psum.
    inputs = [
        (value.cast_bytes, graph.every - value.varying) for value in graph.inputs if value.live
    ]
    sums = [(value.cast_bytes, axes) for value, axes in graph.summed if value.live]
    return _cost(graph, [*inputs, *sums])


def _cost(graph: Graph, sums: Iterable[tuple[int, Axes]]) -> Cost:
    size_bytes, of_all, every = 0, 0, graph.device_count(graph.every)
    for count, axes in sums:
        if sent := sent_by_all(graph, axes):
            size_bytes += count
            of_all += count * sent
    return Cost(size_bytes, fractions.Fraction(of_all, every))


# Some rules can make even the cheapest casts move more bytes than the program with the check off.
# Each function lifts one such rule from a graph, and returns the rule's reason; empty if the rule
# doesn't apply to the graph.


def _allow_rounding(graph: Graph) -> str:
    values = [value for value in graph.values.values() if value.stays or value.narrow]
    for value in values:
        value.stays = value.narrow = NONE
    return "shares would be rounded before they are summed" if values else ""


def _trust_bwds(graph: Graph) -> str:
    why = graph.barriers()
    graph.settle(graph.most_sums)
    return why


def _open_calls(graph: Graph) -> str:
    places = []
    for step in graph.at.values():
        if step.fixed is None:
            step.fixed = NONE
            places += [graph.line(value) for value in step.outputs if value.live][:1]
    if not places:
        return ""
    what = f"the operation at {places[0]}" if places[0] else "an operation"
    return f"{what} takes whole cotangents (it rounds, is opaque, or iterates)"


def _cast_in_branches(graph: Graph) -> str:
    every = graph.values.values()
    values = [value for value in every if not value.castable and not graph.is_ref(value)]
    for value in values:
        value.castable = True
    return "devices that take different branches can't sum there" if values else ""


def _forget_residuals(graph: Graph) -> str:
    had_residuals = bool(graph.residuals)
    graph.residuals.clear()
    return "a gradient of a gradient also sums over residuals" if had_residuals else ""


_RELAXED: Sequence[Callable[[Graph], str]] = (
    _trust_bwds,  # first: it settles precision, which _allow_rounding clears
    _allow_rounding,
    _open_calls,
    _cast_in_branches,
    _forget_residuals,
)


def exceptions(make: Callable[[], Graph], after: Cost) -> tuple[str, ...]:
    """Return why the casts cost more than the program with the check off; empty if they don't."""
    # Lift each rule alone, then all of them together. The reason is the first rule without which
    # the casts cost no more than with the check off.
    off = cost_unchecked(make())
    if after.within(off):
        return ()
    for rules in (*([rule] for rule in _RELAXED), _RELAXED):
        graph = make()
        reasons = [why for rule in rules if (why := rule(graph))]
        if reasons and _is_within(graph, off):
            return tuple(reasons)
    if _is_within(make(), off, off):
        # Casts as cheap as with the check off exist, but exceed late casts in one figure.
        return ("casts of so few bytes move more than late ones, in operands or on the wire",)
    return ("the cause is not known",)


def in_the_way(make: Callable[[], Graph], least: Cost) -> str:
    """Say which bwd makes casts sum more bytes, and the bytes without it; empty if no bwd does."""
    graph = make()
    if not (why := _trust_bwds(graph)):
        return ""
    try:
        without = cost(graph, cheapest(Limits(graph)))
    except ValueError:  # no labels suit the relaxed graph
        return ""
    fewer = without < least and without.within(least)
    return f"{why}; without that, they would sum {without.bytes:,} B" if fewer else ""


def _is_within(graph: Graph, off: Cost, bound: Cost | None = None) -> bool:
    try:
        return cost(graph, cheapest(Limits(graph), bound)).within(off)
    except ValueError:  # no labels suit the relaxed graph
        return False
