"""check_rule looks for what no audit can: kernels that are not well formed."""

import functools
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.experimental.pallas import triton as plt
from jax.sharding import PartitionSpec as P
from raising import raises

from shardrules import errors, testing
from shardrules.checks.rulecheck import check_well_formed

pytestmark = pytest.mark.one_lane

ROWS = (8, 128)
X = jax.ShapeDtypeStruct((32, 128), jnp.float32)
ANYWHERE = pl.BlockSpec(memory_space=pl.ANY)
SCRATCH = dict(scratch_shapes=[pltpu.VMEM(ROWS, jnp.float32)])
COPY = dict(
    in_specs=[ANYWHERE], scratch_shapes=[pltpu.VMEM(ROWS, jnp.float32), pltpu.SemaphoreType.DMA]
)


def scratch_never_stored(x, o, scratch):
    o[...] = x[...] + scratch[...]


def scratch_stored_if_data_says_so(x, o, scratch):
    @pl.when(x[0, 0] > 100)
    def _():
        scratch[...] = x[...]

    o[...] = scratch[...]


def half_of_scratch_stored(x, o, scratch):
    scratch[0:4, :] = x[0:4, :]
    o[...] = scratch[...]


def output_half_stored(x, o):
    o[0:4, :] = x[0:4, :]


def output_added_to(x, o):
    o[...] += x[...]


def stored_in_a_step_that_the_grid_has_not(x, o):
    @pl.when(pl.program_id(0) == 7)
    def _():
        o[...] = x[...]


def read_before_the_copy_is_over(x, o, buffer, semaphore):
    copy = pltpu.make_async_copy(x, buffer, semaphore)
    copy.start()
    o[...] = buffer[...]
    copy.wait()


def read_past_the_end(x, o, buffer, semaphore):
    pltpu.make_async_copy(x, buffer, semaphore).start()
    pltpu.make_async_copy(x, buffer, semaphore).wait()
    row = 6 + (buffer[0, 0] * 0).astype(jnp.int32)
    o[...] = jnp.broadcast_to(buffer[pl.ds(row, 4), :].sum(0)[None], ROWS)


def summed_in_scratch(x, o, scratch):
    """Well formed: set in the first step, read in the last."""

    @pl.when(pl.program_id(0) == 0)
    def _():
        scratch[...] = jnp.zeros(ROWS)

    scratch[...] += x[...]

    @pl.when(pl.program_id(0) == 1)
    def _():
        o[...] = scratch[...]


def kept_by_a_mask(x, o, scratch):
    """Well formed: what nobody stored reaches nothing."""
    mask = lax.broadcasted_iota(jnp.int32, ROWS, 0) < 4
    scratch[...] = jnp.where(mask, x[...], scratch[...])
    o[...] = jnp.where(mask, scratch[...], x[...])


def local_copy(x, o, buffer, semaphore):
    copy = pltpu.make_async_copy(x, buffer, semaphore)
    copy.start()
    copy.wait()
    o[...] = buffer[...]


def op(kernel, **kwargs):
    """The op of a kernel that has its own values for a derivative."""
    params = dict(compiler_params=pltpu.CompilerParams(), interpret=True)

    def call(x):
        return pl.pallas_call(
            kernel, jax.ShapeDtypeStruct(ROWS, jnp.float32), **{**params, **kwargs}
        )(x)

    return call


def check(mesh, f):
    testing.check_rule(f, mesh, X, in_specs=P("data"), gradients=False)


def look(f):
    """That part of check_rule alone, on one device's block."""
    x = jax.random.normal(jax.random.key(0), ROWS)
    check_well_formed(lambda x: [f(x)], [x], None, None)


MEMORY = "not well formed: it reads memory before anything is written there, and result 0"
NOT = {
    "scratch never stored": (op(scratch_never_stored, **SCRATCH), MEMORY),
    "scratch stored if data says so": (op(scratch_stored_if_data_says_so, **SCRATCH), MEMORY),
    "half of scratch stored": (op(half_of_scratch_stored, **SCRATCH), MEMORY),
    "output half stored": (op(output_half_stored), MEMORY),
    "output added to": (op(output_added_to), MEMORY),
    "a step that the grid has not": (
        op(
            stored_in_a_step_that_the_grid_has_not,
            grid=(2,),
            in_specs=[pl.BlockSpec(ROWS, lambda i: (0, 0))],
            out_specs=pl.BlockSpec(ROWS, lambda i: (0, 0)),
        ),
        MEMORY,
    ),
    "a race": (
        op(read_before_the_copy_is_over, **COPY),
        "two accesses of one memory are not ordered\nRACE DETECTED",
    ),
    "a read past the end": (op(read_past_the_end, **COPY), "it reads out of bounds"),
}


@pytest.mark.parametrize("name", NOT)
def test_a_kernel_that_is_not_well_formed_is_refused(name):
    f, message = NOT[name]
    with pytest.raises(errors.RuleCheckError) as caught:
        look(f)
    assert message in str(caught.value)
    assert len(caught.value.kernels) == 1


def test_its_neighbours_pass():
    steps = dict(
        grid=(2,),
        in_specs=[pl.BlockSpec((4, 128), lambda i: (i, 0))],
        out_specs=pl.BlockSpec(ROWS, lambda i: (0, 0)),
    )

    def halves(x, o, scratch):
        summed_in_scratch(jnp.concatenate([x[...], x[...]]), o, scratch)

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for f in (
            op(halves, **SCRATCH, **steps),
            op(kept_by_a_mask, **SCRATCH),
            op(local_copy, **COPY),
        ):
            look(f)


def test_a_bwds_kernel_is_looked_at_too(cpu_mesh):
    good = op(lambda x, o: o.__setitem__(..., x[...]))
    f = jax.custom_vjp(good)
    f.defvjp(lambda x: (good(x), None), lambda _, g: (op(scratch_never_stored, **SCRATCH)(g),))
    with raises(errors.RuleCheckError, kernels=("<lambda>", "scratch_never_stored")):
        testing.check_rule(f, cpu_mesh, X, in_specs=P("data"))


def test_what_it_can_not_look_at_is_said():
    f = op(
        lambda x, o: o.__setitem__(..., x[...]), compiler_params=plt.CompilerParams(), name="mine"
    )
    with pytest.warns(UserWarning) as caught:
        look(f)
    assert str(caught[0].message) == (
        "check_rule could not look for races, memory that is read before it is written, or reads "
        "out of bounds in 'mine': JAX's TPU interpreter doesn't run kernels for GPUs"
    )


def test_jaxs_interpreter_is_left_as_it_was(cpu_mesh):
    from jax._src.pallas.mosaic.interpret import interpret_pallas_call as module

    before = module.RaceDetectionState
    with pytest.raises(errors.RuleCheckError):
        check(cpu_mesh, op(scratch_never_stored, **SCRATCH))
    assert module.RaceDetectionState is before and module.races is None
    x = np.ones(ROWS, np.float32)
    np.testing.assert_array_equal(op(functools.partial(_doubled))(x), 2 * x)


def _doubled(x, o):
    o[...] = 2 * x[...]
