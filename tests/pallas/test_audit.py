"""The audit of a Pallas kernel's own jaxpr: what it proves, what it refuses and why."""

import functools
import gc
import importlib
import re
import weakref

import jax
import jax.numpy as jnp
import pytest
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import PartitionSpec as P
from kernels import build, cases
from kernels.case import Fails

from pallas import audit_kernels as k
from shardrules import aot, errors, pallas
from shardrules.hooks.door import audit_names
from shardrules.pallas import actions, allowlist, events

audit_module = importlib.import_module("shardrules.pallas.audit")
KERNELS = ("pallas_call", "core_map", "mpmd_map")


def jaxprs_in(value):
    if hasattr(value, "eqns"):
        yield value
    elif hasattr(value, "jaxpr"):
        yield from jaxprs_in(value.jaxpr)
    elif isinstance(value, (tuple, list)):
        for part in value:
            yield from jaxprs_in(part)


def kernels_in(jaxpr):
    """The equations of a jaxpr that call kernels."""
    for eqn in jaxpr.eqns:
        if eqn.primitive.name in KERNELS:
            yield eqn
        else:
            for value in eqn.params.values():
                for inner in jaxprs_in(value):
                    yield from kernels_in(inner)


def audited(run, mesh=None, **hints):
    """The audit of the one kernel that a function of no arguments calls."""
    if mesh is not None:
        run = jax.shard_map(run, mesh=mesh, in_specs=(), out_specs=P(), check_vma=False)
    (eqn,) = kernels_in(jax.make_jaxpr(run)().jaxpr)
    return pallas.audit_call(eqn.primitive.name, eqn.params, len(eqn.invars))


SCRATCH = dict(scratch_shapes=[k.VMEM])
COPY = dict(in_specs=[k.ANYWHERE], scratch_shapes=[k.VMEM, k.DMA])
COUNTED = dict(in_specs=[k.IN_SMEM, pl.BlockSpec()])
INTO = dict(compiler_params=k.TRITON, input_output_aliases={1: 0}, out=k.COUNTS)
with_counts = functools.partial(k.call, **COUNTED)
counted_scratch = functools.partial(with_counts, scratch_shapes=[k.VMEM])
two_steps_counted = functools.partial(
    k.call,
    grid=(2,),
    in_specs=[k.IN_SMEM, pl.BlockSpec(k.ROWS, lambda i: (i, 0))],
    out_specs=pl.BlockSpec(k.ROWS, lambda i: (i, 0)),
    out=jax.ShapeDtypeStruct((16, 128), jnp.float32),
)
THREADS = dict(num_threads=2, thread_name="wg")
TALL = jax.ShapeDtypeStruct((32, 128), jnp.float32)

SQUARE = dict(grid=(2, 2), shape=(16, 128))
# An index map that data decides on, and one that starts at any element.
counted_blocks = pltpu.PrefetchScalarGridSpec(
    num_scalar_prefetch=1,
    grid=(2,),
    in_specs=[],
    out_specs=pl.BlockSpec(k.ROWS, lambda i, counts: (counts[i], 0)),
)
ELEMENTS = (pl.Element(8), pl.Element(128))


def batched(index_map):
    """Call a kernel on each of three arrays at once."""

    def one(x):
        return pl.pallas_call(
            k.ones,
            grid=(2,),
            compiler_params=k.TPU,
            out_specs=pl.BlockSpec(k.ROWS, index_map),
            out_shape=jax.ShapeDtypeStruct((16, 128), jnp.float32),
        )(x)

    return lambda: jax.vmap(one)(jnp.zeros((3, 8, 128)))


def rows_missed(start, stop, grid=(2,)):
    """What is said of an output whose rows from start to stop no block holds."""
    return (
        rf"no program of the grid {re.escape(str(grid))} is given its elements "
        rf"\[{start}:{stop}, 0:128\]: its index map, at .*test_audit.py:\d+, leaves them out$"
    )


