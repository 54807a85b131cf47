"""Keep Python's cycle collector away from the tuples of a module."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator


@contextlib.contextmanager
def uncollected() -> Iterator[None]:
    """Keep the cycle collector from scanning a module's tuples again and again."""
    # About 100,000 tuples stay alive. For 4 MB of text, the collector would take a third of the
    # time and free nothing. Freezing moves the tuples into the oldest generation.
    collecting = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collecting and not gc.get_freeze_count():  # unfreezing would undo others' freezing
            gc.freeze()
            gc.unfreeze()  # into the oldest generation
        if collecting:
            gc.enable()
