"""custom_vjp under shard_map's check: scopes that outlive the trace, cotangents of the right type.

A bwd is written by hand, and JAX asks that each cotangent has its primal's type. A kernel's
cotangent for a replicated weight varies over the batch's axes: it is one device's share, and the
psum that makes it whole is exactly the one that is needed. But a bwd that communicates may have
summed already, and a second psum would silently give N times the gradient; so the psum is put in
only where bwd's jaxpr shows that it can't have.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import threading
import weakref
from typing import Any

from shardrules.hooks.autodiff.bwd import Bwd
from shardrules.hooks.autodiff.traced import Parts
from shardrules.hooks.door.compat import Jax
from shardrules.hooks.door.patching import Patches
from shardrules.hooks.state import Hooks, Scope, State

__all__ = ["BatchedVjpHooks", "CustomVjpHooks"]


class CustomVjpHooks(Hooks):
    """The hooks of ``jax.custom_vjp``."""

    def __init__(self, jax: Jax, state: State):
        super().__init__(jax, state)
        # From what JAX hands on from fwd to bwd (a function that returns their trees) to fwd, and
        # whether that takes gradients.
        self._forwards: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()

    def see(self, parts: Parts, *args) -> None:
        """Note that a bwd runs with ``args``, where types are not on avals."""

    def install(self, patches: Patches) -> None:
        """Replace the three functions that flatten a custom_vjp's parts."""
        patches.attribute(*self.jax.owner("flatten_primal"), self._flatten_primal)
        patches.attribute(*self.jax.owner("flatten_fwd"), self._flatten_fwd)
        patches.attribute(*self.jax.owner("flatten_bwd"), self._flatten_bwd)

    def _flatten_primal(self, fun, *rest, **options):
        return self.jax.flatten_primal(self._scoped(fun), *rest, **options)

    def _flatten_fwd(self, fun, *rest, **options):
        gradients: list[None] = []
        scoped = self._scoped(fun, self._inside(), gradients)
        flat, trees = self.jax.flatten_fwd(scoped, *rest, **options)
        if self.state.active:
            self._forwards[trees] = scoped, gradients
        return flat, trees

    def parts(self, bwd: Any, in_tree: Any, in_avals: Any, trees: Any) -> Parts:
        """Return what a bwd belongs to, as JAX flattens it."""
        fwd, gradients = self._forwards.get(trees, (None, ()))
        name, place = self.jax.function_name(bwd), self.jax.function_place(bwd)
        return Parts(name, fwd, gradients, in_tree, tuple(in_avals), place)

    def _flatten_bwd(self, fun, *rest):
        bwd, scope = fun, self._inside()
        if scope.active:
            parts = self.parts(bwd, *rest[:3])
            if self.jax.typed:
                bwd = self.jax.transformation(self._run_bwd)(bwd, scope, parts)
            else:  # matched where replication sets are known: hooks/rep.py
                bwd = self.jax.scoped(
                    bwd, self.state.enter, scope, functools.partial(self.see, parts)
                )
        return self.jax.flatten_bwd(bwd, *rest)

    def _inside(self) -> Scope:
        """Return the scope of fwd and bwd: the innermost reverse pass is not through these."""
        scope = self.state.scope
        count = scope.derivatives_count
        return dataclasses.replace(scope, derivatives_count=count - 1) if count else scope

    def _scoped(self, fun, scope=None, gradients=None):
        scope = self.state.scope if scope is None else scope
        if not scope.active:
            return fun
        name = self.jax.function_name(fun)
        return self.jax.scoped(fun, lambda scope: self._enter(name, scope, gradients), scope)

    def _enter(self, name: str, scope: Scope, gradients: list[None] | None = None):
        """Return a context with the scope of a custom_vjp; refuse to run it without the hooks."""
        if not self.state.patched and self.jax.checking():
            raise self.state.outlived(f"{name!r}, of a custom_vjp,", function=name)
        context = contextlib.ExitStack()
        context.enter_context(self.state.enter(scope))
        if gradients is not None:
            context.enter_context(self.state.hearing_gradients(gradients))
        return context

    # bwd is traced when the scope that its forward ran under has closed.

    def _run_bwd(self, bwd, scope, parts, *args):
        with self._enter(parts.name, scope):
            if not self.jax.checking():
                return bwd(*args)
            run = Bwd(self, bwd, parts, args)
            with self.state.in_bwd():
                cotangents = run.cotangents()
            return self._match(run, parts, cotangents)

    def _match(self, bwd, parts, cotangents):
        """Give each cotangent its primal's type; what can't be matched is left to JAX's errors."""
        import jax

        tree = jax.tree_util
        if isinstance(cotangents, list):
            cotangents = tuple(cotangents)
        is_none = lambda x: x is None  # noqa: E731
        primals = parts.primals()
        try:
            tree.tree_map(lambda ct, primal: ct, cotangents, primals, is_leaf=is_none)
        except (ValueError, TypeError):
            return cotangents

        def one(path, ct, stand_in):
            # None stands for a whole subtree of the primals; what stands for no leaf of theirs
            # (a cotangent for an argument that is None) JAX drops.
            index = parts.position(stand_in)
            if ct is None or index is None or getattr(ct, "dtype", None) == jax.dtypes.float0:
                return ct
            primal = parts.in_avals[index]
            if isinstance(ct, self.jax.SymbolicZero):  # zero varies over whatever it has to
                return self.jax.SymbolicZero(
                    self.jax.with_axis_type(ct.aval, self.jax.cotangent_type(primal))
                )
            return self._cotangent(path, index, ct, primal, bwd)

        return tree.tree_map_with_path(one, cotangents, primals, is_leaf=is_none)

    def _cotangent(self, path, index, ct, primal, bwd):
        import jax

        have = self.jax.axis_type(self.jax.typeof(ct))
        want = self.jax.cotangent_type(primal)
        bwd.check_sums(path, have, want)
        missing = want.varying - have.axes
        if missing:
            bwd.check_invariant(path, missing)
            bwd.check_others(path, index, missing, have, want)
        partial = have.varying & want.unreduced  # of a reduced primal: summed by the user
        extra = have.varying - want.varying - partial
        if extra or partial:
            bwd.check_share(path, extra | partial, have, want)
        if extra:
            order = tuple(a for a in self.jax.manual_axes() if a in extra)
            ct = jax.lax.psum(ct, order)
            self.state.hear_sum(index, extra)
            self.state.note_sum(
                order,
                ct,
                self.jax.source_line(self.jax.current_source()),
                f"bwd {bwd.parts.name!r} returns one device's share at "
                f"output{jax.tree_util.keystr(path)}",
            )
        return self.jax.cast(ct, want)


