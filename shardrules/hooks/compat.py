"""The one door to JAX's private names: each looked up once, checked, with its range and reason.

Nothing else in shardrules names ``jax._src`` or asks which JAX this is. ``load`` finds every
symbol and checks its parameters before anything is touched, so the hooks are installed whole or
not at all. JAX has had two forms of shard_map's check: replication sets kept beside the values,
with two tables of rules (to 0.5.3), and types on avals (from 0.6.0). What follows asks for
capabilities; the version itself is asked only whether anyone has run the hooks on it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib
import inspect
import os
import re
import threading
from collections.abc import Sequence
from typing import Any

from shardrules.errors import RuleError, UnsupportedJaxError
from shardrules.hooks import versions
from shardrules.axistypes import AxisType

__all__ = ["Jax", "Symbol", "SYMBOLS", "TYPE_SYMBOLS", "SET_SYMBOLS", "load", "check_version"]

OLDEST = "0.4.28"  # the JAX that the first report was written on
NEWEST = (0, 12)  # the last release series that the test matrix runs
ANYWAY = "SHARDRULES_ALLOW_UNTESTED_JAX"


@dataclasses.dataclass(frozen=True)
class Symbol:
    """One private name of JAX. Several with one key are alternatives, the first that fits wins.

    Args:
      key: what this package calls it.
      path: ``module:attribute``.
      versions: the JAX versions that were read for it.
      parameters: parameter names that the hooks pass or read; checked before use.
      reason: what it is needed for.
      optional: whether None will do where it is missing.
    """

    key: str
    path: str
    versions: str
    parameters: tuple[str, ...]
    reason: str
    optional: bool = False


_PALLAS = "jax._src.pallas.pallas_call"
_MESH = "jax._src.pallas"
_STATE = "jax._src.state"
_VJP = "jax._src.custom_derivatives"
_SHARD_MAP = "jax.experimental.shard_map"
_CONTROL = "jax._src.lax.control_flow"
_AVAL = "avals that carry axis types"
_OUT_SHAPE = "raises on an output without annotation"
_WRAP = "wraps a custom_vjp's functions without losing their debug info"
_KERNEL = "the one place where kernel function and jaxpr meet"
_REF = "a ref that is written must vary where what is written does"
_CHECK = "whether shard_map's check is on where we are"
_OPAQUE = "an opaque primitive"
_STALE = "puts the registry's version into jit's trace key"

SYMBOLS = (
    Symbol("typeof", "jax._src.core:typeof", "0.6.0-0.12", (), "the aval of a tracer"),
    Symbol("typeof", "jax._src.core:get_aval", "0.4.28-0.5.3", (), "the aval of a tracer"),
    Symbol("AbstractRef", "jax._src.state:AbstractRef", "0.4.28-0.12", ("inner_aval",),
           "refs count as inputs and can't be cast"),
    Symbol("transformation", "jax._src.linear_util:transformation2", "0.5.3-0.12",
           ("gen", "fun"), _WRAP, optional=True),
    Symbol("generator", "jax._src.linear_util:transformation", "0.4.28-0.12", ("gen", "fun"),
           _WRAP),
    Symbol("wrap_init", "jax._src.linear_util:wrap_init", "0.4.28-0.12", ("f",), _WRAP),
    Symbol("flatten_primal", f"{_VJP}:_flatten_fun_nokwargs", "0.4.28-0.12", (),
           "a custom_vjp's primal function, on its way to the primitive"),
    Symbol("flatten_fwd", f"{_VJP}:_flatten_fwd", "0.4.28-0.12", (),
           "a custom_vjp's fwd, on its way to the primitive"),
    Symbol("flatten_bwd", f"{_VJP}:_flatten_bwd", "0.4.28-0.12", (),
           "a custom_vjp's bwd: its cotangents are checked against the primals' types here"),
    Symbol("SymbolicZero", "jax._src.ad_util:SymbolicZero", "0.4.28-0.12", ("aval",),
           "cotangents that are known to be zero keep their form"),
    Symbol("Zero", "jax._src.ad_util:Zero", "0.4.28-0.12", ("aval",),
           "the cotangent of an argument for which bwd returned None"),
    Symbol("dce_jaxpr", "jax._src.interpreters.partial_eval:dce_jaxpr", "0.4.28-0.12",
           ("jaxpr", "used_outputs", "instantiate"),
           "the part of a bwd that one cotangent depends on"),
    Symbol("pallas_call_p", f"{_PALLAS}:pallas_call_p", "0.4.28-0.12", (), "the primitive"),
    Symbol("trace_kernel", f"{_PALLAS}:_trace_kernel_to_jaxpr", "0.4.35-0.12",
           ("fun", "grid_mapping"), _KERNEL),
    Symbol("trace_kernel", f"{_PALLAS}:_trace_to_jaxpr", "0.4.28", ("fun", "grid_spec"), _KERNEL),
    Symbol("ffi_call_p", "jax._src.ffi:ffi_call_p", "0.5.3-0.12", (), _OPAQUE, optional=True),
    Symbol("ffi_call_p", "jax._src.extend.ffi:ffi_call_p", "0.4.35", (), _OPAQUE, optional=True),
    Symbol("pure_callback_p", "jax._src.callback:pure_callback_p", "0.4.28-0.12", (), _OPAQUE),
    Symbol("io_callback_p", "jax._src.callback:io_callback_p", "0.4.28-0.12", (), _OPAQUE),
    Symbol("tpu_custom_call_p", "jax._src.tpu_custom_call:tpu_custom_call_p", "0.4.28-0.12", (),
           _OPAQUE, optional=True),
    Symbol("lowerings", "jax._src.interpreters.mlir:_lowerings", "0.4.28-0.12", (),
           "the table of lowering rules"),
    Symbol("platform_lowerings", "jax._src.interpreters.mlir:_platform_specific_lowerings",
           "0.4.28-0.12", (), "the tables for one platform each", optional=True),
    Symbol("Primitive", "jax._src.core:Primitive", "0.4.28-0.12", (), "users' primitives"),
    Symbol("LoweringRuleEntry", "jax._src.interpreters.mlir:LoweringRuleEntry", "0.7.2-0.12",
           ("rule", "inline"), "an entry of that table, where it isn't the rule itself",
           optional=True),
    Symbol("ir", "jax._src.lib.mlir:ir", "0.4.28-0.12", (), "writes the tag on the lowered call"),
    Symbol("summarize", "jax._src.source_info_util:summarize", "0.4.28-0.12", ("source_info",),
           "the user's line behind an equation"),
    Symbol("current_source", "jax._src.source_info_util:current", "0.4.28-0.12", (),
           "the user's line behind what the hooks put in"),
    Symbol("make_user_context", "jax:make_user_context", "0.7.2-0.12", (), _STALE, optional=True),
    Symbol("config", "jax._src.config", "0.4.28-0.6.2", (), f"{_STALE}, before there was a way to",
           optional=True),
)

# From JAX 0.6.0: an aval says over which axes its value varies.
TYPE_SYMBOLS = (
    Symbol("check_vma", "jax._src.config:_check_vma", "0.6.2-0.12", (), _CHECK),
    Symbol("check_vma", "jax._src.config:_check_rep", "0.6.0", (), _CHECK),
    Symbol("ShapedArray", "jax._src.core:ShapedArray", "0.10-0.12",
           ("shape", "dtype", "sharding", "manual_axis_type"), _AVAL),
    Symbol("ShapedArray", "jax._src.core:ShapedArray", "0.6.0-0.9",
           ("shape", "dtype", "sharding", "vma"), _AVAL),
    Symbol("ManualAxisType", "jax._src.core:ManualAxisType", "0.10-0.12",
           ("varying", "unreduced", "reduced"), "JAX's own form of AxisType", optional=True),
    Symbol("current_mesh_sharding", "jax._src.core:get_cur_mesh_sharding", "0.6.0-0.12", (),
           "an aval without a mesh can't carry an axis type"),
    Symbol("abstract_mesh", "jax._src.mesh:get_abstract_mesh", "0.6.0-0.12", (),
           "which mesh axes are manual where we are"),
    Symbol("convert_out_shape", "jax._src.pallas.core:_convert_out_shape_to_aval", "0.9-0.12",
           ("out_shape",), _OUT_SHAPE),
    Symbol("convert_out_shape", f"{_PALLAS}:_convert_out_shape_to_aval", "0.6.0-0.8",
           ("out_shape",), _OUT_SHAPE),
    Symbol("trace_to_jaxpr", "jax._src.interpreters.partial_eval:trace_to_jaxpr", "0.8-0.12",
           ("fun", "in_avals", "debug_info"), "a loop's body, before its carry's types are compared",
           optional=True),
    Symbol("promote_carry", f"{_CONTROL}.loops:_promote_weak_typed_input", "0.8-0.12",
           ("in_val", "in_aval", "out_aval"), "an initial carry, once its body was traced",
           optional=True),
    Symbol("merge_branches", f"{_CONTROL}.conditionals:_merge_common_consts", "0.8-0.12",
           ("jaxprs", "all_consts"), "all branches of a cond or switch, once traced",
           optional=True),
    Symbol("check_branches", f"{_CONTROL}.conditionals:_check_branch_outputs", "0.8-0.12",
           ("out_avals1", "out_avals2"), "raises on branches whose types differ", optional=True),
    Symbol("pcast", "jax.lax:pcast", "0.8-0.12", ("axis_name", "to"), "casts an operand"),
    Symbol("pcast", "jax.lax:pvary", "0.6.0-0.7", ("axis_name",), "casts an operand"),
    Symbol("mpmd_map_p", f"{_MESH}.mpmd:mpmd_map_p", "0.9.2-0.12", (), "what pl.kernel binds",
           optional=True),
    Symbol("mpmd_map", f"{_MESH}.mpmd:_mpmd_map", "0.10-0.12", ("meshes_and_fns", "out_types"),
           "plgpu.kernel calls it with the check switched off", optional=True),
    Symbol("mpmd_tracing", f"{_MESH}.mpmd:pe", "0.10-0.12", (), _KERNEL, optional=True),
    Symbol("core_map_p", f"{_MESH}.core:core_map_p", "0.6.0-0.12", (), "what core_map binds",
           optional=True),
    Symbol("core_map_tracing", f"{_MESH}.core:pe", "0.6.0-0.12", (), _KERNEL, optional=True),
    Symbol("custom_vmap", "jax._src.custom_batching:custom_vmap", "0.6.0-0.12", ("fun",),
           "stands around plgpu.kernel where the check is still on"),
    Symbol("custom_vmap_p", "jax._src.custom_batching:custom_vmap_p", "0.6.0-0.12", (),
           "keeps the output types of its first trace"),
    Symbol("run_state_p", f"{_STATE}.discharge:run_state_p", "0.6.0-0.12", (), _REF),
    Symbol("trace_run_state", f"{_STATE}.discharge:initial_style_jaxpr", "0.8-0.12",
           ("fun", "in_tree", "in_avals", "dbg"), _REF, optional=True),
    Symbol("get_p", f"{_STATE}.primitives:get_p", "0.6.0-0.12", (), _REF),
    Symbol("swap_p", f"{_STATE}.primitives:swap_p", "0.6.0-0.12", (), _REF),
    Symbol("addupdate_p", f"{_STATE}.primitives:addupdate_p", "0.6.0-0.12", (), _REF),
    Symbol("WriteEffect", f"{_STATE}.types:WriteEffect", "0.6.0-0.12", (), _REF),
    Symbol("AccumEffect", f"{_STATE}.types:AccumEffect", "0.6.0-0.12", (), _REF),
    Symbol("cond_p", f"{_CONTROL}.conditionals:cond_p", "0.6.0-0.12", (), _REF),
    Symbol("while_p", f"{_CONTROL}.loops:while_p", "0.6.0-0.12", (), _REF),
    Symbol("result_avals", "jax._src.ffi:_result_avals", "0.6.0-0.12", (),
           "fails on an annotated result (JAX 0.8.3 to 0.12)", optional=True),
)

# To JAX 0.5.3: sets of axes over which a value is replicated, kept beside the values.
SET_SYMBOLS = (
    Symbol("check_rules", f"{_SHARD_MAP}:_check_rules", "0.4.28-0.5.3", (),
           "from the inputs' replication sets to the outputs'"),
    Symbol("rewrite_rules", f"{_SHARD_MAP}:_rewrite_rules", "0.4.28-0.5.3", (),
           "from the inputs' replication sets to casts"),
    Symbol("rule_missing", f"{_SHARD_MAP}:_rule_missing", "0.4.28-0.5.3", ("prim",),
           "what is done about a primitive that neither table holds"),
    Symbol("rewrite_bwd", f"{_SHARD_MAP}:_rewrite_bwd", "0.4.28-0.5.3",
           ("bwd", "mesh", "in_reps", "reps_dst"), "a custom_vjp's bwd under the check"),
    Symbol("match_replication", f"{_SHARD_MAP}:_match_replication", "0.4.28-0.5.3",
           ("src", "dst", "x"), "sums a cotangent that varies where its primal doesn't"),
    Symbol("broadcast", f"{_SHARD_MAP}:pbroadcast", "0.4.28-0.5.3", ("x", "axis_name"),
           "casts an operand"),
)


class Jax:
    """JAX's private symbols as attributes, and the few operations that are built from them.

    Args:
      version: the JAX version.
      symbols: what was found, by key.
      owners: for each key, the module that holds it and its name there.
      typed: whether axis types are on avals.
    """

    def __init__(self, version: str, symbols: dict[str, Any],
                 owners: dict[str, tuple[Any, str]], typed: bool):
        self.__dict__.update(symbols)
        self.version = version
        self.typed = typed
        self._owners = owners
        self._here = threading.local()

    def owner(self, key: str) -> tuple[Any, str]:
        """Return where a symbol lives: the module, and the attribute's name there."""
        return self._owners[key]

    # Axis types.

    def axis_type(self, aval: Any) -> AxisType:
        """Return an aval's axis type; invariant for what carries none (tokens, keys' bases)."""
        if isinstance(aval, self.AbstractRef):
            aval = aval.inner_aval
        mat = getattr(aval, "manual_axis_type", None)
        if mat is not None:
            return AxisType(mat.varying, mat.unreduced, mat.reduced)
        varying = getattr(aval, "vma", None)
        if varying is None:
            return AxisType()
        # JAX 0.6.1 to 0.9 keep the other two in the sharding's spec.
        spec = getattr(getattr(aval, "sharding", None), "spec", None)
        return AxisType(varying, getattr(spec, "unreduced", frozenset()) or frozenset(),
                        getattr(spec, "reduced", frozenset()) or frozenset())

    def with_axis_type(self, aval: Any, axis_type: AxisType) -> Any:
        """Return ``aval`` with another axis type; what can't carry one is returned as it is."""
        if not self.typed or not isinstance(aval, self.ShapedArray):
            return aval
        changes: dict[str, Any] = {}
        if aval.sharding.mesh.empty and axis_type.axes:
            # out_shape given as an array: its aval names no mesh (JAX 0.10.2).
            changes["sharding"] = self.current_mesh_sharding()
        if self.ManualAxisType is not None:
            changes["manual_axis_type"] = self.ManualAxisType(
                varying=axis_type.varying, unreduced=axis_type.unreduced,
                reduced=axis_type.reduced)
            return aval.update(**changes)
        changes["vma"] = axis_type.varying
        have = self.axis_type(aval)
        if (have.unreduced, have.reduced) != (axis_type.unreduced, axis_type.reduced):
            sharding = changes.get("sharding", aval.sharding)
            spec = type(sharding.spec)(*sharding.spec, unreduced=axis_type.unreduced,
                                       reduced=axis_type.reduced)
            changes["sharding"] = sharding.update(spec=spec)
        return aval.update(**changes)

    def cotangent_type(self, primal: Any) -> AxisType:
        """Return the axis type that the cotangent of a primal aval must have."""
        for name in ("to_ct_aval", "to_cotangent_aval", "to_tangent_aval"):
            if hasattr(primal, name):
                return self.axis_type(getattr(primal, name)())
        return self.axis_type(primal)

    def annotation(self, out_shape: Any) -> tuple[AxisType | None, Any]:
        """Return what the user wrote on an out_shape, and an out_shape that is annotated.

        Args:
          out_shape: one leaf of pallas_call's ``out_shape``.

        Returns:
          The annotation, None where there is none; the leaf, invariant where there is none.
        """
        import jax
        if not isinstance(out_shape, jax.ShapeDtypeStruct):
            return None, out_shape  # an array's own type is no annotation
        if self.ManualAxisType is not None:
            mat = out_shape.manual_axis_type
            if mat is not None:
                return AxisType(mat.varying, mat.unreduced, mat.reduced), out_shape
            return None, out_shape.update(manual_axis_type=self.ManualAxisType())
        if not hasattr(out_shape, "vma"):
            return None, out_shape  # JAX 0.6.0: nothing to write it in
        if out_shape.vma is not None:
            return AxisType(out_shape.vma), out_shape
        return None, out_shape.update(vma=frozenset())

    def unannotated(self, result: Any) -> tuple[AxisType | None, Any]:
        """Return what the user wrote on a result of ffi_call, and the result without it.

        Args:
          result: one of ffi_call's ``result_shape_dtypes``.
        """
        import jax
        if not isinstance(result, jax.ShapeDtypeStruct):
            return None, result
        field = "manual_axis_type" if self.ManualAxisType is not None else "vma"
        written = getattr(result, field, None)
        if written is None:
            return None, result
        note = (AxisType(written.varying, written.unreduced, written.reduced)
                if self.ManualAxisType is not None else AxisType(written))
        return note, result.update(**{field: None})

    def can_cast(self, aval: Any) -> bool:
        """Whether a value of this aval can be cast: an array, that is, not a ref or a token."""
        return isinstance(aval, self.ShapedArray)

    def manual_axes(self) -> tuple[str, ...]:
        """Return the manual mesh axes here, in the mesh's order; empty outside shard_map.

        Where axis types are no part of avals, what ``over_axes`` says.
        """
        if not self.typed:
            return getattr(self._here, "axes", ())
        mesh = self.abstract_mesh()
        if mesh is None or mesh.empty:
            return ()
        manual = frozenset(mesh.manual_axes)
        return tuple(a for a in mesh.axis_names if a in manual)

    @contextlib.contextmanager
    def over_axes(self, axes: tuple[str, ...]):
        """Let ``manual_axes`` answer ``axes``, where no aval's mesh can tell."""
        before = getattr(self._here, "axes", ())
        self._here.axes = axes
        try:
            yield
        finally:
            self._here.axes = before

    def checking(self) -> bool:
        """Whether we are inside a shard_map that tracks how values vary, by types."""
        return self.typed and bool(self.check_vma.value) and bool(self.manual_axes())

    def unchecked(self):
        """Return a context manager in which shard_map's check is off."""
        return self.check_vma(False) if self.typed else contextlib.nullcontext()

    def cast(self, value: Any, want: AxisType) -> Any:
        """Cast an array from its own axis type to a type that varies over more axes.

        Raises:
          RuleError: if it takes a cast that this JAX doesn't have.
        """
        have = self.axis_type(self.typeof(value))
        # One cast moves axes of one state only: jax.lax.pcast refuses a mixture (JAX 0.10.2).
        for axes in (have.reduced & want.varying, want.varying - have.axes):
            if axes:
                value = self._cast(value, axes, "varying")
        axes = have.varying & want.unreduced
        return self._cast(value, axes, "unreduced") if axes else value

    def _cast(self, value: Any, axes: frozenset[str], to: str) -> Any:
        order = tuple(sorted(axes))
        if self.owner("pcast")[1] == "pcast":
            return self.pcast(value, order, to=to)
        if to == "varying":
            return self.pcast(value, order)
        raise RuleError(
            f"JAX {self.version} has no cast to {to} over {{{', '.join(order)}}}; rules that make "
            "a value unreduced need JAX 0.8 or newer", axes=axes)

    def cast_outputs(self, jaxpr: Any, types: Sequence[AxisType]) -> Any:
        """Return a jaxpr whose outputs have these axis types, by casts at its end.

        Args:
          jaxpr: one with or without its constants.
          types: for each output, one that varies over the same axes or over more.
        """
        import jax
        inner = getattr(jaxpr, "jaxpr", jaxpr)
        closed = inner is not jaxpr
        wide = [i for i, (var, want) in enumerate(zip(inner.outvars, types))
                if self.axis_type(var.aval) != want]
        if not wide:
            return jaxpr
        outvars = list(inner.outvars)
        casts = jax.make_jaxpr(lambda *xs: [self.cast(x, types[i]) for x, i in zip(xs, wide)])(
            *(outvars[i].aval for i in wide)).jaxpr
        known = dict(zip(casts.invars, (outvars[i] for i in wide)))
        eqns = [eqn.replace(invars=[known.get(v, v) for v in eqn.invars]) for eqn in casts.eqns]
        for i, var in zip(wide, casts.outvars):
            outvars[i] = var
        inner = inner.replace(eqns=[*inner.eqns, *eqns], outvars=outvars)
        return jaxpr.replace(jaxpr=inner) if closed else inner

    # Kernels.

    def describe_kernel(self, jaxpr: Any, params: dict[str, Any]) -> tuple[str, str]:
        """Return a Pallas kernel's name and ``file:line``.

        Args:
          jaxpr: the kernel's.
          params: the call's parameters, as far as they are known.
        """
        info = getattr(jaxpr, "debug_info", None)
        function, _, place = (getattr(info, "func_src_info", None) or "").partition(" at ")
        # JAX 0.4.31 to 0.5.0 keep both in one parameter, 0.4.28 the name alone.
        both = params.get("name_and_src_info")
        name = (params.get("name") or getattr(both, "name", None)
                or getattr(info, "func_name", None) or function or "unknown")
        return name, place

    def kernel_jaxpr(self, traced: Any) -> tuple[Any, Any]:
        """Return the kernel's jaxpr in what ``trace_kernel`` returned, and all of that.

        JAX to 0.6.2 caches the jaxpr. Two calls of one function would share it, and what is known
        of the one (its annotations, its scope) would be taken for the other's; so there, it is
        made an object of its own.

        Args:
          traced: the returned tuple.
        """
        index = next(i for i, part in enumerate(traced) if hasattr(part, "eqns"))
        jaxpr = traced[index]
        if _cached(self.trace_kernel):
            jaxpr = jaxpr.replace()
            traced = (*traced[:index], jaxpr, *traced[index + 1:])
        return jaxpr, traced

    def source_line(self, source_info: Any) -> str:
        """Return the user's line behind an equation, ``file:line``; empty if JAX keeps none."""
        text = self.summarize(source_info)
        # As "file:line:column (function)"; no column to JAX 0.4.
        match = re.match(r"(.+?):(\d+)(:\d+)?( \(|$)", text)
        return f"{match[1]}:{match[2]}" if match else ""

    # Functions of a custom_vjp.

    def scoped(self, fun: Any, enter: Any, scope: Any) -> Any:
        """Wrap a WrappedFun so that it runs inside ``enter(scope)``."""
        if self.transformation is not None:
            return self.transformation(_run_scoped)(fun, enter, scope)
        return self.generator(_yield_scoped)(fun, enter, scope)

    def wrapped(self, function: Any, like: Any) -> Any:
        """Return ``function`` in the form that ``like`` has: a WrappedFun, or a plain callable."""
        if not hasattr(like, "call_wrapped"):
            return function
        info = getattr(like, "debug_info", None)
        if "debug_info" in inspect.signature(self.wrap_init).parameters and info is not None:
            return self.wrap_init(function, debug_info=info)
        return self.wrap_init(function)

    def function_name(self, fun: Any) -> str:
        """Return a function's name for messages; a WrappedFun has its own way to say it."""
        name = getattr(getattr(fun, "debug_info", None), "func_name", None)
        return name or getattr(fun, "__name__", None) or "<unnamed>"

    # Lowering.

    def lowering_rule(self, entry: Any) -> Any:
        """Return the rule in an entry of the lowering table."""
        return entry if self.LoweringRuleEntry is None else entry.rule

    def lowering_entry(self, entry: Any, rule: Any) -> Any:
        """Return an entry like ``entry`` for another rule."""
        if self.LoweringRuleEntry is None:
            return rule
        return self.LoweringRuleEntry(rule, entry.inline)

    # jit's trace key.

    def trace_key(self) -> Any:
        """Return an object that keeps traces apart: ``key(value)`` here, ``key.set_global(value)``.

        From JAX 0.7.2 that is ``jax.make_user_context()``.
        """
        if self.make_user_context is None:
            return _MeshKey(self.config)
        context = self.make_user_context()
        return context if hasattr(context, "set_global") else _ContextKey(context)


