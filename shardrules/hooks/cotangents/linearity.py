"""Prove that a jaxpr is linear and how far it rounds, through loops, refs and Pallas kernels.

tests/hooks/cotangents/test_rows.py runs a program for the claim of each row.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import jax

from shardrules.door.internals import load
from shardrules.door.jaxprs import (
    CASTS,
    CUSTOM_CALLS,
    KERNELS,
    READS,
    SUMS,
    inner_jaxprs,
    is_inexact,
    name_of,
    opened,
)
from shardrules.door.protocols import Eqn, Jaxpr, Params, Primitive, Var
from shardrules.hooks.types.owners import is_users
from shardrules.jaxprs.fold import NESTED, Cell, Fold, TooLong
from shardrules.jaxprs.walk import equations, is_same_program

# How a value depends on the inputs: it is zero; not at all; linearly; in an unknown way.
ZERO, FIXED, LINEAR, UNKNOWN = "zero", "fixed", "linear", "unknown"
_KNOWN = frozenset({ZERO, FIXED})

# Primitives that only read and store, and those that copy, by their names in JAX 0.6 to 0.12.
_STORES = READS | set("swap addupdate masked_swap".split())
_COPIES = frozenset("dma_start dma_wait".split())

# The effects of callbacks, prints, foreign calls and checkify's checks, by the names of JAX 0.4 to
# 0.12.
_SHOWING = frozenset(
    "DebugEffect OrderedDebugEffect IOEffect OrderedIOEffect BufferCallbackEffect FfiEffect "
    "PrintEffect ErrorEffect".split()
)

# How deeply nested fwds and rules are read.
_MOST_RULES = 4

# Primitives of which no result is linear in any operand that depends on the inputs.
CURVED = frozenset(
    "abs acos acosh argmax argmin asin asinh atan atan2 atanh cbrt ceil clamp cos cosh "
    "cumlogsumexp cummax cummin cumprod digamma eq erf erf_inv erfc exp exp2 expm1 floor ge gt "
    "integer_pow is_finite le lgamma log log1p logistic lt max min ne pow reduce_max reduce_min "
    "reduce_prod rem round rsqrt sign sin sinh sort sqrt square tan tanh".split()
)

# Primitives that are linear in both operands together, or in one if the other one is fixed.
AFFINE = frozenset("add add_any sub".split())
_PRODUCTS = frozenset("mul div dot_general conv_general_dilated".split())
_STEPS = CURVED | AFFINE | _PRODUCTS

Precision = tuple[int, int]  # bits of the mantissa and of the exponent


def precision(dtype: Any) -> Precision:
    kind = jax.numpy.finfo(dtype)
    return kind.nmant, kind.nexp


# A value times a power of two is as exact as the value, unless its exponent doesn't fit. In types
# with fewer exponent bits than float32, a share may underflow, or the sum of the shares overflow.
_EXPONENT_BITS = 8
_WIDE = "float32 float64 complex64 complex128 bfloat16".split()
WIDE = frozenset({*map(jax.numpy.dtype, _WIDE), jax.dtypes.float0})  # float0: integers' tangents


def is_narrow(a: Precision) -> bool:
    """Return whether a share or the sum may be out of a type's range when the other isn't."""
    return a[1] < _EXPONENT_BITS


def is_less(a: Precision, b: Precision) -> bool:
    return a[0] < b[0] or a[1] < b[1]


def rounded_to(eqn: Eqn) -> Precision | None:
    """Return the precision to which an equation rounds values without changing their dtype."""
    name, params = name_of(eqn), eqn.params
    if name == "reduce_precision":
        return params["mantissa_bits"], params["exponent_bits"]
    if name == "dot_general":
        to = _algorithm(params.get("precision"))
        if to is not None and any(
            is_less(to, precision(v.aval.dtype)) for v in eqn.invars if is_inexact(v.aval)
        ):
            return to
    return None


def _algorithm(asked: Any) -> Precision | None:
    """Return the precision to which a dot's algorithm rounds operands; None if there is none."""
    named = getattr(asked, "name", "")  # a DotAlgorithmPreset's, such as "BF16_BF16_F32"
    if hasattr(asked, "num_primitive_operations") and not named:  # a jax.lax.DotAlgorithm
        kinds = asked.lhs_precision_type, asked.rhs_precision_type, asked.accumulation_type
        bits = [precision(jax.numpy.dtype(kind)) for kind in kinds]
        return min(b[0] for b in bits), min(b[1] for b in bits)
    if named.endswith(("_X3", "_X6", "_X9")):  # a sum of that many products
        return {"BF16_BF16_F32_X3": (15, 8)}.get(named)
    return {"ANY": (2, 4), "F16": (10, 5), "BF16": (7, 8), "TF32": (10, 8)}.get(named.split("_")[0])


