"""Looks at every shard_map of a process whose check is off: what it would be with the check on."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable

from shardrules.hooks.install import held, state
from shardrules.hooks.unchecked import Call, UncheckedHooks
from shardrules.watching.importing import WhenImported

__all__ = ["start"]

_lock = threading.RLock()


def start(
    listener: Callable[[Call], None], before: Callable[[], object] | None = None
) -> Callable[[], None]:
    """Tell ``listener`` of each call of an unchecked shard_map, once for its kind of arguments.

    ``before`` is called before the first call is looked at. Returns what ends it.
    """
    waiting = [] if before is None else [before]
    hold = contextlib.ExitStack()

    def watch(look: Callable[[], list[Call]], failed: Callable[[str], Call]) -> None:
        try:
            with _lock:
                while waiting:
                    waiting[-1]()
                    waiting.pop()
            calls = look()
        except Exception as error:  # it must not become the program's
            calls = [failed(f"it can't be looked at: {error}")]
        for call in calls:
            listener(call)

    def patch(_: object) -> None:
        hold.enter_context(held())
        watchers = state().of(UncheckedHooks).watchers
        watchers.append(watch)
        hold.callback(watchers.remove, watch)

    imported = WhenImported(("jax",), patch)
    imported.start()

    def stop() -> None:
        imported.stop()
        hold.close()

    return stop
