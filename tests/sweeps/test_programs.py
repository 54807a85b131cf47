"""Random programs with gradients, on eight devices and as arrays on one."""

from __future__ import annotations

import pytest

import shardrules as sr
from sweeps import programs

PENDING = {1000, 1003}  # pmax and pmin in groups


def run(seeds):
    with sr.install():
        return [programs.judge(seed) for seed in seeds]


@pytest.mark.slow
def test_random_programs_are_right():
    outcomes = run(set(range(1000, 1016)) - PENDING)
    assert [one for one in outcomes if one.what in ("wrong", "died")] == []
    refused = [one for one in outcomes if one.what == "refused"]
    print(f"{len(refused)} of {len(outcomes)} refused")
    assert len(refused) <= 2