class LinearityProof(NamedTuple):
    """Facts about how a jaxpr's outputs depend on some of its inputs."""

    # If it is linear in the inputs, the mesh axes that it sums over; else None. Over these axes,
    # the sum of the devices' results is not the result for the sum of the inputs.
    summed: frozenset[str] | None
    summed_of_others: frozenset[str]  # the axes of sums of values that don't depend on the inputs
    rounds: bool  # whether a value that depends on the inputs is less precise than both ends
    is_narrow: bool  # whether a value that depends on the inputs has a narrow range
    shows: bool = False  # whether the host or a foreign call sees a value that depends on them
    # The names of JAX's primitives that make something of a linear value that isn't linear or is
    # affine. Empty if nothing does, or if the only such steps can't be read.
    steps: tuple[str, ...] = ()
    depends: bool = True  # whether an output depends on the inputs at all


def linearity(jaxpr: Jaxpr, inputs: Sequence[Any], kernels: bool = False) -> LinearityProof:
    """Prove that a jaxpr is linear in ``inputs`` together, or not.

    With ``kernels``, Pallas kernels are read, and collectives may move the inputs. If outputs
    differ in precision, pass a jaxpr for each, since the widest output decides what rounds.
    """
    fold = Linearity(kernels)
    given = {v: LINEAR if v in inputs else FIXED for v in jaxpr.invars}
    of_outputs = _most(jaxpr.outvars)
    try:
        results = fold.run(jaxpr, [*given.values()])
        # A value that is as precise as one input may be less precise than another input, and round
        # it. So follow the inputs of each precision separately, with the others zero.
        alike: dict[Precision, list[Any]] = {}
        for v in inputs:
            if is_inexact(v.aval):
                alike.setdefault(precision(v.aval.dtype), []).append(v)
        folds = [fold]
        if len(alike) > 1:
            folds = [Linearity(kernels) for _ in alike]
            for each, some in zip(folds, alike.values()):
                others = dict.fromkeys(set(inputs) - set(some), ZERO)
                each.run(jaxpr, [*(given | others).values()])
    except TooLong:
        return LinearityProof(None, frozenset(), True, True, True)
    is_linear = {LINEAR, ZERO}.issuperset(results)
    rounds = False
    for each, of_inputs in zip(folds, alike or [of_outputs]):
        least = min(of_inputs[0], of_outputs[0]), min(of_inputs[1], of_outputs[1])
        rounds |= any(is_less(bits, least) for bits in each.precisions)
    return LinearityProof(
        frozenset(fold.summed) if is_linear else None,
        frozenset(fold.summed_of_others),
        rounds,
        any(map(is_narrow, fold.precisions)),
        fold.shows,
        tuple(sorted(fold.steps)),
        not _KNOWN.issuperset(results),
    )


def _most(atoms: Sequence[Any]) -> Precision:
    """Return the most bits, of mantissa and exponent, that any of these atoms has."""
    kept = [precision(atom.aval.dtype) for atom in atoms if is_inexact(atom.aval)]
    return max((p[0] for p in kept), default=0), max((p[1] for p in kept), default=0)


Row = Callable[["Linearity", Any, list[str]], str]
ROWS: dict[str, Row] = {}


