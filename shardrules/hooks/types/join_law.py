"""Apply the default law: a result varies at least over the join of the operands.

The law types JAX's own primitives, and checks hijax primitives. The rows of ``laws.py`` say which
primitives may drop axes, which ones add axes, and why.
"""

from __future__ import annotations

import copy
import functools
import inspect
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import jax

from shardrules.door.internals import Door
from shardrules.door.jaxprs import union, widened
from shardrules.door.patching import Patches
from shardrules.door.protocols import Aval, JaxTrace, Params, Primitive, Rest
from shardrules.errors import AxisError
from shardrules.hooks.state import Hooks
from shardrules.hooks.types.funnel import Law
from shardrules.hooks.types.identities import retype_varying
from shardrules.hooks.types.laws import Row
from shardrules.hooks.types.owners import held_by
from shardrules.hooks.types.type_notes import TypeNoteHooks
from shardrules.registry.axistypes import show_axes


class JoinLawHooks(Hooks):
    """Hooks on JAX's own primitives, and on a shard_map inside another."""

    laws = ("join", "called")

    def install(self, patches: Patches) -> None:
        shard_map = self.door.shard_map_p
        if shard_map is None:
            return
        original, hooks = type(shard_map).bind_with_trace, self

        def bind_with_trace(
            self: Any, trace: JaxTrace, fun_and_args: Sequence[Any], params: Params
        ) -> Any:
            results = original(self, trace, fun_and_args, params)
            with hooks.door.set_current_trace(trace):
                return hooks._retyped(results, fun_and_args, params)

        if "avals" in inspect.signature(original).parameters:  # since JAX 0.9
            bind = functools.partial(self._bind_shard_map, shard_map.bind)
            patches.attribute(shard_map, "bind", bind)
        else:  # only this method also returns the residuals of a cond's linearized branch
            patches.attribute(type(shard_map), "bind_with_trace", bind_with_trace)

    def _bind_shard_map(self, bind: Callable[..., Any], *args: Any, **params: Any) -> Any:
        return self._retyped(bind(*args, **params), args, params)

    def _retyped(self, outputs: Any, args: Sequence[Any], params: Params) -> Any:
        """Make an unchecked inner shard_map's results vary as its operands do."""
        # JAX (0.6.2 to 0.12) drops the outer shard_map's types from these results.
        door = self.door
        if params.get("check_vma", True) or not self.acts:
            return outputs
        operands = args if "subfuns" in params else args[1:]  # up to JAX 0.8, after the function
        over = union(door.axis_types(map(door.typeof, operands)))
        order = tuple(a for a in door.manual_axes() if a in over)

        def retyped(x: Any) -> Any:
            if not door.can_cast(door.typeof(x)) or over <= door.axis_type(door.typeof(x)).axes:
                return x
            self.state.of(TypeNoteHooks).note("shard_map, whose own check is off,", over)
            return retype_varying(x, order)

        return outputs.map(retyped) if hasattr(outputs, "map") else [*map(retyped, outputs)]

    # The law.

    def law(self, primitive: Primitive, row: Row) -> Law:
        evaluate = vars(primitive).get("abstract_eval")
        if (
            row.law == "called"
            or evaluate is None
            or primitive.call_primitive  # it binds a function, too (JAX 0.7: scheduling_group)
            or self._is_lawful(evaluate)
        ):
            return Law()
        casts = not (row.each or row.drops or row.last or row.keeps)
        return Law(
            functools.partial(self._typed, primitive, row),
            functools.partial(self._cast, row) if casts else None,
        )

    def _is_lawful(self, evaluate: Any) -> bool:
        """Return whether JAX's standard rule gives the type; it requires equal operand types."""
        for _, value in held_by(evaluate):  # the function that was passed to def_abstract_eval
            evaluate = value if callable(value) else evaluate
        return isinstance(evaluate, functools.partial) and any(
            getattr(argument, "func", None) is self.door.standard_vma_rule
            for argument in evaluate.args
        )

    def _typed(
        self, primitive: Primitive, row: Row, evaluate: Callable[..., Any]
    ) -> Callable[..., Any]:
        several, name = primitive.multiple_results, primitive.name

        def abstract_eval(*avals: Aval, **params: Any) -> Any:
            answer = evaluate(*avals, **params)
            if not self.acts:
                return answer
            outputs, effects = answer
            if several:
                return self._kept(name, row, avals, outputs, params), effects
            return self._kept(name, row, avals, (outputs,), params)[0], effects

        return abstract_eval

    def _kept(
        self, name: str, row: Row, avals: Sequence[Aval], outputs: Sequence[Any], params: Params
    ) -> Sequence[Any]:
        """Return the outputs' avals, widened as the law requires."""
        # Each output must vary over the join of the operands, plus the axes that the primitive
        # adds, minus the axes that it may drop. With ``each``, an output depends on one operand
        # only; with ``last``, all outputs depend on the last operand only.
        door = self.door
        joined = [door.axis_type(aval).varying for aval in avals]
        if row.each and len(joined) == len(outputs):
            dropped = _dropped(row, params)
            needs = [varying - dropped for varying in joined]
        else:
            if row.last:
                joined = joined[-1:]
            need = self._added(row, params).union(*joined) - _dropped(row, params)
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

    def _added(self, row: Row, params: Params) -> frozenset[str]:
        if row.draws:
            return frozenset(self.door.manual_axes())
        if row.adds or params.get("axis_index_groups") is not None:
            return _named(params) & frozenset(self.door.manual_axes())
        return frozenset()

    def _cast(
        self, row: Row, trace: JaxTrace, args: Sequence[Any], avals: Sequence[Aval], params: Params
    ) -> Any:
        """Return operands cast to their join; a cast's transpose sums the gradient."""
        if len(args) < 2:  # a single operand already has the join's type
            return None
        door = self.door
        types = [*map(door.axis_type, avals)]
        alike = types.count(types[0]) == len(types)
        if (alike and not row.adds) or not self.acts:
            return None
        axes = union(types)
        if row.adds:
            axes |= self._added(row, params)
        if all(axes <= axis_type.varying for axis_type in types):
            return None
        return door.cast_bound(trace, args, [widened(have, axes) for have in types])


