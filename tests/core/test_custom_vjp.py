"""custom_vjp under the check: each cotangent gets the psum that is missing, and no other."""

from __future__ import annotations

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from raising import raises

import shardrules as sr
from core import kernels, versions
from shardrules import errors, testing

DATA = P("data", None)


@pytest.fixture(autouse=True)
def declared_kernels(hooks):
    for kernel in (kernels.scale_kernel, kernels.sum_rows_kernel, kernels.copy_kernel):
        sr.register(kernel.__name__, sr.no_communication)


def loss_of(op, mesh, check=True):
    f = versions.shard_map(op, mesh=mesh, in_specs=(DATA, P()), out_specs=DATA, check=check)
    return lambda x, w: (f(x, w) ** 2).sum()


def arguments(mesh):
    x = np.arange(8 * 128, dtype=np.float32).reshape(8, 128) / 1024
    w = np.linspace(1, 2, 128, dtype=np.float32)
    return (
        jax.device_put(x, NamedSharding(mesh, DATA)),
        jax.device_put(w, NamedSharding(mesh, P())),
    )


def single_device(x, w):
    return jax.grad(lambda x, w: ((x * w) ** 2).sum(), (0, 1))(np.asarray(x), np.asarray(w))


def assert_gradients(gradient, x, w):
    for have, want in zip(gradient(x, w), single_device(x, w)):
        np.testing.assert_allclose(have, want, rtol=1e-5)


def test_replicated_weight_gets_the_one_psum_that_it_needs(cpu_mesh):
    gradient = jax.jit(jax.grad(loss_of(kernels.make_scale(), cpu_mesh), (0, 1)))
    x, w = arguments(cpu_mesh)
    assert_gradients(gradient, x, w)
    [verdict] = testing.judge(gradient, x, w).verdicts
    assert verdict.verdict == "needed"
    assert verdict.bytes == 128 * 4
    assert [sorted(g) for g in verdict.collective.groups] == [[0, 2, 4, 6], [1, 3, 5, 7]]


def test_check_off_reduces_the_weight_over_both_axes(cpu_mesh):
    gradient = jax.jit(jax.grad(loss_of(kernels.make_scale(), cpu_mesh, check=False), (0, 1)))
    x, w = arguments(cpu_mesh)
    assert_gradients(gradient, x, w)
    judgement = testing.judge(gradient, x, w)
    [wide] = judgement.overwide
    assert wide.needed_axes == ("data",) and wide.bytes == 128 * 4
    assert {v.verdict for v in judgement.verdicts} == {"overwide", "redundant"}


def test_without_jit_the_gradients_are_the_same(cpu_mesh):
    gradient = jax.grad(loss_of(kernels.make_scale(), cpu_mesh), (0, 1))
    assert_gradients(gradient, *arguments(cpu_mesh))


def test_jit_inside_shard_map_changes_nothing(cpu_mesh):
    gradient = jax.jit(jax.grad(loss_of(jax.jit(kernels.make_scale()), cpu_mesh), (0, 1)))
    x, w = arguments(cpu_mesh)
    assert_gradients(gradient, x, w)
    assert [v.verdict for v in testing.judge(gradient, x, w).verdicts] == ["needed"]


def test_psum_at_the_end_of_bwd_is_not_done_twice(cpu_mesh):
    op = kernels.make_scale(finish=lambda ct: jax.lax.psum(ct, "data"))
    gradient = jax.jit(jax.grad(loss_of(op, cpu_mesh), (0, 1)))
    x, w = arguments(cpu_mesh)
    assert_gradients(gradient, x, w)
    assert [v.verdict for v in testing.judge(gradient, x, w).verdicts] == ["needed"]


def test_cotangent_that_may_be_summed_already_is_refused(cpu_mesh):
    """JAX 0.4.35 and 0.5.3 sum it again: four times the gradient, without a word."""
    op = kernels.make_scale(finish=lambda ct: jax.lax.all_gather(ct, "data").sum(0))
    with raises(errors.CotangentError, problem="undecided", axes={"data"}):
        jax.jit(jax.grad(loss_of(op, cpu_mesh), (0, 1))).lower(*arguments(cpu_mesh))