def _run_scoped(fun, enter, scope, *args, **kwargs):
    with enter(scope):
        return fun(*args, **kwargs)


def _yield_scoped(enter, scope, *args, **kwargs):
    # JAX to 0.4.36 writes its transformations as generators.
    with enter(scope):
        result = yield args, kwargs
    yield result


class _ContextKey:
    """A user context that has no way to set it for all threads (JAX 0.7.2 to 0.9)."""

    def __init__(self, context: Any):
        self._context = context

    def set_global(self, value: Any) -> None:
        """Set what threads have in their trace key that set nothing themselves."""
        self._context._obj.set_global(value)

    def __call__(self, value: Any):
        return self._context(value)


class _Mark(tuple):
    """Our entry among the meshes that are part of the trace key."""


class _MeshKey:
    """jit's trace key before ``jax.make_user_context`` (JAX to 0.7.1).

    The list of meshes entered by ``with mesh:`` is in the key, and nothing else reads it from
    there, so one thread's scope can stand in it too. A change for all threads clears the caches.

    Args:
      config: jax's config module.
    """

    def __init__(self, config: Any):
        self._config = config
        self._value = None

    def set_global(self, value: Any) -> None:
        """Forget every trace, if the value is another one."""
        if value != self._value:
            import jax
            self._value = value
            jax.clear_caches()

    @contextlib.contextmanager
    def __call__(self, value: Any):
        before = self._read()
        self._write((*(m for m in before if not isinstance(m, _Mark)), _Mark((value,))))
        try:
            yield
        finally:
            self._write(before)

    def _read(self) -> tuple:
        state = getattr(self._config, "mesh_context_manager", None)
        if state is not None:
            return tuple(state.value or ())
        # JAX to 0.4.35 keeps it in a tuple of the thread's.
        context = self._config.jax_jit.thread_local_state().extra_jit_context
        return tuple(getattr(context, "mesh_context_manager", None) or ())

    def _write(self, meshes: tuple) -> None:
        state = getattr(self._config, "mesh_context_manager", None)
        if state is not None:
            state.set_local(meshes)
        else:
            self._config.update_thread_local_jit_state(mesh_context_manager=meshes)


