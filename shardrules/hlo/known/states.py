"""The state of one value: the devices on which it is equal, why it differs, and the evidence.

States are interned: a state is a small integer, and combining two states is a dictionary look-up.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any, NamedTuple, TypeVar

from shardrules import errors
from shardrules.hlo.reader import devices as hd
from shardrules.hlo.reader import module as hm

_T = TypeVar("_T")
_KEEP = 8  # the most blockers that a state lists


class Cause(NamedTuple):
    """Why a value differs between devices."""

    what: str  # the thing that differs, ``"parameter 0 ('x')"``
    how: str  # ``"is sharded"``; messages add the axes if these are known
    detail: str = ""  # ``"as {devices=...}"``; messages add it if the axes are not known


UNSHARDED = "no sharding in the text"  # why a parameter blocks the proof
_NAMED = 2  # the most parameters without a sharding that a message names


class Blocker(NamedTuple):
    """An opaque call or a construct that the proof does not understand.

    Attributes:
      what: a description for messages, ``"custom call 'tpu_custom_call' (kernel 'f')"``.
      kernel: the kernel's name to register; None if this is not a kernel.
      target: the custom call's target; None if this is not a custom call.
      where: an op_name and a source line, if the text has them.
    """

    what: str
    kernel: str | None = None
    target: str | None = None
    where: str = ""

    def __str__(self) -> str:
        return f"{self.what} at {self.where}" if self.where else self.what


def listed(blockers: Iterable[Blocker]) -> str:
    """Return the blockers as one text, with all parameters that lack a sharding in one entry."""
    end = f" has {UNSHARDED}"
    said = [*map(str, blockers)]
    names = [text.removeprefix("parameter ").removesuffix(end) for text in said if end in text]
    if names[1:]:
        whose = f"parameters {errors.few(names, _NAMED)} have {UNSHARDED}"
        said = [whose, *(text for text in said if end not in text)]
    return "; ".join(said)


class Support(NamedTuple):
    """A statement on which a verdict depends: about an opaque call, or a standing assumption.

    Attributes:
      what: the kernel or target, or the subject of an assumption.
      source: ``tag``, ``rule``, ``table`` (XLA's own targets), ``text`` (the kernel's text) or
        ``assumption``.
      status: ``audited``, ``declared``, ``built in`` or ``standing``.
      detail: the effect, and where it is declared.
    """

    what: str
    source: str
    status: str
    detail: str

    def __str__(self) -> str:
        return f"{self.source} for {self.what}: {self.detail} ({self.status})"


class ValueState(NamedTuple):
    """What the proof knows about one value on all devices."""

    proven: int = hd.EQUAL  # the relation that is proven
    # The relation that would hold if every blocker gave equal values everywhere.
    optimistic: int = hd.EQUAL
    # Pairs of a relation and its cause; all these relations together refine ``optimistic``.
    causes: tuple[tuple[int, Cause], ...] = ()
    blockers: tuple[Blocker, ...] = ()  # on the value's path, at most _KEEP
    # All statements that the proof depends on. This list must be complete: if one were missing, an
    # unaudited proof could look audited.
    supports: tuple[Support, ...] = ()
    # The value depends on constants of the program only, as padding does.
    constant: bool = False
    # Devices differ in this relation only if their values come from different data by steps that
    # keep data different (see ``EQUALIZING``).
    apart: int = hd.EQUAL
    # Devices are equal in this relation if data moved between them: a later step may compute the
    # same value on both, as the sum over a ring of permutes does.
    moved: int = hd.DISTINCT


SAME = 1  # the state of a value that is equal everywhere but not constant


class States:
    """The interned states over some relations; state 0 is the state of constants."""

    def __init__(self, relations: hd.Relations):
        self.relations = relations
        self._ids: dict[ValueState, int] = {}
        self._all: list[ValueState] = []
        self._refined: dict[int, int] = {}
        self.intern(ValueState(constant=True))
        self.intern(ValueState())

    def __getitem__(self, state: int) -> ValueState:
        return self._all[state]

    def intern(self, state: ValueState) -> int:
        number = self._ids.get(state)
        if number is None:
            number = self._ids[state] = len(self._all)
            self._all.append(state)
        return number

    def source(self, relation: int, cause: Cause, sure: bool = False) -> int:
        """Return the state of an input that may differ between devices (``sure``: it differs)."""
        causes = () if relation == hd.EQUAL else ((relation, cause),)
        return self.intern(
            ValueState(relation, relation, causes, apart=relation if sure else hd.EQUAL)
        )

    def maybe_equal(self, state: int) -> int:
        """Return the state of a value that may be equal again, without a proof."""
        fields = self._all[state]
        return state if fields.apart == hd.EQUAL else self.intern(fields._replace(apart=hd.EQUAL))

    def either(self, a: int, b: int) -> int:
        """Return the state of a value that is either of two: equal or apart only where both are."""
        if a == b:
            return a
        apart = self.relations.coarsen(self._all[a].apart, self._all[b].apart)
        return self.intern(self._all[self.refine(a, b)]._replace(apart=apart))

    def blocked(self, blocker: Blocker, *operands: int) -> int:
        """Return the state of an unknown value, with its blocker and its operands' blockers."""
        blockers: tuple[Blocker, ...] = (blocker,)
        for operand in operands:
            blockers = union(blockers, self._all[operand].blockers)[:_KEEP]
        return self.intern(ValueState(hd.DISTINCT, hd.EQUAL, (), blockers))

    def refine(self, a: int, b: int) -> int:
        """Combine the states of two operands: devices are equal only where both operands are."""
        if a == b or not b:  # constants, which have state 0, add nothing
            return a
        if not a:
            return b
        key = (a << 32) | b
        number = self._refined.get(key)
        if number is None:
            x, y = self._all[a], self._all[b]
            number = self._refined[key] = self.intern(
                ValueState(
                    self.relations.refine(x.proven, y.proven),
                    self.relations.refine(x.optimistic, y.optimistic),
                    self.causes(x.causes + y.causes),
                    union(x.blockers, y.blockers)[:_KEEP],
                    union(x.supports, y.supports),
                    x.constant and y.constant,
                    self.relations.refine(x.apart, y.apart),
                    self.relations.coarsen(x.moved, y.moved),
                )
            )
        return number

    def causes(self, causes: Iterable[tuple[int, Cause]]) -> tuple[tuple[int, Cause], ...]:
        """Drop each cause whose relation the causes before it already cover."""
        kept: list[tuple[int, Cause]] = []
        relation_so_far = hd.EQUAL
        for relation, cause in causes:
            joined = self.relations.refine(relation_so_far, relation)
            if joined != relation_so_far:
                kept.append((relation, cause))
                relation_so_far = joined
        return tuple(kept)

    def changed(self, state: int, **changes: Any) -> int:
        """Return a state with other values in some fields."""
        return self.intern(self._all[state]._replace(**changes))


