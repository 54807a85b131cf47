"""Call a function once the program imports a module of JAX."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any


class WhenImported:
    """Calls ``action`` with each named module, now or after its import."""

    def __init__(self, names: tuple[str, ...], action: Callable[[Any], None]):
        self._names = names
        self._action = action

    def start(self) -> None:
        if self not in sys.meta_path:
            sys.meta_path.insert(0, self)  # type: ignore[arg-type]
        for name in self._names:
            if name in sys.modules:
                self._action(sys.modules[name])

    def stop(self) -> None:
        if self in sys.meta_path:
            sys.meta_path.remove(self)  # type: ignore[arg-type]

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        """Find a named module as the other finders do, and make its loader call the action."""
        if name not in self._names:
            return None
        for finder in tuple(sys.meta_path):  # including other import hooks
            find = getattr(finder, "find_spec", None)
            spec = None if finder is self or find is None else find(name, path, target)
            if spec is not None:
                break
        else:
            return None
        if hasattr(spec.loader, "exec_module"):
            spec.loader = _Loader(spec.loader, self._loaded)
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
