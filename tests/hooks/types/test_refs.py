"""Refs under shard_map's check: reads vary as writes did, or the store is refused."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl
from jax.sharding import PartitionSpec as P
from raising import raises, wrong_out_specs

import shardrules as sr
from shardrules import errors

X = np.arange(32, dtype=np.float32).reshape(8, 4)  # split over data: blocks of (2, 4)
BLOCK = (2, 4)


def varying(x):
    return set(jax.typeof(x).manual_axis_type.varying)


def types(op, mesh, *shapes, specs=P("data")):
    """The axes over which each result of op varies, as shard_map's trace sees them."""
    seen = []

    def spy(*args):
        out = op(*args)
        seen.append([varying(leaf) for leaf in jax.tree.leaves(out)])
        return ()

    args = [jax.ShapeDtypeStruct(s, jnp.float32) for s in shapes or (X.shape,)]
    jax.eval_shape(jax.shard_map(spy, mesh=mesh, in_specs=specs, out_specs=()), *args)
    return seen[-1]


def alone(op, mesh):
    """The types as JAX alone has them; None where it refuses, as JAX 0.12 does to many a store."""
    try:
        return types(op, mesh)
    except ValueError as error:
        assert "varying manual axes to match the Ref's" in str(error)
        return None


def first(x):
    """A scalar of the block, as an index."""
    return x[0, 0].astype(jnp.int32)


# --- jax.new_ref ------------------------------------------------------------------------------


def stored(x, ref):
    ref[...] = x


def added(x, ref):
    jax.ref.addupdate(ref, ..., x)


def stored_in_jit(x, ref):
    jax.jit(lambda x: stored(x, ref))(x)


def stored_in_loop(x, ref):
    jax.lax.fori_loop(0, 2, lambda i, _: stored(x, ref), None)


def stored_by_index(x, ref):
    ref[first(x)] = jnp.ones(4)


def stored_in_branch(x, ref):
    jax.lax.cond(x[0, 0] > 0, lambda: stored(jnp.ones(BLOCK), ref), lambda: None)


def stored_in_while(x, ref):
    def body(i):
        stored(jnp.ones(BLOCK), ref)
        return i + 1

    jax.lax.while_loop(lambda i: i < x[0, 0], body, jnp.float32(0))


def stored_in_run_state(x, ref):
    pl.run_state(lambda refs: stored(refs[0][...], ref))((x,))


STORES = [
    (stored, "a value", "that it is written to"),
    (added, "a value", "that it is written to"),
    (stored_in_jit, "a value", "that it is written to"),
    (stored_in_loop, "a value", "that it is written to"),
    (stored_in_run_state, "a value", "that it is written to"),
    (stored_by_index, "an index", "that it stores to"),
    (stored_in_branch, "the predicate of a cond or switch", "that a branch writes"),
    (stored_in_while, "the condition of a while_loop", "that its body writes"),
]


@pytest.mark.parametrize("store, what, which", STORES, ids=lambda s: getattr(s, "__name__", None))
def test_a_store_that_varies_more_than_its_ref_is_refused(cpu_mesh, hooks, store, what, which):
    def op(x):
        ref = jax.new_ref(jnp.zeros(BLOCK))
        store(x, ref)
        return ref[...]

    with pytest.raises(errors.RefError) as caught:
        types(op, cpu_mesh)
    assert str(caught.value) == (
        f"{what} is varying over {{data}}, but the ref {which} (shape (2, 4)) is invariant, "
        "and reads from it would be typed so too. A ref keeps the type of its first value: "
        "make it from one that varies over {data} too, jax.new_ref(shardrules.vary(x, 'data'))."
    )


@pytest.mark.parametrize("store", [s for s, *_ in STORES], ids=lambda s: s.__name__)
def test_the_advice_works_and_plain_jax_gets_it_wrong(cpu_mesh, store):
    def op(start):
        def run(x):
            ref = jax.new_ref(start(jnp.zeros(BLOCK)))
            store(x, ref)
            return jax.ref.freeze(ref)

        return run

    assert alone(op(lambda zeros: zeros), cpu_mesh) in ([set()], None)  # JAX alone: wrong
    with sr.install():
        assert types(op(lambda zeros: sr.vary(zeros, "data")), cpu_mesh) == [{"data"}]


