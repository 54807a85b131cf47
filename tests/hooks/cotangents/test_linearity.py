"""Which Pallas kernels are linear in their cotangents, by their own jaxpr."""

import jax
import jax.numpy as jnp
import pytest
from core import versions
from jax import lax
from jax.experimental import pallas as pl

from shardrules.hooks.cotangents.linearity import linearity
from shardrules.jaxprs import fold, reach

pytestmark = versions.where(versions.types_values)

SHAPE = jax.ShapeDtypeStruct((8, 8), jnp.float32)


def scaled(r, t, o):
    o[...] = jnp.dot(t[...] * jnp.exp(r[...]), r[...]) - t[...].sum(0, keepdims=True)


def half(r, t, o):
    o[...] = t[...].astype(jnp.bfloat16).astype(jnp.float32)


def flash(r, t, o):
    """Mask scores, and add up over the rows in a loop that starts from zeros."""

    def row(i, total):
        p = jnp.where(r[...] > i, jnp.exp(r[...] - r[...].max()), 0.0)
        return total + p * (t[pl.ds(i, 1), :] - (t[...] * r[...]).sum())

    o[...] = lax.fori_loop(0, 8, row, jnp.zeros((8, 8)))


def accumulated(r, t, o):
    @pl.when(pl.program_id(0) == 0)
    def _():
        o[...] = jnp.zeros((8, 8))

    o[...] += r[...] * t[...]


def until(r, t, o):
    o[...] = lax.while_loop(
        lambda c: c[0] < r[0, 0], lambda c: (c[0] + 1, c[1] * 2), (0.0, t[...])
    )[1]


def clipped(r, t, o):
    o[...] = jnp.clip(t[...], -1, 1)


def added(r, t, o):
    o[...] = t[...] + r[...]


def squared(r, t, o):
    o[...] = t[...] * t[...]


def started_from_another(r, t, o):
    o[...] = r[...]
    o[...] += t[...]


def chosen(r, t, o):
    o[...] = jnp.zeros((8, 8))

    @pl.when(t[0, 0] > 0)
    def _():
        o[...] = t[...]


def until_small(r, t, o):
    o[...] = lax.while_loop(lambda c: c.sum() > 1, lambda c: c / 2, t[...])


def stored_until_small(r, t, o):
    def halve(c):
        o[...] = t[...]
        return c / 2

    lax.while_loop(lambda c: c.sum() > 1, halve, t[...])


def normalized(r, t, o):
    o[...] = t[...] / jnp.sqrt(jnp.sum(t[...] ** 2))


def eighth(r, t, o):
    o[...] = t[...].astype(jnp.float8_e4m3fn).astype(jnp.float32)


def placed(r, t, o):
    o[...] = r[pl.ds(t[0, 0].astype(jnp.int32), 1), :] * t[...]


def carried(r, t, o):
    """The second turn of the loop reads what the first one made of it."""
    step = lambda _, c: (c[1] * r[...], jnp.abs(c[0]))  # noqa: E731
    o[...] = lax.fori_loop(0, 3, step, (jnp.zeros((8, 8)), t[...]))[0]


LINEAR = [scaled, half, flash, accumulated, until]
OTHER = [
    clipped,
    added,
    squared,
    started_from_another,
    chosen,
    until_small,
    stored_until_small,
    normalized,
    eighth,
    placed,
    carried,
]


def jaxpr_of(kernel, **options):
    def f(r, t):
        return pl.pallas_call(kernel, SHAPE, interpret=True, grid=(2,), **options)(r, t)

    return jax.make_jaxpr(f)(SHAPE, SHAPE).jaxpr


@pytest.mark.parametrize("kernel", LINEAR + OTHER, ids=lambda kernel: kernel.__name__)
def test_a_kernel(kernel):
    jaxpr = jaxpr_of(kernel)
    expected = frozenset() if kernel in LINEAR else None
    assert linearity(jaxpr, jaxpr.invars[1:], kernels=True).summed == expected
    assert linearity(jaxpr, jaxpr.invars[1:]).summed is None
    assert linearity(jaxpr, [], kernels=True).summed is None  # a constant is not zero


