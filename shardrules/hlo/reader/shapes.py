"""Reads shapes, and infers shapes that a text leaves out."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

from shardrules.hlo.reader import module as hm
from shardrules.hlo.reader.attributes import COMMENT, match_bracket, skip, spaced, syntax_error

_ARRAY = spaced(r"(\w+) \[((?:[^\]/]|/\*(?:[^*]|\*(?!/))*\*/|//[^\n]*\n)*)\]")
# As XLA prints it.
_PRINTED = re.compile(r"(\w+)\[(\d{1,18}(?:,\d{1,18})*)?\](?:\{([\d:][^{}\"/\n]*)?\})?(?!\s*\{)")
_DIMENSIONS = re.compile(r"\s*(?:(?:<=)?\d+|\?)\s*(?:,\s*(?:(?:<=)?\d+|\?)\s*)*")
# A brace after a shape begins its layout if it holds a number, a colon or nothing; otherwise it
# begins a computation's body (hlo_parser.cc, ParseShape).
_LAYOUT = spaced(r" (?=\{ [\d:])|(?=\{\s*\})")


def begins(text: str, position: int) -> bool:
    """Tell whether a shape begins here."""
    return (
        text.startswith("(", position)
        or text.startswith("b(", position)
        or bool(_ARRAY.match(text, position))
    )


def read(text: str, position: int) -> tuple[hm.Shape, int]:
    """Read a shape and give its end; iterative, since deep nesting would exhaust the stack."""
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
    match = _PRINTED.match(text, position)
    if match:
        kind, sizes, layout = match.groups()
        dimensions = tuple(map(int, sizes.split(","))) if sizes else ()
        return hm.Shape(kind, dimensions, layout or ""), match.end()
    match = _ARRAY.match(text, position)
    if not match:
        raise syntax_error(text, position, "expected a shape such as f32[8,128]{1,0}")
    dimensions = ()
    sizes = COMMENT.sub(" ", match[2]).strip()
    if sizes:
        if not _DIMENSIONS.fullmatch(sizes):
            raise syntax_error(text, match.start(2), "expected sizes such as 8,128 or <=8")
        # '?' is an unbounded dynamic size; compiled text has none.
        parts = [p.strip().lstrip("<=") for p in sizes.split(",")]
        if any(len(p) > 18 for p in parts):
            raise syntax_error(text, match.start(2), "this size has too many digits")
        dimensions = tuple(0 if p == "?" else int(p) for p in parts)
    end = match.end()
    layout = ""
    brace = _LAYOUT.match(text, end)
    if brace:
        stop = match_bracket(text, brace.end(), len(text))
        layout = text[brace.end() + 1 : stop - 1]
        end = stop
    return hm.Shape(match[1], dimensions, layout, None, "<" in sizes or "?" in sizes), end


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
_PARTS = {"c64": "f32", "c128": "f64"}


def infer(
    opcode: str, operands: list[hm.Shape], attribute: Callable[[str], str], called: hm.Shape | None
) -> hm.Shape | None:
    """Infer a result's shape that the text leaves out; None if we can't."""
    if opcode in _FIXED:
        return _FIXED[opcode]
    if opcode in ("call", "conditional", "fusion"):
        return called
    if opcode == "tuple":
        return hm.Shape("tuple", elements=tuple(operands))
    if not operands:
        return None
    first = operands[0]
    if opcode == "get-tuple-element":
        index, elements = attribute("index"), first.elements or ()
        return (
            elements[int(index)] if index.isdecimal() and int(index[:9]) < len(elements) else None
        )
    if opcode in _LIKE_OPERAND:
        shape = operands[1 if opcode in ("select", "clamp") and len(operands) == 3 else 0]
        return shape._replace(element_type="pred") if opcode == "compare" else shape
    if opcode == "sort":
        return first if len(operands) == 1 else hm.Shape("tuple", elements=tuple(operands))
    if any(shape.is_tuple for shape in operands):
        return None
    if opcode in ("abs", "real", "imag"):
        return first._replace(element_type=_PARTS.get(first.element_type, first.element_type))
    sizes = _sizes(opcode, operands, attribute)
    # The type of a reduce-window is that of its initial value.
    kind = operands[1 if opcode == "reduce-window" and sizes else 0].element_type
    return None if sizes is None else hm.Shape(kind, tuple(sizes))


def _sizes(
    opcode: str, operands: list[hm.Shape], attribute: Callable[[str], str]
) -> list[int] | None:
    first = operands[0].dimensions

    def places(key: str) -> list[int]:
        return [int(n) for n in re.findall(r"\d{1,9}", attribute(key)) if int(n) < len(first)]

    if opcode == "transpose":
        return [first[n] for n in places("dimensions")]
    if opcode == "reduce" and len(operands) == 2:
        gone = places("dimensions")
        return [size for n, size in enumerate(first) if n not in gone]
    if opcode == "concatenate" and len(places("dimensions")) == 1:
        along = places("dimensions")[0]
        if all(len(shape.dimensions) == len(first) for shape in operands):
            total = sum(shape.dimensions[along] for shape in operands)
            return [total if n == along else size for n, size in enumerate(first)]
    if opcode == "pad":
        ends = [
            [int(n) for n in part.split("_")]
            for part in attribute("padding").split("x")
            if re.fullmatch(r"-?\d{1,9}_-?\d{1,9}(_\d{1,9})?", part)
        ]
        if len(ends) == len(first):
            return [
                size + sum(e[:2]) + (e[2] if len(e) > 2 else 0) * max(size - 1, 0)
                for size, e in zip(first, ends)
            ]
    if opcode == "dot" and len(operands) == 2:
        second = operands[1].dimensions
        gone = places("lhs_batch_dims") + places("lhs_contracting_dims")
        gone_second = [
            int(n)
            for key in ("rhs_batch_dims", "rhs_contracting_dims")
            for n in re.findall(r"\d{1,9}", attribute(key))
        ]
        return [
            *(first[n] for n in places("lhs_batch_dims")),
            *(size for n, size in enumerate(first) if n not in gone),
            *(size for n, size in enumerate(second) if n not in gone_second),
        ]
    if opcode == "reduce-window" and len(operands) == 2:
        return _windowed(first, attribute("window"))
    if opcode == "convolution" and len(operands) == 2:
        return _convolved(operands, attribute)
    return None


def _windowed(sizes: Sequence[int], window: str) -> list[int] | None:
    """Count a window's positions along each dimension (xla/window_util, jaxlib 0.10.2)."""

    def along(key: str, default: str) -> list[str]:
        match = re.search(rf"\b{key}=([-\dx_]+)", window)
        return match[1].split("x") if match else [default] * len(sizes)

    keys = {"size": "1", "stride": "1", "pad": "0_0", "lhs_dilate": "1", "rhs_dilate": "1"}
    columns = [along(*key) for key in keys.items()]
    if any(len(column) != len(sizes) for column in columns):
        return None
    counts = []
    for base, size, stride, pad, spread, apart in zip(sizes, *columns):
        ends = re.fullmatch(r"(-?\d{1,9})_(-?\d{1,9})", pad)
        numbers = [size, stride, spread, apart]
        if ends is None or not all(re.fullmatch(r"[1-9]\d{0,8}", n) for n in numbers):
            return None
        length = (base - 1) * int(spread) + 1 if base else 0
        length += int(ends[1]) + int(ends[2])
        reach = (int(size) - 1) * int(apart) + 1
        counts.append((length - reach) // int(stride) + 1 if 0 < length >= reach else 0)
    return counts


def _convolved(operands: list[hm.Shape], attribute: Callable[[str], str]) -> list[int] | None:
    """Give a convolution's sizes, in the order of the result's ``dim_labels``."""
    image, kernel = operands
    labels = re.fullmatch(r"([bf\d]+)_([io\d]+)->([bf\d]+)", attribute("dim_labels"))
    groups = attribute("batch_group_count") or "1"
    if labels is None or image.element_type != kernel.element_type:
        return None
    if not re.fullmatch(r"[1-9]\d{0,8}", groups):
        return None
    left, right, out = labels.groups()
    if len(set(left)) != len(image.dimensions) or len(set(right)) != len(kernel.dimensions):
        return None
    if sorted(left) != sorted(out) or not {"b", "f"} <= set(left) or "o" not in right:
        return None
    size_of = dict(zip(left, image.dimensions))
    spatial = sorted(set(left) - {"b", "f"})
    counts = _windowed([size_of[n] for n in spatial], attribute("window"))
    if counts is None:
        return None
    size_of |= dict(zip(spatial, counts))
    size_of["b"] //= int(groups)
    size_of["f"] = kernel.dimensions[right.index("o")]
    return [size_of[n] for n in out]
