"""Retype calls of jaxprs whose operands vary over more mesh axes: loops, branches, jit and others.

If a varying predicate chooses a value, the value varies. In the gradient, JAX puts a psum wherever
the program casts an invariant value. If that is in a branch, only the devices that take the branch
run the psum, and the program hangs (JAX 0.6 to 0.12). So operands are cast before the branches, and
no cast is left inside.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from shardrules.door.internals import Door
from shardrules.door.jaxprs import (
    JOINED,
    TO_VARYING,
    callable_of,
    gained,
    inner_jaxprs,
    is_inexact,
    named_axes,
    opened,
    scan_counts,
    union,
    widened,
)
from shardrules.door.protocols import Aval, Eqn, Jaxpr, Params, Primitive
from shardrules.jaxprs.fold import Cell
from shardrules.jaxprs.reach import Reach
from shardrules.jaxprs.rewrite import cast_outputs
from shardrules.registry.axistypes import AxisType

_THUNKS = ("fwd_jaxpr_thunk", "jvp_jaxpr_fun")  # parameters of custom_vjp and custom_jvp


@dataclasses.dataclass(frozen=True)
class Mark:
    """A flag that a tangent is not zero, with the axes over which its primal was cast to vary.

    JAX traces a custom_vjp's fwd when the call is differentiated, and passes it a flag for each
    tangent that is not zero. Nothing else reaches fwd through jit, vmap and other traces, so these
    flags also carry the axes. They are part of JAX's cache key for the traced fwd.
    """

    nonzero: bool
    axes: frozenset[str]

    def __bool__(self) -> bool:
        return self.nonzero


class Retyped(NamedTuple):
    operands: Sequence[AxisType]  # the axis types to which its operands are to be cast
    changes: dict[str, Any]  # the parameters that change
    results: Sequence[AxisType]  # the axis types of its results


class HigherOrderOp:
    """A call of jaxprs that were traced with operands of the types ``traced``."""

    def __init__(self, retyping: Any, params: Params, traced: Sequence[AxisType]):
        self.retyping = retyping
        self.door = retyping.door
        self.params = params
        self.traced = [*traced]

    @staticmethod
    def of(
        retyping: Any, primitive: Primitive, params: Params, avals: Sequence[Any]
    ) -> HigherOrderOp | None:
        """Return the call; None if the primitive calls no jaxpr with its own operands."""
        door = retyping.door
        if primitive.name == "cond":
            predicate = door.axis_type(avals[0])  # any type fits
            return _Cond(retyping, params, [predicate, *_entering(door, params["branches"][0])])
        if primitive.name == "while":
            condition = _entering(door, params["cond_jaxpr"])[: params["cond_nconsts"]]
            return _While(retyping, params, [*condition, *_entering(door, params["body_jaxpr"])])
        if primitive.name == "scan":
            return _Scan(retyping, params, _entering(door, params["jaxpr"]))
        if primitive.name == "custom_linear_solve":
            return _LinearSolve.of_jaxprs(retyping, params)
        if (
            retyping.state.opaque_call_of(primitive, params) is not None
            or len(list(inner_jaxprs(params))) != 1
        ):
            return None
        for key, value in params.items():
            inner = opened(value)
            if inner is not None and _takes_operands(door, inner.invars, avals):
                kind = _LinearCall if primitive.name == "linear_call" else _JaxprCall
                return kind(retyping, params, _entering(door, inner), key)
        return None

    def wanted(self, have: Sequence[AxisType]) -> list[AxisType]:
        """Return the types to cast operands to first; they vary at least as the traced types do."""
        return [widened(own, traced.varying) for own, traced in zip(have, self.traced)]

    def retyped(self, types: Sequence[AxisType], what: str | None) -> Retyped | None:
        """Return the call retyped for operands of these types; None if it fits them already."""
        raise NotImplementedError


class _Cond(HigherOrderOp):
    def retyped(self, types: Sequence[AxisType], what: Any) -> Retyped | None:
        # Suppose that the predicate varies, and that a result doesn't or that a branch casts an
        # operand. Then cast all operands over the predicate's axes before the branches. Retype each
        # branch, and cast its results to the join of all branches.
        door, retyping, branches = self.door, self.retyping, self.params["branches"]
        over, operands = types[0].varying, [*types[1:]]
        avals = [var.aval for var in opened(branches[0]).invars]
        chosen = []
        for branch in branches:
            chosen += [var.aval for var in opened(branch).outvars]
        if _missing(door, over, chosen) or self._casts_inside(over, operands, avals):
            arrays = map(door.can_cast, avals)
            operands = [widened(t, over) if array else t for t, array in zip(operands, arrays)]
        elif not gained(operands, door.axis_types(avals)):
            return None
        new = [retyping.jaxpr(branch, operands, what) for branch in branches]
        results = [
            widened(each[0], over | union(each)) if door.can_cast(var.aval) else each[0]
            for each, var in zip(zip(*map(retyping.results, new)), opened(new[0]).outvars)
        ]
        new = [cast_outputs(door, branch, results, JOINED) for branch in new]
        return Retyped([types[0], *operands], {"branches": tuple(new)}, retyping.results(new[0]))

    def _casts_inside(
        self, over: frozenset[str], operands: Sequence[AxisType], avals: Sequence[Any]
    ) -> bool:
        """Return whether a branch casts a value that comes from an operand; the transpose sums."""
        now = [*map(self.door.with_axis_type, avals, operands)]
        narrow = [
            i
            for i, aval in enumerate(now)
            if _missing(self.door, over, [aval]) and is_inexact(aval)
        ]
        return bool(narrow) and any(
            _Casts(self.retyping, over).found_in(branch, narrow)
            for branch in map(opened, self.params["branches"])
        )


class _Casts(Reach):
    """Finds whether a jaxpr casts values from inputs that don't vary over all of ``over``."""

    def __init__(self, retyping: Any, over: frozenset[str]):
        super().__init__()
        self.door = retyping.door
        self._opaque_of = retyping.state.opaque_call_of
        self._over = over
        self._is_found = False

    def found_in(self, jaxpr: Jaxpr, narrow: Sequence[int]) -> bool:
        self.run(jaxpr, [n in narrow for n in range(len(jaxpr.invars))])
        return self._is_found

    def equation(self, eqn: Eqn, operands: list[Any]) -> Sequence[Any]:
        takes = any(map(self.content, operands))
        if takes and eqn.primitive.name in TO_VARYING:
            self._is_found |= bool(self._over & named_axes(eqn.params))
        if takes and "bwd" in eqn.params:  # a custom_vjp: the hooks sum its bwd's cotangents
            types = self.door.axis_types(v.aval for v in eqn.invars if is_inexact(v.aval))
            self._is_found |= len({operand.varying & self._over for operand in types}) > 1
        if self._opaque_of(eqn.primitive, eqn.params) is not None:
            results: Sequence[Any] = self.one_step(eqn, operands, takes)
        else:
            results = super().equation(eqn, operands)
        return [
            made if isinstance(made, Cell) else made and is_inexact(var.aval)
            for made, var in zip(results, eqn.outvars)
        ]