class HijaxHooks(Hooks):
    """Checks the results of hijax primitives, whose authors type them by hand."""

    # If an author forgets mesh axes in a result type (``out_aval``, or ``abstract_eval`` up to JAX
    # 0.11), JAX silently and wrongly types the result as invariant. So trace the primitive's
    # expansion, and compare its types with the author's.

    laws = ("hijax",)

    def law(self, primitive: Primitive, row: Row) -> Law:
        return Law(bind=self._bind)

    def _bind(
        self, rest: Rest, primitive: Primitive, trace: JaxTrace, args: Sequence[Any], params: Params
    ) -> Any:
        called = hijax_object(self.door, primitive, params)
        if self.acts and is_typed_by_hand(called):
            types = [*self.door.axis_types(map(self.door.typeof, args))]
            changes = typed_alike(self.door, params, called, union(types))
            if changes:
                wants = [widened(have, union(types)) for have in types]
                args = self.door.cast_bound(trace, args, wants)
            return rest(primitive, trace, args, {**params, **changes})
        result = rest(primitive, trace, args, params)
        outputs = result if primitive.multiple_results else [result]
        if not self.acts or (is_jaxs(called) and self._keeps_all(args, outputs)):
            # Trust JAX's own primitives, which JAX types by tracing. But a replay doesn't trace
            # them again, so check them if a result lacks axes.
            return result

        def expand(*flat: Any) -> Any:
            if called is primitive:
                return primitive.to_lojax(*flat, **params)
            return called.expand(*jax.tree_util.tree_unflatten(called.in_tree, flat))

        self._check(called, expand, args, outputs)
        return result

    def _keeps_all(self, args: Sequence[Any], outputs: Any) -> bool:
        """Return whether each result varies over every axis that any operand varies over."""
        door = self.door
        takes, gives = ([*filter(door.can_cast, map(door.typeof, x))] for x in (args, outputs))
        need = union(door.axis_types(takes))
        return all(need <= have.varying for have in door.axis_types(gives))

    def _check(
        self, called: Any, expand: Callable[..., Any], args: Sequence[Any], outputs: Any
    ) -> None:
        """Raise AxisError if a result's type has fewer axes than its value in the expansion."""
        door = self.door
        takes, gives = [*map(door.typeof, args)], [*map(door.typeof, outputs)]
        if any(isinstance(a, door.AbstractRef) or getattr(a, "has_qdd", False) for a in takes):
            return  # expanding the call would write to refs
        everywhere = frozenset(door.manual_axes())
        if not any(door.can_cast(a) and everywhere - door.axis_type(a).varying for a in gives):
            return
        for i, (aval, made) in enumerate(zip(gives, self._expanded(expand, takes))):
            if not door.can_cast(aval):
                continue
            lost = door.axis_type(made).varying - door.axis_type(aval).varying
            if lost:
                name = type(called).__name__
                if is_jaxs(called):
                    names = ", ".join(map(repr, sorted(lost)))
                    raise AxisError(
                        f"JAX's {name} was traced with values that are invariant over "
                        f"{show_axes(lost)}, but is run on ones that vary: its result would be "
                        "typed invariant. Cast the values that it is traced with first: "
                        f"shardrules.vary(x, {names}).",
                        axes=lost,
                    )
                raise AxisError(
                    f"result {i} of the hijax primitive {name!r} is typed invariant over "
                    f"{show_axes(lost)} by its out_aval or abstract_eval, but varies over them "
                    "where it is expanded: JAX would accept wrong out_specs, and sum "
                    "gradients. Give it the type of a value that varies as it does, such as "
                    "jax.typeof(x) of an operand of its shape.",
                    axes=lost,
                )

    def _expanded(self, expand: Callable[..., Any], takes: Sequence[Any]) -> list[Any]:
        """Return the avals of the results of the call, expanded to operations on arrays."""
        arrays = [array for aval in takes for array in aval.lo_ty()]
        results: list[Any] = []

        def run(*flat: Any) -> None:
            typed = iter([self.door.cast(x, self.door.axis_type(a)) for x, a in zip(flat, arrays)])
            values = [aval.raise_val(*itertools.islice(typed, len(aval.lo_ty()))) for aval in takes]
            results.extend(map(jax.typeof, jax.tree_util.tree_leaves(expand(*values))))

        jax.make_jaxpr(run)(*(jax.ShapeDtypeStruct(a.shape, a.dtype) for a in arrays))
        return results


