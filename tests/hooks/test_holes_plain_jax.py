"""Plain JAX 0.10.2 does what the design's table of holes says, with no hooks installed."""

import re

import jax
import numpy as np
import pytest
from core import versions
from kernels import holes
from kernels.case import REFUSED, Fails

# The table of holes was taken there.
pytestmark = versions.where(lambda: jax.__version__ == "0.10.2")


def same(got, want):
    """Whether two results are equal, be they arrays or words."""
    if isinstance(want, str):
        return isinstance(got, str) and got == want
    return got.shape == want.shape and bool(np.allclose(got, want, rtol=1e-6))


@pytest.mark.parametrize("hole", holes.ALL, ids=lambda hole: hole.name)
def test_plain_jax_does_what_the_table_says(hole, cpu_mesh):
    if isinstance(hole.plain, Fails):
        with pytest.raises(Exception, match=hole.plain.match) as caught:
            hole.run(cpu_mesh, True)
        assert caught.type.__name__ == hole.plain.error
        return
    got = hole.run(cpu_mesh, True)
    assert same(got, hole.plain), got
    assert not same(got, hole.right)


@pytest.mark.parametrize(
    "hole",
    [hole for hole in holes.ALL if hole.unchecked is not None or hole.right is not REFUSED],
    ids=lambda hole: hole.name,
)
def test_without_the_check_the_program_is_right(hole, cpu_mesh):
    """What `right` says is what the program computes when no types get in its way."""
    want = hole.right if hole.unchecked is None else hole.unchecked
    got = hole.run(cpu_mesh, False)
    assert same(got, want), got


def test_a_wrong_expectation_is_noticed(cpu_mesh):
    hole = holes.BY_NAME["ffi_gradient"]
    got = hole.run(cpu_mesh, True)
    assert not same(got, hole.right)
    assert not same(got, hole.plain + 1)
    assert not same(got[:2], hole.plain)
    assert not same(got, holes.ACCEPTED)
    assert re.search(hole.kernels[0], holes.opaque.FFI_TARGET)
