"""custom_vjp under shard_map's check: scopes that outlive the trace, cotangents of the right type.

A bwd is written by hand, and JAX asks that each cotangent has its primal's type. A kernel's
cotangent for a replicated weight varies over the batch's axes: it is one device's share, and the
psum that makes it whole is exactly the one that is needed. But a bwd that communicates may have
summed already, and a second psum would silently give N times the gradient; so the psum is put in
only where bwd's jaxpr shows that it can't have.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from shardrules.errors import CotangentError
from shardrules.hooks.compat import Jax
from shardrules.hooks.opaque import Call, find_rule
from shardrules.hooks.patching import Patches
from shardrules.hooks.state import State
from shardrules.axistypes import AxisType, Effect

__all__ = ["CustomVjpHooks"]


class CustomVjpHooks:
    """The hooks of ``jax.custom_vjp``.

    Args:
      jax: the symbols.
      state: registry and scopes.
      kernel_of: from a pallas_call's params to what is known of its kernel.
    """

    def __init__(self, jax: Jax, state: State, kernel_of):
        self.jax = jax
        self.state = state
        self.kernel_of = kernel_of

    def install(self, patches: Patches) -> None:
        """Replace the three functions that flatten a custom_vjp's parts."""
        patches.attribute(*self.jax.owner("flatten_primal"), self._flatten_primal)
        patches.attribute(*self.jax.owner("flatten_fwd"), self._flatten_fwd)
        patches.attribute(*self.jax.owner("flatten_bwd"), self._flatten_bwd)

    def _flatten_primal(self, fun, *rest):
        return self.jax.flatten_primal(self._scoped(fun), *rest)

    def _flatten_fwd(self, fwd, *rest):
        return self.jax.flatten_fwd(self._scoped(fwd), *rest)

    def _flatten_bwd(self, bwd, in_tree, in_avals, *rest):
        scope = self.state.scope
        if scope.active and not self.jax.typed:
            bwd = self._scoped(bwd)  # types are matched where replication sets are known
        elif scope.active:
            bwd = self.jax.transformation(self._run_bwd)(
                bwd, scope, bwd.debug_info.func_name, in_tree, tuple(in_avals))
        return self.jax.flatten_bwd(bwd, in_tree, in_avals, *rest)

    def _scoped(self, fun):
        scope = self.state.scope
        if not scope.active:
            return fun
        return self.jax.scoped(fun, self.state.enter, scope)

    # bwd is traced when the scope that its forward ran under has closed.

    def _run_bwd(self, bwd, scope, name, in_tree, in_avals, *args):
        with self.state.enter(scope):
            cotangents = bwd(*args)
            if not self.jax.checking():
                return cotangents
            return self._match(_Share(self, bwd, name, args), in_tree, in_avals, cotangents)

    def _match(self, share, in_tree, in_avals, cotangents):
        """Give each cotangent its primal's type; what can't be matched is left to JAX's errors."""
        import jax
        tree = jax.tree_util
        if isinstance(cotangents, list):
            cotangents = tuple(cotangents)
        is_none = lambda x: x is None  # noqa: E731
        primals = tree.tree_unflatten(in_tree, range(len(in_avals)))
        try:
            tree.tree_map(lambda ct, primal: None, cotangents, primals, is_leaf=is_none)
        except (ValueError, TypeError):
            return cotangents

        def one(path, ct, index):
            if ct is None or isinstance(ct, self.jax.SymbolicZero):
                return ct
            return self._cotangent(path, ct, in_avals[index], share)

        return tree.tree_map_with_path(one, cotangents, primals, is_leaf=is_none)

    def _cotangent(self, path, ct, primal, share):
        import jax
        have = self.jax.axis_type(self.jax.typeof(ct))
        want = self.jax.cotangent_type(primal)
        extra = have.varying - want.varying - want.unreduced
        if extra:
            share.check(path, extra, have, want)
            order = tuple(a for a in self.jax.manual_axes() if a in extra)
            ct = jax.lax.psum(ct, order)
        return self.jax.cast(ct, want)


