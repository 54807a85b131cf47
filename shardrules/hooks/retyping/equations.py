"""One equation of a jaxpr, as it is once what it takes varies over more mesh axes.

Its types follow from its operands': by its abstract eval, or, where it calls jaxprs, by theirs.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

from shardrules.door.jaxprs import TO_VARYING, gained, inner_jaxprs, is_inexact, union, widened
from shardrules.errors import AxisError, ShardrulesError
from shardrules.hooks.retyping.higher_order import HigherOrderOp
from shardrules.hooks.types.hijax import hijax_object
from shardrules.registry.axistypes import AxisType, show_axes


class Equation:
    """One equation whose operands have become ``operands``, which vary over more axes.

    ``env`` maps the old jaxpr's variables to the new ones; ``what`` names the branch or loop that
    holds the equation, for messages.
    """

    def __init__(
        self, retyping: Any, eqn: Any, operands: list[Any], env: dict[Any, Any], what: str | None
    ):
        self.retyping = retyping
        self.door = retyping.door
        self.eqn = eqn
        self.operands = operands
        self.env = env
        self.what = what
        self.eqns: list[Any] = []

    @property
    def types(self) -> list[AxisType]:
        """The operands' axis types."""
        return [*self.door.axis_types(atom.aval for atom in self.operands)]

    def retyped(self) -> list[Any]:
        """Return the equations that replace this one."""
        eqn = self.eqn
        if eqn.primitive.name in TO_VARYING:
            return self._recast()
        op = HigherOrderOp.of(
            self.retyping, eqn.primitive, eqn.params, [atom.aval for atom in eqn.invars]
        )
        if op is None:
            return self._operation()
        retyped = op.retyped(self.types, self.what)
        if retyped is None:
            return self._done({}, self.door.axis_types(var.aval for var in eqn.outvars))
        self._cast(retyped.operands)
        return self._done(retyped.changes, retyped.results)

    def _recast(self) -> list[Any]:
        """Cast only over the axes over which the operand doesn't vary yet."""
        (var,) = self.operands
        have, (out,) = self.door.axis_type(var.aval), self.eqn.outvars
        want = widened(have, self.door.axis_type(out.aval).varying)
        self._cast([want])
        self.env[out] = self.operands[0]
        return self.eqns

    def _operation(self) -> list[Any]:
        """Retype by the abstract eval; the operands vary alike, as JAX requires."""
        eqn = self.eqn
        if self.retyping.state.opaque_call_of(eqn.primitive, eqn.params) is None and any(
            var.aval.shape for inner in inner_jaxprs(eqn.params) for var in inner.invars
        ):
            raise self._error("the functions that it takes would have to be traced again")
        if self.what is not None and self._sums_unseen():
            raise self._error(
                "its bwd or transpose is a function of its author's, which may sum cotangents over "
                "them; if it does, only the first of these helps"
            )
        if all(map(self.door.can_cast, (atom.aval for atom in self.operands))):
            axes = self._gained() & union(self.types)
            self._cast([widened(have, axes) for have in self.types])
        try:
            avals, _ = eqn.primitive.abstract_eval(
                *(atom.aval for atom in self.operands), **eqn.params
            )
        except ShardrulesError:
            raise
        except Exception as error:
            raise self._error(
                f"{type(error).__name__}: {str(error).splitlines()[0]}"
                if str(error)
                else type(error).__name__
            ) from error
        avals = avals if eqn.primitive.multiple_results else [avals]
        return self._done({}, self.door.axis_types(avals))

    def _sums_unseen(self) -> bool:
        """Whether an author's function that no rule describes gives the cotangents."""
        # Written for an invariant operand it sums, and the cast before sums once more.
        door, (primitive, params) = self.door, (self.eqn.primitive, self.eqn.params)
        if not any(is_inexact(atom.aval) for atom in self.operands):
            return False
        called = hijax_object(door, primitive, params)
        if called is not None:
            return not type(called).__module__.startswith("jax.")
        opaque = self.retyping.state.opaque_call_of(primitive, params)
        return (opaque is None or opaque.registration is None) and not transposed_by_jax(primitive)

    def _gained(self) -> frozenset[str]:
        """Return the axes over which an operand varies now and did not before."""
        return gained(self.types, self.door.axis_types(atom.aval for atom in self.eqn.invars))

    def _cast(self, types: Sequence[AxisType]) -> None:
        """Cast operands, in equations before this one."""
        import jax

        wide = [
            i
            for i, (have, want) in enumerate(zip(self.types, types))
            if have != want and self.door.can_cast(self.operands[i].aval)
        ]
        if not wide:
            return
        casts = jax.make_jaxpr(lambda *xs: [self.door.cast(x, types[i]) for x, i in zip(xs, wide)])(
            *(self.operands[i].aval for i in wide)
        ).jaxpr
        atoms = dict(zip(casts.invars, (self.operands[i] for i in wide)))
        for eqn in casts.eqns:
            self.eqns.append(
                eqn.replace(
                    invars=[atoms.get(v, v) for v in eqn.invars], source_info=self.eqn.source_info
                )
            )
        for i, var in zip(wide, casts.outvars):
            self.operands[i] = atoms.get(var, var)

    def _done(self, changes: dict[str, Any], types: Sequence[AxisType]) -> list[Any]:
        """Return the casts and the equation with these parameters and output types."""
        outvars = [
            self.retyping.retype_variable(var, axis_type, self.env)
            for var, axis_type in zip(self.eqn.outvars, types)
        ]
        return [
            *self.eqns,
            self.eqn.replace(
                invars=self.operands, outvars=outvars, params={**self.eqn.params, **changes}
            ),
        ]

    def _error(self, why: str) -> AxisError:
        axes = self._gained()
        names = ", ".join(map(repr, sorted(axes)))
        at = self.door.source_line(self.eqn.source_info)
        if self.what is None:
            return AxisError(
                f"{self.eqn.primitive.name}{f' at {at}' if at else ''} was traced with values that "
                f"are invariant over {show_axes(axes)} and can't be run on ones that vary: {why}",
                primitive=self.eqn.primitive.name,
                axes=axes,
            )
        return AxisError(
            f"{self.what} varies over {show_axes(axes)}, so that devices along them run different "
            "branches or a different number of steps, and what is used there has to vary over "
            f"{show_axes(axes)} before. That can't be done for {self.eqn.primitive.name}"
            f"{f' at {at}' if at else ''}: {why}. Make the predicate the same on all devices, with "
            f"jax.lax.pmax over ({names},), or cast what the function takes and closes over "
            f"yourself, before: shardrules.vary(x, {names}).",
            primitive=self.eqn.primitive.name,
            axes=axes,
        )


def transposed_by_jax(primitive: Any) -> bool:
    """Whether a primitive's transpose is JAX's or ours, linear and without collectives."""
    # A user's may clip a cotangent, or sum it, and has to be given what it was given before.
    from jax.interpreters import ad

    rules = [ad.primitive_transposes.get(primitive)]
    while rules:
        rule = rules.pop()
        if isinstance(rule, functools.partial):
            rules += [rule.func, *filter(callable, rule.args)]
        elif rule is not None:
            module = getattr(rule, "__module__", None) or ""
            if module.partition(".")[0] not in ("jax", "shardrules"):
                return False
    return True
