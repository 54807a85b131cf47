"""Rewrite budget files, for a test only after it has passed."""

from __future__ import annotations

import os
import pathlib

wanted: bool = False
said: dict[str, None] = {}  # lines on budgets that were written, or left because a test failed
_waiting: dict[pathlib.Path, str] | None = None  # a test's budgets until it passes; None outside


def write(path: pathlib.Path, text: str) -> None:
    """Write a budget; inside a test, hold it back until the test has passed."""
    if _waiting is not None:
        _waiting[path] = text
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    said[f"wrote the budget {os.path.abspath(path)}"] = None


def wait() -> None:
    global _waiting
    _waiting = {}


def settle(passed: bool) -> None:
    global _waiting
    waiting, _waiting = _waiting or {}, None
    for path, text in waiting.items():
        if passed:
            write(path, text)
        else:
            said[f"left the budget {os.path.abspath(path)}: its test failed"] = None
