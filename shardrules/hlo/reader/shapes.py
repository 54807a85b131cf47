"""Reads shapes, and infers those that a text leaves out."""

from __future__ import annotations

import re

from shardrules.hlo.reader import module as hm
from shardrules.hlo.reader.attributes import COMMENT, match_bracket, skip, syntax_error

_ARRAY = re.compile(r"(\w+)\s*\[([^\]]*)\]")
# As XLA prints it.
_PRINTED = re.compile(r"(\w+)\[(\d{1,18}(?:,\d{1,18})*)?\](?:\{([\d:][^{}\"/\n]*)?\})?(?!\s*\{)")
_DIMENSIONS = re.compile(r"\s*(?:(?:<=)?\d+|\?)\s*(?:,\s*(?:(?:<=)?\d+|\?)\s*)*")
# A brace after a shape begins its layout if a number, a colon or nothing stands in it; else the
# computation whose header this is (hlo_parser.cc, ParseShape).
_LAYOUT = re.compile(r"\s*(?=\{\s*[\d:])|(?=\{\s*\})")


def begins(text: str, position: int) -> bool:
    """Tell whether a shape begins here."""
    return (
        text.startswith("(", position)
        or text.startswith("b(", position)
        or bool(_ARRAY.match(text, position))
    )


def read(text: str, position: int) -> tuple[hm.Shape, int]:
    """Read a shape, and give its end; iterative, so that no nesting exhausts the stack.

    Raises:
      HloSyntaxError: there is no shape at this place.
    """
    stack: list[list[hm.Shape]] = []
    while True:
        position = skip(text, position)
        done: hm.Shape | None = None
        if text.startswith("(", position):
            stack.append([])
            position = skip(text, position + 1)
            if text.startswith(")", position):
                done = hm.Shape("tuple", elements=tuple(stack.pop()))
                position += 1
            else:
                continue
        elif text.startswith("b(", position):  # a buffer: its array with a marker around it
            end = match_bracket(text, position + 1, len(text))
            done, stop = _array(text, position + 2)
            if skip(text, stop) != end - 1:
                raise syntax_error(text, stop, "expected ')' after the buffer's shape")
            position = end
        else:
            done, position = _array(text, position)
        while stack:
            stack[-1].append(done)
            position = skip(text, position)
            if text.startswith(",", position):
                position += 1
                done = None
                break
            if not text.startswith(")", position):
                raise syntax_error(text, position, "expected ',' or ')' in a tuple's shape")
            position += 1
            done = hm.Shape("tuple", elements=tuple(stack.pop()))
        if done is not None:
            return done, position


def _array(text: str, position: int) -> tuple[hm.Shape, int]:
    found = _PRINTED.match(text, position)
    if found:
        kind, sizes, layout = found.groups()
        dimensions = tuple(map(int, sizes.split(","))) if sizes else ()
        return hm.Shape(kind, dimensions, layout or ""), found.end()
    found = _ARRAY.match(text, position)
    if not found:
        raise syntax_error(text, position, "expected a shape such as f32[8,128]{1,0}")
    dimensions = ()
    sizes = COMMENT.sub("", found[2]).strip()
    if sizes:
        if not _DIMENSIONS.fullmatch(sizes):
            raise syntax_error(text, found.start(2), "expected sizes such as 8,128 or <=8")
        # '?' is an unbounded dynamic size; nothing that XLA compiles still holds one.
        parts = [p.strip().lstrip("<=") for p in sizes.split(",")]
        if any(len(p) > 18 for p in parts):
            raise syntax_error(text, found.start(2), "a size of this many digits is no size")
        dimensions = tuple(0 if p == "?" else int(p) for p in parts)
    end = found.end()
    layout = ""
    brace = _LAYOUT.match(text, end)
    if brace:
        stop = match_bracket(text, brace.end(), len(text))
        layout = text[brace.end() + 1 : stop - 1]
        end = stop
    return hm.Shape(found[1], dimensions, layout), end


_LIKE_OPERAND = frozenset(
    "add add-dependency and atan2 cbrt ceil clamp compare copy cosine count-leading-zeros divide "
    "domain dynamic-update-slice erf exponential exponential-minus-one floor log log-plus-one "
    "logistic maximum minimum multiply negate not opt-barrier optimization-barrier or popcnt power "
    "remainder reverse round-nearest-afz round-nearest-even rsqrt select shift-left "
    "shift-right-arithmetic shift-right-logical sign sine sqrt subtract tan tanh while xor".split()
)
_FIXED = {
    "after-all": hm.Shape("token"),
    "outfeed": hm.Shape("token"),
    "partition-id": hm.Shape("u32"),
    "replica-id": hm.Shape("u32"),
}


def infer(opcode: str, operands: list[hm.Shape], index: str | None) -> hm.Shape | None:
    """Infer a result's shape that the text leaves out; None where that takes more than this.

    Args:
      opcode: the instruction's.
      operands: its operands' shapes.
      index: the attribute of that name.
    """
    if opcode == "tuple":
        return hm.Shape("tuple", elements=tuple(operands))
    if opcode == "get-tuple-element" and len(operands) == 1 and index and index.isdigit():
        elements = operands[0].elements or ()
        return elements[int(index)] if len(index) < 10 and int(index) < len(elements) else None
    if opcode in _FIXED or opcode not in _LIKE_OPERAND or not operands:
        return _FIXED.get(opcode)
    shape = operands[1 if opcode in ("select", "clamp") and len(operands) == 3 else 0]
    return shape._replace(element_type="pred") if opcode == "compare" else shape
