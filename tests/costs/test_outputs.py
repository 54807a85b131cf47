"""A missing reduction: outputs that are called replicated and differ are named, others aren't."""

import jax
import jax.numpy as jnp
import numpy as np
import programs
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

from shardrules import hlo, testing
from shardrules.costs import missing, outputs


def found(step, mesh, shapes, in_specs, **jit):
    args = programs.structs(mesh, *zip(shapes, in_specs))
    judgement = testing.judge(jax.jit(step, **jit), *args)
    return {one.name: (one.kind, one.axes) for one in outputs.find(judgement)}


def unchecked(f, mesh, in_specs, out_specs=P()):
    return jax.shard_map(f, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False)


def loss(w, x):
    return jnp.mean(jnp.tanh(x @ w) ** 2)


def trained(reduce):
    """A step whose gradient, loss, norm, statistic and scale are each reduced by ``reduce``."""

    def step(w, x):
        value, grad = jax.value_and_grad(loss)(w, x)
        return {
            "w": w - 0.1 * reduce(grad),
            "loss": reduce(value),
            "mean": reduce(x.mean(0)),
            "scale": reduce(jnp.abs(x).max()),
            "hits": reduce((jnp.argmax(x @ w, 1) == (x[:, 0] > 0)).mean()),
        }

    return step


NAMES = ("w", "loss", "mean", "scale", "hits")
SHAPES = (((128, 128)), ((32, 128)))
SPECS = (P(), P(("data", "model")))


@pytest.mark.parametrize(
    "name, reduce, axes",
    [
        ("nothing", lambda g: g, ("data", "model")),
        ("one axis", lambda g: lax.pmean(g, "data"), ("model",)),
        ("both", lambda g: lax.pmean(g, ("data", "model")), None),
    ],
)
def test_what_is_not_reduced_over_all_axes_is_named(platform, name, reduce, axes):
    mesh = platform[1]
    step = unchecked(trained(reduce), mesh, SPECS)
    expected = {f"output['{n}']": ("differs", axes) for n in NAMES} if axes else {}
    assert found(step, mesh, SHAPES, SPECS) == expected


def test_a_loss_that_is_averaged_and_a_metric_that_is_not(platform):
    def step(w, x):
        return lax.pmean(loss(w, x), "data"), {"norm": jnp.sqrt((x * x).sum())}

    mesh = platform[1]
    specs = (P(), P("data"))
    assert found(unchecked(step, mesh, specs), mesh, SHAPES, specs) == {
        "output[1]['norm']": ("differs", ("data",))
    }


def test_the_state_that_a_step_carries_is_named_and_why(cpu_mesh):
    step = unchecked(lambda w, x: w - jax.grad(loss)(w, x), cpu_mesh, (P(), P("data")))
    args = programs.structs(cpu_mesh, (SHAPES[0], P()), (SHAPES[1], P("data")))
    (one,) = outputs.find(testing.judge(jax.jit(step, donate_argnums=0), *args))
    assert one.what == "output, f32[128,128]: called replicated over {data}, not proven equal"
    assert one.because == (
        "parameter 1 (x) is sharded over data, and there is no reduction over data on the way; "
        "it is written into the memory of w, so the devices' copies drift apart from step to "
        "step"
    )
    assert one.advice.startswith("reduce over 'data' what differs in it before it is returned")
    assert "for a weight, reduce its gradient, not the weight" in one.advice


def test_a_call_without_a_kernel_s_name_is_given_a_rule_by_the_name_of_its_operation(cpu_mesh):
    def step(x):
        return jax.pure_callback(np.sin, jax.ShapeDtypeStruct(x.shape, x.dtype), x)

    args = programs.structs(cpu_mesh, (SHAPES[0], P()))
    (one,) = outputs.find(testing.judge(jax.jit(unchecked(step, cpu_mesh, P())), *args))
    assert one.kind == "unproven"
    rule = "'--rule=jit(step)/shard_map/pure_callback=no_communication'"
    assert one.advice.startswith(f"give the call a rule: pass {rule} to the command if ")


def optimized(reduce):
    """A step of Adam whose gradients are clipped by their norm, under a scan over the layers."""

    def step(w, moment, x):
        def own(w):
            return jnp.mean(lax.scan(lambda h, a: (jnp.tanh(h @ a), None), x, w)[0] ** 2)

        grad = reduce(jax.grad(own)(w))
        grad = grad / jnp.maximum(jnp.sqrt((grad**2).sum()), 1)
        moment = 0.9 * moment + grad
        return w - 0.1 * moment / (jnp.abs(moment) + 1e-3), moment

    return step


