"""Watch the host while a block runs: calls of compiled functions, compilations, reads of arrays.

JAX has no events for these, so some of its functions are replaced while a thread watches; in other
threads they behave as before. If ``_get_fastpath_data`` returns data, C++ calls a function without
any of them. So its replacement returns None, and C++'s caches are cleared when a watch begins and
ends. ``float(x)``, ``print(x)`` and the like read ``ArrayImpl._value``. NumPy reads an array on the
CPU without calling a method, so ``numpy.asarray`` and ``numpy.array`` are replaced, too.
"""

from __future__ import annotations

import contextlib
import functools
import math
import threading
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from shardrules.door import compiled, seams
from shardrules.door.places import owns

# Called with a sentence for each gradient whose psums move more than with the check off.
cast_listeners: list[Callable[[str], None]] = []


class Argument(NamedTuple):
    path: str  # the parameter's name and the keys below it
    shape: str
    dtype: str
    weak_type: str
    sharding: str  # empty for a value of NumPy or Python
    array: Any  # what was passed
    donated: bool  # whether it was declared donated


class Listener:
    """Receives events on the thread that watches."""

    wants_arguments = False  # whether to pass arguments; if not, the lists are empty

    def called(self, name: str, arguments: list[Argument], is_jax_s: bool) -> None:
        """Handle the start of a call of a compiled function, the user's or JAX's own."""

    def returned(self, name: str, arguments: list[Argument], executable: Any, results: Any) -> None:
        """Handle the end of the call; the donated arguments are deleted now."""

    def failed(self) -> None:
        """Handle an error raised by the call."""

    def compiling(self, name: str) -> None:
        """Handle the start of a compilation."""

    def reading(self, array: Any, how: str) -> None:
        """Handle the start of a read of an array by the host without ``jax.device_get``."""


_lock = threading.Lock()
_hold = contextlib.ExitStack()  # undone when the last listener stops
_watching: list[Listener] = []  # the listeners of all threads
_thread = threading.local()


def start(listener: Listener) -> Callable[[], None]:
    """Report what this thread does to a listener, until the returned function is called."""
    with _lock:
        if not _watching:
            _install()
        _watching.append(listener)
    mine = _listeners()
    mine.append(listener)

    def stop() -> None:
        mine.remove(listener)
        with _lock:
            _watching.remove(listener)
            if not _watching:
                _hold.close()
                forget_fast_paths()

    return stop


def on_reads(read: Callable[[Any], None]) -> Callable[[], None]:
    """Call ``read`` with each array that the host reads, in any thread; return a stop function."""

    def around_value(original: Any, self: Any) -> Any:
        if getattr(self, "_npy_value", None) is None:
            read(self)
        return original(self)

    return seams.intercept("read", around_value)


def _listeners() -> list[Listener]:
    own: list[Listener] = vars(_thread).setdefault("listeners", [])
    return own


def _install() -> None:
    wrappers: dict[str, seams.Wrapper] = {
        "run": _call,
        "run_compiled": _compiled_call,
        "fast_path": lambda original, *args, **kwargs: None,
        "compile_or_load": _compile,
        "read": _read,
        "read_asarray": functools.partial(_read_by_numpy, how="numpy.asarray"),
        "read_array": functools.partial(_read_by_numpy, how="numpy.array"),
    }
    with contextlib.ExitStack() as stack:
        for key, wrapper in wrappers.items():
            stack.callback(seams.intercept(key, wrapper))
        forget_fast_paths()
        _hold.enter_context(stack.pop_all())


def forget_fast_paths() -> None:
    """Clear C++'s fast paths of called functions, but no traces or executables."""
    for key in ("fast_paths", "explicit_fast_paths"):
        cache = seams.named(key)
        if cache is not None:
            cache.clear_all()  # all such caches, also those of functions with their own settings
            cache.clear()  # up to JAX 0.4.35, clear_all skips this one


