"""Branches and bodies as they are once what they take varies over more mesh axes.

What is chosen by a varying predicate varies, and so does its gradient: JAX puts a psum wherever an
invariant value was cast, and one inside of a branch is run by the devices that took it only (JAX
0.6 to 0.12: the program hangs). So operands are cast before the branches, and in these nothing is
left to cast. A jaxpr's types are computed anew from its inputs' here, equation by equation: casts
that have become needless go, and no code of the user's runs twice.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from shardrules.axistypes import AxisType, show_axes
from shardrules.errors import AxisError, ShardrulesError
from shardrules.hooks.compat import Jax
from shardrules.hooks.custom_vjp import inner_jaxprs
from shardrules.hooks.opaque import types_of
from shardrules.hooks.patching import Patches
from shardrules.hooks.state import State

__all__ = ["Retyping", "widened"]

# Casts to varying, by JAX's names.
_CASTS = ("pvary", "pcast", "reduced_vary_cast", "reduced_vary_cast_p")
_THUNKS = ("fwd_jaxpr_thunk", "jvp_jaxpr_fun")  # of custom_vjp and custom_jvp


def widened(have: AxisType, axes: Iterable[str]) -> AxisType:
    """Return a type that varies over ``axes`` too; partial sums over one of them stay so."""
    return have.vary(*(frozenset(axes) - have.unreduced))


class Retyping:
    """From a jaxpr and its inputs' axis types to the jaxpr in which all types follow from these.

    Args:
      jax: the symbols.
      state: registry and scopes.
    """

    def __init__(self, jax: Jax, state: State):
        self.jax = jax
        self.state = state
        self._local = threading.local()

    def install(self, patches: Patches) -> None:
        """Let a bwd be asked for cotangents of wider primals than it was traced for."""
        owner, name = self.jax.owner("flatten_bwd")
        previous = getattr(owner, name)  # another hook's, by now

        def flatten(bwd, in_tree, in_avals, *rest):
            flat = previous(bwd, in_tree, in_avals, *rest)
            if not (self.jax.checking() and self.state.active):
                return flat

            def wider(axes):
                avals = [self._wider(aval, axes) for aval in in_avals]
                shares = self.jax.transformation(self._shares)(bwd, in_tree, tuple(in_avals), axes)
                return previous(shares, in_tree, avals, *rest)

            return self.jax.transformation(self._run_bwd)(flat, wider)

        patches.attribute(owner, name, flatten)

    def _wider(self, aval: Any, axes: frozenset[str]) -> Any:
        return self.jax.with_axis_type(aval, widened(self.jax.axis_type(aval), axes))

    def _run_bwd(self, flat, wider, *args):
        axes = getattr(self._local, "axes", frozenset())
        if not axes:
            return flat(*args)
        with self._primals_over(frozenset()):  # not those of what bwd itself differentiates
            return wider(axes).call_wrapped(*args)

    def _shares(self, bwd, in_tree, in_avals, axes, *args):
        """Run a bwd; of a cotangent that is the full sum, give each device its part.

        A bwd that was written for an invariant primal may reduce its cotangent. The primal's cast
        stands before the branch now, and its psum adds up what the devices return.
        """
        import jax
        cotangents = bwd(*args)
        primals = jax.tree_util.tree_unflatten(in_tree, in_avals)

        def one(ct, aval):
            if ct is None or isinstance(ct, self.jax.SymbolicZero) or not _is_inexact(ct):
                return ct
            have = self.jax.axis_type(self.jax.typeof(ct))
            whole = axes - self.jax.axis_type(aval).axes - have.axes
            if not whole:
                return ct
            order = tuple(a for a in self.jax.manual_axes() if a in whole)
            return self.jax.cast(ct / jax.lax.psum(1, order), have.vary(*whole))

        if isinstance(cotangents, list):
            cotangents = tuple(cotangents)
        try:
            return jax.tree_util.tree_map(one, cotangents, primals, is_leaf=lambda x: x is None)
        except (TypeError, ValueError):  # another structure than the primals': JAX refuses it
            return cotangents

    @contextlib.contextmanager
    def _primals_over(self, axes: frozenset[str]) -> Iterator[None]:
        before = getattr(self._local, "axes", frozenset())
        self._local.axes = axes
        try:
            yield
        finally:
            self._local.axes = before

    # What is chosen.

    def branches(self, over: frozenset[str], operands: Sequence[AxisType], branches: Sequence[Any],
                 what: str) -> tuple[list[AxisType], tuple[Any, ...]] | None:
        """Return the types that a cond's operands must be cast to, and its branches for these.

        Args:
          over: the axes over which the predicate varies.
          operands: the operands' types, without the predicate's.
          branches: jaxprs.
          what: the cond, for messages.

        Returns:
          None where the branches fit as they are.
        """
        jax = self.jax
        avals = [var.aval for var in _open(branches[0]).invars]
        wide = any(one.varying - jax.axis_type(aval).varying
                   for one, aval in zip(operands, avals))
        if self._missing(over, [var.aval for b in branches for var in _open(b).outvars]) or (
                self._casts_inside(over, operands, avals, branches)):
            operands = [widened(one, over) if jax.can_cast(aval) else one
                        for one, aval in zip(operands, avals)]
        elif not wide:
            return None
        new = [self.jaxpr(branch, operands, what) for branch in branches]
        results = [*map(self._results, new)]
        types = [widened(each[0], over.union(*(one.varying for one in each)))
                 if jax.can_cast(var.aval) else each[0]
                 for each, var in zip(zip(*results), _open(new[0]).outvars)]
        return list(operands), tuple(jax.cast_outputs(branch, types) for branch in new)

    def loop(self, types: Sequence[AxisType], params: dict[str, Any], what: str
             ) -> tuple[list[AxisType], dict[str, Any]] | None:
        """Return the types that a while_loop's operands must be cast to, and its parameters then.

        A carry that the body hands on as it is holds the same however often the body runs.

        Args:
          types: the operands' types: of the constants of the condition and of the body, the carry.
          params: the loop's parameters.
          what: the loop, for messages.

        Returns:
          None where the loop fits as it is.
        """
        jax = self.jax
        first, second = params["cond_nconsts"], params["body_nconsts"]
        constants, carry = list(types[:first + second]), list(types[first + second:])
        inner = _open(params["body_jaxpr"])
        changed = [out is not var and jax.can_cast(var.aval)
                   for out, var in zip(inner.outvars, inner.invars[second:])]
        while True:
            condition = self.jaxpr(params["cond_jaxpr"], constants[:first] + carry, what)
            body = self.jaxpr(params["body_jaxpr"], constants[first:] + carry, what)
            (decides,) = self._results(condition)
            wider = [widened(have, result.varying | decides.varying) if change else have
                     for have, result, change in zip(carry, self._results(body), changed)]
            if wider == carry:
                break
            carry = wider
        if condition is params["cond_jaxpr"] and body is params["body_jaxpr"]:
            return None
        return constants + carry, dict(params, cond_jaxpr=condition,
                                       body_jaxpr=jax.cast_outputs(body, carry))

    def _missing(self, over: frozenset[str], avals: Iterable[Any]) -> bool:
        """Whether what is chosen is typed as if all devices along ``over`` chose alike."""
        for aval in avals:
            have = self.jax.axis_type(aval)
            if self.jax.can_cast(aval) and over - have.varying - have.unreduced:
                return True
        return False

    def _casts_inside(self, over, operands, avals, branches) -> bool:
        """Whether a branch casts what may come from an operand: then its gradient is a psum."""
        narrow = [i for i, (one, aval) in enumerate(zip(operands, avals))
                  if self._missing(over, [self.jax.with_axis_type(aval, one)])
                  and _is_inexact(aval)]
        return bool(narrow) and any(
            self._casts(branch, [branch.invars[i] for i in narrow], over)
            for branch in map(_open, branches))

    def _casts(self, jaxpr, narrow, over) -> bool:
        """Whether a jaxpr casts what comes from inputs that don't vary over all of ``over``."""
        narrow = set(narrow)
        for eqn in jaxpr.eqns:
            if not any(atom in narrow for atom in eqn.invars if not hasattr(atom, "val")):
                continue
            if eqn.primitive.name in _CASTS and over & _axes(eqn):
                return True
            if "bwd" in eqn.params and self._mixed(eqn, over):
                return True  # a custom_vjp, whose bwd's cotangents are summed
            if _known(eqn) is None and any(
                    self._casts(inner, inner.invars, over) for inner in inner_jaxprs(eqn.params)):
                return True
            narrow |= {var for var in eqn.outvars if _is_inexact(var.aval)}
        return False

    def _mixed(self, eqn, over) -> bool:
        kinds = {self.jax.axis_type(v.aval).varying & over for v in eqn.invars
                 if _is_inexact(v.aval)}
        return len(kinds) > 1

    def _results(self, jaxpr: Any) -> tuple[AxisType, ...]:
        return types_of(self.jax, (var.aval for var in _open(jaxpr).outvars))

    # A jaxpr.

    def jaxpr(self, jaxpr: Any, types: Sequence[AxisType], what: str) -> Any:
        """Return a jaxpr for inputs of these types; the same one where they are what it takes.

        Args:
          jaxpr: with or without its constants, which stay as they are.
          types: for each input, one that varies over as many axes or more; a ref's is ignored.
          what: that which it is a branch or a body of, for messages.

        Raises:
          AxisError: if an equation can't take what varies more.
        """
        inner = _open(jaxpr)
        env: dict[Any, Any] = {}
        invars = [self._renewed(var, one, env) for var, one in zip(inner.invars, types)]
        if not env:
            return jaxpr
        eqns: list[Any] = []
        for eqn in inner.eqns:
            operands = [_read(env, atom) for atom in eqn.invars]
            if all(new is old for new, old in zip(operands, eqn.invars)):
                eqns.append(eqn)
                continue
            if all(new.aval == old.aval for new, old in zip(operands, eqn.invars)):
                eqns.append(eqn.replace(invars=operands))  # a cast went, and nothing else
                continue
            with eqn.ctx.manager:
                eqns += _Equation(self, eqn, operands, env, what).renewed()
        outvars = [_read(env, atom) for atom in inner.outvars]
        # With its debug_info: the names of its arguments are what they were.
        new = inner.replace(invars=invars, eqns=eqns, outvars=outvars, debug_info=inner.debug_info)
        return new if inner is jaxpr else jaxpr.replace(jaxpr=new)

    def _renewed(self, var: Any, one: AxisType, env: dict[Any, Any]) -> Any:
        """Return a variable of this type, noted as the one that ``var`` has become."""
        if not self.jax.can_cast(var.aval) or self.jax.axis_type(var.aval) == one:
            return var
        env[var] = _variable(var, self.jax.with_axis_type(var.aval, one))
        return env[var]

    def thunk(self, thunk: Any, types: Sequence[AxisType], what: str) -> Any:
        """Return a custom rule's thunk, whose jaxpr is retyped when it is asked for.

        Args:
          thunk: from which inputs are zero to a jaxpr, its constants and, of a custom_jvp, which
            tangents are zero that it returns.
          types: of the primals; the jaxpr's further inputs are the tangents of those that are not
            zero, each of its primal's type, and so are those that it returns.
          what: for messages.
        """
        known: dict[tuple, Any] = {}

        def run(*zeros):
            if zeros not in known:
                jaxpr, *others = _callable(thunk)(*zeros)
                if len(others) == 2:  # of a custom_jvp; that of a custom_vjp takes the primals
                    tangents = [one for one, zero in zip(types, zeros) if not zero]
                    jaxpr = self.jaxpr(jaxpr, [*types, *tangents], what)
                    results, out_zeros = self._results(jaxpr), others[1]
                    primals = results[:len(out_zeros)]
                    wants = [one for one, zero in zip(primals, out_zeros) if not zero]
                    jaxpr = self.jax.cast_outputs(jaxpr, [*primals, *(
                        widened(have, want.varying)
                        for have, want in zip(results[len(primals):], wants))])
                else:
                    jaxpr = self.jaxpr(jaxpr, types, what)
                known[zeros] = (jaxpr, *others)
            return known[zeros]

        return self.jax.wrapped(run, thunk)

    def bwd(self, bwd: Any, axes: frozenset[str]) -> Any:
        """Return a custom_vjp's bwd, for primals that vary over ``axes`` too."""
        def run(*args):
            with self._primals_over(axes | getattr(self._local, "axes", frozenset())):
                return _callable(bwd)(*args)

        return self.jax.wrapped(run, bwd)


