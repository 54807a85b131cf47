"""Evaluates small integers and booleans exactly, for every device at once.

``axis_index`` is arithmetic on ``partition-id``, or a look-up in a constant table. Whatever is not
certain here (a division by zero, a shift by too much) gives None, and the value is then an
ordinary function of its operands.
"""

from __future__ import annotations

import re
from typing import Callable, Sequence

import numpy as np

from shardrules.hlo.known import ranges
from shardrules.hlo.reader.module import Instruction, Shape

_TYPES = {
    "pred": np.bool_,
    "s8": np.int8,
    "s16": np.int16,
    "s32": np.int32,
    "s64": np.int64,
    "u8": np.uint8,
    "u16": np.uint16,
    "u32": np.uint32,
    "u64": np.uint64,
}


def dtype(shape: Shape):
    """Give the numpy type of an integer array small enough to evaluate, else None."""
    if shape.elements is not None or shape.element_type not in _TYPES:
        return None
    return _TYPES[shape.element_type]


def literal(text: str, shape: Shape):
    """Read an integer constant's text as one row, None if it can't be."""
    kind = dtype(shape)
    if kind is None or shape.element_count > ranges.MAX_ELEMENTS:
        return None
    words = re.findall(r"-?\d+|true|false|[^\s{},]+", re.sub(r"/\*.*?\*/", "", text))
    if len(words) != shape.element_count:
        return None
    try:
        numbers = [
            {"true": 1, "false": 0}.get(w) if w in ("true", "false") else int(w)
            for w in words
            if len(w) < 25
        ]
        if len(numbers) != len(words):
            return None
        return np.array(numbers, dtype=kind).reshape((1,) + shape.dimensions)
    except (ValueError, OverflowError):
        return None


def _divide(a, b):
    if (b == 0).any() or (a.dtype.kind == "i" and (a == np.iinfo(a.dtype).min).any()):
        return None
    if a.dtype.kind == "u":
        return a // b
    quotient = np.abs(a) // np.abs(b)
    return np.where((a < 0) != (b < 0), -quotient, quotient).astype(a.dtype)


def _remainder(a, b):
    quotient = _divide(a, b)
    return None if quotient is None else a - quotient * b


def _shift(op: Callable, arithmetic: bool = False) -> Callable:
    def shift(a, b):
        width = a.dtype.itemsize * 8
        if a.dtype == np.bool_ or (b < 0).any() or (b.astype(np.int64) >= width).any():
            return None
        view = a.view(
            a.dtype.str.replace("u", "i") if arithmetic else a.dtype.str.replace("i", "u")
        )
        return op(view, b.astype(view.dtype)).view(a.dtype)

    return shift


def _logic(bits: Callable, booleans: Callable) -> Callable:
    return lambda *a: booleans(*a) if a[0].dtype == np.bool_ else bits(*a)


def _no_bool(op: Callable) -> Callable:
    return lambda *a: None if a[0].dtype == np.bool_ else op(*a)


_BINARY: dict[str, Callable] = {
    "add": _no_bool(np.add),
    "subtract": _no_bool(np.subtract),
    "multiply": _no_bool(np.multiply),
    "divide": _no_bool(_divide),
    "remainder": _no_bool(_remainder),
    "maximum": np.maximum,
    "minimum": np.minimum,
    "and": _logic(np.bitwise_and, np.logical_and),
    "or": _logic(np.bitwise_or, np.logical_or),
    "xor": _logic(np.bitwise_xor, np.logical_xor),
    "shift-left": _shift(np.left_shift),
    "shift-right-logical": _shift(np.right_shift),
    "shift-right-arithmetic": _shift(np.right_shift, arithmetic=True),
}
_UNARY: dict[str, Callable] = {
    "negate": _no_bool(np.negative),
    "not": _logic(np.invert, np.logical_not),
    "abs": _no_bool(np.abs),
    "sign": _no_bool(np.sign),
    "copy": lambda a: a,
}
_COMPARE = {
    "EQ": np.equal,
    "NE": np.not_equal,
    "LT": np.less,
    "LE": np.less_equal,
    "GT": np.greater,
    "GE": np.greater_equal,
}
OPCODES = (
    frozenset(_BINARY)
    | frozenset(_UNARY)
    | frozenset(
        "compare select clamp convert reshape bitcast broadcast slice dynamic-slice "
        "concatenate".split()
    )
)


def _full(value: ranges.Exact, shape: Shape) -> np.ndarray | None:
    """Give rows of the array's shape."""
    if not value.splat:
        return value.array
    if shape.element_count > ranges.MAX_ELEMENTS:
        return None
    rows = value.array.reshape((-1,) + (1,) * len(shape.dimensions))
    return np.broadcast_to(rows, (rows.shape[0],) + shape.dimensions)


def evaluate(
    instruction: Instruction,
    operands: Sequence[ranges.Exact],
    shapes: Sequence[Shape],
    device_count: int,
) -> tuple[np.ndarray, bool] | None:
    """Compute an instruction's rows from its operands' and say whether each row is one number.

    Returns None where the result is not certain, or too large to keep.
    """
    with np.errstate(all="ignore"):
        found = _evaluate(instruction, operands, shapes)
    if found is None:
        return None
    rows, splat = found
    if rows.size > ranges.MAX_ELEMENTS * 8 and rows.shape[0] > 1 and not splat:
        return None
    kind = dtype(instruction.shape)
    if rows is None or kind is None or rows.dtype != kind:
        return None
    return rows, splat