def test_the_value_that_lacks_a_reduction_is_named(cpu_mesh):
    specs, shapes = (P(), P(), P("data")), ((4, 16, 16), (4, 16, 16), (32, 16))

    def advised(step):
        args = programs.structs(cpu_mesh, *zip(shapes, specs))
        judgement = testing.judge(jax.jit(unchecked(step, cpu_mesh, specs)), *args)
        return missing.find(judgement)

    wrong = advised(optimized(lambda g: g))
    assert [one.name for one in wrong] == ["output[0]", "output[1]"]
    for one in wrong:
        assert one.missing == "no reduction over {data} of the gradient that goes into it"
        assert one.advice.startswith("reduce the gradient that comes from ")
        assert "test_outputs.py" in one.advice and "over 'data' before it goes into " in one.advice
        assert "jax.lax.pmean; jax.lax.psum only if the differentiated loss" in one.advice
    # What the advice says, done; and the gradient reduced over the other axis alone.
    assert advised(optimized(lambda g: lax.pmean(g, "data"))) == []
    assert all(one.missing for one in advised(optimized(lambda g: lax.pmean(g, "model"))))

    def two_ways(w, moment, x):
        new, moment = optimized(lambda g: g)(w, moment, x)
        return new + x.mean(), moment  # reducing the gradient alone is not enough

    def forward(w, moment, x):
        return w + x.mean(), moment

    for step, expected in ((two_ways, [False, True]), (forward, [False])):
        assert [bool(one.missing) for one in advised(step)] == expected


@pytest.mark.parametrize(
    "own, reduce",
    [
        (jnp.mean, lax.pmean),
        (lambda y: lax.pmean(y.mean(), "data"), lax.pmean),
        (lambda y: lax.psum(y.sum(), "data") / 512, lax.pmean),
        (lambda y: y.sum() / 512, lax.psum),  # the device's own sum, and no psum
    ],
)
def test_the_advice_on_a_gradient_gives_that_of_one_device(cpu_mesh, own, reduce):
    """The layer is split over the other axis, whose psum is in the loss as well."""
    key = jax.random.split(jax.random.key(0), 4)
    shapes = ((8,), (8, 16), (16, 16), (32, 8))
    scale, up, down, x = (jax.random.normal(k, s) for k, s in zip(key, shapes))

    def loss(scale, up, down, x):
        return own(lax.psum(jnp.tanh((x * scale) @ up) @ down, "model") ** 2)

    def gradient(scale, up, down, x):
        grad = jax.grad(loss)(scale, up, down, x)
        return reduce(lax.pmean(grad, "model"), "data")

    def alone(scale):
        return jnp.mean((jnp.tanh((x * scale) @ up) @ down) ** 2)

    specs = (P(), P(None, "model"), P("model"), P("data"))
    followed = jax.jit(unchecked(gradient, cpu_mesh, specs))(scale, up, down, x)
    np.testing.assert_allclose(followed, jax.grad(alone)(scale), rtol=1e-5)


def test_a_scan_over_microbatches(platform):
    def step(reduce, w, x):
        def one(total, part):
            return total + jax.grad(loss)(w, part), None

        return reduce(lax.scan(one, jnp.zeros_like(w), x.reshape(4, -1, 128))[0])

    mesh, specs, shapes = platform[1], (P(), P("data")), (SHAPES[0], (256, 128))
    for reduce, expected in (
        (lambda g: g, {"output": ("differs", ("data",))}),
        (lambda g: lax.pmean(g, "data"), {}),
    ):
        f = unchecked(lambda w, x, r=reduce: step(r, w, x), mesh, specs)
        assert found(f, mesh, shapes, specs) == expected


def test_a_loop_of_unknown_length_counts_as_run(platform):
    """Until the averaged loss is small, or as often as an argument says."""

    def step(reduce, w, x, count):
        def one(carry):
            w, steps, _ = carry
            value, grad = jax.value_and_grad(loss)(w, x)
            return w - 0.1 * reduce(grad), steps + 1, lax.pmean(value, "data")

        start = (w, 0, jnp.float32(1))
        until = lambda carry: (carry[1] < count) & (carry[2] > 1e-3)  # noqa: E731
        return {"loop": lax.while_loop(until, one, start)[0], "count": count + 1}

    mesh, specs = platform[1], (P(), P("data"), P())
    for reduce, expected in (
        (lambda g: g, {"output['loop']": ("differs", ("data",))}),
        (lambda g: lax.pmean(g, "data"), {}),
    ):
        f = unchecked(lambda *args, r=reduce: step(r, *args), mesh, specs)
        assert found(f, mesh, (*SHAPES, ()), specs) == expected


