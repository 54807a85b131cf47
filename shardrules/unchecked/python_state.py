"""Keep the Python state that a function can reach, and restore it after a retrace.

A body may advance a counter, append to a list, or draw from its own generator while it is traced.
The program must not observe traces that it didn't ask for, so what they changed is restored:
variables, attributes, containers and random number generators.
"""

from __future__ import annotations

import _thread
import array
import builtins
import collections
import contextvars
import functools
import io
import itertools
import logging
import os
import queue
import struct
import sys
import threading
import types
import weakref
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from shardrules.unchecked import code, undo

_MOST_OBJECTS = 200_000
_MOST_BYTES = 1 << 28  # of arrays
_HOLDERS = frozenset(
    "types argparse collections functools weakref _weakrefset multiprocessing.sharedctypes "
    "unittest.mock contextlib configparser".split()
)
_FILE = "file"
# C modules whose objects hold state that can't be restored.
_ADVANCING = frozenset(
    "_hashlib _blake2 _md5 _sha1 _sha2 _sha256 _sha512 _sha3 hmac zlib _bz2 _lzma bz2 lzma sqlite3 "
    "mmap socket _socket _ssl ssl select pyexpat _csv _pickle _asyncio".split()
)
# Functions that change a process setting, or something outside of it, without an audit event.
_UNTOLD = frozenset(
    f"{module}.{name}"
    for module, names in {
        "posix": "write writev pwrite pwritev sendfile umask dup2 mkfifo nice putenv unsetenv",
        "nt": "write umask dup2 putenv unsetenv",
        "signal": "signal alarm setitimer raise_signal pthread_sigmask set_wakeup_fd",
        "atexit": "register unregister",
        "weakref": "finalize",
        "gc": "enable disable freeze unfreeze set_threshold",
        "sys": "setrecursionlimit setswitchinterval setdlopenflags set_int_max_str_digits",
        "socket": "setdefaulttimeout",
        "locale": "setlocale",
        "time": "tzset",
        "threading": "Thread Timer",
        "thread": "start_new_thread",
        "concurrent.futures.thread": "ThreadPoolExecutor",
        "faulthandler": "enable disable register unregister dump_traceback_later",
    }.items()
    for name in names.split()
)
# The variables of the standard library that a retrace replaces.
_REPLACED = frozenset({"stdout", "stderr", "showwarning"})
# With these functions, code can reach its module's variables by names that it builds at run time.
_BY_STRINGS = frozenset({"globals", "exec", "eval"})
# By these names, code reads a value's type, and so the axes over which the value varies.
_OF_TYPES = frozenset("aval get_aval manual_axis_type typeof vma".split())


class _Cache(NamedTuple):
    """A function with ``functools.lru_cache``, and its earlier ``cache_info()``."""

    function: Any
    before: Any

    @property
    def is_used(self) -> bool:
        return bool(self.function.cache_info() != self.before)


class _Stuck(NamedTuple):
    """State that can't be restored."""

    name: str  # the name by which code reaches it; empty if unknown
    kind: str
    of_own: bool = False  # whether only names in the body's own package count
    is_called: bool = False  # whether this is a function, whose name is ``kind``

    def __str__(self) -> str:
        if self.is_called:
            return f"its body can call {self.kind}, whose effect can't be put back"
        held = f"{self.name!r}, a {self.kind}" if self.name else f"a {self.kind}"
        return f"its body can change {held}, which can't be put back"


