"""The Python state that a function can reach, put back after the function was traced to look at it.

A body may advance a counter, append to a list, or draw from a generator of its own while it is
traced. Traces that the program doesn't ask for must not be seen by it, so what they changed is put
back: variables, attributes, containers and generators of random numbers.
"""

from __future__ import annotations

import collections
import functools
import itertools
import random
import sys
import threading
import types
from collections.abc import Callable, Iterable, Iterator
from typing import Any

_MOST_OBJECTS = 20_000
_MOST_BYTES = 1 << 20  # of an array
_OTHERS = frozenset({"jax", "jaxlib", "numpy", "shardrules", "ml_dtypes"}) | frozenset(
    name for name in sys.stdlib_module_names if name != "__main__"
)
_ABSENT = object()
Undo = Callable[[], object]  # puts back what changed


class Kept:
    """The state that some functions can reach, as it is now.

    Attributes:
      why: what can't be put back, if something is reached that can't; else empty.
    """

    def __init__(self, *roots: Any):
        self.why = ""
        # Where other threads run, they would draw the same numbers twice from generators of all.
        self._undo: list[Undo] = [*_global_generators()] if _alone() else []
        self._seen: dict[int, Any] = {}  # holds what it has seen, so that ids stay unique
        self._named: set[str] = set()  # the names in the code of the functions
        self._iterators: list[tuple[str, str]] = []  # names and types
        self._left = collections.deque(roots)
        while self._left and len(self._seen) < _MOST_OBJECTS:
            value = self._left.popleft()
            if id(value) not in self._seen:
                self._seen[id(value)] = value
                self._visit(value)
        self._left.clear()
        for name, kind in self._iterators:
            if name in self._named:
                self.why = f"its body can advance {name!r}, a {kind}, which can't be put back"

    def put_back(self) -> None:
        """Put back what changed since."""
        for undo in self._undo:
            undo()

    # A lazy object (pydantic's stand-in for a schema, a proxy of an import) may raise, or load what
    # it stands for, when it is asked for an attribute or its __class__. So its type decides here.

    def _visit(self, value: Any) -> None:
        import numpy as np  # a script may set variables first that numpy reads when it is imported

        kind = type(value)
        if issubclass(kind, types.FunctionType):
            if not _is_others(value.__module__):
                self._function(value)
        elif issubclass(kind, types.MethodType):
            self._left += value.__self__, value.__func__
        elif issubclass(kind, functools.partial):
            self._left += value.func, *value.args, *value.keywords.values()
        elif issubclass(kind, types.CellType):
            self._cell(value)
        elif (generator := _generator(value)) is not None:
            self._undo.append(generator)
        elif issubclass(kind, np.ndarray):
            if value.flags.writeable and value.nbytes <= _MOST_BYTES and value.dtype != object:
                self._undo.append(_array(value, value.copy()))
        elif issubclass(kind, (list, dict, set, collections.deque, bytearray)):
            self._undo.append(_container(value))
            self._left += itertools.chain(value, value.values() if issubclass(kind, dict) else ())
        elif issubclass(kind, (tuple, frozenset)):
            self._left += value
        elif issubclass(kind, type):
            if not _is_others(value.__module__):
                self._class(value)
        elif not issubclass(kind, types.ModuleType):
            self._instance(value)

    def _function(self, function: types.FunctionType) -> None:
        self._left += function.__closure__ or ()
        self._left += function.__defaults__ or ()
        self._left += (function.__kwdefaults__ or {}).values()
        self._left.append(function.__dict__)
        names, variables = _names(function.__code__), function.__globals__
        self._named |= names
        for name, cell in zip(function.__code__.co_freevars, function.__closure__ or ()):
            self._note_iterator(name, _contents(cell))
        for name in names & variables.keys():
            self._undo.append(_variable(variables, name))
            value = variables[name]
            self._left.append(value)
            self._note_iterator(name, value)
            if isinstance(value, types.ModuleType) and not _is_others(value.__name__):
                inside = vars(value)
                for attribute in names & inside.keys():
                    self._undo.append(_variable(inside, attribute))
                    self._left.append(inside[attribute])

    def _note_iterator(self, name: str, value: Any) -> None:
        kind = type(value)
        if issubclass(kind, collections.abc.Iterator) and not hasattr(kind, "fileno"):
            self._iterators.append((name, kind.__name__))

    def _cell(self, cell: types.CellType) -> None:
        before = _contents(cell)
        if before is _ABSENT:
            return

        def undo() -> None:
            cell.cell_contents = before

        self._undo.append(undo)
        self._left.append(before)

    def _class(self, kind: type) -> None:
        self._left += kind.__bases__
        for name, value in [*vars(kind).items()]:
            held = "__func__" if type(value) in (classmethod, staticmethod) else "fget"
            self._left.append(_read(value, held, value))
            if not name.startswith("__") and not callable(value) and type(value) is not property:
                self._undo.append(_attribute(kind, name, value))

    def _instance(self, value: Any) -> None:
        """Keep the attributes of an object; of JAX's, look into functions that it wraps alone."""
        kind = type(value)
        attributes = _read(value, "__dict__")
        if type(wrapped := _read(value, "__wrapped__")) is types.FunctionType:
            self._left.append(wrapped)  # of a jitted function
        if _is_others(kind.__module__):
            if kind.__name__.startswith("custom_"):
                self._left += (attributes or {}).values()
            return
        if type(attributes) is dict:
            self._left += attributes.values()
            self._undo.append(_container(attributes))
            for name, attribute in attributes.items():
                self._note_iterator(name, attribute)
        self._left.append(kind)
        for name in (n for k in kind.__mro__ for n in _slots(k)):
            if (held := _read(value, name, _ABSENT)) is not _ABSENT:
                self._undo.append(_attribute(value, name, held))
                self._left.append(held)


