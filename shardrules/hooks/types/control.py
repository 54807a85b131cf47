"""Cast loops' carries and branches' outputs to the join of their types, under shard_map's check.

JAX requires that a carry has the same type before and after the body, and that all branches have
equal types. If types differ only in their varying axes, the hooks cast the initial carry to the
fixpoint of its type, and each branch's output to the join over all branches. The carry is cast
before the loop, so the psum that transposes this cast is outside of the loop, too.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

from shardrules.door.internals import Door
from shardrules.door.patching import ModuleProxy, Patches
from shardrules.door.protocols import Aval
from shardrules.hooks.state import Hooks, State
from shardrules.jaxprs.rewrite import cast_outputs
from shardrules.registry.axistypes import AxisType


class ControlHooks(Hooks):
    def __init__(self, door: Door, state: State):
        super().__init__(door, state)
        self.tracers = door.body_tracers  # read this now, so that errors come before any patch

    def install(self, patches: Patches) -> None:
        door = self.door
        hooks: dict[str, Any] = {
            # Since JAX 0.8.2.
            "promote_carry": self._promote,
            "merge_branches": self._merge_branches,
            "check_branches": self._check_branches,
            "loop_tracing": ModuleProxy(door.loop_tracing, {"trace_to_jaxpr": self._trace}),
            # Before that.
            "trace_body": functools.partial(self._trace_body, door.trace_body),
            "trace_scan_body": functools.partial(self._trace_body, door.trace_scan_body),
            "promote_carries": self._promote_carries,
            "trace_branches": self._trace_branches,
        }
        for key, hook in hooks.items():
            if getattr(door, key) is not None:
                patches.attribute(*door.owner(key), hook)

    # Loops.

    def _trace(self, fun: Any, in_avals: Any, debug_info: Any, *rest: Any, **kwargs: Any) -> Any:
        """Trace a loop's body with the carry at its fixpoint."""
        traced = self.door.trace_to_jaxpr(fun, in_avals, debug_info, *rest, **kwargs)
        if not (self.door.is_loop_body(debug_info) and self.acts):
            return traced
        operands = in_avals.unpack()[0]
        count = _carry_count(operands.tree, traced[1].tree)

        def again(types: Sequence[AxisType]) -> Any:
            return self.door.trace_to_jaxpr(
                fun, _retyped(self.door, in_avals, types), debug_info, *rest, **kwargs
            )

        types, (jaxpr, out_avals) = self._fixpoint(
            in_avals.vals[:count], traced, lambda traced: traced[1].vals, again
        )
        return self._cast(jaxpr, types), _retyped(self.door, out_avals, types)

    def _trace_body(
        self, trace: Callable[..., Any], fun: Any, in_tree: Any, in_avals: Any, debug_info: Any
    ) -> Any:
        """Do what ``_trace`` does, up to JAX 0.8.1."""
        traced = trace(fun, in_tree, in_avals, debug_info)
        if not (self.door.is_loop_body(debug_info) and self.acts):
            return traced
        count = _carry_count(in_tree, traced[2])

        def again(types: Sequence[AxisType]) -> Any:
            avals = (*map(self.door.with_axis_type, in_avals, types), *in_avals[count:])
            return trace(fun, in_tree, avals, debug_info)

        types, (jaxpr, *others) = self._fixpoint(
            in_avals[:count], traced, lambda traced: traced[0].out_avals, again
        )
        return self._cast(jaxpr, types), *others

    def _fixpoint(
        self,
        carry: Sequence[Any],
        traced: Any,
        results: Callable[..., Any],
        again: Callable[..., Any],
    ) -> tuple[list[AxisType], Any]:
        """Trace a body again until its carry varies as much as its results."""
        # Join the carry's types with the types of the results. If a type grew, trace the body again
        # with the wider carry. This ends, since types only grow and a mesh has few axes. If a leaf
        # can't be joined (it differs in more than varying axes), return the first trace, and leave
        # the error to JAX.
        door, first = self.door, traced
        types = [door.axis_type(aval) for aval in carry]
        while True:
            joined = [_join(door, a, b, carry=True) for a, b in zip(carry, results(traced))]
            if joined == types:
                return types, traced
            types = [have for have in joined if have is not None]
            if len(types) < len(joined):
                return [], first
            carry = [*map(door.with_axis_type, carry, types)]
            traced = again(types)

    def _cast(self, jaxpr: Any, types: Sequence[AxisType]) -> Any:
        have = self.door.axis_types(jaxpr.out_avals)
        return cast_outputs(self.door, jaxpr, [*types, *have[len(types) :]])

    def _promote(self, in_val: Any, in_aval: Aval, out_aval: Aval) -> Any:
        """Cast an initial carry to the type that the body returns."""
        value, changed = self.door.promote_carry(in_val, in_aval, out_aval)
        if not self.acts:
            return value, changed
        joined = _join(self.door, in_aval, out_aval, carry=True)
        if joined is None or joined == self.door.axis_type(in_aval):
            return value, changed
        return self.door.cast(value, joined), True

    def _promote_carries(self, in_vals: Sequence[Any], in_avals: Any, out_avals: Any) -> Any:
        """Do what ``_promote`` does for a whole carry, up to JAX 0.8.1."""
        values, changed = self.door.promote_carries(in_vals, in_avals, out_avals)
        if not self.acts or not len(values) == len(in_avals) == len(out_avals):
            return values, changed
        joined = [_join(self.door, a, b, carry=True) for a, b in zip(in_avals, out_avals)]
        types = [have for have in joined if have is not None]
        if len(types) < len(joined) or types == [*self.door.axis_types(in_avals)]:
            return values, changed
        return [*map(self.door.cast, values, types)], True

    # Branches.

    def _trace_branches(self, *args: Any, **kwargs: Any) -> Any:
        jaxprs, *others = self.door.trace_branches(*args, **kwargs)  # up to JAX 0.8.1
        return self._cast_branches(jaxprs), *others

    def _merge_branches(self, jaxprs: Sequence[Any], all_consts: Any) -> Any:
        return self.door.merge_branches(self._cast_branches(jaxprs), all_consts)

    def _cast_branches(self, jaxprs: Sequence[Any]) -> Any:
        types = _joined(self.door, [jaxpr.out_avals for jaxpr in jaxprs]) if self.acts else None
        if types is None:
            return jaxprs
        return [cast_outputs(self.door, jaxpr, types) for jaxpr in jaxprs]

    def _check_branches(
        self,
        api_name: str,
        name1: str,
        name2: str,
        f1: Any,
        f2: Any,
        out_avals1: Any,
        out_avals2: Any,
    ) -> Any:
        """Compare two branches by the types that they are cast to."""
        outputs = [out_avals1, out_avals2]
        types = _joined(self.door, [each.vals for each in outputs]) if self.acts else None
        if types is not None:
            outputs = [_retyped(self.door, each, types) for each in outputs]
        return self.door.check_branches(api_name, name1, name2, f1, f2, *outputs)


