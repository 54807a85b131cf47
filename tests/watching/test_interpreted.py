"""The loops of interpreted Pallas kernels are told from those that a program wrote."""

import jax
import numpy as np
import pytest
from jax.experimental import pallas as pl

import shardrules

pytestmark = pytest.mark.one_lane


def doubled(x):
    block = pl.BlockSpec((2, 16), lambda i: (i, 0))
    return pl.pallas_call(
        lambda x_ref, o_ref: o_ref.__setitem__(..., 2 * x_ref[...]),
        jax.ShapeDtypeStruct(x.shape, x.dtype),
        grid=(4,),
        in_specs=[block],
        out_specs=block,
        interpret=True,
    )(x)


def test_a_report_names_the_loop_of_an_interpreted_kernel():
    @jax.jit
    def step(x):
        return jax.lax.fori_loop(0, 3, lambda _, x: x @ x.T @ x, doubled(x))

    with shardrules.watch() as seen:
        step(np.ones((8, 16), np.float32))
    (program,) = (one for one in seen if one.name == "jit_step")
    (block,) = (block for block in program.content.costs if block.title == "Loops")
    of_kernels = [row[0] for row in block.rows if row[0].endswith(": an interpreted kernel's")]
    assert len(block.rows) == 2 and len(of_kernels) == 1 and "(doubled)" in of_kernels[0]


def test_equal_loops_of_interpreted_kernels_are_one_row():
    @jax.jit
    def step(x, y):
        for _ in range(2):
            x, y = jax.lax.fori_loop(0, 3, lambda _, x: x @ x.T @ x, doubled(x)), doubled(y)
        return x, y

    with shardrules.watch() as seen:
        step(np.ones((8, 16), np.float32), np.ones((8, 32), np.float32))
    (program,) = (one for one in seen if one.name == "jit_step")
    (block,) = (block for block in program.content.costs if block.title == "Loops")
    sources = [row[0] for row in block.rows]
    assert [s.rpartition(": ")[2] for s in sources if "(doubled)" in s] == [
        "an interpreted kernel's (2 times)"
    ] * 2
    assert len(sources) == 4  # both of the program's own, which are equal too
