"""pallas_call under shard_map's check, where avals carry it: types from rules, at every bind.

Three seams. The kernel tracer is where a kernel's function object and its jaxpr meet, so the rule
that is bound to the object can be found again from the jaxpr, in whatever transformed call it
turns up. ``bind`` casts the inputs (the rewrite). The abstract eval gives the outputs their types
(the check), each time anew: what was true when traced may be too invariant after batching.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import threading
import weakref
from typing import Any

from shardrules.declare import binding_of
from shardrules.errors import RuleError
from shardrules.hooks.compat import Jax
from shardrules.hooks.lowering import LoweringHooks
from shardrules.hooks.opaque import (
    Call,
    Known,
    check_annotations,
    find_rule,
    prove,
    resolve,
    typed,
    types_of,
)
from shardrules.hooks.patching import Patches
from shardrules.hooks.state import Scope, State
from shardrules.registry import Registration
from shardrules.axistypes import AxisType

__all__ = ["PallasHooks"]


def _module_of(function: Any) -> str:
    while isinstance(function, functools.partial):
        function = function.func
    return getattr(function, "__module__", None) or ""


class PallasHooks:
    """The hooks of ``pallas_call``.

    Args:
      jax: the symbols.
      state: registry and scopes.
      lowering: interprets, and tags what kernels lower to.
    """

    def __init__(self, jax: Jax, state: State, lowering: LoweringHooks):
        self.jax = jax
        self.state = state
        self.lowering = lowering
        # Keyed by the kernel's jaxpr, which is one object through eval, partial eval and dce.
        self._kernels: weakref.WeakKeyDictionary[Any, Known] = weakref.WeakKeyDictionary()
        self._local = threading.local()

    def install(self, patches: Patches) -> None:
        """Replace the three seams, and the lowering rule."""
        jax = self.jax
        self._bind = jax.pallas_call_p.bind
        self._abstract_eval = jax.pallas_call_p.abstract_eval
        # With the signature of JAX's own, which compat checks.
        trace = functools.wraps(jax.trace_kernel)(lambda *a, **k: self._trace_kernel(*a, **k))
        patches.attribute(*jax.owner("trace_kernel"), trace)
        patches.attribute(jax.pallas_call_p, "bind", self.bind)
        self.lowering.wrap(patches, jax.lowerings, jax.pallas_call_p, self.kernel_of)
        if jax.typed:
            patches.attribute(*jax.owner("convert_out_shape"), self._convert_out_shape)
            patches.attribute(jax.pallas_call_p, "abstract_eval", self.abstract_eval)

    # Where function object and jaxpr meet.

    def _convert_out_shape(self, out_shape):
        """Take an output without annotation; note the annotation of one that has it."""
        if self.state.scope.active and self.jax.checking():
            annotation, out_shape = self.jax.annotation(out_shape)
            self._noted().append(annotation)
        return self.jax.convert_out_shape(out_shape)

    def _noted(self) -> list[AxisType | None]:
        if not hasattr(self._local, "noted"):
            self._local.noted = []
        return self._local.noted

    def _trace_kernel(self, fun, *args, **kwargs):
        annotations: tuple[AxisType | None, ...] = ()
        noted = self._noted()
        if noted:
            # out_shape's leaves were converted just before, in order; older ones are left over
            # from calls that failed in between.
            grid_mapping = args[1]
            annotations = tuple(noted[len(noted) - grid_mapping.num_outputs:])
            noted.clear()
        with self.jax.unchecked():  # as JAX itself does, but for 0.6.0
            traced = self.jax.trace_kernel(fun, *args, **kwargs)
        jaxpr, traced = self.jax.kernel_jaxpr(traced)
        name, place = self.jax.describe_kernel(jaxpr, {})
        self._kernels[jaxpr] = Known(
            Call("pallas_call", name, place, _module_of(fun), binding_of(fun)), annotations)
        return traced

    # Rewrite and check.

    def known_of(self, primitive: Any, params: dict[str, Any]) -> Known | None:
        """Return what is known of an equation's kernel; None for another primitive's."""
        return self.kernel_of(params) if primitive is self.jax.pallas_call_p else None

    def kernel_of(self, params: dict[str, Any]) -> Known:
        """Return what is known of the kernel of a bind or an equation."""
        jaxpr = params["jaxpr"]
        kernel = self._kernels.get(jaxpr)
        if kernel is None:
            # A jaxpr that a transformation made: its name stays, and so does the rule of the
            # bind that is being transformed. Its outputs are others, so no annotation carries on.
            kernel = Known(Call("pallas_call", *self.jax.describe_kernel(jaxpr, params)))
            outer = getattr(self._local, "outer", None)
            if outer is not None and outer.call.name == kernel.call.name:
                kernel = dataclasses.replace(outer, annotations=())
            self._kernels[jaxpr] = kernel
        if kernel.scope is None:
            kernel.scope = self.state.scope
            name, _ = self.jax.describe_kernel(jaxpr, params)
            if name != kernel.call.name:
                kernel.call = dataclasses.replace(kernel.call, name=name)
        if kernel.found is None:
            kernel.found = find_rule(kernel.call, kernel.scope, self.state)
        if kernel.active(self.state):
            prove(kernel, self.state, "pallas_call", params, 0)
        return kernel

    def _acts(self, params: dict[str, Any]) -> bool:
        known = self._kernels.get(params["jaxpr"])
        return self.state.scope.active or (known is not None and known.active(self.state))

    def bind(self, *args, **params):
        """Cast the inputs as the rule says, then bind."""
        if not self._acts(params):
            return self._bind(*args, **params)
        first = params["jaxpr"] not in self._kernels or (
            self._kernels[params["jaxpr"]].scope is None)
        kernel = self.kernel_of(params)
        if self.jax.checking():
            avals = [self.jax.typeof(x) for x in args]
            resolution = self._resolve(kernel, avals, len(params["out_avals"]))
            if first:
                check_annotations(kernel, resolution.outputs)
            args = [x if isinstance(aval, self.jax.AbstractRef) else self.jax.cast(x, want)
                    for x, aval, want in zip(args, avals, resolution.inputs)]
            # Written into the call too, so that a jaxpr that outlives the hooks keeps its types.
            params["out_avals"] = typed(self.jax, kernel, params["out_avals"],
                                        resolution.outputs)
        with self._transforming(kernel):
            return self._bind(*args, **params)

    def abstract_eval(self, *avals, **params):
        """Give the outputs the types that the rule says for these operands."""
        outputs, effects = self._abstract_eval(*avals, **params)
        if not (self._acts(params) and self.jax.checking()):
            return outputs, effects
        kernel = self.kernel_of(params)
        resolution = self._resolve(kernel, avals, len(outputs))
        return typed(self.jax, kernel, outputs, resolution.outputs), effects

    def _resolve(self, kernel: Known, avals, output_count: int):
        return resolve(self.jax, self.state, kernel.governing(self.state), kernel.call,
                       kernel.found, types_of(self.jax, avals), output_count, kernel.audit)

    @contextlib.contextmanager
    def _transforming(self, kernel: Known):
        before = getattr(self._local, "outer", None)
        self._local.outer = kernel
        try:
            yield
        finally:
            self._local.outer = before
