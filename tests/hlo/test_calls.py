"""How many function calls a verdict takes, which no other work on the machine disturbs.

``benchmarks/hlo_speed.py`` has the times.
"""

import cProfile
import pathlib
import pstats

import pytest

from shardrules import hlo
from shardrules.costs import accounts

DATA = pathlib.Path(__file__).parent / "data"
# Calls of Python's and C's functions for each instruction, of reading and of all of it. Measured
# with Python 3.11, and a twentieth more; newer ones call no function for a comprehension.
MOST = {"gpu_pipeline": (14.4, 84), "tpu_scan": (18.5, 90), "tpu_v5e_ring": (18, 67)}


def calls(function, *args) -> int:
    profile = cProfile.Profile()
    profile.runcall(function, *args)
    return pstats.Stats(profile).total_calls


def verdict(text: str) -> accounts.Account:
    return accounts.of(hlo.judge(hlo.parse(text)))


@pytest.mark.parametrize("name", MOST)
def test_a_verdict_takes_few_calls_for_each_instruction(name):
    text = (DATA / f"{name}.hlo").read_text()
    assert verdict(text).entries  # fills what is kept for the process
    count = sum(len(c.instructions) for c in hlo.parse(text).computations.values())
    found = [calls(function, text) / count for function in (hlo.parse, verdict)]
    for what, took, most in zip(("reading", "a verdict"), found, MOST[name]):
        assert took <= most, f"{what} takes {took:.1f} calls for an instruction, and not {most}"
        assert took > 0.8 * most, f"{what} takes {took:.1f} calls for an instruction: lower {most}"
