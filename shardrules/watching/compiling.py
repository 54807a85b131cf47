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
from collections.abc import Callable
from typing import Any, NamedTuple

from shardrules.door import compiled, watching
from shardrules.door.jaxprs import equations, opened
from shardrules.door.patching import Patches
from shardrules.door.places import COMPILER, compilers, leave_out_frames
from shardrules.watching.importing import WhenImported

_lock = threading.RLock()
_patches = Patches()
_hold = contextlib.ExitStack()  # what the last watcher undoes
_watchers: list[Callable[[Any, Any], None]] = []


class Traced(NamedTuple):
    """From a program's jaxpr: meshes of shard_maps, paths of results, params of Pallas calls."""

    meshes: list[Any]
    paths: tuple[str, ...] | None
    kernels: list[dict[str, Any]]


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


def _compile(original: Any, self: Any, *args, **kwargs) -> Any:
    executable = original(self, *args, **kwargs)
    for watcher in tuple(_watchers):
        watcher(executable, self)
    return executable


def _lower(original: Any, closed_jaxpr: Any, *args, **kwargs) -> Any:
    computation = original(closed_jaxpr, *args, **kwargs)
    if _watchers:
        inside = list(equations(opened(closed_jaxpr)))
        meshes, kernels = (
            [eqn.params for eqn in inside if eqn.primitive.name == name]
            for name in ("shard_map", "pallas_call")
        )
        with _lock:
            _traced[computation] = Traced(
                [params["mesh"] for params in meshes], compiled.result_paths(closed_jaxpr), kernels
            )
    return computation