# Finding them.


def _cached(function: Any) -> bool:
    return hasattr(function, "cache_info")


def _look(symbol: Symbol) -> tuple[Any, tuple[Any, str], str]:
    """Return a symbol, its owner, and what is wrong with it (empty if nothing is)."""
    module, _, attribute = symbol.path.partition(":")
    try:
        owner = importlib.import_module(module)
        found = getattr(owner, attribute) if attribute else owner
    except (ImportError, AttributeError):
        return None, (None, ""), "is missing"
    if symbol.parameters:
        try:
            have = tuple(inspect.signature(found).parameters)
        except (TypeError, ValueError):
            if _cached(found):  # one of JAX's C++ caches around a function: it tells no names
                return found, (owner, attribute), ""
            have = ()
        lost = [p for p in symbol.parameters
                if p not in have and p not in getattr(found, "__slots__", ())]
        if lost:
            return None, (owner, attribute), (
                f"no longer takes {', '.join(lost)} (it takes {', '.join(have) or 'nothing'})")
    return found, (owner, attribute), ""


def check_version(version: str) -> str:
    """Say what keeps ``version`` from being one that the hooks were run on; empty if nothing.

    Args:
      version: ``jax.__version__``.
    """
    try:
        order = versions.order(version)
    except ValueError as error:
        return str(error)
    if order < versions.order(OLDEST):
        return f"it is older than {OLDEST}"
    if order[0][:2] > NEWEST:
        return f"it is newer than {'.'.join(map(str, NEWEST))}, the newest that was tested"
    return ""


