"""What calls jaxprs with its operands, as it is once these vary over more mesh axes.

Loops, branches, linear solves, and whatever calls one jaxpr with all that it takes: jit,
checkpoint, custom rules. Their results have the types that their jaxprs say.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from shardrules.door.jaxprs import inner_jaxprs, opened, scan_counts, widened
from shardrules.registry.axistypes import AxisType

_THUNKS = ("fwd_jaxpr_thunk", "jvp_jaxpr_fun")  # of custom_vjp and custom_jvp


class Retyped(NamedTuple):
    """The result of retyping a call."""

    operands: Sequence[AxisType]  # the axis types to which its operands are to be cast
    changes: dict[str, Any]  # its parameters that are others now
    results: Sequence[AxisType]  # the axis types of what it returns


class HigherOrderOp:
    """A call of jaxprs."""

    # retyping: renews the jaxprs.
    # params: the call's parameters.
    # traced: the types of operands that its jaxprs were traced with.

    def __init__(self, retyping: Any, params: dict[str, Any], traced: Sequence[AxisType]):
        self.retyping = retyping
        self.params = params
        self.traced = [*traced]

    @staticmethod
    def of(
        retyping: Any, primitive: Any, params: dict[str, Any], avals: Sequence[Any]
    ) -> HigherOrderOp | None:
        """Return the call; None if it calls no jaxpr, or calls one with other values."""

        def entering(key):
            inner = params[key][0] if key == "branches" else params[key]
            return retyping.door.axis_types(var.aval for var in opened(inner).invars)

        if primitive.name == "cond":
            predicate = retyping.door.axis_type(avals[0])  # whatever it is
            return _Cond(retyping, params, [predicate, *entering("branches")])
        if primitive.name == "while":
            condition, body = entering("cond_jaxpr"), entering("body_jaxpr")
            return _While(retyping, params, [*condition[: params["cond_nconsts"]], *body])
        if primitive.name == "scan":
            return _Scan(retyping, params, entering("jaxpr"))
        if primitive.name == "custom_linear_solve":
            return _LinearSolve.of_jaxprs(retyping, params)
        if (
            retyping.state.known_of(primitive, params) is not None
            or len(list(inner_jaxprs(params))) != 1
        ):
            return None
        for key, value in params.items():
            inner = opened(value)
            if inner is not None and _alike(retyping.door, inner.invars, avals):
                kind = _LinearCall if primitive.name == "linear_call" else _Call
                return kind(retyping, params, entering(key), key)
        return None

    def wanted(self, have: Sequence[AxisType]) -> list[AxisType]:
        """Return the types to cast operands to first: those that the jaxprs take, or more."""
        return [widened(one, traced.varying) for one, traced in zip(have, self.traced)]

    def retyped(self, types: Sequence[AxisType], what: str | None) -> Retyped | None:
        """Return the call retyped for operands of these types; None if it fits."""
        raise NotImplementedError

    def _gained(self, types: Sequence[AxisType]) -> frozenset[str]:
        return frozenset().union(
            *(new.varying - old.varying for new, old in zip(types, self.traced))
        )


class _Cond(HigherOrderOp):
    def retyped(self, types, what):
        new = self.retyping.branches(types[0].varying, types[1:], self.params["branches"], what)
        if new is None:
            return None
        operands, branches = new
        return Retyped(
            [types[0], *operands], {"branches": branches}, self.retyping.results(branches[0])
        )


class _While(HigherOrderOp):
    def retyped(self, types, what):
        new = self.retyping.loop(types, self.params, what)
        if new is None:
            return None
        operands, params = new
        return Retyped(operands, params, self.retyping.results(params["body_jaxpr"]))


class _Scan(HigherOrderOp):
    def retyped(self, types, what):
        constants, carries = scan_counts(self.params)
        types, jaxpr = [*types], self.params["jaxpr"]
        carry = slice(constants, constants + carries)
        while True:
            body = self.retyping.jaxpr(jaxpr, types, what)
            results = self.retyping.results(body)
            wider = [widened(have, one.varying) for have, one in zip(types[carry], results)]
            if wider == types[carry]:
                break
            types[carry] = wider
        if body is jaxpr:
            return None
        results = [*wider, *results[carries:]]
        return Retyped(types, {"jaxpr": self.retyping.door.cast_outputs(body, results)}, results)


class _Alike(HigherOrderOp):
    """A call whose transpose users wrote: all operands and the result vary alike."""

    def wanted(self, have):
        axes = frozenset().union(*(one.varying for one in (*have, *self.traced)))
        return [widened(one, axes) for one in have]


class _LinearSolve(_Alike):
    """A linear solve: what its functions take varies alike."""

    @classmethod
    def of_jaxprs(cls, retyping, params):
        traced: list[AxisType] = []
        for jaxpr, count in zip(params["jaxprs"], params["const_lengths"]):
            if jaxpr is not None:
                entering = retyping.door.axis_types(var.aval for var in opened(jaxpr).invars)
                traced += entering[:count]
        solve, count = opened(params["jaxprs"].solve), params["const_lengths"].solve
        traced += retyping.door.axis_types(var.aval for var in solve.invars[count:])
        return cls(retyping, params, traced)

    def retyped(self, types, what):
        door, retyping, jaxprs = self.retyping.door, self.retyping, self.params["jaxprs"]
        axes = frozenset().union(*(one.varying for one in types))
        new = []
        for each in jaxprs:
            if each is not None:
                entering = door.axis_types(var.aval for var in opened(each).invars)
                each = retyping.jaxpr(each, [widened(one, axes) for one in entering], what)
                each = door.cast_outputs(
                    each, [widened(one, axes) for one in retyping.results(each)]
                )
            new.append(each)
        changes = {"jaxprs": type(jaxprs)(*new)}
        results = retyping.results(changes["jaxprs"].solve)
        return Retyped([widened(one, axes) for one in types], changes, results)


class _Call(HigherOrderOp):
    """An op that calls one jaxpr with all of its operands."""

    # key: the parameter with the jaxpr.

    def __init__(self, retyping, params, traced, key: str):
        super().__init__(retyping, params, traced)
        self.key = key

    def retyped(self, types, what):
        params, retyping = self.params, self.retyping
        changes: dict[str, Any] = {}
        thunks = [name for name in _THUNKS if name in params]
        if thunks:
            axes = self._gained(types)
            types = [widened(one, axes) for one in types]
            # Cast before a branch: fwd and bwd are asked for what each device has of its own.
            cast = axes if what is not None and "bwd" in params else frozenset()
            for name in thunks:
                primals = types[params["num_consts"] :]
                changes[name] = retyping.thunk(params[name], primals, what, cast)
            if "bwd" in params:
                changes["bwd"] = retyping.bwd(params["bwd"], axes, what is not None)
            if cast:
                changes["out_trees"] = retyping.state.widening(cast, params["out_trees"])
        changes[self.key] = retyping.jaxpr(params[self.key], types, what)
        return Retyped(types, changes, retyping.results(changes[self.key]))


class _LinearCall(_Alike, _Call):
    """A ``linear_call``."""


def _alike(door: Any, variables: Sequence[Any], avals: Sequence[Any]) -> bool:
    """Whether a jaxpr takes the operands of its call as they are."""

    def form(aval):
        return (getattr(aval, "shape", None), getattr(aval, "dtype", None), door.can_cast(aval))

    return len(variables) == len(avals) and all(
        form(var.aval) == form(aval) for var, aval in zip(variables, avals)
    )