def union(a: tuple[_T, ...], b: tuple[_T, ...]) -> tuple[_T, ...]:
    """Return the items of both tuples in order, each once."""
    if not b or a == b:
        return a
    if not a:
        return b
    return tuple(dict.fromkeys(a + b))


# Steps that may make different data equal again, without a proof that they do. "Not proven equal"
# is not "different": the report says that an output *differs* only if it comes from different
# data and every step keeps the data different. The following steps may make data equal, so after
# them the devices no longer count as apart (``ValueState.apart``):
#
# - Collectives, within their groups: a later step may add moved data to data that stayed, as a ring
#   of permutes does (``ValueState.moved``). Between groups, sums of different data stay different.
# - One boolean, or one number that is clipped or rounded: ``isfinite(loss)`` is true everywhere,
#   ``minimum(1, c / norm)`` is 1 on most devices. (Arrays of such numbers will differ somewhere.)
# - any, all, max and min of integers and booleans: most shards have the same largest label.
# - Operations that cancel: ``x - x``, ``x / x``, ``x == x``, and a product with zero.
# - Updates: slices may overwrite a whole buffer.
# - Choices between two values: the result is apart only where both values are. If ``axis_index``
#   chooses, two options with the same state may be one value.
# - Steps with several results whose operands vary over different axes (sort, argmax, a kernel with
#   a rule): the text does not say which result depends on which operand.
# - Loops of unknown length that devices may leave at different iterations. If all devices leave
#   together, the loop counts as executed, and its body keeps different data different.
# - Random numbers that each device draws by itself, infeeds, and opaque calls.
#
# Float arithmetic, sums, max of floats, sort, gather and select of arrays keep data different. If a
# program relies on them giving equal results by chance, it needs an allowance.

# Opcodes that often give the same scalar for different operands.
_ROUNDS = frozenset(
    "and ceil clamp compare convert count-leading-zeros floor is-finite maximum minimum mulhi or "
    "popcnt remainder round-nearest-afz round-nearest-even shift-left shift-right-arithmetic "
    "shift-right-logical sign".split()
)
# The result is a constant if both operands are one value (_SAME) or if one operand is zero (_ZERO).
_SAME = frozenset("compare divide remainder subtract xor".split())
_ZERO = frozenset("and divide multiply power".split())
EQUALIZING = _ROUNDS | _SAME | _ZERO

_EXTREMES = frozenset("and or maximum minimum".split())
_FLOAT = re.compile(r"b?f\d|c\d")
_MOVES = frozenset("bitcast broadcast convert copy reshape".split())
_ZEROS = re.compile(r"[\s{},]*(?:(?:-?0(?:\.0*)?|false)[\s{},]*)+")


def rounds(reduction: str, shape: hm.Shape) -> bool:
    """Return whether a reduction picks one of a few values: any, all, max and min of integers."""
    kinds = shape.leaves()
    return reduction in _EXTREMES and not all(_FLOAT.match(s.element_type) for s in kinds)


def cancels(computation: hm.Computation, instruction: hm.Instruction) -> bool:
    """Return whether an instruction with an ``EQUALIZING`` opcode may make different data equal."""
    opcode, shape = instruction.opcode, instruction.shape
    operands = instruction.operands
    if opcode in _ROUNDS and shape.elements is None and shape.element_count <= 1:
        return opcode != "convert" or _FLOAT.match(shape.element_type) is None
    if len(operands) != 2:
        return False
    if opcode in _SAME and operands[0] == operands[1]:
        return True
    zeros = [_is_zero(computation, o) for o in operands] if opcode in _ZERO else [False, False]
    return (zeros[0] and opcode != "power") or (zeros[1] and opcode != "divide")


def _is_zero(computation: hm.Computation, position: int) -> bool:
    instruction = hm.behind(computation, position, _MOVES)
    return instruction.opcode == "constant" and bool(_ZEROS.fullmatch(instruction.literal))
