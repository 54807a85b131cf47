"""Act on a module of JAX once it is imported, and leave it to the program when that is."""

from __future__ import annotations

import importlib.machinery
import sys
from collections.abc import Callable
from typing import Any

__all__ = ["WhenImported"]


class WhenImported:
    """Calls a function with each of some modules, now or when it has been imported.

    Args:
      names: the modules.
      action: what is called.
    """

    def __init__(self, names: tuple[str, ...], action: Callable[[Any], None]):
        self._names = names
        self._action = action

    def start(self) -> None:
        """Act on those that are there, and wait for the others."""
        if self not in sys.meta_path:
            sys.meta_path.insert(0, self)  # type: ignore[arg-type]
        for name in self._names:
            if name in sys.modules:
                self._action(sys.modules[name])

    def stop(self) -> None:
        """Wait no longer."""
        if self in sys.meta_path:
            sys.meta_path.remove(self)  # type: ignore[arg-type]

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        """Find one of the modules as Python does; act once its code has run."""
        if name not in self._names:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        if spec is None or spec.loader is None:
            return None
        load = spec.loader.exec_module

        def exec_module(module: Any) -> None:
            load(module)
            if self in sys.meta_path:
                self._action(module)

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec
