"""Type kernels on a mesh of cores under shard_map's check: pl.kernel, plgpu.kernel, core_map.

``mpmd_map`` takes arrays and refs and returns arrays. ``core_map`` takes only refs, and becomes an
``mpmd_map`` when refs are discharged. A written ref counts as an output, after the arrays, in the
order of the operands.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import weakref
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from shardrules.door.internals import Door
from shardrules.door.jaxprs import kernel_name, only_touches_refs, opened, union
from shardrules.door.patching import ModuleProxy, Patches
from shardrules.door.places import PALLAS, PALLAS_GPU_CORE
from shardrules.door.protocols import Aval, ClosedJaxpr, Jaxpr, JaxTrace, Params, Primitive, Rest
from shardrules.errors import RegistrationError
from shardrules.hooks.state import Hooks, State
from shardrules.hooks.types.calls.annotations import check_annotations, note_results
from shardrules.hooks.types.calls.opaque import (
    Call,
    OpaqueCall,
    check_declaration,
    is_doubtful,
    prove,
    resolve,
    typed,
)
from shardrules.hooks.types.funnel import Law
from shardrules.hooks.types.laws import Row
from shardrules.hooks.types.owners import held_by, innermost, module_of
from shardrules.hooks.types.refs import check_written, written_variables
from shardrules.registry.axistypes import AxisType
from shardrules.registry.binding import Binding, binding_of

_PLACEHOLDERS = ("anonymous", "batched_body")  # plgpu.kernel's names for a partial and under vmap


def _jaxprs(params: Params) -> Sequence[Any]:
    """Return the jaxprs of an mpmd_map, one for each group of cores, or a core_map's jaxpr."""
    return params["jaxprs"] if "jaxprs" in params else (params["jaxpr"],)


def _out_avals(params: Params) -> Sequence[Any]:
    return params["out_avals"] if "jaxprs" in params else ()  # a core_map only writes refs


class Layout(NamedTuple):
    """The outputs that a call's rule types: the arrays and refs that the kernel writes."""

    # For each returned array, the position of the rule's answer; None if the array is an operand
    # that the kernel doesn't change (a discharged ref that is only read).
    answers: tuple[int | None, ...]
    overwritten: tuple[int | None, ...]  # for each returned array, the operand that it overwrites
    refs: tuple[int, ...]  # positions of the refs that are written; their answers come last

    @property
    def answer_count(self) -> int:
        return sum(answer is not None for answer in self.answers) + len(self.refs)

    def types(
        self, answered: Sequence[AxisType], inputs: Sequence[AxisType]
    ) -> tuple[AxisType, ...]:
        types = []
        for answer, operand in zip(self.answers, self.overwritten):
            if operand is None:
                assert answer is not None, "only what overwrites an operand is left as it is"
                types.append(answered[answer])
            elif answer is None:
                types.append(inputs[operand])
            else:  # a discharged ref keeps its type, since no write varies more than the ref
                types.append(inputs[operand].vary(*answered[answer].varying))
        return tuple(types)


def _layout(door: Door, params: Params, avals: Sequence[Aval]) -> Layout:
    stored = set()
    for jaxpr in _jaxprs(params):
        operands = jaxpr.invars[: len(avals)] if "jaxprs" in params else jaxpr.constvars
        written = written_variables(door, jaxpr)
        stored |= {at for at, variable in enumerate(operands) if variable in written}
    outputs, aliases = range(len(_out_avals(params))), {}
    if outputs:
        aliases = {out: at for at, out in dict(params["input_output_aliases"]).items()}
    counter = itertools.count()
    answers = tuple(
        next(counter) if out not in aliases or aliases[out] in stored else None for out in outputs
    )
    refs = tuple(
        at for at, aval in enumerate(avals) if isinstance(aval, door.AbstractRef) and at in stored
    )
    return Layout(answers, tuple(map(aliases.get, outputs)), refs)


