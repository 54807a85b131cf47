"""Replace attributes and table entries of JAX, and put exactly the old state back."""

from __future__ import annotations

from typing import Any

_ABSENT = object()


class Patches:
    """A list of replacements that is applied whole and undone whole."""

    def __init__(self):
        self._undo: list[tuple[str, Any, Any, Any]] = []

    def attribute(self, owner: Any, name: str, value: Any) -> None:
        """Set ``owner.name``; if it was inherited, undoing deletes it again."""
        self._undo.append(("attribute", owner, name, vars(owner).get(name, _ABSENT)))
        setattr(owner, name, value)

    def entry(self, table: dict, key: Any, value: Any) -> None:
        """Set ``table[key]``."""
        self._undo.append(("entry", table, key, table.get(key, _ABSENT)))
        table[key] = value

    def touched(self) -> tuple[tuple[Any, Any], ...]:
        """Return each (owner, name) and (table, key) that is replaced now."""
        return tuple((owner, name) for _, owner, name, _ in self._undo)

    def undo(self) -> None:
        """Put everything back, last change first."""
        while self._undo:
            kind, owner, name, old = self._undo.pop()
            if kind == "attribute":
                if old is _ABSENT:
                    delattr(owner, name)
                else:
                    setattr(owner, name, old)
            elif old is _ABSENT:
                del owner[name]
            else:
                owner[name] = old


class ModuleProxy:
    """A module in which some functions are replaced."""

    def __init__(self, module: Any, functions: dict[str, Any]):
        self.__dict__.update(functions)
        self._module = module

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)