class _Share:
    """Whether a bwd's cotangent can be anything but one device's share of it."""

    def __init__(self, hooks: CustomVjpHooks, bwd, name: str, args):
        self.hooks = hooks
        self.bwd = bwd
        self.name = name
        self.args = args
        self._traced = None

    def check(self, path, axes: frozenset[str], have: AxisType, want: AxisType) -> None:
        """Raise unless nothing that this cotangent depends on communicates over ``axes``.

        Raises:
          CotangentError: naming the operation, and both right ways to write the bwd.
        """
        jaxpr, paths = self._trace()
        used = [p == path for p in paths]
        if not any(used):  # a bwd that returns another structure each time it is called
            used = [True] * len(paths)
        sliced, _ = self.hooks.jax.dce_jaxpr(jaxpr, used, instantiate=True)
        for what in self._communicates(sliced, axes):
            from jax.tree_util import keystr
            names = ", ".join(map(repr, sorted(axes)))
            raise CotangentError(
                f"the bwd {self.name!r} returns a cotangent at "
                f"output{keystr(path)} that is {have}, for a primal that asks for {want}. One "
                f"psum over {{{names}}} is missing if it is this device's share, and none if it "
                f"is the full sum already; which of them can't be told, because bwd holds {what}. "
                f"If it is a share, return jax.lax.psum(ct, ({names},)) from bwd. If it is summed "
                "already, make the collective the last step, so that its result is invariant.",
                path=path, axes=axes, have=have, want=want)

    def _trace(self):
        """Trace bwd once more, to look at it only."""
        if self._traced is None:
            import jax
            leaves, tree = jax.tree_util.tree_flatten(self.args)
            zero = self.hooks.jax.SymbolicZero
            dynamic = [i for i, leaf in enumerate(leaves) if not isinstance(leaf, zero)]

            paths: list[Any] = []

            def run(*arrays):
                full = list(leaves)
                for i, array in zip(dynamic, arrays):
                    full[i] = array
                out = self.bwd(*jax.tree_util.tree_unflatten(tree, full))
                if isinstance(out, list):
                    out = tuple(out)
                arrays = [(path, leaf) for path, leaf
                          in jax.tree_util.tree_flatten_with_path(out)[0]
                          if not isinstance(leaf, zero)]
                paths[:] = [path for path, _ in arrays]
                return [leaf for _, leaf in arrays]

            closed = jax.make_jaxpr(run)(*[leaves[i] for i in dynamic])
            self._traced = closed.jaxpr, list(paths)
        return self._traced

    def _communicates(self, jaxpr, axes: frozenset[str]) -> Iterator[str]:
        """Yield a description of each equation that may move data along ``axes``."""
        for equation in jaxpr.eqns:
            name = equation.primitive.name
            if name == "pallas_call":
                yield from self._opaque(equation, axes)
                continue
            over = _named_axes(equation.params) & axes
            if over and name not in _CASTS:
                yield f"{name} over {{{', '.join(sorted(over))}}}"
            for inner in _inner_jaxprs(equation.params):
                yield from self._communicates(inner, axes)

    def _opaque(self, equation, axes: frozenset[str]) -> Iterator[str]:
        hooks = self.hooks
        kernel = hooks.kernel_of(equation.params)
        found = find_rule(kernel.call, kernel.scope or hooks.state.scope, hooks.state)
        if found is None:
            yield f"{kernel.call}, which has no rule"
            return
        effects = found.rule.effects(len(equation.outvars)) or (Effect("unknown"),)
        for effect in effects:
            if effect.kind in ("unknown", "typed"):
                yield f"{kernel.call}, whose rule {found.rule!r} does not say what it communicates"
            elif set(effect.axes) & axes:
                yield f"{kernel.call}, whose rule is {found.rule!r}"


# Equations that name mesh axes and move nothing along them.
_CASTS = frozenset({"pbroadcast", "pvary", "pcast", "preduced", "vary_unreduced_cast", "reduced_vary_cast_p",
                    "axis_index"})


def _named_axes(params: dict[str, Any]) -> frozenset[str]:
    """Return the mesh axes that a collective's parameters name (JAX: axes, axis_name)."""
    named: set[str] = set()
    for key in ("axes", "axis_name", "axis"):
        value = params.get(key)
        values = value if isinstance(value, (tuple, list, set, frozenset)) else (value,)
        named.update(v for v in values if isinstance(v, str))
    return frozenset(named)


def _inner_jaxprs(params: dict[str, Any]) -> Iterator[Any]:
    """Yield the jaxprs that stand in an equation's parameters."""
    for value in params.values():
        for one in value if isinstance(value, (tuple, list)) else (value,):
            one = getattr(one, "jaxpr", one)
            if hasattr(one, "eqns") and hasattr(one, "invars"):
                yield one
