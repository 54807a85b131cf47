"""Record every program that JAX compiles or takes from one of its caches."""

# Every route to a program in JAX (jit, pmap, lower().compile(), eager operations, any thread)
# ends in the compile method of a computation of door.places.COMPILER, also where a cache in
# memory or on disk holds it. We replace that method while a watch is on, once JAX is imported: a
# program may still set environment variables that JAX reads then.

from __future__ import annotations

import contextlib
import math
import sys
import threading
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

from shardrules.door import compiled, watching
from shardrules.door.jaxprs import equations, kernel_name, opened
from shardrules.door.patching import Patches
from shardrules.door.places import COMPILER, compilers, leave_out_frames
from shardrules.errors import ShardrulesError
from shardrules.hooks.retrace import first_line
from shardrules.watching.importing import WhenImported

_lock = threading.RLock()
_patches = Patches()
_hold = contextlib.ExitStack()  # what the last watcher undoes
_watchers: list[Callable[[Any, Any], None]] = []


class _Traced(NamedTuple):
    """From a program's jaxpr: meshes of shard_maps, paths of results, params of Pallas calls."""

    meshes: list[Any]
    paths: tuple[str, ...] | None
    kernels: list[dict[str, Any]]


_traced: weakref.WeakKeyDictionary[Any, _Traced] = weakref.WeakKeyDictionary()


class Noted:
    """One program, with what its text does not say; it does not keep the executable."""

    def __init__(self, executable: Any, traced: _Traced):
        self._traced = traced
        self.placements = compiled.Placements(executable)
        self.name = "a program"
        self.failure = ""
        try:
            (self._module,) = executable.xla_executable.hlo_modules()
            self.name = str(self._module.name)
        except Exception as error:  # the backend's C API may raise anything; or there are several
            self._module = None
            self.failure = first_line(error)

    def text(self) -> str:
        if self._module is None:
            raise ShardrulesError(f"{self.name} does not give its HLO ({self.failure})")
        return self._module.to_string()

    def mesh(self, device_count: int) -> dict[str, int] | None:
        """Return the axis sizes of its only mesh, None unless that has ``device_count`` devices."""
        # The shardings of arguments and results name the mesh, else the shard_maps do.
        mesh_shape = self.placements.mesh()
        if mesh_shape is None:
            shapes = {tuple(dict(mesh.shape).items()) for mesh in self._traced.meshes}
            mesh_shape = dict(shapes.pop()) if len(shapes) == 1 else None
        fits = mesh_shape and math.prod(mesh_shape.values()) == device_count
        return mesh_shape if fits else None

    def proven_kernels(self) -> frozenset[str]:
        """Return the names of Pallas kernels all of whose jaxprs prove no communication."""
        if not self._traced.kernels:
            return frozenset()
        from shardrules.hooks.install import state

        proven: dict[str, bool] = {}
        for params in self._traced.kernels:
            audit = state().registry.audit("pallas_call", params, 0)
            name, _ = kernel_name(params)
            proven[name] = proven.get(name, True) and audit is not None and audit.proven
        return frozenset(name for name in proven if proven[name])

    def output_shardings(self, shapes: list[str]) -> list[tuple[str, str] | None] | None:
        """Return path and HLO sharding of each output of these HLO shapes, None if unknown."""
        return self.placements.results(self._traced.paths, shapes)


def start(note: Callable[[Noted], None]) -> Callable[[], None]:
    """Call ``note`` once with each program that any thread compiles or takes from a cache."""
    # Programs compiled before are recorded when they are called again. The returned function stops
    # the recording; the last such call restores JAX.
    seen: weakref.WeakSet[Any] = weakref.WeakSet()

    def watcher(executable: Any, computation: Any) -> None:
        with _lock:
            if executable in seen:
                return
            seen.add(executable)
            noted = Noted(executable, _traced.get(computation, _Traced([], None, [])))
        note(noted)

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
            _traced[computation] = _Traced(
                [params["mesh"] for params in meshes], compiled.result_paths(closed_jaxpr), kernels
            )
    return computation
