"""Find attributes that the proof does not know."""

from __future__ import annotations

import bisect
import itertools
import re
from collections.abc import Mapping, Sequence

from shardrules.hlo.reader import attributes
from shardrules.hlo.reader import module as hm

_KEY = re.compile(r",\s*+([\w\-]++)\s*+=")


def unknown_keys(text: str) -> set[str]:
    """Return all words that look like keys of unknown attributes, even in strings and metadata."""
    return {*_KEY.findall(text)} - attributes.KNOWN


def find(
    text: str, spans: Sequence[tuple[int, int]], computations: Mapping[str, hm.Computation]
) -> dict[int, str]:
    """Return the unknown attribute of each instruction that has one, by the instruction's offset.

    Args:
      text: the module's text.
      spans: the bodies of all computations except repetitions, which have no unknown attributes.
      computations: all computations of the module.
    """
    by_offset: dict[int, str] = {}
    keys = itertools.chain.from_iterable(_KEY.findall(text, *span) for span in spans)
    unknown = {*keys} - attributes.KNOWN
    if not unknown:
        return by_offset
    pattern = re.compile(rf",\s*+({'|'.join(map(re.escape, unknown))})\s*+=")
    own = [
        computation for computation in computations.values() if computation.original is computation
    ]
    for span, computation in zip(spans, own, strict=True):
        having_one = list(pattern.finditer(text, *span))
        if not having_one:
            continue
        # Leave out instructions that are written as operands: they have no attributes, but the
        # attributes of their user follow them in the text.
        having = (
            i for i in computation.instructions if i.text is text and i.attributes_start < i.end
        )
        instructions = sorted(having, key=lambda i: i.start)
        starts = [i.start for i in instructions]
        read, names = -1, {}
        for key in having_one:
            place = bisect.bisect_right(starts, key.start()) - 1
            if place < 0 or _in_string(text, starts[place], key.start()):
                continue
            if place != read:  # read its attributes: text in braces may look like a key
                read = place
                names = {value: name for name, value, _ in instructions[place].attributes()}
            if attributes.skip(text, key.end()) in names:
                by_offset[starts[place]] = key[1]
    return by_offset


def _in_string(text: str, start: int, position: int) -> bool:
    """Return whether a position is in a string, by counting quotes from ``start``, outside of any.

    With an escape in between, the count isn't reliable: return False.
    """
    return text.count('"', start, position) % 2 == 1 and text.find("\\", start, position) < 0
