"""custom_vjp under shard_map's check: scopes that outlive the trace, cotangents of the right type.

A bwd is written by hand, and JAX asks that each cotangent has its primal's type. A kernel's
cotangent for a replicated weight varies over the batch's axes: it is one device's share, and the
psum that makes it whole is exactly the one that is needed. But a bwd that communicates may have
summed already, and a second psum would silently give N times the gradient; so the psum is put in
only where bwd's jaxpr shows that it can't have.
"""

from __future__ import annotations

import dataclasses
import functools
import weakref
from collections.abc import Iterator
from typing import Any

from shardrules.errors import CotangentError
from shardrules.hooks.door.compat import Jax
from shardrules.hooks.door.patching import Patches
from shardrules.hooks.state import COLLECT, Hooks, State
from shardrules.registry.axistypes import AxisType, Effect

__all__ = ["Bwd", "CustomVjpHooks", "Parts", "inner_jaxprs"]


class CustomVjpHooks(Hooks):
    """The hooks of ``jax.custom_vjp``."""

    def __init__(self, jax: Jax, state: State):
        super().__init__(jax, state)
        # From what JAX hands on from fwd to bwd (a function that returns their trees) to fwd.
        self._forwards: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()

    def see(self, parts: Parts, *args) -> None:
        """Note that a bwd runs with ``args``, where types are not on avals."""

    def install(self, patches: Patches) -> None:
        """Replace the three functions that flatten a custom_vjp's parts."""
        patches.attribute(*self.jax.owner("flatten_primal"), self._flatten_primal)
        patches.attribute(*self.jax.owner("flatten_fwd"), self._flatten_fwd)
        patches.attribute(*self.jax.owner("flatten_bwd"), self._flatten_bwd)

    def _flatten_primal(self, fun, *rest):
        return self.jax.flatten_primal(self._scoped(fun), *rest)

    def _flatten_fwd(self, fwd, *rest):
        scoped = self._scoped(fwd)
        flat, trees = self.jax.flatten_fwd(scoped, *rest)
        if self.state.active:
            self._forwards[trees] = scoped
        return flat, trees

    def _flatten_bwd(self, bwd, in_tree, in_avals, *rest):
        scope = self.state.scope
        if scope.active:
            parts = Parts(
                self.jax.function_name(bwd), self._forwards.get(rest[0]), in_tree, tuple(in_avals)
            )
            if self.jax.typed:
                bwd = self.jax.transformation(self._run_bwd)(bwd, scope, parts)
            else:  # matched where replication sets are known: hooks/rep.py
                bwd = self.jax.scoped(
                    bwd, self.state.enter, scope, functools.partial(self.see, parts)
                )
        return self.jax.flatten_bwd(bwd, in_tree, in_avals, *rest)

    def _scoped(self, fun):
        scope = self.state.scope
        if not scope.active:
            return fun
        return self.jax.scoped(fun, self.state.enter, scope)

    # bwd is traced when the scope that its forward ran under has closed.

    def _run_bwd(self, bwd, scope, parts, *args):
        with self.state.enter(scope):
            if not self.jax.checking():
                return bwd(*args)
            run = Bwd(self, bwd, parts, args)
            return self._match(run, parts, run.cotangents())

    def _match(self, bwd, parts, cotangents):
        """Give each cotangent its primal's type; what can't be matched is left to JAX's errors."""
        import jax

        tree = jax.tree_util
        if isinstance(cotangents, list):
            cotangents = tuple(cotangents)
        is_none = lambda x: x is None  # noqa: E731
        primals = tree.tree_unflatten(parts.in_tree, range(len(parts.in_avals)))
        try:
            tree.tree_map(lambda ct, primal: None, cotangents, primals, is_leaf=is_none)
        except (ValueError, TypeError):
            return cotangents

        def one(path, ct, index):
            # None stands for a whole subtree of the primals; what stands for no leaf of theirs
            # (a cotangent for an argument that is None) JAX drops.
            if (
                ct is None
                or not isinstance(index, int)
                or getattr(ct, "dtype", None) == jax.dtypes.float0
            ):
                return ct
            primal = parts.in_avals[index]
            if isinstance(ct, self.jax.SymbolicZero):  # zero varies over whatever it has to
                return self.jax.SymbolicZero(
                    self.jax.with_axis_type(ct.aval, self.jax.cotangent_type(primal))
                )
            return self._cotangent(path, ct, primal, bwd)

        return tree.tree_map_with_path(one, cotangents, primals, is_leaf=is_none)

    def _cotangent(self, path, ct, primal, bwd):
        import jax

        have = self.jax.axis_type(self.jax.typeof(ct))
        want = self.jax.cotangent_type(primal)
        bwd.check_dropped(path, have, want)
        missing = want.varying - have.axes
        if missing:
            bwd.check_invariant(path, missing)
        extra = have.varying - want.varying - want.unreduced
        if extra:
            bwd.check_share(path, extra, have, want)
            order = tuple(a for a in self.jax.manual_axes() if a in extra)
            ct = jax.lax.psum(ct, order)
            self.state.note_sum(
                order,
                ct,
                self.jax.source_line(self.jax.current_source()),
                f"bwd {bwd.parts.name!r} returns one device's share at "
                f"output{jax.tree_util.keystr(path)}",
            )
        return self.jax.cast(ct, want)


