"""Which files are meant: files, patterns of files, and folders, of --xla_dump_to for example."""

from __future__ import annotations

import glob
import os
import pathlib
import re
from collections.abc import Sequence

from shardrules.errors import ShardrulesError

__all__ = ["chosen"]

_STDIN = "-"
_OPTIMIZED = re.compile(r"(.*after_optimizations)\.(?:txt|hlo)(?:\.gz)?")
_DUMPED = re.compile(r"(module_\d+\.[^.]+)\..*")
_HOW = "XLA_FLAGS='--xla_dump_to=DIR --xla_dump_hlo_as_text'"
_NAMES = 4  # that are shown of many


def chosen(given: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return the files that arguments name, each once, and what to say of those left out.

    Args:
      given: paths of files or folders, patterns (``*``, ``**``, ``?``, ``[...]``), ``-`` for stdin.

    Raises:
      ShardrulesError: a pattern matches nothing, a folder holds nothing to judge, or stdin is
        given twice.
    """
    files: dict[str, str] = {}  # from what a file is wherever it is named, to its first name
    notes: list[str] = []
    if list(given).count(_STDIN) > 1:
        raise ShardrulesError("only one program can be read from stdin; give - once")
    for name in given:
        found = [name]
        if not name:
            raise ShardrulesError("one of the files has an empty name; is a variable not set?")
        if name != _STDIN and not os.path.lexists(name) and glob.has_magic(name):
            found = sorted(p for p in glob.glob(name, recursive=True) if os.path.isfile(p))
            if not found:
                raise ShardrulesError(f"no file matches {name}")
        elif os.path.isdir(name):
            found, note = _of_folder(pathlib.Path(name))
            notes += [note] if note else []
        for file in found:
            files.setdefault(file if file == _STDIN else os.path.realpath(file), file)
    return list(files.values()), notes


def _of_folder(folder: pathlib.Path) -> tuple[list[str], str]:
    """Choose the compiled text of each module, and say what that leaves out."""
    try:
        entries = sorted(folder.iterdir())
    except OSError as error:
        raise ShardrulesError(f"can't read {folder}: {error.strerror}") from error
    names = [e.name for e in entries if e.is_file()]
    taken: dict[str, str] = {}  # from what a module's dump is called to its file
    for name in names:
        optimized = _OPTIMIZED.fullmatch(name)
        if optimized:
            taken.setdefault(optimized[1], name)
        elif not _DUMPED.fullmatch(name) and "before_optimizations" not in name:
            if name.endswith((".hlo", ".hlo.gz")) or _begins_as_hlo(folder / name):
                taken[name] = name
    dumped = {found[1] for found in map(_DUMPED.fullmatch, names) if found}
    judged = {found[1] for found in map(_DUMPED.fullmatch, taken.values()) if found}
    lacking = sorted(dumped - judged)
    if not taken:
        held = f"but {_few(names)}" if names else "nor any other file"
        raise ShardrulesError(
            f"{folder} holds no text of a compiled program (no *after_optimizations.txt, no "
            f"*.hlo), {held}; a dump is made by {_HOW}"
        )
    left = []
    if len(names) > len(taken):
        left.append(f"{len(names) - len(taken)} other files")
    folders = [e.name for e in entries if e.is_dir()]
    if folders:
        left.append(f"the folders {_few(folders)}" if folders[1:] else f"the folder {folders[0]}")
    note = f"{folder}: {len(taken)} of {len(names)} files are judged" if left else ""
    if left:
        note += f", those after optimizations; left out: {', '.join(left)}"
    if lacking:
        note += f"; without such a text (was it dumped with {_HOW}?): {_few(lacking)}"
    return [str(folder / name) for name in taken.values()], note


def _begins_as_hlo(path: pathlib.Path) -> bool:
    try:
        with path.open("rb") as file:
            return file.read(256).removeprefix(b"\xef\xbb\xbf").lstrip().startswith(b"HloModule ")
    except OSError:
        return False


def _few(names: Sequence[str]) -> str:
    more = len(names) - _NAMES
    return ", ".join(names[:_NAMES]) + (f" and {more} more" if more > 0 else "")
