"""How many function calls verdicts and hints take, which no other work on the machine disturbs.

``benchmarks/hlo_speed.py`` has the times.
"""

import cProfile
import pathlib
import pstats

import pytest

from shardrules import hlo
from shardrules.costs import accounts, waste

from . import test_repeats
from . import text as T

DATA = pathlib.Path(__file__).parent / "data"
# Calls of Python's and C's functions for each instruction, of reading, with verdicts and an account,
# and with hints. Measured with Python 3.11, and a twentieth more; newer ones call no function for a
# comprehension.
MOST = {
    "gpu_pipeline": (11.7, 71.5, 92.2),
    "tpu_scan": (14.5, 77.4, 84.2),
    "tpu_v5e_ring": (13.3, 55.3, 58.4),
    "layers": (5.6, 11.2, 12.7),
}


def calls(function, *args) -> int:
    profile = cProfile.Profile()
    profile.runcall(function, *args)
    return pstats.Stats(profile).total_calls


def verdict(text: str) -> accounts.Account:
    return accounts.of(hlo.judge(hlo.parse(text)))


def hinted(text: str) -> list[waste.Hint]:
    judgement = hlo.judge(hlo.parse(text))
    assert accounts.of(judgement).entries
    return waste.hints(judgement)


def layers(count: int) -> str:
    """Write a program that runs one computation again and again, each time under other names."""
    entry = [T.parameter(T.DATA, "f32[8]"), "%r0 = f32[8] negate(%x)"]
    for n in range(1, count + 1):
        entry.append(f"%r{n} = f32[8] fusion(%x, %r{n - 1}), kind=kLoop, calls=%f{n}")
    computations = [test_repeats.computation(n) for n in range(1, count + 1)]
    entry.append(T.all_reduce(f"%r{count}", T.OVER_DATA))
    return T.module("\n".join(entry), before="".join(computations))


@pytest.mark.parametrize("name", MOST)
def test_verdicts_and_hints_take_few_calls_for_each_instruction(name):
    text = layers(200) if name == "layers" else (DATA / f"{name}.hlo").read_text()
    hinted(text)  # fills what is kept for the process
    count = sum(len(c.instructions) for c in hlo.parse(text).computations.values())
    found = [calls(function, text) / count for function in (hlo.parse, verdict, hinted)]
    for what, took, most in zip(("reading", "a verdict", "all with hints"), found, MOST[name]):
        assert took <= most, f"{what} takes {took:.1f} calls for an instruction, and not {most}"
        assert took > 0.8 * most, f"{what} takes {took:.1f} calls for an instruction: lower {most}"
