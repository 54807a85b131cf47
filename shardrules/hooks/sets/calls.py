"""Opaque calls where the check keeps replication sets: noted here, typed by the tables of rules."""

from __future__ import annotations

import contextlib
from typing import Any

from shardrules.door.patching import Patches
from shardrules.hooks.types.calls.opaque import OpaqueCall
from shardrules.hooks.types.calls.pallas_call import PallasHooks
from shardrules.hooks.types.calls.primitives import PrimitiveHooks


class SetPallasHooks(PallasHooks):
    """Hooks on ``pallas_call``."""

    def install(self, patches: Patches) -> None:
        """Replace what traces a kernel."""
        patches.attribute(*self.door.owner("trace_kernel"), self._tracer(self.door.trace_kernel))


class SetPrimitiveHooks(PrimitiveHooks):
    """Hooks on opaque primitives."""

    def install(self, patches: Patches) -> None:
        """Replace nothing: the funnel records the calls."""

    def bound_in(self, trace: Any):
        """Return a context in which ``bind`` uses ``trace``."""
        if self.door.set_current_trace is None:  # to JAX 0.4.35 the operands say where
            return contextlib.nullcontext()
        return super().bound_in(trace)

    def unchecked(self, known: OpaqueCall, params: dict[str, Any]) -> dict[str, Any]:
        """Return parameters that carry the OpaqueCall: the check reads it outside the scope."""
        return params if known.found is None else self.carrying(known, params)