@dataclasses.dataclass(frozen=True, eq=False)
class Parts:
    """What a bwd belongs to.

    Args:
      name: the bwd's, for messages.
      fwd: the custom_vjp's fwd, as JAX wraps it.
      in_tree: the pytree of the primal inputs.
      in_avals: their avals.
    """

    name: str
    fwd: Any
    in_tree: Any
    in_avals: tuple[Any, ...]


class Bwd:
    """One run of a bwd: the cotangents that it returns, and what its jaxpr says about them.

    Args:
      hooks: the hooks.
      bwd: the function.
      parts: what it belongs to.
      args: what it was called with: residuals, and the outputs' cotangents.
    """

    def __init__(self, hooks: CustomVjpHooks, bwd, parts: Parts, args):
        self.hooks = hooks
        self.bwd = bwd
        self.parts = parts
        self.args = args
        self._traced: _Trace | None = None

    def cotangents(self) -> Any:
        """Run bwd.

        Where a cotangent may vary over more axes than its primal, bwd's jaxpr will be asked about
        it. Then bwd is traced to that jaxpr and this is what runs: tracing its kernels twice would
        double the time that the backward pass takes to trace.
        """
        import jax

        jax_types, leaves = self.hooks.jax, jax.tree_util.tree_leaves(self.args)
        entering = frozenset().union(
            *(
                jax_types.axis_type(jax_types.typeof(leaf)).varying
                for leaf in leaves
                if isinstance(leaf, jax.Array)
            )
        )
        wanted = map(jax_types.cotangent_type, self.parts.in_avals)
        if all(entering <= want.axes for want in wanted):
            return self.bwd(*self.args)
        return self._trace().run()

    def check_share(self, path, axes: frozenset[str], have: AxisType, want: AxisType) -> None:
        """Raise unless nothing that this cotangent depends on communicates over ``axes``.

        Raises:
          CotangentError: naming the operation, and both right ways to write the bwd.
        """
        if next(self._communicates(self._trace().closed.jaxpr, axes), None) is None:
            return  # and so nothing in any part of it
        for what in self._communicates(self._sliced(path), axes):
            from jax.tree_util import keystr

            names = ", ".join(map(repr, sorted(axes)))
            raise CotangentError(
                f"the bwd {self.parts.name!r} returns a cotangent at "
                f"output{keystr(path)} that is {have}, for a primal that asks for {want}. One "
                f"psum over {{{names}}} is missing if it is this device's share, and none if it "
                f"is the full sum already; which of them can't be told, because bwd holds {what}. "
                f"If it is a share, return jax.lax.psum(ct, ({names},)) from bwd. If it is summed "
                f"already, return shardrules.already_summed(ct, {names}).",
                path=path,
                axes=axes,
                have=have,
                want=want,
            )

    def check_dropped(self, path, have: AxisType, want: AxisType) -> None:
        """Raise if this cotangent is summed over an axis that the forward dropped.

        Cotangents of outputs that are invariant over an axis arrive summed over it; a bwd that is
        right with the check off (psum, psum_scatter) then gives N times the gradient.

        Raises:
          CotangentError: naming the reduction, and both right forms.
        """
        arriving = frozenset().union(*(t.varying | t.unreduced for t in self._arriving()))
        dropped = (want.varying | want.unreduced) - arriving
        if not dropped:
            return
        reductions = list(self._communicates(self._sliced(path), dropped, reductions=True))
        if not reductions:
            return
        # JAX accepts a bwd that varies as its primal does. It may be right where no kernel
        # dropped the axis (a forward that is more than one reduction); where one did, it is not.
        kernel = self._dropping(dropped)
        if kernel is None and dropped <= have.varying:
            return
        from jax.tree_util import keystr

        names = ", ".join(map(repr, sorted(dropped)))
        raise CotangentError(
            f"the bwd {self.parts.name!r} returns a cotangent at output{keystr(path)} that it "
            f"reduces over {{{names}}} (by {reductions[0]}), but the forward's outputs are "
            f"invariant over {{{names}}}{f' (by {kernel})' if kernel else ''}, so the cotangent "
            "that bwd receives is the sum over them already, and would be counted once for each "
            "device. After an all-reduce, pass it on:\n    return (ct,)\nafter an all-gather, "
            f"take this device's slice:\n    i = jax.lax.axis_index({sorted(dropped)[0]!r})\n"
            "    return (jax.lax.dynamic_slice_in_dim(ct, i * n, n),)",
            path=path,
            axes=dropped,
            have=have,
            want=want,
        )

    def check_invariant(self, path, axes: frozenset[str]) -> None:
        """Raise unless a cotangent's type says rightly that it is invariant over ``axes``.

        JAX refuses a cotangent that varies less than its primal, and a cast makes it pass: where
        the type is wrong (an opaque primitive that JAX types as invariant), that error was the
        only sign of it.

        Raises:
          CotangentError: naming the equation that lost the axes.
        """
        jax = self.hooks.jax
        for equation in _equations(self._sliced(path)):
            name = equation.primitive.name
            if self.hooks.state.known_of(equation.primitive, equation.params) is not None:
                continue
            inputs = equation.invars[:1] if name == "cond" else equation.invars  # its predicate
            if name != "cond" and next(inner_jaxprs(equation.params), None) is not None:
                continue
            entering = frozenset().union(*(jax.axis_type(v.aval).varying for v in inputs))
            lost = (entering & axes) - _named_axes(equation.params)
            for out in equation.outvars:
                kept = jax.axis_type(out.aval)
                if lost - kept.axes:
                    from jax.tree_util import keystr

                    names = ", ".join(map(repr, sorted(lost - kept.axes)))
                    raise CotangentError(
                        f"the bwd {self.parts.name!r} returns a cotangent at output{keystr(path)} "
                        f"that is typed invariant over {{{names}}}, but it depends on {name}, "
                        f"which takes what varies over them and whose result JAX types as "
                        f"invariant. Cast its result: shardrules.vary(x, {names}).",
                        path=path,
                        axes=lost,
                    )

    def _arriving(self):
        """Return the axis types of the outputs' cotangents."""
        import jax

        zero = self.hooks.jax.SymbolicZero
        for leaf in jax.tree_util.tree_leaves(self.args[-1]):
            aval = leaf.aval if isinstance(leaf, zero) else self.hooks.jax.typeof(leaf)
            yield self.hooks.jax.axis_type(aval)

    def _dropping(self, axes: frozenset[str]) -> str | None:
        """Describe an opaque call of the forward whose rule makes outputs invariant over ``axes``.

        The forward is traced once more; where that fails (it closes over values of a trace that
        has ended), the answer is that it may.
        """
        if self.parts.fwd is None:
            return None
        import jax

        structs = [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in self.parts.in_avals]

        def run(*flat):
            flat = [
                self.hooks.jax.cast(x, self.hooks.jax.axis_type(a))
                for x, a in zip(flat, self.parts.in_avals)
            ]
            return self.parts.fwd.call_wrapped(
                *jax.tree_util.tree_unflatten(self.parts.in_tree, flat)
            )

        try:
            jaxpr = jax.make_jaxpr(run)(*structs).jaxpr
        except Exception:  # whatever a second trace runs into, the first one did not
            return "a forward that can't be traced again"
        for equation in _equations(jaxpr):
            known = self.hooks.state.known_of(equation.primitive, equation.params)
            if known is not None and known.found is not None and known.found.rule.drops:
                named = frozenset(known.found.rule.named_axes)
                if not named or named & axes:
                    return f"{known.call}, whose rule is {known.found.rule!r}"
        return None

    def _sliced(self, path):
        """Return the jaxpr of what one cotangent depends on."""
        trace = self._trace()
        used = [p == path for p in trace.paths]
        if path not in trace.returned:  # a bwd that returns another structure each time
            used = [True] * len(trace.paths)
        return self.hooks.jax.dce_jaxpr(trace.closed.jaxpr, used, instantiate=True)[0]

    def _trace(self) -> _Trace:
        """Trace bwd to a jaxpr, once."""
        if self._traced is None:
            self._traced = _Trace(self.bwd, self.args)
        return self._traced

    def _communicates(
        self, jaxpr, axes: frozenset[str], *, reductions: bool = False
    ) -> Iterator[str]:
        """Yield a description of each equation that may move data along ``axes``.

        Args:
          jaxpr: where to look, inner jaxprs included.
          axes: mesh axes.
          reductions: only what sums over them.
        """
        for equation in _equations(jaxpr):
            name = equation.primitive.name
            known = self.hooks.state.known_of(equation.primitive, equation.params)
            if known is not None:
                yield from self._opaque(known, len(equation.outvars), axes, reductions)
                continue
            over = _named_axes(equation.params) & axes
            if (
                over
                and name not in _CASTS
                and (not reductions or any(word in name for word in _REDUCTIONS))
            ):
                yield f"{name} over {{{', '.join(sorted(over))}}}"

    def _opaque(
        self, known, output_count: int, axes: frozenset[str], reductions: bool
    ) -> Iterator[str]:
        if known.found is None:
            if self.hooks.state.scope.policy != COLLECT:
                yield f"{known.call}, which has no rule"
            return
        rule = known.found.rule
        if reductions and not any(word in rule.name for word in ("all_reduce", "reduce_scatter")):
            return
        for effect in rule.effects(output_count) or (Effect("unknown"),):
            if effect.kind in ("unknown", "typed"):
                yield f"{known.call}, whose rule {rule!r} does not say what it communicates"
            elif set(effect.axes) & axes:
                yield f"{known.call}, whose rule is {rule!r}"


