"""Every program that JAX compiles or takes from one of its caches, noted as it is handed out.

All of JAX's ways to a program (jit, pmap, ``lower().compile()``, eager operations, in any thread)
end in the ``compile`` of a computation of ``door.places.COMPILER``, which also hands out what
was compiled before and what the persistent compilation cache holds. It is replaced while somebody
watches. Where JAX is not imported yet it stays so: the replacement waits for the import, since a
program may set what JAX reads from its environment then.
"""

from __future__ import annotations

import functools
import pathlib
import sys
import threading
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

from shardrules.door import compiled, watching
from shardrules.door.jaxprs import kernel_name
from shardrules.door.patching import Patches
from shardrules.door.places import COMPILER, compilers, leave_out_frames
from shardrules.errors import ShardrulesError
from shardrules.watching.importing import WhenImported

__all__ = ["Noted", "process", "start"]

_lock = threading.RLock()
_patches = Patches()
_watchers: list[Callable[[Any, Any], None]] = []


class _Traced(NamedTuple):
    """What a program's jaxpr told: meshes of shard_maps, paths of results, Pallas calls' params."""

    meshes: list[Any]
    paths: tuple[str, ...] | None
    kernels: list[dict[str, Any]]


_traced: weakref.WeakKeyDictionary[Any, _Traced] = weakref.WeakKeyDictionary()


class Noted:
    """One program, with what its text does not say; the executable itself is not kept.

    Attributes:
      name: what JAX calls it, ``jit_step``.
      failure: why there is no HLO, empty if there is.
    """

    def __init__(self, executable: Any, traced: _Traced):
        self._paths = traced.paths
        self._avals = getattr(executable, "in_avals", None)
        self._inputs = getattr(executable, "_in_shardings", None)
        self._outputs = getattr(executable, "_out_shardings", None)
        self._meshes = traced.meshes
        self._kernels = traced.kernels
        self.name = "a program"
        self.failure = ""
        try:
            (self._module,) = executable.xla_executable.hlo_modules()
            self.name = str(self._module.name)
        except Exception as error:  # whatever the backend's C API reports; or there are several
            self._module = None
            self.failure = f"{type(error).__name__}: {error}".splitlines()[0]

    def text(self) -> str:
        """Return its compiled HLO.

        Raises:
          ShardrulesError: the executable did not give it.
        """
        if self._module is None:
            raise ShardrulesError(f"{self.name} does not give its HLO ({self.failure})")
        return self._module.to_string()

    def mesh(self, device_count: int) -> dict[str, int] | None:
        """Return the sizes of the axes of its one mesh, None if there is none or more.

        By the shardings of its arguments and results, else by its shard_maps.

        Args:
          device_count: how many devices the program is for; another mesh is none of it.
        """
        told = compiled.mesh_shape([self._inputs, self._outputs])
        if told is None:
            shapes = {tuple(dict(mesh.shape).items()) for mesh in self._meshes}
            told = dict(shapes.pop()) if len(shapes) == 1 else None
        size = 1
        for length in (told or {}).values():
            size *= length
        return told if told and size == device_count else None

    def parameter_shardings(self) -> list[tuple[tuple[int, ...], str]] | None:
        """Return shape on one device and HLO sharding of each parameter, None if not known."""
        if self._avals is None or self._inputs is None or len(self._avals) != len(self._inputs):
            return None
        return compiled.placed(self._avals, self._inputs)

    def proven_kernels(self) -> frozenset[str]:
        """Return the names of its Pallas kernels whose own jaxprs show that they don't communicate.

        A name that a kernel shares with one of which that is not shown is not among them.
        """
        if not self._kernels:
            return frozenset()
        from shardrules.hooks.install import state

        audits: dict[str, list[bool]] = {}
        for params in self._kernels:
            audit = state().registry.audit("pallas_call", params, 0)
            name, _ = kernel_name(params)
            audits.setdefault(name, []).append(audit is not None and audit.proven)
        return frozenset(name for name, proven in audits.items() if all(proven))

    def output_shardings(self, shapes: list[str]) -> list[tuple[str, str] | None] | None:
        """Return path and HLO sharding of each output, None if not known.

        Args:
          shapes: each output's shape on one device as HLO prints it.
        """
        if self._outputs is None:
            return None
        paths = self._paths
        if paths is None or len(paths) != len(self._outputs):
            alone = len(self._outputs) == 1
            paths = tuple("" if alone else f"[{n}]" for n in range(len(self._outputs)))
        return compiled.promised(list(zip(paths, self._outputs)), shapes)


def process() -> tuple[int, int]:
    """Return the number of this process and how many the job has; JAX must have compiled here."""
    import jax

    return jax.process_index(), jax.process_count()


def start(note: Callable[[Noted], None]) -> Callable[[], None]:
    """Call ``note`` with each program that any thread compiles or takes from a cache, once.

    Programs that the process compiled before are noted when they are called again.

    Returns:
      What ends it; with the last of them JAX is as it was.

    Raises:
      UnsupportedJaxError: this JAX does not have the functions that are replaced.
    """
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
            _imported.start()
        if COMPILER in sys.modules:
            watching.forget_fast_paths()
        _watchers.append(watcher)

    def stop() -> None:
        with _lock:
            if watcher in _watchers:
                _watchers.remove(watcher)
                if not _watchers:
                    _patches.undo()
                    _imported.stop()

    return stop


@functools.cache
def _leave_out_frames() -> None:
    """Leave this package's frames out of source lines: what a program says of itself stays."""
    leave_out_frames(str(pathlib.Path(__file__).parents[1]))


def _install(pxla: Any) -> None:
    _leave_out_frames()
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
        with _lock:
            traced = _Traced([], compiled.result_paths(closed_jaxpr), [])
            _walk(closed_jaxpr, traced, set())
            _traced[computation] = traced
    return computation


def _walk(jaxpr: Any, traced: _Traced, seen: set[int], in_shard_map: bool = False) -> None:
    """Note the outermost shard_maps' meshes and the Pallas calls of a jaxpr and of those in it."""
    jaxpr = getattr(jaxpr, "jaxpr", jaxpr)
    if id(jaxpr) in seen:
        return
    seen.add(id(jaxpr))
    for equation in jaxpr.eqns:
        name = equation.primitive.name
        if name == "pallas_call":
            traced.kernels.append(equation.params)
            continue
        if name == "shard_map" and not in_shard_map:
            traced.meshes.append(equation.params["mesh"])
        for value in equation.params.values():
            for inner in value if isinstance(value, (tuple, list)) else (value,):
                if hasattr(getattr(inner, "jaxpr", inner), "eqns"):
                    _walk(inner, traced, seen, in_shard_map or name == "shard_map")


_imported = WhenImported((COMPILER,), _install)