def _evaluate(instruction, operands, shapes):
    opcode, shape = instruction.opcode, instruction.shape
    kind = dtype(shape)
    if kind is None:
        return None
    if opcode in _BINARY or opcode in _UNARY or opcode in ("compare", "select", "clamp", "convert"):
        return _elementwise(instruction, operands, shapes)
    value = operands[0]
    if opcode in ("reshape", "bitcast"):
        if opcode == "bitcast" and (
            kind != dtype(shapes[0])
            or not (
                shape.is_row_major
                and shapes[0].is_row_major
                or shape.dimensions == shapes[0].dimensions
            )
        ):
            return None
        if value.splat:
            return value.array, True
        return value.array.reshape((-1,) + shape.dimensions), False
    if opcode == "broadcast":
        if value.splat or not shapes[0].dimensions:
            return value.array.reshape(-1), True
        places = ranges.read_ints(instruction.attribute("dimensions"))
        if shape.element_count > ranges.MAX_ELEMENTS or len(places) != len(shapes[0].dimensions):
            return None
        sizes = [1] * len(shape.dimensions)
        for place, size in zip(places, shapes[0].dimensions):
            sizes[place] = size
        rows = value.array.reshape([-1] + sizes)
        return np.broadcast_to(rows, (rows.shape[0],) + shape.dimensions), False
    if opcode == "slice":
        cuts = ranges.read_slice(instruction.attribute("slice") or "", shapes[0])
        if cuts is None:
            return None
        if value.splat:
            return value.array, True
        return value.array[(slice(None),) + tuple(slice(*c) for c in cuts)], False
    if opcode == "dynamic-slice":
        return _dynamic_slice(instruction, operands, shapes)
    if opcode == "concatenate":
        places = ranges.read_ints(instruction.attribute("dimensions"))
        if len(places) != 1 or shape.element_count > ranges.MAX_ELEMENTS:
            return None
        parts = [_full(v, s) for v, s in zip(operands, shapes)]
        rows = max(p.shape[0] for p in parts)
        parts = [np.broadcast_to(p, (rows,) + p.shape[1:]) for p in parts]
        return np.concatenate(parts, axis=places[0] + 1), False
    return None


def _elementwise(instruction, operands, shapes):
    opcode, shape = instruction.opcode, instruction.shape
    scalars = all(v.splat or not s.dimensions for v, s in zip(operands, shapes))
    if scalars:
        arrays = [v.array.reshape(-1) for v in operands]
    else:
        arrays = []
        for value, own in zip(operands, shapes):
            full = _full(value, own)
            if full is None:
                return None
            if not own.dimensions:  # a scalar predicate or bound
                full = full.reshape((-1,) + (1,) * len(shape.dimensions))
            arrays.append(full)
    result = None
    if opcode in _BINARY and len(arrays) == 2 and arrays[0].dtype == arrays[1].dtype:
        result = _BINARY[opcode](*arrays)
    elif opcode in _UNARY and len(arrays) == 1:
        result = _UNARY[opcode](*arrays)
    elif opcode == "compare" and len(arrays) == 2 and arrays[0].dtype == arrays[1].dtype:
        direction = instruction.attribute("direction")
        result = _COMPARE[direction](*arrays) if direction in _COMPARE else None
    elif opcode == "select" and len(arrays) == 3 and arrays[0].dtype == np.bool_:
        result = np.where(*arrays)
    elif opcode == "clamp" and len(arrays) == 3:
        result = np.minimum(np.maximum(arrays[1], arrays[0]), arrays[2])
    elif opcode == "convert" and len(arrays) == 1:
        kind = dtype(shape)
        result = arrays[0] != 0 if kind == np.bool_ else arrays[0].astype(kind)
    if result is None:
        return None
    if scalars:
        if not shape.dimensions:
            return result.reshape(-1), False
        return result, True
    return result, False


def _dynamic_slice(instruction, operands, shapes):
    value, indices = operands[0], operands[1:]
    sizes = ranges.read_ints(instruction.attribute("dynamic_slice_sizes"))
    dims = shapes[0].dimensions
    if (
        len(sizes) != len(dims)
        or len(indices) != len(dims)
        or any(s > d for s, d in zip(sizes, dims))
    ):
        return None
    if value.splat:
        return value.array, True
    rows = max([value.array.shape[0]] + [i.array.shape[0] for i in indices])
    starts = (
        np.stack(
            [np.broadcast_to(i.array.reshape(-1).astype(np.int64), (rows,)) for i in indices],
            axis=1,
        )
        if indices
        else np.zeros((rows, 0), np.int64)
    )
    limit = np.array([d - s for d, s in zip(dims, sizes)], dtype=np.int64)
    starts = np.clip(starts, 0, limit)
    source = np.broadcast_to(value.array, (rows,) + dims)
    found = np.empty((rows,) + tuple(sizes), value.array.dtype)
    for row in range(rows):
        found[row] = source[(row,) + tuple(slice(a, a + s) for a, s in zip(starts[row], sizes))]
    return found, False
