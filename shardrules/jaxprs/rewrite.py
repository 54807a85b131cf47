"""Rewrite jaxprs, equation by equation."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import jax

from shardrules.door.internals import Door
from shardrules.door.jaxprs import opened, renamed_effects, value_of, variable
from shardrules.door.protocols import Aval, Eqn, Jaxpr, Var
from shardrules.registry.axistypes import AxisType


class Rewrite:
    """A jaxpr that is being rewritten: its new equations, and the replacements of its variables."""

    def __init__(self, jaxpr: Jaxpr):
        self.jaxpr = jaxpr
        self.inner = opened(jaxpr)
        self.env: dict[Any, Any] = {}
        self.eqns: list[Eqn] = []

    def renew(self, var: Var, aval: Aval) -> Any:
        """Return a variable with this aval that replaces ``var``."""
        self.env[var] = variable(var, aval)
        return self.env[var]

    def each(self, write: Callable[[Eqn], None]) -> None:
        """Call ``write``, which appends to ``eqns``, with each equation."""
        for eqn in self.inner.eqns:
            write(eqn)

    def finish(self, invars: Sequence[Any], outvars: Sequence[Any]) -> Any:
        """Return the new jaxpr, closed over the same constants as the old one."""
        inner = self.inner
        new = inner.replace(
            invars=[*invars],
            eqns=self.eqns,
            outvars=[*outvars],
            effects=renamed_effects(inner.effects, self.env),
            debug_info=inner.debug_info,  # it holds the arguments' names
        )
        return new if inner is self.jaxpr else self.jaxpr.replace(jaxpr=new)


def inlined(jaxpr: Jaxpr, atoms: Sequence[Var], **changes: Any) -> tuple[list[Eqn], list[Any]]:
    """Return a jaxpr's equations with its inputs replaced by ``atoms``, and its outputs."""
    env = dict(zip(jaxpr.invars, atoms))
    eqns = []
    for eqn in jaxpr.eqns:
        eqns.append(eqn.replace(invars=[value_of(env, v) for v in eqn.invars], **changes))
    return eqns, [value_of(env, var) for var in jaxpr.outvars]


def split(jaxpr: Jaxpr, taken: Callable[[Eqn], bool]) -> tuple[list[Eqn], Jaxpr]:
    """Return the taken equations, and a jaxpr of the rest, whose first inputs are their results."""
    out: list[Eqn] = []
    rest: list[Eqn] = []
    for eqn in jaxpr.eqns:
        (out if taken(eqn) else rest).append(eqn)
    results = itertools.chain.from_iterable(eqn.outvars for eqn in out)
    return out, jaxpr.replace(eqns=rest, invars=[*results, *jaxpr.invars])


def cast_atoms(
    door: Door, atoms: Sequence[Var], wants: Sequence[AxisType], scope: str = "", **changes: Any
) -> tuple[list[Eqn], list[Any]]:
    """Return equations that cast a jaxpr's atoms to these types, and the cast atoms."""
    wide = [
        i
        for i, (atom, want) in enumerate(zip(atoms, wants))
        if door.axis_type(atom.aval) != want and door.can_cast(atom.aval)
    ]
    atoms = [*atoms]
    if not wide:
        return [], atoms

    def cast(*values: Any) -> list[Any]:
        with jax.named_scope(scope) if scope else contextlib.nullcontext():
            return [door.cast(x, wants[i]) for x, i in zip(values, wide)]

    casts = jax.make_jaxpr(cast)(*(atoms[i].aval for i in wide)).jaxpr
    eqns, results = inlined(casts, [atoms[i] for i in wide], **changes)
    for i, atom in zip(wide, results):
        atoms[i] = atom
    return eqns, atoms


def cast_outputs(door: Door, jaxpr: Jaxpr, types: Sequence[AxisType], scope: str = "") -> Any:
    """Return a jaxpr with casts at its end that give its outputs these axis types."""
    new = Rewrite(jaxpr)
    casts, outvars = cast_atoms(door, new.inner.outvars, types, scope)
    if not casts:
        return jaxpr
    new.each(new.eqns.append)
    new.eqns += casts
    return new.finish(new.inner.invars, outvars)
