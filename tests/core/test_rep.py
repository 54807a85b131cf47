"""What is particular to replication sets, the form of the check to JAX 0.5.3."""

from __future__ import annotations

import pytest

from shardrules.hooks import rep
from shardrules.registry import axistypes


@pytest.mark.parametrize(
    "known, effects, both",
    [
        (None, "local;join(model)", "local;join(model)"),
        ("local", "local", "local"),
        ("typed(data)", "typed(model)", "typed(data,model)"),
        ("typed(data,model)", "typed(data)", "typed(data,model)"),
        ("typed()", "local", "unknown"),
        ("join(model)", "typed(data)", "unknown"),
    ],
)
def test_call_that_is_rewritten_twice_keeps_only_what_holds_for_both(known, effects, both):
    known = None if known is None else axistypes.parse_effects(known)
    merged = rep._weaker(known, axistypes.parse_effects(effects))
    assert axistypes.format_effects(merged) == both