class _Trace:
    """A bwd's jaxpr, which can run in its place.

    Args:
      bwd: the function.
      args: residuals and cotangents; what is no array among them stays what it is, since a Python
        number may be used as a static argument, and a SymbolicZero is asked for by its type.

    Attributes:
      closed: the jaxpr, from the arrays among the arguments to those among the cotangents.
      paths: the pytree path of each cotangent that is an array.
      returned: the paths of all.
    """

    def __init__(self, bwd, args):
        import jax

        tree = jax.tree_util
        leaves, structure = tree.tree_flatten(args)
        dynamic = [i for i, leaf in enumerate(leaves) if isinstance(leaf, jax.Array)]
        self._arrays = [leaves[i] for i in dynamic]

        def run(*arrays):
            full = list(leaves)
            for i, array in zip(dynamic, arrays):
                full[i] = array
            out = bwd(*tree.tree_unflatten(structure, full))
            if isinstance(out, list):
                out = tuple(out)
            found, self._structure = tree.tree_flatten_with_path(out)
            arrays = [(path, leaf) for path, leaf in found if isinstance(leaf, jax.Array)]
            self.paths = [path for path, _ in arrays]
            self.returned = [path for path, _ in found]
            self._constant = [None if isinstance(leaf, jax.Array) else leaf for _, leaf in found]
            return [leaf for _, leaf in arrays]

        # Inlined, it leaves the equations that bwd would have left. Not by eval_jaxpr: without a
        # jit around the whole program JAX 0.6.0 can't run a kernel's equation by itself.
        self._jitted = jax.jit(run, inline=True)
        if hasattr(self._jitted, "trace"):
            self.closed = self._jitted.trace(*self._arrays).jaxpr
        else:  # JAX 0.4.28
            self.closed = jax.make_jaxpr(run)(*self._arrays)

    def run(self) -> Any:
        """Return the cotangents, as bwd would."""
        import jax

        arrays = iter(self._jitted(*self._arrays))  # not traced again
        return jax.tree_util.tree_unflatten(
            self._structure, [next(arrays) if one is None else one for one in self._constant]
        )