class Kept:
    """A snapshot of the state that some functions can reach.

    Attributes:
      why: what can't be restored, or is too large to keep; empty if all of it can be restored.
    """

    def __init__(self, *roots: Any):
        self.why = ""
        self._undo: list[undo.Undo] = []
        self._caches: list[_Cache] = []
        self._bytes = 0  # the bytes of the arrays that are kept
        self._seen: dict[int, Any] = {}  # visited objects by id, held so that ids stay unique
        self._named: set[str] = set()  # the names in the code of the functions
        self._variables: set[tuple[int, str]] = set()  # kept variables: module's id, name
        self._home = ""  # the package of the first function
        self._own: set[str] = set()  # the names in functions of that package
        self._draws = False  # whether a function draws from a global generator
        self._values: list[tuple[str, Any]] = []  # the numbers, texts and code that are reached
        self._arrays: list[Any] = []  # copies of the arrays
        self._stuck: list[_Stuck] = []
        self._settings: set[Any] = set()  # the settings of the process that are kept
        self._left: collections.deque[tuple[str, Any]] = collections.deque()
        # Visit every object that the roots reach, breadth first and each once. A visit queues the
        # objects that this one holds, and records how to undo its changes or that it can't.
        self._add(roots)
        while self._left and not self.why:
            name, value = self._left.popleft()
            if id(value) not in self._seen:
                self._seen[id(value)] = value
                self._visit(value, name)
                if len(self._seen) > _MOST_OBJECTS:
                    self.why = f"its body reaches more than {_MOST_OBJECTS:,} objects"
        self._left.clear()
        # If other threads run, restoring global generators would make them draw numbers twice.
        if _alone():
            self._undo += undo.global_generators()
        elif self._draws:
            self.why = "its body can draw random numbers that other threads draw, too"
        if "environ" in self._named:
            self._undo.append(undo.environment())
        # State that can't be restored matters only if code names it, or if its name is unknown.
        for stuck in self._stuck:
            if stuck.name in (self._own if stuck.of_own else self._named) or not (
                stuck.name or stuck.of_own
            ):
                self.why = str(stuck)

    @property
    def beside_types(self) -> tuple[object, ...]:
        """Return the values that code may read together with a type; empty if it reads no types.

        With the check off all types are alike, so a trace doesn't show how code uses these values.
        """
        if not self._named & _OF_TYPES:
            return ()
        settings = os.environ.items() if {"environ", "getenv"} & self._named else ()
        arrays = (each.tobytes() for each in self._arrays if each.dtype != object)
        return *((name, type(value), value) for name, value in self._values), *settings, *arrays

    def put_back(self, caches: bool = True) -> tuple[object, ...]:
        """Undo the changes since the snapshot; return the changed values in comparable form.

        With ``caches``, also clear the caches that were empty at the snapshot. Other caches stay:
        they also hold results of the program's own calls.
        """
        became: list[object] = []
        failed: Exception | None = None
        for back in self._undo:
            try:
                became.append(back())
            except Exception as error:  # undo the other changes all the same  # noqa: BLE001
                failed = failed or error
        if failed is not None:
            raise failed
        for cache in self._caches if caches else ():
            if not cache.before.currsize and cache.is_used:
                cache.function.cache_clear()
        return tuple((i, now) for i, now in enumerate(became) if now is not None)

    def doubt_caches(self) -> None:
        """Forbid further retraces that can call the cached functions used since the snapshot."""
        _DOUBTED.update(cache.function for cache in self._caches if cache.is_used)

    def _add(self, values: Iterable[Any], name: str = "") -> None:
        """Queue values under the name by which code reaches them; empty if unknown."""
        for value in values:
            (self._values if type(value) in undo.STATELESS else self._left).append((name, value))

    def _add_items(self, items: Iterable[tuple[Any, Any]]) -> None:
        for name, value in items:
            self._add((value,), name if type(name) is str else "")

    # Decide by an object's type alone. Reading an attribute or __class__ of a lazy object (a schema
    # of pydantic, the proxy of an import) may raise, or load the real object.

    def _visit(self, value: Any, name: str) -> None:
        import numpy as np  # late: a script may first set variables that numpy reads at import

        kind = type(value)
        if issubclass(kind, types.FunctionType):
            if not undo.is_others(value.__module__):
                self._function(value)
            else:
                self._setting(value, name)
        elif issubclass(kind, types.MethodType):
            self._add((value.__self__, value.__func__), name)
        elif issubclass(kind, (types.BuiltinMethodType, types.MethodWrapperType)):
            if not issubclass(type(value.__self__), (types.ModuleType, type)):
                self._add((value.__self__,), name)
            else:
                self._setting(value, name)
        elif issubclass(kind, functools.partial):
            self._add((value.func, *value.args, *value.keywords.values()))
        elif issubclass(kind, types.CellType):
            self._cell(value, name)
        elif (generator := undo.generator(value)) is not None:
            self._undo.append(generator)
            self._stuck.append(_Stuck("spawn", "random generator's count of children", True))
        elif issubclass(kind, np.random.SeedSequence):
            self._stuck.append(_Stuck("spawn", "seed's count of children", True))
        elif issubclass(kind, np.generic):
            self._arrays.append(value)
        elif issubclass(kind, np.ndarray):
            if value.flags.writeable:
                self._array(value, name)
        elif value is vars(builtins) or value is sys.modules:
            return  # Python's own; imports stay
        elif issubclass(kind, (list, dict, set, collections.deque, bytearray)):
            self._undo.append(undo.container(value))
            held = undo.contents(value)
            self._add(itertools.chain(*held) if issubclass(kind, dict) else held, name)
        elif issubclass(kind, (tuple, frozenset)):
            self._add(value, name)
        elif issubclass(kind, array.array):
            self._undo.append(undo.array_items(value, value[:], slice(None)))
        elif issubclass(kind, (io.StringIO, io.BytesIO)):
            self._undo.append(undo.stream(value))
        elif any(base.__name__ == "_CData" for base in kind.__mro__):  # any object of ctypes
            self._memory(value)
        elif issubclass(kind, contextvars.ContextVar):
            self._context(value, name)
        elif issubclass(kind, weakref.ref):
            self._add((value(),), name)
        elif value is os.environ:
            self._undo.append(undo.environment())
        elif issubclass(kind, io.IOBase):
            self._stuck.append(_Stuck(name, _FILE, True))
        elif _is_stuck(kind):
            self._stuck.append(_Stuck(name, kind.__name__))
        elif issubclass(kind, logging.Filterer):
            self._undo.append(undo.logged(value))
        elif "decimal" in sys.modules and issubclass(kind, sys.modules["decimal"].Context):
            self._undo.append(undo.decimal_context(value))
        elif issubclass(kind, _LOCAL):
            self._attributes(value.__dict__)
        elif issubclass(kind, type):
            if not undo.is_others(value.__module__):
                self._class(value)
            else:
                self._setting(value, name)
        elif not issubclass(kind, types.ModuleType):
            self._instance(value, name)
        # An instance of the program's own subclass of these types has attributes, too.
        if issubclass(kind, (*_HOLDING, np.ndarray)) and not undo.is_others(kind.__module__):
            self._instance(value, name)

    def _function(self, function: types.FunctionType) -> None:
        names, variables = code.names(function.__code__), function.__globals__
        self._add_items(zip(function.__code__.co_freevars, function.__closure__ or ()))
        defaults, count = function.__defaults__ or (), function.__code__.co_argcount
        by_default = dict(zip(function.__code__.co_varnames[count - len(defaults) :], defaults))
        by_default |= function.__kwdefaults__ or {}
        self._named |= names | by_default.keys()
        self._add((function.__code__,))
        self._add_items(by_default.items())
        self._attributes(function.__dict__)
        if names & _BY_STRINGS and self._module(variables, names | variables.keys()):
            self._undo.append(undo.variables(variables, set(variables), new=True))
            self._named |= variables.keys()
        self._module(variables, names)
        closed = dict(
            zip(function.__code__.co_freevars, map(_contents, function.__closure__ or ()))
        )
        modules = [value for value in closed.values() if issubclass(type(value), types.ModuleType)]
        used = names
        if "random" in names and code.draws_from_jax(function.__code__, variables):
            used = names - {"random"}
        modules += [variables[name] for name in used & variables.keys()]
        # A function of the body's own package may import modules when it is called. Functions of
        # other packages do so mostly to print.
        home = (function.__module__ or "").partition(".")[0]
        self._home = self._home or home
        if home == self._home:
            self._own |= names | by_default.keys()
            modules += [sys.modules[name] for name in used & sys.modules.keys()]
            self._standard(function.__code__, collections.ChainMap(closed, variables, sys.modules))
        for module in modules:
            if issubclass(type(module), types.ModuleType):
                self._inside(module, names)
                self._draws |= code.draws(function.__code__, module)

    def _standard(self, of: types.CodeType, variables: Mapping[str, Any]) -> None:
        """Keep the variables that code names in modules of the standard library."""
        held = {name: variables[name] for name in code.names(of) if name in variables}
        modules = {name: value for name, value in held.items() if _is_standard(value)}
        for name, attribute in code.attributes(of) if modules else ():
            if name in modules and attribute not in _REPLACED:
                self._module(vars(modules[name]), {attribute})

    def _setting(self, function: Any, name: str) -> None:
        """Keep the process setting that a function of the standard library changes."""
        module = (undo.read(function, "__module__") or "").lstrip("_")
        called = f"{module}.{undo.read(function, '__name__')}"
        self._values.append((name, called))
        if called in _UNTOLD:
            self._stuck.append(_Stuck(name, called, of_own=True, is_called=True))
        elif (keep := undo.SETTINGS.get(called)) is not None and keep not in self._settings:
            self._settings.add(keep)
            self._undo.append(keep())

    def _inside(self, module: types.ModuleType, names: set[str]) -> None:
        """Keep the variables that code names in a module, and in modules inside of it."""
        variables = vars(module)
        if not undo.is_others(module.__name__) and self._module(variables, names):
            for name in names & variables.keys():
                if issubclass(type(variables[name]), types.ModuleType):
                    self._inside(variables[name], names)

    def _module(self, variables: dict[str, Any], names: set[str]) -> bool:
        """Keep the named variables of a module; return whether some were not kept before."""
        new = {name for name in names if (id(variables), name) not in self._variables}
        self._variables |= {(id(variables), name) for name in new}
        self._undo.append(undo.variables(variables, new))
        held = {name for name in new & variables.keys() if not undo.is_counter(variables, name)}
        self._add_items((name, variables[name]) for name in held)
        return bool(new)

    def _cell(self, cell: types.CellType, name: str) -> None:
        before = _contents(cell)

        def back() -> object:
            if (now := _contents(cell)) is before:
                return None
            if before is not undo.ABSENT:
                cell.cell_contents = before
            else:
                del cell.cell_contents
            return undo.plain(now)

        self._undo.append(back)
        if before is not undo.ABSENT:
            self._add((before,), name)

    def _context(self, value: contextvars.ContextVar[Any], name: str) -> None:
        try:
            before = value.get()
        except LookupError:
            self._stuck.append(_Stuck(name, "context variable without a value"))
            return

        def back() -> object:
            if (now := value.get()) is before:
                return None
            value.set(before)
            return undo.plain(now)

        self._undo.append(back)
        self._add((before,), name)

    def _array(self, value: Any, name: str) -> None:
        if (nbytes := value.nbytes) + self._bytes > _MOST_BYTES:
            self._stuck.append(_Stuck(name, f"numpy array of {nbytes:,} bytes"))
            return
        self._bytes += nbytes
        self._arrays.append(value.copy())
        self._undo.append(undo.array_items(value, self._arrays[-1], ...))
        if value.dtype == object:
            self._add(value.flat, name)

    def _memory(self, value: Any) -> None:
        import ctypes

        if issubclass(type(value), ctypes._CFuncPtr):  # type: ignore[attr-defined]  # has no state
            return
        self._bytes += ctypes.sizeof(value)
        # It holds references, or it views memory that other processes may write to.
        if value._objects is not None or self._bytes > _MOST_BYTES:
            self._stuck.append(_Stuck("", f"{type(value).__name__} of ctypes"))
        else:
            self._undo.append(undo.memory(value))

    def _class(self, kind: type) -> None:
        self._add(kind.__bases__)
        # A metaclass may count what it makes; in C, ``__module__`` is no text.
        if type(kind) is not type and type(type(kind).__module__) is str:
            self._add((type(kind),))
        self._undo.append(undo.class_attributes(kind))
        for name, value in [*vars(kind).items()]:
            held = "__func__" if type(value) in (classmethod, staticmethod) else "fget"
            self._add((undo.read(value, held, value),), name)
            if not name.startswith("__") and not callable(value) and type(value) is not property:
                self._undo.append(undo.attribute(kind, name, value))

    def _attributes(self, attributes: dict[str, Any]) -> None:
        self._undo.append(undo.container(attributes))
        self._add_items(attributes.items())

    def _instance(self, value: Any, name: str) -> None:
        """Keep an object's attributes; in JAX's objects, visit only the functions they wrap."""
        kind = type(value)
        attributes = undo.read(value, "__dict__")
        if (wrapped := undo.read(value, "__wrapped__")) is not None:
            self._add((wrapped,))  # what jit wraps: a function, a method, an object
        if kind is _LRU:
            self._caches.append(_Cache(value, value.cache_info()))
            if value in _DOUBTED:
                self._stuck.append(_Stuck(name, "cached function's state"))
        if kind.__module__ in _ADVANCING:
            self._stuck.append(_Stuck(name, kind.__name__, of_own=bool(name)))
        elif not undo.is_others(kind.__module__) and _is_of_c(value):
            self._stuck.append(_Stuck(name, kind.__name__, of_own=True))
        # In the standard library, visit only plain data holders: pools and queues are for threads.
        if undo.is_others(kind.__module__) and kind.__module__ not in _HOLDERS:
            if kind.__name__.startswith("custom_"):
                self._add((attributes or {}).values())
            return
        if type(attributes) is dict:
            self._attributes(attributes)
        self._add((kind,))
        for slot in itertools.chain.from_iterable(map(undo.slots_of, kind.__mro__)):
            if (held := undo.read(value, slot, undo.ABSENT)) is not undo.ABSENT:
                self._undo.append(undo.attribute(value, slot, held))
                self._add((held,), slot)


