"""Record how a jit was traced, so that the same program can be traced and compiled again."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from shardrules.door import seams
from shardrules.door.protocols import Jaxpr

_last = threading.local()  # the jaxpr that this thread traced last, and how it was traced


class Again(NamedTuple):
    """The function and settings of a jit, and a call's arguments with arrays as shapes."""

    function: Any
    settings: tuple[Any, ...]
    args: Any
    kwargs: Any
    context: Any  # the rest of what tracing depends on: JAX's settings and meshes
    meshes: tuple[Any, ...]  # the meshes of ``with mesh`` and of ``jax.set_mesh``, or None
    made: Callable[..., Any]

    def lower(self) -> Any:
        return self.made(*self.settings).lower(*self.args, **self.kwargs)

    @contextlib.contextmanager
    def entered(self) -> Iterator[bool]:
        """Enter the meshes; yield whether tracing depends on the same settings as before."""
        import jax

        physical, concrete = self.meshes
        with contextlib.ExitStack() as stack:
            if physical is not None:
                stack.enter_context(physical)
            if concrete is not None and hasattr(jax, "set_mesh"):
                stack.enter_context(jax.set_mesh(concrete))
            yield _is_now(self.context)


def note() -> Callable[[], None]:
    """Record how each jit is traced, until the returned function is called."""
    return seams.intercept("infer", _traced)


def _traced(original: Callable[..., Any], *given: Any) -> Any:
    import jax

    result = original(*given)
    *settings, args, kwargs = given
    jaxpr = getattr(result[0], "params", {}).get("jaxpr")
    leaves, tree = jax.tree_util.tree_flatten((args, kwargs))
    if jaxpr is not None and not any(isinstance(x, jax.core.Tracer) for x in leaves):
        args, kwargs = jax.tree_util.tree_unflatten(tree, map(_shape, leaves))
        context, made = seams.named("trace_context")(), seams.named("make_jit")
        again = Again(settings[0], tuple(settings), args, kwargs, context, _meshes(), made)
        _last.jaxpr, _last.again = jaxpr, again
    return result


def _meshes() -> tuple[Any, Any]:
    physical = seams.named("thread_resources").env.physical_mesh
    concrete_mesh = seams.named("concrete_mesh")
    concrete = None if concrete_mesh is None else concrete_mesh()
    return tuple(None if m is None or m.empty else m for m in (physical, concrete))  # type: ignore[return-value]


def of(jaxpr: Jaxpr) -> Again | None:
    """Return how a jaxpr was traced; None if this thread traced another one since."""
    again = getattr(_last, "again", None) if getattr(_last, "jaxpr", None) is jaxpr else None
    vars(_last).clear()
    return again


def _is_now(context: Any) -> bool:
    """Return whether the settings and meshes that tracing depends on are still the same."""
    now = seams.named("trace_context")()
    # JAX appends new entries at the end, and these must be unset: a user's context is None, and the
    # options of a module that JAX imports late (pallas_fuser in 0.12, for a kernel) are off.
    return now[: len(context)] == context and not any(now[len(context) :])


def _shape(x: Any) -> Any:
    """Return an array's ShapeDtypeStruct; return other values as they are."""
    import jax

    if not isinstance(x, jax.Array):
        return x
    sharding = x.sharding if getattr(x, "committed", True) else None
    weak = getattr(x.aval, "weak_type", False)
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding, weak_type=weak)