def test_cotangent_through_a_kernel_that_communicates_is_refused(cpu_mesh):
    sr.register("sum_rows_kernel", sr.all_gather("data"), replace=True)
    why = r"pallas_call kernel 'sum_rows_kernel'.*whose rule is all_gather\('data'\)"
    with raises(errors.CotangentError, problem="undecided", message=re.compile(why).search):
        jax.grad(loss_of(kernels.make_scale(), cpu_mesh), (0, 1))(*arguments(cpu_mesh))


def test_other_cotangents_may_communicate(cpu_mesh):
    """Only what the cotangent depends on counts: x's may gather what w's doesn't see."""

    @jax.custom_vjp
    def op(x, w):
        return kernels.call(kernels.scale_kernel, x.shape, x, w)

    def bwd(residuals, g):
        x, w = residuals
        everyone = jax.lax.psum(g, "model") / 2
        return (
            kernels.call(kernels.scale_kernel, g.shape, everyone, w),
            kernels.call(kernels.sum_rows_kernel, w.shape, g, x),
        )

    op.defvjp(lambda x, w: (op(x, w), (x, w)), bwd)
    assert_gradients(jax.jit(jax.grad(loss_of(op, cpu_mesh), (0, 1))), *arguments(cpu_mesh))


@pytest.mark.parametrize("zero", [lambda w: jnp.zeros_like(w), lambda w: None])
def test_cotangent_that_varies_over_fewer_axes_is_cast(zero, cpu_mesh):
    """A bwd that gives x no gradient: an invariant zero, or None, for a varying primal."""

    @jax.custom_vjp
    def op(x, w):
        return kernels.call(kernels.scale_kernel, x.shape, x, w)

    op.defvjp(
        lambda x, w: (op(x, w), (x, w)),
        lambda residuals, g: (
            zero(jnp.zeros(g.shape, g.dtype)),
            kernels.call(kernels.sum_rows_kernel, residuals[1].shape, g, residuals[0]),
        ),
    )
    x, w = arguments(cpu_mesh)
    gradient = jax.jit(jax.grad(loss_of(op, cpu_mesh), (0, 1)))
    if zero(x) is None and not versions.takes_none_as_cotangent():
        with pytest.raises(ValueError, match="expected cotangent type"):
            gradient(x, w)
        return
    dx, dw = gradient(x, w)
    np.testing.assert_array_equal(dx, np.zeros_like(dx))
    np.testing.assert_allclose(dw, single_device(x, w)[1], rtol=1e-5)


def test_scope_of_the_forward_is_that_of_the_backward(cpu_mesh):
    """bwd is traced when the with has closed."""

    def kernel(x_ref, o_ref):
        o_ref[...] = x_ref[...]

    op = kernels.make_copy(kernel)
    f = versions.shard_map(op, mesh=cpu_mesh, in_specs=DATA, out_specs=DATA)
    x, _ = arguments(cpu_mesh)
    with sr.rules({"kernel": sr.no_communication}):
        y, transpose = jax.vjp(f, x)
    np.testing.assert_array_equal(transpose(y)[0], np.asarray(x))


def test_gradient_through_scan_and_checkpoint(cpu_mesh):
    scale = kernels.make_scale()

    def op(x, w):
        body = jax.checkpoint(lambda y, _: (scale(y, w), None))
        return jax.lax.scan(body, x, None, length=3)[0]

    x, w = arguments(cpu_mesh)
    gradient = jax.jit(jax.grad(loss_of(op, cpu_mesh), (0, 1)))
    want = jax.grad(lambda x, w: ((x * w**3) ** 2).sum(), (0, 1))(np.asarray(x), np.asarray(w))
    for have, one in zip(gradient(x, w), want):
        np.testing.assert_allclose(have, one, rtol=1e-5)
    assert {v.verdict for v in testing.judge(gradient, x, w).verdicts} == {"needed"}


