"""Loops and branches around opaque calls: types meet at the join, and only where JAX refuses."""

import functools
import re
import traceback

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl
from jax.sharding import PartitionSpec as P

import shardrules as sr
from shardrules import testing

lax = jax.lax
STEPS, ROWS, COLUMNS = 3, 8, 4


@sr.no_communication
def multiply_kernel(x_ref, w_ref, o_ref):
    o_ref[...] = x_ref[...] * w_ref[...]


@sr.no_communication
def row_kernel(x_ref, g_ref, o_ref):
    o_ref[...] = jnp.sum(x_ref[...] * g_ref[...], axis=0, keepdims=True)


def _call(kernel, like, *args):
    return pl.pallas_call(kernel, jax.ShapeDtypeStruct(like.shape, like.dtype), interpret=True)(
        *args
    )


@jax.custom_vjp
def multiply(x, w):
    """x * w, with a row w, forward and backward by kernels."""
    return _call(multiply_kernel, x, x, w)


multiply.defvjp(
    lambda x, w: (multiply(x, w), (x, w)),
    lambda res, g: (_call(multiply_kernel, g, g, res[1]), _call(row_kernel, res[1], res[0], g)),
)


def scan_from_zeros(op, x, w):
    def body(carry, _):
        y = op(x, w)
        return jnp.cos(carry) + y, y

    carry, ys = lax.scan(body, jnp.zeros(x.shape), None, length=STEPS)
    return carry + ys.sum(0)


def scan_of_a_chain(op, x, w):
    """a <- b <- c <- op: each pass over the body widens one more."""

    def body(carry, _):
        a, b, c = carry
        return (b + a, c + b, op(x, w) + c), None

    zeros = jnp.zeros(x.shape)
    (a, b, c), _ = lax.scan(body, (zeros, zeros, zeros), None, length=STEPS)
    return a + b + c


def scan_that_returns_zeros(op, x, w):
    """The carry varies before the body, and not after it."""

    def body(carry, _):
        return jnp.ones(x.shape), op(carry, w)

    carry, ys = lax.scan(body, x, None, length=STEPS)
    return carry + ys.sum(0)


def scan_with_weak_carry(op, x, w):
    """Python scalars change dtype, shape stays: JAX promotes them in the same step."""

    def body(carry, _):
        count, total = carry
        return (count + 1, total + op(x, w).sum()), None

    (_, total), _ = lax.scan(body, (0, 0), None, length=STEPS)
    return total + x


def scan_nested(op, x, w):
    def inner(carry, _):
        return carry + op(x, w), None

    def outer(carry, _):
        first, _ = lax.scan(inner, jnp.zeros(x.shape), None, length=2)
        return jnp.sin(carry) + first, None

    carry, _ = lax.scan(outer, jnp.zeros(x.shape), None, length=STEPS)
    return carry


def scan_of_remat(op, x, w):
    @jax.checkpoint
    def body(carry, _):
        return jnp.sin(carry) + op(x, w), None

    return lax.scan(body, jnp.zeros(x.shape), None, length=STEPS)[0]


def remat_of_scan(op, x, w):
    return jax.checkpoint(functools.partial(scan_from_zeros, op))(x, w)


def scan_of_jit(op, x, w):
    body = jax.jit(lambda carry, _: (jnp.sin(carry) + op(x, w), None))
    return jax.jit(lambda: lax.scan(body, jnp.zeros(x.shape), None, length=STEPS)[0])()


def fori(op, x, w):
    return lax.fori_loop(0, STEPS, lambda i, c: jnp.sin(c) + op(x, w), jnp.zeros(x.shape))


def cond(op, x, w):
    return lax.cond(w[0, 0] > 0, lambda: op(x, w), lambda: jnp.zeros(x.shape)) + x


def cond_with_kernel_in_the_second(op, x, w):
    return (
        lax.cond(
            w[0, 0] < 0,
            lambda x: (jnp.float32(2), jnp.zeros(x.shape)),
            lambda x: (op(x, w).sum(), x),
            x,
        )[0]
        * x
    )


def switch(op, x, w):
    branches = [
        lambda x: jnp.zeros(x.shape),
        lambda x: op(x, w),
        lambda x: x,
        lambda x: jnp.ones(x.shape),
    ]
    return sum(lax.switch(i, branches, x) for i in range(4))


def switch_in_scan(op, x, w):
    def body(carry, i):
        return carry + lax.switch(i, [lambda: jnp.ones(x.shape), lambda: op(x, w)]), None

    return lax.scan(body, jnp.zeros(x.shape), jnp.arange(STEPS))[0]