# Parts of the names of JAX's primitives that sum over mesh axes.
_REDUCTIONS = ("psum", "reduce_scatter")

# Equations that name mesh axes and move nothing along them.
_CASTS = frozenset(
    {
        "pbroadcast",
        "pvary",
        "pcast",
        "preduced",
        "vary_unreduced_cast",
        "reduced_vary_cast_p",
        "axis_index",
    }
)


def _named_axes(params: dict[str, Any]) -> frozenset[str]:
    """Return the mesh axes that a collective's parameters name (JAX: axes, axis_name)."""
    named: set[str] = set()
    for key in ("axes", "axis_name", "axis"):
        value = params.get(key)
        values = value if isinstance(value, (tuple, list, set, frozenset)) else (value,)
        named.update(v for v in values if isinstance(v, str))
    return frozenset(named)


def _equations(jaxpr: Any) -> Iterator[Any]:
    """Yield a jaxpr's equations, and those of the jaxprs inside; a kernel's own are not opened."""
    for equation in jaxpr.eqns:
        yield equation
        if equation.primitive.name not in _KERNELS:
            for inner in inner_jaxprs(equation.params):
                yield from _equations(inner)


# Primitives whose jaxpr is a kernel's: their rule speaks for it.
_KERNELS = frozenset({"pallas_call", "core_map", "mpmd_map"})


def inner_jaxprs(params: dict[str, Any]) -> Iterator[Any]:
    """Yield the jaxprs that stand in an equation's parameters."""
    for value in params.values():
        for one in value if isinstance(value, (tuple, list)) else (value,):
            one = getattr(one, "jaxpr", one)
            if hasattr(one, "eqns") and hasattr(one, "invars"):
                yield one
