"""Users' primitives that are bound under a rule of a scope, and find it after the scope has closed.

Their lowering, differentiation and batching rules run later. An equation can't hold a scope: its
parameters are the user's and go to each of the user's rules. So another primitive is bound in its
place, a carrier. Each of the carrier's rules is the user's own, run under the scope.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import importlib
from typing import Any

from shardrules.door.internals import Door
from shardrules.hooks.state import Scope, State
from shardrules.hooks.types.calls.opaque import OpaqueCall
from shardrules.hooks.types.funnel import Funnel, Law

# Where users register the rules of their primitives.
_TABLES = ("jax.interpreters.ad", "jax.interpreters.batching", "jax.interpreters.partial_eval")


def is_lent(opaque: OpaqueCall) -> bool:
    """Whether a call's rule comes from a scope: ``rules(...)`` or a declared op."""
    registration, scope = opaque.registration, opaque.scope
    if registration is None or scope is None:
        return False
    binding = scope.binding
    return any(registration in overlay.entries for overlay in scope.overlays) or (
        binding is not None
        and (registration.rule, registration.where) == (binding.rule, binding.where)
    )


class ScopedPrimitives:
    """The carriers, one for each primitive and scope."""

    def __init__(self, door: Door, state: State, funnel: Funnel):
        self.door = door
        self.state = state
        self.funnel = funnel
        self._made: dict[Any, Any] = {}

    def bind(self, primitive: Any, scope: Scope, operands: Any, params: dict[str, Any]) -> Any:
        """Bind the carrier of a user's primitive for a scope."""
        carrier = self._carrier(primitive, scope)
        return type(carrier).bind(carrier, *operands, **params)

    def enter(self, scope: Scope):
        """Return a context in which the rules of ``scope`` hold; current observers stay."""
        here = self.state.scope
        return self.state.enter(dataclasses.replace(scope, claims=here.claims, notes=here.notes))

    def _carrier(self, primitive: Any, scope: Scope) -> Any:
        key = (
            primitive,
            tuple(overlay.entries for overlay in scope.overlays),
            scope.binding,
            scope.policy,
            scope.active,
            scope.prove,
        )
        with self.state.lock:
            carrier = self._made.get(key)
            if carrier is None:
                carrier = self._made[key] = copy.copy(primitive)
                carrier.bind = self._scoped(lambda *a, **k: primitive.bind(*a, **k), scope)
                carrier.abstract_eval = self._scoped(
                    lambda *a, **k: primitive.abstract_eval(*a, **k), scope
                )
                opaque_call_of = self._scoped(
                    functools.partial(self.state.opaque_call_of, primitive), scope
                )
                self.funnel.declare(
                    carrier, Law(opaque_call_of=opaque_call_of, tagged=opaque_call_of)
                )
            self._complete(carrier, primitive, scope)
        return carrier

    def _complete(self, carrier: Any, primitive: Any, scope: Scope) -> None:
        """Give a carrier the rules that its primitive has now."""
        for name in _TABLES:
            for table in list(vars(importlib.import_module(name)).values()):
                if isinstance(table, dict) and primitive in table and carrier not in table:
                    table[carrier] = self._scoped(table[primitive], scope)
        for table in (self.door.lowerings, *self.door.platform_lowerings.values()):
            if primitive in table and carrier not in table:
                entry = table[primitive]
                table[carrier] = self.door.lowering_entry(
                    entry, self._scoped(self.door.lowering_rule(entry), scope)
                )

    def _scoped(self, rule: Any, scope: Scope) -> Any:
        @functools.wraps(rule)
        def run(*args, **params):
            with self.enter(scope):
                return rule(*args, **params)

        return run
