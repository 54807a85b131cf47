"""Casts of tangents at the minimum cut: what ``install()`` does unless it says ``casts="late"``.

JAX casts as late as it can, and the psum that a cast becomes stands there in the backward pass: in
every step of a scan, or over the many rows that one row was repeated to. Just before JAX transposes
the linear part of a shard_map's body, its casts are placed anew (``linear``), and nothing else of
the program changes: forward passes, residuals and a bwd's own equations are what they were.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any

from shardrules.door.jaxprs import CALLS, name_of, opened, read, scan_counts, variable
from shardrules.door.patching import Patches
from shardrules.hooks.casts.cheapest import Labels, cheapest, cost, cost_as_traced, least_bytes
from shardrules.hooks.casts.linear import (
    IDENTITIES,
    Graph,
    Step,
    Unplaceable,
    Value,
    Where,
    absent_tangents,
)
from shardrules.hooks.cotangents.linearity import linear_in
from shardrules.hooks.notes import PlacedCast, Placement
from shardrules.hooks.retyping.higher_order import HigherOrderOp
from shardrules.hooks.retyping.retyping import Retyping
from shardrules.hooks.state import Hooks
from shardrules.hooks.types.identities import MARK, uncast
from shardrules.registry.axistypes import AxisType

__all__ = ["CastHooks"]


class CastHooks(Hooks):
    """The hooks at the linearization of functions and at the transposition of linear programs."""

    def install(self, patches: Patches) -> None:
        """Replace the functions that linearize one and that transpose a jaxpr."""
        patches.attribute(*self.door.owner("linearize"), self._linearize)
        for key in ("older_backward_pass", "backward_pass", "backward_pass3"):
            if getattr(self.door, key) is not None:
                transpose = getattr(self.door, key)
                patches.attribute(*self.door.owner(key), functools.partial(self._run, transpose))

    def _linearize(self, *args, **kwargs):
        # Counted in the scope, which is in JAX's trace key: a gradient that a jit holds is traced
        # anew for this one.
        scope = self.state.scope
        if scope.active and (scope.casts == "cheapest" or scope.notes is not None):
            scope = dataclasses.replace(scope, derivatives_count=scope.derivatives_count + 1)
        with self.state.enter(scope):
            return self.door.linearize(*args, **kwargs)

    def _run(self, transpose, jaxpr, transform_stack, consts, primals_in, *rest, **kwargs):
        self.state.record_gradient()
        if not self.state.transposing and self.door.checking():
            asked = self._asked(jaxpr)
            if not asked and self.state.scope.notes is None:
                return transpose(jaxpr, transform_stack, consts, primals_in, *rest, **kwargs)
            cotangents = rest[0] if rest else next(iter(kwargs.values()))
            # What is transposed inside was looked at as a part of it.
            with self.state.in_transposition():
                placed = self._placed(jaxpr, [*consts, *primals_in], cotangents, asked)
                if not asked:
                    placed = jaxpr
                if placed is not jaxpr and self.door.older_backward_pass is not None:
                    return self._transpose(
                        transpose, placed, transform_stack, consts, primals_in, cotangents
                    )
                return transpose(placed, transform_stack, consts, primals_in, *rest, **kwargs)
        return transpose(jaxpr, transform_stack, consts, primals_in, *rest, **kwargs)

    def _transpose(self, transpose, jaxpr, transform_stack, consts, primals_in, cotangents):
        """Transpose a program in which residuals are cast; to JAX 0.7 all of it has to be linear.

        What is known is evaluated before, as shard_map's own transpose does there.
        """
        door = self.door
        linear = [isinstance(x, door.UndefinedPrimal) for x in primals_in]
        whole = jaxpr.replace(constvars=[], invars=[*jaxpr.constvars, *jaxpr.invars])
        known, unknown, *_ = door.partial_eval_jaxpr(
            door.close_jaxpr(whole), [False] * len(consts) + linear, True
        )
        values = [*consts, *(x for x, one in zip(primals_in, linear) if not one)]
        residuals = door.jaxpr_as_fun(known)(*values)
        tangents = [x for x, one in zip(primals_in, linear) if one]
        returned = iter(
            transpose(unknown.jaxpr, transform_stack, (), (*residuals, *tangents), cotangents)[
                len(residuals) :
            ]
        )
        return [
            next(returned) if one else door.Zero(var.aval) for one, var in zip(linear, jaxpr.invars)
        ]

    def _asked(self, jaxpr: Any) -> bool:
        """Whether this program's casts are to be placed: everywhere, or by ``place_casts``."""
        scope = self.state.scope
        return (scope.active and scope.casts == "cheapest") or any(
            eqn.primitive.name == MARK for eqn in jaxpr.eqns
        )

    def _placed(self, jaxpr: Any, values: Sequence[Any], cotangents: Any, asked: bool) -> Any:
        """Return the program with its casts placed, or itself where that saves nothing."""
        tangents = (self.door.UndefinedPrimal, *self._accumulators)
        # To JAX 0.12 constants are the first of the inputs.
        linear = [isinstance(x, tangents) for x in values[len(jaxpr.constvars) :]]
        wanted = [not isinstance(ct, self.door.Zero) for ct in cotangents]
        again = self.state.scope.derivatives_count > 0
        why, before_bytes = "", 0
        try:
            graph = Graph(self.door, jaxpr, linear, wanted, self._is_opaque, again)
            before = cost_as_traced(graph)
            noted = self.state.scope.notes is not None
            if not noted and (not before.bytes or least_bytes(graph) >= before.bytes):
                return jaxpr  # as of most programs: no move can save a byte
            graph.settle(self._sums)
            before = cost_as_traced(graph)
            before_bytes = before.bytes
            labels = cheapest(graph)
            after = cost(graph, labels)
            if after < before and after.within(before):
                writer = Writer(self, graph, labels)
                placed = writer.jaxpr(jaxpr, (), [atom.aval for atom in jaxpr.outvars])
                self.state.note_placement(
                    Placement(before_bytes, writer.bytes, tuple(writer.casts), asked, "")
                )
                return placed
        except Exception as error:  # the program as JAX traced it is right; its casts stay
            text = str(error).splitlines()[0] if str(error) else ""
            why = text if isinstance(error, Unplaceable) else f"{type(error).__name__}: {text}"
        self.state.note_placement(Placement(before_bytes, before_bytes, (), asked, why))
        return jaxpr

    @property
    def _accumulators(self) -> tuple[type, ...]:
        one = self.door.GradAccum
        return () if one is None else (one,)

    def _is_opaque(self, eqn: Any) -> bool:
        return self.state.known_of(eqn.primitive, eqn.params) is not None

    def _sums(
        self, eqn: Any
    ) -> tuple[list[tuple[int, frozenset[str]]], frozenset[str], frozenset[str] | None]:
        """Return what the hooks sum of the cotangents that a custom_vjp's bwd returns.

        An axis over which bwd itself returns the whole sum of one is not among them: a cast before
        would only add a psum.

        Args:
          eqn: the equation of its linear part.

        Returns:
          The bytes and axes of each; the axes over which its operands may be cast before instead;
          and the axes over which bwd sums by itself. Over the others it may as well be given the
          shares of a cotangent, and what it returns be summed; None where it is not linear.
        """
        import jax

        params = eqn.params
        count = params["num_res"]
        residuals, tangents = eqn.invars[:count], eqn.invars[count:]
        axis_types = [self.door.axis_type(atom.aval) for atom in tangents]
        arriving = frozenset().union(
            *(self.door.axis_type(atom.aval).varying for atom in (*residuals, *eqn.outvars))
        )
        if any(one.unreduced or one.reduced for one in axis_types):
            raise Unplaceable("a custom_vjp's primal is unreduced or reduced over a mesh axis")
        avals = [atom.aval for atom in residuals]
        avals += [self.door.cotangent_aval(var.aval) for var in eqn.outvars]
        zeros: list[bool] = []

        def run(*flat):
            flat = [self.door.cast(x, self.door.axis_type(a)) for x, a in zip(flat, avals)]
            returned = list(params["bwd"].call_wrapped(*flat))
            zeros[:] = [isinstance(x, (self.door.Zero, self.door.SymbolicZero)) for x in returned]
            return [x for x, zero in zip(returned, zeros) if not zero]

        structs = [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in avals]
        with self.state.recording_sums() as heard:
            traced = jax.make_jaxpr(run)(*structs)
        variables = traced.jaxpr.invars  # from JAX 0.11 what it closes over stands first
        by_itself = linear_in(traced.jaxpr, variables[len(variables) - len(eqn.outvars) :])
        summed: dict[int, frozenset[str]] = dict(heard)
        indices = [i for i, zero in enumerate(absent_tangents(eqn)) if not zero]
        sums = [
            (math.prod(atom.aval.shape) * atom.aval.dtype.itemsize, summed[i])
            for i, atom in zip(indices, tangents)
            if summed.get(i)
        ]
        whole = {  # over these bwd returns the sum of one
            axis
            for i, one in zip(indices, axis_types)
            if not zeros[i]
            for axis in arriving - one.varying - summed.get(i, frozenset())
        }
        moves = (arriving & frozenset().union(*(axes for _, axes in sums))) - whole
        return sums, moves, by_itself


