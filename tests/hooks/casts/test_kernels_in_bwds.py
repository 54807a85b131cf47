"""Casts move past a custom_vjp whose bwd is a Pallas kernel, if the kernel is read as linear."""

from __future__ import annotations

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import shardrules as sr
from hooks.casts import promise
from shardrules.door.jaxprs import opened
from shardrules.hooks.cotangents.communication import moved_by_kernels
from shardrules.hooks.cotangents.linearity import linearity
from shardrules.hooks.install import state

WIDTH, HIDDEN, ROWS = 8, 16, 16


def kernel(body, *args, like):
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), like)
    return pl.pallas_call(body, shapes, interpret=True)(*args)


def norm_kernel(x, scale, out):
    out[...] = x[...] * lax.rsqrt(jnp.mean(x[...] ** 2, -1, keepdims=True) + 1e-6) * scale[...]


def norm_bwd_kernel(x, scale, g, dx, dscale):
    root = lax.rsqrt(jnp.mean(x[...] ** 2, -1, keepdims=True) + 1e-6)
    unit, scaled = x[...] * root, g[...] * scale[...]
    dx[...] = root * (scaled - unit * jnp.mean(scaled * unit, -1, keepdims=True))
    dscale[...] = jnp.sum(g[...] * unit, 0)


def clipped_norm_bwd_kernel(x, scale, g, dx, dscale):
    norm_bwd_kernel(x, scale, g, dx, dscale)
    dx[...] = jnp.clip(dx[...], -0.01, 0.01)


def mlp_kernel(x, up, down, out):
    out[...] = jnp.tanh(x[...] @ up[...]) @ down[...]


def mlp_bwd_kernel(x, up, down, g, dx, dup, ddown):
    hidden = jnp.tanh(x[...] @ up[...])
    dhidden = (g[...] @ down[...].T) * (1 - hidden**2)
    dx[...] = dhidden @ up[...].T
    dup[...] = x[...].T @ dhidden
    ddown[...] = hidden.T @ g[...]


def op(forward, backward):
    """Return a custom_vjp of two kernels, whose result is like its first operand."""
    f = jax.custom_vjp(lambda *args: kernel(forward, *args, like=args[0]))
    f.defvjp(
        lambda *args: (f(*args), args), lambda args, g: tuple(kernel(backward, *args, g, like=args))
    )
    return f


def step(mesh, norm_bwd=norm_bwd_kernel, check=True):
    """Return a residual stream of two layers: the norm's scale is replicated, its bwd a kernel."""
    norm, mlp = op(norm_kernel, norm_bwd), op(mlp_kernel, mlp_bwd_kernel)

    def body(params, x):
        for scale, up, down in params:
            x = x + lax.psum(mlp(norm(x, scale), up, down), "tensor")
        return lax.psum(jnp.sin(x).sum(), "data")

    specs = [(P(), P(None, "tensor"), P("tensor"))] * 2
    how = dict(mesh=mesh, in_specs=(specs, P("data")), out_specs=P(), check_vma=check)
    return jax.grad(jax.shard_map(body, **how))


def arguments():
    rng = np.random.default_rng(0)
    shapes = (WIDTH,), (WIDTH, HIDDEN), (HIDDEN, WIDTH)
    params = [tuple(rng.normal(size=s).astype(np.float32) for s in shapes) for _ in range(2)]
    return params, rng.normal(size=(ROWS, WIDTH)).astype(np.float32)


@pytest.fixture(scope="module")
def mesh():
    return Mesh(np.array(jax.devices()).reshape(2, 4), ("data", "tensor"))


def figures(mesh, *norm_bwd):
    """Return the bytes summed and the gradients with late casts and with the cheapest."""
    args, found = arguments(), []
    for casts in ("late", "cheapest"):
        with sr.install(casts=casts):
            f = step(mesh, *norm_bwd)
            summed = promise.summed(jax.make_jaxpr(f)(*args).jaxpr, mesh.shape)[0]
            found.append((summed, jax.jit(f)(*args)))
    for one, other in zip(*(jax.tree.leaves(gradients) for _, gradients in found)):
        np.testing.assert_allclose(one, other, rtol=2e-4, atol=1e-4)
    return found[0][0], found[1][0]