class MeshKernelHooks(Hooks):
    laws = ("mesh_kernel",)

    def __init__(self, door: Door, state: State):
        super().__init__(door, state)
        # Maps a jaxpr to the function or the jaxpr that it was traced or lowered from.
        self._sources: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()
        # Keyed by the first jaxpr of a call.
        self._kernels: weakref.WeakKeyDictionary[Any, OpaqueCall] = weakref.WeakKeyDictionary()

    def install(self, patches: Patches) -> None:
        door = self.door
        for key in ("mpmd_tracing", "core_map_tracing"):
            if getattr(door, key) is not None:
                patches.attribute(*door.owner(key), self._noting(getattr(door, key)))
        if door.mpmd_map is not None:
            patches.attribute(*door.owner("mpmd_map"), self._mpmd_map)
            patches.attribute(door.custom_vmap, "__call__", self._custom_vmap())

    def _noting(self, module: Any) -> ModuleProxy:
        """Return a module whose tracing functions record what they trace."""
        trace, lower = self._trace, self._lower
        hooks = {"trace_to_jaxpr_dynamic": trace, "trace_to_jaxpr": trace, "lower_jaxpr2": lower}
        originals = {name: getattr(module, name) for name in hooks if hasattr(module, name)}
        recording = {n: functools.partial(hooks[n], original) for n, original in originals.items()}
        return ModuleProxy(module, recording)

    def law(self, primitive: Primitive, row: Row) -> Law:
        def tagged(params: Params) -> Any:
            if not self._acts(params):
                return None
            return self._proven(primitive, params, self._kernel(primitive, params))

        return Law(
            typed=functools.partial(self._typed, primitive),
            bind=self._bind,
            always=True,
            opaque_call_of=functools.partial(self._kernel, primitive),
            tagged=tagged if primitive is self.door.mpmd_map_p else None,
        )

    # From the kernel's function to its jaxpr.

    def _trace(self, trace: Callable[..., Any], fun: Any, *args: Any, **kwargs: Any) -> Any:
        """Trace as JAX does, and record the function that was traced."""
        traced_for = getattr(getattr(fun, "debug_info", None), "traced_for", "")
        if traced_for == "pallas_call index_map":
            return trace(fun, *args, **kwargs)
        is_kernel = traced_for == "pallas_core_map"
        with self.door.unchecked() if is_kernel and self.acts else contextlib.nullcontext():
            traced = trace(fun, *args, **kwargs)  # JAX 0.10 and newer switch the check off too
        # Up to JAX 0.10 ``fun`` is a WrappedFun; since 0.11 it is the function itself.
        self._sources[opened(traced[0])] = self._source(getattr(fun, "f", fun))
        return traced

    def _lower(
        self, lower: Callable[..., Any], closed: ClosedJaxpr, *args: Any, **kwargs: Any
    ) -> Any:
        lowered = lower(closed, *args, **kwargs)
        self._sources[opened(lowered)] = opened(closed)
        return lowered

    def _source(self, function: Any) -> Any:
        # Pallas wraps the user's kernel in functions of its own. Follow their closures to the
        # user's function, or to a jaxpr whose source was recorded before.
        while module_of(function).startswith(PALLAS):  # the user's kernel is in its closure
            held = dict(held_by(innermost(function)))
            for value in held.values():
                jaxpr = opened(value)  # a ClosedJaxpr in JAX 0.11
                if jaxpr is not None and jaxpr in self._sources:
                    return jaxpr
            if not callable(held.get("body")):
                break
            function = held["body"]
        return function

    def _origin(self, jaxpr: Jaxpr) -> tuple[OpaqueCall | None, Any]:
        """Return the kernel that a jaxpr comes from, or else None and the function."""
        source = self._sources.get(jaxpr)
        while hasattr(source, "eqns"):
            if source in self._kernels:
                return self._kernels[source], None
            source = self._sources.get(source)
        return None, source

    def _mpmd_map(self, meshes_and_fns: Any, /, out_types: Any = (), **kwargs: Any) -> Any:
        """Return the kernel, with the check on again if plgpu.kernel switched it off."""
        # plgpu.kernel switches the check off around the call. The frame says whether it was on
        # outside; switch it on again only for plgpu's own function. Annotations that JAX converts
        # meanwhile belong to this kernel: keep them for its call.
        door, here = self.door, self.state.here
        again = (
            here.kernel.checked
            and not door.checking()
            and all(module_of(function) == PALLAS_GPU_CORE for _, function in meshes_and_fns)
        )
        checked = functools.partial(door.check_vma, True) if again else contextlib.nullcontext
        noted = here.annotations
        before = len(noted)
        with checked():
            kernel = door.mpmd_map(meshes_and_fns, out_types, **kwargs)
        notes = tuple(noted[before:])
        del noted[before:]

        def call(*args: Any) -> Any:
            with dataclasses.replace(here.kernel, annotations=notes), checked():
                return kernel(*args)

        return call

    def _custom_vmap(self) -> Callable[..., Any]:
        original, hooks = self.door.custom_vmap.__call__, self

        @functools.wraps(original)
        def call(self: Any, *args: Any, **kwargs: Any) -> Any:
            with dataclasses.replace(hooks.state.here.kernel, checked=hooks.acts):
                return original(self, *args, **kwargs)

        return call

    # The kernel of a call.

    def _acts(self, params: Params) -> bool:
        if self.state.active:
            return True
        jaxpr = _jaxprs(params)[0]
        kernel = self._kernels.get(jaxpr) or self._origin(jaxpr)[0]
        return kernel is not None and kernel.active(self.state)

    def _kernel(self, primitive: Primitive, params: Params) -> OpaqueCall:
        jaxpr = _jaxprs(params)[0]
        kernel = self._kernels.get(jaxpr)
        if kernel is None:
            made_of, _ = self._origin(jaxpr)
            if made_of is None:
                kernel = self._described(primitive, params)
            else:
                kernel = dataclasses.replace(made_of, annotations=(), layout=None)
            self._kernels[jaxpr] = kernel
        kernel.settle(self.state)
        return kernel

    def _proven(self, primitive: Primitive, params: Params, kernel: OpaqueCall) -> OpaqueCall:
        """Return the kernel, after looking for a proof if it isn't declared."""
        # A kernel without a layout isn't a call of its own: Mosaic GPU binds core_maps in kernels.
        if kernel.layout is not None:
            prove(kernel, self.state, primitive.name, params, kernel.operand_count or 0)
        return kernel

    def _lay_out(self, kernel: OpaqueCall, params: Params, avals: Sequence[Aval]) -> Layout:
        layout = _layout(self.door, params, avals)
        kernel.layout, kernel.operand_count = layout, len(avals)
        return layout

    def _described(self, primitive: Primitive, params: Params) -> OpaqueCall:
        functions = [self._origin(jaxpr)[1] for jaxpr in _jaxprs(params)]
        name, place = kernel_name(params)
        inner = innermost(functions[0])
        if name in _PLACEHOLDERS:
            name = getattr(inner, "__name__", name)
        place = self.door.function_place(inner) or place
        binding = _binding(name, functions)
        call = Call(primitive.name, name, place, module_of(inner), binding, primitive)
        notes = self.state.here.kernel.annotations
        return OpaqueCall(call, notes if len(notes) == len(_out_avals(params)) else ())

    # Rewrite and check.

    def _bind(
        self, rest: Rest, primitive: Primitive, trace: JaxTrace, args: Sequence[Any], params: Params
    ) -> Any:
        if not self._acts(params):
            return rest(primitive, trace, args, params)
        first = _jaxprs(params)[0] not in self._kernels
        kernel = self._kernel(primitive, params)
        avals = [self.door.typeof(x) for x in args]
        layout = self._lay_out(kernel, params, avals)
        typed_here = self.door.checking() and layout.answer_count
        touches_more = first and typed_here and not all(map(only_touches_refs, _jaxprs(params)))
        if is_doubtful(kernel, self.state) or touches_more:
            varying = union(map(self.door.axis_type, avals)) if self.door.checking() else None
            check_declaration(kernel, self.state, primitive.name, params, len(avals), varying)
        if typed_here:
            resolution, types = self._resolve(primitive, params, kernel, avals)
            if first:
                check_annotations(self.door, self.state, kernel, types)
            wants = list(resolution.inputs)
            for at in layout.overwritten:
                if at is not None:
                    wants[at] = self.door.axis_type(avals[at])
            args = self.door.cast_bound(trace, args, wants)
            if layout.answers:
                # Write the types into the parameters, too, for jaxprs that outlive the hooks.
                out_avals = typed(self.door, kernel, params["out_avals"], types)
                params = {**params, "out_avals": out_avals}
        results = rest(primitive, trace, args, params)
        note_results(self.state, kernel, results)
        return results

    def _typed(self, primitive: Primitive, evaluate: Callable[..., Any]) -> Callable[..., Any]:
        def abstract_eval(*avals: Aval, **params: Any) -> Any:
            if not self._acts(params):
                return evaluate(*avals, **params)
            # JAX 0.11 and 0.12 reject every ref that varies, so evaluate without types, and check
            # writes to refs below. Inside a kernel, where Mosaic GPU maps over warps, the check is
            # off (JAX 0.12); there, drop only the types of refs.
            door, checking = self.door, self.door.checking()
            plain = [checking or isinstance(aval, door.AbstractRef) for aval in avals]
            given = [door.with_axis_type(a, AxisType()) if p else a for a, p in zip(avals, plain)]
            outputs, effects = evaluate(*given, **params)
            if not checking:
                return outputs, effects
            kernel = self._kernel(primitive, params)
            layout = self._lay_out(kernel, params, avals)
            if not layout.answer_count:
                return outputs, effects
            # Ask the rule again: JAX flattens ``out_avals``, which thus lose the bind's answer.
            resolution, types = self._resolve(primitive, params, kernel, avals)
            registration = kernel.registration
            rule = "" if registration is None else f", by the rule {registration.rule!r},"
            answers = resolution.outputs[len(resolution.outputs) - len(layout.refs) :]
            for at, answer in zip(layout.refs, answers):
                check_written(self.door, f"what {kernel.call} stores{rule}", avals[at], answer)
            return list(typed(self.door, kernel, outputs, types)), effects

        return abstract_eval

    def _resolve(self, primitive: Primitive, params: Params, kernel: OpaqueCall, avals: Any) -> Any:
        """Return the rule's answer, and the types of the returned arrays."""
        layout, inputs = self._proven(primitive, params, kernel).layout, self.door.axis_types(avals)
        resolution = resolve(self.door, self.state, kernel, inputs, layout.answer_count)
        return resolution, layout.types(resolution.outputs, inputs)


def _binding(name: str, functions: Sequence[Any]) -> Binding | None:
    """Return the rule that is bound to all of a kernel's functions, or None."""
    bindings = [binding for binding in map(binding_of, functions) if binding is not None]
    if len(bindings) < len(functions):
        return None
    first = bindings[0]
    for binding in bindings:
        if binding.rule != first.rule:
            raise RegistrationError(
                f"the functions of kernel {name!r} are declared with rules that differ:\n"
                f"  {first.rule!r} at {first.where}\n  {binding.rule!r} at {binding.where}\n"
                "they run as one call, so declare all of them with the rule of the whole",
                name=name,
                places=(first.where, binding.where),
            )
    return first