# name -> (function that calls the kernel, the primitive named, what is said of it, whether it
# contradicts no_communication)
REFUSED = {
    "remote copy": (
        k.call(
            k.remote_copy,
            in_specs=[k.ANYWHERE],
            out_specs=k.ANYWHERE,
            scratch_shapes=[k.DMA, k.DMA],
        ),
        "dma_start",
        "it copies to or from another device",
        True,
    ),
    "remote signal": (
        k.call(k.remote_signal, scratch_shapes=[pltpu.SemaphoreType.REGULAR]),
        "semaphore_signal",
        "it signals a semaphore of another device",
        True,
    ),
    "barrier semaphore": (
        k.call(k.barrier_semaphore),
        "get_barrier_semaphore",
        "devices meet at a barrier semaphore",
        False,
    ),
    "semaphore read": (
        k.call(k.semaphore_read, scratch_shapes=[pltpu.SemaphoreType.REGULAR]),
        "semaphore_read",
        "its answer depends on timing",
        False,
    ),
    "a semaphore as output": (
        lambda: pl.pallas_call(
            k.semaphore_handed_out,
            compiler_params=k.TPU,
            out_shape=(k.X, pltpu.SemaphoreType.REGULAR(())),
            out_specs=(pl.BlockSpec(), pl.BlockSpec(memory_space=pltpu.SEMAPHORE)),
        )(jnp.zeros(k.ROWS))[0],
        "output 1",
        "it gives a semaphore back, which others can signal",
        False,
    ),
    "wait for a copy that nobody starts": (
        k.call(k.wait_for_nothing, **COPY),
        "dma_wait",
        r"no copy that this kernel starts ends at the semaphore that it waits on \(scratch 1\)",
        False,
    ),
    "read before wait": (
        k.call(k.read_before_wait, **COPY),
        "get",
        "scratch 0 is read before",
        False,
    ),
    "wait for another": (
        k.call(
            k.wait_for_another,
            in_specs=[k.ANYWHERE],
            scratch_shapes=[k.VMEM, k.VMEM, pltpu.SemaphoreType.DMA((2,))],
        ),
        "get",
        "scratch 1 is read before",
        False,
    ),
    "axis_index": (
        k.call(k.device_place),
        "axis_index",
        "it asks where this device stands along mesh axis data",
        True,
    ),
    "axis_index in an index map": (
        k.call(
            k.device_place_in_index_map,
            grid=(1,),
            in_specs=[pl.BlockSpec(k.ROWS, lambda i: (jax.lax.axis_index("data") * 0, 0))],
        ),
        "axis_index",
        "it asks where this device stands along mesh axis data",
        True,
    ),
    "psum": (k.call(k.psum), "psum", "it is a collective over a mesh axis", True),
    "ppermute": (k.call(k.ppermute), "ppermute", "it is a collective over a mesh axis", True),
    "pure_callback": (
        k.call(k.pure_callback),
        "pure_callback",
        "it calls out of the kernel",
        False,
    ),
    "io_callback": (k.call(k.io_callback), "io_callback", "it calls out of the kernel", False),
    "debug_callback": (
        k.call(k.debug_callback),
        "debug_callback",
        "it calls out of the kernel",
        False,
    ),
    "ffi_call": (k.call(k.ffi_call), "ffi_call", "it calls out of the kernel", False),
    "a user's primitive": (
        k.call(k.own_primitive),
        "add",
        "it is not on the audit's allow list",
        False,
    ),
    "random bits without a seed": (
        k.call(k.bits_without_seed),
        "prng_random_bits",
        "random bits are drawn before a seed is set on every path",
        False,
    ),
    "a seed on one path": (
        with_counts(k.seed_on_one_path, k.COUNTS, k.X),
        "prng_random_bits",
        "random bits are drawn before a seed is set on every path",
        False,
    ),
    "rng_uniform": (
        k.call(k.rng_uniform),
        "rng_uniform",
        "its state lives outside of the kernel",
        False,
    ),
    "empty": (k.call(k.empty), "empty", "its elements hold whatever the memory held before", False),
    "inline asm": (
        k.call(k.inline_asm, compiler_params=k.TRITON),
        "elementwise_inline_asm_p",
        "inline code can read a clock or an SM's id",
        False,
    ),
    "float atomics": (
        k.call(k.float_atomic, k.X, k.X, **{**INTO, "out": k.X}),
        "atomic_rmw",
        "atomic operations on floating-point numbers come in no fixed order",
        False,
    ),
    "an atomic's old value": (
        k.call(k.atomic_with_old_value, k.COUNTS, k.COUNTS, **INTO),
        "atomic_rmw",
        "the old value that it gives back depends on which program comes first",
        False,
    ),
    "atomics of two kinds": (
        k.call(k.atomics_of_two_kinds, k.COUNTS, k.COUNTS, **INTO),
        "atomic_rmw",
        "also read or stored to in other ways",
        False,
    ),
    "atomic_cas": (
        k.call(
            k.atomic_cas,
            k.COUNTS,
            compiler_params=k.TRITON,
            out=jax.ShapeDtypeStruct((), jnp.int32),
        ),
        "atomic_cas",
        "what it finds depends on which program comes first",
        False,
    ),
    "atomics on what nobody stored": (
        k.call(k.integer_atomic, k.COUNTS, k.COUNTS, compiler_params=k.TRITON, out=k.COUNTS),
        "atomic_rmw",
        "output 0 is read before anything is stored there",
        False,
    ),
    "volatile load": (
        k.call(k.volatile_load, compiler_params=k.TRITON),
        "masked_load",
        "a volatile load may find what another program has stored",
        False,
    ),
    "scratch never stored": (
        k.call(k.scratch_never_stored, **SCRATCH),
        "get",
        "scratch 0 is read before anything is stored there on every path$",
        False,
    ),
    "scratch stored on one path": (
        counted_scratch(k.scratch_stored_on_one_path, k.COUNTS, k.X),
        "get",
        r"the nearest store, at .*audit_kernels.py:\d+, may not have run",
        False,
    ),
    "scratch stored in a loop that may not run": (
        counted_scratch(k.scratch_stored_in_a_loop, k.COUNTS, k.X),
        "get",
        "scratch 0 is read before",
        False,
    ),
    "scratch stored in a later step": (
        k.two_steps(k.scratch_stored_too_late, **SCRATCH),
        "get",
        "scratch 0 is read before",
        False,
    ),
    "scratch that no step stores": (
        k.two_steps(k.scratch_never_stored, **SCRATCH),
        "get",
        "scratch 0 is read before",
        False,
    ),
    "scratch stored in another program of a GPU": (
        k.two_steps(k.summed_from_the_first_step, compiler_params=k.TRITON),
        "get",
        "output 0 is read before",
        False,
    ),
    "scratch stored by a core that may be another": (
        k.two_steps(
            k.summed_in_scratch,
            scratch_shapes=[k.VMEM],
            compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel",)),
        ),
        "get",
        "scratch 0 is read before",
        False,
    ),
    "another part of scratch stored": (
        k.call(k.another_row_stored, **SCRATCH),
        "get",
        "scratch 0 is read before",
        False,
    ),
    "half of scratch stored": (
        k.call(k.half_stored, **SCRATCH),
        "get",
        "scratch 0 is read before",
        False,
    ),
    "half of scratch copied": (
        k.call(k.half_copied, **COPY),
        "get",
        "scratch 0 is read before",
        False,
    ),
    "kept elements that are used": (
        k.call(functools.partial(k.kept_and_used, None), **SCRATCH),
        "get",
        "scratch 0 is read before",
        False,
    ),
    "kept elements that are read back": (
        k.call(k.kept_then_read, **SCRATCH),
        "get",
        "scratch 0 is read before",
        False,
    ),
    "kept elements put over zeros": (
        k.call(k.kept_over_zeros, **SCRATCH),
        "get",
        "scratch 0 is read before",
        False,
    ),
    "kept elements that move": (
        k.call(k.kept_elsewhere, **SCRATCH),
        "get",
        "scratch 0 is read before",
        False,
    ),
    "kept elements that choose": (
        k.call(k.kept_by_itself, scratch_shapes=[pltpu.VMEM(k.ROWS, jnp.bool_)]),
        "get",
        "scratch 0 is read before",
        False,
    ),
    "read in a loop's later round": (
        counted_scratch(k.read_in_a_later_round, k.COUNTS, k.X),
        "get",
        "scratch 0 is read before",
        False,
    ),
    "aliased block added to on TPU": (
        k.call(k.output_added_to, input_output_aliases={0: 0}),
        "get",
        "output 0 is read before",
        False,
    ),
    "output added to": (k.call(k.output_added_to), "get", "output 0 is read before", False),
    "output set in the first step, a new block in each": (
        k.two_steps(k.summed_from_the_first_step, over=lambda i: (i, 0)),
        "get",
        "output 0 is read before",
        False,
    ),
    "output never stored": (
        k.call(k.output_never_stored),
        "output 0",
        "no store reaches it",
        False,
    ),
    "output half stored": (
        k.call(k.output_half_stored),
        "output 0",
        "1 stores reach it, and they leave elements out",
        False,
    ),
    "output stored if data says so": (
        k.call(k.output_stored_if_data_says_so),
        "swap",
        "output 0 is stored only under a condition that depends on floating-point data",
        False,
    ),
    "output stored if a loop over data says so": (
        k.call(k.output_stored_if_a_loop_over_data_says_so),
        "swap",
        "output 0 is stored only under a condition that depends on floating-point data",
        False,
    ),
    **{
        name: (
            k.call(kernel, compiler_params=params),
            primitive,
            "output 0 is stored only under a condition that depends on floating-point data",
            False,
        )
        for name, kernel, params, primitive in (
            ("output kept if data says so", k.kept_by_data, k.TPU, "swap"),
            ("output masked by data", k.output_masked_by_data, k.TRITON, "masked_swap"),
        )
    },
    "output masked in part by data": (
        k.call(k.output_masked_in_part_by_data),
        "output 0",
        "the stores that do not depend on floating-point data leave elements of it out",
        False,
    ),
    "scratch masked by data": (
        k.call(k.scratch_masked_by_data, **SCRATCH),
        "get",
        "scratch 0 is read before",
        False,
    ),
    "output stored under a false condition": (
        k.two_steps(k.output_stored_never),
        "output 0",
        "no store reaches it: the conditions of all of them are false",
        False,
    ),
    "output stored in a step that the grid has not": (
        k.two_steps(k.output_stored_in_step_seven),
        "output 0",
        "no store reaches it: the conditions of all of them are false",
        False,
    ),
    **{
        f"scratch filled in part by {how}": (
            k.call(kernel, **SCRATCH),
            "get",
            r"scratch 0 is read before anything is stored to its elements \[%s, 0:128\] \(the stores "
            r"before it, such as the one at .*audit_kernels.py:\d+, leave them out\)$" % rows,
            False,
        )
        for how, kernel, rows in (
            ("a loop", k.in_rounds(4), "4:8"),
            ("a while loop", k.in_rounds(4, whiles=True), "4:8"),
            ("a loop of two rows each", k.in_rounds(3, rows=2), "6:8"),
            ("a loop that starts late", k.in_rounds(8, start=2), "0:2"),
        )
    },
    "scratch filled by a loop of no rounds": (
        k.call(k.in_rounds(0), **SCRATCH),
        "get",
        "scratch 0 is read before anything is stored there on every path$",
        False,
    ),
    "output stored by a loop of no rounds": (
        k.call(k.output_in_rounds(0)),
        "output 0",
        "no store reaches it$",
        False,
    ),
    "output filled in part by a loop": (
        k.call(k.output_rows_in_rounds(7)),
        "output 0",
        r"no store reaches all of its block \[0:8, 0:128\]: they leave the elements "
        r"\[7:8, 0:128\] of it out$",
        False,
    ),
    "scratch read before the rest of it is stored": (
        k.call(functools.partial(k.read_between, 5), **SCRATCH),
        "get",
        r"scratch 0 is read before anything is stored to its elements \[4:5, 0:128\]",
        False,
    ),
    "a row of scratch for each program, too few": (
        k.two_steps(k.row_for_each_program, **SCRATCH),
        "get",
        r"to its elements \[2:8, 0:128\] in program \(1,\) of the grid \(the stores",
        False,
    ),
    "wait for more than is copied": (
        k.call(functools.partial(k.waits_for, 4), **COPY),
        "get",
        r"scratch 0 is read before anything is stored to its elements \[4:8, 0:128\]",
        False,
    ),
    "output stored in the first step, other blocks in the others": (
        k.blocks(lambda i: (i, 0), kernel=functools.partial(k.ones_at_first, 0)),
        "output 0",
        r"no store reaches all of its block \[8:16, 0:128\]: the conditions of all of them are "
        r"false in program \(1,\) of the grid$",
        False,
    ),
    "output stored in part in the other steps": (
        k.blocks(lambda i: (i, 0), kernel=k.rows_at_first),
        "output 0",
        r"its block \[8:16, 0:128\]: they leave the elements \[4:8, 0:128\] of it out in program "
        r"\(1,\) of the grid$",
        False,
    ),
    "block given again, and not stored then": (
        k.blocks(lambda j, i: (i, 0), kernel=functools.partial(k.ones_at_first, 0), **SQUARE),
        "output 0",
        r"no store reaches it: the conditions of all of them are false$",
        False,
    ),
    "output stored in the first step, by data in the others": (
        k.blocks(lambda i: (i, 0), kernel=k.ones_at_first_else_by_data),
        "output 0",
        r"its block \[8:16, 0:128\]: the conditions of all of them are false",
        False,
    ),
    "aliased block never stored on TPU": (
        k.call(k.output_never_stored, input_output_aliases={0: 0}),
        "output 0",
        "no store reaches it$",
        False,
    ),
    "blocks that are missed": (k.blocks(lambda i: (0, 0)), "output 0", rows_missed(8, 16), False),
    "every other block missed": (
        k.blocks(lambda i: (2 * i, 0), shape=(32, 128)),
        "output 0",
        rows_missed(8, 16),
        False,
    ),
    "the last block missed, part of it beyond the edge": (
        k.blocks(lambda i: (i, 0), shape=(20, 128)),
        "output 0",
        rows_missed(16, 20),
        False,
    ),
    "half of the rows missed, however many programs": (
        k.blocks(lambda i: (i, 0), grid=(100_000,), shape=(1_600_000, 128)),
        "output 0",
        rows_missed(800_000, 1_600_000, (100_000,)),
        False,
    ),
    "blocks on a diagonal": (
        k.blocks(lambda i: (i, i), shape=(16, 256)),
        "output 0",
        r"is given its elements \[0:8, 128:256\]",
        False,
    ),
    "blocks that start at any element, with a gap": (
        k.blocks(lambda i: (9 * i, 0), shape=(17, 128), block=ELEMENTS),
        "output 0",
        rows_missed(8, 9),
        False,
    ),
    "blocks of each member of a batch, some missed": (
        batched(lambda i: (0, 0)),
        "output 0",
        r"no program of the grid \(3, 2\) is given its elements \[0:3, 8:16, 0:128\]",
        False,
    ),
    "squeezed blocks that are missed": (
        k.blocks(lambda i: (i, 0, 0), shape=(3, *k.ROWS), block=(None, *k.ROWS)),
        "output 0",
        r"is given its elements \[2:3, 0:8, 0:128\]",
        False,
    ),
    "a grid without programs": (
        k.blocks(lambda i: (0, 0), grid=(0,), shape=k.ROWS),
        "output 0",
        rows_missed(0, 8, (0,)),
        False,
    ),
    "Mosaic: read before wait": (
        k.mosaic(k.smem_without_wait, scratch=(k.SMEM, k.BARRIER)),
        "get",
        "is read before anything is stored there",
        False,
    ),
    "Mosaic: not handed over": (
        k.mosaic(k.not_handed_over, scratch=(k.SMEM, k.BARRIER), **THREADS),
        "get",
        "is read before anything is stored there",
        False,
    ),
    "Mosaic: wait for oneself": (
        k.mosaic(k.smem_after_own_arrival, scratch=(k.SMEM, k.BARRIER)),
        "get",
        "is read before anything is stored there",
        False,
    ),
    "Mosaic: copies that add": (
        k.mosaic(k.reducing_copy, scratch=(k.SMEM, k.BARRIER)),
        "copy_smem_to_gmem",
        "copies that reduce come in no fixed order",
        False,
    ),
    "Mosaic: another device's memory": (
        k.mosaic(k.peer),
        "get",
        "PeerMemRef is a view of another device's memory",
        True,
    ),
    "Mosaic: inline code": (
        k.mosaic(k.inline_mgpu),
        "inline_mgpu_p",
        "inline code can read a clock",
        False,
    ),
    "Mosaic: global semaphore": (
        k.mosaic(k.global_semaphore),
        "get_global",
        "it lives on from one run of the kernel to the next",
        False,
    ),
    "Mosaic: barrier_test": (
        k.mosaic(k.barrier_test, scratch=(k.BARRIER,)),
        "barrier_test",
        "its answer depends on timing",
        False,
    ),
    **{
        f"psum inside {how}": (
            k.call(k.inside(k.psum, how)),
            "psum",
            "it is a collective over a mesh axis",
            True,
        )
        for how in ("jitted", "branched", "scanned", "looped", "scoped")
    },
}

