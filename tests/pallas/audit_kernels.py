"""Kernels for the audit's tests: for each thing that it refuses, one that does it, and neighbours
that do almost the same and are proven."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.experimental.pallas import tpu as pltpu
from jax.experimental.pallas import triton as plt
from jax.extend.core import Primitive

ROWS = (8, 128)
X = jax.ShapeDtypeStruct(ROWS, jnp.float32)
COUNTS = jax.ShapeDtypeStruct((8,), jnp.int32)
TPU, TRITON = pltpu.CompilerParams(), plt.CompilerParams()
ANYWHERE = pl.BlockSpec(memory_space=pl.ANY)
IN_SMEM = pl.BlockSpec(memory_space=pltpu.SMEM)
VMEM = pltpu.VMEM(ROWS, jnp.float32)
DMA = pltpu.SemaphoreType.DMA


def call(kernel, *args, out=X, compiler_params=TPU, **kwargs):
    """Return the function of no arguments that calls a kernel on arrays of these shapes."""
    args = args or (X,)

    def run():
        return pl.pallas_call(kernel, out_shape=out, compiler_params=compiler_params, **kwargs)(
            *(jnp.zeros(a.shape, a.dtype) for a in args)
        )

    return run


def two_steps(kernel, *, over=lambda i: (0, 0), grid=(2,), **kwargs):
    """Call a kernel on a grid of two steps that see one block of the output."""
    return call(
        kernel,
        grid=grid,
        in_specs=[pl.BlockSpec(ROWS, lambda i: (i, 0))],
        out_specs=pl.BlockSpec(ROWS, over),
        **kwargs,
    )


def blocks(index_map, *args, kernel=None, grid=(2,), shape=(16, 128), block=ROWS, **kwargs):
    """Call a kernel that gets one block of an output of this shape in each step of a grid."""
    return call(
        kernel or ones,
        *args,
        grid=grid,
        out=jax.ShapeDtypeStruct(shape, jnp.float32),
        out_specs=pl.BlockSpec(block, index_map),
        **kwargs,
    )


def at(step, axis=0):
    """Run a function in one step of the grid."""
    return pl.when(pl.program_id(axis) == step)


# --- what the audit refuses ------------------------------------------------------------------


def remote_copy(x, o, send, receive):
    copy = pltpu.make_async_remote_copy(
        x, o, send, receive, device_id=(1,), device_id_type=pl.DeviceIdType.MESH
    )
    copy.start()
    copy.wait()


def remote_signal(x, o, semaphore):
    pl.semaphore_signal(semaphore, 1, device_id=1, device_id_type=pl.DeviceIdType.LOGICAL)
    o[...] = x[...]


def barrier_semaphore(x, o):
    pl.semaphore_wait(pltpu.get_barrier_semaphore(), 1)
    o[...] = x[...]


def semaphore_read(x, o, semaphore):
    o[...] = x[...] + pl.semaphore_read(semaphore)


def semaphore_handed_out(x, o, semaphore):
    o[...] = x[...]


def wait_for_nothing(x, o, buffer, semaphore):
    pltpu.make_async_copy(x, buffer, semaphore).wait()
    o[...] = buffer[...]


def read_before_wait(x, o, buffer, semaphore):
    copy = pltpu.make_async_copy(x, buffer, semaphore)
    copy.start()
    o[...] = buffer[...]
    copy.wait()


def wait_for_another(x, o, buffer, other, semaphores):
    copy = pltpu.make_async_copy(x, buffer, semaphores.at[0])
    copy.start()
    copy.wait()
    o[...] = other[...]


def device_place(x, o):
    o[...] = x[...] + lax.axis_index("data")


def device_place_in_index_map(x, o):
    o[...] = x[...]


def psum(x, o):
    o[...] = lax.psum(x[...], "data")


def ppermute(x, o):
    o[...] = lax.ppermute(x[...], "data", [(0, 1), (1, 0)])


def pure_callback(x, o):
    o[...] = jax.pure_callback(np.sin, X, x[...])


def io_callback(x, o):
    o[...] = jax.experimental.io_callback(np.sin, X, x[...])


def debug_callback(x, o):
    jax.debug.callback(lambda x: None, x[...])
    o[...] = x[...]


def ffi_call(x, o):
    o[...] = jax.ffi.ffi_call("somebodys_target", X)(x[...])


own_add_p = Primitive("add")  # an opaque operation of the user's with a harmless name
own_add_p.def_abstract_eval(lambda x, y: x)


def own_primitive(x, o):
    o[...] = own_add_p.bind(x[...], x[...])


def bits_without_seed(x, o):
    o[...] = x[...] + pltpu.prng_random_bits(ROWS).astype(jnp.float32)


def seed_on_one_path(counts, x, o):
    @pl.when(counts[0] > 0)
    def _():
        pltpu.prng_seed(counts[1])

    o[...] = x[...] + pltpu.prng_random_bits(ROWS).astype(jnp.float32)


def rng_uniform(x, o):
    o[...] = x[...] + lax.rng_uniform(0.0, 1.0, ROWS)


def empty(x, o):
    o[...] = x[...] + lax.empty(ROWS, jnp.float32)


def inline_asm(x, o):
    (o[...],) = plt.elementwise_inline_asm(
        "mov.u32 $0, %clock;", args=[x[...]], constraints="=r,r", pack=1, result_shape_dtypes=[X]
    )


def float_atomic(x, into, o):
    plt.atomic_add(o, (0, 0), x[0, 0])


def atomic_with_old_value(counts, into, o):
    o[1] = plt.atomic_add(o, (0,), counts[0])


def atomics_of_two_kinds(counts, into, o):
    plt.atomic_add(o, (0,), counts[0])
    plt.atomic_max(o, (0,), counts[0])


def atomic_cas(counts, o):
    plt.atomic_cas(o, counts[0], counts[1])


def volatile_load(x, o):
    o[...] = plt.load(x, volatile=True)


def scratch_never_stored(x, o, scratch):
    o[...] = x[...] + scratch[...]


def scratch_stored_on_one_path(counts, x, o, scratch):
    @pl.when(counts[0] > 0)
    def _():
        scratch[...] = x[...]

    o[...] = scratch[...]


def scratch_stored_in_a_loop(counts, x, o, scratch):
    def body(i):
        scratch[...] = x[...]
        return i + 1

    lax.while_loop(lambda i: i < counts[0], body, 0)
    o[...] = scratch[...]


def scratch_stored_too_late(x, o, scratch):
    @at(1)
    def _():
        scratch[...] = x[...]

    o[...] = x[...] + scratch[...]


def another_row_stored(x, o, scratch):
    scratch[0:4, :] = x[0:4, :]
    o[...] = x[...]
    o[0:4, :] = scratch[4:8, :]


def half_stored(x, o, scratch):
    scratch[0:4, :] = x[0:4, :]
    o[...] = scratch[...]


def half_copied(x, o, buffer, semaphore):
    copied = pltpu.make_async_copy(x.at[pl.ds(0, 4)], buffer.at[pl.ds(0, 4)], semaphore)
    copied.start()
    copied.wait()
    o[...] = buffer[...]


def kept_and_used(counts, x, o, scratch):
    """The mask keeps elements that nobody stored, and then somebody reads them."""
    kept = jnp.where(x[...] > 0, x[...], scratch[...])
    scratch[...] = kept
    o[...] = kept


def kept_then_read(x, o, scratch):
    mask = lax.broadcasted_iota(jnp.int32, ROWS, 0) < 4
    scratch[...] = jnp.where(mask, x[...], scratch[...])
    o[...] = scratch[...]


def kept_over_zeros(x, o, scratch):
    """What was kept from before the zeros is put over them."""
    before = scratch[...]
    scratch[...] = jnp.zeros(ROWS)
    scratch[...] = jnp.where(x[...] > 0, x[...], before)
    o[...] = scratch[...]


def kept_elsewhere(x, o, scratch):
    scratch[0:4, :] = jnp.where(x[0:4, :] > 0, x[0:4, :], scratch[4:8, :])
    o[...] = x[...]


def kept_by_itself(x, o, scratch):
    scratch[...] = lax.select(scratch[...], x[...] > 0, x[...] < 0)
    o[...] = x[...]


def read_in_a_later_round(counts, x, o, scratch):
    def body(i):
        @pl.when(i == 1)
        def _():
            o[...] = scratch[...]

        return i + 1

    o[...] = x[...]
    lax.while_loop(lambda i: i < counts[0], body, 0)


def output_added_to(x, o):
    o[...] += x[...]


def output_never_stored(x, o):
    x[...]


def output_half_stored(x, o):
    o[0:4, :] = x[0:4, :]


def output_stored_if_data_says_so(x, o):
    @pl.when(x[0, 0] > 0)
    def _():
        o[...] = x[...]


def output_stored_if_a_loop_over_data_says_so(x, o):
    steps = lax.while_loop(lambda i: x[0, i] > 0, lambda i: i + 1, 0)

    @pl.when(steps > 3)
    def _():
        o[...] = x[...]


def output_masked_by_data(x, o):
    plt.store(o, x[...], mask=x[...] > 0)


def output_masked_in_part_by_data(x, o):
    o[0:4, :] = x[0:4, :]
    o[4:8, :] = jnp.where(x[4:8, :] > 0, x[4:8, :], o[4:8, :])


def output_stored_never(x, o):
    @pl.when(pl.program_id(0) * 0 == 1)
    def _():
        o[...] = x[...]


def output_stored_in_step_seven(x, o):
    @at(7)
    def _():
        o[...] = x[...]


def summed_from_the_first_step(x, o):
    @at(0)
    def _():
        o[...] = jnp.zeros(ROWS)

    o[...] += x[...]


def in_rounds(rounds, *, rows=1, whiles=False, start=0):
    """Return a kernel that fills rows of scratch in the rounds of a loop, and reads all of it."""

    def kernel(x, o, scratch):
        def body(i, _):
            row = pl.multiple_of(i * rows, rows)
            scratch[pl.ds(row, rows), :] = x[pl.ds(row, rows), :]

        def one(i):
            body(i, None)
            return i + 1

        if whiles:
            lax.while_loop(lambda i: i < rounds, one, start)
        else:
            lax.fori_loop(start, rounds, body, None)
        o[...] = scratch[...]

    return kernel


def filled_from_a_count(counts, x, o, scratch):
    def body(i):
        scratch[i, :] = x[i, :]
        return i + 1

    lax.while_loop(lambda i: i < 4, body, counts[0])
    scratch[0, :] = x[0, :]
    o[...] = scratch[...]


def output_in_rounds(rounds):
    """Return a kernel that stores an output in the rounds of a loop."""

    def kernel(x, o):
        def body(i, _):
            o[...] = x[...]

        lax.fori_loop(0, rounds, body, None)

    return kernel


def output_rows_in_rounds(rounds):
    """Return a kernel that stores rows of an output in the rounds of a loop."""

    def kernel(x, o):
        def body(i, _):
            o[i, :] = x[i, :]

        lax.fori_loop(0, rounds, body, None)

    return kernel


def read_between(first, x, o, scratch):
    """Half of scratch is stored, then some of it is read, then the rest is stored."""
    scratch[0:4, :] = x[0:4, :]
    o[...] = x[...]
    o[0:first, :] = scratch[0:first, :]
    scratch[4:8, :] = x[4:8, :]


def row_for_each_program(x, o, scratch):
    scratch[pl.program_id(0), :] = x[0, :]
    o[...] = x[...]

    @pl.when(pl.program_id(0) == pl.num_programs(0) - 1)
    def _():
        o[...] = scratch[...]


def waits_for(rows, x, o, buffer, semaphore):
    """The wait names ``rows`` rows of a buffer to which eight are copied, or four."""
    copied = pltpu.make_async_copy(x.at[pl.ds(0, rows)], buffer.at[pl.ds(0, rows)], semaphore)
    copied.start()
    pltpu.make_async_copy(x, buffer, semaphore).wait()
    o[...] = buffer[...]


def ones(x, o):
    o[...] = jnp.ones_like(o)


def ones_at_first(axis, x, o):
    @at(0, axis)
    def _():
        ones(x, o)


def rows_at_first(x, o):
    """All of a block in the first step, half of it in the others."""
    o[0:4, :] = jnp.ones((4, 128))

    @at(0)
    def _():
        o[4:8, :] = jnp.ones((4, 128))


def ones_at_first_or_by_data(x, o):
    @pl.when((pl.program_id(0) == 0) | (x[0, 0] > 0))
    def _():
        ones(x, o)


def ones_at_first_else_by_data(x, o):
    ones_at_first(0, x, o)

    @pl.when(pl.program_id(0) != 0)
    def _():
        @pl.when(x[0, 0] > 0)
        def _():
            ones(x, o)


def ones_where_it_wraps(x, o):
    """The condition holds: unsigned numbers wrap around."""

    @pl.when(pl.program_id(0).astype(jnp.uint32) - jnp.uint32(1) > jnp.uint32(5))
    def _():
        ones(x, o)


def row_after_additions(x, o):
    row = pl.program_id(0)
    for _ in range(3000):
        row = row + 1
    o[pl.ds(row, 1), :] = x[0:1, :]


def nothing(x, o):
    pass


# --- neighbours that are proven --------------------------------------------------------------


def copy(x, o):
    o[...] = x[...]


def constant(o):
    o[...] = jnp.ones(ROWS)


def local_copy(x, o, buffer, semaphore):
    copied = pltpu.make_async_copy(x, buffer, semaphore)
    copied.start()
    copied.wait()
    o[...] = buffer[...]


def local_copies_in_turn(x, o, buffer, semaphores):
    """Two buffers in turn, the next copy under way while this one is used."""

    def copied(i):
        slot = lax.rem(i, 2)
        return pltpu.make_async_copy(x.at[pl.ds(i * 8, 8)], buffer.at[slot], semaphores.at[slot])

    copied(0).start()

    def body(i, total):
        @pl.when(i < 3)
        def _():
            copied(i + 1).start()

        copied(i).wait()
        return total + buffer[lax.rem(i, 2)]

    o[...] = lax.fori_loop(0, 4, body, jnp.zeros(ROWS))


def updated_in_place(x, o, buffer, semaphore):
    def copied(source, target):
        copy = pltpu.make_async_copy(source, target, semaphore)
        copy.start()
        copy.wait()

    copied(o, buffer)
    buffer[...] = buffer[...] * 2
    copied(buffer, o)


def local_signal(x, o, semaphore):
    pl.semaphore_signal(semaphore, 1)
    pl.semaphore_wait(semaphore, 1)
    o[...] = x[...]


def unused_place(x, o):
    lax.axis_index("data")
    o[...] = x[...]


def seeded_bits(counts, x, o):
    pltpu.prng_seed(counts[0], pl.program_id(0))
    o[...] = x[...] + pltpu.prng_random_bits(ROWS).astype(jnp.float32)


def seeded_once(counts, x, o):
    @at(0)
    def _():
        pltpu.prng_seed(counts[0])

    o[...] = x[...] + pltpu.prng_random_bits(ROWS).astype(jnp.float32)


def integer_atomic(counts, into, o):
    plt.atomic_add(o, (0,), counts[0])


def scratch_chosen(counts, x, o, scratch):
    def store(value):
        scratch[...] = value

    lax.cond(counts[0] > 0, lambda: store(x[...]), lambda: store(-x[...]))
    o[...] = scratch[...]


def scratch_stored_in_a_loop_that_runs(x, o, scratch):
    def body(i, carry):
        scratch[...] = x[...] * i
        return carry

    lax.fori_loop(0, 3, body, 0)
    o[...] = scratch[...]


def stored_in_the_first_round(counts, x, o, scratch):
    def body(i):
        @pl.when(i == 0)
        def _():
            scratch[...] = jnp.zeros(ROWS)

        scratch[...] += x[...]
        return i + 1

    lax.while_loop(lambda i: i < counts[0], body, 0)
    o[...] = x[...]


def dropped_in_the_first_round(counts, x, o, scratch):
    def body(i):
        before = jnp.where(i == 0, jnp.zeros(ROWS), scratch[...])
        scratch[...] = before + x[...]
        return i + 1

    lax.while_loop(lambda i: i < counts[0], body, 0)
    o[...] = x[...]


def summed_in_scratch(x, o, scratch):
    @at(0)
    def _():
        scratch[...] = jnp.zeros(ROWS)

    scratch[...] += x[...]

    @at(1)
    def _():
        o[...] = scratch[...]


def masked_load(x, o):
    mask = lax.broadcasted_iota(jnp.int32, ROWS, 0) < 4
    o[...] = plt.load(x, mask=mask)


def masked_load_with_other(x, o):
    mask = lax.broadcasted_iota(jnp.int32, ROWS, 0) < 4
    o[...] = plt.load(x, mask=mask, other=0.0)


def kept_by_data(x, o):
    o[...] = jnp.where(x[...] > 0, x[...], o[...])


def kept_by_a_mask(counts, x, o):
    mask = lax.broadcasted_iota(jnp.int32, ROWS, 0) < counts[0]
    o[...] = jnp.where(mask, x[...], o[...])


def kept_in_the_last_step(counts, x, o):
    @at(1)
    def _():
        kept_by_a_mask(counts, x, o)


def output_masked_by_a_count(counts, x, o):
    plt.store(o, x[...], mask=lax.broadcasted_iota(jnp.int32, ROWS, 0) < counts[0])


def scratch_masked_by_data(x, o, scratch):
    plt.store(scratch, x[...], mask=x[...] > 0)
    o[...] = scratch[...]


def scratch_masked_by_a_count(counts, x, o, scratch):
    plt.store(scratch, x[...], mask=lax.broadcasted_iota(jnp.int32, ROWS, 0) < counts[0])
    o[...] = scratch[...]


def kept_after_zeros(x, o, scratch):
    scratch[...] = jnp.zeros(ROWS)
    scratch[...] = jnp.where(x[...] > 0, x[...], scratch[...])
    o[...] = scratch[...]


def read_in_later_rounds(counts, x, o, scratch):
    """Half of scratch is stored in the round before the one that reads it."""
    scratch[0:4, :] = x[0:4, :]
    o[...] = x[...]

    def body(i):
        @pl.when(i > counts[1])
        def _():
            o[...] = scratch[...]

        scratch[4:8, :] = x[4:8, :]
        return i + 1

    lax.while_loop(lambda i: i < counts[0], body, 0)


def row_that_data_chooses(counts, x, o, scratch):
    """What is read is a row that the round before may have stored, or another."""
    o[...] = x[...]
    scratch[0, :] = x[0, :]

    def body(i, _):
        row = counts[i]
        o[0:1, :] = scratch[pl.ds(row, 1), :]
        scratch[pl.ds(row, 1), :] = x[0:1, :]

    lax.fori_loop(0, 3, body, None)


def read_in_a_later_step(x, o, scratch):
    """Half of scratch is stored in the second step, and all of it read in the third."""
    scratch[0:4, :] = x[0:4, :]

    @at(2)
    def _():
        o[...] = scratch[...]

    @at(1)
    def _():
        scratch[4:8, :] = x[4:8, :]


def output_read_in_later_steps(x, o):
    """Half of the output is stored in the step before the one that reads it."""
    o[0:4, :] = x[0:4, :]

    @pl.when(pl.program_id(0) > 0)
    def _():
        o[...] += x[...]

    o[4:8, :] = x[4:8, :]


def rows_stored_one_by_one(x, o, scratch):
    scratch[0:4, :] = x[0:4, :]
    scratch[4:8, :] = x[4:8, :]
    o[0:4, :] = scratch[4:8, :]
    o[4:8, :] = scratch[0:4, :]


def halves_stored(x, o, scratch):
    scratch[0:4, :] = x[0:4, :]
    scratch[4:8, :] = x[4:8, :]
    o[...] = scratch[...]


def output_stored_if_a_count_says_so(counts, x, o):
    @pl.when(counts[0] > 0)
    def _():
        o[...] = x[...]


def printed(x, o):
    pl.debug_print("x is {}", x[0, 0])
    o[...] = x[...]


def nested(x, o):
    """Every kind of nested jaxpr, each of a harmless sort."""

    @jax.custom_jvp
    def double(value):
        return value * 2

    double.defjvp(lambda p, t: (double(*p), 2 * t[0]))

    @jax.custom_vjp
    def negated(value):
        return -value

    negated.defvjp(lambda v: (-v, None), lambda _, g: (-g,))
    value = jax.jit(jnp.sin)(x[...]) + jax.checkpoint(jnp.cos)(x[...])
    value = lax.fori_loop(0, 4, lambda i, v: v + i, double(value))
    value = lax.while_loop(lambda v: v[0, 0] < 0, lambda v: v + 1, negated(value))
    o[...] = lax.cond(value[0, 0] > 0, jnp.exp, jnp.tanh, value)


def inside(kernel, how):
    """Return a kernel that does what ``kernel`` does, inside a nested jaxpr."""

    def jitted(x, o):
        jax.jit(lambda: kernel(x, o))()

    def branched(x, o):
        lax.cond(x[0, 0] > 0, lambda: kernel(x, o), lambda: copy(x, o))

    def scanned(x, o):
        lax.fori_loop(0, 2, lambda i, c: (kernel(x, o), c)[1], 0)

    def looped(x, o):
        def body(i):
            kernel(x, o)
            return i + 1

        copy(x, o)
        lax.while_loop(lambda i: i < 2, body, 0)

    def scoped(x, o):
        pl.run_scoped(lambda _: kernel(x, o), VMEM)

    return locals()[how]


# --- Mosaic GPU ------------------------------------------------------------------------------


def mosaic(body, *, scratch=(), out=jax.ShapeDtypeStruct((128,), jnp.float32), **kwargs):
    """Call a kernel of Mosaic GPU on one array."""

    def run():
        return plgpu.kernel(body, out_shape=out, scratch_shapes=list(scratch), **kwargs)(
            jnp.zeros((128,), jnp.float32)
        )

    return run


SMEM = plgpu.SMEM((128,), jnp.float32)
BARRIER = plgpu.Barrier()


def smem_copy(x, o, smem, barrier):
    plgpu.copy_gmem_to_smem(x, smem, barrier)
    plgpu.barrier_wait(barrier)
    smem[...] = smem[...] * 2
    plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(smem, o)
    plgpu.wait_smem_to_gmem(0)


def smem_without_wait(x, o, smem, barrier):
    plgpu.copy_gmem_to_smem(x, smem, barrier)
    o[...] = smem[...]


def smem_after_own_arrival(x, o, smem, barrier):
    plgpu.barrier_arrive(barrier)
    plgpu.barrier_wait(barrier)
    o[...] = smem[...]
    smem[...] = x[...]


def handed_over(x, o, smem, barrier):
    """One thread stores, the other one reads after the barrier."""
    who = lax.axis_index("wg")

    @pl.when(who == 0)
    def _():
        smem[...] = x[...]
        plgpu.barrier_arrive(barrier)

    @pl.when(who == 1)
    def _():
        plgpu.barrier_wait(barrier)
        o[...] = smem[...]


def not_handed_over(x, o, smem, barrier):
    """The thread that stores does not arrive at the barrier; the one that reads does."""

    def reads():
        plgpu.barrier_arrive(barrier)
        plgpu.barrier_wait(barrier)
        o[...] = smem[...]

    def stores():
        smem[...] = x[...]

    lax.cond(lax.axis_index("wg") == 1, reads, stores)


def handed_over_in_the_next_round(x, o, smem, barrier):
    def body(i, carry):
        @pl.when(i > 0)
        def _():
            plgpu.barrier_arrive(barrier)

        smem[...] = x[...]
        return carry

    def reads():
        plgpu.barrier_wait(barrier)
        o[...] = smem[...]

    lax.cond(lax.axis_index("wg") == 1, reads, lambda: lax.fori_loop(0, 2, body, None))


def reducing_copy(x, o, smem, barrier):
    plgpu.copy_gmem_to_smem(x, smem, barrier)
    plgpu.barrier_wait(barrier)
    plgpu.copy_smem_to_gmem(smem, o, reduction_op="add")
    plgpu.wait_smem_to_gmem(0)


def peer(x, o):
    o[...] = plgpu.remote_ref(x, jnp.int32(1))[...]


def inline_mgpu(x, o):
    @plgpu.inline_mgpu()
    def nothing(ctx):
        del ctx

    nothing()
    o[...] = x[...]


def global_semaphore(x, o):
    pl.get_global(plgpu.SemaphoreType.REGULAR)
    o[...] = x[...]


def barrier_test(x, o, barrier):
    plgpu.barrier_arrive(barrier)
    o[...] = x[...] + plgpu.barrier_test(barrier).astype(jnp.float32)
