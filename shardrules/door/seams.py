"""Replace functions of JAX that are being watched, each only once, until the last watch stops.

``symbols.WATCHED`` lists where each function is, and in which version of JAX.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Any

from shardrules.door.lookup import look
from shardrules.door.patching import Patches
from shardrules.door.symbols import WATCHED
from shardrules.errors import UnsupportedJaxError

Wrapper = Callable[..., Any]  # called with the original function and its arguments


class _Seam:
    """One replaced function, and the wrappers around it."""

    def __init__(self, owner: Any, name: str):
        self.wrappers: tuple[Wrapper, ...] = ()
        self._patches = Patches()
        original = getattr(owner, name)
        is_property = isinstance(original, property)
        function = original.fget if is_property else original

        @functools.wraps(function)
        def replaced(*args: Any, **kwargs: Any) -> Any:
            call = function
            for wrapper in self.wrappers:
                call = functools.partial(wrapper, call)
            return call(*args, **kwargs)

        self._patches.attribute(owner, name, property(replaced) if is_property else replaced)

    def remove(self, wrapper: Wrapper) -> bool:
        """Remove a wrapper; if it was the last, restore JAX's function and return True."""
        self.wrappers = tuple(one for one in self.wrappers if one is not wrapper)
        if not self.wrappers:
            self._patches.undo()
        return not self.wrappers


_lock = threading.RLock()
_seams: dict[str, _Seam] = {}


def intercept(key: str, wrapper: Wrapper) -> Callable[[], None]:
    """Call ``wrapper`` instead of a function of JAX, until the returned function is called.

    Do nothing if this JAX doesn't have the function.
    """
    owner, name = _found(key)[1]
    if owner is None:
        return lambda: None
    mine = functools.partial(wrapper)  # distinct, even if another caller passes the same wrapper
    with _lock:
        if key not in _seams:
            _seams[key] = _Seam(owner, name)
        _seams[key].wrappers += (mine,)

    def stop() -> None:
        with _lock:
            seam = _seams.get(key)
            if seam is not None and mine in seam.wrappers and seam.remove(mine):
                del _seams[key]

    return stop


def named(key: str) -> Any:
    """Return the object of a name in ``WATCHED``; None if this JAX doesn't have it."""
    return _found(key)[0]


@functools.cache
def _found(key: str) -> tuple[Any, tuple[Any, str]]:
    import jax

    for symbol in WATCHED:
        if symbol.key == key and symbol.exists_in(jax.__version__):
            value, owner, problem = look(symbol)
            if problem:
                raise UnsupportedJaxError(
                    f"shardrules can't watch JAX {jax.__version__}: {symbol.path} {problem}. It is "
                    f"used for: {symbol.reason} (read in JAX {symbol.versions}).",
                    version=jax.__version__,
                    symbol=symbol.path,
                )
            return value, owner
    return None, (None, "")