class Linearity(Fold[str]):
    # A value is ZERO, FIXED, LINEAR or UNKNOWN. ``ROWS`` says what each primitive makes of its
    # operands' values; a primitive without a row makes UNKNOWN, unless no operand depends on the
    # inputs.

    bottom = ZERO

    def __init__(self, kernels: bool):
        super().__init__()
        self.reads_kernels = kernels
        self.summed: set[str] = set()
        self.summed_of_others: set[str] = set()
        self.precisions: set[Precision] = set()  # those of all values that depend on the inputs
        self.shows = False
        self.steps: set[str] = set()
        self._rules: dict[Any, Any] = {}  # the rules of custom_vjps and custom_jvps, by place
        self._reading: list[Any] = []  # the jaxprs of the rules that are being read

    def literal(self, value: Any) -> str:
        return ZERO if getattr(value, "size", 1) == 1 and value == 0 else FIXED

    def constant(self, var: Var) -> str:
        return FIXED

    def join(self, values: Iterable[str]) -> str:
        kinds = set(values) - {ZERO}
        return functools.reduce(lambda a, b: a if a == b else UNKNOWN, kinds) if kinds else ZERO

    def chosen(self, by: str, value: str) -> str:
        return value if by in _KNOWN else UNKNOWN

    def equation(self, eqn: Eqn, operands: list[Any]) -> Sequence[Any]:
        self.shows |= _shows(eqn, [*map(self.content, operands)])
        results = super().equation(eqn, operands)
        if name_of(eqn) in CUSTOM_CALLS and not _KNOWN.issuperset(map(self.content, operands)):
            results = [
                self.join(pair) for pair in zip(results, self._differentiated(eqn, operands))
            ]
        for var, result in zip(eqn.outvars, results):
            if result in (LINEAR, UNKNOWN) and is_inexact(var.aval):
                self.precisions.add(precision(var.aval.dtype))
        return results

    def _differentiated(self, eqn: Eqn, operands: list[Any]) -> Sequence[str]:
        """Return a custom_vjp's or custom_jvp's results in a derivative of this program.

        The derivative runs the author's fwd or rule instead, which may return something else.
        """
        unknown = [UNKNOWN] * len(eqn.outvars)
        if any(isinstance(operand, Cell) for operand in operands):
            return unknown
        key = (*self.place, id(eqn))
        if key not in self._rules:
            self._rules[key] = ruled(eqn)
        found = self._rules[key]
        if found is None:
            return unknown
        jaxpr, tangent_count, results = found
        if any(is_same_program(jaxpr, around) for around in self._reading):
            # The rule calls itself, so it is linear if all its other steps are.
            return [ZERO] * len(eqn.outvars)
        if len(self._reading) > _MOST_RULES:
            return unknown
        given = [*operands[eqn.params["num_consts"] :], *[ZERO] * tangent_count]
        # Since JAX 0.11, the constants are leading inputs.
        constants = [FIXED] * (len(jaxpr.invars) - len(given))
        self._reading.append(jaxpr)
        made: list[str] = self.inside(eqn, jaxpr, [*constants, *given], at=1)
        self._reading.pop()
        return [*made[results]]

    def finished(self, jaxpr: Jaxpr, read: Callable[[Any], str]) -> None:
        if not self.place:  # outermost: the caller can read what was written to its refs
            refs = (var for var in jaxpr.invars if hasattr(var.aval, "inner_aval"))
            self.shows |= any(self.content(read(var)) not in _KNOWN for var in refs)

    def other(self, eqn: Eqn, name: str, operands: list[str]) -> Sequence[str]:
        return [self._result(eqn, name, operands)] * len(eqn.outvars)

    def _result(self, eqn: Eqn, name: str, given: list[str]) -> str:
        users = _is_users(eqn.primitive)
        row = None if users else ROWS.get(name)
        if _KNOWN.issuperset(given):
            inner = () if name in KERNELS else inner_jaxprs(eqn.params)
            for other in (eqn, *(e for jaxpr in inner for e in equations(jaxpr))):
                self.summed_of_others |= strings(other.params) if name_of(other) in SUMS else set()
            if row is _bilinear and ZERO in given:
                return ZERO
            keeps_zero = row in (_together, _cast, _sum, _converted) and not _applies(eqn)
            return ZERO if keeps_zero and set(given) == {ZERO} else FIXED
        if row is None:
            self._note_inside(eqn)
            result = UNKNOWN
        else:
            result = row(self, eqn, given)
        # An operand that is unknown may have become so by a step that can't be read.
        if result == UNKNOWN and UNKNOWN not in given and name in _STEPS and not users:
            self.steps.add(name)
        return result

    def _note_inside(self, eqn: Eqn) -> None:
        """Record that every value inside an equation may depend on the inputs."""
        for jaxpr in inner_jaxprs(eqn.params):
            for other in equations(jaxpr, kernels=True):
                self._note_rounding(other)
                for var in other.outvars:
                    if is_inexact(var.aval):
                        self.precisions.add(precision(var.aval.dtype))

    def _note_rounding(self, eqn: Eqn) -> None:
        to = rounded_to(eqn)
        if to is not None:
            self.precisions.add(to)

    def on_refs(self, eqn: Eqn, name: str, operands: list[Any]) -> Sequence[str]:
        data: list[str] = []
        positions: list[str] = []
        cells = [kind for kind in operands if isinstance(kind, Cell)]
        for atom, kind in zip(eqn.invars, operands):
            if not isinstance(kind, Cell):
                (data if is_inexact(atom.aval) else positions).append(kind)
        if "semaphore" in name:
            return [FIXED] * len(eqn.outvars)
        known = name in _STORES or name in _COPIES
        if name == "atomic_rmw":
            known = getattr(eqn.params["atomic_type"], "value", None) == "add"
        if not is_inexact(eqn.invars[0].aval):  # a ref of integers: other integers may be its data
            data, positions = [*data, *positions], []
        known &= not _reinterprets(eqn)
        if not known:
            self._note_inside(eqn)
        if not known or not _KNOWN.issuperset(positions):
            data.append(UNKNOWN)
        if name not in READS:
            kind = self.join([*data, *(cell.value for cell in cells if name in _COPIES)])
            for cell in cells:
                self.store(cell, kind)
        return [self.join([*data, *(cell.value for cell in cells)])] * len(eqn.outvars)


