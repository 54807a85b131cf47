"""Record every program that JAX compiles or takes from one of its caches."""

# However a program is made in JAX (by jit, pmap, lower().compile(), eager operations, in any
# thread), one method returns it, even if a cache in memory or on disk holds it. A watch replaces
# that method once JAX is imported. The watch itself doesn't import JAX, since a program may first
# set environment variables that JAX reads at import.

from __future__ import annotations

import contextlib
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from shardrules.door import again, compiled, internals, seams, watching
from shardrules.door.jaxprs import opened
from shardrules.door.patching import WhenImported
from shardrules.door.places import leave_out_frames
from shardrules.errors import UnsupportedJaxError
from shardrules.jaxprs.walk import equations

_lock = threading.RLock()
_hold = contextlib.ExitStack()  # undone when the last watcher stops
_watchers: list[Callable[[Any, Any], None]] = []


class Traced(NamedTuple):
    """Facts from a program's jaxpr: meshes of shard_maps, paths of results, its Pallas calls, ...

    Its ``definition`` is ``NAME at FILE:LINE`` of the function.
    """

    meshes: list[Any]
    paths: tuple[str, ...] | None
    kernels: list[Any]
    again: again.Again | None = None  # how to retrace it, if a shard_map in it has its check off
    scope: Any = None  # the hooks' scope when it was traced, if they were installed
    definition: str = ""
    drops_axes: bool = False  # whether it only ends a shard_map that runs without jit

    @property
    def interpreted(self) -> frozenset[str]:
        """Return ``FILE:LINE`` of each call of a Pallas kernel that JAX's interpreter runs."""
        with contextlib.suppress(UnsupportedJaxError):
            calls = (eqn for eqn in self.kernels if eqn.params.get("interpret"))
            return frozenset(internals.load().source_line(eqn.source_info) for eqn in calls)
        return frozenset()


_unwatched = threading.local()
_traced: weakref.WeakKeyDictionary[Any, Traced] = weakref.WeakKeyDictionary()


def start(note: Callable[[Any, Traced], None]) -> Callable[[], None]:
    """Call ``note`` once with each executable that any thread compiles or takes from a cache."""
    # Programs that were compiled earlier are recorded when they are called again. The returned
    # function stops the recording. When all recordings are stopped, JAX is restored.
    seen: weakref.WeakSet[Any] = weakref.WeakSet()

    def watcher(executable: Any, computation: Any) -> None:
        with _lock:
            if executable in seen:
                return
            seen.add(executable)
            traced = _traced.get(computation, Traced([], None, []))
        note(executable, traced)

    with _lock:
        if not _watchers:
            _begin()
        if "jax" in sys.modules:
            watching.forget_fast_paths()
        _watchers.append(watcher)

    def stop() -> None:
        with _lock:
            if watcher in _watchers:
                _watchers.remove(watcher)
                if not _watchers:
                    _hold.close()

    return stop


def _begin() -> None:
    try:
        _hold.callback(WhenImported("jax", _install).stop)
    except BaseException:
        _hold.close()
        raise


def _install(_: object) -> None:
    leave_out_frames()  # so that the watch doesn't change the programs' source lines
    # The key of JAX's cache on disk omits source lines, so the cache could return a program with
    # the lines of another program. Include source lines in the key.
    config = sys.modules["jax"].config
    key_has_lines = "jax_compilation_cache_include_metadata_in_key"
    _hold.callback(config.update, key_has_lines, getattr(config, key_has_lines))
    config.update(key_has_lines, True)
    for key, wrapper in (("compile", _compile), ("compile_pmap", _compile), ("lower", _lower)):
        _hold.callback(seams.intercept(key, wrapper))
    with contextlib.suppress(UnsupportedJaxError):  # without this, no program can be retraced
        _hold.callback(again.note())


def _compile(original: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
    executable = original(self, *args, **kwargs)
    for watcher in () if getattr(_unwatched, "now", False) else tuple(_watchers):
        watcher(executable, self)
    return executable


def _lower(original: Any, closed_jaxpr: Any, *args: Any, **kwargs: Any) -> Any:
    # Ask before lowering, which traces the jits of interpreted kernels.
    how = again.of(closed_jaxpr)
    computation = original(closed_jaxpr, *args, **kwargs)
    if _watchers:
        inside = list(equations(opened(closed_jaxpr)))
        meshes = [eqn for eqn in inside if eqn.primitive.name == "shard_map"]
        kernels = [eqn for eqn in inside if eqn.primitive.name == "pallas_call"]
        with _lock:
            _traced[computation] = Traced(
                [eqn.params["mesh"] for eqn in meshes],
                compiled.result_paths(closed_jaxpr),
                kernels,
                *_again(how, meshes),
                compiled.definition(closed_jaxpr),
                any(compiled.drops_axes(eqn.params["jaxpr"]) for eqn in meshes),
            )
    return computation


def _again(how: again.Again | None, shard_maps: list[Any]) -> tuple[Any, Any]:
    """Return how to retrace a program, and the scope; None unless a shard_map's check is off."""
    if how is None or all(eqn.params.get("check_vma") is not False for eqn in shard_maps):
        return None, None
    from shardrules.hooks.install import state

    return how, state().scope if state().patched else None


@contextlib.contextmanager
def unwatched() -> Iterator[None]:
    """Don't record the programs that this thread compiles inside the context."""
    before = getattr(_unwatched, "now", False)
    _unwatched.now = True
    try:
        yield
    finally:
        _unwatched.now = before
