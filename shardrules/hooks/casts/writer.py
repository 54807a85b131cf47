"""Rewrite a linear program so that its casts stand where the labels put them."""

from __future__ import annotations

import collections
from collections.abc import Sequence
from typing import Any

import jax

from shardrules.door.jaxprs import (
    CALLS,
    name_of,
    opened,
    renamed_effects,
    scan_counts,
    value_of,
    variable,
)
from shardrules.door.protocols import Eqn, Jaxpr, Var
from shardrules.hooks.casts.cuts import Labels
from shardrules.hooks.casts.linear import IDENTITIES, Axes, Graph, Step, Unplaceable, Value, Where
from shardrules.hooks.retyping.higher_order import HigherOrderOp
from shardrules.hooks.retyping.retyping import Retyping
from shardrules.hooks.state import Hooks
from shardrules.hooks.types.identities import uncast
from shardrules.jaxprs.rewrite import Rewrite
from shardrules.registry.axistypes import AxisType


class Writer:
    def __init__(self, hooks: Hooks, graph: Graph, labels: Labels):
        self.door = hooks.door
        self.retyping = hooks.state.of(Retyping)
        self.graph = graph
        self.labels = labels
        self._written: dict[Any, Any] = {}
        self._casts: dict[Any, list[Any]] = {}
        # Maps each place to the tangents in it, and to the keys of the labels by which its jaxpr is
        # written.
        self._values: dict[Where, list[Value]] = collections.defaultdict(list)
        self._keys: dict[Where, list[Any]] = collections.defaultdict(list)
        for (where, _), value in graph.values.items():
            for depth in range(len(where) + 1):
                self._values[where[:depth]].append(value)
                self._keys[where[:depth]] += value, value.use
        for where, step in graph.at.items():
            for depth in range(len(where)):
                self._keys[where[:depth]].append(step)

    def aval(self, value: Value) -> Any:
        have = self.door.axis_type(value.aval)
        new = AxisType(self.labels[value], have.unreduced, have.reduced)
        return self.door.with_axis_type(value.aval, new)

    def cast(self, atom: Var, want: Axes, source: Any) -> list[Any]:
        """Return equations that cast or un-cast an atom; the last one's result replaces it."""
        have = self.door.axis_type(atom.aval)
        wide = have.vary(*want)
        if (have, want) not in self._casts:
            order = tuple(a for a in self.door.manual_axes() if a in wide.varying - want)

            def cast(x: jax.Array) -> jax.Array:
                x = self.door.cast(x, wide)
                return uncast(x, order) if order else x

            self._casts[have, want] = jax.make_jaxpr(cast)(atom.aval).jaxpr.eqns
        # Reuse the same equations for arrays of other shapes and dtypes.
        eqns = []
        for eqn in self._casts[have, want]:
            (var,) = eqn.outvars
            result = self.door.with_axis_type(atom.aval, self.door.axis_type(var.aval))
            outvars = [variable(var, result)]
            eqns.append(eqn.replace(invars=[atom], outvars=outvars, source_info=source))
            (atom,) = outvars
        return eqns

    def jaxpr(self, jaxpr: Jaxpr, where: Where, ends: Sequence[Any]) -> Any:
        """Return a jaxpr of the program, rewritten to have outputs with the avals ``ends``."""
        # Two places that call one jaxpr get the same new jaxpr if their labels agree. So JAX still
        # lowers it once.
        types = self.door.axis_types(ends)
        key = id(jaxpr), types, *(self.labels[key] for key in self._keys[where])
        if key in self._written:
            return self._written[key]
        body = Body(self, jaxpr, where)
        inner = body.new.inner
        invars = [body.renew(var) for var in inner.invars]
        body.new.each(body.write)
        outvars = [
            body.read(atom, end.varying, self.door.current_source())
            for atom, end in zip(inner.outvars, types)
        ]
        new = body.new.finish(invars, outvars)
        if where and all(self.labels[value] == value.varying for value in self._values[where]):
            if self.door.axis_types(atom.aval for atom in inner.outvars) == types:
                new = jaxpr  # no cast in this jaxpr moves
        self._written[key] = new
        return new