def test_an_output_that_is_an_inputs_memory():
    def kernel(r, t, o):
        o[...] += t[...]

    for source, expected in ((1, frozenset()), (0, None)):
        jaxpr = jaxpr_of(kernel, input_output_aliases={source: 0})
        assert linearity(jaxpr, jaxpr.invars[1:], kernels=True).summed == expected


def test_collectives_may_move_the_inputs():
    def ring(r, t):
        step = lambda _, c: lax.ppermute(c, "i", [(0, 1), (1, 0)]) * r  # noqa: E731
        return lax.all_gather(lax.fori_loop(0, 2, step, t), "i")

    jaxpr = jax.make_jaxpr(ring, axis_env=[("i", 2)])(SHAPE, SHAPE).jaxpr
    assert linearity(jaxpr, jaxpr.invars[1:], kernels=True).summed == {"i"}
    assert linearity(jaxpr, jaxpr.invars[1:]).summed is None


def test_scratch_memory_and_copies():
    from jax.experimental.pallas import tpu as pltpu

    def of(mix):
        def kernel(r, t, o, s, sem):
            copy = pltpu.make_async_copy(t if mix is None else r, s, sem)
            copy.start()
            copy.wait()
            o[...] = s[...] if mix is None else s[...] + mix * t[...]

        space = getattr(pltpu, "ANY", None) or pl.ANY
        specs = [pl.BlockSpec(memory_space=space)] * 2
        f = pl.pallas_call(
            kernel,
            SHAPE,
            in_specs=specs,
            scratch_shapes=[pltpu.VMEM((8, 8), jnp.float32), pltpu.SemaphoreType.DMA],
        )
        jaxpr = jax.make_jaxpr(f)(SHAPE, SHAPE).jaxpr
        return linearity(jaxpr, jaxpr.invars[1:], kernels=True).summed

    assert of(None) == frozenset() and of(2.0) is None


def test_what_is_rounded_behind_a_ref_is_seen():
    def f(ct):
        ref = jax.new_ref(jnp.zeros(4))
        ref[...] = ct
        return jax.lax.reduce_precision(ref[...], 8, 3)

    jaxpr = jax.make_jaxpr(f)(jnp.zeros(4)).jaxpr
    assert linearity(jaxpr, jaxpr.invars).rounds
    assert not linearity(jaxpr, []).rounds


def test_what_takes_too_many_passes_is_unknown(monkeypatch):
    jaxpr = jax.make_jaxpr(lambda ct: -ct)(jnp.zeros(4)).jaxpr
    assert linearity(jaxpr, jaxpr.invars).summed == frozenset()
    monkeypatch.setattr(fold, "MOST_EQUATIONS", 0)
    proof = linearity(jaxpr, jaxpr.invars)
    assert (proof.summed, proof.rounds) == (None, True)
    with pytest.raises(fold.TooLong, match="don't settle: after 0 equations its values still"):
        reach.Reach().run(jaxpr, [True])


def printed_if_large(r, t):
    lax.cond(t.max() > 3, lambda: jax.debug.callback(lambda: None), lambda: None)


@pytest.mark.parametrize(
    ("shows", "f"),
    [
        (True, lambda r, t: jax.debug.print("{}", t)),
        (True, lambda r, t: jax.experimental.io_callback(lambda x: None, None, 2 * t)),
        (True, jax.jit(lambda r, t: jax.debug.print("{}", t))),
        (True, printed_if_large),
        (False, lambda r, t: jax.debug.print("{}", r)),
        (False, jax.jit(lambda r, t: jax.debug.print("{}", r))),
        (False, lambda r, t: printed_if_large(t, r)),
    ],
)
def test_what_the_host_sees_of_the_inputs_is_said(shows, f):
    def bwd(r, t):
        f(r, t)
        return t * r

    jaxpr = jax.make_jaxpr(bwd)(SHAPE, SHAPE).jaxpr
    proof = linearity(jaxpr, jaxpr.invars[1:])
    assert (proof.shows, proof.summed) == (shows, frozenset())
