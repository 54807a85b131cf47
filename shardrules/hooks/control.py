"""Carries of loops and outputs of branches under shard_map's check: they meet at their join.

JAX asks that a loop's carry has one type before and after the body, and that the branches of a
cond or switch return equal types. A carry that starts from zeros is invariant, and once an opaque
call in the body has a rule, what comes back varies. A cast from invariant to varying is always
sound, so where the types differ in nothing but the axes over which they vary, and only there, the
initial carry is cast to the fixpoint of its type, and each branch to the join of all. The cast
stands before the loop: a gradient's psum for it is then outside the loop too. Programs that JAX
accepts are left as they are.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

from shardrules.axistypes import AxisType
from shardrules.hooks.compat import Jax
from shardrules.hooks.patching import Patches
from shardrules.hooks.state import State

__all__ = ["ControlHooks"]


class ControlHooks:
    """The hooks of ``scan``, ``while_loop``, ``cond`` and ``switch``, and of what is made of them.

    Args:
      jax: the symbols.
      state: registry and scopes.
    """

    def __init__(self, jax: Jax, state: State):
        self.jax = jax
        self.state = state

    def install(self, patches: Patches) -> None:
        """Replace the four functions, where this JAX has them."""
        jax = self.jax
        if not jax.typed or None in (jax.trace_to_jaxpr, jax.promote_carry, jax.merge_branches,
                                     jax.check_branches):
            return
        patches.attribute(*jax.owner("trace_to_jaxpr"), self._trace)
        patches.attribute(*jax.owner("promote_carry"), self._promote)
        patches.attribute(*jax.owner("merge_branches"), self._merge_branches)
        patches.attribute(*jax.owner("check_branches"), self._check_branches)

    @property
    def _acts(self) -> bool:
        return self.state.scope.active and self.jax.checking()

    # Loops.

    def _trace(self, fun, in_avals, debug_info, *rest, **kwargs):
        """Trace a loop's body with the carry at its fixpoint; everything else as JAX does."""
        trace = self.jax.trace_to_jaxpr
        traced = trace(fun, in_avals, debug_info, *rest, **kwargs)
        # scan() and while_loop() trace through a local function of this name (JAX 0.8 to 0.12);
        # their transformations, which call with jaxprs whose types agree already, do not.
        if (sys._getframe(1).f_code.co_name != "_create_jaxpr"
                or debug_info.traced_for == "while_cond" or not self._acts):
            return traced
        count = len(in_avals.unpack()[0].unpack()[0])  # the carry's leaves, which come first
        jaxpr, out_avals = traced
        if not self._same_carry(in_avals, out_avals):
            return traced
        types = [self.jax.axis_type(aval) for aval in in_avals.vals[:count]]
        while True:
            wider = [_join(self.jax, a, b, carry=True)
                     for a, b in zip(in_avals.vals[:count], out_avals.vals)]
            if None in wider:
                return traced
            if wider == types:
                break
            types = wider
            in_avals = _retyped(self.jax, in_avals, types)
            jaxpr, out_avals = trace(fun, in_avals, debug_info, *rest, **kwargs)
        return self._cast_outputs(jaxpr, out_avals, types)

    @staticmethod
    def _same_carry(in_avals, out_avals) -> bool:
        """Whether carry and result are pytrees of one structure; if not, JAX says so better."""
        parts = in_avals.unpack()[0].unpack()
        if len(parts) == 1:  # while_loop: the body takes and returns the carry alone
            return parts[0].tree == out_avals.tree
        results = out_avals.unpack()
        return len(results) == 2 and parts[0].tree == results[0].tree

    def _cast_outputs(self, jaxpr, out_avals, types: Sequence[AxisType]):
        have = [self.jax.axis_type(aval) for aval in out_avals.vals]
        want = [*types, *have[len(types):]]
        if want == have:
            return jaxpr, out_avals
        return self.jax.cast_outputs(jaxpr, want), _retyped(self.jax, out_avals, types)

    def _promote(self, value, in_aval, out_aval):
        """Cast an initial carry to the type that its body was traced to return."""
        value, changed = self.jax.promote_carry(value, in_aval, out_aval)
        if not self._acts:
            return value, changed
        joined = _join(self.jax, in_aval, out_aval, carry=True)
        if joined is None or joined == self.jax.axis_type(in_aval):
            return value, changed
        return self.jax.cast(value, joined), True

    # Branches.

    def _merge_branches(self, jaxprs, all_consts):
        """Cast each branch's outputs to the join over all branches."""
        if self._acts:
            types = _joined(self.jax, [jaxpr.out_avals for jaxpr in jaxprs])
            if types is not None:
                jaxprs = [self.jax.cast_outputs(jaxpr, types) for jaxpr in jaxprs]
        return self.jax.merge_branches(jaxprs, all_consts)

    def _check_branches(self, api_name, name1, name2, f1, f2, out_avals1, out_avals2):
        """Compare two branches as they are now: what was cast was traced with another type."""
        if self._acts:
            types = _joined(self.jax, [out_avals1.vals, out_avals2.vals])
            if types is not None:
                out_avals1, out_avals2 = (
                    _retyped(self.jax, each, types) for each in (out_avals1, out_avals2))
        return self.jax.check_branches(api_name, name1, name2, f1, f2, out_avals1, out_avals2)


def _retyped(jax: Jax, avals: Any, types: Sequence[AxisType]) -> Any:
    """Return a FlatTree of avals, the first of them with these axis types."""
    new = iter([*map(jax.with_axis_type, avals.vals, types), *avals.vals[len(types):]])
    return avals.map(lambda _: next(new))


def _join(jax: Jax, a: Any, b: Any, carry: bool = False) -> AxisType | None:
    """Return the least type to which two avals can be cast; None if they differ in more.

    Args:
      jax: the symbols.
      a: an aval; that of the carry before the body, where ``carry`` is set.
      b: the other aval.
      carry: whether a weak type of ``a`` may give way, as JAX lets it.
    """
    if a == b:
        return jax.axis_type(a)
    if not (isinstance(a, jax.ShapedArray) and isinstance(b, jax.ShapedArray)):
        return None
    first, second = jax.axis_type(a), jax.axis_type(b)
    if (a.shape != b.shape or (a.dtype != b.dtype and not (carry and a.weak_type))
            or (first.unreduced, first.reduced) != (second.unreduced, second.reduced)
            or getattr(a, "memory_space", None) != getattr(b, "memory_space", None)):
        return None
    return first.vary(*second.varying)


def _joined(jax: Jax, branches: Sequence[Sequence[Any]]) -> list[AxisType] | None:
    """Return the join of each output over all branches; None if nothing is to be cast."""
    if len({len(avals) for avals in branches}) != 1:
        return None
    types = []
    for avals in zip(*branches):
        joined = avals[0]
        for aval in avals[1:]:
            one = _join(jax, joined, aval)
            if one is None:
                return None
            joined = jax.with_axis_type(joined, one)
        types.append(jax.axis_type(joined))
    if all(jax.axis_type(aval) == one for avals in branches for aval, one in zip(avals, types)):
        return None
    return types
