"""Branches and bodies as they are once what they take varies over more mesh axes.

What is chosen by a varying predicate varies, and so does its gradient: JAX puts a psum wherever an
invariant value was cast, and one inside of a branch is run by the devices that took it only (JAX
0.6 to 0.12: the program hangs). So operands are cast before the branches, and in these nothing is
left to cast. A jaxpr's types are computed anew from its inputs' here, equation by equation: casts
that have become needless go, and no code of the user's runs twice.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from shardrules.door.internals import Door
from shardrules.door.jaxprs import (
    JOINED,
    TO_VARYING,
    callable_of,
    gradient_sums,
    inner_jaxprs,
    is_inexact,
    named_axes,
    opened,
    read,
    variable,
    widened,
)
from shardrules.errors import AxisError
from shardrules.hooks.retyping.equations import Equation
from shardrules.hooks.retyping.marks import Mark
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
        known, cast = self.state.here.primals_over
        over = axes | known, cast | axes if by_cast else cast
        with self.state.locally(primals_over=over):
            return callable_of(bwd)(*args)

    def run_hiding(self, bwd: Any, axes: frozenset[str], args: Sequence[Any]) -> Any:
        """Run a bwd inside vmap's ``spmd_axis_name``, whose ``axes`` types don't show."""
        known, cast = self.state.here.primals_over
        with self.state.locally(primals_over=(known - axes, cast - axes)):
            return callable_of(bwd)(*args)

    @property
    def over(self) -> frozenset[str]:
        """The axes over which the primals of the current bwd vary too."""
        return self.state.here.primals_over[0]

    @contextlib.contextmanager
    def inside_bwd(self) -> Iterator[tuple[frozenset[str], frozenset[str]]]:
        """Yield the axes of the current bwd, and hide them from what it differentiates."""
        # Those over which its primals vary too, and of these the ones over which they were cast.
        over = self.state.here.primals_over
        with self.state.locally(primals_over=(frozenset(), frozenset())):
            yield over

    # What is chosen.

    def branches(
        self,
        over: frozenset[str],
        operands: Sequence[AxisType],
        branches: Sequence[Any],
        what: str | None,
    ) -> tuple[list[AxisType], tuple[Any, ...]] | None:
        """Return the types of a cond's operands and its branches for these; None if it fits."""
        door = self.door
        avals = [var.aval for var in opened(branches[0]).invars]
        wide = any(one.varying - door.axis_type(aval).varying for one, aval in zip(operands, avals))
        if self._missing(over, [var.aval for b in branches for var in opened(b).outvars]) or (
            self._casts_inside(over, operands, avals, branches)
        ):
            operands = [
                widened(one, over) if door.can_cast(aval) else one
                for one, aval in zip(operands, avals)
            ]
        elif not wide:
            return None
        new = [self.jaxpr(branch, operands, what) for branch in branches]
        results = [*map(self.results, new)]
        types = [
            widened(each[0], over.union(*(one.varying for one in each)))
            if door.can_cast(var.aval)
            else each[0]
            for each, var in zip(zip(*results), opened(new[0]).outvars)
        ]
        return list(operands), tuple(door.cast_outputs(branch, types, JOINED) for branch in new)

    def loop(
        self, types: Sequence[AxisType], params: dict[str, Any], what: str | None
    ) -> tuple[list[AxisType], dict[str, Any]] | None:
        """Return the types of a loop's operands and its parameters; None if it fits."""
        # A carry that the body hands on as it is holds the same however often the body runs.
        door = self.door
        first, second = params["cond_nconsts"], params["body_nconsts"]
        constants, carry = list(types[: first + second]), list(types[first + second :])
        inner = opened(params["body_jaxpr"])
        changed = [
            out is not var and door.can_cast(var.aval)
            for out, var in zip(inner.outvars, inner.invars[second:])
        ]
        while True:
            condition = self.jaxpr(params["cond_jaxpr"], constants[:first] + carry, what)
            body = self.jaxpr(params["body_jaxpr"], constants[first:] + carry, what)
            (decides,) = self.results(condition)
            wider = [
                widened(have, result.varying | decides.varying) if change else have
                for have, result, change in zip(carry, self.results(body), changed)
            ]
            if wider == carry:
                break
            carry = wider
        if condition is params["cond_jaxpr"] and body is params["body_jaxpr"]:
            return None
        return constants + carry, dict(
            params, cond_jaxpr=condition, body_jaxpr=door.cast_outputs(body, carry)
        )

    def _missing(self, over: frozenset[str], avals: Iterable[Any]) -> bool:
        """Whether a chosen value is typed as if all devices along ``over`` chose alike."""
        for aval in avals:
            have = self.door.axis_type(aval)
            if self.door.can_cast(aval) and over - have.varying - have.unreduced:
                return True
        return False

    def _casts_inside(self, over, operands, avals, branches) -> bool:
        """Whether a branch casts what may come from an operand: its gradient is then a psum."""
        narrow = [
            i
            for i, (one, aval) in enumerate(zip(operands, avals))
            if self._missing(over, [self.door.with_axis_type(aval, one)]) and is_inexact(aval)
        ]
        return bool(narrow) and any(
            self._casts(branch, [branch.invars[i] for i in narrow], over)
            for branch in map(opened, branches)
        )

    def _casts(self, jaxpr, narrow, over) -> bool:
        """Whether a jaxpr casts what comes from inputs that don't vary over all of ``over``."""
        narrow = set(narrow)
        for eqn in jaxpr.eqns:
            if not any(atom in narrow for atom in eqn.invars if not hasattr(atom, "val")):
                continue
            if eqn.primitive.name in TO_VARYING and over & named_axes(eqn.params):
                return True
            if "bwd" in eqn.params and self._mixed(eqn, over):
                return True  # a custom_vjp, whose bwd's cotangents are summed
            if self.state.known_of(eqn.primitive, eqn.params) is None and any(
                self._casts(inner, inner.invars, over) for inner in inner_jaxprs(eqn.params)
            ):
                return True
            narrow |= {var for var in eqn.outvars if is_inexact(var.aval)}
        return False

    def _mixed(self, eqn, over) -> bool:
        kinds = {
            self.door.axis_type(v.aval).varying & over for v in eqn.invars if is_inexact(v.aval)
        }
        return len(kinds) > 1

    def results(self, jaxpr: Any) -> tuple[AxisType, ...]:
        """Return the types of a jaxpr's outputs."""
        return self.door.axis_types(var.aval for var in opened(jaxpr).outvars)

    # A jaxpr.

    def jaxpr(self, jaxpr: Any, types: Sequence[AxisType], what: str | None) -> Any:
        """Return a jaxpr for inputs of these types; the same object if they are what it takes."""
        if what is not None:
            return self._renewed(jaxpr, types, what)
        invars = opened(jaxpr).invars
        avals = [self.door.with_axis_type(var.aval, one) for var, one in zip(invars, types)]
        self.check_gradients(opened(jaxpr), [(var.aval, a) for var, a in zip(invars, avals)])
        known = self._replayed.setdefault(jaxpr, {})  # one jaxpr is lowered and cached once
        key = (*types, self.door.abstract_mesh(), self.state.scope, self.state.registry.version)
        if key not in known:
            try:
                known[key] = self._renewed(jaxpr, types, None)
            except AxisError:
                known[key] = self._retraced(jaxpr, types)
            if known[key] is jaxpr:
                known[key] = None  # or it would keep itself
        return jaxpr if known[key] is None else known[key]

    def check_gradients(self, jaxpr: Any, inputs: Sequence[tuple[Any, Any]]) -> None:
        """Raise AxisError if a jaxpr sums a gradient over axes that an input gained."""
        # The gradient of what is invariant is summed over the devices; of what varies, each has its
        # own. The jaxpr doesn't say which psum belongs to which of its inputs.
        gained = frozenset().union(
            *(
                self.door.axis_type(new).varying - self.door.axis_type(old).varying
                for old, new in inputs
            )
        )
        over = gained and gained & gradient_sums(jaxpr)
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
            *(self.door.with_axis_type(var.aval, one) for var, one in zip(inner.invars, types))
        )
        return new if isinstance(new, type(jaxpr)) else new.jaxpr  # one that had no constants

    def _renewed(self, jaxpr: Any, types: Sequence[AxisType], what: str | None) -> Any:
        inner = opened(jaxpr)
        env: dict[Any, Any] = {}
        invars = [self.renew(var, one, env) for var, one in zip(inner.invars, types)]
        if not env:
            return jaxpr
        eqns: list[Any] = []
        for eqn in inner.eqns:
            operands = [read(env, atom) for atom in eqn.invars]
            if all(new is old for new, old in zip(operands, eqn.invars)):
                eqns.append(eqn)
                continue
            if all(new.aval == old.aval for new, old in zip(operands, eqn.invars)):
                eqns.append(eqn.replace(invars=operands))  # a cast went, and nothing else
                continue
            with eqn.ctx.manager:
                eqns += Equation(self, eqn, operands, env, what).retyped()
        outvars = [read(env, atom) for atom in inner.outvars]
        # With its debug_info: the names of its arguments are what they were.
        new = inner.replace(invars=invars, eqns=eqns, outvars=outvars, debug_info=inner.debug_info)
        return new if inner is jaxpr else jaxpr.replace(jaxpr=new)

    def renew(self, var: Any, one: AxisType, env: dict[Any, Any]) -> Any:
        """Return a variable of this type, recorded as the replacement of ``var``."""
        if not self.door.can_cast(var.aval) or self.door.axis_type(var.aval) == one:
            return var
        env[var] = variable(var, self.door.with_axis_type(var.aval, one))
        return env[var]

    def thunk(
        self,
        thunk: Any,
        types: Sequence[AxisType],
        what: str | None,
        cast: frozenset[str] = frozenset(),
    ) -> Any:
        """Return a custom rule's thunk that retypes its jaxpr when called."""
        known: dict[tuple, Any] = {}

        def run(*zeros):
            if cast:
                zeros = tuple(Mark(one, cast) for one in zeros)
            if zeros not in known:
                jaxpr, *others = callable_of(thunk)(*zeros)
                if len(others) == 2:  # of a custom_jvp; that of a custom_vjp takes the primals
                    tangents = [one for one, zero in zip(types, zeros) if not zero]
                    jaxpr = self.jaxpr(jaxpr, [*types, *tangents], what)
                    results, out_zeros = self.results(jaxpr), others[1]
                    primals = results[: len(out_zeros)]
                    wants = [one for one, zero in zip(primals, out_zeros) if not zero]
                    jaxpr = self.door.cast_outputs(
                        jaxpr,
                        [
                            *primals,
                            *(
                                widened(have, want.varying)
                                for have, want in zip(results[len(primals) :], wants)
                            ),
                        ],
                    )
                else:
                    jaxpr = self.jaxpr(jaxpr, types, what)
                known[zeros] = (jaxpr, *others)
            return known[zeros]

        return self.door.wrapped(run, thunk)

    def bwd(self, bwd: Any, axes: frozenset[str], by_cast: bool = False) -> Any:
        """Return a custom_vjp's bwd for primals that vary over ``axes`` too."""

        def run(*args):
            return self.run_bwd(bwd, axes, args, by_cast)

        return self.door.wrapped(run, bwd)
