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
REGULAR = pltpu.SemaphoreType.REGULAR


def call(kernel, *args, out=X, compiler_params=TPU, **kwargs):
    """Return the function of no arguments that calls a kernel on arrays of these shapes."""
    args = args or (X,)

    def run():
        return pl.pallas_call(kernel, out_shape=out, compiler_params=compiler_params, **kwargs)(
            *(jnp.zeros(a.shape, a.dtype) for a in args)
        )

    return run


def bits():
    """Draw random bits."""
    return pltpu.prng_random_bits(ROWS).astype(jnp.float32)


# --- what the audit refuses ------------------------------------------------------------------


def remote_copy(x, o, send, receive):
    copy = pltpu.make_async_remote_copy(
        x, o, send, receive, device_id=(1,), device_id_type=pl.DeviceIdType.MESH
    )
    copy.start()
    copy.wait()


def remote_wait(x, o, send, receive):
    """Only waits for a copy that another device starts."""
    pltpu.make_async_remote_copy(
        x, o, send, receive, device_id=(1,), device_id_type=pl.DeviceIdType.MESH
    ).wait_recv()


def adding_copy(x, o, semaphore):
    copy = pltpu.make_async_copy(x, o, semaphore)
    copy.start(add=True)
    copy.wait()


def remote_signal(x, o, semaphore):
    pl.semaphore_signal(semaphore, 1, device_id=1, device_id_type=pl.DeviceIdType.LOGICAL)
    o[...] = x[...]


def signal_along_data(x, o, semaphore):
    """To JAX this is the axis of the mesh of devices, whatever the grid calls its own."""
    pl.semaphore_signal(semaphore, 1, device_id={"data": 1})
    o[...] = x[...]


def signal_anywhere(x, o, semaphore):
    """Asks for its place along one axis, and reaches devices along any."""
    device = lax.axis_index("data") + 1
    pl.semaphore_signal(semaphore, 1, device_id=device, device_id_type=pl.DeviceIdType.LOGICAL)
    o[...] = x[...]


def copy_along_data(x, o, send, receive):
    pltpu.async_remote_copy(x, o, send, receive, device_id={"data": 1}).wait()


def wait_on_a_semaphore(x, o, semaphore):
    pl.semaphore_wait(semaphore, 1)
    o[...] = x[...]


def barrier_semaphore(x, o):
    pl.semaphore_wait(pltpu.get_barrier_semaphore(), 1)
    o[...] = x[...]


def semaphore_read(x, o, semaphore):
    o[...] = x[...] + pl.semaphore_read(semaphore)


def semaphore_handed_out(x, o, semaphore):
    o[...] = x[...]


def device_place(x, o):
    o[...] = x[...] + lax.axis_index("data")


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


def another_kernel(x, o):
    o[...] = pl.pallas_call(copy, out_shape=X)(x[...])


def bits_without_seed(x, o):
    o[...] = x[...] + bits()


def seed_too_late(counts, x, o):
    o[...] = x[...] + bits()
    pltpu.prng_seed(counts[0])


def seed_on_one_path(counts, x, o):
    pl.when(counts[0] > 0)(lambda: pltpu.prng_seed(counts[1]))
    o[...] = x[...] + bits()


def seed_in_a_loop(counts, x, o):
    def body(i):
        pltpu.prng_seed(counts[1])
        return i + 1

    lax.while_loop(lambda i: i < counts[0], body, 0)
    o[...] = x[...] + bits()


def seed_in_no_round(counts, x, o):
    lax.fori_loop(0, 0, lambda i, c: (pltpu.prng_seed(counts[0]), c)[1], 0)
    o[...] = x[...] + bits()


def seed_in_the_first_step(counts, x, o):
    """What the other steps draw from is what was left, on a core that may be another."""
    pl.when(pl.program_id(0) == 0)(lambda: pltpu.prng_seed(counts[0]))
    o[...] = x[...] + bits()


def seed_of_the_device(x, o):
    pltpu.prng_seed(lax.axis_index("data"))
    o[...] = x[...] + bits()


def seed_at_the_end_of_each_round(x, o):
    def body(i, total):
        total += bits()
        pltpu.prng_seed(i)
        return total

    o[...] = lax.fori_loop(0, 3, body, x[...])


def bits_in_a_condition(x, o):
    o[...] = lax.while_loop(lambda _: bits()[0, 0] > 0, lambda v: v + 1, x[...])


def bits_in_a_custom_jvp(x, o):
    noisy = jax.custom_jvp(lambda v: v + bits())
    noisy.defjvp(lambda p, t: (noisy(*p), t[0]))
    o[...] = noisy(x[...])


def seed_of_nothing(x, o):
    pltpu.prng_seed()
    o[...] = x[...] + bits()


def stateful_key(x, o):
    """Looks like a draw from a key; the key stands for the device's own generator."""
    o[...] = pltpu.stateful_uniform(ROWS)


