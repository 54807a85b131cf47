"""A custom_vjp under ``vmap(..., spmd_axis_name=...)``: cotangents of what is not batched.

vmap sums such a cotangent over the batch, and each device holds its part of the batch only: JAX
(0.6.0 to 0.12) puts in no psum over the axes that carry the batch, and then refuses the
cotangent's type.
"""

from __future__ import annotations

import threading

from shardrules.hooks.door.compat import Jax
from shardrules.hooks.door.patching import Patches
from shardrules.hooks.state import Hooks, State

__all__ = ["BatchedVjpHooks"]


class BatchedVjpHooks(Hooks):
    """The hooks on a custom_vjp's batching."""

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
