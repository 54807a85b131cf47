"""Source files: whose each is, and how it is shown."""

from __future__ import annotations

import os
import re
import sys
import sysconfig

_STANDARD = tuple(sysconfig.get_paths()[key] for key in ("stdlib", "platstdlib"))


def is_library(path: str) -> bool:
    """Return whether a source file (or ``file:line``) is an installed library's or Python's."""
    parts = os.path.normpath(path).split(os.sep)
    return (
        "site-packages" in parts
        or "dist-packages" in parts
        or path.startswith(tuple(folder + os.sep for folder in _STANDARD))
        or path.startswith("<frozen")
    )


def is_here(file: str) -> bool:
    """Return whether a file is below the current folder, and no installed library's."""
    relative = os.path.relpath(file)
    is_below = not relative.startswith(os.pardir) and not os.path.isabs(relative)
    return is_below and os.path.isfile(file) and not is_library(os.path.abspath(file))


def is_own(place: str) -> bool:
    """Return whether ``file:line`` is in the working directory or the script's, or below."""
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
    """Write each ``file:line`` of a text without the working directory, if it is below that."""
    try:
        folder = os.path.join(os.getcwd(), "")
    except OSError:  # it was removed
        return source
    return re.sub(rf"(?<![^\s(]){re.escape(folder)}", "", source)