def hijax_object(door: Door, primitive: Primitive, params: Params) -> Any:
    """Return the hijax object of a call; None if its primitive isn't a hijax one."""
    if isinstance(primitive, door.HiPrimitive or ()):  # JAX 0.11 and older
        return primitive
    if primitive is door.hi_primitive_p:
        return params.get("_prim", params.get("prim"))  # JAX 0.8 and 0.9: prim
    return None


def is_jaxs(called: Any) -> bool:
    return type(called).__module__.startswith("jax.")


def is_typed_by_hand(called: Any) -> bool:
    """Return whether a hijax object is JAX's own and its types don't come from tracing."""
    # These objects are jax.numpy's. In JAX 0.12, the type of frexp's exponents lacks all mesh axes,
    # and the type of ldexp's product lacks the mesh axes of its second operand.
    return is_jaxs(called) and ".numpy." in type(called).__module__


def typed_alike(door: Door, params: Params, called: Any, axes: frozenset[str]) -> dict[str, Any]:
    """Return the parameters to change so that all types of a call vary over ``axes``."""

    def lacks(aval: Aval) -> bool:
        return door.can_cast(aval) and not axes <= door.axis_type(aval).varying

    if not any(map(lacks, (*called.in_avals_flat, *called.out_avals_flat))):
        return {}

    def widen(leaf: Any) -> Any:
        if not isinstance(leaf, jax.core.ShapedArray) or not lacks(leaf):
            return leaf
        return door.with_axis_type(leaf, widened(door.axis_type(leaf), axes))

    new = copy.copy(called)
    vars(new).update(jax.tree_util.tree_map(widen, vars(called)))
    return {name: new for name, value in params.items() if value is called}


def _dropped(row: Row, params: Params) -> frozenset[str]:
    """Return the axes that a collective may drop: all that it names, or none within groups."""
    drops = row.drops and params.get("axis_index_groups") is None
    return _named(params) if drops else frozenset()


def _named(params: Params) -> frozenset[str]:
    named = params.get("axes", params.get("axis_name", ()))
    return frozenset(named if isinstance(named, (tuple, list)) else (named,))
