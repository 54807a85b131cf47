"""Cast primals in forward mode, so that a primal varies at least as its tangent does.

A random probe that differs by device (Hutchinson's estimator, a forward gradient) is a varying
tangent of an invariant primal. JAX (0.6 to 0.12) gives tangents the types of their primals wherever
it traces a jaxpr (jit, scan, cond, a custom_jvp). The result was then silently typed as invariant,
or types didn't match. The hooks cast primal and tangents to the join of their types, as if the
primal had been cast before the call of jvp. A gradient taken inside is then each device's own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax

from shardrules.door.jaxprs import widened
from shardrules.door.patching import Patches
from shardrules.door.protocols import JaxTrace
from shardrules.hooks.state import Hooks
from shardrules.registry.axistypes import AxisType


class ForwardHooks(Hooks):
    def install(self, patches: Patches) -> None:
        door = self.door
        patches.attribute(*door.owner("jvp_tracer"), self._jvp_tracer)
        patches.attribute(door.JetTracer, "__init__", self._jet_tracer(door.JetTracer.__init__))

    def _jvp_tracer(self, trace: JaxTrace, primal: Any, tangent: Any) -> Any:
        if self.acts:
            primal, (tangent,) = self._joined(trace, primal, (tangent,))
        return self.door.jvp_tracer(trace, primal, tangent)

    def _jet_tracer(self, init: Callable[..., Any]) -> Any:
        hooks = self

        def __init__(self: Any, trace: JaxTrace, primal: Any, terms: Any) -> None:
            if hooks.acts and isinstance(terms, (list, tuple)):
                primal, terms = hooks._joined(trace, primal, terms)
            init(self, trace, primal, terms)

        return __init__

    def _joined(
        self, trace: JaxTrace, primal: Any, tangents: Sequence[Any]
    ) -> tuple[Any, list[Any]]:
        values = [primal, *tangents]
        types = [self._type(value) for value in values]
        varying = [type_.varying for type_ in types if type_ is not None]
        union = frozenset().union(*varying)
        if types[0] is None or all(union == axes for axes in varying):
            return primal, list(tangents)
        with self.door.set_current_trace(trace.parent_trace):
            primal, *tangents = (
                value if have is None else self.door.cast(value, widened(have, union))
                for value, have in zip(values, types)
            )
        return primal, tangents

    def _type(self, value: Any) -> AxisType | None:
        """Return the axis type of a value; None for a symbolic zero, a ref or a float0."""
        if isinstance(value, self.door.Zero):
            return None
        try:
            aval = self.door.typeof(value)
        except TypeError:  # jet's zeros
            return None
        if not self.door.can_cast(aval) or aval.dtype == jax.dtypes.float0:
            return None
        return self.door.axis_type(aval)
