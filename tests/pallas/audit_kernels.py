"""Kernels for the audit's tests: for each thing that it refuses, one that does it, and neighbours
that do almost the same and are proven."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.experimental.pallas import tpu as pltpu
from jax.experimental.pallas import tpu_sc as plsc
from jax.experimental.pallas import triton as plt
from jax.extend.core import Primitive

ROWS = (8, 128)
X = jax.ShapeDtypeStruct(ROWS, jnp.float32)
COUNT, COUNTS = jax.ShapeDtypeStruct((), jnp.int32), jax.ShapeDtypeStruct((8,), jnp.int32)
TPU, TRITON = pltpu.CompilerParams(), plt.CompilerParams()
ANYWHERE = pl.BlockSpec(memory_space=pl.ANY)
IN_SMEM = pl.BlockSpec(memory_space=pltpu.SMEM)
VMEM = pltpu.VMEM(ROWS, jnp.float32)
DMA = pltpu.SemaphoreType.DMA
REGULAR = pltpu.SemaphoreType.REGULAR
SEMAPHORE = dict(scratch_shapes=[REGULAR])
PIPED = dict(in_specs=[ANYWHERE], out_specs=ANYWHERE)
REMOTE = dict(**PIPED, scratch_shapes=[DMA] * 2)

# What is said of a kernel, and what of that contradicts a declaration of no_communication.
PLACE = "it reads this device's position along mesh axis data"
RACE = "the value that it reads depends on which program runs first"
TIMING = "its result depends on timing"
OUT = "it calls out of the kernel"
ASSEMBLY = "inline code can read a clock or an SM's id"
ACROSS = "it copies to or from another device"
SIGNALS = "it signals a semaphore of another device"
COLLECTIVE = "it is a collective over a mesh axis"
MEETING = "devices meet at a barrier semaphore"
ADDS = "copies that add run in no fixed order"
STATE = "its state lives outside of the kernel"
UNLISTED = "it is not on the audit's allow list"
STRANGE_KEYS = "its keys belong to a generator that is not JAX's own"
PEER = "PeerMemRef is a view of another device's memory"
WRITES = "it writes the memory of other devices"
READS = "it reads the memory of other devices"
ALL = "it signals semaphores of other devices"
NO_TIME = "atomic operations run in no fixed order"
CONTRADICTS = {PLACE, ACROSS, SIGNALS, COLLECTIVE, PEER, WRITES, READS, ALL}
PRNG = "random bits are drawn before a seed is set on every path"
NO_ORDER = "sums of floating-point numbers in no fixed order differ by rounding between devices"

# name -> (function that calls the kernel, the primitive named, what is said of it); and those that
# are proven.
REFUSED, PROVEN = {}, {}


def call(kernel, *, takes=(X,), out=X, compiler_params=TPU, **kwargs):
    """Return the function of no arguments that calls a kernel on arrays of these shapes."""

    def run():
        return pl.pallas_call(kernel, out_shape=out, compiler_params=compiler_params, **kwargs)(
            *(jnp.zeros(a.shape, a.dtype) for a in takes)
        )

    return run


def counted(kernel, **kwargs):
    """Call a kernel on counts in SMEM and an array."""
    return call(kernel, takes=(COUNTS, X), in_specs=[IN_SMEM, pl.BlockSpec()], **kwargs)


def atomic(kernel, of=COUNTS):
    """Call a kernel of Triton on an operand and an aliased one."""
    aliased = dict(input_output_aliases={1: 0}, compiler_params=TRITON)
    return call(kernel, takes=(of, of), out=of, **aliased)


def mosaic(body, *, scratch=(), out=jax.ShapeDtypeStruct((128,), jnp.float32), **kwargs):
    """Call a kernel of Mosaic GPU on one array."""

    def run():
        return plgpu.kernel(body, out_type=out, scratch_types=list(scratch), **kwargs)(
            jnp.zeros((128,), jnp.float32)
        )

    return run


def refused(primitive, reason, by=call, **how):
    """Note what is said of a kernel that is called in this way."""

    def note(kernel):
        REFUSED[kernel.__name__] = by(kernel, **how), primitive, reason
        return kernel

    return note


def proven(by=call, **how):
    """Note that a kernel that is called in this way is proven."""

    def note(kernel):
        PROVEN[kernel.__name__] = by(kernel, **how)
        return kernel

    return note


def bits():
    """Draw random bits."""
    return pltpu.prng_random_bits(ROWS).astype(jnp.float32)


DRAWN = pl.BlockSpec(ROWS, lambda i: (bits()[0, 0].astype(int), 0))

# --- what the audit refuses ------------------------------------------------------------------


@refused("dma_start", ACROSS, **REMOTE)
def remote_copy(x, o, send, receive):
    copy = pltpu.make_async_remote_copy(
        x, o, send, receive, device_id=(1,), device_id_type=pl.DeviceIdType.MESH
    )
    copy.start()
    copy.wait()


@refused("dma_wait", ACROSS, **REMOTE)
def remote_wait(x, o, send, receive):
    """Only waits for a copy that another device starts."""
    pltpu.make_async_remote_copy(
        x, o, send, receive, device_id=(1,), device_id_type=pl.DeviceIdType.MESH
    ).wait_recv()


@refused("dma_start", ADDS, **PIPED, scratch_shapes=[DMA])
def adding_copy(x, o, semaphore):
    copy = pltpu.make_async_copy(x, o, semaphore)
    copy.start(add=True)
    copy.wait()


@refused("semaphore_signal", SIGNALS, **SEMAPHORE)
def remote_signal(x, o, semaphore):
    pl.semaphore_signal(semaphore, 1, device_id=1, device_id_type=pl.DeviceIdType.LOGICAL)
    o[...] = x[...]


@refused("semaphore_signal", SIGNALS, grid=(("data", 2),), **SEMAPHORE)
def signal_along_data(x, o, semaphore):
    """To JAX this is the axis of the mesh of devices, whatever the grid calls its own."""
    pl.semaphore_signal(semaphore, 1, device_id={"data": 1})
    o[...] = x[...]


def signal_anywhere(x, o, semaphore):
    """Asks for its place along one axis, and reaches devices along any."""
    device = lax.axis_index("data") + 1
    pl.semaphore_signal(semaphore, 1, device_id=device, device_id_type=pl.DeviceIdType.LOGICAL)
    o[...] = x[...]


@refused("dma_start", ACROSS, grid=(("data", 2),), **REMOTE)
def copy_along_data(x, o, send, receive):
    pltpu.async_remote_copy(x, o, send, receive, device_id={"data": 1}).wait()


@refused("semaphore_wait", MEETING, scratch_shapes=[pltpu.SemaphoreType.BARRIER])
def wait_on_a_semaphore(x, o, semaphore):
    pl.semaphore_wait(semaphore, 1)
    o[...] = x[...]


@refused("get_barrier_semaphore", MEETING)
def barrier_semaphore(x, o):
    pl.semaphore_wait(pltpu.get_barrier_semaphore(), 1)
    o[...] = x[...]


@refused("semaphore_read", TIMING, **SEMAPHORE)
def semaphore_read(x, o, semaphore):
    o[...] = x[...] + pl.semaphore_read(semaphore)


def semaphore_handed_out(x, o, semaphore):
    o[...] = x[...]


@refused("axis_index", PLACE)
def device_place(x, o):
    o[...] = x[...] + lax.axis_index("data")


own_add_p = Primitive("add")  # an opaque operation of the user's with a harmless name
own_add_p.def_abstract_eval(lambda x, y: x)

OF_VALUES = {
    "ppermute": (COLLECTIVE, lambda v: lax.ppermute(v, "data", [(0, 1), (1, 0)])),
    "pure_callback": (OUT, lambda v: jax.pure_callback(np.sin, X, v)),
    "io_callback": (OUT, lambda v: jax.experimental.io_callback(np.sin, X, v)),
    "ffi_call": (OUT, lambda v: jax.ffi.ffi_call("somebodys_target", X)(v)),
    "add": (UNLISTED, lambda v: own_add_p.bind(v, v)),
    "pallas_call": (UNLISTED, lambda v: pl.pallas_call(copy, out_shape=X)(v)),
    "prng_random_bits": (PRNG, lambda v: v + bits()),
    "rng_uniform": (STATE, lambda v: v + lax.rng_uniform(0.0, 1.0, ROWS)),
}
for name, (reason, f) in OF_VALUES.items():
    kernel = functools.partial(lambda x, o, f: o.__setitem__(..., f(x[...])), f=f)
    REFUSED[name] = call(kernel), name, reason


@refused("psum", COLLECTIVE)
def psum(x, o):
    o[...] = lax.psum(x[...], "data")


@refused("debug_callback", OUT)
def debug_callback(x, o):
    jax.debug.callback(lambda x: None, x[...])
    o[...] = x[...]


@refused("prng_random_bits", PRNG, by=counted)
def seed_too_late(counts, x, o):
    o[...] = x[...] + bits()
    pltpu.prng_seed(counts[0])


@refused("prng_random_bits", PRNG, by=counted)
def seed_on_one_path(counts, x, o):
    pl.when(counts[0] > 0)(lambda: pltpu.prng_seed(counts[1]))
    o[...] = x[...] + bits()


@refused("prng_random_bits", PRNG, by=counted)
def seed_in_a_loop(counts, x, o):
    def body(i):
        pltpu.prng_seed(counts[1])
        return i + 1

    lax.while_loop(lambda i: i < counts[0], body, 0)
    o[...] = x[...] + bits()


@refused("prng_random_bits", PRNG, by=counted)
def seed_in_no_round(counts, x, o):
    lax.fori_loop(0, 0, lambda i, c: (pltpu.prng_seed(counts[0]), c)[1], 0)
    o[...] = x[...] + bits()


@refused("prng_random_bits", PRNG, by=counted, grid=(2,))
def seed_in_the_first_step(counts, x, o):
    """What the other steps draw from is what was left, on a core that may be another."""
    pl.when(pl.program_id(0) == 0)(lambda: pltpu.prng_seed(counts[0]))
    o[...] = x[...] + bits()


@refused("axis_index", PLACE)
def seed_of_the_device(x, o):
    pltpu.prng_seed(lax.axis_index("data"))
    o[...] = x[...] + bits()


@refused("prng_random_bits", PRNG)
def seed_at_the_end_of_each_round(x, o):
    def body(i, total):
        total += bits()
        pltpu.prng_seed(i)
        return total

    o[...] = lax.fori_loop(0, 3, body, x[...])


@refused("prng_random_bits", PRNG)
def bits_in_a_condition(x, o):
    o[...] = lax.while_loop(lambda _: bits()[0, 0] > 0, lambda v: v + 1, x[...])


@refused("prng_random_bits", PRNG)
def bits_in_a_custom_jvp(x, o):
    noisy = jax.custom_jvp(lambda v: v + bits())
    noisy.defjvp(lambda p, t: (noisy(*p), t[0]))
    o[...] = noisy(x[...])


@refused("prng_seed", "it has no seed")
def seed_of_nothing(x, o):
    pltpu.prng_seed()
    o[...] = x[...] + bits()


@refused("random_bits", PRNG)
def stateful_key(x, o):
    """Looks like a draw from a key; the key stands for the device's own generator."""
    o[...] = pltpu.stateful_uniform(ROWS)