class Writer:
    """Writes a program anew, with casts where the labels say.

    Args:
      hooks: the hooks.
      graph: the program's tangents and steps.
      labels: where they vary.

    Attributes:
      bytes: what the cotangents' psums sum now, on each device.
      casts: those of tangents whose cotangents are not zero.
    """

    def __init__(self, hooks: CastHooks, graph: Graph, labels: Labels):
        self.hooks = hooks
        self.door = hooks.door
        self.graph = graph
        self.labels = labels
        self.bytes = 0
        self.casts: list[PlacedCast] = []
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
        """Return a tangent's aval as it is made now."""
        return self.retyped(value.aval, self.labels.made[value])

    def retyped(self, aval: Any, axes: frozenset[str]) -> Any:
        have = self.door.axis_type(aval)
        return self.door.with_axis_type(aval, AxisType(axes, have.unreduced, have.reduced))

    def jaxpr(self, jaxpr: Any, where: Where, ends: Sequence[Any]) -> Any:
        """Return a jaxpr of the program.

        Args:
          jaxpr: with or without its constants.
          where: where it stands.
          ends: the avals that its outputs are to have.
        """
        inner = opened(jaxpr)
        # One program that is called in two places stays one where it can.
        under = self._under.get(where, ())
        key = (
            id(jaxpr),
            tuple((self.labels.made[one], self.labels.used[one], one.live) for one in under),
            tuple(self.labels.steps[one] for one in self._steps_under.get(where, ())),
            tuple(map(self.door.axis_type, ends)),
            tuple(one.runs for one in under[:1]),
        )
        if key not in self._written:
            before = self.bytes, len(self.casts)
            new = self._write(jaxpr, inner, where, ends)
            if where and all(self.labels.made[one] == one.varying for one in under):
                if all(
                    self.door.axis_type(a.aval) == self.door.axis_type(b)
                    for a, b in zip(inner.outvars, ends)
                ):
                    new = jaxpr  # with the casts that it had
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

    def cost(self, value: Value, axes: frozenset[str], eqn: Any) -> None:
        if value.live:
            self.bytes += value.cast_bytes
            self.casts.append(self.graph.placed(value, axes))


