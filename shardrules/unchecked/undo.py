"""Record pieces of Python state, and make the functions that restore them."""

from __future__ import annotations

import collections
import functools
import gc
import itertools
import logging
import os
import random
import re
import sys
import types
import warnings
from collections.abc import Callable, Iterable, Iterator
from typing import Any

# Restores a value that changed; returns the changed value in ``plain`` form, None if unchanged.
Undo = Callable[[], object]

ABSENT = object()
STATELESS = (type(None), bool, int, float, complex, str, bytes, types.CodeType)
# Functions in C++ extensions name nanobind as their module.
_OTHERS = frozenset({"jax", "jaxlib", "numpy", "shardrules", "ml_dtypes", "nanobind"}) | frozenset(
    name for name in sys.stdlib_module_names if name != "__main__"
)


def is_others(module: str | None) -> bool:
    return (module or "").partition(".")[0] in _OTHERS


def slots_of(kind: type) -> Iterable[str]:
    slots = vars(kind).get("__slots__", ())
    return (slots,) if isinstance(slots, str) else tuple(slots)


def variables(variables: dict[str, Any], names: Iterable[str], new: bool = False) -> Undo:
    """Keep the named variables of a module; with ``new``, also remove variables added later."""
    before = {name: _Numbering.held(variables, name) for name in names}

    def undo() -> object:
        became: dict[str, Any] = {}
        for name in before.keys() | variables.keys() if new else before:
            now, value = variables.get(name, ABSENT), before.get(name, ABSENT)
            if type(value) is _Numbering:
                if repr(now) != value.text:
                    became[name] = repr(now)
                    variables[name] = value.renewed()
                continue
            # Keep the name of a submodule: an import sets it only once.
            if now is value or (value is ABSENT and isinstance(now, types.ModuleType)):
                continue
            became[name] = now
            if value is ABSENT:
                del variables[name]
            else:
                variables[name] = value
        return plain(became) if became else None

    return undo


class _Numbering:
    """The position of an ``itertools.count`` that only one variable of a module holds.

    A count can't be rewound, so the variable gets a new one. The program can't tell the two apart,
    since nothing else holds the first one.
    """

    __slots__ = ("text",)

    def __init__(self, counter: Any):
        self.text = repr(counter)

    @classmethod
    def held(cls, variables: dict[str, Any], name: str) -> Any:
        """Return a variable's value, or a _Numbering if the value is such a counter."""
        value = variables.get(name, ABSENT)
        return cls(value) if is_counter(variables, name) else value

    def renewed(self) -> Any:
        """Return a new counter at the recorded position."""
        return itertools.count(*map(int, _NUMBERS.findall(self.text)))


_NUMBERS = re.compile(r"-?\d+")


def is_counter(variables: dict[str, Any], name: str) -> bool:
    """Return whether a variable is an ``itertools.count`` of integers that nothing else holds."""
    value = variables.get(name)
    if type(value) is not itertools.count or not re.fullmatch(r"count\([-\d, ]+\)", repr(value)):
        return False
    if any(holder is not variables for holder in gc.get_referrers(value)):
        return False
    # Compare ids: an inner function or generator that used ``value`` would hold it in a cell.
    return [*map(id, variables.values())].count(id(value)) == 1


def read(value: Any, name: str, otherwise: Any = None) -> Any:
    """Read an object's attribute without calling its class's ``__getattr__``."""
    try:
        return object.__getattribute__(value, name)
    except Exception:  # also an error that a property raises  # noqa: BLE001
        return otherwise


def attribute(owner: Any, name: str, before: Any) -> Undo:
    def undo() -> object:
        now = vars(owner).get(name) if isinstance(owner, type) else read(owner, name, ABSENT)
        if now is before:
            return None
        # object.__setattr__ works for frozen objects, too; for a class, only setattr does.
        (setattr if isinstance(owner, type) else object.__setattr__)(owner, name, before)
        return plain(now)

    return undo


_CONTAINERS: tuple[Any, ...] = (
    collections.OrderedDict,
    dict,
    list,
    set,
    collections.deque,
    bytearray,
)


def contents(value: Any) -> Any:
    """Copy a container's elements (a dict's items) without calling methods of its subclass."""
    kind = _container_kind(value)
    if kind is bytearray:
        return kind.copy(value)
    return [*(kind.items(value) if issubclass(kind, dict) else kind.__iter__(value))]


def _container_kind(value: Any) -> Any:
    return next(kind for kind in _CONTAINERS if issubclass(type(value), kind))


