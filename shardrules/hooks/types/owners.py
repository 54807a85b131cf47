"""Tell JAX's own primitives from those of users and libraries, which may do anything."""

from __future__ import annotations

import contextlib
import functools
import sys
import types
from collections.abc import Iterator
from typing import Any

from shardrules.door import places
from shardrules.door.internals import Door
from shardrules.door.jaxprs import opened
from shardrules.door.protocols import Primitive
from shardrules.jaxprs.walk import equations

# The packages whose functions JAX's own functions consist of.
_NEUTRAL = frozenset(("jax", "jaxlib", "shardrules", "numpy", "ml_dtypes")) | frozenset(
    sys.stdlib_module_names
)
_DEPTH = 5  # enough for the partials and nested closures that JAX's helpers wrap around a function


def is_users(door: Door, primitive: Primitive) -> bool:
    """Return whether a primitive isn't JAX's own: one of its functions comes from elsewhere."""
    # A foreign lowering alone proves nothing, since a plugin may lower JAX's primitives in its own
    # way. In that case, test whether a module of JAX holds the primitive.
    own = [vars(primitive).get(name) for name in ("abstract_eval", "impl")]
    if any(map(is_foreign, own)):
        return True
    tables = (door.lowerings, *door.platform_lowerings.values())
    rules = [door.lowering_rule(t[primitive]) for t in tables if primitive in t]
    return any(map(is_foreign, rules)) and not is_held_by_jax(primitive)


def is_foreign(function: Any) -> bool:
    """Return whether a function, or a function inside it, is a user's or a library's."""
    return any(module not in _NEUTRAL for module in _code_modules(function))


def _code_modules(function: Any, depth: int = _DEPTH) -> Iterator[str]:
    """Yield the top package of each Python function that ``function`` is made of."""
    if isinstance(function, functools.partial):
        inside: tuple[Any, ...] = (function.func, *function.args, *function.keywords.values())
    elif isinstance(function, types.MethodType):
        inside = (function.__func__,)
    elif isinstance(function, types.FunctionType):
        yield function.__module__.partition(".")[0] if function.__module__ else ""
        inside = tuple(value for _, value in held_by(function))
    else:
        wrapped = getattr(function, "__wrapped__", None)
        # Calling an object calls a method of its class.
        call = vars(type(function)).get("__call__") if wrapped is None else wrapped
        inside = () if call is None else (call,)
    for part in inside if depth else ():
        if callable(part):
            yield from _code_modules(part, depth - 1)


def held_by(function: Any) -> Iterator[tuple[str, Any]]:
    """Yield name and value of each variable that a function closes over."""
    names = getattr(getattr(function, "__code__", None), "co_freevars", ())
    for name, cell in zip(names, getattr(function, "__closure__", None) or ()):
        with contextlib.suppress(ValueError):  # not assigned yet
            yield name, cell.cell_contents


def innermost(function: Any) -> Any:
    """Return the function that has a source line, inside partial, wraps and declarations."""
    for _ in range(100):  # __wrapped__ may lead back to itself
        is_partial = isinstance(function, functools.partial)
        inner = function.func if is_partial else getattr(function, "__wrapped__", function)
        if inner is function:
            break
        function = inner
    return function


def module_of(function: Any) -> str:
    """Return the module of the innermost function, or empty."""
    return getattr(innermost(function), "__module__", None) or ""


def is_held_by_jax(primitive: Primitive) -> bool:
    """Return whether a module of JAX has the primitive as an attribute."""
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] in ("jax", "jaxlib"):
            # Don't use `in`, since values may compare elementwise.
            if any(value is primitive for value in list(vars(module).values())):
                return True
    return False


_MOST_HELD = 1000  # the most objects to visit in a rule; those of JAX's own hold some tens


def calls_only_jaxs(rule: Any, own: str = "") -> bool:
    """Return whether all functions that a rule wraps, closes over or is given are JAX's.

    ``functools.partial(jax.jvp, f)`` and ``jax.named_call(f)`` are JAX's, and call the author's f.
    A function at the place ``own``, ``file:line``, is allowed, too.
    """
    left, met = [rule], dict[int, Any]()  # by id, and kept alive, since Python reuses ids
    while left:
        held = left.pop()
        if id(held) in met:
            continue
        met[id(held)] = held
        if len(met) > _MOST_HELD:
            return False
        jaxpr = opened(held)
        if isinstance(held, types.FunctionType):
            code = held.__code__
            if f"{code.co_filename}:{code.co_firstlineno}" == own:
                continue
            if not places.owns(code.co_filename):
                return False
            left += [getattr(cell, "cell_contents", None) for cell in held.__closure__ or ()]
            left += [held.__defaults__, held.__kwdefaults__, getattr(held, "__wrapped__", None)]
        elif isinstance(held, functools.partial):
            left += [held.func, held.args, held.keywords]
        elif isinstance(held, types.MethodType):
            left += [held.__func__, held.__self__]
        elif isinstance(held, (tuple, list)) and not callable(held):
            left += held
        elif type(held) is dict:
            left += held.values()
        elif jaxpr is not None:  # traced before: it may call an author's rule
            for eqn in equations(jaxpr):
                if "custom_" in eqn.primitive.name:
                    left += [v for v in eqn.params.values() if opened(v) is None]
        elif isinstance(held, type):
            if not _is_of_jax(held):
                return False
        elif callable(held) or hasattr(held, "call_wrapped"):
            # JAX's wrappers: of jit, of caches, WrappedFun, custom_jvp.
            if not _is_of_jax(type(held)):
                return False
            names = {*getattr(held, "__dict__", ()), *getattr(type(held), "__slots__", ())}
            left += [getattr(held, name, None) for name in {"__wrapped__", *names}]
    return True


def _is_of_jax(kind: type) -> bool:
    """Return whether a class is JAX's or Python's, by the file of its module."""
    if kind.__module__.partition(".")[0] in ("builtins", "functools", "jaxlib"):
        return kind is not types.SimpleNamespace
    file = getattr(sys.modules.get(kind.__module__), "__file__", None) or ""
    return places.owns(file)
