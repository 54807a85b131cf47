"""The registry: from kernel names to rules. An object; ``shardrules.register`` uses the default.

Pure Python: declaring a rule needs no JAX and changes nothing in it.
"""

from __future__ import annotations

import dataclasses
import re
import threading
from collections.abc import Callable
from typing import Any

from shardrules.declare import caller_place
from shardrules.errors import RegistrationError
from shardrules.rules import Rule, as_rule

__all__ = ["Registration", "Registry", "default", "normalise", "register"]


@dataclasses.dataclass(frozen=True)
class Registration:
    """One declaration.

    Args:
      name: the kernel name, FFI target or primitive name that it is for.
      rule: its rule.
      where: ``file:line`` of the declaration.
      status: ``declared`` (somebody says so) or ``audited`` (the kernel's own jaxpr proves it).
    """

    name: str
    rule: Rule
    where: str
    status: str = "declared"

    def __str__(self) -> str:
        return f"{self.rule!r} for {self.name!r}, {self.status} at {self.where}"


def normalise(name: str) -> str:
    """Return a kernel name as compiled programs print it.

    Pallas lowers the name ``foo bar/1`` as ``foo_bar_1``
    (``jax._src.interpreters.mlir.sanitize_name`` of JAX 0.10.2; a test compares the two).
    """
    return re.sub(r"[^\w.-]", "_", name)


class Registry:
    """Declarations by name, safe to use from several threads."""

    def __init__(self):
        self._lock = threading.RLock()
        self._by_name: dict[str, Registration] = {}
        self._listeners: list[Callable[[], None]] = []
        self._version = 0

    @property
    def version(self) -> int:
        """A count that grows with every change."""
        return self._version

    def register(self, name: str, rule: Any, *, replace: bool = False) -> Registration:
        """Declare the rule of every kernel called ``name``.

        Args:
          name: a Pallas kernel's ``name=`` or function name, an FFI target, a primitive's name.
          rule: a shardrules rule, or a function from a RuleContext to one AxisType per output.
          replace: take the place of an earlier declaration of the same name.

        Returns:
          The registration.

        Raises:
          RegistrationError: if the name is not a non-empty string, or is taken.
          RuleError: if ``rule`` is not a rule.
        """
        where = caller_place()
        if not isinstance(name, str) or not name.strip():
            raise RegistrationError(
                f"a kernel name is a non-empty string, not {name!r}; to bind a rule to a function "
                "object, write @shardrules.no_communication above its def", name=name)
        entry = Registration(name, as_rule(rule), where)
        key = normalise(name)
        with self._lock:
            known = self._by_name.get(key)
            if known is not None and not replace:
                raise RegistrationError(
                    f"kernel {name!r} has a rule already:\n  {known.rule!r} at {known.where}\n"
                    f"  {entry.rule!r} at {where}\nkeep one, or pass replace=True to the later",
                    name=name, places=(known.where, where))
            self._by_name[key] = entry
            self._version += 1
            listeners = list(self._listeners)
        for listener in listeners:
            listener()
        return entry

    def find(self, name: str) -> Registration | None:
        """Return the declaration for a kernel name, as written or as compiled; else None."""
        return self._by_name.get(normalise(name))

    def names(self) -> tuple[str, ...]:
        """Return the names that have a rule, sorted."""
        with self._lock:
            return tuple(sorted(entry.name for entry in self._by_name.values()))

    def listen(self, listener: Callable[[], None]) -> Callable[[], None]:
        """Call ``listener`` after every change; return a function that stops that."""
        with self._lock:
            self._listeners.append(listener)

        def stop():
            with self._lock:
                if listener in self._listeners:
                    self._listeners.remove(listener)

        return stop


default = Registry()


def register(name: str, rule: Any, *, replace: bool = False) -> Registration:
    """Declare the rule of every kernel called ``name`` in the default registry.

    Args:
      name: a Pallas kernel's ``name=`` or function name, an FFI target, a primitive's name.
      rule: a shardrules rule, or a function from a RuleContext to one AxisType per output.
      replace: take the place of an earlier declaration of the same name.

    Returns:
      The registration.

    Raises:
      RegistrationError: if the name is not a non-empty string, or is taken.
      RuleError: if ``rule`` is not a rule.
    """
    return default.register(name, rule, replace=replace)