def test_vmap_over_a_mesh_axis_gives_right_gradients_where_all_is_mapped(cpu_mesh):
    f = versions.shard_map(
        kernels.make_scale(), mesh=cpu_mesh, in_specs=(P("model"), P()), out_specs=P("model")
    )
    g = jax.vmap(f, spmd_axis_name="data")
    x = np.arange(8 * 4 * 16, dtype=np.float32).reshape(8, 4, 16) / 64
    w = np.linspace(1, 2, 8 * 16, dtype=np.float32).reshape(8, 16)
    gradient = jax.jit(jax.grad(lambda x, w: (g(x, w) ** 2).sum(), (0, 1)))
    if not versions.maps_psum_over_a_mesh_axis():
        with pytest.raises(TypeError, match="axis_index_groups"):
            gradient(x, w)
        return
    have = gradient(x, w)
    want = jax.grad(lambda x, w: ((x * w[:, None]) ** 2).sum(), (0, 1))(x, w)
    for one, other in zip(have, want):
        np.testing.assert_allclose(one, other, rtol=1e-5)


@pytest.mark.parametrize("in_axes", [(0, None), (None, 0)])
def test_vmap_over_a_mesh_axis_sums_the_gradient_of_what_is_not_mapped(cpu_mesh, in_axes):
    """The axis comes in after the casts. JAX to 0.5.3 lost a psum; from 0.6.0 it refused the type."""
    f = versions.shard_map(
        kernels.make_scale(), mesh=cpu_mesh, in_specs=(P("model"), P()), out_specs=P("model")
    )
    x = np.arange(8 * 4 * 16, dtype=np.float32).reshape(8, 4, 16) / 64
    w = np.linspace(1, 2, 8 * 16, dtype=np.float32).reshape(8, 16)
    x, w = (a if axis == 0 else a[0] for a, axis in zip((x, w), in_axes))

    def gradient(op, **spmd):
        batched = jax.vmap(op, in_axes=in_axes, **spmd)
        return jax.jit(jax.grad(lambda x, w: (batched(x, w) ** 2).sum(), (0, 1)))(x, w)

    if not versions.maps_psum_over_a_mesh_axis():
        with pytest.raises(TypeError, match="axis_index_groups"):
            gradient(f, spmd_axis_name="data")
        return
    try:
        have = gradient(f, spmd_axis_name="data")
    except errors.RuleError as error:
        assert error.kernel and error.axes == {"data"}
        assert not versions.types_values()
        return
    for one, other in zip(have, gradient(lambda x, w: x * w)):
        np.testing.assert_allclose(one, other, rtol=1e-5)


# To JAX 0.5.3 what a mapped axis makes vary is refused, and cond has a rule for few; 0.8.3's psum
# can't be mapped (axis_index_groups).
NOT_MAPPED = (
    "came to vary over that after shard_map's casts were put in",
    "requires argument replication types to match",
    "No replication rule for cond",
    "axis_index_groups",
)


def in_a_branch(op, x, w):
    return jax.lax.cond(x[0, 0] > 1, lambda: op(x, w), lambda: x * w)


def in_steps(op, x, w):
    step = jax.checkpoint(lambda y, _: (in_a_branch(op, y, w), None))
    return jax.lax.scan(step, x, None, length=2)[0]


@pytest.mark.parametrize("in_axes", [(0, None), (0, 0)])
@pytest.mark.parametrize(
    "program", [lambda op, x, w: jax.checkpoint(op)(x, w), in_a_branch, in_steps]
)
def test_vmap_over_a_mesh_axis_of_jaxprs_that_hold_a_kernel(program, in_axes, cpu_mesh):
    """vmap hides the axis from bwd's types, which came to vary over it when the jaxpr was run."""
    scale = kernels.make_scale()
    x = np.arange(8 * 4 * 16, dtype=np.float32).reshape(8, 4, 16) / 512
    w = np.linspace(1, 2, 8 * 16, dtype=np.float32).reshape(8, 16)
    w = w if in_axes[1] == 0 else w[0]

    def gradient(op, **spmd):
        batched = jax.vmap(op, in_axes=in_axes, **spmd)
        return jax.jit(jax.grad(lambda x, w: (batched(x, w) ** 2).sum(), (0, 1)))(x, w)

    f = versions.shard_map(
        lambda x, w: program(scale, x, w),
        mesh=cpu_mesh,
        in_specs=(P("model"), P()),
        out_specs=P("model"),
    )
    try:
        have = gradient(f, spmd_axis_name="data")
    except Exception as error:  # JAX's own type, in 0.5
        assert not (versions.types_values() and versions.maps_psum_over_a_mesh_axis())
        assert any(why in str(error) for why in NOT_MAPPED)
        return
    halves = lambda x, w: jnp.concatenate(  # noqa: E731
        [program(lambda x, w: x * w, half, w) for half in jnp.split(x, 2)]
    )
    for one, other in zip(have, gradient(halves)):
        np.testing.assert_allclose(one, other, rtol=1e-5)


