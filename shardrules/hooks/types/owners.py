"""Whose a primitive is: JAX's own, or a user's or library's, which may do anything."""

from __future__ import annotations

import functools
import sys
import types
from collections.abc import Iterator
from typing import Any

from shardrules.door.internals import Door

# What JAX's own functions are made of.
_NEUTRAL = frozenset(("jax", "jaxlib", "shardrules", "numpy", "ml_dtypes")) | frozenset(
    sys.stdlib_module_names
)
_DEPTH = 5  # functools.partial of a closure of a closure: what JAX's helpers make of a function


class Owners:
    """Tells users' primitives from JAX's."""

    def __init__(self, door: Door):
        self.door = door

    def is_users(self, primitive: Any) -> bool:
        """Whether a primitive isn't JAX's own: one of its functions comes from elsewhere."""
        # A lowering alone doesn't tell: a plugin may lower JAX's primitives its own way. Then it is
        # asked whether JAX holds the primitive.
        own = [vars(primitive).get(name) for name in ("abstract_eval", "impl")]
        if any(map(_is_foreign, own)):
            return True
        tables = (self.door.lowerings, *self.door.platform_lowerings.values())
        rules = [self.door.lowering_rule(t[primitive]) for t in tables if primitive in t]
        return any(map(_is_foreign, rules)) and not is_held_by_jax(primitive)

    def is_ours(self, primitive: Any) -> bool:
        """Whether a primitive was made by this package."""
        return "shardrules" in code_modules(vars(primitive).get("abstract_eval"))


def _is_foreign(function: Any) -> bool:
    return any(module not in _NEUTRAL for module in code_modules(function))


def code_modules(function: Any, depth: int = _DEPTH) -> Iterator[str]:
    """Yield the top package of each Python function that ``function`` is made of."""
    if isinstance(function, functools.partial):
        inside: tuple[Any, ...] = (function.func, *function.args, *function.keywords.values())
    elif isinstance(function, types.MethodType):
        inside = (function.__func__,)
    elif isinstance(function, types.FunctionType):
        yield function.__module__.partition(".")[0] if function.__module__ else ""
        inside = tuple(_contents(function))
    else:
        wrapped = getattr(function, "__wrapped__", None)
        inside = () if wrapped is None else (wrapped,)
    for part in inside if depth else ():
        if callable(part):
            yield from code_modules(part, depth - 1)


def _contents(function: Any) -> Iterator[Any]:
    for cell in function.__closure__ or ():
        try:
            yield cell.cell_contents
        except ValueError:  # not assigned yet
            continue


def is_held_by_jax(primitive: Any) -> bool:
    """Whether a module of JAX has the primitive as an attribute."""
    return any(
        value is primitive
        for name, module in list(sys.modules.items())
        if name.partition(".")[0] in ("jax", "jaxlib")
        for value in list(vars(module).values())
    )