@refused("elementwise_inline_asm(_p)?", ASSEMBLY, compiler_params=TRITON)
def inline_asm(x, o):
    (o[...],) = plt.elementwise_inline_asm(
        "mov.u32 $0, %clock;", args=[x[...]], constraints="=r,r", pack=1, result_shape_dtypes=[X]
    )


@refused("atomic_rmw", NO_TIME, by=atomic, of=X)
def float_atomic(x, into, o):
    plt.atomic_add(o, (0, 0), x[0, 0])


@refused("atomic_rmw", NO_TIME, by=atomic)
def integer_atomic(counts, into, o):
    plt.atomic_add(o, (0,), counts[0])


@refused("atomic_cas", RACE, takes=(COUNTS,), compiler_params=TRITON, out=COUNT)
def atomic_cas(counts, o):
    plt.atomic_cas(o, counts[0], counts[1])


@refused(
    "masked_load",
    "a volatile load may read what another program has stored",
    compiler_params=TRITON,
)
def volatile_load(x, o):
    o[...] = plt.load(x, volatile=True)


@refused("scatter-add", NO_ORDER, by=counted)
def float_scatter_add(counts, x, o):
    o[...] = x[...].at[counts[...]].add(1.0)


# --- neighbours that are proven --------------------------------------------------------------


