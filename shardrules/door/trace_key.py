"""jit's trace key, on a JAX where ``jax.make_user_context`` is missing or lacks a part.

A rule that is registered after a trace, or a scope that is left, must make that trace stale.
"""

from __future__ import annotations

import contextlib
from typing import Any


class ContextKey:
    """A user context that has no way to set it for all threads (JAX 0.7.2 to 0.9)."""

    def __init__(self, context: Any):
        self._context = context

    def set_global(self, value: Any) -> None:
        """Set the value for threads that set none themselves."""
        self._context._obj.set_global(value)

    def __call__(self, value: Any):
        """Return a context manager in which ``value`` is in this thread's trace key."""
        return self._context(value)


class _Mark(tuple):
    """Our entry among the meshes that are part of the trace key."""


class MeshKey:
    """jit's trace key before ``jax.make_user_context`` (JAX to 0.7.1)."""

    # The list of meshes entered by ``with mesh:`` is in the key, and nothing else reads it from
    # there, so one thread's scope can stand in it too. A change for all threads clears the caches.

    def __init__(self, config: Any):
        self._config = config
        self._value = None

    def set_global(self, value: Any) -> None:
        """Forget every trace, if the value is another one."""
        if value != self._value:
            import jax

            self._value = value
            jax.clear_caches()

    @contextlib.contextmanager
    def __call__(self, value: Any):
        """Put ``value`` into this thread's trace key."""
        before = self._read()
        self._write((*(m for m in before if not isinstance(m, _Mark)), _Mark((value,))))
        try:
            yield
        finally:
            self._write(before)

    def _read(self) -> tuple:
        state = getattr(self._config, "mesh_context_manager", None)
        if state is not None:
            return tuple(state.value or ())
        # JAX to 0.4.35 keeps it in a tuple of the thread's.
        context = self._config.jax_jit.thread_local_state().extra_jit_context
        return tuple(getattr(context, "mesh_context_manager", None) or ())

    def _write(self, meshes: tuple) -> None:
        state = getattr(self._config, "mesh_context_manager", None)
        if state is not None:
            state.set_local(meshes)
        else:
            self._config.update_thread_local_jit_state(mesh_context_manager=meshes)
