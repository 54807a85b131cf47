"""Compare the accounts of two programs: which collectives came, went, grew or shrank."""

from __future__ import annotations

import collections
import dataclasses
import itertools
import os
import re
from collections.abc import Collection, Iterable, Iterator, Mapping

from shardrules.costs.accounts import Entry, Totals


@dataclasses.dataclass(frozen=True)
class Change:
    """A difference between two accounts."""

    # ``came``, ``went``, ``grew``, ``shrank``, or ``moved``: the count and the bytes are the same,
    # but the sites or the loops of unknown length differ.
    status: str
    what: str  # phase, kind, axes, element type and source
    # before, after: sums
    before: Totals
    after: Totals

    def __str__(self) -> str:
        if self.status in ("came", "went"):
            sign, total = ("+", self.after) if self.status == "came" else ("-", self.before)
            return f"{sign} {self.what}: {total}"
        if self.status == "moved":
            return (
                f"~ {self.what}: {self.before} at {self.before.sites} sites before, "
                f"{self.after} at {self.after.sites} sites now"
            )
        return f"~ {self.what}: {self.status} from {self.before} to {self.after}"


def relative_file(file: str, root: str) -> str:
    """Return a source path relative to ``site-packages`` or ``root``, else only the file's name."""
    path = file.replace("\\", "/")
    if not path.startswith("/") and not re.match(r"[A-Za-z]:/", path):
        return path
    base = os.path.abspath(root).replace("\\", "/").rstrip("/") + "/"
    installed = re.split("/(?:site|dist)-packages/", path)
    if len(installed) > 1:
        return installed[-1]
    return path.removeprefix(base) if path.startswith(base) else path.rpartition("/")[2]


def common_names(before: Iterable[Entry], after: Iterable[Entry]) -> dict[str, str]:
    """Return names for the source files of two programs; a file of two checkouts has one name."""
    # First match paths by their common end, the longest ends first. Two paths are one file if their
    # common end is longer than the end that either shares with any other path. Then match the rest
    # by their collectives. Two paths are one file if all their collectives are the same, and no
    # other file has the same collectives.
    before, after = tuple(before), tuple(after)
    mine, theirs = map(_files, (before, after))
    names = {file: relative_file(file, ".") for file in (*mine, *theirs)}
    left = [_without(mine, theirs), _without(theirs, mine)]
    ends = {pair: _common_end(*pair) for pair in itertools.product(*left)}
    for length in sorted({len(end) for end in ends.values()} - {0}, reverse=True):
        near = [pair for pair, end in ends.items() if len(end) == length]
        times = collections.Counter(itertools.chain.from_iterable(near))
        for pair in near:
            if times[pair[0]] == times[pair[1]] == 1:
                names |= dict.fromkeys(pair, "/".join(ends[pair]))
                left = [_without(some, pair) for some in left]
        ends = {pair: end for pair, end in ends.items() if not times.keys() & set(pair)}
    renamed = [_by_collectives(*side) for side in zip(left, (before, after))]
    for collectives in renamed[0].keys() & renamed[1].keys():
        old, new = (by_collectives[collectives] for by_collectives in renamed)
        if len(old) == len(new) == 1:
            names[old[0]] = names[new[0]]
    return names


def _files(entries: Iterable[Entry]) -> list[str]:
    return sorted({entry.file for entry in entries if entry.file})


def _without(files: Iterable[str], others: Collection[str]) -> list[str]:
    return [file for file in files if file not in others]


def _by_collectives(files: Iterable[str], entries: Iterable[Entry]) -> dict[object, list[str]]:
    """Return lists of files with the same collectives, by these collectives."""
    groups: dict[object, list[str]] = {}
    for file in files:
        collectives = collections.Counter(
            (entry.what, entry.element_type, entry.function, entry.bytes, entry.runs)
            for entry in entries
            if entry.file == file
        )
        groups.setdefault(frozenset(collectives.items()), []).append(file)
    return groups


def _common_end(first: str, second: str) -> tuple[str, ...]:
    """Return the parts at the end that two paths have in common."""
    parts = [path.replace("\\", "/").split("/")[::-1] for path in (first, second)]
    same = itertools.takewhile(lambda pair: pair[0] == pair[1], zip(*parts))
    return tuple(part for part, _ in same)[::-1]


def grouped(
    entries: Iterable[Entry],
    root: str = ".",
    groups: bool = False,
    names: Mapping[str, str] | None = None,
) -> dict[tuple[str, ...], Totals]:
    """Return sums of entries by the fields that recompiling keeps: what, element type, function."""
    totals: dict[tuple[str, ...], Totals] = {}
    for entry in entries:
        key = key_of(entry, root, groups, names)
        totals[key] = totals.get(key, Totals()).plus(entry)
    return totals


def key_of(
    entry: Entry, root: str = ".", groups: bool = False, names: Mapping[str, str] | None = None
) -> tuple[str, ...]:
    source = (names or {}).get(entry.file) or relative_file(entry.file, root)
    if source and entry.function:
        source += f" ({entry.function})"
    if not groups:
        return entry.what, entry.element_type, source
    # Axis names alone don't distinguish two meshes.
    how = entry.groups + (f" by {entry.reduction}" if entry.reduction not in ("", "add") else "")
    how += f" along dimension {entry.dimension}" if entry.dimension else ""
    how += " in a branch" if entry.at_most else ""
    return entry.what, entry.element_type, source, how


def compare(
    before: Mapping[tuple[str, ...], Totals], after: Mapping[tuple[str, ...], Totals]
) -> list[Change]:
    """Return the differences between two results of ``grouped``, the costliest first."""
    changes = [change for _, change in each(before, after) if change.status != "same"]
    return sorted(changes, key=lambda c: (-abs(c.after.wire_bytes - c.before.wire_bytes), c.what))


def each(
    before: Mapping[tuple[str, ...], Totals], after: Mapping[tuple[str, ...], Totals]
) -> Iterator[tuple[tuple[str, ...], Change]]:
    """Yield the change of each key of two results of ``grouped``; its status may be ``same``."""
    keys = list(dict.fromkeys([*before, *after]))
    alike = collections.Counter(key[:3] for key in keys)
    for key in keys:
        a, b = before.get(key), after.get(key)
        what = f"{key[0]} {key[1]}" + (f" at {key[2]}" if key[2] else "")
        if alike[key[:3]] > 1:  # the keys differ only in their groups
            what += f" in {key[3]}"
        if a is None or b is None:
            status = "came" if a is None else "went"
        elif a == b:
            status = "same"
        else:
            was, now = ((t.bytes, t.count, t.unknown_bytes) for t in (a, b))
            status = "moved" if was == now else "grew" if now > was else "shrank"
        yield key, Change(status, what, a or Totals(), b or Totals())