def _reinterprets(eqn: Eqn) -> bool:
    """Return whether a ref's bits are read or written as another type (``bitcast``)."""
    if name_of(eqn) in _COPIES:
        moved = [v.aval for v in eqn.invars if hasattr(v.aval, "inner_aval") and is_inexact(v.aval)]
    else:
        moved = [eqn.invars[0].aval, *(v.aval for v in eqn.outvars or eqn.invars[1:2])]
    return len({aval.dtype for aval in moved if hasattr(aval, "dtype")}) > 1


def _shows(eqn: Eqn, operands: Sequence[str]) -> bool:
    """Return whether the host sees operands that depend on the inputs, or whether they hold."""
    if _SHOWING.isdisjoint(type(effect).__name__ for effect in eqn.effects):
        return False
    # Inner equations of a call are tested themselves. A predicate or a loop decides whether they
    # run.
    if name_of(eqn) == "cond":
        operands = operands[:1]
    elif name_of(eqn) in NESTED - {"while"}:
        return False
    return not _KNOWN.issuperset(operands)


@functools.cache
def _is_users(primitive: Primitive) -> bool:
    """Return whether a primitive isn't JAX's own, even if it has the name of one that is."""
    return is_users(load(), primitive)


def ruled(eqn: Eqn) -> tuple[Any, int, slice] | None:
    """Trace a custom_vjp's fwd, or a custom_jvp's rule; return None if that fails.

    Returns the jaxpr, the number of tangents that it takes after the primals, and which of its
    results are primal.
    """
    params, count = eqn.params, len(eqn.outvars)
    if params.get("symbolic_zeros"):  # its results may depend on what is differentiated
        return None
    given = eqn.invars[params["num_consts"] :]
    is_fwd = "fwd_jaxpr_thunk" in params
    zeros = [not is_inexact(atom.aval) for atom in given]  # which tangents are zero
    rule: Any = params.get("jvp_jaxpr_fun", params.get("jvp_jaxpr_thunk"))
    rule, marks = (params["fwd_jaxpr_thunk"], [True] * len(given)) if is_fwd else (rule, zeros)
    try:
        jaxpr, consts = getattr(rule, "call_wrapped", rule)(*marks)[:2]
    except Exception:  # it may need a trace that has ended  # noqa: BLE001
        return None
    if any(isinstance(const, jax.core.Tracer) for const in consts):
        return None
    results = slice(len(jaxpr.outvars) - count, None) if is_fwd else slice(count)
    return jaxpr, 0 if is_fwd else zeros.count(False), results


