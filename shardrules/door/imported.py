"""Modules that a program imports later: what is done once they are there."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any


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
