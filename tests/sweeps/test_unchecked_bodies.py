"""Random bodies with the check off: ``install(unchecked="check")`` changes no result."""

from __future__ import annotations

import pytest
import seeds

from sweeps import unchecked


@pytest.mark.slow
@pytest.mark.parametrize(
    ("count", "first"), [(16, 0), pytest.param(300, 100, marks=pytest.mark.full)]
)
def test_no_result_changes(count, first, share):
    tried = share(range(first, first + count))
    outcomes = dict(enumerate(seeds.in_this_process("sweeps.unchecked", tried)))
    said, is_well = unchecked.summary(outcomes)
    assert is_well, said
    assert sum(one["note"] == "switched" for one in outcomes.values()) >= len(tried) // 8, said
