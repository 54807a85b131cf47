"""Each hole of plain JAX's check, closed: the same programs with the hooks installed.

``test_holes_plain_jax.py`` shows plain JAX doing what the table of holes says.
"""

import re

import numpy as np
import pytest
from kernels import holes

import shardrules as sr
from shardrules import errors

# Programs whose own text must change, and what the error says to type.
REWRITTEN = {
    "new_ref_type": "jax.new_ref(shardrules.vary(",
    "new_ref": "jax.new_ref(shardrules.vary(",
}
# Kernels that communicate, with the rule that says so.
COMMUNICATING = {"collective_kernel": {"ag_kernel": sr.all_gather_invariant("data")}}


def declared(hole):
    """The rule lines of a program: one for each opaque call that nothing proves."""
    return {
        **{name: sr.no_communication for name in hole.kernels},
        **COMMUNICATING.get(hole.name, {}),
    }


@pytest.mark.parametrize("hole", holes.ALL, ids=lambda hole: hole.name)
def test_hole_is_closed(hole, cpu_mesh, hooks):
    with sr.rules(declared(hole)):
        if hole.name in REWRITTEN:
            with pytest.raises(errors.RefError) as caught:
                hole.run(cpu_mesh, True)
            assert REWRITTEN[hole.name] in str(caught.value)
        elif isinstance(hole.right, str) and hole.right == holes.REFUSED:
            with pytest.raises((ValueError, errors.ShardrulesError)) as caught:
                hole.run(cpu_mesh, True)
            assert_says_what_to_do(hole, str(caught.value))
        else:
            got = hole.run(cpu_mesh, True)
            if isinstance(hole.right, str):
                assert got == hole.right
            else:
                np.testing.assert_allclose(got, hole.right, rtol=1e-6)


def assert_says_what_to_do(hole, message):
    """Refused by JAX's check of out_specs, now that the type is right, or by ours."""
    assert any(
        words in message
        for words in (
            "out_specs which require replication which can't be statically inferred",
            "Remove the annotation",
            "write one of these lines:",
            "so say what it does, in one of these lines:",
            "shardrules.already_summed(",
            "take this device's slice",
        )
    ), message


@pytest.mark.parametrize("hole", [h for h in holes.ALL if h.kernels], ids=lambda hole: hole.name)
def test_without_its_rule_the_call_is_an_error_not_a_guess(hole, cpu_mesh, hooks):
    """But for pure_callback, whose contract is its rule."""
    if "pure" in hole.name:
        assert sr.registry.default.find("pure_callback").rule == sr.no_communication
        return
    with pytest.raises(errors.UnknownKernelError) as caught:
        hole.run(cpu_mesh, True)
    text = str(caught.value)
    assert "one of these lines:" in text
    name = rf"shardrules\.register\('(\S*:)?{re.escape(hole.kernels[0])}', "
    assert re.search(name, text)
