"""Random bodies with the check off: ``install(unchecked="check")`` changes no result."""

from __future__ import annotations

import pytest

from sweeps import unchecked


@pytest.mark.parametrize(
    ("count", "first"), [(24, 0), pytest.param(300, 100, marks=pytest.mark.full)]
)
def test_no_result_changes(count, first):
    said = {}
    outcomes = unchecked.sweep(count, first, said.__setitem__)
    assert not {seed: what for seed, what in said.items() if what.startswith("different")}
    assert outcomes["switched"] >= count // 4, outcomes
