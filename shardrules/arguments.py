"""Check the arguments of public functions against their annotations.

Functions themselves check whatever an annotation can't express (a mesh axis that is not in scope,
an unknown name), and each parameter that is annotated ``Any``.

Type checkers find these mistakes too, but people don't run them on notebooks and on most training
scripts. Of the 3,069 wrong arguments in ``tests/test_arguments.py``, 190 pass without this module,
and some of the 190 weaken an assertion (``strict="no"`` is strict); 827 end in an AttributeError or
TypeError about a line of this package.
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
from typing import Any, NamedTuple, TypeVar

from shardrules.errors import ArgumentError, ShardrulesError

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

    @functools.cache
    def wanted() -> list[tuple[inspect.Parameter, _Wanted]]:
        hints = typing.get_type_hints(f)  # do this at the first call: all modules are imported then
        annotated = [(p, hints.get(p.name, Any)) for p in signature.parameters.values()]
        return [
            (p, _wanted(hint)) for p, hint in annotated if hint is not Any and p.name not in own
        ]

    # The combinations of argument types that fit, if types alone decide. The hooks call some of
    # these functions for each traced call, and checking would take longer than most of them.
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
        for parameter, due in wanted():
            if parameter.name not in bound:
                continue
            values = bound[parameter.name]
            if parameter.kind is parameter.VAR_KEYWORD:
                values = values.values()
            elif parameter.kind is not parameter.VAR_POSITIONAL:
                values = (values,)
            for value in values:
                if not due.fits(value):
                    _refuse(f, parameter, due.name, value)
        if not kwargs and all(due.by_type for _, due in wanted()):
            fitted.add(kinds)
        return f(*args, **kwargs)

    return call


def _refuse(f: Callable[..., Any], parameter: inspect.Parameter, due: str, value: Any) -> None:
    __tracebackhide__ = True
    name = f.__qualname__.replace(".__init__", "")
    default = parameter.default
    left_out = "" if default is parameter.empty else f"; leave it out for {default!r}"
    if isinstance(value, str) and re.search("(sequence|collection) of", due):
        left_out = f"; pass a list, {parameter.name}=[{value!r}]"
    raise ArgumentError(
        f"{name}: {parameter.name} is {due}, not {shown(value)} "
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
    try:
        return reprlib.repr(value).replace("\n", " ")
    except Exception:  # a user's own __repr__ may do anything  # noqa: BLE001
        return "an object"


class _Wanted(NamedTuple):
    name: str  # in messages
    fits: Callable[[Any], bool]
    by_type: bool = False  # whether a value's type alone decides; False for containers


def _is_number(kind: type) -> Callable[[Any], bool]:
    return lambda v: isinstance(v, kind) and not isinstance(v, bool)


_KINDS = {  # booleans and numbers of NumPy fit too
    bool: _Wanted("True or False", lambda v: type(v).__name__ in ("bool", "bool_"), True),
    int: _Wanted("an int", _is_number(numbers.Integral), True),
    float: _Wanted("a number", _is_number(numbers.Real), True),
    str: _Wanted("a str", lambda v: isinstance(v, str), True),
    type(None): _Wanted("None", lambda v: v is None, True),
    collections.abc.Callable: _Wanted("a function", callable),
    Any: _Wanted("anything", lambda v: True),
}


def _wanted(hint: Any) -> _Wanted:
    if isinstance(hint, TypeVar):
        hint = hint.__bound__ or Any
    root, inner = typing.get_origin(hint) or hint, typing.get_args(hint)
    if root in (typing.Union, types.UnionType):
        options = [*map(_wanted, inner)]
        name = " or ".join(option.name for option in options)
        by_type = all(option.by_type for option in options)
        return _Wanted(name, lambda v: any(option.fits(v) for option in options), by_type)
    if root is typing.Literal:  # the function itself checks for the allowed values
        root = type(inner[0])
    if root in _KINDS:
        return _KINDS[root]
    is_mapping = issubclass(root, collections.abc.Mapping)
    of = [_wanted(kind) for kind in inner[: 2 if is_mapping else 1]]
    name = f"a {root.__module__.split('.')[0]} {root.__name__}"
    if is_mapping:
        name = "a mapping" + (f" from {of[0].name} to {of[1].name}" if of else "")
    elif of:
        name = f"a {root.__name__.lower()} of {of[0].name}"

    def fits(value: Any) -> bool:
        if not isinstance(value, root) or isinstance(value, (str, bytes)):
            return False
        if is_mapping:
            return not of or all(of[0].fits(k) and of[1].fits(v) for k, v in value.items())
        # Looking at an iterator's items would consume them.
        return not of or isinstance(value, collections.abc.Iterator) or all(map(of[0].fits, value))

    return _Wanted(name, fits)


def allowance(text: str, flag: str = "--allow") -> tuple[str, str]:
    """Read a known finding and the reason why it stays from a command line.

    Args:
      text: ``"redundant all-reduce(model): issue 12"``.
      flag: the flag with this text.

    Returns:
      The finding and the reason.

    Raises:
      ShardrulesError: the text gives no reason.
    """
    what, colon, reason = text.partition(": ")
    if not colon:
        raise ShardrulesError(
            f"{flag}={text!r} gives no reason; write {flag}='redundant all-reduce(model): issue 12'"
        )
    return what.strip(), reason.strip()