def _unsupported(version: str, what: str, **data: Any) -> UnsupportedJaxError:
    return UnsupportedJaxError(
        f"shardrules has no hooks for JAX {version}: {what} Nothing was changed. Install a JAX "
        "that the README's table of versions lists, or a newer shardrules.",
        version=version, **data)


def _find(version: str, symbols: tuple[Symbol, ...]) -> tuple[dict, dict]:
    """Look up a group of symbols.

    Raises:
      UnsupportedJaxError: if one is missing or has other parameters.
    """
    found: dict[str, Any] = {}
    owners: dict[str, tuple[Any, str]] = {}
    wrong: dict[str, tuple[Symbol, str]] = {}
    for symbol in symbols:
        if found.get(symbol.key) is not None:
            continue
        value, owner, problem = _look(symbol)
        if not problem:
            found[symbol.key], owners[symbol.key] = value, owner
            wrong.pop(symbol.key, None)
        elif symbol.optional:
            found.setdefault(symbol.key, None)
        else:
            wrong.setdefault(symbol.key, (symbol, problem))
    for symbol, problem in wrong.values():
        raise _unsupported(
            version, f"{symbol.path} {problem}. It is used for: {symbol.reason} (read in JAX "
            f"{symbol.versions}).", symbol=symbol.path)
    return found, owners