class Body:
    """A jaxpr that is being rewritten; ``where`` is its place."""

    def __init__(self, writer: Writer, jaxpr: Jaxpr, where: Where):
        self.writer = writer
        self.door = writer.door
        self.graph = writer.graph
        self.labels = writer.labels
        self.where = where
        self.new = Rewrite(jaxpr)
        self.cast: dict[tuple[Any, Axes], Any] = {}

    def value(self, atom: Var) -> Value | None:
        return None if hasattr(atom, "val") else self.graph.values.get((self.where, atom))

    def renew(self, var: Var) -> Any:
        value = self.value(var)
        if value is None or self.writer.aval(value) is var.aval:
            return var
        return self.new.renew(var, self.writer.aval(value))

    def read(self, atom: Var, want: Axes | None, source: Any) -> Any:
        """Return an atom that varies over ``want``; None means any type."""
        # A tangent is cast once, to all axes that any use needs. A use that needs fewer axes
        # un-casts the result, so that all cotangents share one psum.
        value, now = self.value(atom), value_of(self.new.env, atom)
        have = self.door.axis_type(now.aval).varying
        if want is None or want == have or not self.door.can_cast(atom.aval):
            return now
        if hasattr(atom, "val"):
            return self._cast(now, want, source)
        if (atom, want) not in self.cast:
            if value is None and have - want:
                raise Unplaceable("a residual varies where its result does not")
            used = want if value is None else self.labels[value.use]
            if want - have and used != want:
                now = self.read(atom, used, source)
            self.cast[atom, want] = self._cast(now, want, source)
        return self.cast[atom, want]

    def _cast(self, atom: Var, want: Axes, source: Any) -> Any:
        """Append equations that cast or un-cast an atom, and return the result."""
        self.new.eqns += self.writer.cast(atom, want, source)
        return self.new.eqns[-1].outvars[0]

    # Equations.

    def write(self, eqn: Eqn) -> None:
        name, inside = name_of(eqn), (*self.where, id(eqn))
        if all(self.value(atom) is None for atom in (*eqn.invars, *eqn.outvars)):
            self.new.eqns.append(eqn)
        elif name in IDENTITIES:
            (out,) = eqn.outvars
            self.new.env[out] = self.read(eqn.invars[0], self._made(out), eqn.source_info)
        elif name in CALLS:
            self._calls(eqn, CALLS[name], [inside], [var.aval for var in eqn.outvars])
        elif name == "scan":
            # A carry's result has the type with which the body takes it.
            constants, carries = scan_counts(eqn.params)
            before = opened(eqn.params["jaxpr"]).invars[constants : constants + carries]
            ends = [var.aval for var in eqn.outvars]
            for i, var in enumerate(before):
                value = self.graph.values.get((inside, var))
                ends[i] = ends[i] if value is None else self.writer.aval(value)
            self._calls(eqn, "jaxpr", [inside], ends)
        elif name == "cond":
            places = [(*inside, i) for i in range(len(eqn.params["branches"]))]
            self._calls(eqn, "branches", places, [var.aval for var in eqn.outvars])
        else:
            self._operation(eqn, self.graph.at[inside])

    def _made(self, var: Var) -> Axes | None:
        value = self.value(var)
        return None if value is None else self.labels[value]

    def _aval(self, var: Var) -> Any:
        value = self.value(var)
        return var.aval if value is None else self.writer.aval(value)

    def _done(self, eqn: Eqn, operands: list[Any], **changes: Any) -> None:
        outvars = [self.renew(var) for var in eqn.outvars]
        effects = renamed_effects(eqn.effects, self.new.env)
        params = {**eqn.params, **changes}
        self.new.eqns.append(
            eqn.replace(invars=operands, outvars=outvars, params=params, effects=effects)
        )

    def _calls(self, eqn: Eqn, key: str, places: list[Where], ends: list[Any]) -> None:
        ends = [
            end if value is None else self.writer.aval(value)
            for end, value in zip(ends, map(self.value, eqn.outvars))
        ]
        jaxprs = eqn.params[key] if key == "branches" else (eqn.params[key],)
        made = [self.graph.values.get((places[0], var)) for var in opened(jaxprs[0]).invars]
        chooses = len(eqn.invars) - len(made)  # 1 for a cond, whose first operand is the predicate
        operands = list(eqn.invars[:chooses])
        for atom, value in zip(eqn.invars[chooses:], made):
            want = None if value is None else self.labels[value]
            operands.append(self.read(atom, want, eqn.source_info))
        new = tuple(self.writer.jaxpr(jaxpr, at, ends) for jaxpr, at in zip(jaxprs, places))
        self._done(eqn, operands, **{key: new if key == "branches" else new[0]})

    def _operation(self, eqn: Eqn, step: Step) -> None:
        # If the step can't vary over more axes (``fixed`` is None), its tangents keep their types.
        # A bwd that gains axes is wrapped, so that it returns shares. Any other operation takes its
        # operands over the axes of its label; over ``fixed`` axes they keep their own.
        over, types = self.labels[step], self.door.axis_types(atom.aval for atom in eqn.invars)
        wants: list[Axes | None] = [type_.varying for type_ in types]
        changes = {}
        if step.fixed is None:
            wants = [None if self.value(a) is None else w for a, w in zip(eqn.invars, wants)]
        elif name_of(eqn) == "custom_lin":
            gained = over - step.fixed
            # If a bwd differentiates with respect to its residuals, they must vary as the
            # cotangents do. Any other bwd takes the residuals as it did when its sums were counted,
            # which avoids a second trace.
            kept = 0 if step.bwd and step.bwd.differentiates else eqn.params["num_res"]
            wants[kept:] = [type_.varying | gained for type_ in types[kept:]]
            if gained:
                changes["bwd"] = self.writer.retyping.bwd(eqn.params["bwd"], gained)
                changes["out_avals"] = [self._aval(var) for var in eqn.outvars]
        else:
            free = over - step.fixed
            wants = [free | (type_.varying & step.fixed) for type_ in types]
        operands = [self.read(a, want, eqn.source_info) for a, want in zip(eqn.invars, wants)]
        if name_of(eqn) == "custom_linear_solve" and step.fixed is not None:
            avals = [atom.aval for atom in eqn.invars]
            call = HigherOrderOp.of(self.writer.retyping, eqn.primitive, eqn.params, avals)
            assert call is not None
            retyped = call.retyped([self.door.axis_type(atom.aval) for atom in operands], None)
            changes = {} if retyped is None else retyped.changes
        self._done(eqn, operands, **changes)