class BatchedVjpHooks(Hooks):
    """The hooks on a custom_vjp under ``vmap(..., spmd_axis_name=...)``.

    vmap sums the cotangent of what is not batched over the batch, and each device holds its part of
    the batch only: JAX (0.6.0 to 0.12) puts in no psum over the axes that carry the batch, and then
    refuses the cotangent's type.
    """

    def __init__(self, jax: Jax, state: State):
        super().__init__(jax, state)
        self._local = threading.local()

    def install(self, patches: Patches) -> None:
        """Replace the two functions that see the primals, and the batched bwd."""
        if self.jax.typed:
            trace = self.jax.BatchTrace
            self._process = trace.process_custom_vjp_call
            process = lambda *args, **kwargs: self._see(*args, **kwargs)  # noqa: E731
            patches.attribute(trace, "process_custom_vjp_call", process)
            patches.attribute(*self.jax.owner("batch_bwd"), self._batch)
            psum, table = self.jax.psum_invariant_p, self.jax.batchers
            if psum in table and not psum.multiple_results:  # from JAX 0.8
                patches.entry(table, psum, functools.partial(self._batch_psum, table[psum]))

    def _batch_psum(self, rule, axis_data, vals_in, dims_in, axes):
        """Batch a psum over mesh axes, which JAX 0.8.3 passes a parameter that it doesn't have."""
        if not self.state.active or axis_data.name in axes or len(vals_in) != 1:
            return rule(axis_data, vals_in, dims_in, axes)
        return self.jax.psum_invariant_p.bind(*vals_in, axes=axes), dims_in[0]

    def _see(self, trace, prim, fun, fwd, bwd, tracers, *args, **kwargs):
        before = getattr(self._local, "primals", None)
        self._local.primals = [self.jax.typeof(x) for x in tracers]
        try:
            return self._process(trace, prim, fun, fwd, bwd, tracers, *args, **kwargs)
        finally:
            self._local.primals = before

    def _batch(self, bwd, tag, axis_data, in_dims, out_dim_dests, *rest, **named):
        batched = self.jax.batch_bwd(bwd, tag, axis_data, in_dims, out_dim_dests, *rest, **named)
        axes, primals = axis_data.spmd_name, getattr(self._local, "primals", None)
        axes = frozenset((axes,) if isinstance(axes, str) else axes or ())
        if primals is None or not axes or not self.state.active:
            return batched
        return self.jax.wrapped(
            lambda *args: self._sum(batched.call_wrapped(*args), primals, axes, out_dim_dests),
            like=batched,
        )

    def _sum(self, cotangents, primals, axes, out_dim_dests):
        import jax

        if not self.jax.checking():
            return cotangents
        if cotangents and isinstance(cotangents[0], (list, tuple)):  # with logs, from JAX 0.11
            first, *logs = cotangents
            return (self._sum(first, primals, axes, out_dim_dests), *logs)
        summed = []
        for ct, primal, dim in zip(cotangents, primals, out_dim_dests):
            over = frozenset()
            if not isinstance(dim, int) and isinstance(ct, jax.Array):
                want = self.jax.cotangent_type(primal)
                over = axes & self.jax.axis_type(self.jax.typeof(ct)).varying - want.axes
            summed.append(jax.lax.psum(ct, tuple(sorted(over))) if over else ct)
        return summed
