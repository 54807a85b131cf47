"""Reject gradient sums that only some devices reach, since a varying predicate chose their branch.

A collective waits for all devices of its group. If all branches hold the same collectives, XLA
moves them out of the branches; if not, the program hangs. A user's own collectives in a branch are
left alone: the predicate may be equal on all devices although its type says that it varies.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from shardrules.door.jaxprs import (
    CASTS,
    JOINED,
    KERNELS,
    SUMS,
    is_in,
    is_transposed,
    name_of,
    named_axes,
    opened,
)
from shardrules.door.patching import Patches
from shardrules.door.protocols import Eqn, Jaxpr
from shardrules.errors import AxisError
from shardrules.hooks.frames import BranchFrame
from shardrules.hooks.state import Hooks
from shardrules.jaxprs.walk import Inside, visited
from shardrules.registry.axistypes import show_axes

# Primitives that name mesh axes but wait for no other device.
_LOCAL = CASTS | {"already_summed", "axis_index"}

# Maps an equation to the mesh axes over which it waits for other devices.
_AxesOf = Callable[[Any], frozenset[str]]


class Divergent(Hooks):
    """Rejects sums in which some devices would wait forever."""

    def install(self, patches: Patches) -> None:
        cond = self.door.cond_p
        # When a cond is first differentiated, JAX 0.12 makes and caches a primitive for it, with
        # the transpose rule that cond has at that time. So clear the cache.
        if self.door.vjp_node is not None:
            patches.copied(self.door.vjp_node)
        for table in (self.door.primitive_transposes, self.door.fancy_transposes):
            if table is not None and cond in table:
                patches.entry(table, cond, functools.partial(self._transpose, table[cond]))

    def _transpose(self, rule: Callable[..., Any], *args: Any, **params: Any) -> Any:
        trace = self.door.trace_here.trace
        with BranchFrame(trace, params["branches"]):
            return rule(*args, **params)

    def check(self, trace: Any, over: frozenset[str], jaxprs: Sequence[Any], what: str) -> None:
        """Raise AxisError if devices that decide differently would sum gradients differently."""
        # List the collectives of each branch that wait for devices along ``over``, and compare the
        # lists. All branches must hold the same kinds in the same order. A loop must hold none,
        # since devices run different numbers of steps.
        is_backward = trace is self.state.here.branch.trace
        axes_of = _summed
        if is_backward:
            # If the forward branches held collectives, the transposed branches hold the transposes
            # of these. They look like a bwd's own collectives, so count only sums: the transpose of
            # a psum is a cast, so a sum here comes from a bwd.
            before, asked = map(opened, self.state.here.branch.branches), self._communicated
            if not any(_collectives(branch, over, True, asked) for branch in before):
                axes_of = asked
        collectives = [self._waiting(jaxpr, over, is_backward, axes_of) for jaxpr in jaxprs]
        some = next(filter(None, collectives), None)
        is_loop = "while_loop" in what
        if some is None or (not is_loop and all(_kinds(c) == _kinds(some) for c in collectives)):
            return
        first = _first(some)
        place = self.door.source_line(first.source_info)
        axes = axes_of(first) & over
        does = "sums" if _summed(first) else f"communicates ({name_of(first)})"
        names = ", ".join(map(repr, sorted(axes)))
        apart = ", ".join(map(repr, sorted(over)))
        whose = "a bwd" if is_backward else "a gradient that is taken there"
        if not _summed(first):
            own = "call that function outside of the branches"
        elif is_backward:
            own = (
                "return this device's share from bwd, without that sum (the hooks sum it after the "
                "branches)"
            )
        else:
            own = (
                f"differentiate what varies, shardrules.vary(x, {names}), which gives each device "
                "its own gradient, or take it before"
            )
        raise AxisError(
            f"{what} varies over {show_axes(over)}, so devices along them run different "
            f"{'numbers of steps' if is_loop else 'branches'}, and {whose} {does} over "
            f"{show_axes(axes)}{f' (at {place})' if place else ''}, which not all of them "
            "reach: those that do would wait forever. Make the predicate the same on all "
            f"devices, with jax.lax.pmax over ({apart},), or {own}.",
            axes=axes,
        )

    def _communicated(self, eqn: Eqn) -> frozenset[str]:
        """Return the axes over which a collective, or a kernel by its rule, communicates."""
        opaque = self.state.opaque_call_of(eqn.primitive, eqn.params)
        if opaque is None:
            return frozenset() if eqn.primitive.name in _LOCAL else named_axes(eqn.params)
        rule = None if opaque.registration is None else opaque.registration.rule
        if rule is None or rule.name == "per_device":  # it only reads the device's position
            return frozenset()
        effects = rule.effects(len(eqn.outvars) or 1) or ()
        return frozenset().union(*(effect.axes for effect in effects))

    def _waiting(
        self, jaxpr: Jaxpr, over: frozenset[str], everywhere: bool, axes_of: _AxesOf
    ) -> list[Any]:
        jaxpr = opened(jaxpr)
        if not _collectives(jaxpr, over, everywhere, axes_of):
            return []
        # Ignore sums of unused cotangents, which XLA removes.
        used = self.door.dce_jaxpr(jaxpr, [True] * len(jaxpr.outvars), instantiate=True)[0]
        return _collectives(used, over, everywhere, axes_of)


def _summed(eqn: Eqn) -> frozenset[str]:
    return named_axes(eqn.params) if eqn.primitive.name in SUMS else frozenset()


def _collectives(
    jaxpr: Jaxpr, over: frozenset[str], everywhere: bool, axes_of: _AxesOf
) -> list[Any]:
    """Return (equation, inner lists) of each collective over ``over`` and each call with one."""

    def visit(
        eqn: Eqn, everywhere: bool, inside: Inside[Any, Any]
    ) -> Iterator[tuple[Any, list[Any]]]:
        waits = everywhere or is_transposed(eqn)
        # Skip the transpose of a cast that gives a branch's result the join's type. The inputs were
        # cast before the branch, so the result lacks axes only because a collective that the user
        # wrote in the branch made it. The sum waits for the same devices as that collective.
        if waits and axes_of(eqn) & over and not is_in(eqn, JOINED):
            yield eqn, []
        elif eqn.primitive.name not in KERNELS and any(inner := inside(waits)):
            yield eqn, inner

    return visited(jaxpr, visit, everywhere)


def _kinds(collectives: Sequence[Any]) -> list[Any]:
    """Return a key for each collective; devices can run collectives of equal keys together."""
    kinds: list[Any] = []
    for eqn, inner in collectives:
        if not inner:
            forms = [(var.aval.shape, var.aval.dtype) for var in eqn.invars]
            what = "sum" if _summed(eqn) else (eqn.primitive, str(eqn.params))
            kinds.append((what, named_axes(eqn.params), forms))
        elif eqn.primitive.name in ("scan", "cond"):
            kinds.append((eqn.params.get("length"), [*map(_kinds, inner)]))
        elif eqn.primitive.name == "while":
            kinds.append(eqn)
        else:
            kinds += itertools.chain.from_iterable(map(_kinds, inner))
    return kinds


def _first(collectives: Sequence[Any]) -> Any:
    eqn, inner = collectives[0]
    return _first(next(filter(None, inner))) if inner else eqn