class _Equation:
    """One equation whose operands have become more varying.

    Args:
      retyping: the hooks.
      eqn: the equation.
      operands: what its operands have become.
      env: from the old jaxpr's variables to what they have become; its outputs are noted there.
      what: that which it stands in, for messages.
    """

    def __init__(self, retyping: Retyping, eqn: Any, operands: list[Any], env: dict[Any, Any],
                 what: str):
        self.retyping = retyping
        self.jax = retyping.jax
        self.eqn = eqn
        self.operands = operands
        self.env = env
        self.what = what
        self.eqns: list[Any] = []

    @property
    def types(self) -> list[AxisType]:
        return [*types_of(self.jax, (atom.aval for atom in self.operands))]

    def renewed(self) -> list[Any]:
        """Return the equations that take its place."""
        name = self.eqn.primitive.name
        if name in _CASTS:
            return self._recast()
        if name == "cond":
            new = self.retyping.branches(self.types[0].varying, self.types[1:],
                                         self.eqn.params["branches"], self.what)
            if new is None:
                return self._done({}, types_of(self.jax, (v.aval for v in self.eqn.outvars)))
            self._cast([self.types[0], *new[0]])
            return self._done({"branches": new[1]}, self.retyping._results(new[1][0]))
        if name == "while":
            types, params = self.retyping.loop(self.types, self.eqn.params, self.what) or (
                self.types, self.eqn.params)
            self._cast(types)
            return self._done(params, self.retyping._results(params["body_jaxpr"]))
        if name == "scan":
            return self._scan()
        if name == "custom_linear_solve":
            return self._linear_solve()
        called = _called(self.eqn)
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
            results = self.retyping._results(body)
            wider = [widened(have, result.varying) for have, result in zip(
                types[constants:constants + carries], results)]
            if wider == types[constants:constants + carries]:
                break
            types[constants:constants + carries] = wider
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
            primals = self.types[eqn.params["num_consts"]:]
            for name in thunks:
                changes[name] = retyping.thunk(eqn.params[name], primals, self.what)
            if "bwd" in eqn.params:
                changes["bwd"] = retyping.bwd(eqn.params["bwd"], axes)
        changes[key] = retyping.jaxpr(eqn.params[key], self.types, self.what)
        return self._done(changes, retyping._results(changes[key]))

    def _linear_solve(self) -> list[Any]:
        """Renew a linear solve: all that its functions take varies alike."""
        axes = self._gained()
        self._cast([widened(one, axes) for one in self.types])
        jaxprs = self.eqn.params["jaxprs"]
        new = []
        for each in jaxprs:
            if each is not None:
                each = self.retyping.jaxpr(each, [
                    widened(self.jax.axis_type(var.aval), axes) for var in _open(each).invars],
                    self.what)
                each = self.jax.cast_outputs(each, [
                    widened(one, axes) for one in self.retyping._results(each)])
            new.append(each)
        return self._done({"jaxprs": type(jaxprs)(*new)},
                          [widened(self.jax.axis_type(var.aval), axes)
                           for var in self.eqn.outvars])

    def _operation(self) -> list[Any]:
        """Renew an operation by its abstract eval; its operands vary alike, as JAX asks."""
        eqn = self.eqn
        if _known(eqn) is None and any(var.aval.shape for inner in inner_jaxprs(eqn.params)
                                       for var in inner.invars):
            raise self._error("the functions that it takes would have to be traced again")
        if all(map(self.jax.can_cast, (atom.aval for atom in self.operands))):
            axes = self._gained() & frozenset().union(*(one.varying for one in self.types))
            self._cast([widened(one, axes) for one in self.types])
        try:
            avals, _ = eqn.primitive.abstract_eval(*(atom.aval for atom in self.operands),
                                                   **eqn.params)
        except ShardrulesError:
            raise
        except Exception as error:
            raise self._error(f"{type(error).__name__}: {str(error).splitlines()[0]}"
                              if str(error) else type(error).__name__) from error
        avals = avals if eqn.primitive.multiple_results else [avals]
        return self._done({}, types_of(self.jax, avals))

    def _gained(self) -> frozenset[str]:
        """Return the axes over which an operand varies that did not vary over them before."""
        return frozenset().union(*(
            new.varying - old.varying for new, old in zip(
                self.types, types_of(self.jax, (atom.aval for atom in self.eqn.invars)))))

    def _cast(self, types: Sequence[AxisType]) -> None:
        """Cast operands, in equations before this one."""
        import jax
        wide = [i for i, (have, want) in enumerate(zip(self.types, types)) if have != want
                and self.jax.can_cast(self.operands[i].aval)]
        if not wide:
            return
        casts = jax.make_jaxpr(lambda *xs: [self.jax.cast(x, types[i]) for x, i in zip(xs, wide)])(
            *(self.operands[i].aval for i in wide)).jaxpr
        known = dict(zip(casts.invars, (self.operands[i] for i in wide)))
        for eqn in casts.eqns:
            self.eqns.append(eqn.replace(invars=[known.get(v, v) for v in eqn.invars],
                                         source_info=self.eqn.source_info))
        for i, var in zip(wide, casts.outvars):
            self.operands[i] = known.get(var, var)

    def _done(self, changes: dict[str, Any], types: Sequence[AxisType]) -> list[Any]:
        """Return the casts and the equation, with these parameters and outputs of these types."""
        outvars = [self.retyping._renewed(var, one, self.env)
                   for var, one in zip(self.eqn.outvars, types)]
        return [*self.eqns, self.eqn.replace(invars=self.operands, outvars=outvars,
                                             params={**self.eqn.params, **changes})]

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
            primitive=self.eqn.primitive.name, axes=axes)