def container(value: Any) -> Undo:
    # Call the methods of the built-in class: the program's subclass may load its contents lazily,
    # or refuse to be copied.
    kind, before = _container_kind(value), contents(value)

    def undo() -> object:
        now = contents(value)
        if kind is set:  # restoring a set may change its order
            is_same = set(now) == set(before)
        else:
            is_same = len(now) == len(before) and all(map(_is_same, now, before))
        if is_same:
            return None
        became = plain(value)
        if kind is bytearray and len(now) == len(before):  # write in place: views forbid resizing
            kind.__setitem__(value, slice(None), before)
            return became
        if issubclass(kind, dict):
            _put_items(value, now, before)
        else:
            kind.clear(value)
            (kind.update if kind is set else kind.extend)(value, before)
        return became

    return undo


def _put_items(value: Any, now: Any, before: Any) -> None:
    """Restore a dict's items to ``before``; ``now`` differs in its items or in their order."""
    kind, pairs = _container_kind(value), zip(now, before)
    if len(now) >= len(before) and all(a[0] is b[0] for a, b in pairs):
        # Only new keys were added, so don't clear the dict: Python may need its items meanwhile.
        for key, _ in now[len(before) :]:
            kind.__delitem__(value, key)
    else:
        kind.clear(value)
    for key, item in before:
        kind.__setitem__(value, key, item)


def _is_same(a: Any, b: Any) -> bool:
    if type(a) is tuple and type(b) is tuple and len(a) == len(b) == 2:  # an item of a dict
        return a[0] is b[0] and a[1] is b[1]
    return a is b or (type(a) is int and a == b)


def class_attributes(kind: type) -> Undo:
    before = set(vars(kind))

    def undo() -> object:
        new = {n: vars(kind)[n] for n in set(vars(kind)) - before if not n.startswith("__")}
        for name in new:
            delattr(kind, name)
        return plain(new) if new else None

    return undo


def array_items(value: Any, before: Any, every: Any) -> Undo:
    def undo() -> object:
        if (now := value.tobytes()) == before.tobytes():
            return None
        value[every] = before
        return now

    return undo


def memory(value: Any) -> Undo:
    import ctypes

    at, size_bytes = ctypes.addressof(value), ctypes.sizeof(value)
    held = functools.partial(ctypes.string_at, at, size_bytes)
    return state(held, lambda before: ctypes.memmove(at, before, size_bytes))


def environment() -> Undo:
    """Keep the environment variables; new ones stay if a module was imported meanwhile."""
    before, modules = dict(os.environ), len(sys.modules)

    def undo() -> object:
        if (now := dict(os.environ)) == before:
            return None
        for name in now.keys() - before.keys() if len(sys.modules) == modules else ():
            del os.environ[name]
        for name, value in before.items():
            if now.get(name) != value:
                os.environ[name] = value
        return plain(now)

    return undo


def stream(value: Any) -> Undo:
    text, position = value.getvalue(), value.tell()

    def undo() -> object:
        if (now := (value.getvalue(), value.tell())) == (text, position):
            return None
        value.seek(0)
        value.truncate()
        value.write(text)
        value.seek(position)
        return now

    return undo


def decimal_context(value: Any) -> Undo:
    names = ("prec", "rounding", "Emin", "Emax", "capitals", "clamp")
    flags = (value.flags, value.traps)

    def get() -> Any:
        return [getattr(value, name) for name in names], [tuple(held.items()) for held in flags]

    def put(before: Any) -> None:
        for name, held in zip(names, before[0]):
            setattr(value, name, held)
        for held, items in zip(flags, before[1]):
            held.update(items)

    return state(get, put)


def this_decimal_context() -> Undo:
    """Keep this thread's decimal context and its settings."""
    import decimal

    before = decimal.getcontext()
    inside = decimal_context(before)

    def undo() -> object:
        if (now := decimal.getcontext()) is before:
            return inside()
        decimal.setcontext(before)
        return inside(), repr(now)

    return undo


_LOGGED = ("level", "disabled", "propagate", "formatter", "handlers", "filters")


def logged(value: Any) -> Undo:
    """Keep the settings of a logger or a handler."""
    manager: Any = logging.root.manager
    before = {name: vars(value)[name] for name in _LOGGED if name in vars(value)}
    inside = [container(held) for held in before.values() if type(held) is list]

    def undo() -> object:
        became = [back() for back in inside]
        now = {name: vars(value)[name] for name in before}
        if all(_is_same(now[name], before[name]) for name in before):
            return _changed(became)
        vars(value).update(before)
        manager._clear_cache()  # each logger caches which levels are enabled
        return plain(now), *became

    return undo


