"""Mutations of real modules: the reader gives a Module or an HloSyntaxError, and nothing else.

python tests/seeds.py fuzz 5000 [first_seed [processes]]
"""

from __future__ import annotations

import functools
import pathlib
import random
import signal
import time

from shardrules import errors, hlo

from . import forms

DATA = pathlib.Path(__file__).parent / "data"
LIMIT_S = 1.0  # of processor time, for one mutation of a module of up to 20 kB
_TOKENS = [
    "{",
    "}",
    "(",
    ")",
    "[",
    "]",
    '"',
    "\\",
    ",",
    "=",
    "%",
    "/*",
    "*/",
    "//",
    "\n",
    " ",
    "ROOT ",
    "ENTRY ",
    "parameter(0)",
    "99999999999999999999",
    "-1",
    "<=[8]",
    "T(1,0)",
    "mesh['a'=8]",
    "{{0,1},{2,3}}",
    "{}",
    "calls=%",
    "while",
    "all-reduce",
    "\0",
    "é",
    "HloModule x",
    "index=7",
    "f32[]",
    "((((((((",
    "{{{{{{{{",
    "/*index=5*/",
    "// x\n",
    ",\n",
    "negate(f32[] constant(1))",
    "literal=s32[] 1",
    "{...}",
]


@functools.cache
def sources() -> list[str]:
    """List the modules that are mutated: real ones, and some in every form that people write."""
    texts = [path.read_text() for path in sorted(DATA.glob("*.hlo"))]
    return [t for t in texts if len(t) <= 20_000] + [*forms.FORMS.values(), forms.NESTED]


def mutate(rng: random.Random, text: str) -> str:
    """Damage a text in one to four ways."""
    for _ in range(rng.randint(1, 4)):
        kind = rng.randrange(10)
        a, b = sorted(rng.randrange(len(text) + 1) for _ in range(2))
        lines = text.split("\n")
        i, j = rng.randrange(len(lines)), rng.randrange(len(lines))
        if kind == 0:
            text = text[:a]
        elif kind == 1:
            text = text[:a] + text[min(b, a + rng.randint(1, 60)) :]
        elif kind == 2:
            text = text[:b] + text[a:b][:2000] + text[b:]
        elif kind == 3:
            lines[i], lines[j] = lines[j], lines[i]
            text = "\n".join(lines)
        elif kind == 4:
            lines.insert(j, lines[i])
            text = "\n".join(lines)
        elif kind == 5:
            del lines[i]
            text = "\n".join(lines)
        elif kind == 6:
            token = rng.choice(_TOKENS)
            text = text[:a] + token * rng.choice([1, 1, 1, 2, 400]) + text[a:]
        elif kind == 7 and a < len(text):
            text = text[:a] + chr(rng.randrange(32, 127)) + text[a + 1 :]
        elif kind == 8:
            digits = [k for k, c in enumerate(text) if c.isdigit()]
            if digits:
                at = rng.choice(digits)
                number = rng.choice(["", "0", "7", "8", "-3", "4294967296", "9" * 30, "9" * 5000])
                text = text[:at] + number + text[at + 1 :]
        else:
            letters = list(text[a : a + 2])
            text = text[:a] + "".join(reversed(letters)) + text[a + 2 :]
        if not text:
            return text
    return text[:40_000]


class _TooLong(BaseException):
    """Ends a reading that takes too long, past every ``except Exception``."""


def check(text: str) -> str | None:
    """Read and judge one text; say what is wrong, None if nothing is.

    A text that takes longer than the limit is stopped there, as is one that would never end.
    """

    def stop(number, frame):
        raise _TooLong

    before = signal.signal(signal.SIGVTALRM, stop)
    signal.setitimer(signal.ITIMER_VIRTUAL, LIMIT_S)
    try:
        return _check(text)
    except _TooLong:
        return f"took more than {LIMIT_S:g} s"
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)


def _check(text: str) -> str | None:
    start = time.process_time()
    try:
        module = hlo.parse(text)
        try:
            hlo.judge(module)
        except errors.HloError:  # groups that don't fit, a device beyond all counts
            pass
    except errors.HloSyntaxError as error:
        if error.line < 1 or error.column < 1:
            return f"an error without a place: {error}"
    except Exception as error:
        return f"{type(error).__name__}: {str(error)[:200]}"
    taken = time.process_time() - start
    return f"took {taken:.1f} s" if taken > LIMIT_S else None


def outcome(seed: int) -> dict[str, str]:
    """Return what is wrong with one mutation, for tests/seeds.py."""
    rng = random.Random(seed)
    problem = check(mutate(rng, rng.choice(sources())))
    return {"note": problem} if problem else {}


def summary(outcomes) -> tuple[str, bool]:
    """Say how many went wrong."""
    wrong = sum(map(bool, outcomes.values()))
    return f"{len(outcomes)} mutations: {wrong} wrong", not wrong
