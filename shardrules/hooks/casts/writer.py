"""Rewrites a linear program with its casts where the labels say."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from shardrules.door.jaxprs import CALLS, name_of, opened, read, scan_counts, variable
from shardrules.hooks.casts.labels import Labels
from shardrules.hooks.casts.linear import IDENTITIES, NONE, Graph, Step, Unplaceable, Value, Where
from shardrules.hooks.notes import PlacedCast
from shardrules.hooks.retyping.higher_order import HigherOrderOp
from shardrules.hooks.retyping.retyping import Retyping
from shardrules.hooks.state import Hooks
from shardrules.hooks.types.identities import uncast
from shardrules.registry.axistypes import AxisType


class Writer:
    """Rewrites a program with casts where the labels say."""

    def __init__(self, hooks: Hooks, graph: Graph, labels: Labels):
        self.hooks = hooks
        self.door = hooks.door
        self.graph = graph
        self.labels = labels
        self.bytes = 0  # what the cotangents' psums sum on each device after the rewrite
        self.casts: list[PlacedCast] = []  # of tangents whose cotangents are not zero
        self._written: dict[Any, tuple[Any, int, list[Any]]] = {}
        self._under: dict[Where, list[Value]] = {}
        self._steps_under: dict[Where, list[Step]] = {}
        for (where, _), value in graph.values.items():
            for depth in range(len(where) + 1):
                self._under.setdefault(where[:depth], []).append(value)
        for where, step in graph.at.items():
            for depth in range(len(where)):
                self._steps_under.setdefault(where[:depth], []).append(step)

    def aval(self, value: Value) -> Any:
        """Return a tangent's aval in the rewritten program."""
        return self._retype(value.aval, self.labels.made[value])

    def _retype(self, aval: Any, axes: frozenset[str]) -> Any:
        have = self.door.axis_type(aval)
        return self.door.with_axis_type(aval, AxisType(axes, have.unreduced, have.reduced))

    def jaxpr(self, jaxpr: Any, where: Where, ends: Sequence[Any]) -> Any:
        """Return a jaxpr of the program, rewritten so that its outputs have the avals ``ends``."""
        inner = opened(jaxpr)
        # A jaxpr that is called in two places stays a single object if its labels agree.
        under = self._under.get(where, ())
        key = (
            id(jaxpr),
            tuple((self.labels.made[v], self.labels.used[v], v.live) for v in under),
            tuple(self.labels.steps[step] for step in self._steps_under.get(where, ())),
            tuple(map(self.door.axis_type, ends)),
            tuple(value.runs for value in under[:1]),
        )
        if key not in self._written:
            before = self.bytes, len(self.casts)
            new = self._write(jaxpr, inner, where, ends)
            if where and all(self.labels.made[value] == value.varying for value in under):
                if all(
                    self.door.axis_type(a.aval) == self.door.axis_type(b)
                    for a, b in zip(inner.outvars, ends)
                ):
                    new = jaxpr  # its casts stay where they are
            self._written[key] = new, self.bytes - before[0], self.casts[before[1] :]
            return new
        new, size_bytes, casts = self._written[key]
        self.bytes += size_bytes
        self.casts += casts
        return new

    def _write(self, jaxpr: Any, inner: Any, where: Where, ends: Sequence[Any]) -> Any:
        body = Body(self, inner, where)
        invars = [body.renew(var) for var in inner.invars]
        for index, eqn in enumerate(inner.eqns):
            body.write(eqn, index)
        outvars = [
            body.read(atom, self.door.axis_type(end).varying, None)
            for atom, end in zip(inner.outvars, ends)
        ]
        new = inner.replace(
            invars=invars, eqns=body.eqns, outvars=outvars, debug_info=inner.debug_info
        )
        return new if inner is jaxpr else jaxpr.replace(jaxpr=new)

    def note(self, value: Value, axes: frozenset[str]) -> None:
        """Record a cast of a tangent, if its cotangent is summed."""
        if value.live:
            self.bytes += value.cast_bytes
            self.casts.append(self.graph.placed(value, axes))