@proven()
def copy(x, o):
    o[...] = x[...]


@proven(in_specs=[ANYWHERE], scratch_shapes=[VMEM, DMA])
def local_copy(x, o, buffer, semaphore):
    copied = pltpu.make_async_copy(x, buffer, semaphore)
    copied.start()
    copied.wait()
    o[...] = buffer[...]


@proven(**SEMAPHORE)
def local_signal(x, o, semaphore):
    pl.semaphore_signal(semaphore, 1)
    pl.semaphore_wait(semaphore, 1)
    o[...] = x[...]


def signal_along_cores(x, o, semaphore):
    pl.semaphore_signal(semaphore, 1, device_id={"core": 1})
    pl.semaphore_wait(semaphore, 1)
    pltpu.sync_copy(x, o)


@proven()
def unused_place(x, o):
    lax.axis_index("data")
    o[...] = x[...]


@proven(by=counted, grid=(2,))
def seeded_bits(counts, x, o):
    pltpu.prng_seed(counts[0], pl.program_id(0))
    o[...] = x[...] + bits()


@proven()
def seeded_by_a_constant(x, o):
    pltpu.prng_seed(7)
    o[...] = pltpu.stateful_uniform(ROWS)


@proven(by=counted)
def seeded_on_both_paths(counts, x, o):
    lax.cond(counts[0] > 0, lambda: pltpu.prng_seed(counts[1]), lambda: pltpu.prng_seed(0))
    o[...] = x[...] + lax.fori_loop(0, 3, lambda i, total: total + bits(), jnp.zeros(ROWS))


