"""Retrace each unchecked shard_map of a process, or switch on each check that can be on."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator

from shardrules.door import internals
from shardrules.door.patching import Patches, WhenImported
from shardrules.errors import ShardrulesError
from shardrules.hooks.install import Handle, held, install, state, touched
from shardrules.hooks.state import Unchecked
from shardrules.unchecked.hooks import UncheckedHooks
from shardrules.unchecked.sites import UNSEEN, UncheckedCall

_lock = threading.RLock()


def start(
    listener: Callable[[UncheckedCall], None], before: Callable[[], object] = lambda: None
) -> Callable[[], None]:
    """Report each unchecked shard_map call to ``listener`` once per argument signature."""
    # Call ``before`` before the first report. The returned function stops the reports.
    pending = [before]
    hold = contextlib.ExitStack()

    def record(
        retrace: Callable[[], list[UncheckedCall]], failed: Callable[[str], UncheckedCall]
    ) -> None:
        try:
            with _lock:
                while pending:
                    pending[-1]()
                    pending.pop()
            calls = retrace()
        except Exception as error:  # the program must not get it  # noqa: BLE001
            calls = [failed(f"{UNSEEN}: {error}")]
        for call in calls:
            listener(call)

    def patch(_: object) -> None:
        hold.enter_context(held())
        watchers = state().of(UncheckedHooks).watchers
        watchers.append(record)
        hold.callback(watchers.remove, record)

    hold.callback(WhenImported("jax", patch).stop)
    return hold.close


@contextlib.contextmanager
def kept() -> Iterator[None]:
    """Wrap each unchecked shard_map made here, so that a retrace can switch its check on."""
    # This replaces only JAX's shard_map. The retrace itself installs the other hooks.
    patches, made = Patches(), list[UncheckedHooks]()

    def patch(_: object) -> None:
        with contextlib.suppress(ShardrulesError):  # a JAX that the hooks don't know
            made.append(UncheckedHooks(internals.load(), state()))
            made[0].install(patches)

    if touched():  # the installed hooks already wrap it
        yield
        return
    imported = WhenImported("jax", patch)
    try:
        yield
    finally:
        imported.stop()
        for hooks in made:
            hooks.ended = True
        if not touched():  # otherwise the script has installed hooks on top of this patch
            patches.undo()


@contextlib.contextmanager
def switching(
    handles: list[Handle],
    before: Callable[[], object],
    failed: Callable[[str], object],
    unchecked: Unchecked = "check",
) -> Iterator[None]:
    """Call ``before`` and install the hooks once JAX is imported; pass an error to ``failed``."""

    def installed(_: object) -> None:
        try:
            before()
            handles.append(install(unchecked=unchecked))
        except ShardrulesError as error:  # the program runs as written
            failed(f"every shard_map runs as written: {error}")

    imported = WhenImported("jax", installed)
    try:
        yield
    finally:
        imported.stop()
        for handle in handles:
            handle.uninstall()
