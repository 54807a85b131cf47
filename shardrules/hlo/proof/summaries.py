"""Summaries of computations: which arguments each result merges, if each argument has one state.

Most computations are fusions of elementwise operations. The state of such a fusion's result is the
merge of some parameters' states, in an order that the text fixes. So the instructions are read once
for all layers and all trips of loops. Computations without a summary are evaluated for each set of
arguments (see ``evaluation``).
"""

from __future__ import annotations

import itertools
from typing import Any

from shardrules.hlo.known import exact
from shardrules.hlo.known import states as hs
from shardrules.hlo.known.ranges import Exact
from shardrules.hlo.known.values import RANGED
from shardrules.hlo.reader import module as hm

# The parameters whose states a value merges, in order: merging is associative, and merging a state
# twice adds nothing. ``~number`` stands for a parameter that may be equal again (see
# ``hs.EQUALIZING``). While a summary is made, an ``Exact`` stands for known numbers.
Word = tuple[int, ...]
_MOST_STEPS = 10_000  # the parameters in all words that one summary makes
_MOST_DEPTH = 20  # nested calls in one summary


def summarise(proof: Any, computation: hm.Computation, depth: int = 0) -> list[Word] | Word | None:
    """Return the word of a quiet computation's result, or a list of words for a tuple.

    Return None if the result depends on more than a merge of its parameters' states.
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
    """Return the word of a call's result: the callee's summary, applied to the caller's words."""
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
    """Merge words; a parameter may be equal again only if every word that has it says so."""
    if len(words) == 1:
        return words[0]
    numbers = dict.fromkeys(itertools.chain.from_iterable(words))
    if min(numbers, default=0) >= 0:
        return tuple(numbers)
    first = dict.fromkeys([max(number, ~number) for number in numbers])
    return tuple([number if number in numbers else ~number for number in first])


def _maybe_equal(word: Word) -> Word:
    """Return the word with every parameter marked as one that may be equal again."""
    return tuple([min(number, ~number) for number in word])


def _step(proof: Any, computation: hm.Computation, position: int, given: list[Any]) -> Any:
    """Return the word of an operation's result, or its known numbers; None if neither is enough."""
    instruction = computation.instructions[position]
    opcode, handler = instruction.opcode, proof.handlers.by_opcode[instruction.opcode]
    words = [word for word in given if type(word) is tuple]
    if list in map(type, given):
        return None
    if not words:  # a constant, or a function of constants
        if opcode not in exact.OPCODES and opcode != "constant":
            return None
        value = proof.operation(computation, position, given)
        if type(value) is int:
            return None if value else ()
        return value if isinstance(value, Exact) and not value.state else None
    chosen = opcode == "select" and type(given[0]) is Exact
    if len(words) < len(given) and (opcode in RANGED or chosen):
        return None  # the result depends on which elements or options the numbers select
    equalizes = False
    if opcode in hs.EQUALIZING:
        equalizes = hs.cancels(computation, instruction)
    elif instruction.calls and instruction.shape.elements is None:
        called = [proof.module.computations[name].original for name in instruction.calls]
        equalizes = any(hs.rounds(c.instructions[c.root].opcode, instruction.shape) for c in called)
    elif handler is not None:  # the handler may look at its operands' values
        return None
    return _maybe_equal(_joined(words)) if equalizes else _joined(words)