def test_the_check_alone_turns_the_hooks_of_refs_on(cpu_mesh, hooks):
    def op(x):
        ref = jax.new_ref(jnp.zeros(BLOCK))
        ref[...] = x
        return ref[...]

    f = jax.shard_map(op, mesh=cpu_mesh, in_specs=P("data"), out_specs=P("data"), check_vma=False)
    np.testing.assert_array_equal(jax.jit(f)(X), X)


def test_reading_at_an_index_that_varies_gives_what_varies(cpu_mesh):
    def op(x):
        return jax.new_ref(jnp.arange(64.0))[first(x)]

    assert types(op, cpu_mesh) == [set()]  # JAX alone: wrong
    with sr.install():
        assert types(op, cpu_mesh) == [{"data"}]
        f = jax.shard_map(
            lambda x: op(x)[None], mesh=cpu_mesh, in_specs=P("data"), out_specs=P("data")
        )
        np.testing.assert_array_equal(jax.jit(f)(X), X[::2, 0])


def test_the_cotangent_of_an_invariant_value_in_a_varying_ref_is_summed(cpu_mesh):
    """JAX to 0.11 alone returns each device's share, and then refuses its type."""

    def op(x, w):
        ref = jax.new_ref(x)
        ref[...] = ref[...] * w
        ref[0] = w[0]
        return ref[...]

    def reference(x, w):
        x = x.reshape(4, 2, 4) * w
        return (x.at[:, 0].set(w[0]) ** 2).sum()

    f = jax.shard_map(op, mesh=cpu_mesh, in_specs=(P("data"), P()), out_specs=P("data"))
    grad = jax.grad(lambda x, w: (f(x, w) ** 2).sum(), argnums=(0, 1))
    w = np.arange(1, 9, dtype=np.float32).reshape(BLOCK)
    wanted = jax.grad(reference, argnums=(0, 1))(jnp.asarray(X), w)

    def assert_right():
        for got, want in zip(jax.jit(grad)(X, w), wanted):
            np.testing.assert_allclose(got, want, rtol=1e-5)

    try:
        assert_right()
    except ValueError as error:
        assert "Expected cotangent type" in str(error)
    with sr.install():
        assert_right()


def test_a_bwd_may_store_to_a_new_ref(cpu_mesh, hooks):
    """Whether it is a share is asked of bwd's jaxpr, until that gives the same answer twice."""

    def summed_by_rows(value):
        ref = jax.new_ref(jnp.zeros_like(value))
        for i in range(2):
            ref[0] = ref[0] + value[i]
        return ref[...]

    op = jax.custom_vjp(lambda x, w: x * w[0])
    op.defvjp(lambda x, w: (x * w[0], (x, w)), lambda s, g: (g * s[1][0], summed_by_rows(g * s[0])))
    f = jax.shard_map(op, mesh=cpu_mesh, in_specs=(P("data"), P()), out_specs=P("data"))
    got = jax.jit(jax.grad(lambda w: f(X, w).sum()))(np.ones(BLOCK, np.float32))
    np.testing.assert_allclose(got, [X.sum(0), np.zeros(4)])


def stored_by_kernel(x, ref):
    def kernel(x_ref, o_ref):
        o_ref[...] = x_ref[...]
        ref[...] = x_ref[...]

    pl.pallas_call(kernel, jax.ShapeDtypeStruct(BLOCK, x.dtype), interpret=True)(x)


def test_what_a_kernel_stores_to_a_ref_that_it_closes_over(cpu_mesh, hooks):
    """Types alone: JAX to 0.10 drops such a store, since no effect tells it."""

    def op(x, first):
        ref = jax.new_ref(first(jnp.zeros(BLOCK)))
        stored_by_kernel(x, ref)
        return ref[...]

    with raises(errors.RefError, have=sr.AxisType(), value=sr.AxisType("data")):
        types(lambda x: op(x, lambda zeros: zeros), cpu_mesh)
    assert types(lambda x: op(x, lambda zeros: sr.vary(zeros, "data")), cpu_mesh) == [{"data"}]

    def grown(x):
        return pl.run_state(lambda ref: stored_by_kernel(x, ref))(jnp.zeros(BLOCK))

    assert types(grown, cpu_mesh) == [{"data"}]


