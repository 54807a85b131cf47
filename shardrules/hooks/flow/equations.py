"""One equation of a jaxpr, as it is once what it takes varies over more mesh axes.

Its types follow from its operands': by its abstract eval, or, where it calls jaxprs, by theirs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from shardrules.errors import AxisError, ShardrulesError
from shardrules.hooks.autodiff.origins import inner_jaxprs
from shardrules.hooks.calls.opaque import types_of
from shardrules.hooks.state import State
from shardrules.registry.axistypes import AxisType, show_axes

__all__ = [
    "CASTS",
    "Equation",
    "callable_of",
    "is_inexact",
    "named",
    "opened",
    "read",
    "scan_counts",
    "variable",
    "widened",
]

# Casts to varying, by JAX's names.
CASTS = ("pvary", "pcast", "reduced_vary_cast", "reduced_vary_cast_p")
_THUNKS = ("fwd_jaxpr_thunk", "jvp_jaxpr_fun")  # of custom_vjp and custom_jvp


def widened(have: AxisType, axes: Iterable[str]) -> AxisType:
    """Return a type that varies over ``axes`` too; partial sums over one of them stay so."""
    return have.vary(*(frozenset(axes) - have.unreduced))


class Equation:
    """One equation whose operands have become more varying.

    Args:
      retyping: the hooks' Retyping, which imports this module.
      eqn: the equation.
      operands: what its operands have become.
      env: from the old jaxpr's variables to what they have become; its outputs are noted there.
      what: that which it stands in, for messages.
    """

    def __init__(
        self, retyping: Any, eqn: Any, operands: list[Any], env: dict[Any, Any], what: str
    ):
        self.retyping = retyping
        self.jax = retyping.jax
        self.eqn = eqn
        self.operands = operands
        self.env = env
        self.what = what
        self.eqns: list[Any] = []

    @property
    def types(self) -> list[AxisType]:
        """The axis types of what its operands have become."""
        return [*types_of(self.jax, (atom.aval for atom in self.operands))]

    def renewed(self) -> list[Any]:
        """Return the equations that take its place."""
        name = self.eqn.primitive.name
        if name in CASTS:
            return self._recast()
        if name == "cond":
            new = self.retyping.branches(
                self.types[0].varying, self.types[1:], self.eqn.params["branches"], self.what
            )
            if new is None:
                return self._done({}, types_of(self.jax, (v.aval for v in self.eqn.outvars)))
            self._cast([self.types[0], *new[0]])
            return self._done({"branches": new[1]}, self.retyping.results(new[1][0]))
        if name == "while":
            types, params = self.retyping.loop(self.types, self.eqn.params, self.what) or (
                self.types,
                self.eqn.params,
            )
            self._cast(types)
            return self._done(params, self.retyping.results(params["body_jaxpr"]))
        if name == "scan":
            return self._scan()
        if name == "custom_linear_solve":
            return self._linear_solve()
        called = _called(self.retyping.state, self.eqn)
        if called is not None:
            return self._call(called)
        return self._operation()

    def _recast(self) -> list[Any]:
        """Cast over those axes only over which the operand doesn't vary yet."""
        (var,) = self.operands
        have, (out,) = self.jax.axis_type(var.aval), self.eqn.outvars
        want = widened(have, self.jax.axis_type(out.aval).varying)
        self._cast([want])
        self.env[out] = self.operands[0]
        return self.eqns

    def _scan(self) -> list[Any]:
        params = self.eqn.params
        constants, carries = scan_counts(params)
        types, jaxpr = self.types, params["jaxpr"]
        while True:
            body = self.retyping.jaxpr(jaxpr, types, self.what)
            results = self.retyping.results(body)
            wider = [
                widened(have, result.varying)
                for have, result in zip(types[constants : constants + carries], results)
            ]
            if wider == types[constants : constants + carries]:
                break
            types[constants : constants + carries] = wider
        self._cast(types)
        body = self.jax.cast_outputs(body, [*wider, *results[carries:]])
        return self._done({"jaxpr": body}, [*wider, *results[carries:]])

    def _call(self, key: str) -> list[Any]:
        """Renew what calls one jaxpr with all of its operands: jit, checkpoint, custom_vjp."""
        eqn, retyping = self.eqn, self.retyping
        changes: dict[str, Any] = {}
        thunks = [name for name in _THUNKS if name in eqn.params]
        if thunks:
            axes = self._gained()
            self._cast([widened(one, axes) for one in self.types])
            primals = self.types[eqn.params["num_consts"] :]
            for name in thunks:
                changes[name] = retyping.thunk(eqn.params[name], primals, self.what)
            if "bwd" in eqn.params:
                changes["bwd"] = retyping.bwd(eqn.params["bwd"], axes)
        changes[key] = retyping.jaxpr(eqn.params[key], self.types, self.what)
        return self._done(changes, retyping.results(changes[key]))

    def _linear_solve(self) -> list[Any]:
        """Renew a linear solve: all that its functions take varies alike."""
        axes = self._gained()
        self._cast([widened(one, axes) for one in self.types])
        jaxprs = self.eqn.params["jaxprs"]
        new = []
        for each in jaxprs:
            if each is not None:
                each = self.retyping.jaxpr(
                    each,
                    [widened(self.jax.axis_type(var.aval), axes) for var in opened(each).invars],
                    self.what,
                )
                each = self.jax.cast_outputs(
                    each, [widened(one, axes) for one in self.retyping.results(each)]
                )
            new.append(each)
        return self._done(
            {"jaxprs": type(jaxprs)(*new)},
            [widened(self.jax.axis_type(var.aval), axes) for var in self.eqn.outvars],
        )

    def _operation(self) -> list[Any]:
        """Renew an operation by its abstract eval; its operands vary alike, as JAX asks."""
        eqn = self.eqn
        if self.retyping.state.known_of(eqn.primitive, eqn.params) is None and any(
            var.aval.shape for inner in inner_jaxprs(eqn.params) for var in inner.invars
        ):
            raise self._error("the functions that it takes would have to be traced again")
        if all(map(self.jax.can_cast, (atom.aval for atom in self.operands))):
            axes = self._gained() & frozenset().union(*(one.varying for one in self.types))
            self._cast([widened(one, axes) for one in self.types])
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
        return self._done({}, types_of(self.jax, avals))

    def _gained(self) -> frozenset[str]:
        """Return the axes over which an operand varies that did not vary over them before."""
        return frozenset().union(
            *(
                new.varying - old.varying
                for new, old in zip(
                    self.types, types_of(self.jax, (atom.aval for atom in self.eqn.invars))
                )
            )
        )

    def _cast(self, types: Sequence[AxisType]) -> None:
        """Cast operands, in equations before this one."""
        import jax

        wide = [
            i
            for i, (have, want) in enumerate(zip(self.types, types))
            if have != want and self.jax.can_cast(self.operands[i].aval)
        ]
        if not wide:
            return
        casts = jax.make_jaxpr(lambda *xs: [self.jax.cast(x, types[i]) for x, i in zip(xs, wide)])(
            *(self.operands[i].aval for i in wide)
        ).jaxpr
        known = dict(zip(casts.invars, (self.operands[i] for i in wide)))
        for eqn in casts.eqns:
            self.eqns.append(
                eqn.replace(
                    invars=[known.get(v, v) for v in eqn.invars], source_info=self.eqn.source_info
                )
            )
        for i, var in zip(wide, casts.outvars):
            self.operands[i] = known.get(var, var)

    def _done(self, changes: dict[str, Any], types: Sequence[AxisType]) -> list[Any]:
        """Return the casts and the equation, with these parameters and outputs of these types."""
        outvars = [
            self.retyping.renew(var, one, self.env) for var, one in zip(self.eqn.outvars, types)
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
        at = self.jax.source_line(self.eqn.source_info)
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


def scan_counts(params: dict[str, Any]) -> tuple[int, int]:
    """Return how many of a scan's operands are constants, and how many after these its carry."""
    if "ft_in" in params:  # from JAX 0.11: pytrees of the constants, the carry and the rest
        constants, carry, _ = map(len, params["ft_in"].unpack())
        return constants, carry
    return params["num_consts"], params["num_carry"]


def _called(state: State, eqn: Any) -> str | None:
    """Return the parameter with the one jaxpr that an equation calls with all of its operands."""
    if (
        state.known_of(eqn.primitive, eqn.params) is not None
        or len(list(inner_jaxprs(eqn.params))) != 1
    ):
        return None
    for key, value in eqn.params.items():
        inner = opened(value)
        if (
            inner is not None
            and len(inner.outvars) == len(eqn.outvars)
            and _alike(inner.invars, eqn.invars)
            and _alike(inner.outvars, eqn.outvars)
        ):
            return key
    return None


def _alike(some: Sequence[Any], others: Sequence[Any]) -> bool:
    def shape(var):
        return getattr(var.aval, "shape", None), getattr(var.aval, "dtype", None)

    return len(some) == len(others) and all(shape(a) == shape(b) for a, b in zip(some, others))


def opened(value: Any) -> Any:
    """Return a jaxpr without its constants; None for what is no jaxpr."""
    value = getattr(value, "jaxpr", value)
    return value if hasattr(value, "eqns") and hasattr(value, "invars") else None


def named(eqn: Any) -> frozenset[str]:
    """Return the mesh axes that a cast names."""
    axes = eqn.params.get("axes", ())
    return frozenset((axes,) if isinstance(axes, str) else axes)


def is_inexact(aval: Any) -> bool:
    """Whether a value has a cotangent of its own dtype: floats and complex numbers."""
    import jax

    dtype = getattr(aval, "dtype", None)
    return dtype is not None and jax.numpy.issubdtype(dtype, jax.numpy.inexact)


def read(env: dict[Any, Any], atom: Any) -> Any:
    """Return what a variable has become; a literal stays."""
    return atom if hasattr(atom, "val") else env.get(atom, atom)


def variable(like: Any, aval: Any) -> Any:
    """Return a new variable of a jaxpr."""
    return type(like)("", aval) if hasattr(like, "suffix") else type(like)(aval)  # JAX 0.6.0


def callable_of(function: Any) -> Callable:
    """Return what can be called with arrays; a WrappedFun is no callable."""
    return getattr(function, "call_wrapped", function)
