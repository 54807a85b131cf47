"""pallas_call under shard_map's check, where avals carry it: types from rules, at every bind.

Three seams. The kernel tracer is where a kernel's function object and its jaxpr meet, so the rule
that is bound to the object can be found again from the jaxpr, in whatever transformed call it
turns up. ``bind`` casts the inputs (the rewrite). The abstract eval gives the outputs their types
(the check), each time anew: what was true when traced may be too invariant after batching.
"""

from __future__ import annotations

import dataclasses
import functools
import threading
import weakref
from typing import Any, NamedTuple

from shardrules.door.internals import Door
from shardrules.door.patching import Patches
from shardrules.hooks.state import Hooks, State
from shardrules.hooks.types.lowering import Lowering
from shardrules.hooks.types.opaque import (
    Call,
    OpaqueCall,
    check_annotations,
    find_rule,
    prove,
    resolve,
    typed,
    types_of,
)
from shardrules.hooks.types.refs import check_written, written_variables
from shardrules.registry.axistypes import AxisType
from shardrules.registry.binding import Binding, Declared, binding_of
from shardrules.registry.suggestions import module_at

__all__ = ["PallasHooks"]


def _module_of(function: Any) -> str:
    while isinstance(function, functools.partial):
        function = function.func
    return getattr(function, "__module__", None) or ""


class _Traced(NamedTuple):
    """What only the kernel tracer sees: the function's module and rule, what the user wrote."""

    module: str
    binding: Binding | None
    annotations: tuple[AxisType | None, ...]


class _Aliases(tuple):
    """``input_output_aliases`` of an interpreted call with types, which say if the hooks are gone.

    They strip the interpreter's loops of types, which JAX mixes there and then refuses (0.6.0 to
    0.12). JAX reads these aliases first, whether it interprets, evaluates or differentiates.
    """

    hooks: PallasHooks
    name: str

    def __iter__(self):
        self._refuse()
        return super().__iter__()

    def __bool__(self):
        self._refuse()
        return len(self) > 0

    def _refuse(self) -> None:
        if not self.hooks.state.patched and self.hooks.door.checking():
            raise self.hooks.state.outlived(f"pallas_call kernel {self.name!r}")


class _Here(threading.local):
    """What a thread is in the middle of.

    Args:
      noted: for each output as it is converted, the annotation of it, or None.
      outer: the kernel whose bind runs, if one does.
      settled: its jaxpr, its operands' axis types and its outputs'.
    """

    def __init__(self):
        self.noted: list[AxisType | None] = []
        self.outer: OpaqueCall | None = None
        self.settled: tuple[Any, tuple[AxisType, ...], tuple[AxisType, ...]] | None = None