def test_a_ref_that_can_not_grow_is_checked_where_one_that_can_was_traced_before(cpu_mesh, hooks):
    """JAX keeps what jit traced for refs of a type: it is not to hold what did not fit it."""

    @jax.jit
    def store(ref, x):
        ref[...] = x

    def op(x):
        grown = pl.run_state(lambda ref: store(ref, x))(jnp.zeros(BLOCK))
        ref = jax.new_ref(jnp.zeros(BLOCK))
        store(ref, x)
        return grown, ref[...]

    with raises(errors.RefError, have=sr.AxisType(), value=sr.AxisType("data")):
        types(op, cpu_mesh)
    assert types(lambda x: pl.run_state(lambda ref: store(ref, x))(x * 0), cpu_mesh) == [{"data"}]


def into_ref(run, value):
    ref = jax.new_ref(jnp.zeros(4))

    def store(_):
        ref[...] = value()

    run(store)
    return ref[...]


@pytest.mark.parametrize(
    "saved",
    [
        lambda value: into_ref(lambda store: jax.jit(store)(0), value),
        lambda value: into_ref(lambda store: jax.lax.map(store, jnp.arange(2)), value),
        lambda value: into_ref(
            lambda store: jax.lax.fori_loop(0, 2, lambda i, _: store(i), None), value
        ),
        lambda value: into_ref(
            lambda store: jax.lax.switch(jnp.int32(0), [store, store], 0), value
        ),
        lambda value: into_ref(lambda store: pl.run_state(store)(jnp.zeros(4)), value),
        lambda value: pl.run_state(lambda ref: stored(value(), ref))(jnp.zeros(4)),
    ],
    ids=["jit", "scan", "loop", "branch", "run_state", "run_state's own"],
)
def test_gradients_that_a_forward_sums_and_stores(cpu_mesh, hooks, saved):
    """What is made in a loop's body and leaves it by a ref alone: four times the gradient."""

    def loss(w, x):
        return (w * x**2).sum()

    def fwd(w, x):
        count = x[0, 0] + 1
        return loss(w, x) / count, (saved(lambda: jax.grad(loss)(w, x)), count)

    op = jax.custom_vjp(lambda w, x: fwd(w, x)[0])
    op.defvjp(fwd, lambda res, g: (g / res[1] * res[0], jnp.zeros(BLOCK)))

    def total(w, x):
        return jax.lax.psum(op(w, x), "data")

    f = jax.shard_map(total, mesh=cpu_mesh, in_specs=(P(), P("data")), out_specs=P())
    with raises(errors.CotangentError, problem="undecided"):
        jax.jit(jax.grad(f))(np.ones(4, np.float32), X)


def test_partial_sums_do_not_go_into_a_ref_of_whole_values(cpu_mesh, hooks):
    def op(x):
        ref = jax.new_ref(jnp.zeros(BLOCK))
        ref[...] = jax.lax.pcast(x, "data", to="unreduced")
        return ref[...]

    with pytest.raises(errors.RefError) as caught:
        types(op, cpu_mesh)
    assert str(caught.value) == (
        "a value is unreduced over {data}, but the ref that it is written to (shape (2, 4)) is "
        "invariant, and reads from it would be typed so too. Partial sums go only into a ref "
        "of partial sums over the same axes: reduce the value first with jax.lax.psum."
    )