PROGRAMS = [
    scan_from_zeros,
    scan_of_a_chain,
    scan_that_returns_zeros,
    scan_with_weak_carry,
    scan_nested,
    scan_of_remat,
    remat_of_scan,
    scan_of_jit,
    fori,
    cond,
    cond_with_kernel_in_the_second,
    switch,
    switch_in_scan,
]


def arguments():
    keys = jax.random.split(jax.random.key(0))
    return (
        jax.random.normal(keys[0], (ROWS, COLUMNS)),
        1 + jax.random.uniform(keys[1], (1, COLUMNS)),
    )


def sharded(program, mesh):
    return jax.shard_map(
        functools.partial(program, multiply),
        mesh=mesh,
        in_specs=(P("data"), P()),
        out_specs=P("data"),
    )


def loss(f):
    return lambda x, w: (f(x, w) ** 2).sum()


def by_blocks(program):
    """The same program on one device, block by block of the batch."""

    def f(x, w):
        return jnp.concatenate([program(lambda x, w: x * w, block, w) for block in jnp.split(x, 4)])

    return f


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda p: p.__name__)
def test_plain_jax_refuses_and_with_the_hooks_gradients_are_right(cpu_mesh, program):
    x, w = arguments()
    # An op of JAX's own in place of the kernel: it is the carry or branch that is refused.
    with pytest.raises(TypeError, match="must have equal (output )?types"):
        jax.eval_shape(
            jax.shard_map(
                functools.partial(program, lambda x, w: x * w),
                mesh=cpu_mesh,
                in_specs=(P("data"), P()),
                out_specs=P("data"),
            ),
            x,
            w,
        )
    want = jax.jit(jax.grad(loss(by_blocks(program)), argnums=(0, 1)))(x, w)
    with sr.install():
        got = jax.jit(jax.grad(loss(sharded(program, cpu_mesh)), argnums=(0, 1)))(x, w)
    for one, other in zip(got, want):
        np.testing.assert_allclose(one, other, rtol=2e-5, atol=1e-5)


@pytest.mark.parametrize(
    "program", [scan_from_zeros, cond, switch, scan_of_remat], ids=lambda p: p.__name__
)
def test_no_collective_but_the_weights(cpu_mesh, hooks, program):
    """The batch is sharded over data, so w's cotangent is summed over data, and nothing else."""
    gradient = jax.jit(jax.grad(loss(sharded(program, cpu_mesh)), argnums=(0, 1)))
    args = [
        jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=jax.sharding.NamedSharding(cpu_mesh, spec))
        for a, spec in zip(arguments(), (P("data"), P()))
    ]
    judgement = testing.assert_no_defensive_psum(gradient, *args)
    assert {v.collective.axes for v in judgement.verdicts} == {("data",)}


def test_forward_only_while(cpu_mesh, hooks):
    def program(x, w):
        return lax.while_loop(
            lambda c: c[0] < STEPS,
            lambda c: (c[0] + 1, c[1] + multiply(x, w)),
            (0, jnp.zeros(x.shape)),
        )[1]

    x, w = arguments()
    f = jax.shard_map(program, mesh=cpu_mesh, in_specs=(P("data"), P()), out_specs=P("data"))
    np.testing.assert_allclose(jax.jit(f)(x, w), STEPS * x * w, rtol=1e-6)
    # The counter is cast to nothing: it stays invariant.
    (loop,) = [e for e in equations(jax.make_jaxpr(f)(x, w)) if e.primitive.name == "while"]
    assert [set(v.aval.manual_axis_type.varying) for v in loop.outvars] == [set(), {"data"}]


def equations(jaxpr):
    """Every equation of a jaxpr, nested ones too."""
    for equation in getattr(jaxpr, "jaxpr", jaxpr).eqns:
        yield equation
        for value in equation.params.values():
            for one in value if isinstance(value, (tuple, list)) else (value,):
                if hasattr(getattr(one, "jaxpr", one), "eqns"):
                    yield from equations(one)


