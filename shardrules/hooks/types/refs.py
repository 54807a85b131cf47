"""Type refs under shard_map's check: reads vary over every axis that a written value varies over.

A ref keeps the type of its first value, and JAX 0.10.2 doesn't compare it with stored values.
``run_state`` can make its refs again from cast values, so there the types grow to their fixpoint.
``jax.new_ref`` can't, so storing a value that varies more than the ref raises.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax

from shardrules.door.internals import Door
from shardrules.door.jaxprs import union
from shardrules.door.patching import Patches
from shardrules.door.protocols import Aval, Jaxpr, JaxTrace, Params, Primitive, Rest
from shardrules.errors import RefError
from shardrules.hooks.state import Hooks
from shardrules.hooks.types.funnel import Law
from shardrules.hooks.types.laws import Row
from shardrules.registry.axistypes import AxisType, show_axes

# Messages' names for the value that decides which code a device runs.
DECIDES = {"cond": "the predicate of a cond or switch", "while": "the condition of a while_loop"}


def written(door: Door, effects: Iterable[Any]) -> set[Any]:
    """Return the positions of the inputs that effects write or add to."""
    return {
        effect.input if hasattr(effect, "input") else effect.input_index
        for effect in effects
        if isinstance(effect, (door.WriteEffect, door.AccumEffect))
    }


def written_variables(door: Door, jaxpr: Jaxpr) -> set[Any]:
    """Return the variables of a jaxpr that it writes or adds to."""
    own = (*jaxpr.constvars, *jaxpr.invars)  # up to JAX 0.9, an effect's input is an index
    return {own[i] if isinstance(i, int) else i for i in written(door, jaxpr.effects)}


def check_written(
    door: Door,
    what: str,
    ref: Any,
    value: AxisType,
    *,
    which: str = "that it is written to",
    stored: bool = True,
) -> None:
    """Raise RefError if ``value`` is stored in a ref that varies less."""
    have = door.axis_type(ref)
    extra = value.varying - have.varying
    if not extra and (not stored or value.unreduced == have.unreduced):
        return
    remedy = (
        "Partial sums go only into a ref of partial sums over the same axes: reduce the value "
        "first with jax.lax.psum."
    )
    if extra:
        names = ", ".join(map(repr, sorted(extra, key=str)))
        remedy = (
            "A ref keeps the type of its first value: make it from one that varies over "
            f"{show_axes(extra)} too, jax.new_ref(shardrules.vary(x, {names}))."
        )
    raise RefError(
        f"{what} is {value}, but the ref {which} (shape {tuple(ref.shape)}) is {have}, and "
        f"reads from it would be typed so too. {remedy}",
        ref=ref,
        have=have,
        value=value,
    )


class RefHooks(Hooks):
    laws = ("ref",)

    def install(self, patches: Patches) -> None:
        patches.attribute(*self.door.owner("trace_run_state"), self._trace_run_state)

    def law(self, primitive: Primitive, row: Row) -> Law:
        door = self.door
        if primitive in (door.swap_p, door.addupdate_p):
            return Law(typed=self._checking_store, cast=self._cast_stored)
        if primitive is door.run_state_p:
            return Law(bind=self._bind_run_state)
        return Law(typed=functools.partial(self._control, primitive.name))

    # Writes.

    def _checking_store(self, evaluate: Callable[..., Any]) -> Callable[..., Any]:
        def abstract_eval(ref: Any, value: Any, *indices: Any, **params: Any) -> Any:
            # Check before JAX 0.12 raises, since run_state needs the RefError to grow its types.
            if self.acts:
                check_written(self.door, "a value", ref, self.door.axis_type(value))
                index = AxisType(union(self.door.axis_types(indices)))
                at = "that it stores to"
                check_written(self.door, "an index", ref, index, which=at, stored=False)
            return evaluate(ref, value, *indices, **params)

        return abstract_eval

    def _cast_stored(
        self, trace: JaxTrace, args: Sequence[Any], avals: Sequence[Aval], params: Params
    ) -> Any:
        """Return operands with the stored value cast to the ref's type, to reduce its cotangent."""
        if not self.acts or len(args) < 2 or not self.door.can_cast(avals[1]):
            return None
        want, have = self.door.axis_type(avals[0]), self.door.axis_type(avals[1])
        if not have.varying < want.varying or have.unreduced:
            return None
        with self.door.set_current_trace(trace):
            return [args[0], self.door.cast(args[1], AxisType(want.varying)), *args[2:]]

    # Writes in a branch or loop body depend on the predicate.

    def _control(self, name: str, evaluate: Callable[..., Any]) -> Callable[..., Any]:
        """Return an abstract eval that raises if a branch or body writes a ref that varies less."""
        which = "that a branch writes" if name == "cond" else "that its body writes"

        def abstract_eval(*avals: Aval, **params: Any) -> Any:
            answer = evaluate(*avals, **params)
            if self.acts:
                predicate = avals[0] if name == "cond" else params["cond_jaxpr"].out_avals[0]
                decides = self.door.axis_type(predicate)
                for at in sorted(written(self.door, answer[1])):
                    ref, what = avals[at], DECIDES[name]
                    check_written(self.door, what, ref, decides, which=which, stored=False)
            return answer

        return abstract_eval

    # run_state can make its refs again, from cast values.

    def _trace_run_state(self, fun: Any, in_tree: Any, in_avals: Any, dbg: Any) -> Any:
        """Trace the body of a run_state with its refs' types at their fixpoint."""
        # A store that doesn't fit ends the trace with a RefError, which names the ref. Widen the
        # ref's type by the missing axes, and trace again. This ends, since types only grow. The
        # trace must not go on after the error: JAX would cache the jaxprs of inner jits under the
        # narrow types. A ref that has these types and can't grow would then use these jaxprs
        # unchecked (a test in tests/hooks/types/test_refs.py).
        trace = self.door.trace_run_state
        if not self.acts:
            return trace(fun, in_tree, in_avals, dbg)
        avals = list(in_avals)
        while True:
            try:
                return trace(fun, in_tree, avals, dbg)
            except RefError as error:
                extra = error.value.varying - error.have.varying
                same = [i for i, aval in enumerate(avals) if aval is error.ref]
                # An inner trace (of a jit or a scan) may hold an equal aval, but not this object.
                same = same or [i for i, aval in enumerate(avals) if aval == error.ref]
                if not extra or not same:
                    raise
                for i in same:
                    avals[i] = self._wider(avals[i], extra)

    def _wider(self, ref: Any, extra: frozenset[str]) -> Any:
        return self.door.with_axis_type(ref, self.door.axis_type(ref).vary(*extra))

    def _bind_run_state(
        self, rest: Rest, primitive: Primitive, trace: JaxTrace, args: Sequence[Any], params: Params
    ) -> Any:
        """Cast the initial values to the grown types of the body's refs."""
        if self.acts and all(params["is_initialized"]):
            jaxpr = params["jaxpr"]
            avals = [variable.aval for variable in jaxpr.invars]
            have = self.door.axis_types(map(self.door.typeof, args))
            traced = self.door.axis_types(avals)
            extra = [own.varying - ref.varying for own, ref in zip(have, traced)]
            with self.door.set_current_trace(trace):
                if any(extra):
                    jaxpr = self._replayed(jaxpr, list(map(self._wider, avals, extra)))
                    avals = [variable.aval for variable in jaxpr.invars]
                args = self.door.cast_arrays(args, self.door.axis_types(avals))
            params = {**params, "jaxpr": jaxpr}
        return rest(primitive, trace, args, params)

    def _replayed(self, jaxpr: Any, avals: list[Any]) -> Any:
        """Return a body's jaxpr, traced again for values that vary more."""

        def body(values: Sequence[Any]) -> None:
            jax.core.eval_jaxpr(jaxpr, (), *values)

        tree = jax.tree_util.tree_structure(avals)
        traced = self._trace_run_state(body, tree, avals, jaxpr.debug_info)
        return traced[0] if isinstance(traced, tuple) else traced  # since JAX 0.12 not a tuple