class PallasHooks(Hooks):
    """The hooks of ``pallas_call``."""

    def __init__(self, door: Door, state: State):
        super().__init__(door, state)
        self.lowering = Lowering(door, state)
        # Keyed by the kernel's jaxpr, which is one object through eval, partial eval and dce.
        # What was traced becomes known when it is bound.
        self._kernels: weakref.WeakKeyDictionary[Any, OpaqueCall | _Traced] = (
            weakref.WeakKeyDictionary()
        )
        self._local = _Here()

    def install(self, patches: Patches) -> None:
        """Replace the three seams, and the lowering rule."""
        door = self.door
        self._bind = door.pallas_call_p.bind
        self._abstract_eval = door.pallas_call_p.abstract_eval
        patches.attribute(*door.owner("trace_kernel"), self._tracer(door.trace_kernel))
        patches.attribute(door.pallas_call_p, "bind", self.bind)
        self.lowering.wrap(patches, door.lowerings, door.pallas_call_p, self.kernel_of)
        if door.typed:
            patches.attribute(*door.owner("convert_out_shape"), self._convert_out_shape)
            patches.attribute(door.pallas_call_p, "abstract_eval", self.abstract_eval)

    # Where function object and jaxpr meet.

    def _convert_out_shape(self, out_shape):
        """Take an output without annotation; note the annotation of one that has it."""
        if self.state.active and self.door.checking():
            annotation = self.door.annotation(out_shape)
            self._local.noted.append(annotation)
            if annotation is None:
                with self.door.unchecked():  # it refuses that, and makes it invariant otherwise
                    return self.door.convert_out_shape(out_shape)
        return self.door.convert_out_shape(out_shape)

    def noted(self) -> list[AxisType | None]:
        """Return this thread's list of annotations, one for each output as it is converted."""
        return self._local.noted

    def _tracer(self, trace):
        door = self.door

        @functools.wraps(trace)  # with its signature, which compat checks
        def trace_kernel(fun, *args, **kwargs):
            annotations: tuple[AxisType | None, ...] = ()
            noted = self._local.noted
            if noted:
                # out_shape's leaves were converted just before, in order; older ones are left
                # over from calls that failed in between.
                if any(noted):
                    grid_mapping = args[1]
                    annotations = tuple(noted[len(noted) - grid_mapping.num_outputs :])
                noted.clear()
            body = fun.__wrapped__ if isinstance(fun, Declared) else fun
            if door.traces_kernels_unchecked:
                traced = trace(body, *args, **kwargs)
            else:
                with door.unchecked():
                    traced = trace(body, *args, **kwargs)
            jaxpr, traced = door.kernel_jaxpr(traced)
            self._kernels[jaxpr] = _Traced(_module_of(fun), binding_of(fun), annotations)
            return traced

        return trace_kernel

    # Rewrite and check.

    def known_of(self, primitive: Any, params: dict[str, Any]) -> OpaqueCall | None:
        """Return what is known of an equation's kernel; None for another primitive's."""
        return self.kernel_of(params) if primitive is self.door.pallas_call_p else None

    def kernel_of(self, params: dict[str, Any]) -> OpaqueCall:
        """Return what is known of the kernel of a bind or an equation."""
        jaxpr = params["jaxpr"]
        kernel = self._kernels.get(jaxpr)
        if not isinstance(kernel, OpaqueCall):
            name, place = self.door.describe_kernel(jaxpr, params)
            outer = self._local.outer
            if kernel is not None:
                kernel = OpaqueCall(
                    Call("pallas_call", name, place, kernel.module, kernel.binding),
                    kernel.annotations,
                )
            elif outer is not None and outer.call.name == name:
                # A jaxpr that a transformation made: its name stays, and so does the rule of the
                # bind that is being transformed. Its outputs are others: no annotation carries on.
                kernel = dataclasses.replace(outer, annotations=())
            else:
                kernel = OpaqueCall(Call("pallas_call", name, place, module_at(place)))
            self._kernels[jaxpr] = kernel
        if kernel.scope is None:
            kernel.scope = self.state.scope
        if kernel.found is None:
            kernel.found = find_rule(kernel.call, kernel.scope, self.state)
        if kernel.found is None and kernel.active(self.state):
            prove(kernel, self.state, "pallas_call", params, 0)
        return kernel

    def _acts(self, jaxpr: Any) -> bool:
        """Whether the hooks act on a kernel: here, or because they did when it was bound."""
        if self.state.active:
            return True
        kernel = self._kernels.get(jaxpr)
        return isinstance(kernel, OpaqueCall) and kernel.active(self.state)

    def bind(self, *args, **params):
        """Cast the inputs as the rule says, then bind."""
        jaxpr, local = params["jaxpr"], self._local
        if not self._acts(jaxpr):
            return self._bind(*args, **params)
        first = not isinstance(self._kernels.get(jaxpr), OpaqueCall)
        kernel = self.kernel_of(params)
        before = local.outer, local.settled
        settled = None
        if self.door.checking():
            avals = tuple(map(self.door.typeof, args))
            inputs = types_of(self.door, avals)
            resolution = self._resolve(kernel, inputs, len(params["out_avals"]))
            if first and kernel.annotations:
                check_annotations(kernel, resolution.outputs)
            if inputs != resolution.inputs:
                args = [
                    x
                    if have is want or isinstance(aval, self.door.AbstractRef)
                    else self.door.cast(x, want)
                    for x, aval, have, want in zip(args, avals, inputs, resolution.inputs)
                ]
            # Written into the call too, so that a jaxpr that outlives the hooks keeps its types.
            params["out_avals"] = typed(self.door, kernel, params["out_avals"], resolution.outputs)
            if params["interpret"] is True and any(
                t.axes for t in (*resolution.inputs, *resolution.outputs)
            ):
                aliases = _Aliases(params["input_output_aliases"])
                aliases.hooks, aliases.name = self, kernel.call.name
                params["input_output_aliases"] = aliases
            settled = jaxpr, resolution.inputs, resolution.outputs
        local.outer, local.settled = kernel, settled
        try:
            return self._bind(*args, **params)
        finally:
            local.outer, local.settled = before

    def abstract_eval(self, *avals, **params):
        """Give the outputs the types that the rule says for these operands."""
        outputs, effects = self._abstract_eval(*avals, **params)
        inputs = types_of(self.door, avals)
        local = self._local
        if (
            local.settled is not None
            and local.settled[0] is params["jaxpr"]
            and (local.settled[1] == inputs)
        ):
            kernel, types = local.outer, local.settled[2]
        elif not (self._acts(params["jaxpr"]) and self.door.checking()):
            return outputs, effects
        else:
            kernel = self.kernel_of(params)
            types = self._resolve(kernel, inputs, len(outputs)).outputs
        if params["jaxpr"].constvars:
            self._check_refs(kernel, params["jaxpr"], avals, types)
        return typed(self.door, kernel, outputs, types), effects

    def _check_refs(
        self, kernel: OpaqueCall, jaxpr: Any, avals, types: tuple[AxisType, ...]
    ) -> None:
        """Refuse that what varies goes into a ref that a kernel closes over, and that is narrower.

        A rule speaks for the arrays that a kernel returns, not for what it stores.
        """
        stored = written_variables(self.door, jaxpr)
        varying = frozenset().union(*(one.varying for one in (*types_of(self.door, avals), *types)))
        for variable, ref in zip(jaxpr.constvars, avals):  # these operands come first
            if variable in stored:
                check_written(
                    self.door, f"what {kernel.call} stores", ref, AxisType(varying), stored=False
                )

    def _resolve(self, kernel: OpaqueCall, inputs: tuple[AxisType, ...], output_count: int):
        return resolve(
            self.door,
            self.state,
            kernel.governing(self.state),
            kernel.call,
            kernel.found,
            inputs,
            output_count,
            kernel.audit,
        )