@pytest.mark.parametrize("how", ["invariant", "varying"])
def test_gradients_that_jax_accumulates_in_refs_are_what_they_were(cpu_mesh, how):
    """The cotangent of what a loop's body closes over is a ref of JAX's own."""

    def op(x, w):
        w = w if how == "invariant" else jax.lax.pcast(w, "data", to=how)
        c, _ = jax.lax.scan(lambda c, i: (c * w + i, None), x, jnp.arange(3.0))
        return c

    f = jax.shard_map(op, mesh=cpu_mesh, in_specs=(P("data"), P()), out_specs=P("data"))
    w = np.arange(1, 5, dtype=np.float32) / 4
    grad = jax.grad(lambda x, w: (f(x, w) ** 2).sum(), argnums=(0, 1))
    plain = jax.jit(grad)(X, w)
    with sr.install():
        for got, want in zip(jax.jit(grad)(X, w), plain):
            np.testing.assert_array_equal(got, want)


# --- run_state --------------------------------------------------------------------------------


def copies(refs):
    source, target = refs
    target[...] = source[...]


def copies_by_turns(refs):
    source, target, last = refs

    def body(i, _):
        last[...] = target[...]
        target[...] = source[...]

    jax.lax.fori_loop(0, 3, body, None)


def copies_in_jit(refs):
    jax.jit(lambda: copies(refs))()


def copies_in_branch(refs):
    source, target = refs
    jax.lax.cond(source[0, 0] > 0, lambda: stored(jnp.ones(BLOCK), target), lambda: None)


def copies_in_run_state(refs):
    source, target = refs

    def inner(refs):
        copies((source, refs[0]))
        copies((refs[0], target))

    pl.run_state(inner)((jnp.zeros(BLOCK),))


@pytest.mark.parametrize(
    "body",
    [copies, copies_by_turns, copies_in_jit, copies_in_branch, copies_in_run_state],
    ids=lambda b: b.__name__,
)
def test_refs_of_run_state_grow_to_their_fixpoint(cpu_mesh, body):
    zeros = 2 if body is copies_by_turns else 1

    def op(x):
        return pl.run_state(body)((x, *[jnp.zeros(BLOCK)] * zeros))

    assert alone(op, cpu_mesh) in ([{"data"}] + [set()] * zeros, None)  # JAX alone: wrong
    f = jax.shard_map(op, mesh=cpu_mesh, in_specs=P("data"), out_specs=P("data"), check_vma=False)
    want = jax.jit(f)(X)
    with sr.install():
        assert types(op, cpu_mesh) == [{"data"}] * (1 + zeros)
        f = jax.shard_map(op, mesh=cpu_mesh, in_specs=P("data"), out_specs=P("data"))
        for got, one in zip(jax.jit(f)(X), want):
            np.testing.assert_array_equal(got, one)


def test_refs_of_run_state_that_nothing_varying_reaches_stay_as_they_are(cpu_mesh, hooks):
    def op(x, w):
        def body(refs):
            x, w, out, count = refs
            out[...] = x[...] * w[...]
            count[...] += 1

        return pl.run_state(body)((x, w, jnp.zeros(BLOCK), jnp.float32(0)))

    assert types(op, cpu_mesh, X.shape, BLOCK, specs=(P("data"), P())) == [
        {"data"},
        set(),
        {"data"},
        set(),
    ]


def test_a_run_state_whose_result_varies_is_refused_as_replicated(cpu_mesh, hooks):
    def op(x):
        return pl.run_state(copies)((x, jnp.zeros(BLOCK)))[1]

    f = jax.shard_map(op, mesh=cpu_mesh, in_specs=P("data"), out_specs=P())
    with wrong_out_specs():
        jax.eval_shape(f, X)


def test_a_run_state_that_is_replayed_with_other_types_has_those(cpu_mesh, hooks):
    def op(x):
        closed = jax.make_jaxpr(lambda x: pl.run_state(copies)((x, jnp.zeros(BLOCK))))(
            jnp.zeros(BLOCK)
        )  # invariant
        return jax.core.eval_jaxpr(closed.jaxpr, closed.consts, x)

    assert types(op, cpu_mesh) == [{"data"}] * 2
    f = jax.shard_map(op, mesh=cpu_mesh, in_specs=P("data"), out_specs=P("data"))
    for one in jax.jit(f)(X):
        np.testing.assert_array_equal(one, X)