# The kernel gathers in name alone, which its own jaxpr contradicts.
DECLARED = functools.partial(sr.install, prove=False)


def gather_with(bwd, mesh):
    """The gradient of a kernel that gathers over model, given its bwd."""
    sr.register("gather_kernel", sr.all_gather_invariant("model"))

    @jax.custom_vjp
    def gather(x):
        return kernels.call(kernels.gather_kernel, (x.shape[0], 2 * x.shape[1]), x)

    gather.defvjp(lambda x: (gather(x), ()), lambda _, g: (bwd(g, g.shape[1] // 2),))
    f = versions.shard_map(gather, mesh=mesh, in_specs=P("data", "model"), out_specs=DATA)
    return jax.grad(lambda x: (f(x) ** 2).sum())


@pytest.mark.parametrize(
    "bwd",
    [
        lambda g, n: jax.lax.psum(g, "model")[:, :n],
        lambda g, n: jax.lax.psum_scatter(g, "model", scatter_dimension=1, tiled=True),
    ],
)
def test_bwd_that_reduces_over_an_axis_that_its_forward_dropped_is_refused(bwd, cpu_mesh):
    """Right with the check off; under it the cotangent arrives summed: N times the gradient."""
    x = jax.ShapeDtypeStruct((8, 128), jnp.float32)
    with DECLARED(), raises(errors.CotangentError, problem="summed", axes={"model"}):
        jax.eval_shape(gather_with(bwd, cpu_mesh), x)


def product_with(forward, backward, mesh):
    """The gradient of a product of two values that differ along data, given one's fwd and bwd."""

    @jax.custom_vjp
    def op(x, y):
        return x * forward(y)

    op.defvjp(
        lambda x, y: (op(x, y), (x, y)),
        lambda saved, g: (g * forward(saved[1]), backward(g * saved[0])),
    )
    f = versions.shard_map(op, mesh=mesh, in_specs=(DATA, DATA), out_specs=DATA)
    return jax.jit(jax.grad(lambda x, y: (f(x, y) ** 2).sum() / 2, (0, 1)))


def over_data(collective):
    return lambda value: collective(value, "data")


def refused_for_others(forward, backward, mesh):
    x, _ = arguments(mesh)
    with raises(errors.CotangentError, problem="of_others") as caught:
        product_with(forward, backward, mesh)(x, x)
    assert caught.value.axes == {"data"}


@pytest.mark.parametrize("backward", [over_data(jax.lax.psum), over_data(jax.lax.pmean)])
def test_cotangents_of_other_devices_are_not_of_a_value_that_stays_here(backward, cpu_mesh):
    """A cast made it pass that JAX from 0.8.3 refuses: each device got the sum of all gradients."""
    refused_for_others(lambda y: y, backward, cpu_mesh)


def test_what_else_the_forward_moves_takes_no_value_to_other_devices(cpu_mesh):
    def beside(y):
        count = jax.lax.psum(jnp.ones_like(y), "data")
        return y * count / 4

    refused_for_others(beside, over_data(jax.lax.psum), cpu_mesh)


def test_cotangents_of_other_devices_are_of_a_value_that_they_got(cpu_mesh):
    x, _ = arguments(cpu_mesh)
    summed = over_data(jax.lax.psum)
    got = product_with(summed, summed, cpu_mesh)(x, x)

    def alone(x, y):
        whole = jnp.tile(y.reshape(4, 2, 128).sum(0), (4, 1))
        return ((x * whole) ** 2).sum() / 2

    x = np.asarray(x)
    for one, other in zip(got, jax.grad(alone, (0, 1))(x, x)):
        np.testing.assert_allclose(one, other, rtol=1e-5)


@versions.where(versions.types_values)
def test_copies_that_are_kept_equal_are_said_by_a_cast(cpu_mesh):
    x, _ = arguments(cpu_mesh)
    backward = lambda ct: sr.vary(jax.lax.psum(ct, "data"), "data")  # noqa: E731
    _, dy = product_with(lambda y: y, backward, cpu_mesh)(x, x)
    each = (np.asarray(x) ** 3).reshape(4, 2, 128).sum(0)
    np.testing.assert_allclose(dy, np.tile(each, (4, 1)), rtol=1e-5)


def test_bwd_may_slice_what_arrives_summed(cpu_mesh):
    def bwd(g, n):
        return jax.lax.dynamic_slice_in_dim(g, jax.lax.axis_index("model") * n, n, 1)

    x = jax.ShapeDtypeStruct((8, 128), jnp.float32)
    with DECLARED():
        assert jax.eval_shape(gather_with(bwd, cpu_mesh), x).shape == x.shape


@jax.tree_util.register_pytree_node_class
class Pair:
    """A pytree that checks what it holds, but for the objects that JAX fills trees with."""

    def __init__(self, one, other):
        if type(one) is not object:
            assert one.shape == other.shape
        self.one, self.other = one, other

    def tree_flatten(self):
        return (self.one, self.other), None

    @classmethod
    def tree_unflatten(cls, _, leaves):
        return cls(*leaves)


def test_a_primal_may_be_of_a_class_that_checks_what_it_holds(cpu_mesh):
    scaled = jax.custom_vjp(lambda x, pair: x * pair.one + pair.other)
    scaled.defvjp(
        lambda x, pair: (scaled(x, pair), (x, pair.one)),
        lambda saved, g: (g * saved[1], Pair((g * saved[0]).sum(0), g.sum(0))),
    )
    loss = loss_of(lambda x, w: scaled(x, Pair(w, 0 * w)), cpu_mesh)
    assert_gradients(jax.jit(jax.grad(loss, (0, 1))), *arguments(cpu_mesh))


@pytest.mark.parametrize(
    "through", [lambda x, w: x * w, lambda x, w: jax.lax.psum(x * w, "data")], ids=["cast", "psum"]
)
def test_zero_cotangent_of_a_cast_and_of_a_psum(through, cpu_mesh):
    """JAX to 0.6.0 sums or casts that zero, a TypeError from inside."""
    op = jax.custom_vjp(lambda x, y: x)
    op.defvjp(lambda x, y: (x, None), lambda _, g: (g, None))
    f = versions.shard_map(
        lambda x, w: op(x, through(x, w)),
        mesh=cpu_mesh,
        in_specs=(P("data"), P()),
        out_specs=P("data"),
    )
    x = np.arange(1, 5, dtype=np.float32)
    gradient = jax.jit(jax.grad(lambda x, w: (f(x, w) ** 2).sum(), (0, 1)))
    for one, other in zip(gradient(x, np.float32(3)), (2 * x, 0)):
        np.testing.assert_allclose(one, other)


@pytest.mark.parametrize(
    "mapped",
    [
        lambda op: lambda x, w: jax.vmap(op, (0, None))(x, w),
        lambda op: lambda x, w: jax.vmap(jax.jit(jax.checkpoint(op)), (0, None))(x, w),
        lambda op: lambda x, w: jax.vmap(jax.vmap(op, (0, None)), (0, None))(x[:, None], w)[:, 0],
    ],
    ids=["vmap", "vmap of jit of checkpoint", "vmap of vmap"],
)
def test_cotangents_vary_under_vmap_too(mapped, cpu_mesh):
    """To JAX 0.5.3 a tracer of vmap's has no replication set: what it holds has."""
    loss = loss_of(lambda x, w: mapped(kernels.make_scale())(x[:, None], w)[:, 0], cpu_mesh)
    assert_gradients(jax.jit(jax.grad(loss, (0, 1))), *arguments(cpu_mesh))