# name -> (function that calls the kernel, a part of each assumption)
ALL_OF_IT = "^the grid and the stores cover every element of every output$"
PROVEN = {
    "copy": (k.call(k.copy), []),
    "no inputs": (lambda: pl.pallas_call(k.constant, out_shape=k.X, compiler_params=k.TPU)(), []),
    "local copy": (k.call(k.local_copy, **COPY), ["copies are waited for"]),
    "local copies in turn": (
        k.call(
            k.local_copies_in_turn,
            TALL,
            in_specs=[k.ANYWHERE],
            scratch_shapes=[pltpu.VMEM((2, *k.ROWS), jnp.float32), pltpu.SemaphoreType.DMA((2,))],
        ),
        ["copies are waited for"],
    ),
    "updated in place": (
        k.call(
            k.updated_in_place,
            in_specs=[k.ANYWHERE],
            out_specs=k.ANYWHERE,
            scratch_shapes=[k.VMEM, k.DMA],
            input_output_aliases={0: 0},
        ),
        ["copies are waited for"],
    ),
    "aliased block added to on a GPU": (
        k.call(k.output_added_to, input_output_aliases={0: 0}, compiler_params=k.TRITON),
        ["at the same time"],
    ),
    "local signal": (
        k.call(k.local_signal, scratch_shapes=[pltpu.SemaphoreType.REGULAR]),
        ["barriers order", "at the same time"],
    ),
    "a place that nobody uses": (k.call(k.unused_place), []),
    "seeded bits": (two_steps_counted(k.seeded_bits, k.COUNTS, TALL), []),
    "seeded once": (two_steps_counted(k.seeded_once, k.COUNTS, TALL), []),
    "integer atomics": (k.call(k.integer_atomic, k.COUNTS, k.COUNTS, **INTO), ["at the same time"]),
    "stored on both paths of a branch": (counted_scratch(k.scratch_chosen, k.COUNTS, k.X), []),
    "stored in a loop that runs": (k.call(k.scratch_stored_in_a_loop_that_runs, **SCRATCH), []),
    "stored in a loop's first round": (
        counted_scratch(k.stored_in_the_first_round, k.COUNTS, k.X),
        [],
    ),
    "dropped in a loop's first round": (
        counted_scratch(k.dropped_in_the_first_round, k.COUNTS, k.X),
        [],
    ),
    "summed in scratch": (k.two_steps(k.summed_in_scratch, **SCRATCH), []),
    "summed in the output": (k.two_steps(k.summed_from_the_first_step), []),
    "summed in the output, platform not known": (
        k.two_steps(k.summed_from_the_first_step, compiler_params=None),
        ["run one after the other", "at the same time"],
    ),
    "masked load": (
        k.call(k.masked_load, compiler_params=k.TRITON),
        ["at the same time", "without other="],
    ),
    "masked load with other": (
        k.call(k.masked_load_with_other, compiler_params=k.TRITON),
        ["at the same time"],
    ),
    "kept by a mask": (
        with_counts(k.kept_by_a_mask, k.COUNTS, k.X),
        [ALL_OF_IT, r"the condition of the store to output 0 at .*audit_kernels.py:\d+ holds"],
    ),
    "output masked by a count": (
        k.call(k.output_masked_by_a_count, k.COUNTS, k.X, compiler_params=k.TRITON),
        [ALL_OF_IT, "at the same time"],
    ),
    "scratch masked by a count": (
        counted_scratch(k.scratch_masked_by_a_count, k.COUNTS, k.X),
        ["the stores to scratch 0 cover what is read of it"],
    ),
    "kept after zeros": (k.call(k.kept_after_zeros, **SCRATCH), []),
    "rows stored one by one": (k.call(k.rows_stored_one_by_one, **SCRATCH), []),
    "both halves of scratch stored": (k.call(k.halves_stored, **SCRATCH), []),
    "output stored in a step that the grid has": (
        k.call(k.output_stored_in_step_seven, grid=(8,)),
        [],
    ),
    **{
        f"scratch filled by {how}": (k.call(kernel, **SCRATCH), [])
        for how, kernel in (
            ("a loop", k.in_rounds(8)),
            ("a while loop", k.in_rounds(8, whiles=True)),
            ("a loop of two rows each", k.in_rounds(4, rows=2)),
        )
    },
    "scratch filled by a loop from a count on": (
        counted_scratch(k.filled_from_a_count, k.COUNTS, k.X),
        ["the stores to scratch 0 cover what is read of it"],
    ),
    "a row of scratch before the first one": (
        k.call(k.in_rounds(7, start=-1), **SCRATCH),
        ["the stores to scratch 0 cover what is read of it"],
    ),
    "scratch stored in a round before": (
        counted_scratch(k.read_in_later_rounds, k.COUNTS, k.X),
        ["the stores to scratch 0 cover what is read of it"],
    ),
    "a row that data chooses, stored in another round": (
        counted_scratch(k.row_that_data_chooses, k.COUNTS, k.X),
        ["the stores to scratch 0 cover what is read of it"],
    ),
    "scratch stored in a step before": (
        k.two_steps(k.read_in_a_later_step, grid=(3,), **SCRATCH),
        [],
    ),
    "output stored in a step before, platform not known": (
        k.two_steps(k.output_read_in_later_steps, compiler_params=None),
        ["run one after the other", "at the same time"],
    ),
    "output stored by a loop": (k.call(k.output_in_rounds(1)), []),
    "output filled by a loop": (k.call(k.output_rows_in_rounds(8)), []),
    "scratch read where it is stored": (
        k.call(functools.partial(k.read_between, 4), **SCRATCH),
        [],
    ),
    "a row of scratch for each program": (
        k.two_steps(k.row_for_each_program, **SCRATCH, grid=(8,)),
        [],
    ),
    "wait for what is copied": (
        k.call(functools.partial(k.waits_for, 8), **COPY),
        ["copies are waited for"],
    ),
    "output stored in the first step, one block for all": (
        k.blocks(lambda i: (0, 0), shape=k.ROWS, kernel=functools.partial(k.ones_at_first, 0)),
        [],
    ),
    "output stored in all of a block's steps": (
        k.blocks(lambda i: (i, 0), kernel=k.rows_at_first, grid=(1,), shape=k.ROWS),
        [],
    ),
    "block given in turn, and stored at first": (
        k.blocks(lambda i, j: (i, 0), kernel=functools.partial(k.ones_at_first, 1), **SQUARE),
        [],
    ),
    "block given again, and not stored then, platform not known": (
        k.blocks(
            lambda j, i: (i, 0),
            kernel=functools.partial(k.ones_at_first, 0),
            **SQUARE,
            compiler_params=None,
        ),
        [ALL_OF_IT, "the condition of the store to output 0", "at the same time"],
    ),
    "block given again on a GPU": (
        k.blocks(
            lambda j, i: (i, 0),
            kernel=functools.partial(k.ones_at_first, 0),
            **SQUARE,
            compiler_params=k.TRITON,
        ),
        ["at the same time"],
    ),
    "output stored under a condition that wraps around": (
        k.blocks(lambda i: (i, 0), kernel=k.ones_where_it_wraps, grid=(1,), shape=k.ROWS),
        [ALL_OF_IT, "the condition of the store to output 0"],
    ),
    "aliased block never stored on a GPU": (
        k.call(k.output_never_stored, input_output_aliases={0: 0}, compiler_params=k.TRITON),
        ["at the same time"],
    ),
    "aliased blocks that are missed": (
        k.blocks(lambda i: (0, 0), TALL, shape=TALL.shape, input_output_aliases={0: 0}),
        [],
    ),
    "every block, the last one first": (k.blocks(lambda i: (1 - i, 0)), []),
    "every block, twice": (k.blocks(lambda i: (i // 2, 0), grid=(4,)), []),
    "every block, part of the last one beyond the edge": (
        k.blocks(lambda i: (i, 0), shape=(12, 128)),
        [],
    ),
    "every block, however many programs": (
        k.blocks(lambda i: (i, 0), grid=(100_000,), shape=(800_000, 128)),
        [],
    ),
    "every block, two axes in one index": (
        k.blocks(lambda i, j: (2 * i + j, 0), grid=(2, 2), shape=(32, 128)),
        [],
    ),
    "every block, an index that mixes the axes": (
        k.blocks(lambda i, j: (i, (i + j) % 2), grid=(2, 2), shape=(16, 256)),
        [],
    ),
    "blocks that start at any element": (
        k.blocks(lambda i: (4 * i, 0), shape=(12, 128), block=ELEMENTS),
        [],
    ),
    "squeezed blocks": (
        k.blocks(lambda i: (i, 0, 0), grid=(3,), shape=(3, *k.ROWS), block=(None, *k.ROWS)),
        [],
    ),
    "blocks of each member of a batch": (batched(lambda i: (i, 0)), []),
    "blocks of a grid whose size is not known": (
        lambda: jax.jit(lambda n: k.blocks(lambda i: (i, 0), grid=(n,))())(2),
        [ALL_OF_IT],
    ),
    "one block for a grid whose size is not known": (
        lambda: jax.jit(lambda n: k.blocks(lambda i: (0, 0), grid=(n,), shape=k.ROWS)())(2),
        [ALL_OF_IT],
    ),
    "blocks that are bounded slices": (
        k.blocks(lambda i: (pl.ds(8 * i, 8), 0), block=(pl.BoundedSlice(8), 128)),
        [ALL_OF_IT],
    ),
    "blocks with padding": (
        k.blocks(lambda i: (8 * i, 0), block=(pl.Element(8, (0, 8)), pl.Element(128))),
        [ALL_OF_IT],
    ),
    "blocks before the first one": (k.blocks(lambda i: (i - 1, 0)), [ALL_OF_IT]),
    "an output in one piece": (
        k.call(k.ones, grid=(2,), in_specs=[k.ANYWHERE], out_specs=k.ANYWHERE),
        [],
    ),
    "an output without elements": (
        k.call(k.nothing, out=jax.ShapeDtypeStruct((0, 128), jnp.float32)),
        [],
    ),
    "a row that follows from too much": (k.call(k.row_after_additions, grid=(2,)), [ALL_OF_IT]),
    "blocks that data chooses": (
        k.call(
            lambda counts, o: k.ones(None, o),
            jax.ShapeDtypeStruct((2,), jnp.int32),
            grid_spec=counted_blocks,
            out=jax.ShapeDtypeStruct((16, 128), jnp.float32),
        ),
        [ALL_OF_IT],
    ),
    "blocks that data chooses, stored in the first step": (
        k.call(
            lambda counts, o: k.ones_at_first(0, None, o),
            jax.ShapeDtypeStruct((2,), jnp.int32),
            grid_spec=counted_blocks,
            out=jax.ShapeDtypeStruct((16, 128), jnp.float32),
        ),
        [ALL_OF_IT, "the condition of the store to output 0"],
    ),
    "kept by a mask in the last step": (
        k.call(k.kept_in_the_last_step, k.COUNTS, k.X, grid=(2,), **COUNTED),
        [ALL_OF_IT, "the condition of the store to output 0"],
    ),
    "output stored if a count says so": (
        with_counts(k.output_stored_if_a_count_says_so, k.COUNTS, k.X),
        [ALL_OF_IT, r"the condition of the store to output 0 at .*audit_kernels.py:\d+ holds"],
    ),
    "printed": (k.call(k.printed), []),
    "nested jaxprs": (k.call(k.nested), []),
    "an overhanging block": (
        lambda: pl.pallas_call(
            k.copy,
            out_shape=k.X,
            compiler_params=k.TPU,
            grid=(2,),
            in_specs=[pl.BlockSpec(k.ROWS, lambda i: (i, 0))],
            out_specs=pl.BlockSpec(k.ROWS, lambda i: (i, 0)),
        )(jnp.zeros((12, 128))),
        ["beyond the edge"],
    ),
    "Mosaic: copies": (
        k.mosaic(k.smem_copy, scratch=(k.SMEM, k.BARRIER)),
        [ALL_OF_IT, "the stores to", "copies are waited for", "at the same time"],
    ),
    "Mosaic: handed over": (
        k.mosaic(k.handed_over, scratch=(k.SMEM, k.BARRIER), **THREADS),
        [
            ALL_OF_IT,
            "the stores to",
            "the condition of the store to output 0",
            "copies are waited for",
            "at the same time",
        ],
    ),
    "Mosaic: handed over in the next round": (
        k.mosaic(k.handed_over_in_the_next_round, scratch=(k.SMEM, k.BARRIER), **THREADS),
        [
            ALL_OF_IT,
            "the stores to",
            "the condition of the store to output 0",
            "copies are waited for",
            "at the same time",
        ],
    ),
    **{
        f"copy inside {how}": (k.call(k.inside(k.copy, how)), [])
        for how in ("jitted", "branched", "scanned", "looped", "scoped")
    },
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_known_to_be_harmless_is_not_proven(name, cpu_mesh):
    run, primitive, message, contradicts = REFUSED[name]
    found = audited(run, cpu_mesh)
    assert not found.proven and not found.assumptions
    said = [b for b in found.blockers if b.primitive == primitive and re.search(message, b.reason)]
    assert said, str(found)
    assert re.search(r"(audit_kernels|test_audit|core)\.py:\d+$", said[0].source), said[0].source
    assert found.contradicts_no_communication == contradicts


@pytest.mark.parametrize("name", PROVEN)
def test_its_neighbours_are_proven(name, cpu_mesh):
    run, assumed = PROVEN[name]
    found = audited(run, cpu_mesh)
    assert found.proven, str(found)
    assert len(found.assumptions) == len(assumed), found.assumptions
    for pattern, text in zip(assumed, found.assumptions):
        assert re.search(pattern, text)


def test_a_refusal_names_the_line(cpu_mesh):
    (blocker,) = audited(k.call(k.psum), cpu_mesh).blockers
    line = k.psum.__code__.co_firstlineno + 1
    assert blocker.source == f"{k.__file__}:{line}"
    assert str(blocker) == f"psum at {k.__file__}:{line}: it is a collective over a mesh axis"
    assert blocker.axes == ("data",)


def test_the_audit_prints():
    assert str(audited(k.call(k.copy))) == "proven"
    assert str(audited(k.call(k.local_copy, **COPY))) == (
        "proven, assuming that copies are waited for before their buffers are used again, and "
        "barriers order the threads"
    )
    assert re.fullmatch(
        r"not proven:\n  output 0 at .*audit_kernels.py:\d+: no store reaches it",
        str(audited(k.call(k.output_never_stored))),
    )


# Kernels of JAX's own operations: which of those that do not communicate are not proven, and why.
NOT_PROVEN = {
    # Rows of the output that belong to no sequence are whatever the accumulator held.
    "ragged_paged_attention": "get",
    # It takes its next tile when the scheduler has one for it.
    "blackwell_matmul": "try_cluster_cancel",
}


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, id=case.name, marks=getattr(pytest.mark, case.platform))
        for case in cases.ALL
        if not isinstance(case.expected.unchecked, Fails)
    ],
)
def test_kernels_of_real_operations(case, request):
    request.getfixturevalue(f"{case.platform}_mesh")
    # Only traced: `build.devices` keeps GPUs apart that must not be compiled for in one process.
    on = aot.tpu(case.target) if case.platform == "tpu" else aot.gpu(case.target, 8)
    f, args = build.build(case, check_vma=False, mesh=build.mesh_for(case, on))
    found = [
        (e, pallas.audit_call(e.primitive.name, e.params, len(e.invars)))
        for e in kernels_in(f.trace(*args).jaxpr.jaxpr)
    ]
    assert found
    for eqn, one in found:
        if case.communicates is not None or case.name.startswith("all_gather"):
            assert not one.proven and one.contradicts_no_communication, str(one)
        elif case.name in NOT_PROVEN:
            assert NOT_PROVEN[case.name] in {b.primitive for b in one.blockers}, str(one)
            assert not one.contradicts_no_communication
        else:
            assert one.proven, f"{eqn.params.get('name')}: {one}"


def test_a_semaphore_from_outside_is_not_the_kernels_own():
    def start(x, o, semaphore):
        o[...] = x[...]

    def wait(x, semaphore, o):
        pl.semaphore_wait(semaphore, 1)
        o[...] = x[...]

    space = pl.BlockSpec(memory_space=pltpu.SEMAPHORE)

    def run():
        x, semaphore = pl.pallas_call(
            start,
            compiler_params=k.TPU,
            out_specs=(pl.BlockSpec(), space),
            out_shape=(k.X, pltpu.SemaphoreType.REGULAR(())),
        )(jnp.zeros(k.ROWS))
        return pl.pallas_call(
            wait, compiler_params=k.TPU, out_shape=k.X, in_specs=[pl.BlockSpec(), space]
        )(x, semaphore)

    _, eqn = kernels_in(jax.make_jaxpr(run)().jaxpr)
    (blocker,) = pallas.audit_call("pallas_call", eqn.params, len(eqn.invars)).blockers
    assert blocker.primitive == "semaphore_wait"
    assert blocker.reason == "operand 1 is a semaphore that others can signal too"


@pytest.mark.parametrize(
    "device", [None, jax.extend.core.Literal(1, jax.core.ShapedArray((), jnp.int32))]
)
def test_copies_as_they_stood_in_a_jaxpr_to_jax_0_9(device):
    """Each ref with its views beside it, and the device last."""
    (call,) = kernels_in(jax.make_jaxpr(k.call(k.local_copy, **COPY))().jaxpr)
    jaxpr = call.params["jaxpr"]
    eqns = []
    for eqn in jaxpr.eqns:
        if eqn.primitive.name.startswith("dma"):
            refs = [getattr(r, "ref", r) for r in eqn.params["tree"].unflatten(eqn.invars)[:3]]
            leaves, tree = jax.tree.flatten((*(p for r in refs for p in (r, ())), None, (), device))
            eqn = eqn.replace(invars=leaves, params={**eqn.params, "tree": tree})
        eqns.append(eqn)
    assert len({eqn.primitive.name for eqn in eqns if "dma" in eqn.primitive.name}) == 2
    found = pallas.audit(jaxpr.replace(eqns=eqns), grid_mapping=call.params["grid_mapping"])
    assert found.proven == (device is None), found
    assert found.contradicts_no_communication == (device is not None)


def test_where_cores_start_is_assumed_where_it_is_not_known():
    """A step that is the first along an outer axis of the grid need not be a core's first."""

    def kernel(x, o, scratch):
        @pl.when((pl.program_id(0) == 0) & (pl.program_id(1) == 0))
        def _():
            scratch[...] = jnp.zeros(k.ROWS)

        scratch[...] += x[...]
        o[...] = scratch[...]

    run = k.call(kernel, grid=(2, 2), **SCRATCH)
    (eqn,) = kernels_in(jax.make_jaxpr(run)().jaxpr)
    jaxpr, mapping = eqn.params["jaxpr"], eqn.params["grid_mapping"]
    ask = functools.partial(pallas.audit, jaxpr, grid_mapping=mapping, platform_hint="tpu")
    assert any("each core starts in the grid's first iteration" in a for a in ask().assumptions)
    assert ask(parallel_axes=()).proven and not ask(parallel_axes=()).assumptions
    assert not ask(parallel_axes=(0,)).proven


def test_axes_of_cores_are_the_kernels_own():
    """An axis of a mesh of cores is not one of the mesh of devices, whatever it is called."""
    jaxpr = jax.make_jaxpr(lambda: jax.lax.axis_index("core"), axis_env=[("core", 2)])().jaxpr
    assert pallas.audit(jaxpr, local_axes=["core"]).proven
    assert not pallas.audit(jaxpr).proven


def test_an_audit_is_kept_for_as_long_as_the_jaxpr_lives():
    (eqn,) = kernels_in(jax.make_jaxpr(k.call(k.copy))().jaxpr)
    jaxpr, mapping = eqn.params["jaxpr"], eqn.params["grid_mapping"]
    one = pallas.prove("pallas_call", jaxpr, mapping)
    assert pallas.prove("pallas_call", jaxpr, mapping) is one
    assert pallas.prove("pallas_call", jaxpr, mapping, platform_hint="gpu") is not one
    alive = weakref.ref(jaxpr)
    del eqn, jaxpr, mapping
    jax.clear_caches()
    gc.collect()
    assert alive() is None


def test_a_kept_audit_is_of_the_same_compiler_parameters():
    (eqn,) = kernels_in(jax.make_jaxpr(k.two_steps(k.summed_in_scratch, **SCRATCH))().jaxpr)

    def ask(compiler_params):
        params = {**eqn.params, "compiler_params": compiler_params}
        return pallas.audit_call("pallas_call", params, len(eqn.invars)).proven

    parallel = pltpu.CompilerParams(dimension_semantics=("parallel",))
    assert ask(k.TPU) and not ask(parallel) and not ask(k.TRITON)
    # As they were to JAX 0.8.
    assert ask({"mosaic_tpu": k.TPU}) and not ask({"mosaic_tpu": parallel})
    assert not ask({"mosaic": {"dimension_semantics": ("parallel",)}})


def test_a_grid_mapping_of_another_kernel_is_not_proven():
    (one,) = kernels_in(jax.make_jaxpr(k.call(k.copy))().jaxpr)
    (other,) = kernels_in(jax.make_jaxpr(k.call(k.rows_stored_one_by_one, **SCRATCH))().jaxpr)
    found = pallas.audit(one.params["jaxpr"], grid_mapping=other.params["grid_mapping"])
    assert "takes 2 refs, but its grid mapping holds 1 operands, 1 outputs and 1 scratch" in (
        found.blockers[0].reason
    )


def test_a_jaxpr_that_breaks_the_audit_is_not_proven(monkeypatch):
    def fail(*args):
        raise KeyError("tree")

    monkeypatch.setattr(events.Walk, "walk", fail)
    found = audited(k.call(k.copy))
    assert not found.proven
    assert re.search(
        r"the audit can't read its jaxpr \(KeyError: 'tree'\)", found.blockers[0].reason
    )


def test_the_work_is_bounded(monkeypatch):
    monkeypatch.setattr(events, "_MOST_EQUATIONS", 3)
    (blocker,) = audited(k.call(k.nested)).blockers
    assert "more than 3 equations" in blocker.reason


def test_exact_runs_are_bounded(monkeypatch):
    """What would be too much work is assumed, and said."""
    proof, grid = (importlib.import_module(f"shardrules.pallas.{m}") for m in ("proof", "grid"))
    said = "the stores to scratch 0 cover what is read of it"

    def rounds():
        return audited(k.call(k.in_rounds(4), **SCRATCH))

    def programs(kernel=k.row_for_each_program, **kwargs):
        return audited(k.two_steps(kernel, **kwargs))

    assert not rounds().proven and not programs(**SCRATCH).proven
    with monkeypatch.context() as patch:
        patch.setattr(proof, "_MOST_STEPS", 5)
        assert rounds().proven and said in rounds().assumptions[0]
    with monkeypatch.context() as patch:
        patch.setattr(grid, "_MOST_PROGRAMS", 1)
        assert not rounds().proven
        assert said in programs(**SCRATCH).assumptions[0]
        first = programs(functools.partial(k.ones_at_first, 0), over=lambda i: (i, 0))
        everything, condition = first.assumptions
        assert re.search(ALL_OF_IT, everything) and "the condition of the store" in condition


def test_only_kernels_are_audited():
    with pytest.raises(ValueError, match="reads pallas_call, mpmd_map and core_map, not 'scan'"):
        pallas.audit_call("scan", {}, 0)


def test_a_missing_name_of_jax_is_said(monkeypatch):
    monkeypatch.setitem(
        audit_names.AUDIT_SYMBOLS,
        "AbstractRef",
        ("jax._src.state", "NoSuchRef", "tells a kernel's refs from its values"),
    )
    audit_names.load_audit.cache_clear()
    try:
        with pytest.raises(
            errors.UnsupportedJaxError,
            match=(r"can't audit kernels on JAX .*: jax._src.state:NoSuchRef is missing"),
        ):
            audit_names.load_audit()
    finally:
        audit_names.load_audit.cache_clear()


def test_every_name_on_the_lists_is_a_primitive_of_jax():
    """A misspelt name would never be met; those of other versions are listed."""
    for _, module in audit_names.AUDIT_MODULES:
        try:
            importlib.import_module(module)
        except ImportError:
            assert module in ("jax._src.prng",)
    names = audit_names.load_audit()
    names.primitive(None)
    known = set(names._primitives.values())
    other_versions = {
        "jax:copy_p",
        "jax:checkpoint",
        "jax:custom_vjp_call_jaxpr",
        "jax:log2",
        "jax:pjit",
        "mgpu:set_max_registers",
        "mgpu:inline_mgpu",
        "mgpu:wgmma_accumulator_deref",
        "mgpu:wgmma_accumulator_store",
        "tpu:repeat",
        "triton:debug_barrier",
        "triton:elementwise_inline_asm",
    }
    listed = {*allowlist.PURE, *actions.BY_NAME, *allowlist.REFUSED}
    assert {n for n in listed - known if not n.endswith("*")} == other_versions
    assert not allowlist.PURE & set(actions.BY_NAME)
    assert not allowlist.PURE & set(allowlist.REFUSED)