def _alone() -> bool:
    """Whether no other thread of Python's runs."""
    # A thread that Python didn't start is listed once it has asked for its name (a callback that
    # logs, in a thread of XLA's); to Python 3.11 it stays listed.
    dummy: Any = getattr(threading, "_DummyThread", ())
    here = threading.current_thread()
    return all(isinstance(thread, dummy) or thread is here for thread in threading.enumerate())


def _contents(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # empty
        return _ABSENT


def _is_others(module: str | None) -> bool:
    return (module or "").partition(".")[0] in _OTHERS


def _names(code: types.CodeType) -> set[str]:
    """Return the names that code and the functions in it use."""
    inner = (_names(const) for const in code.co_consts if isinstance(const, types.CodeType))
    return set(code.co_names).union(code.co_freevars, *inner)


def _slots(kind: type) -> Iterable[str]:
    slots = vars(kind).get("__slots__", ())
    return (slots,) if isinstance(slots, str) else tuple(slots)


def _variable(variables: dict[str, Any], name: str) -> Undo:
    before = variables[name]

    def undo() -> None:
        if variables.get(name, _ABSENT) is not before:
            variables[name] = before

    return undo


def _read(value: Any, name: str, otherwise: Any = None) -> Any:
    """Read an attribute of an object, past what its class does for those that it lacks."""
    try:
        return object.__getattribute__(value, name)
    except Exception:  # a property's own, too  # noqa: BLE001
        return otherwise


def _attribute(owner: Any, name: str, before: Any) -> Undo:
    def undo() -> None:
        now = vars(owner).get(name) if isinstance(owner, type) else _read(owner, name, _ABSENT)
        if now is not before:
            setattr(owner, name, before)

    return undo


def _container(value: Any) -> Undo:
    before = value.copy()

    def undo() -> None:
        now = value.items() if isinstance(value, dict) else value
        then = before.items() if isinstance(value, dict) else before
        if len(now) != len(then) or not all(map(_is_same, now, then)):
            value.clear()
            getattr(value, "extend" if hasattr(value, "extend") else "update")(before)

    return undo


def _is_same(a: Any, b: Any) -> bool:
    if type(a) is tuple and type(b) is tuple and len(a) == len(b) == 2:  # an item of a dict
        return a[0] is b[0] and a[1] is b[1]
    return a is b or (type(a) is int and a == b)


def _array(value: Any, before: Any) -> Undo:
    def undo() -> None:
        if value.tobytes() != before.tobytes():
            value[...] = before

    return undo


def _generator(value: Any) -> Undo | None:
    import numpy as np

    if issubclass(type(value), np.random.Generator):
        value = value.bit_generator
    if issubclass(type(value), np.random.BitGenerator):
        return _state(lambda: value.state, functools.partial(setattr, value, "state"))
    if issubclass(type(value), np.random.RandomState):
        return _state(value.get_state, value.set_state)
    if issubclass(type(value), random.Random):
        return _state(value.getstate, value.setstate)
    return None


def _global_generators() -> Iterator[Undo]:
    import numpy as np

    yield _state(random.getstate, random.setstate)
    yield _state(np.random.get_state, np.random.set_state)


def _state(get: Callable[[], Any], put: Callable[[Any], Any]) -> Undo:
    before = get()
    return lambda: put(before)
