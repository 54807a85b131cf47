"""Type pallas_call under shard_map's check by rules, at every bind, if avals carry axis types.

Only the kernel tracer sees both a kernel's function object and its jaxpr. The hooks record the pair
there: in every transformed call, the jaxpr then leads to the rule that is bound to the function.
Types are computed again at each bind, since the traced types may be too invariant after batching.
"""

from __future__ import annotations

import dataclasses
import functools
import weakref
from collections.abc import Callable, Sequence
from typing import Any

from shardrules.door.internals import Door
from shardrules.door.jaxprs import kernel_name, only_touches_refs, union
from shardrules.door.patching import Patches, TellingTuple
from shardrules.door.protocols import Aval, Jaxpr, JaxTrace, Params, Primitive, Rest
from shardrules.hooks.frames import KernelFrame
from shardrules.hooks.state import Hooks, State
from shardrules.hooks.types.calls.annotations import check_annotations, note_results
from shardrules.hooks.types.calls.opaque import (
    Call,
    OpaqueCall,
    Results,
    check_declaration,
    is_doubtful,
    prove,
    resolve,
    typed,
)
from shardrules.hooks.types.funnel import Law
from shardrules.hooks.types.laws import Row
from shardrules.hooks.types.owners import module_of
from shardrules.hooks.types.refs import check_written, written_variables
from shardrules.paths import module_at
from shardrules.registry.axistypes import AxisType, Resolution
from shardrules.registry.binding import Declared, binding_of


@dataclasses.dataclass(slots=True)
class Plan:
    """How a call is bound."""

    # for each operand, the type to cast it to, or None; None if no operand needs a cast
    casts: Sequence[AxisType | None] | None
    params: dict[str, Any]  # its parameters, with its outputs' types


def planned(
    door: Door,
    kernel: OpaqueCall,
    inputs: tuple[AxisType, ...],
    resolution: Resolution,
    params: dict[str, Any],
    refuse: Callable[[str], None],
) -> Plan:
    """Return the plan of a kernel's call, from its operands' types and its rule's answer."""
    casts = None
    if inputs != resolution.inputs:
        types = zip(inputs, resolution.inputs)
        casts = [None if have is want else want for have, want in types]
    # Write the types into the call, so that a jaxpr that outlives the hooks keeps them.
    out_avals = Results(typed(door, kernel, params["out_avals"], resolution.outputs))
    out_avals.opaque, out_avals.resolution = kernel, resolution
    params = {**params, "out_avals": out_avals}
    types_of_all = (*resolution.inputs, *resolution.outputs)
    if params["interpret"] is True and any(t.axes for t in types_of_all):
        aliases = TellingTuple(params["input_output_aliases"])
        aliases.refuse = functools.partial(refuse, kernel.call.name)
        params["input_output_aliases"] = aliases
    return Plan(casts, params)