def test_a_scale_is_summed_and_not_the_residual_stream(mesh):
    late, cheapest = figures(mesh)
    stream, scale = ROWS // 2 * WIDTH * 4, WIDTH * 4
    # Nothing needs the gradient of the input, so the first layer sums dscale over tensor, not dh.
    assert late - cheapest == stream - scale


def test_a_kernel_that_clips_is_not_passed(mesh):
    late, cheapest = figures(mesh, clipped_norm_bwd_kernel)
    assert late == cheapest


def test_explain_names_the_bwd_in_the_way_and_what_it_costs(mesh):
    late, cheapest = figures(mesh)

    def explained(*norm_bwd):
        return " ".join(str(sr.explain(step(mesh, *norm_bwd), *arguments())).split())

    now, without = re.search(
        r"these cotangents sum (\S+) B on each device: the bwd '<lambda>' \(at \S+:\d+\) is not "
        r"known to be linear in its cotangents; without that, they would sum (\S+) B",
        explained(clipped_norm_bwd_kernel),
    ).groups()
    assert int(now.replace(",", "")) - int(without) == late - cheapest
    assert "without that" not in explained()


def test_axes_along_which_kernels_move_data(mesh):
    """A kernel's jaxpr alone may read as linear: its rule says along which axes it moves data."""

    def moved():
        def body(x):
            return kernel(norm_kernel, x, x[0], like=x)

        f = jax.shard_map(body, mesh=mesh, in_specs=P("data"), out_specs=P("data"), check_vma=False)
        (eqn,) = jax.make_jaxpr(f)(arguments()[1]).jaxpr.eqns
        return moved_by_kernels(state(), opened(eqn.params["jaxpr"]), frozenset(mesh.axis_names))

    with sr.install():
        assert moved() == frozenset()
        sr.register("norm_kernel", sr.permute("tensor"))
        assert moved() == {"tensor"}


def test_reading_a_kernel_with_scratch_in_a_loop_ends():
    """Each pass over the kernel's jaxpr would make new scratch, into which it stores anew."""

    def tripled(x, out):
        def run(total):
            total[...] = jnp.zeros_like(total)

            def add(_, carry):
                total[...] += 2 * x[...]
                return carry

            lax.fori_loop(0, 3, add, 0)
            out[...] = total[...]

        pl.run_scoped(run, pltpu.VMEM(x.shape, x.dtype))

    def call(x):
        return pl.pallas_call(tripled, jax.ShapeDtypeStruct(x.shape, x.dtype))(x)

    jaxpr = jax.make_jaxpr(call)(np.ones(4, np.float32)).jaxpr
    assert linearity(jaxpr, jaxpr.invars, kernels=True).summed == frozenset()


def test_what_a_bwd_prints_of_its_cotangent_stays_as_with_late_casts(cpu_mesh):
    def printed(casts):
        shown = []

        @jax.custom_vjp
        def watched(w):
            return w * 1.0

        def bwd(_, g):
            jax.debug.callback(lambda g: shown.append(round(float(g.sum()), 2)), g)
            return (g,)

        watched.defvjp(lambda w: (w * 1.0, None), bwd)

        def body(w, x):
            return lax.scan(lambda h, _: (jnp.sin(h * watched(w)), None), x, length=3)[0]

        w, x = np.linspace(0.3, 1, 4, dtype=np.float32), np.ones((8, 4), np.float32)
        with sr.install(casts=casts):
            f = jax.shard_map(body, mesh=cpu_mesh, in_specs=(P(), P("data")), out_specs=P("data"))
            jax.block_until_ready(jax.jit(jax.grad(lambda w: (f(w, x) ** 2).sum()))(w))
            jax.effects_barrier()
        return sorted(shown)

    assert printed("cheapest") == printed("late")
