"""A law for JAX's own primitives: what they return varies at least as all that they take.

Every version of JAX (0.6 to 0.12) has primitives whose abstract evals forget mesh axes: the result
has the type of one operand, or none, where it depends on all. The indices of ``jnp.argsort`` are
typed invariant, and the gradient of what they pick is silently wrong; ``ragged_all_to_all`` has
the type of the zeros that it writes into, ``pmax`` within groups that of one group for all. A list
of those that forget is a list of what somebody noticed. So the law holds for every primitive, one
of a JAX to come too, but for those named here, each row with its reason: a new one errs to
varying. What reads another device is not asked; that is up to JAX's own collectives.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Sequence
from typing import Any

from shardrules.door.jaxprs import widened
from shardrules.door.patching import Patches
from shardrules.hooks.state import Hooks
from shardrules.hooks.types.identities import retype_varying
from shardrules.hooks.types.type_notes import TypeNoteHooks

__all__ = ["LostAxesHooks"]

# They may drop the axes that they name: what they return is equal along them, or is typed reduced
# or unreduced. Within groups (axis_index_groups) it is neither.
_DROPS = frozenset(
    "psum psum_invariant psum_invariant_start pmax pmin all_gather_invariant all_gather_reduced "
    "all_gather_reduced_start vary_unreduced_cast vary_unreduced_cast_p".split()
)

# They add the axes that they name: what comes from where is up to each device.
_ADDS = frozenset(("ragged_all_to_all",))

# They draw on every device for itself, whatever they take: all mesh axes.
_DRAWS = frozenset(("rng_uniform", "infeed"))

# Each result comes from the operand at its position alone.
_ONE_TO_ONE = frozenset(("optimization_barrier", "device_put", "psum", "psum_invariant"))

# The result is the last operand; the others are there for the order of things alone.
_LAST = frozenset(("tie",))

# Their results' types come from elsewhere.
_ELSEWHERE = frozenset(
    # from the jaxprs that they call with their operands, result by result
    # (eval_jaxpr: closed_call of JAX 0.12, which a scan's body is where the scan is lowered)
    "jit pjit closed_call core_call eval_jaxpr remat2 checkpoint remat_opt custom_jvp_call "
    "custom_vjp_call custom_vjp_call_jaxpr custom_vmap_call custom_partitioning custom_dce_call "
    "custom_fusion cudnn_fusion linear_call composite compute_on fused_call program_order "
    "xla_metadata_call scan while cond shard_map run_state run_scoped "
    # from the outputs of the custom_vjp whose tangents they are
    "custom_lin "
    # from rules and proofs, as opaque calls
    "pallas_call core_map mpmd_map ffi_call pure_callback io_callback buffer_callback "
    "call_exported tpu_custom_call".split()
)

# They call jaxprs that were traced with their operands as they are.
_NOT_CAST = frozenset(("custom_linear_solve",))


class LostAxesHooks(Hooks):
    """The hooks of JAX's own primitives."""

    def install(self, patches: Patches) -> None:
        """Hold those of JAX's primitives that are there to the law."""
        tables = [self.door.lowerings, *(self.door.platform_lowerings or {}).values()]
        for primitive in dict.fromkeys(p for table in tables for p in table):
            self.adopt(patches, primitive)
        if self.door.typed and self.door.shard_map_p is not None:
            kind = type(self.door.shard_map_p)
            patches.attribute(kind, "bind_with_trace", self._binder(kind.bind_with_trace))

    def _binder(self, original):
        hooks = self

        def by_avals(self, trace, args, avals, params, /):  # JAX 0.9 to 0.12
            outputs = original(self, trace, args, avals, params)
            return hooks._regained(trace, args, params, outputs)

        def by_args(self, trace, fun_and_args, params):
            outputs = original(self, trace, fun_and_args, params)
            return hooks._regained(trace, fun_and_args[1:], params, outputs)

        return by_avals if "avals" in inspect.signature(original).parameters else by_args

    def _regained(self, trace, args, params, outputs):
        """Let what a shard_map inside of another returns vary as what it takes, if unchecked.

        JAX (0.6.2 to 0.12) drops the types of the one around there.
        """
        door = self.door
        if params.get("check_vma", True) or not self.acts:
            return outputs
        over = frozenset().union(*(door.axis_type(door.typeof(x)).varying for x in args))
        order = tuple(a for a in door.manual_axes() if a in over)

        def one(x):
            if not door.can_cast(door.typeof(x)) or over <= door.axis_type(door.typeof(x)).axes:
                return x
            self.state.of(TypeNoteHooks).note("shard_map, whose own check is off,", over)
            return retype_varying(x, order)

        with door.set_current_trace(trace):
            return outputs.map(one) if hasattr(outputs, "map") else [*map(one, outputs)]

    def adopt(self, patches: Patches, primitive: Any) -> None:
        """Hold one of JAX's primitives to the law.

        Args:
          patches: what to undo.
          primitive: a primitive.
        """
        evaluate = vars(primitive).get("abstract_eval")
        if (
            not self.door.typed
            or evaluate is None
            or hasattr(evaluate, "shardrules")
            or primitive.name in _ELSEWHERE
            or primitive.call_primitive  # a function, too, is bound (JAX 0.7: scheduling_group)
            or self._is_lawful(evaluate)
            or not (getattr(_innermost(evaluate), "__module__", None) or "").startswith("jax.")
        ):
            return
        several, name = primitive.multiple_results, primitive.name

        def abstract_eval(*avals, **params):
            answer = evaluate(*avals, **params)
            if not self.acts:
                return answer
            outputs, effects = answer
            if several:
                kept = self._kept(name, avals, outputs, params)
            else:
                (kept,) = self._kept(name, avals, (outputs,), params)
            return kept, effects

        setattr(abstract_eval, "shardrules", True)
        patches.attribute(primitive, "abstract_eval", abstract_eval)
        if name in _ONE_TO_ONE | _DROPS | _LAST | _NOT_CAST:
            return
        bind = primitive.bind

        def bound(*args, **params):
            if len(args) > 1 and self.acts:  # of one operand the type is its own
                args = self._cast(name, args, params)
            return bind(*args, **params)

        patches.attribute(primitive, "bind", bound)

    def _is_lawful(self, evaluate: Any) -> bool:
        """Whether JAX's standard rule gives the type, which asks that all operands' are one."""
        evaluate = _held(evaluate)
        return isinstance(evaluate, functools.partial) and any(
            getattr(one, "func", None) is self.door.standard_vma_rule for one in evaluate.args
        )

    def _kept(self, name: str, avals, outputs, params) -> Sequence[Any]:
        """Return the outputs' avals, varying as the law says; the same ones where they do."""
        door = self.door
        joined = [door.axis_type(aval).varying for aval in avals]
        if name in _ONE_TO_ONE and len(joined) == len(outputs):
            needs = [*map(_without, joined, [_dropped(name, params)] * len(joined))]
        else:
            if name in _LAST:
                joined = joined[-1:]
            need = self._added(name, params).union(*joined) - _dropped(name, params)
            needs = [need] * len(outputs)
        types = [door.axis_type(aval) for aval in outputs]
        if all(need <= have.varying for need, have in zip(needs, types)):
            return outputs
        added = frozenset().union(*(need - have.axes for have, need in zip(types, needs)))
        self.state.of(TypeNoteHooks).note(name, added)
        return [
            door.with_axis_type(aval, widened(have, need))
            for aval, have, need in zip(outputs, types, needs)
        ]

    def _added(self, name: str, params: dict[str, Any]) -> frozenset[str]:
        if name in _DRAWS:
            return frozenset(self.door.manual_axes())
        if name in _ADDS or params.get("axis_index_groups") is not None:
            return _named(params) & frozenset(self.door.manual_axes())
        return frozenset()

    def _cast(self, name: str, args, params):
        """Cast operands to their join: the psum of a gradient is a cast's transpose."""
        door = self.door
        avals = [door.typeof(x) for x in args]
        types = [door.axis_type(aval) for aval in avals]
        union = frozenset().union(*(one.varying for one in types))
        if name in _ADDS:
            union |= self._added(name, params)
        if all(union <= one.varying for one in types):
            return args
        return [
            door.cast(x, widened(have, union)) if door.can_cast(aval) else x
            for x, have, aval in zip(args, types, avals)
        ]


def _without(axes: frozenset[str], dropped: frozenset[str]) -> frozenset[str]:
    return axes - dropped


def _dropped(name: str, params: dict[str, Any]) -> frozenset[str]:
    """Return the axes that a collective may drop: all that it names, unless within groups."""
    if name not in _DROPS or params.get("axis_index_groups") is not None:
        return frozenset()
    return _named(params)


def _named(params: dict[str, Any]) -> frozenset[str]:
    """Return the mesh axes that a collective's parameters name."""
    named = params.get("axes", params.get("axis_name", ()))
    return frozenset(named if isinstance(named, (tuple, list)) else (named,))


def _held(evaluate: Any) -> Any:
    """Return the function that was given to ``def_abstract_eval``, inside what JAX made of it."""
    for cell in getattr(evaluate, "__closure__", None) or ():
        if callable(cell.cell_contents):
            evaluate = cell.cell_contents
    return evaluate


def _innermost(evaluate: Any) -> Any:
    evaluate = _held(evaluate)
    while isinstance(evaluate, functools.partial):
        evaluate = evaluate.func
    return evaluate