class Body:
    """A jaxpr that is being rewritten; ``inner`` is the original, ``where`` its place."""

    def __init__(self, writer: Writer, inner: Any, where: Where):
        self.writer = writer
        self.door = writer.door
        self.graph = writer.graph
        self.labels = writer.labels
        self.inner = inner
        self.where = where
        self.env: dict[Any, Any] = {}
        self.cast: dict[tuple[Any, frozenset[str]], Any] = {}
        self.eqns: list[Any] = []

    def value(self, atom: Any) -> Value | None:
        return None if hasattr(atom, "val") else self.graph.values.get((self.where, atom))

    def renew(self, var: Any) -> Any:
        """Return the variable that replaces ``var`` in the rewritten program."""
        value = self.value(var)
        if value is None or self.writer.aval(value) is var.aval:
            return var
        self.env[var] = variable(var, self.writer.aval(value))
        return self.env[var]

    def read(self, atom: Any, want: frozenset[str] | None, eqn: Any) -> Any:
        """Return an atom that varies over ``want``; None means no particular type."""
        # A tangent is cast once, to all the axes that any use needs. A use that needs fewer axes
        # un-casts the result, so that all cotangents share one psum.
        value = self.value(atom)
        now = atom if hasattr(atom, "val") else self.env.get(atom, atom)
        if want is None or not self.door.can_cast(atom.aval):
            return now
        have = self.door.axis_type(now.aval).varying
        if have == want:
            return now
        if hasattr(atom, "val"):
            return self._cast(now, want, eqn)
        if (atom, want) not in self.cast:
            used = have if value is None else self.labels.used[value]
            if value is None:
                if have - want:
                    raise Unplaceable("a residual varies where its result does not")
                made = self._cast(now, want, eqn)
            elif want - have and used != want:
                made = self._uncast(self.read(atom, used, eqn), want, eqn)
            elif want - have:
                self.writer.note(value, want - have)
                made = self._cast(now, want, eqn)
            else:
                made = self._uncast(now, want, eqn)
            self.cast[atom, want] = made
        return self.cast[atom, want]

    def _cast(self, atom: Any, want: frozenset[str], eqn: Any) -> Any:
        have = self.door.axis_type(atom.aval)
        wide = have.vary(*(want - have.varying))
        made = self._bind(lambda x: self.door.cast(x, wide), atom, eqn)
        left = wide.varying - want
        return self._uncast(made, want, eqn) if left else made

    def _uncast(self, atom: Any, want: frozenset[str], eqn: Any) -> Any:
        left = self.door.axis_type(atom.aval).varying - want
        order = tuple(a for a in self.door.manual_axes() if a in left)
        return self._bind(lambda x: uncast(x, order), atom, eqn)

    def _bind(self, function, atom: Any, eqn: Any) -> Any:
        import jax

        jaxpr = jax.make_jaxpr(
            lambda x: function(self.door.cast(x, self.door.axis_type(atom.aval)))
        )(jax.ShapeDtypeStruct(atom.aval.shape, atom.aval.dtype)).jaxpr
        # The first cast only gives the argument the atom's type: it is left out.
        atoms: dict[Any, Any] = {jaxpr.invars[0]: atom}
        info = self.door.current_source() if eqn is None else eqn.source_info
        kind = self.door.axis_type(atom.aval)
        for inner_eqn in jaxpr.eqns:
            (out,), operand = inner_eqn.outvars, atoms[inner_eqn.invars[0]]
            if operand is atom and self.door.axis_type(out.aval) == kind:
                atoms[out] = atom
                continue
            new = variable(out, out.aval)
            self.eqns.append(inner_eqn.replace(invars=[operand], outvars=[new], source_info=info))
            atoms[out] = new
        return atoms[jaxpr.outvars[0]]

    # Equations.

    def write(self, eqn: Any, index: int) -> None:
        """Write the equations that replace ``eqn``."""
        tangents = [self.value(atom) for atom in (*eqn.invars, *eqn.outvars)]
        if all(value is None for value in tangents):
            self.eqns.append(eqn)
            return
        name = name_of(eqn)
        if name in IDENTITIES:
            (out,) = eqn.outvars
            self.env[out] = self.read(eqn.invars[0], self._made(out), eqn)
            return
        inside = (*self.where, index)
        if name in CALLS:
            self._call(eqn, CALLS[name], inside)
        elif name == "scan":
            self._scan(eqn, inside)
        elif name == "cond":
            self._cond(eqn, inside)
        else:
            self._operation(eqn, self.graph.at[inside])

    def _made(self, var: Any) -> frozenset[str] | None:
        value = self.value(var)
        return None if value is None else self.labels.made[value]

    def _aval(self, var: Any) -> Any:
        value = self.value(var)
        return var.aval if value is None else self.writer.aval(value)

    def _done(self, eqn: Any, operands: list[Any], **changes: Any) -> None:
        outvars = [self.renew(var) for var in eqn.outvars]
        # From JAX 0.10 a write to a ref names the ref's variable.
        effects = {
            effect.replace(read(self.env, effect.input)) if hasattr(effect, "input") else effect
            for effect in eqn.effects
        }
        params = {**eqn.params, **changes}
        self.eqns.append(
            eqn.replace(invars=operands, outvars=outvars, params=params, effects=effects)
        )

    def _inner(self, jaxpr: Any, inside: Where, ends: list[Any]) -> tuple[Any, list[Any]]:
        """Return the rewritten jaxpr of a call, and the axes over which its inputs must vary."""
        made = [
            None if value is None else self.labels.made[value]
            for value in (self.graph.values.get((inside, var)) for var in opened(jaxpr).invars)
        ]
        return self.writer.jaxpr(jaxpr, inside, ends), made

    def _call(self, eqn: Any, key: str, inside: Where) -> None:
        ends = [self._aval(var) for var in eqn.outvars]
        inner, made = self._inner(eqn.params[key], inside, ends)
        operands = [self.read(atom, want, eqn) for atom, want in zip(eqn.invars, made)]
        self._done(eqn, operands, **{key: inner})

    def _scan(self, eqn: Any, inside: Where) -> None:
        jaxpr = eqn.params["jaxpr"]
        constants, carries = scan_counts(eqn.params)
        inner = opened(jaxpr)
        before = inner.invars[constants : constants + carries]
        ends = []
        for i, var in enumerate(eqn.outvars):
            value = self.value(var)
            if value is None and i < carries:
                value = self.graph.values.get((inside, before[i]))
            ends.append(var.aval if value is None else self.writer.aval(value))
        new, made = self._inner(jaxpr, inside, ends)
        operands = [self.read(atom, want, eqn) for atom, want in zip(eqn.invars, made)]
        self._done(eqn, operands, jaxpr=new)

    def _cond(self, eqn: Any, inside: Where) -> None:
        ends = [self._aval(var) for var in eqn.outvars]
        branches, made = [], [None] * (len(eqn.invars) - 1)
        for i, branch in enumerate(eqn.params["branches"]):
            new, wants = self._inner(branch, (*inside, i), ends)
            branches.append(new)
            made = wants
        operands = [self.read(atom, want, eqn) for atom, want in zip(eqn.invars[1:], made)]
        self._done(eqn, [eqn.invars[0], *operands], branches=tuple(branches))

    def _operation(self, eqn: Any, step: Any) -> None:
        over = self.labels.steps[step]
        changes = {}
        if step.fixed is None:
            wants = [
                None if self.value(atom) is None else self.door.axis_type(atom.aval).varying
                for atom in eqn.invars
            ]
        elif name_of(eqn) == "custom_lin":
            gained = over - step.fixed
            # A bwd that differentiates by its residuals needs them to vary as the cotangents do.
            # Others take the same residuals as when their sums were counted: no second trace.
            kept = 0 if step.bwd.differentiates else eqn.params["num_res"]
            wants = [
                self.door.axis_type(atom.aval).varying | (NONE if i < kept else gained)
                for i, atom in enumerate(eqn.invars)
            ]
            self.writer.bytes += sum(count for count, _ in step.left(gained))
            if gained:
                changes["bwd"] = self.writer.hooks.state.of(Retyping).bwd(eqn.params["bwd"], gained)
                changes["out_avals"] = [self._aval(var) for var in eqn.outvars]
        else:
            free = over - step.fixed
            wants = [
                free | (self.door.axis_type(atom.aval).varying & step.fixed) for atom in eqn.invars
            ]
        operands = [self.read(atom, want, eqn) for atom, want in zip(eqn.invars, wants)]
        if name_of(eqn) == "custom_linear_solve" and step.fixed is not None:
            changes = self._retyped(eqn, operands)
        self._done(eqn, operands, **changes)

    def _retyped(self, eqn: Any, operands: list[Any]) -> dict[str, Any]:
        """Return the parameters of a call that change with the types of these operands."""
        retyping = self.writer.hooks.state.of(Retyping)
        avals = [atom.aval for atom in eqn.invars]
        call = HigherOrderOp.of(retyping, eqn.primitive, eqn.params, avals)
        assert call is not None
        retyped = call.retyped([self.door.axis_type(atom.aval) for atom in operands], None)
        return {} if retyped is None else retyped.changes
