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
import weakref
from typing import Any

from shardrules.door.internals import Door
from shardrules.door.patching import Patches
from shardrules.hooks.cotangents.bwd import Bwd
from shardrules.hooks.cotangents.refusals import Cotangent
from shardrules.hooks.cotangents.traced import CustomVjpInfo
from shardrules.hooks.cotangents.widened import WidenedFwd
from shardrules.hooks.state import Hooks, Scope, State

__all__ = ["CustomVjpHooks"]


class CustomVjpHooks(Hooks):
    """The hooks of ``jax.custom_vjp``."""

    def __init__(self, door: Door, state: State):
        super().__init__(door, state)
        # From what JAX hands on from fwd to bwd (a function that returns their trees) to fwd,
        # whether that takes gradients, and which of its arguments are perturbed.
        self._forwards: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()

    def see(self, parts: CustomVjpInfo, *args) -> None:
        """Note that a bwd runs with ``args``, where types are not on avals."""

    def install(self, patches: Patches) -> None:
        """Replace the three functions that flatten a custom_vjp's parts."""
        patches.attribute(*self.door.owner("flatten_primal"), self._flatten_primal)
        patches.attribute(*self.door.owner("flatten_fwd"), self._flatten_fwd)
        patches.attribute(*self.door.owner("flatten_bwd"), self._flatten_bwd)

    def _flatten_primal(self, fun, *rest, **options):
        return self.door.flatten_primal(self._scoped(fun), *rest, **options)

    def _flatten_fwd(self, fun, *rest, **options):
        gradients: list[None] = []
        perturbed: list[bool] = []

        def see(*args):
            import jax

            leaves = jax.tree_util.tree_leaves(args)
            kind = jax.custom_derivatives.CustomVJPPrimal
            perturbed[:] = [one.perturbed for one in leaves if isinstance(one, kind)]

        scoped = self._scoped(fun, self._inside(), gradients, see)
        if self.state.active and self.door.typed:
            widened = WidenedFwd(self.door, self.state)
            flat, trees = widened.flatten(scoped, *rest, **options)
        else:
            flat, trees = self.door.flatten_fwd(scoped, *rest, **options)
        if self.state.active:
            self._forwards[trees] = scoped, gradients, perturbed
        return flat, trees

    def trees_over(self, trees: Any, axes: frozenset[str]) -> Any:
        """Return the trees of a fwd that ran with its primals cast to vary over ``axes`` too."""
        widened = self.state.widening(axes, trees)
        if trees in self._forwards:
            self._forwards[widened] = self._forwards[trees]
        return widened

    def parts(self, bwd: Any, in_tree: Any, in_avals: Any, trees: Any) -> CustomVjpInfo:
        """Return what a bwd belongs to, as JAX flattens it."""
        fwd, gradients, perturbed = self._forwards.get(trees, (None, (), ()))
        name, place = self.door.function_name(bwd), self.door.function_place(bwd)
        return CustomVjpInfo(name, fwd, gradients, perturbed, in_tree, tuple(in_avals), place)

    def _flatten_bwd(self, fun, *rest):
        bwd, scope = fun, self._inside()
        if scope.active:
            parts = self.parts(bwd, *rest[:3])
            if self.door.typed:
                bwd = self.door.transformation(self._run_bwd)(bwd, scope, parts)
            else:  # matched where replication sets are known: hooks/sets/rep.py
                bwd = self.door.scoped(
                    bwd, self.state.enter, scope, functools.partial(self.see, parts)
                )
        return self.door.flatten_bwd(bwd, *rest)

    def _inside(self) -> Scope:
        """Return the scope of fwd and bwd: the innermost reverse pass is not through these."""
        scope = self.state.scope
        count = scope.derivatives_count
        return dataclasses.replace(scope, derivatives_count=count - 1) if count else scope

    def _scoped(self, fun, scope=None, gradients=None, see=None):
        scope = self.state.scope if scope is None else scope
        if not scope.active:
            return fun
        name = self.door.function_name(fun)
        enter = lambda scope: self._enter(name, scope, gradients)  # noqa: E731
        return self.door.scoped(fun, enter, scope, see)

    def _enter(self, name: str, scope: Scope, gradients: list[None] | None = None):
        """Return a context with the scope of a custom_vjp; refuse to run it without the hooks."""
        if not self.state.patched and self.door.checking():
            raise self.state.outlived(f"{name!r}, of a custom_vjp,", function=name)
        context = contextlib.ExitStack()
        context.enter_context(self.state.enter(scope))
        if gradients is not None:
            context.enter_context(self.state.recording_gradients(gradients))
        return context

    # bwd is traced when the scope that its forward ran under has closed.

    def _run_bwd(self, bwd, scope, parts, *args):
        with self._enter(parts.name, scope):
            if not self.door.checking():
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
            if isinstance(ct, self.door.SymbolicZero):  # zero varies over whatever it has to
                return self.door.SymbolicZero(
                    self.door.with_axis_type(ct.aval, self.door.cotangent_type(primal))
                )
            return self._cotangent(path, index, ct, primal, bwd)

        return tree.tree_map_with_path(one, cotangents, primals, is_leaf=is_none)

    def _cotangent(self, path, index, value, primal, bwd):
        import jax

        door = self.door
        ct = Cotangent(path, index, door.axis_type(door.typeof(value)), door.cotangent_type(primal))
        bwd.check(ct)
        if ct.extra:
            order = tuple(a for a in door.manual_axes() if a in ct.extra)
            value = jax.lax.psum(value, order)
            self.state.record_sum(index, ct.extra)
            self.state.note_sum(
                order,
                value,
                door.source_line(door.current_source()),
                f"bwd {bwd.parts.name!r} returns one device's share at "
                f"output{jax.tree_util.keystr(path)}",
            )
        return door.cast(value, ct.want)
