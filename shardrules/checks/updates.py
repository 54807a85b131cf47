"""Whether budgets are to be rewritten in this process, which wait for their test, which were."""

from __future__ import annotations

import pathlib

__all__ = ["kept", "settle", "wait", "wanted", "write", "written"]

wanted: bool = False
written: list[str] = []
kept: list[str] = []  # of tests that failed: as they were
_waiting: dict[pathlib.Path, tuple[str, str]] | None = None


def write(path: pathlib.Path, text: str, shown: str) -> None:
    """Write a budget; inside a test, once the test has passed."""
    if _waiting is not None:
        _waiting[path] = (text, shown)
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    if shown not in written:
        written.append(shown)


def wait() -> None:
    """Hold back what is written until ``settle``."""
    global _waiting
    _waiting = {}


def settle(passed: bool) -> None:
    """Write what was held back if the test passed."""
    global _waiting
    waiting, _waiting = _waiting or {}, None
    for path, (text, shown) in waiting.items():
        if passed:
            write(path, text, shown)
        elif shown not in kept:
            kept.append(shown)
