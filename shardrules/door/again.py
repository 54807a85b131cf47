"""How a jit was traced, so that the same program can be traced and compiled again."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from shardrules.door.patching import Patches
from shardrules.door.protocols import Jaxpr
from shardrules.door.watching import around

_last = threading.local()  # the jaxpr that this thread traced last, and how


class Again(NamedTuple):
    """The function and settings of a jit, and a call's arguments, arrays as shapes."""

    function: Any
    settings: tuple[Any, ...]
    args: Any
    kwargs: Any
    context: Any  # all else that tracing depends on: settings of JAX, meshes
    meshes: tuple[Any, ...]  # the meshes of ``with mesh`` and of ``jax.set_mesh``, None without
    made: Callable[..., Any]

    def lower(self) -> Any:
        return self.made(*self.settings).lower(*self.args, **self.kwargs)

    @contextlib.contextmanager
    def entered(self) -> Iterator[bool]:
        """Enter its meshes; gives whether tracing depends on the same as then."""
        import jax

        physical, concrete = self.meshes
        with contextlib.ExitStack() as stack:
            if physical is not None:
                stack.enter_context(physical)
            if concrete is not None and hasattr(jax, "set_mesh"):
                stack.enter_context(jax.set_mesh(concrete))
            yield _is_now(self.context)


def install(patches: Patches) -> None:
    """Note how each jit is traced; nothing on a JAX that traces jits elsewhere."""
    import jax
    from jax._src import config, pjit

    infer, made = (getattr(pjit, name, None) for name in ("_infer_params", "_cpp_pjit"))
    context = getattr(config, "trace_context", None)
    if infer is None or made is None or context is None:
        return

    def traced(original: Any, *given: Any) -> Any:
        result = original(*given)
        *settings, args, kwargs = given
        jaxpr = getattr(result[0], "params", {}).get("jaxpr")
        leaves, tree = jax.tree_util.tree_flatten((args, kwargs))
        if jaxpr is not None and not any(isinstance(x, jax.core.Tracer) for x in leaves):
            args, kwargs = jax.tree_util.tree_unflatten(tree, map(_shape, leaves))
            around_it = context(), _meshes()
            again = Again(settings[0], tuple(settings), args, kwargs, *around_it, made)
            _last.jaxpr, _last.again = jaxpr, again
        return result

    patches.attribute(pjit, "_infer_params", around(traced, infer))


def _meshes() -> tuple[Any, Any]:
    from jax._src import mesh

    physical = mesh.thread_resources.env.physical_mesh
    concrete: Any = getattr(mesh, "get_concrete_mesh", lambda: None)()
    return tuple(None if m is None or m.empty else m for m in (physical, concrete))  # type: ignore[return-value]


def of(jaxpr: Jaxpr) -> Again | None:
    """Say how a jaxpr that is lowered now was traced, None if this thread traced another since."""
    again = getattr(_last, "again", None) if getattr(_last, "jaxpr", None) is jaxpr else None
    vars(_last).clear()
    return again


def _is_now(context: Any) -> bool:
    """Whether tracing depends on the same settings and meshes here as where they were noted."""
    from jax._src import config

    now = config.trace_context()
    # A context of users that was made since stands at the end, None where nobody has set it.
    return now[: len(context)] == context and not any(x is not None for x in now[len(context) :])


def _shape(x: Any) -> Any:
    """Return an array's shape; other values stay as they are."""
    import jax

    if not isinstance(x, jax.Array):
        return x
    sharding = x.sharding if getattr(x, "committed", True) else None
    weak = getattr(x.aval, "weak_type", False)
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding, weak_type=weak)
