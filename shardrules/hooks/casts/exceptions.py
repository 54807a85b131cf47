"""Why the cheapest casts of a program may move more than the check off would."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from shardrules.hooks.casts.cheapest import Cost, cheapest, cost, cost_unchecked
from shardrules.hooks.casts.linear import NONE, Graph


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
            places += [value.at for value in step.outputs if value.live][:1]
    if not places:
        return ""
    what = f"the operation at {places[0]}" if places[0] else "an operation"
    return f"{what} takes whole cotangents (opaque, or a solve that iterates)"


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
    """Return the rules that cost bytes beyond those of the check off; empty if none does."""
    # Each rule is lifted alone, then all of them together.
    off = cost_unchecked(make())
    if after.within(off):
        return ()
    for rules in (*([rule] for rule in _RELAXED), _RELAXED):
        graph = make()
        reasons = [why for rule in rules if (why := rule(graph))]
        if reasons and _is_within(graph, off):
            return tuple(reasons)
    return ("unknown",)


def _is_within(graph: Graph, off: Cost) -> bool:
    try:
        return cost(graph, cheapest(graph)).within(off)
    except ValueError:  # no labels suit the relaxed graph
        return False
