"""What a varying predicate chooses varies.

To JAX 0.5.3 shard_map knows that by itself, or has no rule for cond and while_loop; the hooks leave
it as it is there.
"""

from __future__ import annotations

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import raising
from jax.sharding import PartitionSpec as P
from raising import raises

import shardrules as sr
from core import kernels, versions
from shardrules.door.jaxprs import inner_jaxprs
from shardrules.errors import AxisError

lax = jax.lax
# From JAX 0.6 axis types are on avals.
TYPED = any(
    hasattr(jax.make_jaxpr(jnp.sin)(1.0).in_avals[0], name) for name in ("vma", "manual_axis_type")
)
X = np.array([[1.0, 0.5], [-1, 2], [2, 1], [-2, 0.1]], np.float32)
W = np.array([1.5, 0.5], np.float32)


def closures(op, x, w):
    return lax.cond(x[0, 0] > 0, lambda: jnp.sin(w), lambda: w**2)


def switch(op, x, w):
    return lax.switch(
        (x[0, 0] + 1).astype(int), [lambda: w, lambda: jnp.zeros(w.shape), lambda: 3 * w]
    )


def nested(op, x, w):
    def steps():
        def body(c, y):
            return lax.cond(y > 0.7, lambda: jax.nn.silu(c) * w, lambda: c + 1), None

        return lax.scan(body, w, x[0])[0]

    return lax.cond(x[0, 0] > 0, jax.jit(jax.checkpoint(steps)), lambda: w)


def kernel_in_a_branch(op, x, w):
    return lax.cond(x[0, 0] > 0, lambda: op(w[None], w)[0], lambda: w)


def kernel_of_the_predicate(op, x, w):
    return lax.cond(op(x, w)[0, 0] > 0, lambda: jnp.sin(w), lambda: 2 * w)


def beside_what_varies(op, x, w):
    """JAX types it rightly, and puts a psum into a branch: there, the gradient hangs."""
    return lax.cond(x[0, 0] > 0, lambda: op(x, w)[0], lambda: x[0])


PROGRAMS = [
    closures,
    switch,
    nested,
    kernel_in_a_branch,
    kernel_of_the_predicate,
    beside_what_varies,
]


def sharded(program, op, mesh, out_specs=P("data")):
    return versions.shard_map(
        lambda x, w: program(op, x, w)[None],
        mesh=mesh,
        in_specs=(P("data"), P()),
        out_specs=out_specs,
    )


def refused(program, op, mesh):
    with raising.refused():
        jax.eval_shape(sharded(program, op, mesh, P()), X, W)


def gradient(f):
    return jax.jit(jax.grad(lambda x, w: (f(x, w) ** 2).sum(), argnums=(0, 1)))


def on_one_device(program):
    return lambda x, w: jnp.stack([program(lambda x, w: x * w, row[None], w) for row in x])


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda p: p.__name__)
def test_what_a_varying_predicate_chooses_varies(program, cpu_mesh):
    def multiply(x, w):
        return x * w

    if not TYPED or program is beside_what_varies:
        refused(program, multiply, cpu_mesh)
    else:
        jax.eval_shape(sharded(program, multiply, cpu_mesh, P()), X, W)  # JAX accepts it
    with sr.install():
        op = kernels.make_scale()
        sr.register("scale_kernel", sr.no_communication)
        sr.register("sum_rows_kernel", sr.no_communication)
        refused(program, op, cpu_mesh)
        if TYPED:
            got = gradient(sharded(program, op, cpu_mesh))(X, W)
            for one, other in zip(got, gradient(on_one_device(program))(X, W)):
                np.testing.assert_allclose(one, other, rtol=2e-5, atol=1e-6)


def test_what_a_loop_carries_varies_as_its_condition(cpu_mesh):
    def doubled(op, x, w):
        return lax.while_loop(lambda c: c[0] < x[0, 0], lambda c: (c[0] + 1, 2 * c[1]), (0.0, w))[1]

    if TYPED:
        jax.eval_shape(sharded(doubled, None, cpu_mesh, P()), X, W)  # JAX accepts it
    with sr.install():
        refused(doubled, None, cpu_mesh)
        if TYPED:
            got = jax.jit(sharded(doubled, None, cpu_mesh))(X, W)
            np.testing.assert_allclose(got, on_one_device(doubled)(X, W))


