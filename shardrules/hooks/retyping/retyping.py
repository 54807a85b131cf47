"""Jaxprs for inputs that vary over more mesh axes than those they were traced with.

A jaxpr's types are computed from its inputs' types, equation by equation: casts that have become
needless go, and no code of the user's runs twice.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator, Sequence
from typing import Any

from shardrules.door.internals import Door
from shardrules.door.jaxprs import callable_of, gained, gradient_sums, opened, read, variable
from shardrules.errors import AxisError
from shardrules.hooks.retyping.equations import Equation
from shardrules.hooks.state import Hooks, State
from shardrules.registry.axistypes import AxisType, show_axes


class Retyping(Hooks):
    """From a jaxpr and its inputs' axis types to the jaxpr with all types derived from these."""

    def __init__(self, door: Door, state: State):
        super().__init__(door, state)
        self._replayed: weakref.WeakKeyDictionary[Any, dict] = weakref.WeakKeyDictionary()

    def run_bwd(
        self, bwd: Any, axes: frozenset[str], args: Sequence[Any], by_cast: bool = False
    ) -> Any:
        """Run a custom_vjp's bwd for primals that vary over ``axes`` too."""
        over, cast = self.state.here.primals_over
        wider = over | axes, cast | axes if by_cast else cast
        with self.state.locally(primals_over=wider):
            return callable_of(bwd)(*args)

    def run_hiding(self, bwd: Any, axes: frozenset[str], args: Sequence[Any]) -> Any:
        """Run a bwd inside vmap's ``spmd_axis_name``, whose ``axes`` types don't show."""
        over, cast = self.state.here.primals_over
        with self.state.locally(primals_over=(over - axes, cast - axes)):
            return callable_of(bwd)(*args)

    @contextlib.contextmanager
    def inside_bwd(self) -> Iterator[tuple[frozenset[str], frozenset[str]]]:
        """Yield the axes of the current bwd, and hide them from what it differentiates."""
        # Those over which its primals vary too, and of these the ones over which they were cast.
        over = self.state.here.primals_over
        with self.state.locally(primals_over=(frozenset(), frozenset())):
            yield over

    def results(self, jaxpr: Any) -> tuple[AxisType, ...]:
        """Return the types of a jaxpr's outputs."""
        return self.door.axis_types(var.aval for var in opened(jaxpr).outvars)

    # A jaxpr.

    def jaxpr(self, jaxpr: Any, types: Sequence[AxisType], what: str | None) -> Any:
        """Return a jaxpr for inputs of these types; the same object if they are what it takes."""
        if what is not None:
            return self._retyped(jaxpr, types, what)
        invars = opened(jaxpr).invars
        avals = [
            self.door.with_axis_type(var.aval, axis_type) for var, axis_type in zip(invars, types)
        ]
        self.check_gradients(opened(jaxpr), invars, avals)
        replayed = self._replayed.setdefault(jaxpr, {})  # one jaxpr is lowered and cached once
        key = (*types, self.door.abstract_mesh(), self.state.scope, self.state.registry.version)
        if key not in replayed:
            try:
                replayed[key] = self._retyped(jaxpr, types, None)
            except AxisError:
                replayed[key] = self._retraced(jaxpr, types)
            if replayed[key] is jaxpr:
                replayed[key] = None  # else the value would keep its key alive
        return jaxpr if replayed[key] is None else replayed[key]

    def check_gradients(self, jaxpr: Any, variables: Any, avals: Any) -> None:
        """Raise AxisError if a jaxpr sums a gradient over axes that an input gained."""
        # The gradient of what is invariant is summed over the devices; of what varies, each has its
        # own. The jaxpr doesn't say which psum belongs to which of its inputs.
        before = (var.aval for var in variables)
        over = gained(self.door.axis_types(avals), self.door.axis_types(before))
        over = over and over & gradient_sums(jaxpr)
        if over:
            names = ", ".join(map(repr, sorted(over)))
            why = (
                f"a function that takes gradients was traced with values that are invariant over "
                f"{show_axes(over)}, and is run on ones that vary. The gradient with respect to an "
                "invariant value is summed over the devices, that of a varying one is each "
                "device's own."
            )
            raise AxisError(
                f"{why} Cast what it is traced with (closure conversion, an initial guess) "
                f"before: shardrules.vary(x, {names}).",
                axes=over,
                why=why,
            )

    def _retraced(self, jaxpr: Any, types: Sequence[AxisType]) -> Any:
        """Trace a jaxpr's equations again with values of these types."""
        import jax

        inner, constants = opened(jaxpr), getattr(jaxpr, "consts", ())
        new = jax.make_jaxpr(lambda *args: jax.core.eval_jaxpr(inner, constants, *args))(
            *(
                self.door.with_axis_type(var.aval, axis_type)
                for var, axis_type in zip(inner.invars, types)
            )
        )
        return new if isinstance(new, type(jaxpr)) else new.jaxpr  # it had no constants

    def _retyped(self, jaxpr: Any, types: Sequence[AxisType], what: str | None) -> Any:
        inner = opened(jaxpr)
        env: dict[Any, Any] = {}
        invars = [
            self.retype_variable(var, axis_type, env) for var, axis_type in zip(inner.invars, types)
        ]
        if not env:
            return jaxpr
        eqns: list[Any] = []
        for eqn in inner.eqns:
            operands = [read(env, atom) for atom in eqn.invars]
            if all(new is old for new, old in zip(operands, eqn.invars)):
                eqns.append(eqn)
                continue
            if all(new.aval == old.aval for new, old in zip(operands, eqn.invars)):
                eqns.append(eqn.replace(invars=operands))  # only a cast was removed
                continue
            with eqn.ctx.manager:
                eqns += Equation(self, eqn, operands, env, what).retyped()
        outvars = [read(env, atom) for atom in inner.outvars]
        # Keep debug_info: it holds the arguments' names.
        new = inner.replace(invars=invars, eqns=eqns, outvars=outvars, debug_info=inner.debug_info)
        return new if inner is jaxpr else jaxpr.replace(jaxpr=new)

    def retype_variable(self, var: Any, axis_type: AxisType, env: dict[Any, Any]) -> Any:
        """Return a variable of this type, recorded as the replacement of ``var``."""
        if not self.door.can_cast(var.aval) or self.door.axis_type(var.aval) == axis_type:
            return var
        env[var] = variable(var, self.door.with_axis_type(var.aval, axis_type))
        return env[var]

    def bwd(self, bwd: Any, axes: frozenset[str], by_cast: bool = False) -> Any:
        """Return a custom_vjp's bwd for primals that vary over ``axes`` too."""

        def run(*args):
            return self.run_bwd(bwd, axes, args, by_cast)

        return self.door.wrapped(run, bwd)
