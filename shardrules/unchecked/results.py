"""Record how a script's run ended and what its programs returned, to compare it with another."""

from __future__ import annotations

import contextlib
import itertools
import math
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from shardrules.door import compiled
from shardrules.paths import here
from shardrules.unchecked.sites import UncheckedCall
from shardrules.units import counted
from shardrules.watching import compiling
from shardrules.watching.reads import user_line

_ROUNDING = 1e-5  # the error of sums in another order, relative to the largest value
_RUNS = 2  # recorded runs of each program: later ones inherit the rounding of earlier ones
_ELEMENTS = 256  # recorded elements of each result
_MOST_BYTES = 1 << 26  # larger results are not read
_AS_LARGE = 10  # rounding makes a result's difference at most this many times the arguments' one

Sent = dict[tuple[str, tuple[str, ...], int], list[int]]
"""What one device sends or launches in one run of each program, in the order of compilation.

The key is the programs' name, their argument types, and the number of the function among those that
share both: a function may be compiled more than once for the same argument types.
"""


class Result(NamedTuple):
    """Some elements of an array that a program returned."""

    dtype: str
    shape: tuple[int, ...]
    largest: float  # the largest magnitude of all its finite elements
    elements: tuple[float, ...]


class ProgramRun(NamedTuple):
    """The results of one run of a program, and the earlier results that it took as arguments."""

    returned: tuple[Result | None, ...]
    took: tuple[Result, ...] = ()
    line: str = ""  # the line of the script that ran it, ``FILE:LINE``
    program: int = 0  # which of the compiled programs it is


Results = dict[str, list[ProgramRun]]  # by a program's name


@dataclass
class Outcome:
    """How a run of a script ended."""

    code: int = 0  # the exit code, or minus a signal's number
    raised: str = ""  # the first line of the error that ended it, empty if none did
    # the calls of unchecked shard_maps, if the run retraced them
    calls: list[UncheckedCall] = field(default_factory=list)
    compiled: int = 0  # the programs that it compiled
    sent: Sent = field(default_factory=dict)
    launched: Sent = field(default_factory=dict)  # the collectives that one device runs
    results: Results = field(default_factory=dict)  # what its programs returned
    used: list[str] = field(default_factory=list)  # the flags whose rules a kernel used
    notes: list[str] = field(default_factory=list)  # a message for each other flag

    @property
    def failure(self) -> str:
        ended = f"exit code {self.code}" if self.code > 0 else f"signal {-self.code}"
        return (self.raised or ended) if self.code else ""


def start(results: Results) -> Callable[[], None]:
    """Record what each program's first runs return, until the returned function is called."""
    lock = threading.Lock()
    made: dict[int, tuple[weakref.ref[Any], Result]] = {}  # by the ids of arrays
    numbers = itertools.count()

    def taken(arrays: Iterable[Any]) -> Iterator[Result]:
        # An id alone doesn't identify an array, since Python reuses ids.
        for array in arrays:
            ref, result = made.get(id(array), (None, None))
            if ref is not None and result is not None and ref() is array:
                yield result

    def note(executable: Any, traced: object) -> None:
        name = compiled.program_name(executable)
        number, left = next(numbers), _RUNS

        def see(arguments: Sequence[Any], arrays: Sequence[Any]) -> None:
            nonlocal left
            with lock:
                left -= 1
                if left >= 0:
                    returned, took = tuple(map(_read, arrays)), tuple(taken(arguments))
                    run = ProgramRun(returned, took, user_line(), number)
                    results.setdefault(name, []).append(run)
                    for array, result in zip(arrays, run.returned):
                        if result is not None:
                            made[id(array)] = weakref.ref(array), result

        compiled.after_each_run(executable, see)

    return compiling.start(note)