@proven()
def bits_of_a_key(x, o):
    key = jax.random.key(3, impl="pallas_tpu")
    o[...] = x[...] + jax.random.uniform(jax.random.fold_in(key, 1), ROWS)


@proven(scratch_shapes=[VMEM])
def scratch_filled_if_data_says_so(x, o, scratch):
    """Whether it is well formed depends on data: splash attention and megablox are like this."""
    pl.when(x[0, 0] > 0)(lambda: scratch.__setitem__(..., x[...]))
    o[...] = scratch[...]


@proven()
def set_in_a_value(x, o):
    o[...] = x[...].at[0].set(1.0).at[1, 2].max(3.0)


@proven()
def checked_and_printed(x, o):
    pl.debug_check(x[0, 0] > 0, "it is negative")
    pl.debug_print("x is {}", x[0, 0])
    o[...] = x[...]


@proven()
def by_platform(x, o):
    o[...] = lax.platform_dependent(x[...], tpu=lambda v: 2 * v, default=lambda v: v + v)


@proven(grid=(2,), compiler_params=TRITON)
def place_in_the_grid(x, o):
    pl.delay(10)
    o[...] = x[...] + pl.program_id(0) / pl.num_programs(0)


@proven()
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


SMEM = plgpu.SMEM((128,), jnp.float32)
BARRIER = plgpu.Barrier()
BESIDE = dict(scratch=(plgpu.SemaphoreType.REGULAR,))
TILES = dict(scratch=(plgpu.TryClusterCancelResult(), BARRIER), grid=(2,), grid_names=("i",))


@proven(by=mosaic, scratch=(SMEM, BARRIER))
def smem_copy(x, o, smem, barrier, *, reduction_op=None):
    plgpu.copy_gmem_to_smem(x, smem, barrier)
    plgpu.barrier_wait(barrier)
    smem[...] = smem[...] * 2
    plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(smem, o, reduction_op=reduction_op)
    plgpu.wait_smem_to_gmem(0)


@proven(by=mosaic, scratch=(SMEM, BARRIER), num_threads=2, thread_name="wg")
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


@refused("get", PEER, by=mosaic)
def peer(x, o):
    o[...] = plgpu.remote_ref(x, jnp.int32(1))[...]


@refused("inline_mgpu(_p)?", ASSEMBLY, by=mosaic)
def inline_mgpu(x, o):
    @plgpu.inline_mgpu()
    def nothing(ctx):
        del ctx

    nothing()
    o[...] = x[...]


@refused("get_global", "its value persists from one run of the kernel to the next", by=mosaic)
def global_semaphore(x, o):
    pl.get_global(plgpu.SemaphoreType.REGULAR)
    o[...] = x[...]


