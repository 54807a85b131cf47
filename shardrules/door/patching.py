"""Patch JAX: replace functions, make tuples that raise when read, add to the trace key.

Also call functions once a module has been imported.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import sys
from collections.abc import Callable, Iterator
from typing import Any

_ABSENT = object()


class Patches:
    """Replaced attributes and table entries; ``undo`` restores the exact old state."""

    def __init__(self) -> None:
        self._undo: list[tuple[Any, Any, Callable[[], None], str]] = []
        self._caches: list[Any] = []

    def attribute(self, owner: Any, name: str, value: Any) -> None:
        """Set ``owner.name``; ``undo`` deletes it again if it was inherited."""
        old = vars(owner).get(name, _ABSENT)
        undo: Any = (delattr, owner, name) if old is _ABSENT else (setattr, owner, name, old)
        self._undo.append((owner, name, functools.partial(*undo), _caller()))
        setattr(owner, name, value)

    def entry(self, table: dict[Any, Any], key: Any, value: Any) -> None:
        old = table.get(key, _ABSENT)
        undo: Any = (table.pop, key) if old is _ABSENT else (table.__setitem__, key, old)
        self._undo.append((table, key, functools.partial(*undo), _caller()))
        table[key] = value

    def copied(self, cache: Any) -> None:
        """Clear a cache of table entries now, before they are replaced, and after ``undo``."""
        self._caches.append(cache)
        cache.cache_clear()

    def touched(self) -> tuple[tuple[Any, Any], ...]:
        """Return each (owner, name) and (table, key) that is replaced now."""
        return tuple((owner, name) for owner, name, _, _ in self._undo)

    def described(self) -> tuple[str, ...]:
        """Return a line for each replacement: what is replaced, and by which of our modules."""
        return tuple(f"{_place(owner, name)}  {by}" for owner, name, _, by in self._undo)

    def undo(self) -> None:
        while self._undo:
            self._undo.pop()[2]()
        while self._caches:
            self._caches.pop().cache_clear()


def _caller() -> str:
    """Return the module that calls a method of ``Patches``."""
    return str(sys._getframe(2).f_globals["__name__"])


def _place(owner: Any, name: Any) -> str:
    if isinstance(owner, dict):
        return f"a table's entry {name}"
    if not hasattr(owner, "__name__"):  # a primitive
        owner = type(owner)
    module = "" if inspect.ismodule(owner) else f"{owner.__module__}."
    return f"{module}{owner.__name__}.{name}"


class ModuleProxy:
    """A module in which some functions are replaced."""

    def __init__(self, module: Any, functions: dict[str, Any]):
        self.__dict__.update(functions)
        self._module = module

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)


class TellingTuple(tuple[Any, ...]):
    """A tuple that calls ``refuse`` before it is read.

    An interpreted kernel has loops in which JAX mixes types, so the hooks drop these types. If the
    hooks are uninstalled by then, JAX's error doesn't name the cause. JAX reads the parameter
    ``input_output_aliases`` first (a test in tests/core/test_install.py fails once it doesn't), so
    the hooks put this tuple there, and it raises an error that names the cause.
    """

    refuse: Callable[[], None]  # raises if the tuple must not be read here

    def __iter__(self) -> Iterator[Any]:
        self.refuse()
        return super().__iter__()

    def __bool__(self) -> bool:
        self.refuse()
        return len(self) > 0


class _KeyEntry(tuple[Any, ...]):
    """Our entry among the meshes that are part of the trace key."""


class MeshKey:
    """jit's trace key before ``jax.make_user_context`` (JAX to 0.7.1)."""

    # The key holds the meshes entered by ``with mesh:``. JAX uses that entry for nothing else, so
    # we can add a thread's scope to it. A change for all threads clears JAX's caches instead.

    def __init__(self, config: Any):
        self._config = config
        self._value = None

    def set_global(self, value: Any) -> None:
        if value != self._value:
            import jax

            self._value = value
            jax.clear_caches()

    @contextlib.contextmanager
    def __call__(self, value: Any) -> Iterator[None]:
        """Put ``value`` into this thread's trace key."""
        state = getattr(self._config, "mesh_context_manager", None)
        if state is not None:
            before, write = state.value, state.set_local
        else:  # JAX up to 0.4.35 keeps the meshes in a thread-local tuple
            context = self._config.jax_jit.thread_local_state().extra_jit_context
            before = getattr(context, "mesh_context_manager", None)
            update = self._config.update_thread_local_jit_state
            write = lambda meshes: update(mesh_context_manager=meshes)  # noqa: E731
        meshes = tuple(before or ())
        write((*(m for m in meshes if not isinstance(m, _KeyEntry)), _KeyEntry((value,))))
        try:
            yield
        finally:
            write(meshes)


class WhenImported:
    """Calls ``action`` with a module, now or after its import, until ``stop`` is called."""

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
        """Let the later finders find the module, and make its loader call the action."""
        if name != self._name:
            return None
        behind = sys.meta_path[sys.meta_path.index(self) + 1 :]  # may hold another WhenImported
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