def _read(array: Any) -> Result | None:
    """Return some elements of an array; None if they can't be read here."""
    import numpy as np

    with contextlib.suppress(Exception):  # a key, an array of several processes, a donated one
        if array.size and array.nbytes <= _MOST_BYTES and array.is_fully_addressable:
            values = np.asarray(array)
            if np.iscomplexobj(values):  # as pairs of real numbers
                values = values.astype(np.complex128).ravel().view(np.float64)
            values = values.astype(np.float64)
            chosen = values.ravel()[:: -(-values.size // _ELEMENTS)]
            largest = float(np.max(np.abs(values), where=np.isfinite(values), initial=0))
            return Result(str(array.dtype), array.shape, largest, tuple(map(float, chosen)))
    return None


def different(before: Results, after: Results) -> str:
    """Say which program's results differ in another run; empty if none do."""
    for name, runs in before.items():
        for run, (first, second) in enumerate(zip(runs, after.get(name, ())), 1):
            for number, (a, b) in enumerate(zip(first.returned, second.returned)):
                if a is None or b is None or (a.dtype, a.shape) != (b.dtype, b.shape):
                    continue
                off, scale = _off(a, b)
                # Sums in another order differ by rounding.
                if off > _tolerance(a.dtype) * max(scale, 1e-6):
                    at = f" at {here(first.line)}" if first.line else ""
                    how = "has NaN or infinite elements that differ"
                    if off < math.inf:
                        how = (
                            f"differs by up to {off:.3g}, and its largest value is {scale:.3g}"
                            f"{_of_rounding(first, second, off)}"
                        )
                    return f"result {number} of {name}{at}, run {run}, {how}"
    return ""


def compared(before: Results, after: Results) -> str:
    """Say how many results of two runs were compared and found equal."""
    counts: dict[int, int] = {}  # by the number of the program
    for name, runs in before.items():
        for first, second in zip(runs, after.get(name, ())):
            pairs = zip(first.returned, second.returned)
            alike = [a and b and (a.dtype, a.shape) == (b.dtype, b.shape) for a, b in pairs]
            counts[first.program] = counts.get(first.program, 0) + sum(map(bool, alike))
    results, programs = sum(counts.values()), sum(map(bool, counts.values()))
    if not results:
        return "nothing that the script's programs returned could be compared"
    return (
        f"compared: {counted(results, 'result')} of {counted(programs, 'program')}, with the "
        "patch and without it; they are equal but for rounding"
    )


def _off(a: Result, b: Result) -> tuple[float, float]:
    """Return the largest difference of two results, and their largest finite value."""
    return max(map(_apart, a.elements, b.elements)), max(a.largest, b.largest)


def _apart(x: float, y: float) -> float:
    """Return the difference of two numbers; NaN and infinities differ from all but themselves."""
    if x == y or (math.isnan(x) and math.isnan(y)):
        return 0.0
    return abs(x - y) if math.isfinite(x) and math.isfinite(y) else math.inf


def _of_rounding(first: ProgramRun, second: ProgramRun, found: float) -> str:
    """Say if a difference may be rounding alone, as when a script subtracts equal values."""
    # Judge by the rounding of the program's arguments, not of its results: a step returns weights
    # too, and their rounding could hide a wrong gradient. The arguments must differ by about as
    # much as the result does. If they are equal, the difference is not rounding.
    shares, taken = [], 0.0
    for a, b in zip(first.took, second.took):
        if (a.dtype, a.shape) != (b.dtype, b.shape):
            return ""
        off, scale = _off(a, b)
        shares.append(off / scale if scale else 0.0)
        taken += off
    is_rounding = bool(shares) and max(shares) <= _ROUNDING and found <= _AS_LARGE * taken
    if not is_rounding or len(first.took) != len(second.took):
        return ""
    return (
        f". This may be rounding alone: what it takes differs by {max(shares):.1g} of its largest "
        "value at most. shardrules.testing.assert_same_unchecked(loss, *arguments, "
        "forced=True) compares value and gradients of the function itself; if it passes, switch "
        "the check on by hand"
    )


class SentByName(NamedTuple):
    """What two runs of a script send, or launch, in the programs of one name."""

    name: str
    before: int
    after: int
    programs: int  # how many programs that send something are summed
    saves: bool  # whether one of them sends less in the second run


def sent_by_name(before: Sent, after: Sent) -> list[SentByName]:
    """Compare what two runs of a script send, or launch, for each name of a program.

    Programs are matched by name, argument types and the order of compilation. JAX may compile a
    step more often in one of the runs, for example because results were placed differently. So
    among programs without a match, only the costliest one counts.
    """
    rows = []
    for name in dict.fromkeys(name for name, *_ in (*before, *after)):
        first, second = (
            {key: side[key] for key in side if key[0] == name} for side in (before, after)
        )
        both = [key for key in first if key in second]
        pairs, saves = list[tuple[int, int]](), False
        for key in both:
            pairs += _matched(first[key], second[key])
            saves |= min(second[key]) < min(first[key])
        if first.keys() != second.keys():
            pairs.append((_costliest_other(first, both), _costliest_other(second, both)))
        saves |= any(on < off for off, on in pairs)
        off, on = map(sum, zip(*pairs))
        rows.append(SentByName(name, off, on, sum(map(any, pairs)), saves))
    return rows


def _matched(before: Sequence[int], after: Sequence[int]) -> list[tuple[int, int]]:
    """Match what a function's programs send in two runs."""
    # A jit that is made anew compiles the same program again, which counts once. Functions that
    # differ only in the shard_maps they call look the same here, unless the patch changes some.
    if len(before) == len(after):
        return list(dict.fromkeys(zip(before, after)))
    return [(max(before), max(after))]


def _costliest_other(side: Sent, both: Sequence[Any]) -> int:
    others = [max(counts) for key, counts in side.items() if key not in both]
    return max(others or [max(counts) for counts in side.values()] or [0])


def _tolerance(dtype: str) -> float:
    return 0.05 if "16" in dtype or "8" in dtype else 1e-3