@refused("barrier_test", TIMING, by=mosaic, scratch=(BARRIER,))
def barrier_test(x, o, barrier):
    plgpu.barrier_arrive(barrier)
    o[...] = x[...] + plgpu.barrier_test(barrier).astype(jnp.float32)


@refused("multimem_store", WRITES, by=mosaic)
def multimem_store(x, o):
    plgpu.multimem_store(x[...], o, collective_axes="data")


@refused("multimem_load_reduce", READS, by=mosaic)
def multimem_load(x, o):
    o[...] = plgpu.multimem_load_reduce(x, collective_axes="data", reduction_op="add")


@refused("semaphore_signal_multicast", ALL, by=mosaic, **BESIDE)
def signal_to_all(x, o, semaphore):
    plgpu.semaphore_signal_multicast(semaphore, collective_axes="data")


@refused("semaphore_signal", SIGNALS, by=mosaic, **BESIDE)
def signal_another(x, o, semaphore):
    pl.semaphore_signal(semaphore, 1, device_id=jnp.int32(1))


@refused("semaphore_signal_parallel", SIGNALS, by=mosaic, **BESIDE)
def signals(x, o, semaphore):
    plgpu.semaphore_signal_parallel(plgpu.SemaphoreSignal(semaphore, device_id=jnp.int32(1)))


@refused("mgpu_atomic_store", NO_TIME, by=mosaic)
def atomic_add(x, o):
    plgpu.atomic_add(o, x[...])


@refused("try_cluster_cancel", TIMING, by=mosaic, **TILES)
def next_tile(x, o, result, barrier):
    plgpu.try_cluster_cancel(result, barrier)
    plgpu.barrier_wait(barrier)
    (i,), _ = plgpu.query_cluster_cancel(result, grid_names=("i",))
    o[...] = x[...] + i


# --- what other modules write kernels with ---------------------------------------------------


@proven(**PIPED)
def pipeline(x, o, start=lambda: 0):
    """Runs a pipeline of its own over parts of its arrays."""
    part = pl.BlockSpec((4, 128), lambda i: (i, 0))
    first = pl.BlockSpec((4, 128), lambda i: ((i + start()) % 2, 0))
    run = pltpu.emit_pipeline(copy, grid=(2,), in_specs=[first], out_specs=[part])
    run(x, o)


@refused("axis_index", PLACE, **PIPED)
def pipeline_from_the_device(x, o):
    pipeline(x, o, lambda: lax.axis_index("data"))


def prefetched(axis):
    """Call a kernel on blocks that scalars choose, and the device's place along an axis."""

    def block(i, order):
        return order[i if axis is None else lax.axis_index(axis)], 0

    spec = pltpu.PrefetchScalarGridSpec(
        num_scalar_prefetch=1,
        grid=(1,),
        in_specs=[pl.BlockSpec(ROWS, block)],
        out_specs=pl.BlockSpec(ROWS, lambda i, order: (i, 0)),
    )
    return call(lambda order, x, o: copy(x, o), takes=(COUNTS, X), grid_spec=spec)


TENSORCORES = functools.partial(pltpu.create_tensorcore_mesh, num_cores=2)
SUBCORES = functools.partial(
    plsc.VectorSubcoreMesh, core_axis_name="c", subcore_axis_name="s", num_cores=2
)


def on_cores(kernel, cores, *scratch):
    """Call a kernel on cores of a TPU; some of their meshes ask which TPU is traced for."""
    return lambda: pl.kernel(kernel, out_type=X, mesh=cores(), scratch_types=list(scratch))(
        jnp.zeros(ROWS)
    )


def fetch_and_add(x, o, counts):
    at = plsc.fetch_and_add(counts.at[0], 1, subcore_id=0)
    pltpu.sync_copy(x.at[at], o.at[0])


def scattered():
    """Call a kernel that adds floats to a row that data choose."""

    def kernel(x, o, sums):
        row = jnp.full(8, x[0, 0].astype(jnp.int32))
        plsc.addupdate_scatter(sums, (row, lax.iota(jnp.int32, 8)), jnp.full(8, x[0, 1]))
        pltpu.sync_copy(sums, o)

    return on_cores(kernel, SUBCORES, VMEM)
