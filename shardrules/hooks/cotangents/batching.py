"""Sum the cotangents of a custom_vjp under a ``vmap`` whose batch is split over mesh axes."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax

from shardrules.door.internals import Door
from shardrules.door.jaxprs import is_inexact
from shardrules.door.patching import Patches
from shardrules.door.protocols import JaxTrace, Primitive
from shardrules.hooks.frames import BwdFrame
from shardrules.hooks.retyping.retyping import Retyping
from shardrules.hooks.state import Hooks, State


class BatchedVjpHooks(Hooks):
    # vmap sums the cotangent of an unbatched primal over the batch. But each device holds only a
    # part of the batch, and JAX (0.6.0 to 0.12) adds no psum over the mesh axes that split the
    # batch: it then rejects the cotangent's type. So record the primals' avals when vmap processes
    # a custom_vjp, and add the psum after the batched bwd.

    def __init__(self, door: Door, state: State):
        super().__init__(door, state)
        self.retyping = state.of(Retyping)

    def install(self, patches: Patches) -> None:
        trace = self.door.BatchTrace
        self._process = trace.process_custom_vjp_call
        process = lambda *args, **kwargs: self._see(*args, **kwargs)  # noqa: E731
        patches.attribute(trace, "process_custom_vjp_call", process)
        patches.attribute(*self.door.owner("batch_bwd"), self._batch)
        psum, table = self.door.psum_invariant_p, self.door.batchers
        in_jaxpr = self.door.vjp_in_jaxpr_p
        if in_jaxpr is not None:  # JAX 0.6.0 batches custom_vjps in jaxprs by this rule instead
            patches.entry(table, in_jaxpr, functools.partial(self._see_rule, table[in_jaxpr]))
        if psum in table and not psum.multiple_results:  # since JAX 0.8
            patches.entry(table, psum, functools.partial(self._batch_psum, table[psum]))

    def _batch_psum(
        self,
        rule: Callable[..., Any],
        axis_data: Any,
        vals_in: Sequence[Any],
        dims_in: Sequence[Any],
        axes: Any,
    ) -> Any:
        """Batch a psum without the parameter that JAX 0.8.3 wrongly passes to it."""
        if not self.state.active or axis_data.name in axes or len(vals_in) != 1:
            return rule(axis_data, vals_in, dims_in, axes)
        return self.door.psum_invariant_p.bind(*vals_in, axes=axes), dims_in[0]

    def _see(
        self,
        trace: JaxTrace,
        prim: Primitive,
        fun: Any,
        fwd: Any,
        bwd: Any,
        tracers: Sequence[Any],
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        with self._primals(tracers):
            return self._process(trace, prim, fun, fwd, bwd, tracers, *args, **kwargs)

    def _see_rule(
        self,
        rule: Callable[..., Any],
        axis_data: Any,
        args: Sequence[Any],
        in_dims: Sequence[Any],
        **params: Any,
    ) -> Any:
        with self._primals(args[params["num_consts"] :]):
            return rule(axis_data, args, in_dims, **params)

    def _primals(self, values: Sequence[Any]) -> BwdFrame:
        batched = [self.door.typeof(x) for x in values]
        return dataclasses.replace(self.state.here.bwd, batched=batched)

    def _batch(self, bwd: Any, tag: Any, axis_data: Any, *rest: Any, **named: Any) -> Any:
        axes, primals = axis_data.spmd_name, self.state.here.bwd.batched
        axes = frozenset((axes,) if isinstance(axes, str) else axes or ())
        if primals is None or not axes or not self.state.active:
            return self.door.batch_bwd(bwd, tag, axis_data, *rest, **named)
        retyping = self.retyping
        inner = self.door.transformation(lambda f, *args: retyping.run_hiding(f, axes, args))(bwd)
        batched = self.door.batch_bwd(inner, tag, axis_data, *rest, **named)
        dims = rest[1] if len(rest) > 1 else named["out_dim_dests"]

        def run(*args: Any) -> Any:
            # Don't sum over axes over which the primals were cast: the cast's transpose does.
            cast = axes & self.state.here.bwd.over
            return self._sum(batched.call_wrapped(*args), primals, axes - cast, cast, dims)

        return self.door.wrapped(run, like=batched)

    def _sum(
        self,
        cotangents: Any,
        primals: Sequence[Any],
        axes: frozenset[str],
        cast: frozenset[str],
        out_dim_dests: Sequence[Any],
    ) -> Any:
        if not self.door.checking():
            return cotangents
        if cotangents and isinstance(cotangents[0], (list, tuple)):  # with logs, since JAX 0.11
            first, *logs = cotangents
            return (self._sum(first, primals, axes, cast, out_dim_dests), *logs)
        summed = []
        for ct, primal, dim in zip(cotangents, primals, out_dim_dests):
            over = whole = frozenset[str]()
            if not isinstance(dim, int) and isinstance(ct, jax.Array):
                want = self.door.cotangent_type(primal)
                have = self.door.axis_type(self.door.typeof(ct))
                over = axes & have.varying - want.axes
                whole = cast - want.axes - have.axes
            # The cotangent is already the sum: give each device an equal share.
            if whole and is_inexact(ct):
                share = ct / jax.lax.psum(1, tuple(sorted(whole)))
                ct = self.door.cast(share, have.vary(*whole))
            summed.append(jax.lax.psum(ct, tuple(sorted(over))) if over else ct)
        return summed