class Body:
    """One jaxpr that is being written.

    Args:
      writer: the writer.
      inner: the jaxpr as it was.
      where: where it stands.
    """

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
        """Return the variable that one has become."""
        value = self.value(var)
        if value is None or self.writer.aval(value) is var.aval:
            return var
        self.env[var] = variable(var, self.writer.aval(value))
        return self.env[var]

    def read(self, atom: Any, want: frozenset[str] | None, eqn: Any) -> Any:
        """Return an atom that varies over ``want``; None leaves what is no tangent as it is.

        A tangent is cast once, to all that it is used as: what takes less of it takes it back from
        there, so that its cotangents share one psum.
        """
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
                self.writer.cost(value, want - have, eqn)
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
        # The first cast only gave the argument the type that the atom has.
        known: dict[Any, Any] = {jaxpr.invars[0]: atom}
        info = self.door.current_source() if eqn is None else eqn.source_info
        kind = self.door.axis_type(atom.aval)
        for one in jaxpr.eqns:
            same = self.door.axis_type(one.outvars[0].aval) == kind
            if same and known[one.invars[0]] is atom:
                known[one.outvars[0]] = atom
                continue
            (out,) = one.outvars
            new = variable(out, out.aval)
            self.eqns.append(
                one.replace(invars=[known[one.invars[0]]], outvars=[new], source_info=info)
            )
            known[out] = new
        return known[jaxpr.outvars[0]]

    # Equations.

    def write(self, eqn: Any, index: int) -> None:
        """Write the equations that take an equation's place."""
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
            one.replace(read(self.env, one.input)) if hasattr(one, "input") else one
            for one in eqn.effects
        }
        params = {**eqn.params, **changes}
        self.eqns.append(
            eqn.replace(invars=operands, outvars=outvars, params=params, effects=effects)
        )

    def _inner(self, jaxpr: Any, inside: Where, ends: list[Any]) -> tuple[Any, list[Any]]:
        """Return a jaxpr that an equation calls, and what its inputs have to vary over."""
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
            wants = [
                None
                if self.value(atom) is None
                else self.door.axis_type(atom.aval).varying | gained
                for atom in eqn.invars
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
        """Return the parameters of a call of jaxprs that become others with these operands."""
        retyping = self.writer.hooks.state.of(Retyping)
        avals = [atom.aval for atom in eqn.invars]
        call = HigherOrderOp.of(retyping, eqn.primitive, eqn.params, avals)
        assert call is not None
        retyped = call.retyped([self.door.axis_type(atom.aval) for atom in operands], None)
        return {} if retyped is None else retyped.changes
