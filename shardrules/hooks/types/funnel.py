"""Handle every primitive's types, casts and tags in one place, JAX's primitives and users'.

Types come from one data descriptor, ``Primitive.abstract_eval``; casts and OpaqueCalls from one
wrapper of ``Primitive.bind_with_trace``; tags from one wrapper of the function that lowers an
equation. A row of the table in ``laws.py`` says which law a primitive obeys.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any

from shardrules.door.internals import Door
from shardrules.door.jaxprs import inner_jaxprs
from shardrules.door.patching import Patches
from shardrules.door.protocols import Aval, JaxTrace, Params, Primitive, Rest
from shardrules.hooks.state import Hooks, State
from shardrules.hooks.types.calls.lowering import lower as lower_opaque
from shardrules.hooks.types.laws import DEFAULT, HIJAX, ROWS, USERS, Row
from shardrules.hooks.types.owners import is_users


@dataclasses.dataclass(frozen=True)
class Law:
    """How one primitive is typed, cast, bound and tagged; None leaves that to JAX."""

    # maps the primitive's own abstract eval to one that returns our types
    typed: Callable[..., Any] | None = None
    # maps ``(trace, args, avals, params)`` to the cast operands, or to None if no cast is needed;
    # called only under the check
    cast: Callable[..., Any] | None = None
    # called as ``bind(rest, primitive, trace, args, params)`` instead of JAX's function; ``rest``
    # binds its arguments as JAX does
    bind: Callable[..., Any] | None = None
    always: bool = False  # whether to call ``bind`` even if the check is off
    # maps an equation's parameters to its opaque call
    opaque_call_of: Callable[[dict[str, Any]], Any] | None = None
    # the same for an equation that is lowered, whose custom call gets the tag
    tagged: Callable[[dict[str, Any]], Any] | None = None


class _Evaluations(dict[Any, Any]):
    """Each primitive's abstract eval under its law, made when JAX first asks for it."""

    def __init__(self, original: Any, law_of: Callable[[Any], Law]):
        super().__init__()
        self._original = original  # the class's own method, which raises for a missing rule
        self._law_of = law_of

    def __missing__(self, primitive: Primitive) -> Any:
        own = primitive.__dict__.get("abstract_eval")
        if own is None:
            return self._original.__get__(primitive)
        typed = self._law_of(primitive).typed
        self[primitive] = own if typed is None else typed(own)
        return self[primitive]

    def descriptor(self) -> property:
        """Return the data descriptor; its getter is in C, so reading it costs no Python frame."""
        return property(self.__getitem__, self._define, self._delete)

    def _define(self, primitive: Primitive, evaluate: Any) -> None:
        self.pop(primitive, None)
        primitive.__dict__["abstract_eval"] = evaluate

    def _delete(self, primitive: Primitive) -> None:
        self.pop(primitive, None)
        del primitive.__dict__["abstract_eval"]


def _raise(
    primitive: Primitive, trace: JaxTrace, args: Sequence[Any], params: Params, error: Exception
) -> None:
    raise error


