"""Type opaque primitives other than pallas_call: FFI calls, callbacks, raw Mosaic, users' own.

JAX types the results of these primitives as invariant, whatever the operands are (0.8.3 to 0.12 for
``ffi_call``). With the hooks, the bind casts the operands, and the abstract eval returns the types
by the rule.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import importlib
import itertools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from shardrules.door.internals import Door
from shardrules.door.jaxprs import union
from shardrules.door.patching import Patches
from shardrules.door.protocols import Aval, JaxTrace, Params, Primitive, Rest
from shardrules.errors import CotangentError
from shardrules.hooks.frames import KernelFrame
from shardrules.hooks.state import COLLECT, Hooks, Scope, State
from shardrules.hooks.types.calls.annotations import check_annotations
from shardrules.hooks.types.calls.opaque import Call, OpaqueCall, Results, resolve, typed
from shardrules.hooks.types.funnel import Funnel, Law
from shardrules.hooks.types.laws import USERS, Row
from shardrules.registry.axistypes import AxisType
from shardrules.registry.binding import binding_of


class _CallKind(NamedTuple):
    """How to read one primitive's parameters."""

    function: str = ""  # the parameter that holds the kernel's function, or empty
    results: str = ""  # the parameter that holds its result avals, or empty

    def read(self, params: Params) -> tuple[Any, tuple[str, ...]]:
        """Return the kernel's function, or None, and the names to look up."""
        function = params.get(self.function)
        function = getattr(function, "callback_func", function)  # JAX wraps a callback
        names = [params.get(key) for key in ("kernel_name", "target_name", "name")]
        # An exported program may hold any kernel or collective. jax-triton keeps the function in
        # ``fn``.
        names.append(getattr(params.get("exported"), "fun_name", None))
        names.append(getattr(getattr(function, "fn", function), "__name__", None))
        return function, tuple(name for name in names if isinstance(name, str) and name)


# JAX's own primitives, by name; every other one is a user's.
_KINDS = {
    "ffi_call": _CallKind("", "result_avals"),
    **dict.fromkeys(
        ("pure_callback", "io_callback", "buffer_callback"), _CallKind("callback", "result_avals")
    ),
    "call_exported": _CallKind(),
    "tpu_custom_call": _CallKind("", "out_avals"),
}
_USERS = _CallKind("fn")

# The modules in whose tables users register the rules of their primitives.
_TABLES = ("jax.interpreters.ad", "jax.interpreters.batching", "jax.interpreters.partial_eval")


def _is_lent(opaque: OpaqueCall) -> bool:
    """Return whether a call's rule comes from a scope: ``rules(...)`` or a declared op."""
    registration, scope = opaque.registration, opaque.scope
    if registration is None or scope is None:
        return False
    binding = scope.binding
    return any(registration in overlay.entries for overlay in scope.overlays) or (
        binding is not None
        and (registration.rule, registration.where) == (binding.rule, binding.where)
    )