def scanned(step, w):
    return lax.scan(lambda c, _: (step(c), None), w, None, length=2)[0]


def counted(step, w):
    return lax.fori_loop(0, 2, lambda _, c: step(c), w)


@pytest.mark.parametrize("how", [jax.jit, lambda f: f], ids=["jit", "eager"])
@pytest.mark.parametrize("loop", [scanned, counted], ids=lambda p: p.__name__)
def test_gradients_in_a_loops_body(loop, how, cpu_mesh):
    """Run, as lowering and execution trace the body again: in JAX 0.12 as an eval_jaxpr."""

    def step(x, w):
        value, gradient = jax.vjp(lambda w: (jnp.sin(x) * w**2).sum(), w)
        return w - 0.1 * gradient(0 * value + 1)[0]  # varying, which JAX 0.6's grad doesn't make it

    def descent(op, x, w):
        return loop(lambda w: step(x, w), w)

    with sr.install():
        if TYPED:
            f = versions.shard_map(
                lambda x, w: descent(None, x, w),
                mesh=cpu_mesh,
                in_specs=(P("data"), P()),
                out_specs=P(),
            )
            np.testing.assert_allclose(how(f)(X, W), descent(None, X, W), rtol=2e-5)
        else:  # a gradient in the body is one device's share there
            refused(descent, None, cpu_mesh)


def scaled(x, w):
    return jnp.sin(w) * x


def sine(x, w):
    return jnp.sin(w)


def saving(f):
    """Return a custom_vjp whose forward saves JAX's own pullback."""
    op = jax.custom_vjp(f)
    op.defvjp(lambda *args: jax.vjp(f, *args), lambda pull, g: pull(g))
    return op


def summing(first=False):
    """Return a custom_vjp whose bwd sums over the devices, where there are some.

    Args:
      first: whether it sums before it multiplies by what is equal on all of them.
    """

    def total(share):
        return lax.psum(share, "data") if named() else share

    def bwd(saved, g):
        x, w = saved
        ct = total(g * x) * jnp.cos(w) if first else total(g * x * jnp.cos(w))
        return g * jnp.sin(w), ct

    op = jax.custom_vjp(scaled)
    op.defvjp(lambda x, w: (scaled(x, w), (x, w)), bwd)
    return op


def named():
    """Whether a mesh axis is here: on one device there is none."""
    try:
        lax.axis_index("data")
    except NameError:
        return False
    return True


def steps(op, x, w):
    def body(c, _):
        return lax.cond(c[1] > 0, lambda: op(c, w), lambda: c), None

    return lax.scan(body, x, None, length=3)[0]


def in_one(op, x, w):
    return lax.cond(x[0] > 0, lambda: op(x, w) + 0 * x, lambda: x)


def in_both(op, x, w):
    return lax.cond(x[0] > 0, lambda: op(x, w), lambda: 2 * op(x, w))


def in_a_switch(op, x, w):
    return lax.switch((x[0] + 1).astype(int), [lambda: op(x, w), lambda: 3 * w, lambda: x])


def in_a_scan_in_a_branch(op, x, w):
    return lax.cond(x[0] > 0, lambda: steps(op, x, w), lambda: x)


def in_remat(op, x, w):
    return lax.cond(x[0] > 0, lambda: jax.checkpoint(jax.jit(op))(x, w), lambda: x)


def under_vmap(op, x, w):
    rows = jnp.stack([x, -x])
    return jax.vmap(lambda x: in_one(op, x, w))(rows).sum(0)


def beside_others(op, x, w):
    return lax.cond(x[0] > 0, lambda: op(x, w) + w * x, lambda: w)


COMMUNICATING = [
    in_one,
    in_both,
    in_a_switch,
    in_a_scan_in_a_branch,
    in_remat,
    under_vmap,
    beside_others,
]


def rows_of(program, op):
    """Return the program on all rows at once, on one device."""
    return lambda x, w: jnp.stack([program(op, row, w) for row in x])