def _carry_count(operands: Any, results: Any) -> int:
    """Return the number of leaves of a carry; 0 if the body returns another pytree."""
    parts = operands.children()
    if len(parts) == 2:
        if len(results.children()) != 2:
            return 0
        results = results.children()[0]
    return parts[0].num_leaves if parts[0] == results else 0


def _retyped(door: Door, avals: Any, types: Sequence[AxisType]) -> Any:
    """Return a FlatTree of avals whose first leaves have these axis types."""
    new = iter([*map(door.with_axis_type, avals.vals, types), *avals.vals[len(types) :]])
    return avals.map(lambda _: next(new))


def _join(door: Door, a: Any, b: Any, carry: bool = False) -> AxisType | None:
    """Return the least type to which two avals can be cast; None if casts can't make them equal."""
    if a == b:
        return door.axis_type(a)
    if not (isinstance(a, door.ShapedArray) and isinstance(b, door.ShapedArray)):
        return None
    first, second = door.axis_type(a), door.axis_type(b)
    if (
        a.shape != b.shape
        or (a.dtype != b.dtype and not (carry and a.weak_type))
        or (first.unreduced, first.reduced) != (second.unreduced, second.reduced)
        or getattr(a, "memory_space", None) != getattr(b, "memory_space", None)
    ):
        return None
    return first.vary(*second.varying)


def _joined(door: Door, branches: Sequence[Sequence[Any]]) -> list[AxisType] | None:
    """Return the join of each output over all branches; None if nothing needs a cast."""
    if len({len(avals) for avals in branches}) != 1:
        return None
    types = []
    for joined, *others in zip(*branches):
        for aval in others:
            wider = _join(door, joined, aval)
            if wider is None:
                return None
            joined = door.with_axis_type(joined, wider)
        types.append(door.axis_type(joined))
    same = all([*door.axis_types(avals)] == types for avals in branches)
    return None if same else types
