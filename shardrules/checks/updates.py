"""The budgets that this process rewrites: whether it does, those written, those still held back."""

from __future__ import annotations

import os
import pathlib

wanted: bool = False
written: list[str] = []
kept: list[str] = []  # left unchanged, since their tests failed
_waiting: dict[pathlib.Path, str] | None = None


def write(path: pathlib.Path, text: str) -> None:
    """Write a budget; inside a test, once the test has passed."""
    if _waiting is not None:
        _waiting[path] = text
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    _note(path, written)


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
            _note(path, kept)


def _note(path: pathlib.Path, paths: list[str]) -> None:
    shown = os.path.abspath(path)
    if shown not in paths:
        paths.append(shown)