def over_rows(program, op, mesh):
    return versions.shard_map(
        lambda x, w: program(op, x[0], w)[None],
        mesh=mesh,
        in_specs=(P("data"), P()),
        out_specs=P("data"),
    )


def compared(program, op, mesh, casts="late"):
    with sr.install(casts=casts):
        f = over_rows(program, op, mesh)
        got = (jax.jit(f)(X, W), *gradient(f)(X, W))
    want = (rows_of(program, op)(X, W), *gradient(rows_of(program, op))(X, W))
    for one, other in zip(got, want):
        np.testing.assert_allclose(one, other, rtol=2e-5, atol=1e-6)


@pytest.mark.sampled
@versions.where(versions.types_values)
@pytest.mark.parametrize(
    "program, f, casts",
    [(program, scaled, "late") for program in COMMUNICATING]
    + [(in_one, sine, "late"), (in_a_switch, sine, "cheapest"), (in_both, scaled, "cheapest")],
)
def test_a_pullback_that_fwd_saved_sums_after_the_branches(program, f, casts, cpu_mesh):
    """JAX's waits in a branch for devices that took another, or calls its types wrong."""
    compared(program, saving(f), cpu_mesh, casts)


@pytest.mark.sampled
@versions.where(versions.types_values)
@pytest.mark.parametrize(
    "program, first",
    [(program, False) for program in COMMUNICATING] + [(in_one, True), (in_both, True)],
)
def test_what_bwd_sums_is_summed_after_the_branches(program, first, cpu_mesh):
    """Else devices that took another branch are waited for: the process ends."""
    jaxpr = jax.make_jaxpr(gradient(over_rows(program, summing(first), cpu_mesh)))
    with sr.install():
        assert sums_in_branches(jaxpr(X, W).jaxpr) == []
    compared(program, summing(first), cpu_mesh)


def saving_a_gradient():
    """Return a custom_vjp whose forward takes the gradient: each device's own in a branch."""

    def f(x, w):
        return (jnp.sin(w) * x).sum()

    def fwd(x, w):
        value, pull = jax.vjp(f, x, w)
        return value, pull(0 * value + 1)  # varying, which JAX 0.6's grad doesn't make it

    op = jax.custom_vjp(f)
    op.defvjp(fwd, lambda saved, g: tuple(g * one for one in saved))
    return op


@versions.where(versions.types_values)
def test_a_gradient_that_fwd_saved_is_summed_after_the_branches(cpu_mesh):
    compared(in_one, saving_a_gradient(), cpu_mesh)


def sums_in_branches(jaxpr, inside=False):
    """Return the psums in a jaxpr's conds but those that nothing uses, which XLA drops."""
    found, used = [], {var for var in jaxpr.outvars if not hasattr(var, "val")}
    for eqn in reversed(jaxpr.eqns):
        if used.isdisjoint(eqn.outvars):
            continue
        used.update(var for var in eqn.invars if not hasattr(var, "val"))
        if inside and "psum" in eqn.primitive.name:
            found.append(eqn)
        for inner in inner_jaxprs(eqn.params):
            found += sums_in_branches(inner, inside or eqn.primitive.name == "cond")
    return found


def rounding():
    """Return a custom_vjp whose bwd is not linear in what it sums."""
    op = jax.custom_vjp(scaled)

    def bwd(saved, g):
        x, w = saved
        return g * jnp.sin(w), jnp.tanh(lax.psum(g * x * jnp.cos(w), "data"))

    op.defvjp(lambda x, w: (scaled(x, w), (x, w)), bwd)
    return op


@versions.where(versions.types_values)
def test_a_sum_that_must_stay_in_one_branch_is_refused(cpu_mesh):
    with sr.install(), pytest.raises(AxisError) as error:
        jax.make_jaxpr(gradient(over_rows(in_one, rounding(), cpu_mesh)))(X, W)
    assert re.fullmatch(
        r"the predicate of a cond or switch varies over \{data\}, so devices along them run "
        r"different branches, and a bwd sums over \{data\} \(at .*test_control.py:\d+\), which not "
        r"all of them reach: those that do would wait forever. Make the predicate the same on all "
        r"devices, with jax.lax.pmax over \('data',\), or return this device's share from bwd, "
        r"without that sum \(the hooks sum it after the branches\).",
        str(error.value),
    )


