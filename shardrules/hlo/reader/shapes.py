"""Read the shapes of arrays, tuples and buffers."""

from __future__ import annotations

import re

from shardrules.hlo.reader import module as hm
from shardrules.hlo.reader.attributes import match_bracket, skip, syntax_error

_ARRAY = re.compile(r"(\w+)\s*\[([^\]]*)\]")
# An array's shape as XLA prints it.
_PRINTED = re.compile(r"(\w+)\[(\d{1,18}(?:,\d{1,18})*)?\](?:\{([\d:][^{}\"\n]*)?\})?(?!\s*\{)")
_DIMENSIONS = re.compile(r"\s*(?:(?:<=)?\d+|\?)\s*(?:,\s*(?:(?:<=)?\d+|\?)\s*)*")
# Braces after a shape are its layout if they are empty or begin with a digit or a colon; otherwise
# they open a computation's body (hlo_parser.cc, ParseShape).
_LAYOUT = re.compile(r"\s*(?=\{\s*[\d:])|(?=\{\s*\})")


def begins(text: str, position: int) -> bool:
    """Return whether a shape begins at a position."""
    return text.startswith(("(", "b("), position) or bool(_ARRAY.match(text, position))


def printed(text: str) -> hm.Shape | None:
    """Return an array's shape, printed as XLA prints it; None for any other text."""
    match = _PRINTED.fullmatch(text)
    return _made(match) if match else None


def _made(match: re.Match[str]) -> hm.Shape:
    kind, sizes, layout = match.groups()
    dimensions = tuple(map(int, sizes.split(","))) if sizes else ()
    return hm.Shape(kind, dimensions, layout or "")


def read(text: str, position: int) -> tuple[hm.Shape, int]:
    """Read the shape at a position; return it and the position after it."""
    # A loop with a stack of its own, since nested text could exhaust Python's stack.
    stack: list[list[hm.Shape]] = []  # the elements so far of each tuple that is still open
    while True:
        position = skip(text, position)
        if text.startswith("(", position):
            stack.append([])
            position = skip(text, position + 1)
            if not text.startswith(")", position):
                continue
        else:
            shape, position = _array(text, position)
            if not stack:
                return shape, position
            stack[-1].append(shape)
            position = skip(text, position)
        while text.startswith(")", position):
            shape = hm.Shape("tuple", elements=tuple(stack.pop()))
            position += 1
            if not stack:
                return shape, position
            stack[-1].append(shape)
            position = skip(text, position)
        if not text.startswith(",", position):
            raise syntax_error(text, position, "expected ',' or ')' in a tuple's shape")
        position += 1


def _array(text: str, position: int) -> tuple[hm.Shape, int]:
    match = _PRINTED.match(text, position)
    if match:
        return _made(match), match.end()
    if text.startswith("b(", position):  # a buffer: its array with a marker around it
        end = match_bracket(text, position + 1, len(text))
        shape, stop = _array(text, position + 2)
        if skip(text, stop) != end - 1:
            raise syntax_error(text, stop, "expected ')' after the buffer's shape")
        return shape, end
    match = _ARRAY.match(text, position)
    if not match:
        raise syntax_error(text, position, "expected a shape such as f32[8,128]{1,0}")
    sizes = match[2].strip()
    dimensions: tuple[int, ...] = ()
    if sizes:
        if not _DIMENSIONS.fullmatch(sizes):
            raise syntax_error(text, match.start(2), "expected sizes such as 8,128 or <=8")
        # '?' is an unbounded dynamic size; compiled text has none.
        parts = [p.strip().lstrip("<=") for p in sizes.split(",")]
        if any(len(p) > 18 for p in parts):
            raise syntax_error(text, match.start(2), "this size has too many digits")
        dimensions = tuple(0 if p == "?" else int(p) for p in parts)
    end, layout = match.end(), ""
    brace = _LAYOUT.match(text, end)
    if brace:
        end = match_bracket(text, brace.end(), len(text))
        layout = text[brace.end() + 1 : end - 1]
    return hm.Shape(match[1], dimensions, layout, None, "<" in sizes or "?" in sizes), end