class PallasHooks(Hooks):
    laws = ("pallas_call",)

    def __init__(self, door: Door, state: State):
        super().__init__(door, state)
        # Keyed by the kernel's jaxpr, which stays the same object through eval, partial eval and
        # dce. A traced kernel gets its name when it is bound.
        self._kernels: weakref.WeakKeyDictionary[Any, OpaqueCall] = weakref.WeakKeyDictionary()

    def install(self, patches: Patches) -> None:
        door = self.door
        patches.attribute(*door.owner("trace_kernel"), self._tracer(door.trace_kernel))
        if door.convert_out_shape is not None:
            patches.attribute(*door.owner("convert_out_shape"), self._convert_out_shape)

    def law(self, primitive: Primitive, row: Row) -> Law:
        return Law(
            typed=self._typed,
            bind=self._bind,
            always=True,
            opaque_call_of=self.kernel_of,
            tagged=self.kernel_of,
        )

    # Where the function object and the jaxpr meet.

    def _convert_out_shape(self, out_shape: Any) -> Any:
        """Return an output's aval, and record its annotation; accept an output without one."""
        if self.state.active and self.door.checking():
            annotation = self.door.annotation(out_shape)
            self.state.here.annotations.append(annotation)
            if annotation is None:
                with self.door.unchecked():  # with the check on, JAX rejects it
                    return self.door.convert_out_shape(out_shape)
        return self.door.convert_out_shape(out_shape)

    def _tracer(self, trace: Callable[..., Any]) -> Callable[..., Any]:
        door = self.door

        @functools.wraps(trace)  # with its signature, which compat checks
        def trace_kernel(fun: Any, *args: Any, **kwargs: Any) -> Any:
            annotations: tuple[AxisType | None, ...] = ()
            noted = self.state.here.annotations
            if noted:
                # JAX has just converted out_shape's leaves, in order. Any entries before theirs are
                # left over from calls that failed.
                if any(noted):
                    grid_mapping = args[1]
                    annotations = tuple(noted[len(noted) - grid_mapping.num_outputs :])
                noted.clear()
            body = fun.__wrapped__ if isinstance(fun, Declared) else fun
            with door.unchecked():  # JAX 0.6.2 and newer do so themselves
                traced = trace(body, *args, **kwargs)
            jaxpr, traced = door.kernel_jaxpr(traced)
            call = Call("pallas_call", "", "", module_of(fun), binding_of(fun))
            self._kernels[jaxpr] = OpaqueCall(call, annotations)
            return traced

        return trace_kernel

    # Rewrite and check.

    def kernel_of(self, params: Params, known: OpaqueCall | None = None) -> OpaqueCall:
        """Return a call's kernel, with its name, scope and rule."""
        kernel = known or self._kernels.get(params["jaxpr"])
        if kernel is None or not kernel.call.name:
            name, place = kernel_name(params)
            outer = self.state.here.kernel
            if kernel is not None:
                kernel.call = kernel.call._replace(name=name, place=place)
            elif outer.primitive is self.door.pallas_call_p and outer.call.call.name == name:
                # A transformation made this jaxpr. Give it the name and the rule of the bind that
                # is being transformed, but not the annotations, since its outputs differ.
                kernel = dataclasses.replace(outer.call, annotations=())
            else:
                kernel = OpaqueCall(Call("pallas_call", name, place, module_at(place)))
            self._kernels[params["jaxpr"]] = kernel
        if kernel.scope is None or kernel.registration is None:
            kernel.settle(self.state)
        if kernel.registration is None and kernel.active(self.state):
            prove(kernel, self.state, "pallas_call", params, 0)
        return kernel

    def _bind(
        self, rest: Rest, primitive: Primitive, trace: JaxTrace, args: Sequence[Any], params: Params
    ) -> Any:
        jaxpr = params["jaxpr"]
        known = self._kernels.get(jaxpr)
        if not (self.state.active or self._acts(known)):
            return rest(primitive, trace, args, params)
        first = known is None or known.scope is None
        kernel = self.kernel_of(params, known)
        inputs = None
        if self.door.checking():
            inputs = self.door.axis_types(tuple(map(self.door.typeof, args)))
        if is_doubtful(kernel, self.state) or (first and not only_touches_refs(jaxpr)):
            varying = None if inputs is None else union(inputs)
            check_declaration(kernel, self.state, "pallas_call", params, 0, varying)
        if inputs is not None:
            count = len(params["out_avals"])
            resolution = resolve(self.door, self.state, kernel, inputs, count)
            if first and kernel.annotations:
                check_annotations(self.door, self.state, kernel, resolution.outputs)
            plan = planned(self.door, kernel, inputs, resolution, params, self._refuse)
            params = plan.params
            if plan.casts is not None:
                args = self.door.cast_bound(trace, args, plan.casts)
        around = self.state.here.kernel
        frame = KernelFrame(primitive, kernel, around.annotations, around.checked)
        with frame:
            results = rest(primitive, trace, args, params)
        if kernel.contradictions:
            note_results(self.state, kernel, results)
        return results

    def _refuse(self, name: str) -> None:
        """Raise if a typed kernel is interpreted after the hooks were uninstalled."""
        if not self.state.patched and self.door.checking():
            raise self.state.outlived(f"pallas_call kernel {name!r}")

    def _typed(self, evaluate: Callable[..., Any]) -> Callable[..., Any]:
        def abstract_eval(*avals: Aval, **params: Any) -> Any:
            outputs, effects = evaluate(*avals, **params)
            if not self.door.checking():
                return outputs, effects
            inputs, written = self.door.axis_types(avals), params["out_avals"]
            jaxpr = params["jaxpr"]
            if type(written) is Results and written.resolution.inputs == inputs:
                kernel, resolution = written.opaque, written.resolution  # the bind has set them
            else:  # retyping a jaxpr calls this without a bind
                known = self._kernels.get(jaxpr)
                if not self._acts(known):
                    return outputs, effects
                kernel = self.kernel_of(params, known)
                resolution = resolve(self.door, self.state, kernel, inputs, len(outputs))
            if jaxpr.constvars:
                self._check_refs(kernel, jaxpr, avals, resolution.outputs)
            return typed(self.door, kernel, outputs, resolution.outputs), effects

        return abstract_eval

    def _acts(self, kernel: OpaqueCall | None) -> bool:
        """Return whether the hooks act on a kernel, now or when it was first bound."""
        return self.state.active or (kernel is not None and kernel.active(self.state))

    def _check_refs(
        self, kernel: OpaqueCall, jaxpr: Jaxpr, avals: Sequence[Aval], types: tuple[AxisType, ...]
    ) -> None:
        """Raise if a kernel may store varying data into a closed-over ref that varies less."""
        # A rule types the arrays that a kernel returns, but not what it stores in refs.
        stored = written_variables(self.door, jaxpr)
        varying = union((*self.door.axis_types(avals), *types))
        for variable, ref in zip(jaxpr.constvars, avals):  # these operands come first
            if variable in stored:
                check_written(
                    self.door, f"what {kernel.call} stores", ref, AxisType(varying), stored=False
                )