class _While(HigherOrderOp):
    def retyped(self, types: Sequence[AxisType], what: Any) -> Retyped | None:
        # Widen the carry by the types of the body's results and of the condition, until it stops
        # changing. This ends, since a carry only gains axes and a mesh has few. Skip leaves that
        # the body returns unchanged: they stay the same, however often a device runs the body.
        door, retyping, params = self.door, self.retyping, self.params
        first, second = params["cond_nconsts"], params["body_nconsts"]
        constants, carry = list(types[: first + second]), list(types[first + second :])
        inner = opened(params["body_jaxpr"])
        changed = [
            out is not var and door.can_cast(var.aval)
            for out, var in zip(inner.outvars, inner.invars[second:])
        ]
        while True:
            condition = retyping.jaxpr(params["cond_jaxpr"], constants[:first] + carry, what)
            body = retyping.jaxpr(params["body_jaxpr"], constants[first:] + carry, what)
            (decides,) = retyping.results(condition)
            wider = [
                widened(have, result.varying | decides.varying) if change else have
                for have, result, change in zip(carry, retyping.results(body), changed)
            ]
            if wider == carry:
                break
            carry = wider
        if condition is params["cond_jaxpr"] and body is params["body_jaxpr"]:
            return None
        body = cast_outputs(door, body, carry)
        changes = {"cond_jaxpr": condition, "body_jaxpr": body}
        return Retyped(constants + carry, changes, retyping.results(body))


class _Scan(HigherOrderOp):
    def retyped(self, types: Sequence[AxisType], what: Any) -> Retyped | None:
        # Widen the carry until it stops changing, as for a while_loop. Nothing decides how often a
        # scan's body runs, so only the body's results widen it.
        constants, carries = scan_counts(self.params)
        types, jaxpr = [*types], self.params["jaxpr"]
        carry = slice(constants, constants + carries)
        while True:
            body = self.retyping.jaxpr(jaxpr, types, what)
            results = self.retyping.results(body)
            wider = [widened(have, result.varying) for have, result in zip(types[carry], results)]
            if wider == types[carry]:
                break
            types[carry] = wider
        if body is jaxpr:
            return None
        results = [*wider, *results[carries:]]
        return Retyped(types, {"jaxpr": cast_outputs(self.door, body, results)}, results)


class _Alike(HigherOrderOp):
    """A call whose transpose users wrote, so all operands and results must vary alike."""

    def wanted(self, have: Sequence[AxisType]) -> list[AxisType]:
        axes = union((*have, *self.traced))
        return [widened(own, axes) for own in have]