def _call(original: Any, *args: Any, **params: Any) -> Any:
    listeners = _listeners()
    if not listeners:
        return original(*args, **params)
    name = params["name"]
    info = getattr(params["jaxpr"].jaxpr, "debug_info", None)
    names = getattr(info, "arg_names", None) or ()
    place = (getattr(info, "func_src_info", None) or "").rpartition(" at ")[2]
    wants_arguments = any(listener.wants_arguments for listener in listeners)
    arguments = [
        _argument(names[n] if n < len(names) and names[n] else f"argument {n}", arg, donated)
        for n, (arg, donated) in enumerate(zip(args, params["donated_invars"]))
        if wants_arguments
    ]
    with _reporting(name, arguments, owns(place)) as returned:
        answer = original(*args, **params)
        returned += answer[1], answer[0]
    return answer


@contextlib.contextmanager
def _reporting(name: str, arguments: list[Argument], is_jax_s: bool = False) -> Iterator[list[Any]]:
    """Report one call; the block appends the executable and the results to the yielded list."""
    listeners = _listeners()
    for listener in listeners:
        listener.called(name, arguments, is_jax_s)
    returned: list[Any] = []
    try:
        yield returned
    except BaseException:
        for listener in listeners:
            listener.failed()
        raise
    for listener in tuple(listeners):  # a listener may stop watching here
        listener.returned(name, arguments, *returned)


def _compiled_call(original: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
    import jax

    listeners = _listeners()
    leaves, tree = jax.tree_util.tree_flatten((args, kwargs))
    if not listeners or tree != self.in_tree:  # if the trees differ, JAX raises
        return original(self, *args, **kwargs)
    executable = getattr(self, "_executable", None)
    donated = [info.donated for info in jax.tree_util.tree_leaves(self.args_info)]
    arguments = [*map(_argument, compiled.argument_names(self), leaves, donated)]
    name = getattr(getattr(executable, "unsafe_call", None), "name", "a compiled function")
    with _reporting(name, arguments) as returned:
        results = original(self, *args, **kwargs)
        returned += executable, results
    return results


def _argument(path: str, value: Any, donated: bool) -> Argument:
    import jax
    import numpy as np

    is_weak = isinstance(value, (bool, int, float, complex)) or getattr(
        getattr(value, "aval", None), "weak_type", False
    )
    return Argument(
        path,
        f"[{','.join(map(str, np.shape(value)))}]",
        str(getattr(value, "dtype", type(value).__name__)),
        "weakly typed" if is_weak else "strongly typed",
        str(value.sharding) if isinstance(value, jax.Array) else "",
        value,
        bool(donated),
    )


def _compile(original: Any, *args: Any, **kwargs: Any) -> Any:
    for listener in _listeners():
        module: Any = args[1] if len(args) > 1 else kwargs.get("computation")
        try:
            name = str(module.operation.attributes["sym_name"]).strip('"')
        except (AttributeError, KeyError):
            name = "a program"
        listener.compiling(name)
    return original(*args, **kwargs)


def _read(original: Any, self: Any) -> Any:
    if _listeners() and getattr(self, "_npy_value", None) is None and not _explicit():
        for listener in _listeners():
            listener.reading(self, "read")
    return original(self)


def _read_by_numpy(original: Any, *args: Any, how: str, **kwargs: Any) -> Any:
    import jax

    if args and _listeners() and isinstance(args[0], jax.Array) and not _explicit():
        for listener in _listeners():
            listener.reading(args[0], how)
    return original(*args, **kwargs)


def _explicit() -> bool:
    return bool(seams.named("guards").thread_local_state().explicit_device_get)


def live_arrays() -> list[tuple[str, int]]:
    """Return type and bytes on this process's devices of every array that is not deleted."""
    import jax

    arrays = []
    for array in jax.live_arrays():
        if array.is_deleted():
            continue
        try:
            devices = len(array.sharding.addressable_devices)
            local = math.prod(array.sharding.shard_shape(array.shape))
            size = int(array.dtype.itemsize) * devices * local
        except (AttributeError, TypeError, ValueError):  # a key's type has no size
            size = int(array.nbytes)
        arrays.append((f"{array.dtype}[{','.join(map(str, array.shape))}]", size))
    return arrays
