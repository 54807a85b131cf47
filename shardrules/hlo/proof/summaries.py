"""Summaries of computations: which arguments each result merges, if each argument has one state.

Most computations are fusions of elementwise operations. Their result is the merge of some
parameters' states, in an order that the text fixes, so one look at the instructions serves every
layer and every trip. What has no summary is evaluated (see ``evaluation``).
"""

from __future__ import annotations

import itertools
from typing import Any

from shardrules.hlo.known import exact
from shardrules.hlo.known import states as hs
from shardrules.hlo.known.ranges import Exact
from shardrules.hlo.known.values import RANGED
from shardrules.hlo.reader import module as hm

# The parameters whose states a value merges, in order: merging is associative, and a state that
# comes again adds nothing. ``~number`` stands for a parameter that may be equal again (see
# ``hs.EQUALIZING``). While a summary is made, an ``Exact`` stands for known numbers.
Word = tuple[int, ...]
_MOST_STEPS = 10_000  # of one summary
_MOST_DEPTH = 20  # of the calls in it


def summarise(proof: Any, computation: hm.Computation, depth: int = 0) -> list[Word] | Word | None:
    """Return the word of a quiet computation's result; of a tuple, a list of its elements' words.

    None if the result depends on more than merges.
    """
    words: list[Any] = []
    steps = 0
    for position, instruction in enumerate(computation.instructions):
        opcode = instruction.opcode
        given = [words[o] for o in instruction.operands]
        if opcode == "parameter":
            word: Any = (int(instruction.literal),)
        elif opcode == "tuple" and position == computation.root:
            word = given
        elif opcode in ("fusion", "call"):
            word = _called(proof, instruction, given, depth)
        else:
            word = _step(proof, computation, position, given)
        if word is None:
            return None
        words.append(word)
        steps += len(word) if type(word) is tuple else 0
        if steps > _MOST_STEPS:
            return None
    result = words[computation.root]
    parts = result if type(result) is list else [result]
    return result if all(type(part) is tuple for part in parts) else None


def _called(proof: Any, instruction: hm.Instruction, given: list[Any], depth: int) -> Any:
    inner = proof.module.computations[instruction.calls[0]].original
    if depth == _MOST_DEPTH or not all(type(word) is tuple for word in given):
        return None
    summary = proof.summary(inner, depth + 1)
    if type(summary) is not tuple or len(given) < proof.parameter_count(inner):
        return None
    return _joined(
        [given[number] if number >= 0 else _maybe_equal(given[~number]) for number in summary]
    )


def _joined(words: list[Word]) -> Word:
    if len(words) == 1:
        return words[0]
    numbers = dict.fromkeys(itertools.chain.from_iterable(words))
    if min(numbers, default=0) >= 0:
        return tuple(numbers)
    first = dict.fromkeys([max(number, ~number) for number in numbers])
    return tuple([number if number in numbers else ~number for number in first])


def _maybe_equal(word: Word) -> Word:
    return tuple([min(number, ~number) for number in word])


def _step(proof: Any, computation: hm.Computation, position: int, given: list[Any]) -> Any:
    """Return the word of what applies an operation, or its known numbers."""
    instruction = computation.instructions[position]
    opcode, handler = instruction.opcode, proof.handlers.by_opcode[instruction.opcode]
    words = [word for word in given if type(word) is tuple]
    if list in map(type, given):
        return None
    if not words:  # a constant, or what follows from constants
        if opcode not in exact.OPCODES and opcode != "constant":
            return None
        value = proof.operation(computation, position, given)
        if type(value) is int:
            return None if value else ()
        return value if isinstance(value, Exact) and not value.state else None
    chosen = opcode == "select" and type(given[0]) is Exact
    if len(words) < len(given) and (opcode in RANGED or chosen):
        return None  # numbers say what is taken
    equalizes = False
    if opcode in hs.EQUALIZING:
        equalizes = hs.cancels(computation, instruction)
    elif instruction.calls and instruction.shape.elements is None:
        called = [proof.module.computations[name].original for name in instruction.calls]
        equalizes = any(hs.rounds(c.instructions[c.root].opcode, instruction.shape) for c in called)
    elif handler is not None:  # it looks at its operands
        return None
    return _maybe_equal(_joined(words)) if equalizes else _joined(words)