class Funnel(Hooks):
    """The three functions of JAX that every primitive passes through."""

    # calls: like ``Law.bind``, for primitives that call jaxprs.
    # refused: called with ``(primitive, trace, args, params, error)`` if JAX rejects a bind.

    def __init__(self, door: Door, state: State):
        super().__init__(door, state)
        self.calls: Callable[..., Any] | None = None
        self.refused: Callable[..., Any] = _raise
        # This keeps primitives alive, as JAX's tables of rules do anyway.
        self.row = functools.cache(self._row)
        self._laws: dict[Any, Law] = {}
        self._declared: dict[Any, Law] = {}
        self._bound: dict[Any, tuple[Any, Any, bool]] = {}
        self._tagged: dict[Any, Any] = {}
        state.opaque_call_of = self.opaque_call_of

    def install(self, patches: Patches) -> None:
        self._laws.clear()
        self._bound.clear()
        self._tagged.clear()
        kind = self.door.Primitive
        for owner in (kind, self.door.HiPrimitive):
            if owner is not None:
                evaluations = _Evaluations(vars(owner)["abstract_eval"], self.law_of)
                patches.attribute(owner, "abstract_eval", evaluations.descriptor())
        patches.attribute(kind, "bind_with_trace", self._binder(kind.bind_with_trace))
        patches.attribute(
            *self.door.owner("lower_per_platform"), self._lower(self.door.lower_per_platform)
        )

    # The table.

    def law_of(self, primitive: Primitive) -> Law:
        law = self._laws.get(primitive) or self._declared.get(primitive)
        if law is None:
            row = self.row(primitive)
            judge = self.state.judge(row.law)
            law = self._laws[primitive] = Law() if judge is None else judge.law(primitive, row)
        return law

    def _row(self, primitive: Primitive) -> Row:
        if is_users(self.door, primitive):
            return USERS
        # pallas_call is a hijax primitive without a class of its own (JAX 0.8 to 0.10).
        is_hijax = isinstance(primitive, self.door.HiPrimitive or ())
        if is_hijax and type(primitive) is not self.door.HiPrimitive:
            return HIJAX
        return ROWS.get(primitive.name, HIJAX if is_hijax else DEFAULT)

    def declare(self, primitive: Primitive, law: Law) -> None:
        self._declared[primitive] = law

    def opaque_call_of(self, primitive: Primitive, params: Params) -> Any:
        """Return the OpaqueCall of an equation, or None."""
        opaque_call_of = self.law_of(primitive).opaque_call_of
        return None if opaque_call_of is None else opaque_call_of(params)

    # Binding.

    def _binder(self, original: Callable[..., Any]) -> Callable[..., Any]:
        # Every equation that JAX traces comes here, even in kernels, where the check is off. So the
        # cheap tests come first. There is a function for each signature of ``bind_with_trace``,
        # since passing on arbitrary arguments would take twice as long as everything else here.
        # Cast the operands first, then bind by the primitive's law or as JAX does. If JAX rejects
        # the equation, ``refused`` may cast its operands and try again.
        funnel, bound = self, self._bound
        check: Any = getattr(self.door, "check_vma", None)  # up to JAX 0.5.3 no law reads it
        typeof, at_once = self.door.typeof, self.door.binds_by_processing

        def by_avals(
            self: Primitive,
            trace: JaxTrace,
            args: Sequence[Any],
            avals: Sequence[Aval],
            params: Params,
            /,
        ) -> Any:  # JAX 0.9 to 0.12
            try:
                cast, bind, always = bound[self]
            except KeyError:
                cast, bind, always = funnel._meet(self, params, rest)
            if cast is not None and check.value:
                changed = cast(trace, args, avals, params)
                if changed is not None:
                    args, avals = changed, [*map(typeof, changed)]
            if bind is not None and (always or check.value):
                return bind(self, trace, args, params)
            try:
                if at_once and not trace.requires_low:
                    return trace.process_primitive(self, args, params)
                return original(self, trace, args, avals, params)
            except (TypeError, ValueError) as error:
                return funnel.refused(self, trace, args, params, error)

        def by_args(
            self: Primitive, trace: JaxTrace, args: Sequence[Any], params: Params
        ) -> Any:  # up to JAX 0.8
            try:
                cast, bind, always = bound[self]
            except KeyError:
                cast, bind, always = funnel._meet(self, params, rest)
            if cast is not None and check.value:
                changed = cast(trace, args, [*map(typeof, args)], params)
                args = args if changed is None else changed
            if bind is not None and (always or check.value):
                return bind(self, trace, args, params)
            return rest(self, trace, args, params)

        takes_avals = "avals" in inspect.signature(original).parameters

        def rest(primitive: Primitive, trace: JaxTrace, args: Sequence[Any], params: Params) -> Any:
            try:
                if at_once and not trace.requires_low:
                    return trace.process_primitive(primitive, args, params)
                if takes_avals:
                    return original(primitive, trace, args, [*map(typeof, args)], params)
                return original(primitive, trace, args, params)
            except (TypeError, ValueError) as error:
                return funnel.refused(primitive, trace, args, params, error)

        return by_avals if takes_avals else by_args

    def _meet(self, primitive: Primitive, params: Params, rest: Rest) -> Any:
        """Return how to bind a primitive; called once for each, at its first equation."""
        law = self.law_of(primitive)
        calls = law.opaque_call_of is None and next(inner_jaxprs(params), None) is not None
        bind = None
        if self.calls is not None and calls:
            bind = rest = functools.partial(self.calls, rest)
        if law.bind is not None:
            bind = functools.partial(law.bind, rest)
        self._bound[primitive] = law.cast, bind, law.always
        return self._bound[primitive]

    # Lowering.

    def _lower(self, original: Callable[..., Any]) -> Callable[..., Any]:
        here, tagged_by = self.state.here, self._tagged

        @functools.wraps(original)
        def lower(
            ctx: Any,
            description: Any,
            platform_rules: Any,
            default_rule: Any,
            effects: Any,
            *operands: Any,
            **params: Any,
        ) -> Any:
            primitive, rules = ctx.primitive, (description, platform_rules, default_rule, effects)
            if primitive not in tagged_by:  # JAX also lowers things that are not primitives
                is_one = isinstance(primitive, self.door.Primitive)
                tagged_by[primitive] = self.law_of(primitive).tagged if is_one else None
            tagged = tagged_by[primitive]
            # pallas_call's own rule calls this function again to choose a platform.
            opaque = None if tagged is None or here.lowering is ctx else tagged(params)
            if opaque is None or not opaque.active(self.state):
                return original(ctx, *rules, *operands, **params)

            def rule(ctx: Any, *operands: Any, **params: Any) -> Any:
                before, here.lowering = here.lowering, ctx
                try:
                    return original(ctx, *rules, *operands, **params)
                finally:
                    here.lowering = before

            return lower_opaque(self.door, self.state, rule, opaque, ctx, *operands, **params)

        return lower
