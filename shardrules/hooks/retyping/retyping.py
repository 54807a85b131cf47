"""Retype jaxprs for inputs that vary over more mesh axes than when they were traced.

The types are computed again from the inputs' types, equation by equation. This removes casts that
have become redundant, and doesn't run the user's code again.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import weakref
from collections.abc import Iterator, Sequence
from typing import Any

import jax

from shardrules.door.internals import Door
from shardrules.door.jaxprs import (
    NEW_REFS,
    TO_VARYING,
    callable_of,
    gained,
    inner_jaxprs,
    is_inexact,
    name_of,
    opened,
    renamed_effects,
    union,
    value_of,
    widened,
)
from shardrules.door.protocols import Aval, Eqn, Jaxpr, Primitive, Var
from shardrules.errors import AxisError, ShardrulesError
from shardrules.hooks.retyping.higher_order import HigherOrderOp
from shardrules.hooks.state import Hooks, State
from shardrules.hooks.types.join_law import hijax_object, is_typed_by_hand, typed_alike
from shardrules.jaxprs.rewrite import Rewrite, cast_atoms
from shardrules.jaxprs.walk import gradient_sums
from shardrules.registry.axistypes import AxisType, show_axes


class Retyping(Hooks):
    """Maps a jaxpr and its inputs' axis types to a jaxpr whose types all follow from these."""

    def __init__(self, door: Door, state: State):
        super().__init__(door, state)
        self._replayed: weakref.WeakKeyDictionary[Any, dict[Any, Any]] = weakref.WeakKeyDictionary()

    # A bwd may run for primals that vary over more axes than when it was traced.

    def run_bwd(self, bwd: Any, axes: frozenset[str], by_cast: bool, *args: Any) -> Any:
        """Run a custom_vjp's bwd for primals that gained ``axes``, by a cast if ``by_cast``."""
        frame = self.state.here.bwd
        cast = frame.cast | axes if by_cast else frame.cast
        with dataclasses.replace(frame, over=frame.over | axes, cast=cast):
            return callable_of(bwd)(*args)

    def bwd(self, bwd: Any, axes: frozenset[str], by_cast: bool = False) -> Any:
        run = functools.partial(self.run_bwd, bwd, axes, by_cast)
        return self.door.wrapped(run, bwd)

    def run_hiding(self, bwd: Any, axes: frozenset[str], args: Sequence[Any]) -> Any:
        """Run a bwd inside a vmap whose ``spmd_axis_name`` hides ``axes`` from the types."""
        frame = self.state.here.bwd
        hidden = dataclasses.replace(frame, over=frame.over - axes, cast=frame.cast - axes)
        with hidden:
            return callable_of(bwd)(*args)

    @contextlib.contextmanager
    def inside_bwd(self) -> Iterator[tuple[frozenset[str], frozenset[str]]]:
        """Yield the axes of the current bwd, and hide them from gradients that it takes."""
        # Yield the axes that its primals gained, and which of these axes they gained by a cast.
        frame = self.state.here.bwd
        bare = dataclasses.replace(frame, over=frozenset(), cast=frozenset())
        with bare:
            yield frame.over, frame.cast

    def results(self, jaxpr: Jaxpr) -> tuple[AxisType, ...]:
        return self.door.axis_types(var.aval for var in opened(jaxpr).outvars)

    # A jaxpr.

    def jaxpr(self, jaxpr: Jaxpr, types: Sequence[AxisType], what: str | None) -> Any:
        """Return a jaxpr for inputs of these types; the same object if they already fit."""
        if what is not None:
            return self._retyped(jaxpr, types, what)
        invars = opened(jaxpr).invars
        avals = [*map(self.door.with_axis_type, (var.aval for var in invars), types)]
        self.check_gradients(opened(jaxpr), invars, avals)
        replayed = self._replayed.setdefault(jaxpr, {})  # JAX lowers and caches each jaxpr once
        key = (*types, self.door.abstract_mesh(), self.state.scope, self.state.registry.version)
        if key not in replayed:
            try:
                new = self._retyped(jaxpr, types, None)
            except AxisError:
                new = self._retraced(jaxpr, avals)
            # Store None for the same jaxpr: in a WeakKeyDictionary, a value that holds its key
            # would keep it alive.
            replayed[key] = None if new is jaxpr else new
        return jaxpr if replayed[key] is None else replayed[key]

    def check_gradients(self, jaxpr: Jaxpr, variables: Any, avals: Sequence[Aval]) -> None:
        """Raise AxisError if a jaxpr sums a gradient over axes that an input gained."""
        # The gradient of an invariant value is summed over the devices, but a varying value has its
        # own gradient on each device. The jaxpr doesn't show which psum belongs to which input, so
        # any such psum is an error.
        before = (var.aval for var in variables)
        over = gained(self.door.axis_types(avals), self.door.axis_types(before))
        over = over and over & gradient_sums(jaxpr)
        if over:
            names = ", ".join(map(repr, sorted(over)))
            why = (
                "a function that takes gradients was traced with values that are invariant "
                f"over {show_axes(over)}, but is run on ones that vary. The gradient with "
                "respect to an invariant value is summed over the devices; the gradient with "
                "respect to a varying one is each device's own."
            )
            raise AxisError(
                f"{why} Cast what it is traced with (closure conversion, an initial guess) "
                f"before: shardrules.vary(x, {names}).",
                axes=over,
                why=why,
            )

    def _retraced(self, jaxpr: Any, avals: Sequence[Aval]) -> Any:
        run = functools.partial(jax.core.eval_jaxpr, opened(jaxpr), getattr(jaxpr, "consts", ()))
        new = jax.make_jaxpr(run)(*avals)
        return new if isinstance(new, type(jaxpr)) else new.jaxpr  # an open jaxpr has no constants

    def _retyped(self, jaxpr: Jaxpr, types: Sequence[AxisType], what: str | None) -> Any:
        new = Rewrite(jaxpr)
        inner, env = new.inner, new.env
        old = [var.aval for var in inner.invars]
        invars = [self.retype_variable(*each, new) for each in zip(inner.invars, types)]
        if not env:
            return jaxpr
        over = frozenset() if what is None else gained(types, self.door.axis_types(old))

        def write(eqn: Eqn) -> None:
            operands = [value_of(env, atom) for atom in eqn.invars]
            if over and name_of(eqn) in NEW_REFS:
                # Only some devices may store to this ref, so it varies even if its first value
                # doesn't.
                with eqn.ctx.manager:
                    _Equation(self, eqn, operands, new, what).made(over)
            elif all(new is old for new, old in zip(operands, eqn.invars)):
                new.eqns.append(eqn)
            elif all(new.aval == old.aval for new, old in zip(operands, eqn.invars)):
                new.eqns.append(eqn.replace(invars=operands))  # only a cast was removed
            else:
                with eqn.ctx.manager:
                    _Equation(self, eqn, operands, new, what).retyped()

        new.each(write)
        return new.finish(invars, [value_of(env, atom) for atom in inner.outvars])

    def retype_variable(self, var: Var, axis_type: AxisType, new: Rewrite) -> Any:
        """Return a variable of this type in the new jaxpr that replaces ``var``."""
        has_type = self.door.can_cast(var.aval) or isinstance(var.aval, self.door.AbstractRef)
        if not has_type or self.door.axis_type(var.aval) == axis_type:
            return var
        return new.renew(var, self.door.with_axis_type(var.aval, axis_type))