def _rows(names: str) -> Callable[[Row], Row]:
    def note(row: Row) -> Row:
        ROWS.update(dict.fromkeys(names.split(), row))
        return row

    return note


@_rows(
    "add_any sub add neg reduce_sum broadcast_in_dim reshape transpose squeeze slice concatenate "
    "copy rev cumsum real imag reduce_precision pad split stack unstack tile "
    "dynamic_update_slice scatter scatter-add reduce_window_sum roll repeat name "
    "with_memory_space_constraint sharding_constraint layout_constraint"
)
def _together(fold: Linearity, eqn: Eqn, given: list[str]) -> str:
    """Judge an equation that is linear in all float operands together; others are positions."""
    if _applies(eqn):
        fold._note_inside(eqn)
        return UNKNOWN
    fold._note_rounding(eqn)
    kinds = zip(given, (is_inexact(atom.aval) for atom in eqn.invars))
    data: list[str] = []
    for kind, is_data in kinds:
        if is_data:
            data.append(kind)
        elif kind not in _KNOWN:
            return UNKNOWN
    return fold.join(data)


def _applies(eqn: Eqn) -> bool:
    """Return whether a scatter applies the program's function (``x.at[i].apply(f)``)."""
    update = opened(eqn.params.get("update_jaxpr"))
    if update is None or name_of(eqn) != "scatter":
        return False
    # A function that returns a constant, such as ``lambda z: 2.0``, has no equations, but is
    # affine.
    given = {id(var) for var in update.invars}
    return any(equations(update)) or any(id(var) not in given for var in update.outvars)


@_rows(" ".join(CASTS))
def _cast(fold: Linearity, eqn: Eqn, given: list[str]) -> str:
    return _together(fold, eqn, given)


@_rows(" ".join(SUMS))
def _sum(fold: Linearity, eqn: Eqn, given: list[str]) -> str:
    if eqn.params.get("axis_index_groups"):
        return UNKNOWN
    fold.summed |= strings(eqn.params)
    return fold.join(given)


@_rows("ppermute all_gather all_gather_invariant all_to_all reduce_scatter")
def _moved(fold: Linearity, eqn: Eqn, given: list[str]) -> str:
    """Judge a linear collective that moves data; unknown unless such moves are allowed."""
    if not fold.reads_kernels:
        return UNKNOWN
    fold.summed |= strings(eqn.params)
    return fold.join(given)


@_rows("mul dot_general conv_general_dilated")
def _bilinear(fold: Linearity, eqn: Eqn, given: list[str]) -> str:
    """Judge an equation that is linear in either operand if the other one is fixed."""
    if ZERO in given:
        return ZERO
    fold._note_rounding(eqn)
    return LINEAR if sorted(given) == [FIXED, LINEAR] else UNKNOWN


@_rows("div dynamic_slice gather")
def _in_first(fold: Linearity, eqn: Eqn, given: list[str]) -> str:
    if eqn.params.get("fill_value") not in (None, 0):  # a gather that fills in another number
        return UNKNOWN
    return given[0] if _KNOWN.issuperset(given[1:]) else UNKNOWN


@_rows("triangular_solve")
def _in_second(fold: Linearity, eqn: Eqn, given: list[str]) -> str:
    return given[1] if given[0] in _KNOWN else UNKNOWN


@_rows("convert_element_type")
def _converted(fold: Linearity, eqn: Eqn, given: list[str]) -> str:
    ends = (eqn.invars[0].aval, eqn.outvars[0].aval)
    return given[0] if all(is_inexact(a) and a.dtype.itemsize > 1 for a in ends) else UNKNOWN


@_rows("select_n")
def _selected(fold: Linearity, eqn: Eqn, given: list[str]) -> str:
    return fold.join(given[1:]) if given[0] in _KNOWN else UNKNOWN


def strings(params: Params) -> frozenset[str]:
    """Return all strings in an equation's parameters, which include its mesh axes."""
    names: set[str] = set()
    queue = list(params.values())
    while queue:
        value = queue.pop()
        if isinstance(value, str):
            names.add(value)
        elif isinstance(value, (tuple, list, set, frozenset)):
            queue += value
    return frozenset(names)
