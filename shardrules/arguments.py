"""The arguments of public functions, held to their annotations: a wrong one says what was due.

What an annotation can't say (a mesh axis that is not one here, a name that is none of a few) is the
function's own to check, and so is each parameter that is annotated ``Any``.
"""

from __future__ import annotations

import collections.abc
import functools
import inspect
import numbers
import re
import reprlib
import sys
import types
import typing
from collections.abc import Callable
from typing import Any, TypeVar

from shardrules.errors import ArgumentError

__all__ = ["checked", "shown"]

_T = TypeVar("_T", bound=Callable[..., Any])


@typing.overload
def checked(f: _T) -> _T: ...
@typing.overload
def checked(*, own: tuple[str, ...]) -> Callable[[_T], _T]: ...
def checked(f: Any = None, *, own: tuple[str, ...] = ()) -> Any:
    """Make a function refuse arguments that its annotations don't allow.

    Arguments that don't fit the signature are left to Python's own words.
    """
    if f is None:
        return functools.partial(checked, own=own)
    signature = inspect.signature(f)
    variable = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)

    @functools.cache
    def wanted() -> list[tuple[inspect.Parameter, Any]]:
        hints = typing.get_type_hints(f)  # once all modules are there that they name
        found = [(p, hints.get(p.name, Any)) for p in signature.parameters.values()]
        return [(p, hint) for p, hint in found if hint is not Any and p.name not in own]

    # The types of arguments that fitted, where nothing else decides: the hooks ask some of these
    # functions at each call that is traced, and looking takes longer than most answers.
    fitted: set[tuple[type, ...]] = set()

    @functools.wraps(f)
    def call(*args: Any, **kwargs: Any) -> Any:
        __tracebackhide__ = True  # pytest shows the line that calls this
        kinds = tuple(map(type, args))
        if not kwargs and kinds in fitted:
            return f(*args)
        try:
            given = signature.bind(*args, **kwargs).arguments
        except TypeError:
            return f(*args, **kwargs)
        for parameter, hint in wanted():
            values = given[parameter.name] if parameter.name in given else ()
            if parameter.kind is parameter.VAR_KEYWORD:
                values = tuple(values.values()) if values else ()
            elif parameter.kind not in variable:
                values = (values,) if parameter.name in given else ()
            for value in values:
                if not _fits(value, hint):
                    _refuse(f, parameter, hint, value)
        if not kwargs and all(_by_type(hint) for _, hint in wanted()):
            fitted.add(kinds)
        return f(*args, **kwargs)

    return call


def _refuse(f: Callable[..., Any], parameter: inspect.Parameter, hint: Any, value: Any) -> None:
    __tracebackhide__ = True
    name = f.__qualname__.replace(".__init__", "")
    default = parameter.default
    left_out = "" if default is parameter.empty else f"; leave it out for {default!r}"
    if isinstance(value, str) and re.search("(sequence|collection) of", _due(hint)):
        left_out = f"; pass a list, {parameter.name}=[{value!r}]"
    raise ArgumentError(
        f"{name}: {parameter.name} is {_due(hint)}, not {shown(value)} "
        f"({type(value).__name__}){left_out}; help({_home(f)}{name}) has the rest",
        argument=parameter.name,
        value=value,
    )


def _home(f: Callable[..., Any]) -> str:
    """Return the public module that exports a function, with a dot."""
    package = f.__module__.partition(".")[0]
    for module in (package, *(f"{package}.{m}" for m in ("testing", "report", "hlo", "aot"))):
        known = sys.modules.get(module)
        if known is not None and f.__name__ in getattr(known, "__all__", ()):
            return f"{module}."
    return f"{f.__module__}."


def shown(value: Any) -> str:
    """Write a value of any kind on one short line."""
    try:
        return reprlib.repr(value).replace("\n", " ")
    except Exception:  # a user's own __repr__ may do anything
        return "an object"


# From an annotation to what it is called in a message, and to what it takes.
_KINDS: dict[Any, tuple[str, Callable[[Any], bool]]] = {
    bool: ("True or False", lambda v: type(v).__name__ in ("bool", "bool_")),  # numpy's too
    int: ("an int", lambda v: isinstance(v, numbers.Integral) and not isinstance(v, bool)),
    float: ("a number", lambda v: isinstance(v, numbers.Real) and not isinstance(v, bool)),
    str: ("a str", lambda v: isinstance(v, str)),
    type(None): ("None", lambda v: v is None),
}


def _parts(hint: Any) -> tuple[Any, tuple[Any, ...]]:
    """Return the root of an annotation, and what is in its brackets."""
    if isinstance(hint, TypeVar):
        hint = hint.__bound__ or Any
    return typing.get_origin(hint) or hint, typing.get_args(hint)


def _by_type(hint: Any) -> bool:
    """Whether a value's type alone decides if it fits; no container's does."""
    root, inner = _parts(hint)
    if root in (typing.Union, types.UnionType):
        return all(map(_by_type, inner))
    return root in _KINDS


def _fits(value: Any, hint: Any) -> bool:
    root, inner = _parts(hint)
    if root is Any:
        return True
    if root in (typing.Union, types.UnionType):
        return any(_fits(value, one) for one in inner)
    if root in _KINDS:
        return _KINDS[root][1](value)
    if root is collections.abc.Callable:
        return callable(value)
    if not isinstance(value, root) or isinstance(value, (str, bytes)):
        return False
    if issubclass(root, collections.abc.Mapping):
        return not inner or all(_fits(k, inner[0]) and _fits(v, inner[1]) for k, v in value.items())
    if isinstance(value, collections.abc.Iterator):
        return True  # its items come only once
    return all(_fits(one, kind) for kind in inner[:1] for one in value)


def _due(hint: Any) -> str:
    root, inner = _parts(hint)
    if root in (typing.Union, types.UnionType):
        return " or ".join(_due(one) for one in inner)
    if root in _KINDS:
        return _KINDS[root][0]
    if root is collections.abc.Callable:
        return "a function"
    if isinstance(root, type) and issubclass(root, collections.abc.Mapping):
        return "a mapping" + (f" from {_due(inner[0])} to {_due(inner[1])}" if inner else "")
    if isinstance(root, type) and issubclass(root, collections.abc.Iterable) and inner:
        return f"a {root.__name__.lower()} of {_due(inner[0])}"
    return "anything" if root is Any else f"a {root.__module__.split('.')[0]} {root.__name__}"