class _LinearSolve(_Alike):
    """A linear solve, whose functions' operands must vary alike."""

    @classmethod
    def of_jaxprs(cls, retyping: Any, params: Params) -> _LinearSolve:
        traced: list[AxisType] = []
        for jaxpr, count in zip(params["jaxprs"], params["const_lengths"]):
            if jaxpr is not None:
                traced += _entering(retyping.door, jaxpr)[:count]
        traced += _entering(retyping.door, params["jaxprs"].solve)[params["const_lengths"].solve :]
        return cls(retyping, params, traced)

    def retyped(self, types: Sequence[AxisType], what: Any) -> Retyped | None:
        door, retyping, jaxprs = self.door, self.retyping, self.params["jaxprs"]
        axes = union(types)

        def wide(have: Sequence[AxisType]) -> list[AxisType]:
            return [widened(axis_type, axes) for axis_type in have]

        new = []
        for each in jaxprs:
            if each is not None:
                each = retyping.jaxpr(each, wide(_entering(door, each)), what)
                each = cast_outputs(door, each, wide(retyping.results(each)))
            new.append(each)
        changes = {"jaxprs": type(jaxprs)(*new)}
        return Retyped(wide(types), changes, retyping.results(changes["jaxprs"].solve))


class _JaxprCall(HigherOrderOp):
    """An op that calls the jaxpr in its parameter ``key`` with all of its operands."""

    def __init__(self, retyping: Any, params: Params, traced: Any, key: str):
        super().__init__(retyping, params, traced)
        self.key = key

    def retyped(self, types: Sequence[AxisType], what: Any) -> Retyped | None:
        params, retyping = self.params, self.retyping
        changes: dict[str, Any] = {}
        thunks = [name for name in _THUNKS if name in params]
        if thunks:
            axes = gained(types, self.traced)
            types = [widened(have, axes) for have in types]
            # The cast stands before a branch, so fwd and bwd return each device's own share.
            cast = axes if what is not None and "bwd" in params else frozenset()
            for name in thunks:
                primals = types[params["num_consts"] :]
                changes[name] = self._thunk(params[name], primals, what, cast)
            if "bwd" in params:
                changes["bwd"] = retyping.bwd(params["bwd"], axes, what is not None)
            if cast:
                changes["out_trees"] = retyping.state.widening(cast, params["out_trees"])
        changes[self.key] = retyping.jaxpr(params[self.key], types, what)
        return Retyped(types, changes, retyping.results(changes[self.key]))

    def _thunk(self, thunk: Any, types: Sequence[AxisType], what: Any, cast: frozenset[str]) -> Any:
        """Return a custom rule's thunk that retypes its jaxpr when called."""
        retyping, jaxprs = self.retyping, {}

        def run(*zeros: Any) -> Any:
            if cast:
                axes = [cast | getattr(zero, "axes", frozenset()) for zero in zeros]
                zeros = tuple(map(Mark, map(bool, zeros), axes))
            if zeros not in jaxprs:
                jaxpr, *rest = callable_of(thunk)(*zeros)
                is_jvp = len(rest) == 2  # a custom_vjp's jaxpr takes the primals only
                tangents = [t for t, zero in zip(types, zeros) if is_jvp and not zero]
                jaxpr = retyping.jaxpr(jaxpr, [*types, *tangents], what)
                if is_jvp:
                    results, out_zeros = retyping.results(jaxpr), rest[1]
                    primals, tangents = results[: len(out_zeros)], results[len(out_zeros) :]
                    wants = [p.varying for p, zero in zip(primals, out_zeros) if not zero]
                    results = [*primals, *map(widened, tangents, wants)]
                    jaxpr = cast_outputs(self.door, jaxpr, results)
                jaxprs[zeros] = (jaxpr, *rest)
            return jaxprs[zeros]

        return self.door.wrapped(run, thunk)


class _LinearCall(_Alike, _JaxprCall):
    """A ``linear_call``."""


def _entering(door: Door, jaxpr: Jaxpr) -> tuple[AxisType, ...]:
    return door.axis_types(var.aval for var in opened(jaxpr).invars)


def _missing(door: Door, over: frozenset[str], avals: Iterable[Any]) -> bool:
    """Return whether a value is typed as if all devices along ``over`` made the same choice."""
    types = [door.axis_type(aval) for aval in avals if door.can_cast(aval)]
    return any(over - axis_type.varying - axis_type.unreduced for axis_type in types)


def _takes_operands(door: Door, variables: Sequence[Any], avals: Sequence[Aval]) -> bool:
    """Return whether a jaxpr's inputs have the shapes and dtypes of its call's operands."""

    def form(aval: Aval) -> Any:
        return (getattr(aval, "shape", None), getattr(aval, "dtype", None), door.can_cast(aval))

    return len(variables) == len(avals) and all(
        form(var.aval) == form(aval) for var, aval in zip(variables, avals)
    )
