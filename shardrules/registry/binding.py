"""Bind a declaration to a function object instead of a name.

Most kernel bodies are called ``kernel``, so a decorator must bind to the object. ``inspect``,
``functools.partial``, ``jax.jit`` and ``defvjp`` see the function itself; only calling it as an op
(on arrays) does more.
"""

from __future__ import annotations

import dataclasses
import functools
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any, TypeVar, cast

from shardrules.errors import RegistrationError

_F = TypeVar("_F", bound=Callable[..., Any])

# This process's declarations, keyed by function name and rule text, so that a line that runs twice
# counts once.
_declared: dict[tuple[str, str], Binding] = {}


@dataclasses.dataclass(frozen=True)
class Binding:
    rule: Any
    where: str


def caller_place() -> str:
    """Return ``file:line`` of the nearest frame outside this package."""
    # Skip contextlib, whose frames are between this one and the caller of a ``with``.
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        module = frame.f_globals.get("__name__", "")
        if module.partition(".")[0] not in ("shardrules", "contextlib", "functools"):
            return f"{frame.f_code.co_filename}:{frame.f_lineno}"
        frame = frame.f_back
    return "<unknown>"


class Declared:
    """A function with a rule; calls go to ``Declared.caller``, everything else to the function."""

    # The package's ``__init__`` sets ``caller``, so that this module doesn't need JAX: calling an
    # op under its rule does.

    caller: Callable[..., Any]

    def __init__(self, target: Callable[..., Any], binding: Binding):
        # Don't copy __dict__: a custom_vjp object gets its fwd and bwd later. __getattr__ reads
        # attributes from the function instead.
        functools.update_wrapper(self, target, updated=())
        self.__shardrules__ = binding

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return Declared.caller(self, *args, **kwargs)

    def __get__(self, instance: Any, owner: Any = None) -> Any:
        return self if instance is None else functools.partial(self, instance)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or "__wrapped__" not in self.__dict__:
            raise AttributeError(name)
        return getattr(self.__wrapped__, name)

    def __repr__(self) -> str:
        return f"{self.__shardrules__.rule}({self.__wrapped__!r})"


def binding_of(function: Any) -> Binding | None:
    """Return a function's binding, looking through ``partial`` and ``wraps``."""
    seen = set()
    while function is not None and id(function) not in seen:
        seen.add(id(function))
        if isinstance(function, Declared):
            return function.__shardrules__
        if isinstance(function, functools.partial):
            function = function.func
        else:
            function = getattr(function, "__wrapped__", None)
    return None


def declare(target: _F, rule: Any) -> _F:
    where = caller_place()
    if not callable(target):
        raise RegistrationError(
            f"{rule!r} declares functions, and {target!r} is not callable; write it above a "
            f"kernel's def, or register a name: shardrules.register('name', {rule!r})",
            target=target,
            rule=rule,
        )
    if isinstance(target, type):
        raise RegistrationError(
            f"{rule!r} declares functions, and {target.__name__} is a class, which it would hide "
            f"from isinstance; write @shardrules.{rule!r} above the method or function that runs "
            f"the kernel, or op = shardrules.{rule!r}(instance) where an instance is called",
            target=target,
            rule=rule,
        )
    earlier = binding_of(target)
    if earlier is not None and earlier.rule is not rule:
        raise RegistrationError(
            f"{target!r} is declared twice, with different rules:\n"
            f"  {earlier.rule!r} at {earlier.where}\n  {rule!r} at {where}\nkeep one of them",
            target=target,
            places=(earlier.where, where),
        )
    if earlier is not None:
        return target
    binding = _declared[_name_of(target), repr(rule)] = Binding(rule, where)
    return cast(_F, Declared(target, binding))  # called and inspected as the target is


def declared() -> list[tuple[str, Binding]]:
    """Return (``module:name``, binding) of all declared functions, sorted."""
    return [(name, binding) for (name, _), binding in sorted(_declared.items(), key=str)]


def _name_of(target: Any) -> str:
    name = getattr(target, "__qualname__", None) or getattr(target, "__name__", None)
    return f"{getattr(target, '__module__', '')}:{name or type(target).__qualname__}"