def ring(x):
    """A sum over data, as a ring of permutes: equal up to the order of the sum, and not proven."""
    total = x
    for _ in range(3):
        x = lax.ppermute(x, "data", [(i, (i + 1) % 4) for i in range(4)])
        total += x
    return total


@pytest.mark.parametrize(
    "f",
    [
        ring,
        lambda x: jnp.isfinite(x).all(),
        lambda x: jnp.minimum(1, 3 / x.sum()),
        lambda x: jnp.sign(x.sum()),
        lambda x: (x > 0).astype(jnp.int32).max(),
        lambda x: jnp.where(jnp.isfinite(x.sum()), 1.0, 2.0),
        lambda x: lax.cond(x.sum() > 0, lambda: 1.0, lambda: 2.0),
        lambda x: jnp.where(lax.axis_index("data") == 0, jnp.ones(4), jnp.zeros(4)),
        lambda x: lax.sort((x[0], jnp.arange(128)), num_keys=1)[1],
        lambda x: lax.while_loop(lambda s: s[1] < x[0, 0], lambda s: (s[0], s[1] + 1), (0, 0.0))[1],
    ],
)
def test_what_may_be_equal_again_is_unproven(cpu_mesh, f):
    specs = (P("data"),)
    kinds = found(unchecked(f, cpu_mesh, specs), cpu_mesh, SHAPES[1:], specs)
    assert kinds == {"output": ("unproven", ("data",))}


@pytest.mark.parametrize(
    "line", ["subtract(p, p)", "multiply(p, z)", "multiply(z, p)", "divide(z, p)", "xor(i, i)"]
)
def test_what_cancels_out_is_unproven(line):
    kind = "s32" if line.startswith("xor") else "f32"
    text = f"""HloModule cancels, is_scheduled=true, num_partitions=8

ENTRY main {{
  p = f32[4] parameter(0), sharding={{devices=[8]<=[8]}}
  i = s32[4] parameter(1), sharding={{devices=[8]<=[8]}}
  c = f32[] constant(0)
  z = f32[4] broadcast(c), dimensions={{}}
  ROOT r = {kind}[4] {line}, sharding={{replicated}}
}}
"""
    (one,) = outputs.find(hlo.judge(text, mesh={"data": 8}))
    assert one.kind == "unproven"


def test_jit_with_shardings_is_proven(platform):
    def step(w, x):
        value, grad = jax.value_and_grad(loss)(w, x)
        return w - 0.1 * grad, value, jnp.sort(x, 0)[0], jnp.abs(x).max(), jnp.argmax(x, 1)

    mesh, specs = platform[1], (P("model"), P("data", "model"))
    everywhere = jax.sharding.NamedSharding(mesh, P())
    assert found(step, mesh, SHAPES, specs, out_shardings=everywhere) == {}


@pytest.mark.parametrize("whole", [False, True])
def test_pmap(platform, whole):
    """By ``out_axes=None`` it calls an output equal; on JAX 0.9 and older see core/test_verifier."""
    mesh = platform[1]
    halves = None if whole else [[0, 1, 2, 3], [4, 5, 6, 7]]
    f = jax.pmap(
        trained(lambda v: lax.pmean(v, "i", axis_index_groups=halves)),
        axis_name="i",
        in_axes=(None, 0),
        out_axes=None,
        devices=mesh.devices.flatten().tolist(),
    )
    shapes = ((128, 128), (8, 4, 128))
    judgement = testing.judge(f, *(jax.ShapeDtypeStruct(s, jnp.float32) for s in shapes))
    expected = [] if whole else [(f"output['{n}']", "differs", ("i",)) for n in sorted(NAMES)]
    assert sorted((o.name, o.kind, o.axes) for o in outputs.find(judgement)) == expected


def test_a_reduction_that_a_partitioner_lost():
    """As openxla/xla#40034: what was summed over one of two axes is called replicated."""
    text = """HloModule lost, is_scheduled=true, num_partitions=4

add {
  a = f32[] parameter(0)
  b = f32[] parameter(1)
  ROOT s = f32[] add(a, b)
}

ENTRY main {
  x = f32[4] parameter(0), sharding={devices=[4]<=[4]}
  ROOT r = f32[4] all-reduce(x), channel_id=1, replica_groups={{0,1},{2,3}}, \
use_global_device_ids=true, to_apply=add, sharding={replicated}
}
"""
    (one,) = outputs.find(hlo.judge(text, mesh={"data": 2, "model": 2}))
    assert (one.kind, one.axes) == ("differs", ("data",))
    (one,) = outputs.find(hlo.judge(text))
    assert one.what == "output, f32[4]: called equal on devices {0,1,2,3}, not proven equal"
