"""Find the equations of a bwd that may move data between devices."""

from __future__ import annotations

from collections.abc import Iterator

from shardrules.door.jaxprs import CASTS, named_axes
from shardrules.door.protocols import Jaxpr
from shardrules.hooks.cotangents.origins import rule_of
from shardrules.hooks.state import COLLECT, State
from shardrules.hooks.types.calls.opaque import OpaqueCall
from shardrules.jaxprs.walk import equations
from shardrules.paths import here
from shardrules.registry.axistypes import Effect, show_axes

# Parts of the names of primitives and of rules that sum over mesh axes.
_REDUCTIONS = ("psum", "reduce_scatter")
_REDUCING_RULES = ("all_reduce", "reduce_scatter")


def communicates(
    state: State, jaxpr: Jaxpr, axes: frozenset[str], *, reductions: bool = False
) -> Iterator[str]:
    """Yield a description of each equation that may move data along ``axes``, or may sum."""
    for equation in equations(jaxpr):
        name = equation.primitive.name
        opaque = state.opaque_call_of(equation.primitive, equation.params)
        if opaque is not None:
            yield from _opaque(state, opaque, len(equation.outvars), axes, reductions)
            continue
        over = named_axes(equation.params) & axes
        if not over or name in CASTS or name == "axis_index":
            continue
        if not reductions or any(word in name for word in _REDUCTIONS):
            yield f"{name} over {show_axes(over)}"


def moved_by_kernels(state: State, jaxpr: Jaxpr, axes: frozenset[str]) -> frozenset[str]:
    """Return those of ``axes`` along which opaque calls may move data, according to their rules."""
    calls = []
    for equation in equations(jaxpr):
        opaque = state.opaque_call_of(equation.primitive, equation.params)
        if opaque is not None:
            calls.append((opaque, len(equation.outvars)))
    return frozenset(
        axis
        for axis in axes
        if any(
            rule_of(opaque) is None or any(_opaque(state, opaque, count, frozenset({axis}), False))
            for opaque, count in calls
        )
    )


def declared(state: State, jaxpr: Jaxpr, axes: frozenset[str]) -> str:
    """Say which unproven rule over some axes a jaxpr holds, and how to test it; empty if none."""
    for equation in equations(jaxpr):
        opaque = state.opaque_call_of(equation.primitive, equation.params)
        entry = None if opaque is None else opaque.registration
        if opaque is None or entry is None or entry.status != "declared":
            continue
        if not axes.isdisjoint(entry.rule.named_axes):
            return (
                f"{opaque.call} does, {entry.rule!r} (declared at {here(entry.where)}). If the "
                "kernel does less than that, the rule is wrong, and not the bwd: "
                "shardrules.testing.check_rule(op, mesh, *args, gradients=False) runs the op and "
                "compares its outputs with the rule"
            )
    return ""


def _opaque(
    state: State, opaque: OpaqueCall, output_count: int, axes: frozenset[str], reductions: bool
) -> Iterator[str]:
    rule = rule_of(opaque)
    if rule is None:
        if state.scope.policy != COLLECT:
            yield f"{opaque.call}, which has no rule"
        return
    if reductions and not any(word in rule.name for word in _REDUCING_RULES):
        return
    # A kernel that returns nothing (a core_map) writes to refs, which one effect describes.
    for effect in rule.effects(output_count or 1) or (Effect("unknown"),):
        if effect.kind in ("unknown", "typed"):
            yield f"{opaque.call}, whose rule {rule!r} does not say what it communicates"
        elif set(effect.axes) & axes:
            yield f"{opaque.call}, whose rule is {rule!r}"
