"""Evaluate small integers and booleans exactly, for every device at once.

``axis_index`` is arithmetic on ``partition-id``, or a look-up in a constant table. An uncertain
result (a division by zero, a shift by too much, sizes that don't fit) gives None; the proof then
treats the value as an ordinary function of its operands.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from shardrules.hlo.known import ranges
from shardrules.hlo.reader.module import Instruction, Shape

_TYPES: dict[str, type] = {
    "pred": np.bool_,
    **{f"s{bits}": np.dtype(f"int{bits}").type for bits in (8, 16, 32, 64)},
    **{f"u{bits}": np.dtype(f"uint{bits}").type for bits in (8, 16, 32, 64)},
}
_BOOLEANS = {"false": 0, "true": 1}
# The smallest and the largest number of each type, computed once because numpy's iinfo is slow.
_LIMITS: dict[np.dtype[Any], tuple[int, int]] = {
    np.dtype(kind): (int(np.iinfo(kind).min), int(np.iinfo(kind).max))
    for kind in _TYPES.values()
    if kind is not np.bool_
}
_LIMITS[np.dtype(np.bool_)] = (0, 1)
_INT32 = _LIMITS[np.dtype(np.int32)]
# A value's numbers: one row per device, or one row for all devices.
_Rows = np.ndarray
_Operation = Callable[..., _Rows | None]
_MOST = 8 * ranges.MAX_ELEMENTS  # limit on a result's elements, counted over all devices


def dtype(shape: Shape) -> type | None:
    """Return the numpy type of an integer or boolean array; None for any other shape."""
    if shape.elements is not None or shape.dynamic or shape.element_type not in _TYPES:
        return None
    if len(shape.dimensions) >= 32:  # numpy 1 allows 32 dimensions, and one is for devices
        return None
    return _TYPES[shape.element_type]


def literal(text: str, shape: Shape) -> _Rows | None:
    """Read an integer constant's text as one row; None if it is too large or not printed."""
    kind = dtype(shape)
    if kind is None or shape.element_count > ranges.MAX_ELEMENTS:
        return None
    # XLA prints a large constant as '{...}', without its value.
    words = re.findall(r"[^\s{},]+", re.sub(r"/\*.*?\*/", "", text))
    if len(words) != shape.element_count:
        return None
    if not all(word in _BOOLEANS or re.fullmatch(r"-?\d{1,24}", word) for word in words):
        return None
    numbers = [_BOOLEANS[word] if word in _BOOLEANS else int(word) for word in words]
    low, high = _LIMITS[np.dtype(kind)]
    if any(not low <= n <= high for n in numbers):
        return None
    return np.array(numbers, dtype=kind).reshape((1,) + shape.dimensions)


def _remainder(a: _Rows, b: _Rows) -> _Rows | None:
    """Return the remainder of truncated division, which has the dividend's sign, as in C."""
    if (b == 0).any():
        return None
    if a.dtype.kind == "i" and (a == _LIMITS[a.dtype][0]).any():
        return None  # the lowest number divided by -1 overflows
    rest: _Rows = np.fmod(a, b)
    return rest


def _divide(a: _Rows, b: _Rows) -> _Rows | None:
    rest = _remainder(a, b)
    return None if rest is None else (a - rest) // b


def _shift(op: Callable[..., _Rows], arithmetic: bool = False) -> _Operation:
    """Return a function that shifts rows; it gives None for a distance beyond the type's width."""

    def shift(a: _Rows, b: _Rows) -> _Rows | None:
        width = a.dtype.itemsize * 8
        # Compare in b's own type: an unsigned 64-bit number doesn't fit a signed one.
        if a.dtype == np.bool_ or (b < 0).any() or (b >= width).any():
            return None
        view = a.view(
            a.dtype.str.replace("u", "i") if arithmetic else a.dtype.str.replace("i", "u")
        )
        shifted: _Rows = op(view, b.astype(view.dtype))
        return shifted.view(a.dtype)

    return shift


def _logic(bits: _Operation, booleans: _Operation) -> _Operation:
    """Return the operation that treats integers bit by bit and booleans as truth values."""
    return lambda *a: booleans(*a) if a[0].dtype == np.bool_ else bits(*a)


