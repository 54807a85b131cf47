"""Record every program that JAX compiles or takes from one of its caches."""

# Every route to a program in JAX (jit, pmap, lower().compile(), eager operations, any thread)
# ends in the compile method of a computation of door.places.COMPILER, also where a cache in
# memory or on disk holds it. We replace that method while a watch is on, once JAX is imported: a
# program may still set environment variables that JAX reads then.

from __future__ import annotations

import contextlib
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from shardrules.door import again, compiled, watching
from shardrules.door.jaxprs import opened
from shardrules.door.patching import Patches
from shardrules.door.places import COMPILER, compilers, leave_out_frames
from shardrules.jaxprs.walk import equations

_lock = threading.RLock()
_patches = Patches()
_hold = contextlib.ExitStack()  # what the last watcher undoes
_watchers: list[Callable[[Any, Any], None]] = []


class Traced(NamedTuple):
    """From a program's jaxpr: meshes of shard_maps, paths of results, params of Pallas calls."""

    meshes: list[Any]
    paths: tuple[str, ...] | None
    kernels: list[dict[str, Any]]
    again: again.Again | None = None  # how to trace it, if a shard_map in it has its check off
    scope: Any = None  # the hooks' scope then, if they were installed


_unwatched = threading.local()
_traced: weakref.WeakKeyDictionary[Any, Traced] = weakref.WeakKeyDictionary()


def start(note: Callable[[Any, Traced], None]) -> Callable[[], None]:
    """Call ``note`` once with each executable that any thread compiles or takes from a cache."""
    # Programs compiled before are recorded when they are called again. The returned function stops
    # the recording; the last such call restores JAX.
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
            _hold.callback(_patches.undo)
            _hold.callback(WhenImported(COMPILER, _install).stop)
        _hold.callback(WhenImported("jax", lambda _: again.install(_patches)).stop)
        if COMPILER in sys.modules:
            watching.forget_fast_paths()
        _watchers.append(watcher)

    def stop() -> None:
        with _lock:
            if watcher in _watchers:
                _watchers.remove(watcher)
                if not _watchers:
                    _hold.close()

    return stop


def _install(pxla: Any) -> None:
    leave_out_frames()  # texts stay the same
    for owner, name in compilers(pxla):
        by = _compile if name == "compile" else _lower
        _patches.attribute(owner, name, watching.around(by, getattr(owner, name)))


def _compile(original: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
    executable = original(self, *args, **kwargs)
    for watcher in () if getattr(_unwatched, "now", False) else tuple(_watchers):
        watcher(executable, self)
    return executable


def _lower(original: Any, closed_jaxpr: Any, *args: Any, **kwargs: Any) -> Any:
    computation = original(closed_jaxpr, *args, **kwargs)
    how = again.of(closed_jaxpr)
    if _watchers:
        inside = list(equations(opened(closed_jaxpr)))
        meshes, kernels = (
            [eqn.params for eqn in inside if eqn.primitive.name == name]
            for name in ("shard_map", "pallas_call")
        )
        with _lock:
            _traced[computation] = Traced(
                [params["mesh"] for params in meshes],
                compiled.result_paths(closed_jaxpr),
                kernels,
                *_again(how, meshes),
            )
    return computation


def _again(how: again.Again | None, shard_maps: list[Any]) -> tuple[Any, Any]:
    """Return how to trace a program with checks on, and the scope; None if all of them are on."""
    if how is None or all(params.get("check_vma") is not False for params in shard_maps):
        return None, None
    from shardrules.hooks.install import state

    return how, state().scope if state().patched else None


@contextlib.contextmanager
def unwatched() -> Iterator[None]:
    """Leave out what this thread compiles inside."""
    _unwatched.now = True
    try:
        yield
    finally:
        _unwatched.now = False


class WhenImported:
    """Calls ``action`` with the module of a name, now or after its import, until ``stop``."""

    def __init__(self, name: str, action: Callable[[Any], None]):
        self._name = name
        self._action = action
        if name in sys.modules:
            action(sys.modules[name])
        sys.meta_path.insert(0, self)

    def stop(self) -> None:
        if self in sys.meta_path:
            sys.meta_path.remove(self)

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        """Find the module as the finders behind do, and make its loader call the action."""
        if name != self._name:
            return None
        behind = sys.meta_path[sys.meta_path.index(self) + 1 :]  # another may wait for the module
        others = (f for f in behind if hasattr(f, "find_spec"))
        spec = next(filter(None, (f.find_spec(name, path, target) for f in others)), None)
        if spec is not None and hasattr(spec.loader, "exec_module"):
            spec.loader = _Loader(spec.loader, self._loaded)  # type: ignore[assignment]
        return spec

    def _loaded(self, module: Any) -> None:
        if self in sys.meta_path:
            self._action(module)


class _Loader:
    """Wraps a module's loader, and calls ``loaded`` after the module's code has run."""

    def __init__(self, loader: Any, loaded: Callable[[Any], None]):
        self._loader = loader
        self._loaded = loaded

    def exec_module(self, module: Any) -> None:
        module.__loader__ = module.__spec__.loader = self._loader
        self._loader.exec_module(module)
        self._loaded(module)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)