def test_the_cast_of_a_carry_stands_before_the_loop(cpu_mesh, hooks):
    """Its transpose, a psum, then runs once and not at every step."""

    def program(x, w):
        def body(carry, x):
            return carry + x, None

        start = jnp.broadcast_to(w, (2, COLUMNS))
        return lax.scan(body, start, jnp.stack([x, x]))[0]

    f = jax.shard_map(program, mesh=cpu_mesh, in_specs=(P("data"), P()), out_specs=P("data"))
    jaxpr = jax.make_jaxpr(jax.grad(loss(f), argnums=1))(*arguments())
    loops = [e for e in equations(jaxpr) if e.primitive.name == "scan"]
    inside = [e for loop in loops for e in equations(loop.params["jaxpr"])]
    everywhere = [e.primitive.name for e in equations(jaxpr)]
    assert loops and "psum_invariant" not in [e.primitive.name for e in inside]
    assert everywhere.count("psum_invariant") == 1


def accepted(x, w):
    """Loops and branches that JAX takes as they are."""

    def body(carry, y):
        return carry * 2 + y, carry

    total, ys = lax.scan(body, x, jnp.stack([x, x]))
    total = lax.fori_loop(0, 3, lambda i, c: c + total, x)
    free = lax.while_loop(lambda c: c < 3, lambda c: c + 1, 0)
    return lax.cond(w[0, 0] > 0, lambda: total + ys[0], lambda: x) + free


def test_what_jax_accepts_keeps_its_jaxpr(cpu_mesh):
    f = jax.grad(
        lambda x, w: (
            jax.shard_map(accepted, mesh=cpu_mesh, in_specs=(P("data"), P()), out_specs=P("data"))(
                x, w
            )
            ** 2
        ).sum()
    )

    def jaxpr():
        return re.sub(
            r"0x[0-9a-f]+", "0x", str(jax.make_jaxpr(lambda *a: jax.jit(f)(*a))(*arguments()))
        )

    plain = jaxpr()
    with sr.install():
        assert jaxpr() == plain


@pytest.mark.parametrize(
    "program",
    [
        lambda x: lax.scan(
            lambda c, _: (jnp.stack([x, x]), None), jnp.zeros(x.shape), None, length=2
        ),
        lambda x: lax.scan(
            lambda c, _: (x.astype(jnp.bfloat16), None), jnp.zeros(x.shape), None, length=2
        ),
        lambda x: lax.scan(lambda c, _: ((x, c), None), jnp.zeros(x.shape), None, length=2),
        lambda x: lax.scan(lambda c, _: x, jnp.zeros(x.shape), None, length=2),
        lambda x: lax.scan(
            lambda c, _: ((c[1], c[0][0]), None), (x, jnp.zeros(x.shape)), None, length=2
        ),
        lambda x: lax.while_loop(lambda c: True, lambda c: (x, c), jnp.zeros(x.shape)),
        lambda x: lax.fori_loop(0, 2, lambda i, c: x.astype(int), jnp.zeros(x.shape)),
        lambda x: lax.cond(True, lambda: x, lambda: jnp.zeros(3)),
        lambda x: lax.cond(True, lambda: x, lambda: (jnp.zeros(x.shape),)),
        lambda x: lax.switch(
            1, [lambda: x, lambda: jnp.zeros(x.shape, int), lambda: jnp.zeros(x.shape)]
        ),
    ],
    ids=[
        "shape",
        "dtype",
        "structure",
        "not a pair",
        "swapped",
        "while structure",
        "fori dtype",
        "cond shape",
        "cond structure",
        "switch dtype",
    ],
)
def test_other_differences_stay_jax_errors(cpu_mesh, program):
    """Word for word: nothing was cast on the way to them."""

    def message():
        with pytest.raises(TypeError) as caught:
            jax.eval_shape(
                jax.shard_map(program, mesh=cpu_mesh, in_specs=P("data"), out_specs=P("data")),
                arguments()[0],
            )
        return str(caught.value)

    plain = message()
    with sr.install():
        assert message() == plain


def test_without_the_check_nothing_is_cast(cpu_mesh, hooks):
    x, w = arguments()
    jaxpr = jax.make_jaxpr(
        jax.shard_map(
            functools.partial(scan_from_zeros, multiply),
            mesh=cpu_mesh,
            in_specs=(P("data"), P()),
            out_specs=P("data"),
            check_vma=False,
        )
    )(x, w)
    assert "pvary" not in [e.primitive.name for e in equations(jaxpr)]


def test_tracebacks_are_the_users(hooks):
    """Each jit traces through a hook; JAX hides its own frames, and so are the hook's."""

    @jax.jit
    def f(x):
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError) as caught:
        jax.jit(lambda x: f(x))(1.0)
    files = [entry.filename for entry in traceback.extract_tb(caught.value.__traceback__)]
    assert not [file for file in files if "/shardrules/hooks/" in file]