def _select(predicate: _Rows, a: _Rows, b: _Rows) -> _Rows | None:
    return np.where(predicate, a, b) if predicate.dtype == np.bool_ else None


def _no_bool(op: _Operation) -> _Operation:
    """Return the operation for integers only; it gives None for booleans."""
    return lambda *a: None if a[0].dtype == np.bool_ else op(*a)


_OPERATIONS: dict[str, _Operation] = {
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
    "negate": _no_bool(np.negative),
    "not": _logic(np.invert, np.logical_not),
    "abs": _no_bool(np.abs),
    "sign": _no_bool(np.sign),
    "copy": lambda a: a,
    "select": _select,
    "clamp": lambda low, a, high: np.minimum(np.maximum(a, low), high),
}
_COUNTS = {**dict.fromkeys("negate not abs sign copy convert".split(), 1), "select": 3, "clamp": 3}
_COMPARE = {
    "EQ": np.equal,
    "NE": np.not_equal,
    "LT": np.less,
    "LE": np.less_equal,
    "GT": np.greater,
    "GE": np.greater_equal,
}
_ELEMENTWISE = frozenset([*_OPERATIONS, "compare", "convert"])
OPCODES = _ELEMENTWISE | frozenset(
    "reshape bitcast broadcast slice dynamic-slice concatenate".split()
)


def evaluate(
    instruction: Instruction, arrays: Sequence[np.ndarray], shapes: Sequence[Shape]
) -> np.ndarray | None:
    """Return an instruction's rows, computed from its operands' rows; None if not certain."""
    shape, kind = instruction.shape, dtype(instruction.shape)
    if kind is None or 0 in shape.dimensions:
        return None
    spread, devices = instruction.opcode == "concatenate", 1
    for rows, own in zip(arrays, shapes):
        # In damaged text, arguments may have other shapes than the parameters.
        if 0 in own.dimensions or not _fits(rows, own):
            return None
        spread = spread or rows[0].size > 1
        devices = max(devices, len(rows))
    # Check the size first: the rows of many devices may exceed the machine's memory.
    if spread and shape.element_count * max(devices, 8) > _MOST:
        return None
    compute = _elementwise if instruction.opcode in _ELEMENTWISE else _moved
    with np.errstate(all="ignore"):
        try:
            result = compute(instruction, arrays, shapes)
        except (ValueError, IndexError):  # sizes that don't fit
            return None
    if result is None or result.dtype != kind or not _fits(result, shape):
        return None
    return result


def _ones(shape: Shape) -> tuple[int, ...]:
    """Return the shape of rows that store one number each, for a value whose elements are equal."""
    return (-1,) + (1,) * len(shape.dimensions)


def _fits(rows: np.ndarray, shape: Shape) -> bool:
    """Return whether each row has the shape's dimensions, or one number for all elements."""
    return rows.shape[1:] == shape.dimensions or rows.shape[1:] == _ones(shape)[1:]


def _elementwise(
    instruction: Instruction, arrays: Sequence[_Rows], shapes: Sequence[Shape]
) -> _Rows | None:
    opcode, shape = instruction.opcode, instruction.shape
    if any(s.dimensions not in ((), shape.dimensions) for s in shapes):
        return None
    if shape.dimensions:  # select's predicate and clamp's bounds may be scalars
        ones = _ones(shape)
        arrays = [rows if s.dimensions else rows.reshape(ones) for rows, s in zip(arrays, shapes)]
    alike = len({rows.dtype for rows in arrays[opcode == "select" :]}) == 1
    if not alike or len(arrays) != _COUNTS.get(opcode, 2):
        return None
    if opcode == "compare":
        # XLA omits the comparison's type if it is the default for the operands' type.
        own = "SIGNED" if arrays[0].dtype.kind == "i" else "UNSIGNED"
        direction = instruction.attribute("direction")
        if instruction.attribute("type") not in (None, own) or direction not in _COMPARE:
            return None
        compared: _Rows = _COMPARE[direction](*arrays)
        return compared
    if opcode == "convert":
        kind = dtype(shape)
        return arrays[0].astype(kind)
    return _OPERATIONS[opcode](*arrays)


