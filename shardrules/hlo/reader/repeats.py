"""Find computations that repeat an earlier one except for names and metadata.

In a program with unrolled layers, most of the text repeats the same few fusions. Comparing a body
with the first similar one takes two regular expressions, and a third of the time of reading it. The
instructions of a repetition are read on demand.

A body is cut at its names. Two bodies are alike if the texts between their names are equal, and if
two names are equal in one body exactly where they are equal in the other. Then only the called
computations may differ in meaning: a repetition must call repetitions of the same originals.
"""

from __future__ import annotations

import itertools
import re
from typing import Any

from shardrules.hlo.reader import module as hm
from shardrules.hlo.reader import unknown_attributes

# Metadata without brackets outside of strings, on one line; and a name.
_METADATA = re.compile(r', metadata=\{(?:[^{}()\[\]"\\\n]++|"[^"\\\n]*+")*+\}')
_MARK = ", M"
_NAME = re.compile(r"%([\w.\-]++)")
_Key = tuple[Any, ...]


class Repeats:
    """The computations of one text that later computations may repeat."""

    def __init__(self, text: str, computations: dict[str, hm.Computation]):
        self._text = text
        self._computations = computations  # those read so far
        # The first body with each fingerprint, or None after this first body has been cut.
        self._first: dict[_Key, tuple[hm.Computation, str] | None] = {}
        # A body's key is the text between its names and the pattern of equal names. ``_alone`` maps
        # a key to its first computation and the names in it. After a second body with this key,
        # ``_known`` maps it to the places of called computations among the names, and to the
        # computation to repeat for each choice of called computations.
        self._alone: dict[_Key, tuple[hm.Computation, list[str]]] = {}
        self._known: dict[_Key, tuple[list[int], dict[_Key, hm.Computation]] | None] = {}
        self._glance: _Key = ()
        self._key: _Key = ()  # the key of the last body in ``find``; empty if that wasn't cut
        self._names: list[str] = []  # the names in that body

    def find(self, start: int, end: int) -> tuple[hm.Computation, tuple[str, ...]] | None:
        """Return the original that a body repeats and the names that the body calls, or None."""
        # From cheap to expensive: compare fingerprints, then the text between names, then the
        # called computations. The first body with a fingerprint is cut only when a second body has
        # the same fingerprint.
        body = self._text[start:end]
        root = body.rfind(" = ")
        self._key = ()
        self._glance = glance = (
            body.count("%"),
            body[body.find(" = ") : body.find(")")],
            body[root : body.find("(", root)],
        )
        if glance not in self._first:
            return None
        first = self._first[glance]
        if first is not None:
            self._first[glance] = None
            self._cut(first[1])
            self._note(first[0])
        self._cut(body)
        if self._key in self._alone:
            self._compare(*self._alone.pop(self._key))
        known = self._known.get(self._key)
        if known is None:
            return None
        called = tuple([self._names[place] for place in known[0]])
        original = known[1].get(self._originals(called) if called else ())
        return None if original is None else (original, called)

    def add(self, computation: hm.Computation, start: int, end: int) -> None:
        """Record the computation of the last body in ``find``, so that others may repeat it."""
        if self._key:
            self._note(computation)
        else:
            self._first[self._glance] = computation, self._text[start:end]

    def _cut(self, body: str) -> None:
        """Cut a body at its names, and set its key and its names."""
        # The mark replaces metadata, so that a body with metadata never equals one without.
        pieces = _NAME.split(_METADATA.sub(_MARK, body))
        self._names = names = pieces[1::2]
        first: dict[str, int] = {}
        self._key = tuple(pieces[::2]), tuple(map(first.setdefault, names, itertools.count()))

    def _note(self, computation: hm.Computation) -> None:
        """Record a computation under the key of the body that was cut last."""
        if self._key not in self._known:
            self._alone.setdefault(self._key, (computation, self._names))
        else:
            self._compare(computation, self._names)

    def _compare(self, computation: hm.Computation, names: list[str]) -> None:
        """Let others repeat a computation, unless they can repeat one with the same callees."""
        if self._key not in self._known:
            places = _called(computation, self._key[0], names)
            self._known[self._key] = None if places is None else (places, {})
        known = self._known[self._key]
        if known is not None:
            called = tuple([names[place] for place in known[0]])
            known[1].setdefault(self._originals(called), computation)

    def _originals(self, called: tuple[str, ...]) -> tuple[hm.Computation | None, ...]:
        known = [self._computations.get(name) for name in called]
        return tuple([computation and computation.original for computation in known])


def _called(
    computation: hm.Computation, parts: tuple[str, ...], names: list[str]
) -> list[int] | None:
    """Return the places of called computations among the names; None if this can't be repeated."""
    # Names may differ in a repetition only if each is an instruction's own name, an operand or a
    # called computation. Count them to be sure that there are no others. Names and metadata must
    # not be inside strings: that is so if every quote closes before the next name.
    whole = "\0".join(parts)
    if "\\" in whole or unknown_attributes.unknown_keys(whole):
        return None
    if '"' in whole and any(part.count('"') % 2 for part in parts):
        return None
    strings = itertools.chain.from_iterable(part.split('"')[1::2] for part in parts)
    if '"' in whole and any(_MARK in string for string in strings):
        return None
    called = [place for place, part in enumerate(parts[:-1]) if part.endswith("=")]
    instructions = computation.instructions
    calls = [*itertools.chain.from_iterable(i.calls for i in instructions)]
    operands = sum(len(i.operands) for i in instructions)
    inside = {name for place, name in enumerate(names) if place not in {*called}}
    if (
        [names[place] for place in called] != calls
        or len(names) != len(instructions) + operands + len(calls)
        or inside != {i.name for i in instructions}
    ):
        return None
    return called