_HOLDING = (
    list,
    dict,
    set,
    collections.deque,
    bytearray,
    tuple,
    frozenset,
    functools.partial,
    array.array,
    io.StringIO,
    io.BytesIO,
)
_POINTER_BYTES = struct.calcsize("P")
_LRU = type(functools.lru_cache(object))
# Cached functions that ran in a trace whose changes of state depend on the number of traces. While
# a cache holds the result, a retrace doesn't run the function, and so doesn't show its changes.
_DOUBTED: weakref.WeakSet[Any] = weakref.WeakSet()
_LOCAL = _thread._local  # the program's; the hooks keep their own in hooks/frames.py


def _alone() -> bool:
    """Return whether no other Python thread runs."""
    # Ignore threads that Python didn't start. Such a thread is listed once it asks for its own name
    # (a callback that logs in a thread of XLA), and up to Python 3.11 it stays listed.
    dummy: Any = getattr(threading, "_DummyThread", ())
    here = threading.current_thread()
    return all(isinstance(thread, dummy) or thread is here for thread in threading.enumerate())


def _is_standard(value: Any) -> bool:
    """Return whether a value is a module of the standard library."""
    if not issubclass(type(value), types.ModuleType):
        return False
    return str(undo.read(value, "__name__")).partition(".")[0] in sys.stdlib_module_names


def _contents(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # empty
        return undo.ABSENT


def _is_stuck(kind: type) -> bool:
    """Return whether an object of this type is an iterator or a queue."""
    return issubclass(kind, (collections.abc.Iterator, queue.SimpleQueue, queue.Queue))


def _is_of_c(value: Any) -> bool:
    """Return whether an object of an extension type may hold state that only C can reach."""
    hashed: Any = type(value).__hash__
    if hashed not in (object.__hash__, None) or undo.read(value, "__name__") is not None:
        return False  # a value, hashed by its contents; or a function
    own = (base for base in type(value).__mro__ if not undo.is_others(base.__module__))
    return any(_grown(base) > 0 for base in own)


def _grown(kind: type) -> int:
    """Return the bytes that a class adds to those of its base, apart from its slots."""
    base = kind.__base__ or object
    slots = {*undo.slots_of(kind)} - {"__dict__", "__weakref__"}
    added = (
        getattr(kind, name) > 0 and not getattr(base, name)
        for name in ("__dictoffset__", "__weakrefoffset__")
    )
    count = len(slots) + sum(added)
    return int(kind.__basicsize__ - base.__basicsize__ - count * _POINTER_BYTES)
