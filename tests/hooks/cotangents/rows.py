"""Cases for the rows of the linearity's tables: functions of one array, by what each is for."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from core import versions
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.experimental import pallas as pl
from jax.experimental.layout import Layout, with_layout_constraint
from jax.experimental.pallas import tpu as pltpu
from jax.experimental.pallas import triton as pltriton
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

AT = jnp.array([0, 1, 9, 2])  # 9 is out of bounds: a fill value is read
TWO = AT[:2]
FIXED = jnp.linspace(0.5, 2.0, 8)
SQUARE = jnp.eye(8) * 2 + jnp.tri(8)
WEIGHTS = jnp.linspace(-1.0, 1.0, 32).reshape(4, 8)


def rows(g):
    return g.reshape(2, 4)


def windows(**changes):
    one = dict(window_dimensions=(2,), window_strides=(1,), padding=((0, 0),), base_dilation=(1,))
    return lambda g: lax.reduce_window(g, 0.0, lax.add, **{**one, **changes})


def convolved(image=(1, 2, 4), kernel=(2, 2, 3), **changes):
    one = dict(window_strides=(1,), padding=[(1, 1)], dimension_numbers=("NCH", "OIH", "NCH"))
    held = jnp.linspace(-1.0, 1.0, int(np.prod(kernel))).reshape(kernel)
    return lambda g: lax.conv_general_dilated(g.reshape(image), held, **{**one, **changes})


def solved(shape=(8, 1), **changes):
    one = dict(left_side=True, lower=True, transpose_a=False, unit_diagonal=False)
    return lambda g: lax.linalg.triangular_solve(SQUARE, g.reshape(shape), **{**one, **changes})


def dotted(numbers=(((1,), (0,)), ((), ())), **changes):
    return lambda g: lax.dot_general(rows(g), WEIGHTS, numbers, **changes)


def put(operation, of_rows=False, at=TWO, **changes):
    """Scatter into an array what another part of it holds."""
    numbers = lax.ScatterDimensionNumbers(*(((1,), (0,), (0,)) if of_rows else ((), (0,), (0,))))

    def f(g):
        into, given = (rows(g), rows(g)[::-1]) if of_rows else (g, g[4 : 4 + len(at)])
        return operation(into, at[:, None], given, numbers, **changes)

    return f


def gathered(of_rows=False, at=AT, **changes):
    numbers = lax.GatherDimensionNumbers(*(((1,), (0,), (0,)) if of_rows else ((), (0,), (0,))))

    def f(g):
        sizes = (1, 4) if of_rows else (1,)
        return lax.gather(rows(g) if of_rows else g, at[:, None], numbers, sizes, **changes)

    return f


def kernel(body, *fixed, scratch=0, **changes):
    """A Pallas kernel from one block of eight to another."""
    shape = jax.ShapeDtypeStruct((8,), jnp.float32)
    memory = [pltpu.VMEM((8,), jnp.float32)] * scratch
    call = pl.pallas_call(body, shape, scratch_shapes=memory, interpret=True, **changes)
    return lambda g: call(*fixed, g)


def assign(ref, value, at=...):
    ref[at] = value


def masked(g_ref, o_ref, by=None, other=0.0):
    mask = (jnp.arange(8) < 4) if by is None else by[...] > 0
    o_ref[...] = pltriton.load(g_ref, mask=mask, other=other)


def stored(g_ref, o_ref, by=None, start=0.0):
    mask = (jnp.arange(8) < 4) if by is None else by[...] > 0
    o_ref[...] = jnp.full(8, start, jnp.float32)
    pltriton.store(o_ref, g_ref[...], mask=mask)


def custom(f):
    called = jax.custom_vjp(f)
    called.defvjp(lambda g: (f(g), None), lambda _, ct: (ct,))
    return called


def gathered_to_all(g, over, **kwargs):
    gather = versions.all_gather_invariant()  # JAX 0.12 has a parameter for it
    return (
        gather(g, over, **kwargs) if gather else lax.all_gather(g, over, to="invarying", **kwargs)
    )


@jax.custom_jvp
def twice(g):
    return 2 * g


twice.defjvps(lambda t, _, g: 2 * t)


def doubled(first, o_ref, second=None):
    o_ref[...] = first[...]
    jax.ref.addupdate(o_ref, ..., (first if second is None else second)[...])


def by_scratch(g_ref, o_ref, scratch):
    scratch[...] = g_ref[...]
    o_ref[...] = scratch[...] * 2


def accumulated(start, of=lambda g: g):
    """Add an array to a ref that holds something before."""

    def f(g):
        cell = jax.new_ref(start(g))
        jax.ref.addupdate(cell, ..., of(g))
        return jax.freeze(cell)

    return f


def swapped(g_ref, o_ref, of=lambda x: x):
    o_ref[...] = g_ref[...]
    o_ref[2:4] = of(o_ref[...])[4:6]


def copied(g_ref, o_ref, of=lambda x: x):
    def inside(semaphore):
        o_ref[...] = of(g_ref[...])
        pltpu.make_async_copy(g_ref.at[pl.ds(0, 4)], o_ref.at[pl.ds(0, 4)], semaphore).start()
        pltpu.make_async_copy(g_ref.at[pl.ds(0, 4)], o_ref.at[pl.ds(0, 4)], semaphore).wait()

    pl.run_scoped(inside, pltpu.SemaphoreType.DMA)


def mesh():
    return jax.sharding.Mesh(np.array(jax.devices()).reshape(4, 2), ("data", "model"))


class Mapped:
    """The body of a shard_map over (4 data, 2 model); what it is given is split over data."""

    def __init__(self, body, check=False, specs=P("data"), out=P("data")):
        self.body, self.check, self.specs, self.out = body, check, specs, out

    def on(self, mesh):
        return jax.shard_map(
            self.body, mesh=mesh, in_specs=self.specs, out_specs=self.out, check_vma=self.check
        )


GROUPS = [[0, 1], [2, 3]]

# By the primitive that a case is for, which its jaxpr holds.
CASES = {
    "add": [lambda g: g + 2 * g, lambda g: g + 1.0],
    "add_any": [jax.grad(lambda g: (FIXED * g * 2 + g).sum() + (3 * g).sum())],
    "sub": [lambda g: g - 2 * g, lambda g: 1.0 - g, lambda g: g - 1.0],
    "neg": [lambda g: -g],
    "reduce_sum": [lambda g: rows(g).sum(0), lambda g: rows(g).sum(1)],
    "broadcast_in_dim": [
        lambda g: lax.broadcast_in_dim(g, (3, 8), (1,)),
        lambda g: lax.broadcast_in_dim(g, (8, 2), (0,)),
    ],
    "reshape": [rows, lambda g: g.reshape(4, 2)],
    "transpose": [lambda g: rows(g).T, lambda g: g.reshape(2, 2, 2).transpose(1, 2, 0)],
    "squeeze": [
        lambda g: lax.squeeze(g.reshape(1, 8), (0,)),
        lambda g: lax.squeeze(g.reshape(8, 1), (1,)),
    ],
    "slice": [lambda g: lax.slice(g, (1,), (5,)), lambda g: lax.slice(g, (2,), (8,), (2,))],
    "concatenate": [
        lambda g: lax.concatenate([rows(g), rows(g)], 0),
        lambda g: lax.concatenate([rows(g), rows(g)], 1),
        lambda g: lax.concatenate([g, FIXED], 0),
        lambda g: lax.concatenate([FIXED, g], 0),
    ],
    "copy": [jnp.copy],
    "rev": [lambda g: lax.rev(rows(g), (0,)), lambda g: lax.rev(rows(g), (1,))],
    "cumsum": [
        lambda g: lax.cumsum(rows(g), 0),
        lambda g: lax.cumsum(rows(g), 1),
        lambda g: lax.cumsum(rows(g), 1, reverse=True),
    ],
    "real": [lambda g: jnp.real(g * (1 + 2j)), lambda g: jnp.real(g + 1j)],
    "imag": [lambda g: jnp.imag(g * (1 + 2j)), lambda g: jnp.imag(g + 1j)],
    "reduce_precision": [
        lambda g: lax.reduce_precision(g, 4, 1),
        lambda g: lax.reduce_precision(g, 8, 10),
        lambda g: lax.reduce_precision(g, 8, 23),
    ],
    "pad": [
        lambda g: lax.pad(g, 0.0, [(1, 1, 0)]),
        lambda g: lax.pad(g, 0.0, [(0, -2, 1)]),
        lambda g: lax.pad(g, 1.0, [(1, 1, 0)]),
        lambda g: lax.pad(g, g[0], [(1, 1, 0)]),
        lambda g: lax.pad(FIXED, g[0], [(1, 1, 0)]),
    ],
    "split": [
        lambda g: lax.split(rows(g), (1, 1), 0)[1],
        lambda g: lax.split(rows(g), (1, 3), 1)[1],
    ],
    "stack": [
        lambda g: lax.stack([g, 2 * g], 0),
        lambda g: lax.stack([g, FIXED], 1),
        lambda g: lax.stack([FIXED, g], 1),
    ],
    "unstack": [lambda g: lax.unstack(rows(g), 0)[1], lambda g: lax.unstack(rows(g), 1)[1]],
    "tile": [lambda g: lax.tile(g, (2,)), lambda g: lax.tile(rows(g), (1, 3))],
    "dynamic_update_slice": [
        lambda g: lax.dynamic_update_slice(g, g[:2], (1,)),
        lambda g: lax.dynamic_update_slice(g, FIXED[:2], (1,)),
        lambda g: lax.dynamic_update_slice(g, g[:2], (g[0].astype(int),)),
        lambda g: lax.dynamic_update_slice(FIXED, g[:2], (1,)),
    ],
    "scatter": [
        put(lax.scatter),
        put(lax.scatter, True, mode="clip"),
        put(lax.scatter, unique_indices=True, indices_are_sorted=True, mode="fill"),
        lambda g: g.at[TWO].set(0.0),
        lambda g: g.at[TWO].set(1.0),
        lambda g: g.at[TWO].apply(lambda z: jnp.clip(z, -0.1, 0.1)),
        lambda g: g.at[TWO].apply(lambda z: z + 1),
        lambda g: g.at[g[:2].astype(int) % 8].set(0.0),
        lambda g: g + lax.full(8, 0.0).at[0].apply(lambda z: z + 1),
        lambda g: g.at[TWO].apply(lambda z: 2.0),
        lambda g: g + lax.full(8, 0.0).at[0].apply(lambda z: 2.0),
        lambda g: g.at[TWO].apply(lambda z: z),
        lambda g: FIXED.at[TWO].set(g[:2]),
    ],
    "scatter-add": [
        put(lax.scatter_add),
        put(lax.scatter_add, True, mode="clip"),
        put(lax.scatter_add, at=AT, unique_indices=True, indices_are_sorted=True, mode="fill"),
        lambda g: g.at[TWO].add(1.0),
        lambda g: FIXED.at[TWO].add(g[:2]),
    ],
    "reduce_window_sum": [
        windows(),
        windows(window_dimensions=(3,), window_strides=(2,)),
        windows(padding=((1, 0),), base_dilation=(2,), window_dilation=(2,)),
    ],
    "masked_load": [
        kernel(masked),
        kernel(lambda g, o: masked(g, o, other=1.0)),
        kernel(lambda g, o: masked(g, o, by=g)),
    ],
    "masked_swap": [
        kernel(stored),
        kernel(lambda g, o: stored(g, o, by=g)),
        kernel(lambda g, o: stored(g, o, start=1.0)),
    ],
    "layout_constraint": [
        lambda g: with_layout_constraint(rows(g), Layout((0, 1))),
        lambda g: with_layout_constraint(rows(g), Layout((1, 0))),
    ],
    "with_memory_space_constraint": [
        jax.jit(lambda g: pltpu.with_memory_space_constraint(g, pltpu.HBM))
    ],
    "custom_jvp_call": [jax.nn.relu, twice],
    "custom_vjp_call": [custom(lambda g: 2 * g), custom(lambda g: g + 1)],
    "roll": [
        kernel(lambda g, o: assign(o, pltpu.roll(g[...].reshape(2, 4), 1, 1).reshape(8))),
        kernel(lambda g, o: assign(o, pltpu.roll(g[...].reshape(2, 4), 1, 0).reshape(8))),
        kernel(lambda g, o: assign(o, pltpu.roll(g[...].reshape(2, 4), 2, 1).reshape(8))),
    ],
    "name": [lambda g: checkpoint_name(g, "a"), lambda g: checkpoint_name(g, "b")],
    "sharding_constraint": [
        lambda g: lax.with_sharding_constraint(g, NamedSharding(mesh(), P("data"))),
        lambda g: lax.with_sharding_constraint(g, NamedSharding(mesh(), P("model"))),
    ],
    "mul": [lambda g: g * FIXED, lambda g: 2.0 * g, lambda g: g * g, lambda g: g * 0.0],
    "div": [lambda g: g / FIXED, lambda g: 1.0 / (2 + g * g), lambda g: g / (1 + g)],
    "dot_general": [
        dotted(),
        dotted((((1,), (0,)), ((), ())), precision="highest"),
        dotted((((1,), (0,)), ((), ())), preferred_element_type=jnp.bfloat16),
        lambda g: lax.dot_general(rows(g), rows(FIXED), (((1,), (1,)), ((0,), (0,)))),
        lambda g: jnp.dot(g, g),
        lambda g: jnp.dot(FIXED, g),
    ],
    "conv_general_dilated": [
        convolved(),
        convolved(padding=[(0, 2)], window_strides=(2,), lhs_dilation=(2,), rhs_dilation=(2,)),
        convolved(dimension_numbers=("NHC", "HIO", "NHC"), image=(1, 4, 2), kernel=(3, 2, 2)),
        convolved(feature_group_count=2, kernel=(2, 1, 3), precision="highest"),
        convolved(image=(2, 1, 4), kernel=(2, 1, 3), batch_group_count=2),
        convolved(preferred_element_type=jnp.float32),
        lambda g: lax.conv(g.reshape(1, 1, 8), g[:3].reshape(1, 1, 3), (1,), "SAME"),
        lambda g: lax.conv(FIXED.reshape(1, 1, 8), g[:3].reshape(1, 1, 3), (1,), "SAME"),
    ],
    "triangular_solve": [
        solved(),
        solved(lower=False, transpose_a=True),
        solved((1, 8), left_side=False, unit_diagonal=True, conjugate_a=True),
        lambda g: lax.linalg.triangular_solve(
            g.reshape(1, 8) + SQUARE, FIXED[:, None], left_side=True
        ),
    ],
    "dynamic_slice": [
        lambda g: lax.dynamic_slice(g, (TWO[1],), (2,)),
        lambda g: lax.dynamic_slice(g, (TWO[1],), (4,)),
        lambda g: lax.dynamic_slice(g, (g[0].astype(int),), (4,)),
    ],
    "gather": [
        gathered(mode="clip"),
        gathered(mode="fill"),
        gathered(mode="fill", fill_value=0.0),
        gathered(mode="fill", fill_value=1.0),
        gathered(True, at=TWO, mode="promise_in_bounds"),
        gathered(at=TWO, unique_indices=True, indices_are_sorted=True),
        lambda g: g[g[:2].astype(int) % 8],
    ],
    "convert_element_type": [
        lambda g: g.astype(jnp.bfloat16).astype(jnp.float32),
        lambda g: g.astype(jnp.complex64),
        lambda g: g.astype(int).astype(jnp.float32),
        lambda g: lax.convert_element_type_p.bind(
            g, new_dtype=np.dtype(np.float32), weak_type=True, sharding=None
        ),
    ],
    "select_n": [
        lambda g: jnp.where(FIXED > 1, g, 0.0),
        lambda g: jnp.where(FIXED > 1, g, 1.0),
        lambda g: jnp.where(g > 0, g, 0.0),
        lambda g: jnp.where(FIXED > 1, 1.0, g),
    ],
    "optimization_barrier": [lambda g: lax.optimization_barrier((g, FIXED))[0]],
    "cond": [
        lambda g: lax.cond(FIXED[0] > 1, lambda x: 2 * x, lambda x: x, g),
        lambda g: lax.cond(g[0] > 0, lambda x: 2 * x, lambda x: x, g),
        lambda g: lax.cond(FIXED[0] > 1, lambda x: 2 * x, lambda x: x + 1, g),
    ],
    "scan": [
        lambda g: lax.scan(lambda c, x: (c + x, c), jnp.zeros(()), g)[1],
        lambda g: lax.scan(lambda c, x: (c * x, c), g[0], FIXED, reverse=True)[1],
        lambda g: lax.scan(lambda c, x: (c * x, c), g[0], g)[0],
        lambda g: lax.scan(lambda c, _: (c + FIXED, None), g, None, length=3)[0],
        lambda g: lax.scan(lambda c, x: ((c[1], c[0] + x), None), (g[0], g[1]), g)[0][0],
    ],
    "while": [
        lambda g: lax.while_loop(lambda c: c[0] < 3, lambda c: (c[0] + 1, 2 * c[1]), (0, g))[1],
        lambda g: lax.while_loop(lambda c: c[1].sum() < 9, lambda c: (0, c[1] ** 2 + 2), (0, g))[1],
        lambda g: lax.while_loop(lambda c: c[0] < 3, lambda c: (c[0] + 1, c[1] + 1), (0, g))[1],
        lambda g: lax.while_loop(
            lambda c: c[0] < AT[3], lambda c: (c[0] + 1, c[1] * FIXED), (0, g)
        )[1],
    ],
    "jit": [jax.jit(lambda g: g * 2), jax.jit(lambda g: g + 2)],
    "checkpoint": [jax.checkpoint(lambda g: g * 2), jax.checkpoint(jnp.sin)],
    "new_ref": [
        accumulated(lambda g: 0 * FIXED),
        accumulated(lambda g: FIXED),
        accumulated(lambda g: g),
        accumulated(lambda g: g, lambda g: g * g),
    ],
    "swap": [
        kernel(swapped),
        kernel(lambda g, o: assign(o, g[...] * g[...])),
        kernel(lambda g, o: swapped(g, o, lambda x: x + 1)),
        kernel(by_scratch, scratch=1),
        kernel(lambda w, g, o: assign(o, w[...] * g[...]), FIXED),
    ],
    "addupdate": [
        kernel(lambda w, g, o: doubled(g, o), FIXED),
        kernel(lambda w, g, o: doubled(w, o, g), FIXED),
    ],
    "dma_start": [kernel(copied), kernel(lambda g, o: copied(g, o, lambda x: x + 1))],
    "pallas_call": [kernel(lambda g, o: assign(o, 2 * g[...]), input_output_aliases={0: 0})],
    "psum": [
        Mapped(lambda g: lax.psum(g, "data"), True, out=P()),
        Mapped(lambda g: lax.psum(g * (lax.axis_index("model") + 1), "model"), True),
        Mapped(lambda g: lax.psum(g, ("data", "model"))),
        Mapped(lambda g: lax.psum(g, "data", axis_index_groups=GROUPS)),
        Mapped(lambda g: lax.psum(g * g, "data")),
    ],
    "ppermute": [
        Mapped(lambda g: lax.ppermute(g, "data", [(0, 1), (1, 2)])),
        Mapped(lambda g: lax.ppermute(g, "model", [(0, 1)])),
    ],
    "all_gather": [
        Mapped(lambda g: lax.all_gather(g, "data")),
        Mapped(lambda g: lax.all_gather(g, "model", axis=1, axis_index_groups=[[1], [0]])),
        Mapped(lambda g: lax.all_gather(g, "data", tiled=True)),
    ],
    "all_gather_invariant": [
        Mapped(lambda g: gathered_to_all(g, "data"), True, out=P()),
        Mapped(lambda g: gathered_to_all(g, "data", tiled=True), True, out=P()),
        Mapped(lambda g: gathered_to_all(rows(g), "data", axis=1), True, out=P()),
        Mapped(
            lambda g: gathered_to_all(g * (1 + lax.axis_index("model")), "model"),
            True,
            out=P("data"),
        ),
    ],
    "all_to_all": [
        Mapped(lambda g: lax.all_to_all(rows(g), "data", 1, 0, tiled=True)),
        Mapped(lambda g: lax.all_to_all(rows(g), "model", 0, 0)),
        Mapped(lambda g: lax.all_to_all(rows(g), "data", 0, 1, axis_index_groups=GROUPS)),
    ],
    "reduce_scatter": [
        Mapped(lambda g: lax.psum_scatter(g, "data", tiled=True)),
        Mapped(lambda g: lax.psum_scatter(rows(g), "data", scatter_dimension=1)),
        Mapped(lambda g: lax.psum_scatter(rows(g), "data", axis_index_groups=GROUPS)),
        Mapped(lambda g: lax.psum_scatter(g, "model", tiled=True)),
    ],
    "pvary": [
        Mapped(lambda g: g + lax.axis_index("data") * 0 * g, True, P()),
        Mapped(lambda g: g * lax.axis_index("model"), True, out=P(("data", "model"))),
    ],
}
for _name in ("stack", "unstack", "tile"):  # JAX 0.8.3 and older have none
    if not hasattr(lax, _name):
        del CASES[_name]
