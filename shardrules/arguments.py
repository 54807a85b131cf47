"""Check the arguments of public functions against their annotations.

A function itself checks what an annotation can't express (a mesh axis that is not in scope, an
unknown name), and each parameter that is annotated ``Any``.
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

_T = TypeVar("_T", bound=Callable[..., Any])


@typing.overload
def checked(f: _T) -> _T: ...
@typing.overload
def checked(*, own: tuple[str, ...]) -> Callable[[_T], _T]: ...
def checked(f: Any = None, *, own: tuple[str, ...] = ()) -> Any:
    """Make a function raise ArgumentError for arguments that its annotations don't allow.

    Python itself raises for arguments that don't fit the signature.
    """
    if f is None:
        return functools.partial(checked, own=own)
    signature = inspect.signature(f)
    variable = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)

    @functools.cache
    def wanted() -> list[tuple[inspect.Parameter, Any]]:
        hints = typing.get_type_hints(f)  # at the first call: all modules are imported by then
        annotated = [(p, hints.get(p.name, Any)) for p in signature.parameters.values()]
        return [(p, hint) for p, hint in annotated if hint is not Any and p.name not in own]

    # The argument types that fit, where types alone decide. The hooks call some of these functions
    # for each traced call, and checking takes longer than most of them.
    fitted: set[tuple[type, ...]] = set()

    @functools.wraps(f)
    def call(*args: Any, **kwargs: Any) -> Any:
        __tracebackhide__ = True  # pytest shows the line that calls this
        kinds = tuple(map(type, args))
        if not kwargs and kinds in fitted:
            return f(*args)
        try:
            bound = signature.bind(*args, **kwargs).arguments
        except TypeError:
            return f(*args, **kwargs)
        for parameter, hint in wanted():
            values = bound[parameter.name] if parameter.name in bound else ()
            if parameter.kind is parameter.VAR_KEYWORD:
                values = tuple(values.values()) if values else ()
            elif parameter.kind not in variable:
                values = (values,) if parameter.name in bound else ()
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
        f"({type(value).__name__}){left_out}; see help({_home(f)}{name})",
        argument=parameter.name,
        value=value,
    )


def _home(f: Callable[..., Any]) -> str:
    """Return the public module that exports a function, with a dot."""
    package = f.__module__.partition(".")[0]
    for module in (package, *(f"{package}.{m}" for m in ("testing", "report", "hlo", "aot"))):
        if f.__name__ in getattr(sys.modules.get(module), "__all__", ()):
            return f"{module}."
    return f"{f.__module__}."


def shown(value: Any) -> str:
    """Write any value on one short line."""
    try:
        return reprlib.repr(value).replace("\n", " ")
    except Exception:  # a user's own __repr__ may do anything
        return "an object"


# From an annotation to its name in messages, and to the test of a value.
_KINDS: dict[Any, tuple[str, Callable[[Any], bool]]] = {
    bool: ("True or False", lambda v: type(v).__name__ in ("bool", "bool_")),  # numpy's too
    int: ("an int", lambda v: isinstance(v, numbers.Integral) and not isinstance(v, bool)),
    float: ("a number", lambda v: isinstance(v, numbers.Real) and not isinstance(v, bool)),
    str: ("a str", lambda v: isinstance(v, str)),
    type(None): ("None", lambda v: v is None),
}


def _parts(hint: Any) -> tuple[Any, tuple[Any, ...]]:
    """Return an annotation's origin, and its arguments in brackets."""
    if isinstance(hint, TypeVar):
        hint = hint.__bound__ or Any
    return typing.get_origin(hint) or hint, typing.get_args(hint)


def _by_type(hint: Any) -> bool:
    """Whether a value's type alone decides if it fits; for containers it does not."""
    root, inner = _parts(hint)
    if root in (typing.Union, types.UnionType):
        return all(map(_by_type, inner))
    return root in _KINDS


def _fits(value: Any, hint: Any) -> bool:
    root, inner = _parts(hint)
    if root is Any:
        return True
    if root in (typing.Union, types.UnionType):
        return any(_fits(value, option) for option in inner)
    if root in _KINDS:
        return _KINDS[root][1](value)
    if root is collections.abc.Callable:
        return callable(value)
    if not isinstance(value, root) or isinstance(value, (str, bytes)):
        return False
    if issubclass(root, collections.abc.Mapping):
        return not inner or all(_fits(k, inner[0]) and _fits(v, inner[1]) for k, v in value.items())
    if isinstance(value, collections.abc.Iterator):
        return True  # looking at its items would consume them
    return all(_fits(item, kind) for kind in inner[:1] for item in value)


def _due(hint: Any) -> str:
    root, inner = _parts(hint)
    if root in (typing.Union, types.UnionType):
        return " or ".join(map(_due, inner))
    if root in _KINDS:
        return _KINDS[root][0]
    if root is collections.abc.Callable:
        return "a function"
    if isinstance(root, type) and issubclass(root, collections.abc.Mapping):
        return "a mapping" + (f" from {_due(inner[0])} to {_due(inner[1])}" if inner else "")
    if isinstance(root, type) and issubclass(root, collections.abc.Iterable) and inner:
        return f"a {root.__name__.lower()} of {_due(inner[0])}"
    return "anything" if root is Any else f"a {root.__module__.split('.')[0]} {root.__name__}"