class _Equation:
    """One equation with its new ``operands``, which vary over more axes.

    ``new`` is the jaxpr to which it is added; ``what`` names the branch or loop that holds the
    equation, for messages.
    """

    def __init__(
        self, retyping: Any, eqn: Eqn, operands: list[Any], new: Rewrite, what: str | None
    ):
        self.retyping = retyping
        self.door = retyping.door
        self.eqn = eqn
        self.operands = operands
        self.new = new
        self.what = what

    @property
    def types(self) -> list[AxisType]:
        return [*self.door.axis_types(atom.aval for atom in self.operands)]

    def retyped(self) -> None:
        """Write the equations that replace this one."""
        eqn = self.eqn
        if eqn.primitive.name in TO_VARYING:
            # Cast only over the axes that the operand doesn't vary over yet.
            (out,) = eqn.outvars
            self._cast([widened(self.types[0], self.door.axis_type(out.aval).varying)])
            (self.new.env[out],) = self.operands
            return
        op = HigherOrderOp.of(
            self.retyping, eqn.primitive, eqn.params, [atom.aval for atom in eqn.invars]
        )
        if op is None:
            self._operation()
            return
        retyped = op.retyped(self.types, self.what)
        if retyped is None:
            self._done({}, self.door.axis_types(var.aval for var in eqn.outvars))
            return
        self._cast(retyped.operands)
        self._done(retyped.changes, retyped.results)

    def made(self, over: frozenset[str]) -> None:
        """Write equations that make the same ref, but varying over ``over`` too."""
        self._cast([widened(self.types[0], over)])
        self._done({}, self.types)

    def _operation(self) -> None:
        """Write an operation with the types of its abstract eval, its operands cast to agree."""
        # Raise where an author's code would have to run again, or might sum cotangents unseen. Cast
        # operands over the axes that they gained, so that they agree. Then ask the primitive for
        # the types of its results.
        eqn = self.eqn
        if self.retyping.state.opaque_call_of(eqn.primitive, eqn.params) is None and any(
            var.aval.shape for inner in inner_jaxprs(eqn.params) for var in inner.invars
        ):
            raise self._error("the functions that it takes would have to be traced again")
        if self.what is not None and self._sums_unseen():
            raise self._error(
                "its author wrote its bwd or transpose, which may sum cotangents over them; if "
                "it does, only the first of these helps"
            )
        if all(map(self.door.can_cast, (atom.aval for atom in self.operands))):
            axes = self._gained() & union(self.types)
            self._cast([widened(have, axes) for have in self.types])
        elif eqn.primitive in (self.door.swap_p, self.door.addupdate_p):
            ref, value, *indices = self.types  # JAX 0.12 stores only what has the ref's type
            self._cast([ref, widened(value, ref.varying), *indices])
        called = hijax_object(self.door, eqn.primitive, eqn.params)
        changes: dict[str, Any] = {}
        if is_typed_by_hand(called):
            changes = typed_alike(self.door, eqn.params, called, union(self.types))
        try:
            avals, _ = eqn.primitive.abstract_eval(
                *(atom.aval for atom in self.operands), **{**eqn.params, **changes}
            )
        except ShardrulesError:
            raise
        except Exception as error:
            text = f": {str(error).splitlines()[0]}" if str(error) else ""
            raise self._error(f"{type(error).__name__}{text}") from error
        avals = avals if eqn.primitive.multiple_results else [avals]
        types = [*self.door.axis_types(avals)]
        if called not in (None, eqn.primitive) and self._gained() - union(types):
            raise self._error("the types of a hijax primitive are those that it was made with")
        self._done(changes, types)

    def _sums_unseen(self) -> bool:
        """Return whether an author's function that no rule describes returns the cotangents."""
        # If the function was written for an invariant operand, it sums the operand's cotangent. The
        # operand is now cast first, and the transpose of that cast would sum once more.
        door, (primitive, params) = self.door, (self.eqn.primitive, self.eqn.params)
        if not any(is_inexact(atom.aval) for atom in self.operands):
            return False
        called = hijax_object(door, primitive, params)
        if called is not None:
            return not type(called).__module__.startswith("jax.")
        opaque = self.retyping.state.opaque_call_of(primitive, params)
        is_declared = opaque is not None and opaque.registration is not None
        return not (is_declared or transposed_by_jax(door, primitive))

    def _gained(self) -> frozenset[str]:
        return gained(self.types, self.door.axis_types(atom.aval for atom in self.eqn.invars))

    def _cast(self, types: Sequence[AxisType]) -> None:
        """Cast operands, in equations before this one."""
        eqns, self.operands = cast_atoms(
            self.door, self.operands, types, source_info=self.eqn.source_info
        )
        self.new.eqns += eqns

    def _done(self, changes: dict[str, Any], types: Sequence[AxisType]) -> None:
        """Write the equation with these parameters and output types."""
        pairs = zip(self.eqn.outvars, types)
        outvars = [self.retyping.retype_variable(*pair, self.new) for pair in pairs]
        params = {**self.eqn.params, **changes}
        effects = renamed_effects(self.eqn.effects, self.new.env)
        self.new.eqns.append(
            self.eqn.replace(invars=self.operands, outvars=outvars, params=params, effects=effects)
        )

    def _error(self, why: str) -> AxisError:
        axes, at = self._gained(), self.door.source_line(self.eqn.source_info)
        names = ", ".join(map(repr, sorted(axes)))
        name = self.eqn.primitive.name
        where = f"{name} at {at}" if at else name
        text = (
            f"{where} was traced with values that are invariant over {show_axes(axes)} and can't "
            f"be run on ones that vary: {why}"
        )
        if self.what is not None:
            text = (
                f"{self.what} varies over {show_axes(axes)}, so devices along them run "
                "different branches or a different number of steps, and the values used there "
                f"must vary over {show_axes(axes)} first. shardrules can't cast them for "
                f"{where}: {why}. Make the predicate the same on all devices, with "
                f"jax.lax.pmax over ({names},), or cast the function's arguments and the "
                f"values that it closes over yourself: shardrules.vary(x, {names})."
            )
        return AxisError(text, primitive=name, axes=axes)


def transposed_by_jax(door: Door, primitive: Primitive) -> bool:
    """Return whether a primitive's transpose is JAX's or ours, linear and without collectives."""
    # A user's transpose may clip or sum a cotangent, so it must get the same cotangent as before.
    return _are_jaxs(primitive, door.primitive_transposes, door.fancy_transposes)


def differentiated_by_jax(door: Door, primitive: Primitive) -> bool:
    """Return whether a primitive's jvp is JAX's, so that it doesn't depend on zero tangents."""
    return _are_jaxs(primitive, door.primitive_jvps, door.primitive_linearizations)


def _are_jaxs(primitive: Primitive, *tables: Any) -> bool:
    """Return whether a primitive's entries in these tables are JAX's functions, or ours."""
    rules = [table.get(primitive) for table in tables if table is not None]
    while rules:
        rule = rules.pop()
        if isinstance(rule, functools.partial):
            rules += [rule.func, *filter(callable, rule.args)]
        elif rule is not None:
            module = getattr(rule, "__module__", None) or ""
            if module.partition(".")[0] not in ("jax", "shardrules"):
                return False
    return True
