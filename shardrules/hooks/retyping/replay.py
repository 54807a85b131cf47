"""Run jaxprs on varying values although they were traced with invariant ones.

Libraries trace a function once and run its jaxpr on other values (closure conversion, a linear
solve, an interpreter of jaxprs). JAX's functions cast operands that vary differently, but the
primitives in a jaxpr don't (0.6 to 0.12), and a called jaxpr keeps the types of its trace. So the
hooks cast operands when an equation is bound, and retype a jaxpr for the operands of its call.

If a predicate chooses a value, the value varies as the predicate does, but JAX types it by the
branches or the body alone. So the hooks add the predicate's axes to the results of cond, switch and
while_loop when these are bound.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Sequence
from typing import Any

from shardrules.door.internals import Door
from shardrules.door.jaxprs import (
    CALLS,
    CASTS,
    TO_VARYING,
    gained,
    inner_jaxprs,
    named_axes,
    opened,
    union,
    widened,
)
from shardrules.door.patching import Patches
from shardrules.door.protocols import Aval, Jaxpr, JaxTrace, Params, Primitive, Rest
from shardrules.hooks.retyping.divergent import Divergent
from shardrules.hooks.retyping.higher_order import HigherOrderOp
from shardrules.hooks.retyping.retyping import Retyping
from shardrules.hooks.state import Hooks, State
from shardrules.hooks.types.calls.annotations import note_called, note_cast
from shardrules.hooks.types.funnel import Funnel
from shardrules.hooks.types.refs import DECIDES
from shardrules.hooks.types.type_notes import TypeNoteHooks
from shardrules.jaxprs.walk import gradient_sums
from shardrules.registry.axistypes import AxisType


class ReplayHooks(Hooks):
    def __init__(self, door: Door, state: State):
        super().__init__(door, state)
        self.retyping = state.of(Retyping)
        self.divergent = state.of(Divergent)
        funnel = state.of(Funnel)
        funnel.calls, funnel.refused = self._called, self._refused

    def install(self, patches: Patches) -> None:
        door = self.door
        patches.attribute(door.JaxprEqnContext, "manager", self._managed())
        # Patch it in JAX's own module, and where users import it from.
        for owner in (door.owner("eval_jaxpr")[0], importlib.import_module("jax.core")):
            patches.attribute(owner, "eval_jaxpr", self._evaluator(door.eval_jaxpr))
        primitive = door.custom_vjp_call_p
        if "bind_with_trace" in vars(type(primitive)):  # JAX 0.6.0 has another one in jaxprs
            patches.attribute(
                primitive,
                "get_bind_params",
                functools.partial(self._bind_params, primitive.get_bind_params),
            )
            patches.attribute(
                primitive, "bind", functools.partial(self._bind_custom_vjp, primitive.bind)
            )

    def _called(
        self, rest: Rest, primitive: Primitive, trace: JaxTrace, args: Sequence[Any], params: Params
    ) -> Any:
        """Bind a primitive that calls jaxprs, after fitting the jaxprs to its operands."""
        if not self.acts:
            return rest(primitive, trace, args, params)
        watched = self.state.here.look.gradients is not None
        if watched and any(map(gradient_sums, inner_jaxprs(params))):
            self.state.record_gradient()  # an inner jit took a gradient when it was traced earlier
        fitted = self._fitted(primitive, trace, args, params)
        if fitted is not None:
            types, changes = fitted
            with self.door.set_current_trace(trace):
                args = self.door.cast_arrays(args, types)
                return type(primitive).bind(primitive, *args, **{**params, **changes})
        results = rest(primitive, trace, args, params)
        if self.state.here.body.contradictions:
            # JAX binds some of these primitives with a function instead of a jaxpr; skip them.
            called = opened(params.get(CALLS.get(primitive.name, "")))
            if called is not None:
                note_called(self.state, called, results)
        return results

    def _refused(
        self,
        primitive: Primitive,
        trace: JaxTrace,
        args: Sequence[Any],
        params: Params,
        error: Exception,
    ) -> Any:
        """Bind an equation that JAX rejected, with its operands cast; or raise JAX's error."""
        # Programs that JAX accepts don't come here: they stay the same and lose no time. JAX 0.10
        # has an option that forbids casts by JAX's functions; don't cast under it either.
        door = self.door
        if not self.acts or (door.auto_pcast is not None and not door.auto_pcast.value):
            raise error
        have, named = door.axis_types(map(door.typeof, args)), named_axes(params)
        is_cast = primitive.name in TO_VARYING
        if is_cast:  # JAX rejects it if the value already varies over some of the axes
            axes = named if named & union(have) else frozenset()
        else:
            axes = union(have)
            if primitive.name not in CASTS:  # a collective's operands vary over its axes, too
                axes |= named & frozenset(door.manual_axes())
        with door.set_current_trace(trace):
            cast = door.cast_arrays(args, [widened(own, axes) for own in have])
            if is_cast and axes:
                for x, result in zip(args, cast):
                    note_cast(self.state, x, axes, result)
                return cast if primitive.multiple_results else cast[0]
            if all(new is old for new, old in zip(cast, args)):
                raise error
            try:
                return type(primitive).bind(primitive, *cast, **params)
            except (TypeError, ValueError):
                raise error from None

    def _managed(self) -> Any:
        """Return a property to enter an equation's context, in the current mesh if it has none."""
        # If an equation was traced outside shard_map, JAX (0.6 to 0.12) runs it without a mesh even
        # inside shard_map, and so doesn't follow its types.
        hooks, door, plain = self, self.door, self.door.JaxprEqnContextManager
        full: Any = None  # the last mesh that wasn't empty; most programs have only one

        class Entered(plain):  # type: ignore[valid-type, misc]  # a class of JAX's, looked up here
            def __enter__(self) -> None:
                super().__enter__()
                door.use_abstract_mesh(self.mesh).__enter__()  # __exit__ restores the mesh

        # Every equation comes here. To save a call, don't call JAX's method: the last line does the
        # same.
        def manager(self: Any) -> Any:
            nonlocal full
            mesh = self.cur_abstract_mesh
            if mesh is not full:
                if not mesh.empty:
                    full = mesh
                elif hooks.acts:
                    here = Entered(self)
                    here.mesh = door.abstract_mesh()
                    return here
            return plain(self)

        return property(manager)

    def _evaluator(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def eval_jaxpr(jaxpr: Jaxpr, consts: Sequence[Any], *args: Any, **options: Any) -> Any:
            if self.acts:
                if self.state.here.look.gradients is not None and gradient_sums(jaxpr):
                    self.state.record_gradient()  # a gradient was taken when the jaxpr was traced
                avals = [*map(self.door.typeof, (*consts, *args))]
                inputs = (*jaxpr.constvars, *jaxpr.invars)
                self.retyping.check_gradients(jaxpr, inputs, avals)
            return original(jaxpr, consts, *args, **options)

        return eval_jaxpr

    # Primitives that call jaxprs.

    def _fitted(
        self, primitive: Primitive, trace: JaxTrace, args: Sequence[Any], params: Params
    ) -> Any:
        """Return the types to cast operands to, and changed parameters; None if nothing changes."""
        # First skip the usual case, a jit with operands as traced. Then cast operands to at least
        # the traced types. If a varying predicate decides, reject gradient sums that only some
        # devices would reach. Retype the jaxprs unless the operands now have the traced types.
        avals = [*map(self.door.typeof, args)]
        if primitive.name in CALLS and _as_traced(params.get(CALLS[primitive.name]), avals):
            return None
        op = HigherOrderOp.of(self.retyping, primitive, params, avals)
        if op is None:
            return None
        have = [*self.door.axis_types(avals)]
        arrays = map(self.door.can_cast, avals)
        types = [w if is_array else t for w, t, is_array in zip(op.wanted(have), have, arrays)]
        what, over = self._decides(primitive, avals, params)
        if what is not None:
            jaxprs = params.get("branches") or (params["body_jaxpr"], params["cond_jaxpr"])
            self.divergent.check(trace, over, jaxprs, what)
        fits = what is None and types == op.traced
        retyped = None if fits else op.retyped(types, what)
        if retyped is None:
            return None if types == have else (types, {})
        if what is not None:
            self.state.of(TypeNoteHooks).note(f"{primitive.name}, as {what} varies,", over)
        return retyped.operands, retyped.changes

    def _decides(
        self, primitive: Primitive, avals: Sequence[Aval], params: Params
    ) -> tuple[str | None, frozenset[str]]:
        """Return an equation's varying predicate by name, or None, and the predicate's axes."""
        door = self.door
        if primitive is door.cond_p:
            decides = avals[0]
        elif primitive is door.while_p:
            (decides,) = params["cond_jaxpr"].out_avals
        else:
            return None, frozenset()
        over = door.axis_type(decides).varying
        if not over:
            return None, over
        # Raise now for refs that only some devices would write, before their contents are cast.
        if any(isinstance(aval, door.AbstractRef) for aval in avals):
            primitive.abstract_eval(*avals, **params)
        return DECIDES[primitive.name], over

    # A custom_vjp. Its bwd closes over the primals' types, so it must learn of gained axes.

    def _bind_params(self, original: Callable[..., Any], params: Params) -> Any:
        new = original(params)
        functions = new["subfuns"] if isinstance(new, dict) else new[0]
        fun, fwd, bwd = functions
        types = self.door.axis_types(params["call_jaxpr"].in_avals)
        run = _Replayed(self.retyping, bwd, types)
        functions = type(functions)((fun, fwd, self.door.wrapped(run, bwd)))
        return {**new, "subfuns": functions} if isinstance(new, dict) else (functions, new[1])

    def _bind_custom_vjp(self, bind: Callable[..., Any], *args: Any, **params: Any) -> Any:
        first = 0 if "subfuns" in params else 3
        bwd = (params.get("subfuns") or args)[2]
        run = getattr(bwd, "f", bwd)
        if isinstance(run, _Replayed) and self.acts:
            have = self.door.axis_types(map(self.door.typeof, args[first:]))
            run.axes = gained(have, run.traced)
            # bwd runs for primals that vary over the traced axes and over these.
            types = [
                widened(own, traced.varying | run.axes) for own, traced in zip(have, run.traced)
            ]
            args = (*args[:first], *self.door.cast_arrays(args[first:], types))
        return bind(*args, **params)


class _Replayed:
    """A custom_vjp's bwd as a jaxpr's equation calls it."""

    def __init__(self, retyping: Retyping, bwd: Any, traced: Sequence[AxisType]):
        self.retyping = retyping
        self.bwd = bwd
        self.traced = traced  # the primals' types when the jaxpr was traced
        self.axes: frozenset[str] = frozenset()  # the axes that the primals have gained since
        self.__name__ = retyping.door.function_name(bwd)

    def __call__(self, *args: Any) -> Any:
        return self.retyping.run_bwd(self.bwd, self.axes, False, *args)


def _as_traced(jaxpr: Any, avals: Sequence[Aval]) -> bool:
    """Return whether a jaxpr is called with the avals it was traced with, as in most jits."""
    jaxpr = opened(jaxpr)
    if jaxpr is None or len(jaxpr.invars) != len(avals):
        return False
    for var, aval in zip(jaxpr.invars, avals):  # a loop is faster than ``all``  # noqa: SIM110
        if var.aval is not aval:
            return False
    return True
