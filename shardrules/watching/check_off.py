"""What each shard_map that runs with its check off would be with the check on.

While somebody listens, JAX's ``_shard_map`` makes two functions of each whose check is off: the one
that was asked for, which is called, and the same with the check on, which is traced beside it, with
its derivative, where the call stands: in whatever trace, under jit, grad, vmap or a shard_map.
Nothing of that trace is compiled or run. The body's Python runs again for it, and what it prints
then is dropped.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from shardrules.door import places
from shardrules.door.jaxprs import equations, is_transposed, opened
from shardrules.door.patching import Patches
from shardrules.errors import UnsupportedJaxError
from shardrules.hooks.explain.explain import missing_rules
from shardrules.hooks.explain.explanation import MissingRule
from shardrules.hooks.install import held
from shardrules.hooks.notes import Notes
from shardrules.hooks.state import COLLECT
from shardrules.watching import retrace
from shardrules.watching.importing import WhenImported

__all__ = ["Call", "Site", "start"]

_CHECKS = ("check_vma", "check_rep")


@dataclasses.dataclass(frozen=True)
class Site:
    """Where a program asks for a shard_map.

    Attributes:
      file: the path of the source file.
      line, column, end_line, end_column: of the call's expression, 1-based lines and 0-based
        columns in UTF-8 bytes, as in ``ast``; columns are -1 where Python does not tell.
      function: the name of the function that is mapped.
    """

    file: str
    line: int
    column: int
    end_line: int
    end_column: int
    function: str


@dataclasses.dataclass(frozen=True)
class Call:
    """One call of a shard_map, traced with the check off and on.

    Attributes:
      site: where the shard_map was asked for.
      inside: the site of the shard_map around it, if that one's check is off, too.
      kind: shapes and dtypes of its arguments.
      missing: kernels without a rule.
      outputs: those whose spec says less than their types.
      error: what the trace with the check on ended with, empty if it passed.
      undifferentiated: why the derivative was not traced, empty if it was.
      takes_gradients: the body differentiates in reverse: with the check on, to other values.
      before, after: all-reduces with the check off and on, in the forward and backward pass.
      declared: where the rules stand that its kernels found by their names.
      annotations: those of outputs that a kernel contradicts, each as a sentence.
    """

    site: Site
    inside: Site | None
    kind: str
    missing: tuple[MissingRule, ...]
    outputs: tuple[retrace.Output, ...]
    error: str
    undifferentiated: str
    takes_gradients: bool
    before: tuple[retrace.Sum, ...] | None
    after: tuple[retrace.Sum, ...] | None
    declared: tuple[str, ...] = ()
    annotations: tuple[str, ...] = ()


_lock = threading.RLock()
_patches = Patches()
_listeners: list[Callable[[Call], None]] = []
_before: list[Callable[[], object]] = []


class _Thread(threading.local):
    mode = ""  # of a look: "off" and "on" are what shard_maps whose check is off become in it
    around: Site | None = None  # the site whose body runs
    met: list[Site] | None = None  # the sites that a look met inside of its own
    blamed: tuple[BaseException, Site] | None = (
        None  # an error, and the innermost site it came from
    )


_thread = _Thread()


def start(
    listener: Callable[[Call], None], before: Callable[[], object] | None = None
) -> Callable[[], None]:
    """Tell of each call of a shard_map whose check is off, once for its kind of arguments.

    Args:
      listener: is told.
      before: is called before the first call is looked at, when JAX is imported.

    Returns:
      What ends it; with the last listener, JAX is as it was.
    """
    with _lock:
        if not _listeners:
            _imported.start()
        _listeners.append(listener)
        _before.extend([] if before is None else [before])

    def stop() -> None:
        with _lock:
            if listener in _listeners:
                _listeners.remove(listener)
                _before[:] = [one for one in _before if one is not before]
                if not _listeners:
                    _imported.stop()
                    _patches.undo()

    return stop


def _install(module: Any) -> None:
    original = vars(module).get("_shard_map")
    if original is None:
        if module.__name__ == places.SHARD_MAPS[0]:
            raise UnsupportedJaxError(f"migrate does not know {module.__name__} of this JAX")
        return  # from 0.6.1 the old spelling calls the new one's
    signature = inspect.signature(original)
    (check,) = [name for name in _CHECKS if name in signature.parameters]

    @functools.wraps(original)
    def shard_map(*args: Any, **kwargs: Any) -> Any:
        off = original(*args, **kwargs)
        bound = signature.bind(*args, **kwargs)
        site = None
        if _listeners and bound.arguments.get(check, True) is False:
            site = _site(sys._getframe(1), _name(args[0]))
        if site is None:
            return off
        bound.arguments[check] = True
        return _beside(site, off, lambda: original(*bound.args, **bound.kwargs))

    with _lock:
        _patches.attribute(module, "_shard_map", shard_map)


_imported = WhenImported(places.SHARD_MAPS, _install)


def _name(function: Any) -> str:
    while isinstance(function, functools.partial):
        function = function.func
    return getattr(function, "__name__", type(function).__name__)


def _site(frame: Any, function: str) -> Site | None:
    """Find who asks for a shard_map; None where JAX itself does, as for pmap."""
    while frame is not None and places.is_wrapper(frame.f_globals.get("__name__")):
        frame = frame.f_back
    if frame is None or places.owns(frame.f_code.co_filename):
        return None
    positions = list(frame.f_code.co_positions())
    line, end_line, column, end_column = positions[frame.f_lasti // 2]
    line = line or frame.f_lineno
    return Site(
        frame.f_code.co_filename,
        line,
        -1 if column is None else column,
        end_line or line,
        -1 if end_column is None else end_column,
        function,
    )


def _beside(site: Site, off: Any, make_on: Callable[[], Any]) -> Any:
    """Return the shard_map whose check is off; when it is called it is looked at, too.

    Once for each kind of arguments: another shard_map of the same place may have another body.
    """
    seen: set[str] = set()

    @functools.wraps(off)
    def mapped(*args: Any, **kwargs: Any) -> Any:
        if _thread.mode:
            return off(*args, **kwargs) if _thread.mode == "off" else _met(site, make_on, args)
        outer, _thread.around = _thread.around, site
        try:
            found = off(*args, **kwargs)  # its errors are the program's own
        finally:
            _thread.around = outer
        # One inside another is looked at with that one.
        if outer is None and _listeners:
            calls: list[Call] = []
            try:
                kind = _kind(args)
                if kind not in seen:
                    seen.add(kind)
                    while _before:
                        _before[-1]()
                        _before.pop()
                    calls = _look(site, off, make_on, args, kind)
            except Exception as error:  # it must not become the program's
                text = f"it can't be looked at: {error}"
                calls = [Call(site, None, "", (), (), text, "", False, None, None)]
            for listener in tuple(_listeners):
                for call in calls:
                    listener(call)
        return found

    return mapped


def _met(site: Site, make_on: Callable[[], Any], args: tuple) -> Any:
    """Call a shard_map with its check on inside of one that is looked at."""
    if _thread.met is not None and site not in _thread.met:
        _thread.met.append(site)
    try:
        return make_on()(*args)
    except Exception as error:
        if _thread.blamed is None or _thread.blamed[0] is not error:
            _thread.blamed = (error, site)
        raise


def _kind(args: tuple) -> str:
    """Write what a trace depends on: shapes, dtypes and what is no array."""
    import jax

    leaves, tree = jax.tree_util.tree_flatten(args)
    kinds = [
        f"{x.dtype}{tuple(x.shape)}" if hasattr(x, "dtype") and hasattr(x, "shape") else repr(x)
        for x in leaves
    ]
    return f"{tree} {' '.join(kinds)}"


# -- the look --------------------------------------------------------------------------------------


def _look(site: Site, off: Any, make_on: Callable[[], Any], args: tuple, kind: str) -> list[Call]:
    """Trace a call with the check off and on, with its derivative."""
    undifferentiated = ""
    with retrace.quiet(), retrace.state_kept():
        with _in_mode("off"):
            called = retrace.traced(off, args, False)
            try:
                before = tuple(retrace.sums(retrace.traced(off, args, True)))
            except Exception as error:  # an integer loop, an effect: whatever JAX can't transpose
                before, undifferentiated = tuple(retrace.sums(called)), retrace.first_line(error)
        on, where = _trace_on(make_on, args, not undifferentiated), ""
        if on.error is not None and not undifferentiated:
            # JAX's words are best without the derivative, if it is not that.
            forward = _trace_on(make_on, args, False)
            if forward.error is None:
                where = "in the derivative: "
            else:
                on = forward._replace(missing=on.missing or forward.missing)
    culprit = on.culprit or site
    found = []
    for one in (site, *on.met):
        text = ""
        if on.error is not None:
            own = one == culprit
            text = where + retrace.words(on.error) if own else f"waits for line {culprit.line}"
        found.append(
            Call(
                one,
                None if one == site else site,
                kind if one == site else "",
                on.missing if one == site else (),
                retrace.outputs(on.error) if on.error is not None and one == culprit else (),
                text,
                undifferentiated,
                any(map(is_transposed, equations(opened(called)))),
                before if one == site else None,
                on.sums if one == site else None,
                on.declared if one == site else (),
                on.annotations if one == site else (),
            )
        )
    return found


class _On(NamedTuple):
    """A trace with the check on."""

    sums: tuple[retrace.Sum, ...] | None
    missing: tuple[MissingRule, ...]
    declared: tuple[str, ...]
    annotations: tuple[str, ...]
    error: Exception | None
    culprit: Site | None
    met: tuple[Site, ...]


def _trace_on(make_on: Callable[[], Any], args: tuple, derivative: bool) -> _On:
    """Trace with the check on and the hooks acting, as far as it goes."""
    notes, closed, failed = Notes(), None, None
    with held() as state, _in_mode("on") as thread:
        scope = dataclasses.replace(
            state.scope, active=True, policy=COLLECT, notes=notes, casts="cheapest"
        )
        with state.enter(scope):
            try:
                closed = retrace.traced(make_on(), args, derivative)
            except Exception as error:  # what the table is about
                failed = error
            missing = missing_rules(closed, notes)
        blamed = thread.blamed
        return _On(
            None if closed is None else tuple(retrace.sums(closed)),
            missing,
            tuple(dict.fromkeys(notes.declared)),
            tuple(dict.fromkeys(notes.annotations)),
            failed,
            blamed[1] if blamed is not None and blamed[0] is failed else None,
            tuple(one for one in thread.met or ()),
        )


@contextlib.contextmanager
def _in_mode(mode: str) -> Iterator[_Thread]:
    _thread.mode, _thread.met, _thread.blamed = mode, [], None
    try:
        yield _thread
    finally:
        _thread.mode, _thread.met, _thread.blamed = "", None, None