def _moved(
    instruction: Instruction, arrays: Sequence[_Rows], shapes: Sequence[Shape]
) -> _Rows | None:
    """Return the rows of an operation that moves or copies elements without changing them."""
    opcode, shape, rows = instruction.opcode, instruction.shape, arrays[0]
    places = ranges.read_ints(instruction.attribute("dimensions"))
    if opcode == "concatenate":
        (along,) = places
        if along < 0 or sum(s.element_count for s in shapes) != shape.element_count:
            return None
        count = max(map(len, arrays))
        parts = [np.broadcast_to(a, (count, *s.dimensions)) for a, s in zip(arrays, shapes)]
        return np.concatenate(parts, axis=along + 1)
    own = shapes[0].dimensions
    if opcode in ("reshape", "bitcast"):
        same = shape.element_count == shapes[0].element_count
        if not same or (opcode == "bitcast" and not ranges.keeps_order(shapes[0], shape)):
            return None
        return rows.reshape(_ones(shape) if rows[0].size == 1 else (-1,) + shape.dimensions)
    if opcode == "broadcast":
        if len(set(places)) != len(own) or any(
            shape.dimensions[p] != n for p, n in zip(places, own)
        ):
            return None
    elif shape.element_count > shapes[0].element_count:
        return None
    if rows[0].size == 1:
        return rows.reshape(_ones(shape))
    if opcode == "slice":
        cuts = ranges.read_slice(instruction.attribute("slice") or "", shapes[0])
        return rows[(slice(None), *(slice(*c) for c in cuts))] if cuts else None
    if opcode == "dynamic-slice":
        sizes = ranges.read_ints(instruction.attribute("dynamic_slice_sizes"))
        return _dynamic_slice(rows, arrays[1:], own, sizes)
    # A broadcast: operand dimension k becomes result dimension places[k]. First transpose the
    # operand so that the places ascend, then insert dimensions of size 1, then repeat elements.
    order = sorted(range(len(own)), key=lambda k: places[k])
    sizes = [1] * len(shape.dimensions)
    for place, size in zip(places, own):
        sizes[place] = size
    rows = rows.transpose([0] + [k + 1 for k in order]).reshape([-1] + sizes)
    return np.broadcast_to(rows, (rows.shape[0],) + shape.dimensions)


def clamped_index(rows: np.ndarray, last: int) -> np.ndarray | None:
    """Return each device's slice start, clamped to 0 and ``last``; None if it isn't certain."""
    # Backends truncate an index to their own width before they clamp it: a number beyond 32 signed
    # bits may change, and an unsigned number with its highest bit set may become negative.
    kind = rows.dtype.kind
    if kind == "b" or rows[0].size != 1 or not 0 <= last < 2**31:
        return None
    rows = rows.reshape(-1)
    largest = _LIMITS[rows.dtype][1]
    most = min(_INT32[1], largest >> 1 if kind == "u" else largest)
    if len(rows) == 1:  # the common case, in which numpy takes ten times as long
        number = int(rows[0])
        low, high = number, number
    else:
        low, high = int(rows.min()), int(rows.max())
    if high > most or low < _INT32[0]:
        return None
    if len(rows) == 1:
        return np.array([min(max(number, 0), last)], np.int64)
    return np.clip(rows.astype(np.int64), 0, last)


def _dynamic_slice(
    rows: _Rows, indices: Sequence[_Rows], dims: Sequence[int], sizes: Sequence[int]
) -> _Rows | None:
    """Return each device's block, cut at that device's own start."""
    if not len(sizes) == len(indices) == len(dims):
        return None
    count = max(map(len, (rows, *indices)))
    starts = np.zeros((count, len(dims)), np.int64)
    for k, index in enumerate(indices):
        clamped = clamped_index(index, dims[k] - sizes[k])
        if clamped is None:
            return None
        starts[:, k] = clamped
    source = np.broadcast_to(rows, (count, *dims))
    block = np.empty((count, *sizes), rows.dtype)
    for row in range(count):
        block[row] = source[row][tuple(slice(a, a + s) for a, s in zip(starts[row], sizes))]
    return block