def scan_counts(params: dict[str, Any]) -> tuple[int, int]:
    """Return how many of a scan's operands are constants, and how many after these its carry."""
    if "ft_in" in params:  # from JAX 0.11: pytrees of the constants, the carry and the rest
        constants, carry, _ = map(len, params["ft_in"].unpack())
        return constants, carry
    return params["num_consts"], params["num_carry"]


def _called(eqn: Any) -> str | None:
    """Return the parameter with the one jaxpr that an equation calls with all of its operands."""
    if _known(eqn) is not None or len(list(inner_jaxprs(eqn.params))) != 1:
        return None
    for key, value in eqn.params.items():
        inner = _open(value)
        if (inner is not None and len(inner.outvars) == len(eqn.outvars)
                and _alike(inner.invars, eqn.invars) and _alike(inner.outvars, eqn.outvars)):
            return key
    return None


def _alike(some: Sequence[Any], others: Sequence[Any]) -> bool:
    def shape(var):
        return getattr(var.aval, "shape", None), getattr(var.aval, "dtype", None)

    return len(some) == len(others) and all(shape(a) == shape(b) for a, b in zip(some, others))


def _known(eqn: Any) -> Any:
    from shardrules import hooks
    return hooks.known_of(eqn.primitive, eqn.params)


def _open(value: Any) -> Any:
    """Return a jaxpr without its constants; None for what is no jaxpr."""
    value = getattr(value, "jaxpr", value)
    return value if hasattr(value, "eqns") and hasattr(value, "invars") else None


def _axes(eqn: Any) -> frozenset[str]:
    axes = eqn.params.get("axes", ())
    return frozenset((axes,) if isinstance(axes, str) else axes)


def _is_inexact(aval: Any) -> bool:
    import jax
    dtype = getattr(aval, "dtype", None)
    return dtype is not None and jax.numpy.issubdtype(dtype, jax.numpy.inexact)


def _read(env: dict[Any, Any], atom: Any) -> Any:
    return atom if hasattr(atom, "val") else env.get(atom, atom)


def _variable(like: Any, aval: Any) -> Any:
    """Return a new variable of a jaxpr."""
    return type(like)("", aval) if hasattr(like, "suffix") else type(like)(aval)  # JAX 0.6.0


def _callable(function: Any) -> Callable:
    return getattr(function, "call_wrapped", function)