class PrimitiveHooks(Hooks):
    laws = ("opaque",)

    def __init__(self, door: Door, state: State):
        super().__init__(door, state)
        self._kinds: dict[Any, _CallKind] = {}
        self._carriers: dict[Any, Any] = {}  # keyed by primitive and scope

    def install(self, patches: Patches) -> None:
        if self.door.result_avals is not None:  # since JAX 0.6
            patches.attribute(*self.door.owner("result_avals"), self._result_avals)
            patches.attribute(*self.door.owner("transpose_of"), self._transpose_of)

    def law(self, primitive: Primitive, row: Row) -> Law:
        self._kinds[primitive] = _USERS if row is USERS else _KINDS[primitive.name]
        opaque_call_of = functools.partial(self.opaque_call, primitive)
        return Law(
            typed=functools.partial(self._typed, primitive),
            bind=self._bind,
            always=True,
            opaque_call_of=opaque_call_of,
            tagged=opaque_call_of,
        )

    def _transpose_of(self, p: Any) -> Any:
        rule = self.door.transpose_of(p)
        if self._kinds.get(p) is not _USERS:
            return rule
        return functools.partial(self._transpose, rule, p.name)

    def _transpose(
        self, rule: Callable[..., Any], name: str, cotangents: Any, *args: Any, **params: Any
    ) -> Any:
        """Transpose a user's primitive; raise if an invariant operand gets a varying cotangent."""
        # JAX up to 0.7.2 mistakes each device's cotangent for the total. Since 0.8.3 it raises, but
        # the error names neither the primitive nor the axes.
        cotangents_out = rule(cotangents, *args, **params)
        if self.door.checking() and isinstance(cotangents_out, (list, tuple)):
            for i, (ct, x) in enumerate(zip(cotangents_out, args)):
                if not (isinstance(x, self.door.UndefinedPrimal) and hasattr(ct, "dtype")):
                    continue
                have = self.door.axis_type(self.door.typeof(ct))
                want = self.door.cotangent_type(x.aval)
                axes = have.varying - want.axes
                if axes:
                    over = ", ".join(map(repr, sorted(axes)))
                    raise CotangentError(
                        f"the transpose rule of {name!r} returns a cotangent for operand {i} "
                        f"that is {have}, for a primal that needs {want}. If it is this "
                        f"device's share, return jax.lax.psum(ct, ({over},)) from it, or cast "
                        f"the operand before: shardrules.vary(x, {over}), as a rule for "
                        f"{name!r} does (shardrules.register({name!r}, "
                        "shardrules.no_communication), if it doesn't communicate).",
                        axes=axes,
                        have=have,
                        want=want,
                    )
        return cotangents_out

    # The OpaqueCall of a call.

    def carrying(self, opaque: OpaqueCall, params: Params) -> dict[str, Any]:
        kind = self._kinds.get(opaque.call.target)
        if kind is None or kind.results not in params:
            return params
        results = Results(params[kind.results])
        results.opaque = opaque
        return {**params, kind.results: results}

    def _result_avals(self, results: Any) -> Any:
        """Return result avals; accept annotated results, on which JAX 0.8.3 to 0.12 fail."""
        annotations = tuple(map(self.door.annotation, results)) if self.state.active else ()
        if not any(annotations):
            return self.door.result_avals(results)
        plain = [
            result if annotation is None else self.door.unannotated(result)
            for result, annotation in zip(results, annotations)
        ]
        annotated = Results(self.door.result_avals(plain))
        annotated.annotations = annotations
        return annotated

    def opaque_call(self, primitive: Primitive, params: Params) -> OpaqueCall:
        kind = self._kinds.get(primitive, _USERS)
        results = params.get(kind.results)
        if isinstance(results, Results) and results.opaque is not None:
            bound: OpaqueCall = results.opaque
            return bound
        function, names = kind.read(params)
        names = (*names, primitive.name)
        outer = self.state.here.kernel
        if outer.primitive is primitive and outer.call.call.name == names[0]:
            same: OpaqueCall = dataclasses.replace(outer.call, annotations=())
            return same
        place = self.door.function_place(function)
        module = getattr(function, "__module__", None) or ""
        call = Call(
            primitive.name, names[0], place, module, binding_of(function), primitive, names[1:]
        )
        opaque = OpaqueCall(call, getattr(results, "annotations", ()))
        opaque.settle(self.state)
        return opaque

    # Rewrite and check.

    def _bind(
        self, rest: Rest, primitive: Primitive, trace: JaxTrace, args: Sequence[Any], params: Params
    ) -> Any:
        opaque, kind = self.opaque_call(primitive, params), self._kinds[primitive]
        if not opaque.active(self.state):
            return rest(primitive, trace, args, params)
        results = params.get(kind.results)
        if self.door.checking() and (results is None or len(results)):
            args, params = self._ruled(kind, opaque, primitive, trace, args, params)
        elif isinstance(results, Results) and results.opaque is None:
            params = {**params, kind.results: tuple(results)}
        else:
            params = self.unchecked(opaque, params)
        around = self.state.here.kernel
        frame = KernelFrame(primitive, opaque, around.annotations, around.checked)
        with frame:
            if kind is _USERS and opaque.scope is not None and _is_lent(opaque):
                # Up to JAX 0.4.35 the operands determine the trace.
                enter = self.door.set_current_trace or contextlib.nullcontext
                carrier = self._carrier(primitive, opaque.scope)
                with enter(trace):
                    return type(carrier).bind(carrier, *args, **params)
            return rest(primitive, trace, args, params)

    def unchecked(self, opaque: OpaqueCall, params: Params) -> dict[str, Any]:
        """Return the parameters of a call whose avals carry no types."""
        return params

    def _ruled(
        self,
        kind: _CallKind,
        opaque: OpaqueCall,
        primitive: Primitive,
        trace: JaxTrace,
        args: Sequence[Any],
        params: Params,
    ) -> Any:
        results = params.get(kind.results)
        avals = [self.door.typeof(x) for x in args]
        may_answer = self._may_answer(opaque)
        if may_answer and opaque.governing(self.state).policy == COLLECT:
            # A trace that only collects calls goes on as if the rule and its casts existed.
            with self.door.unchecked():
                own = vars(primitive)["abstract_eval"](*avals, **params)[0]
            may_answer = self._is_wide(avals, own if primitive.multiple_results else (own,))
        if may_answer:
            return args, params
        count = 1 if results is None else len(results)
        if results is None and primitive.multiple_results:
            plain = [self.door.with_axis_type(aval, AxisType()) for aval in avals]
            with self.door.unchecked():
                count = len(vars(primitive)["abstract_eval"](*plain, **params)[0])
        resolution = resolve(self.door, self.state, opaque, self.door.axis_types(avals), count)
        if getattr(results, "opaque", None) is None:
            check_annotations(self.door, self.state, opaque, resolution.outputs)
        args = self.door.cast_bound(trace, args, resolution.inputs)
        if results is not None:
            written = Results(typed(self.door, opaque, results, resolution.outputs))
            written.opaque, written.resolution = opaque, resolution
            params = {**params, kind.results: written}
        return args, params

    def _typed(self, primitive: Primitive, evaluate: Callable[..., Any]) -> Callable[..., Any]:
        def abstract_eval(*avals: Aval, **params: Any) -> Any:
            answer = evaluate(*avals, **params)
            if not (isinstance(answer, tuple) and len(answer) == 2):
                return answer  # leave the mismatch to JAX
            outputs, effects = answer
            if isinstance(outputs, Results):  # callbacks return this parameter; JAX maps over it
                outputs = tuple(outputs)
            several = primitive.multiple_results
            if not self.door.checking() or isinstance(outputs, (tuple, list)) != several:
                return outputs, effects
            opaque = self.opaque_call(primitive, params)
            listed = tuple(outputs) if several else (outputs,)
            if listed and opaque.active(self.state):
                if not (self._may_answer(opaque) and self._is_wide(avals, listed)):
                    inputs = self.door.axis_types(avals)
                    results = params.get(self._kinds[primitive].results)
                    resolution = results.resolution if type(results) is Results else None
                    if resolution is None or resolution.inputs != inputs:
                        resolution = resolve(self.door, self.state, opaque, inputs, len(listed))
                    listed = typed(self.door, opaque, listed, resolution.outputs)
            return (listed if several else listed[0]), effects

        return abstract_eval

    def _is_wide(self, avals: Sequence[Aval], outputs: Any) -> bool:
        """Return whether results vary at least over every axis that an operand varies over."""
        types = self.door.axis_types(outputs)
        axes = union(self.door.axis_types(avals))
        return all(axes <= axis_type.varying for axis_type in types) and any(
            axis_type.axes for axis_type in types
        )

    def _may_answer(self, opaque: OpaqueCall) -> bool:
        """Return whether a call may keep its own abstract eval's types if they are wide enough."""
        # A user's primitive may handle axis types; it then casts its own inputs.
        if opaque.registration is not None or self._kinds.get(opaque.call.target) is not _USERS:
            return False
        return opaque.governing(self.state).policy in ("error", COLLECT)

    # Carriers. If a user's primitive is bound under a rule of a scope, its lowering,
    # differentiation and batching run later, when the scope has closed. Its equation can't hold the
    # scope, since the parameters are the user's. So we bind another primitive in its place, a
    # carrier, which runs the user's own rules under the scope. Only the primitive reaches all
    # readers of an equation: shard_map's check up to JAX 0.5.3 (``_check_rep``) sees just the
    # primitive and parameters, and JAX's interpreter of kernels (``pallas/hlo_interpreter.py``)
    # ignores the equation's context.

    def _carrier(self, primitive: Primitive, scope: Scope) -> Any:
        overlays = tuple(overlay.entries for overlay in scope.overlays)
        key = (primitive, overlays, scope.binding, scope.policy, scope.active, scope.prove)
        with self.state.lock:
            carrier: Any = self._carriers.get(key)  # its attributes hide the class's methods
            if carrier is None:
                carrier = self._carriers[key] = copy.copy(primitive)
                carrier.bind = self._scoped(lambda *a, **k: primitive.bind(*a, **k), scope)
                carrier.abstract_eval = self._scoped(
                    lambda *a, **k: primitive.abstract_eval(*a, **k), scope
                )
                call_of = functools.partial(self.state.opaque_call_of, primitive)
                call_of = self._scoped(call_of, scope)
                law = Law(opaque_call_of=call_of, tagged=call_of)
                self.state.of(Funnel).declare(carrier, law)
            self._complete(carrier, primitive, scope)
        return carrier

    def _complete(self, carrier: Any, primitive: Primitive, scope: Scope) -> None:
        # Copy each rule of the primitive that JAX's tables hold by now. A user may register more
        # rules later, so this runs at each bind.
        modules = (vars(importlib.import_module(name)) for name in _TABLES)
        tables = itertools.chain(*(list(module.values()) for module in modules))
        for table in [*tables, self.door.fancy_transposes]:
            if isinstance(table, dict) and primitive in table and carrier not in table:
                table[carrier] = self._scoped(table[primitive], scope)
        for table in (self.door.lowerings, *self.door.platform_lowerings.values()):
            if primitive in table and carrier not in table:
                entry = table[primitive]
                rule = self._scoped(self.door.lowering_rule(entry), scope)
                table[carrier] = self.door.lowering_entry(entry, rule)

    def _scoped(self, rule: Any, scope: Scope) -> Any:
        @functools.wraps(rule)
        def run(*args: Any, **params: Any) -> Any:
            here = self.state.scope  # keep the current observers
            lent = dataclasses.replace(scope, claims=here.claims, notes=here.notes)
            with self.state.enter(lent):
                return rule(*args, **params)

        return run