@versions.where(versions.types_values)
def test_a_sum_that_all_branches_hold_stays(cpu_mesh):
    """XLA moves it out of them: plain JAX runs it."""
    with sr.install():
        f = gradient(over_rows(in_both, rounding(), cpu_mesh))
        assert len(sums_in_branches(jax.make_jaxpr(f)(X, W).jaxpr)) == 2


def taken_in_a_branch(op, x, w):
    return lax.cond(x[0] > 0, lambda: gradient_of(x, w), lambda: w)


def taken_in_a_loop(op, x, w):
    return lax.while_loop(
        lambda c: c[0] < x[0], lambda c: (c[0] + 1, c[1] - 0.1 * gradient_of(x, w)), (0.0, x)
    )[1]


def gradient_of(x, w):
    value, pull = jax.vjp(lambda w: (jnp.sin(w) * x).sum(), w)
    return pull(0 * value + 1)[0]  # varying, which JAX 0.6's grad doesn't make it


@versions.where(versions.types_values)
@pytest.mark.parametrize(
    "program, what",
    [
        (taken_in_a_branch, "the predicate of a cond or switch .* run different branches,"),
        (taken_in_a_loop, "the condition of a while_loop .* run different numbers of steps,"),
    ],
)
def test_gradients_of_what_is_invariant_are_refused_where_devices_part(program, what, cpu_mesh):
    with sr.install(), pytest.raises(AxisError, match=what) as error:
        jax.eval_shape(over_rows(program, None, cpu_mesh), X, W)
    assert error.value.axes == {"data"}


def quantizing(by):
    """Return a custom_vjp whose bwd rounds its cotangent by a scale that devices agree on."""
    op = jax.custom_vjp(scaled)

    def bwd(saved, g):
        x, w = saved
        scale = by(jnp.abs(lax.stop_gradient(x)).max())
        return jnp.round(g * jnp.sin(w) / scale) * scale, g * x * jnp.cos(w)

    op.defvjp(lambda x, w: (scaled(x, w), (x, w)), bwd)
    return op


def largest(s):
    """The largest of all devices', by a kernel (here, for want of devices, of a stand-in)."""
    return kernels.make_copy(kernels.copy_kernel)(jnp.broadcast_to(s, (4, 2))).max()


SCALES = {
    "pmax": lambda s: lax.pmax(s, "data"),
    "all_gather": lambda s: lax.all_gather(s, "data").max(),
    "pallas_call": largest,
}


@versions.where(versions.types_values)
@pytest.mark.parametrize("name", SCALES)
def test_what_a_bwd_communicates_in_one_branch_is_refused(name, cpu_mesh):
    """Not a sum that could stand after the branches; it would wait for good, too."""
    sr.register("copy_kernel", sr.all_gather("data"), replace=True)
    with sr.install(), raises(AxisError, axes={"data"}):
        jax.make_jaxpr(gradient(over_rows(in_one, quantizing(SCALES[name]), cpu_mesh)))(X, W)


@versions.where(versions.types_values)
def test_what_all_branches_communicate_stays(cpu_mesh):
    with sr.install():
        f = gradient(over_rows(in_both, quantizing(SCALES["pmax"]), cpu_mesh))
        assert str(jax.make_jaxpr(f)(X, W)).count("pmax") == 2


@versions.where(versions.types_values)
def test_what_a_user_communicates_in_a_branch_is_theirs_in_the_gradient_too(cpu_mesh):
    def program(op, x, w):
        moved = lambda: lax.ppermute(x, "data", [(i, (i + 1) % 4) for i in range(4)])  # noqa: E731
        return lax.cond(x[0] > 0, moved, lambda: x * w)

    with sr.install():
        f = gradient(over_rows(program, None, cpu_mesh))
        assert "ppermute" in str(jax.make_jaxpr(f)(X, W))