def loggers() -> Undo:
    """Keep the settings of all loggers, and reset new loggers to the defaults."""
    manager: Any = logging.root.manager
    known = {name: value for name, value in manager.loggerDict.items() if _is_logger(value)}
    inside = [*map(logged, (logging.root, *known.values()))]
    disable, modules, plain_one = manager.disable, len(sys.modules), logging.Logger("")

    def undo() -> object:
        became = [back() for back in inside]
        became.append(None if (now := manager.disable) == disable else now)
        manager.disable = disable
        for name, value in [*manager.loggerDict.items()]:
            # Leave new loggers if a module was imported meanwhile: it sets them up only once.
            if name in known or not _is_logger(value) or len(sys.modules) != modules:
                continue
            now = [vars(value)[n] for n in _LOGGED if n in vars(value)]
            then = [vars(plain_one)[n] for n in _LOGGED if n in vars(plain_one)]
            if now != then:
                became.append((name, plain(now)))
                vars(value).update(level=0, disabled=False, propagate=True, handlers=[], filters=[])
                manager._clear_cache()
        return _changed(became)

    return undo


def _changed(became: list[object]) -> object:
    return None if all(each is None for each in became) else tuple(became)


def _is_logger(value: Any) -> bool:
    return issubclass(type(value), logging.Logger)


def shown_warnings() -> Undo:
    """Keep the filters of warnings."""
    back = container(warnings.filters)

    def undo() -> object:
        if (became := back()) is not None:
            with warnings.catch_warnings():  # makes Python read the filters again
                pass
        return became

    return undo


# Settings that no variable holds. They are kept if code names one of these functions.
SETTINGS: dict[str, Callable[[], Undo]] = {
    "decimal.getcontext": this_decimal_context,
    "decimal.setcontext": this_decimal_context,
    **dict.fromkeys(
        ("logging.getLogger", "logging.basicConfig", "logging.disable", "logging.Logger"), loggers
    ),
    **dict.fromkeys(
        ("warnings.simplefilter", "warnings.filterwarnings", "warnings.resetwarnings"),
        shown_warnings,
    ),
}


def generator(value: Any) -> Undo | None:
    import numpy as np

    if issubclass(type(value), np.random.Generator):
        value = value.bit_generator
    if issubclass(type(value), np.random.BitGenerator):
        return state(lambda: value.state, functools.partial(setattr, value, "state"))
    if issubclass(type(value), np.random.RandomState):
        return state(value.get_state, value.set_state)
    if issubclass(type(value), random.Random):
        return state(value.getstate, value.setstate)
    return None


def global_generators() -> Iterator[Undo]:
    import numpy as np

    yield state(random.getstate, random.setstate)
    yield state(np.random.get_state, np.random.set_state)


def state(get: Callable[[], Any], put: Callable[[Any], Any]) -> Undo:
    before = get()
    then = plain(before)

    def undo() -> object:
        if (now := plain(get())) == then:
            return None
        put(before)
        return now

    return undo


def plain(value: Any) -> Any:
    """Return a hashable form of a value; if it can't be read, an object that equals nothing."""
    try:
        hash(found := _held(value))
    except Exception:  # the program's code raised; the value is still restored  # noqa: BLE001
        return object()
    return found


def _held(value: Any, depth: int = 4) -> Any:
    """Return a hashable form of a value down to ``depth``; below that, types alone."""
    import numpy as np

    kind = type(value)
    if kind in STATELESS:
        return kind, value
    if issubclass(kind, (np.ndarray, np.generic)) and value.dtype != object:
        return str(value.dtype), value.shape, value.tobytes()
    if kind is bytearray:
        return kind, bytes(value)
    if depth and issubclass(kind, (tuple, list, collections.deque)):
        return kind, *(_held(each, depth - 1) for each in value)
    if depth and issubclass(kind, dict):
        items = contents(value)
        return kind, frozenset((_held(k, depth - 1), _held(v, depth - 1)) for k, v in items)
    if depth and issubclass(kind, (set, frozenset)):
        return kind, frozenset(_held(each, depth - 1) for each in value)
    if depth and not is_others(kind.__module__):
        held = read(value, "__dict__")
        slots = {n: read(value, n) for n in itertools.chain(*map(slots_of, kind.__mro__))}
        return kind, _held({**(held if type(held) is dict else {}), **slots}, depth)
    return kind