def rng_uniform(x, o):
    o[...] = x[...] + lax.rng_uniform(0.0, 1.0, ROWS)


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


def atomic_beside_a_read(counts, into, o):
    """The aliased operand is the same memory."""
    plt.atomic_add(o, (0,), into[1])


def atomic_beside_a_nested_read(counts, into, o):
    plt.atomic_add(o, (0,), jax.jit(lambda: lax.cond(counts[0] > 0, lambda: o[1], lambda: 1))())


def atomic_exchange(counts, into, o):
    plt.atomic_xchg(o, (0,), counts[0])


def atomic_cas(counts, o):
    plt.atomic_cas(o, counts[0], counts[1])


def volatile_load(x, o):
    o[...] = plt.load(x, volatile=True)


def float_scatter_add(counts, x, o):
    o[...] = x[...].at[counts[...]].add(1.0)


# --- neighbours that are proven --------------------------------------------------------------


def copy(x, o):
    o[...] = x[...]


def local_copy(x, o, buffer, semaphore):
    copied = pltpu.make_async_copy(x, buffer, semaphore)
    copied.start()
    copied.wait()
    o[...] = buffer[...]


def local_signal(x, o, semaphore):
    pl.semaphore_signal(semaphore, 1)
    pl.semaphore_wait(semaphore, 1)
    o[...] = x[...]


def signal_along_cores(x, o, semaphore):
    pl.semaphore_signal(semaphore, 1, device_id={"core": 1})
    pl.semaphore_wait(semaphore, 1)
    pltpu.sync_copy(x, o)


def unused_place(x, o):
    lax.axis_index("data")
    o[...] = x[...]


def seeded_bits(counts, x, o):
    pltpu.prng_seed(counts[0], pl.program_id(0))
    o[...] = x[...] + bits()


def seeded_by_a_constant(x, o):
    pltpu.prng_seed(7)
    o[...] = pltpu.stateful_uniform(ROWS)


def seeded_on_both_paths(counts, x, o):
    lax.cond(counts[0] > 0, lambda: pltpu.prng_seed(counts[1]), lambda: pltpu.prng_seed(0))
    o[...] = x[...] + lax.fori_loop(0, 3, lambda i, total: total + bits(), jnp.zeros(ROWS))


def bits_of_a_key(x, o):
    key = jax.random.key(3, impl="pallas_tpu")
    o[...] = x[...] + jax.random.uniform(jax.random.fold_in(key, 1), ROWS)


def integer_atomic(counts, into, o):
    plt.atomic_add(o, (0,), counts[0])


def scratch_filled_if_data_says_so(x, o, scratch):
    """Whether it is well formed depends on data: splash attention and megablox are like this."""
    pl.when(x[0, 0] > 0)(lambda: scratch.__setitem__(..., x[...]))
    o[...] = scratch[...]


def set_in_a_value(x, o):
    o[...] = x[...].at[0].set(1.0).at[1, 2].max(3.0)


def checked_and_printed(x, o):
    pl.debug_check(x[0, 0] > 0, "it is negative")
    pl.debug_print("x is {}", x[0, 0])
    o[...] = x[...]


def by_platform(x, o):
    o[...] = lax.platform_dependent(x[...], tpu=lambda v: 2 * v, default=lambda v: v + v)


def place_in_the_grid(x, o):
    pl.delay(10)
    o[...] = x[...] + pl.program_id(0) / pl.num_programs(0)


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

    def jitted(*refs):
        jax.jit(lambda: kernel(*refs))()

    def branched(*refs):
        lax.cond(refs[0][0, 0] > 0, lambda: kernel(*refs), lambda: copy(*refs[:2]))

    def scanned(*refs):
        lax.fori_loop(0, 2, lambda i, c: (kernel(*refs), c)[1], 0)

    def looped(*refs):
        def body(i):
            kernel(*refs)
            return i + 1

        lax.while_loop(lambda i: i < 2, body, 0)

    def scoped(*refs):
        pl.run_scoped(lambda _: kernel(*refs), VMEM)

    return locals()[how]


# --- Mosaic GPU ------------------------------------------------------------------------------


def mosaic(body, *, scratch=(), out=jax.ShapeDtypeStruct((128,), jnp.float32), **kwargs):
    """Call a kernel of Mosaic GPU on one array."""

    def run():
        return plgpu.kernel(body, out_type=out, scratch_types=list(scratch), **kwargs)(
            jnp.zeros((128,), jnp.float32)
        )

    return run


SMEM = plgpu.SMEM((128,), jnp.float32)
BARRIER = plgpu.Barrier()


def smem_copy(x, o, smem, barrier, *, reduction_op=None):
    plgpu.copy_gmem_to_smem(x, smem, barrier)
    plgpu.barrier_wait(barrier)
    smem[...] = smem[...] * 2
    plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(smem, o, reduction_op=reduction_op)
    plgpu.wait_smem_to_gmem(0)


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
