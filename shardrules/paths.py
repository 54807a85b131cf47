"""Tell whose a source file is, and shorten paths for messages."""

from __future__ import annotations

import os
import re
import sys
import sysconfig

_STANDARD = tuple(sysconfig.get_paths()[key] for key in ("stdlib", "platstdlib"))
_COMMANDS = sysconfig.get_path("scripts")


def is_library(path: str) -> bool:
    """Return whether a source file (or ``file:line``) belongs to a library or to Python."""
    parts = os.path.normpath(path).split(os.sep)
    return (
        "site-packages" in parts
        or "dist-packages" in parts
        or path.startswith(tuple(folder + os.sep for folder in _STANDARD))
        or path.startswith("<frozen")
    )


def is_here(file: str, script: str | None = None) -> bool:
    """Return whether a file is the user's own, below the current folder or below the script's."""
    folders = [os.getcwd()]
    # An installed command, such as pytest, has no modules of the user beside it.
    if script and (folder := os.path.dirname(os.path.abspath(script))) != _COMMANDS:
        folders.append(folder)
    path = os.path.abspath(file)
    below = any(path.startswith(os.path.join(folder, "")) for folder in folders)
    return below and os.path.isfile(file) and not is_library(path)


def is_own(place: str) -> bool:
    """Return whether ``file:line`` is below the working directory or the script's folder."""
    path = os.path.abspath(place.rpartition(":")[0])
    script = getattr(sys.modules.get("__main__"), "__file__", None)
    folders = [os.getcwd()] + ([os.path.dirname(os.path.abspath(script))] if script else [])
    own = any(path.startswith(folder.rstrip(os.sep) + os.sep) for folder in folders)
    return bool(place) and own and not is_library(path)


def module_at(place: str) -> str:
    path = place.rpartition(":")[0]
    for name, module in list(sys.modules.items()):
        if path and getattr(module, "__file__", None) == path:
            return name
    return ""


def here(source: str) -> str:
    """Remove the working directory from each ``file:line`` of a text."""
    try:
        folder = os.path.join(os.getcwd(), "")
    except OSError:  # the working directory was removed
        return source
    return re.sub(rf"(?<![^\s(]){re.escape(folder)}", "", source)