def _types_on_avals() -> bool:
    """Whether this JAX's avals carry axis types; JAX 0.6.0 can be told that they shall not."""
    if not any(not _look(s)[2] for s in TYPE_SYMBOLS if s.key == "check_vma"):
        return False
    switch, _, missing = _look(Symbol("", "jax._src.config:varying_axes_in_types", "0.6.0", (), ""))
    return bool(missing) or bool(switch.value)


@functools.lru_cache(maxsize=1)
def load() -> Jax:
    """Look up every private symbol of the JAX that is installed.

    Raises:
      UnsupportedJaxError: if one is missing or has other parameters, or if nobody has run the
        hooks on this JAX and ``SHARDRULES_ALLOW_UNTESTED_JAX=1`` is not set; nothing was changed.
    """
    import jax
    version = jax.__version__
    typed = _types_on_avals()
    found, owners = _find(version, SYMBOLS + (TYPE_SYMBOLS if typed else SET_SYMBOLS))
    strange = check_version(version)
    if strange and os.environ.get(ANYWAY, "") not in ("1", "true", "yes"):
        raise _unsupported(
            version, f"{strange}. The {len(found)} private names that they use are there "
            f"and take what they took, so they may work: set {ANYWAY}=1 in the environment, and "
            "compare your gradients.", symbol=None)
    return Jax(version, found, owners, typed)
