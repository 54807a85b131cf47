"""Looks at every shard_map of a process whose check is off, or switches on those that it can."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator

from shardrules.errors import ShardrulesError
from shardrules.hooks.install import Handle, held, install, state
from shardrules.hooks.unchecked import Call, UncheckedHooks
from shardrules.watching.importing import WhenImported

__all__ = ["start", "switching"]

_lock = threading.RLock()


def start(
    listener: Callable[[Call], None], before: Callable[[], object] | None = None
) -> Callable[[], None]:
    """Report each unchecked shard_map call to ``listener`` once per argument signature.

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


@contextlib.contextmanager
def switching(
    handles: list[Handle],
    before: Callable[[], object],
    failed: Callable[[str], object],
    unchecked: str = "check",
) -> Iterator[None]:
    """Install the hooks once JAX is imported, and keep their handle.

    ``before`` is called before; ``failed`` gets the reason if they can't be installed.
    """

    def installed(_: object) -> None:
        try:
            before()
            handles.append(install(unchecked=unchecked))
        except ShardrulesError as error:  # the program runs as written
            failed(f"every shard_map runs as written: {error}")

    imported = WhenImported(("jax",), installed)
    imported.start()
    try:
        yield
    finally:
        imported.stop()
        for handle in handles:
            handle.uninstall()
