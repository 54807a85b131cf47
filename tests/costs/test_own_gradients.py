"""A sum of equal values in a gradient that a shard_map's body takes itself, its check off.

What the sum does to the gradient is said, and the advice gives the gradient of one device.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import programs
import pytest
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from shardrules import testing
from shardrules.costs import findings

SPECS = {"scale": P(), "up": P(None, "model"), "down": P("model"), "bias": P()}
SHAPES = {"scale": (8,), "up": (8, 16), "down": (16, 8), "bias": (8,)}
CLAIM = "over model, this sums 2 equal values, as the transpose of a psum does without the check"


@functools.cache
def arguments(mesh):
    keys = jax.random.split(jax.random.key(0), 5)
    ws = {n: jax.random.normal(k, s) for k, (n, s) in zip(keys, SHAPES.items())}
    put = lambda a, spec: jax.device_put(a, NamedSharding(mesh, spec))  # noqa: E731
    x = put(jax.random.normal(keys[4], (32, 8)), P("data"))
    return {n: put(w, SPECS[n]) for n, w in ws.items()}, x


def loss(total, ws, x):
    """Two tensor-parallel layers with a residual, so that the sum stands in a sum of ways."""
    for _ in range(2):
        x = x + total(jnp.tanh((x * ws["scale"]) @ ws["up"]) @ ws["down"]) + ws["bias"]
    return jnp.mean(x**2)


over_model = functools.partial(lax.psum, axis_name="model")


def own(ws, x):
    return lax.pmean(jax.grad(loss, 1)(over_model, ws, x), "data")


def is_whole(name):
    return SPECS[name] == P()


def averaged(ws, x):
    """The gradient, with that of whole arrays averaged over model, too."""
    gradient = own(ws, x)
    return {n: lax.pmean(g, "model") if is_whole(n) else g for n, g in gradient.items()}


def divided(ws, x):
    """The advice: that of arrays which are sharded over model is divided by 2 as well."""
    return {n: g if is_whole(n) else g / 2 for n, g in averaged(ws, x).items()}


def mapped(body, mesh, out_specs, check=False):
    specs = (SPECS, P("data"))
    return jax.shard_map(body, mesh=mesh, in_specs=specs, out_specs=out_specs, check_vma=check)


def outside(mesh, check=False):
    """The other advice: the gradient of the shard_map of the loss."""
    body = lambda ws, x: lax.pmean(loss(over_model, ws, x), "data")  # noqa: E731
    return jax.grad(mapped(body, mesh, P(), check))


def advised(f, mesh):
    pairs = [*((SHAPES[n], SPECS[n]) for n in SHAPES), ((32, 8), P("data"))]
    *ws, x = programs.structs(mesh, *pairs)
    found = findings.find(testing.judge(jax.jit(f), dict(zip(SHAPES, ws)), x))
    return {(one.kind, one.entry.what): one.advice for one in found}


def ratios(f, mesh):
    """Return each gradient's size as so many times that of one device."""
    ws, x = arguments(mesh)
    alone = jax.grad(loss, 1)(lambda h: h, jax.device_get(ws), jax.device_get(x))
    given = jax.jit(f)(ws, x)
    return {n: np.asarray(given[n]) / np.asarray(g) for n, g in alone.items()}


def right(f, mesh):
    return all(np.allclose(ratio, 1, rtol=1e-3) for ratio in ratios(f, mesh).values())


@pytest.mark.parametrize("body", [averaged, divided])
def test_the_factor_is_said_and_the_advice_gives_the_gradient(platform, body):
    name, mesh = platform[:2]
    advice = advised(mapped(body, mesh, SPECS), mesh)
    if name == "gpu" and not advice:
        return  # its compiler replaces a sum of equal values by a product
    assert [what for what in advice if what[1] == "backward all-reduce(model)"]
    (said,) = advice.values()
    assert said.startswith(CLAIM) and "jax.lax.pmean(g, 'model')" in said and "--diff" not in said
    assert "unless it or the loss is divided by 2. Divide it" in said
    if name == "cpu":
        wrong = ratios(mapped(averaged, mesh, SPECS), mesh)
        for n, ratio in wrong.items():
            np.testing.assert_allclose(ratio, 1 if is_whole(n) else 2, rtol=1e-3)
        assert right(mapped(divided, mesh, SPECS), mesh) and right(outside(mesh), mesh)


def test_a_gradient_that_is_taken_outside_can_be_switched_on(cpu_mesh):
    advice = advised(outside(cpu_mesh), cpu_mesh)
    said = advice["redundant", "backward all-reduce(model)"]
    assert said.startswith("run `shardrules migrate --diff on.patch SCRIPT`")
    assert not [each for each in advice.values() if each.startswith(CLAIM)]
    with_check = outside(cpu_mesh, check=True)
    assert advised(with_check, cpu_mesh) == {} and right(with_check, cpu_mesh)


def test_with_the_check_on_a_pmean_keeps_the_sum(cpu_mesh):
    """What the advice says of switching it on in such a body."""
    body = lambda ws, x: lax.pmean(jax.grad(loss, 1)(over_model, ws, x), "data")  # noqa: E731
    for ratio in ratios(mapped(body, cpu_mesh, SPECS, check=True), cpu_mesh).values():
        np.testing.assert_allclose(ratio, 4, rtol=1e-3)


@jax.custom_vjp
def summed(h):
    return over_model(h)


summed.defvjp(lambda h: (over_model(h), None), lambda _, g: (g,))


@jax.custom_vjp
def shared(h):
    return h


shared.defvjp(lambda h: (h, None), lambda _, g: (over_model(g),))


def megatron(ws, x):
    """As Megatron has it: one sum passes the cotangent on, and what it is of sums it up."""

    def alone(ws, x):
        whole = {n: shared(w) if n == "scale" else w for n, w in ws.items()}
        for _ in range(2):
            h = jnp.tanh((shared(x) * whole["scale"]) @ ws["up"]) @ ws["down"]
            x = x + summed(h) + ws["bias"]
        return jnp.mean(x**2)

    return lax.pmean(jax.grad(alone)(ws, x), "data")


@jax.custom_vjp
def defended(h):
    return over_model(h)


# It divides before it sums, and so leaves the value.
defended.defvjp(lambda h: (over_model(h), None), lambda _, g: (over_model(g / 2),))


def divides_itself(ws, x):
    gradient = lax.pmean(jax.grad(loss, 1)(defended, ws, x), "data")
    return {n: lax.psum(g, "model") if n == "scale" else g for n, g in gradient.items()}


def only_whole(ws, x):
    """No array is sharded over the axis of the sum in the loss: a pmean is all it takes."""
    total = lambda w: lax.psum(jnp.sum((x @ w) ** 2), "data") / 256  # noqa: E731
    return lax.pmean(jax.grad(total)(ws["scale"]), "data")


def test_near_misses_hear_of_no_factor(cpu_mesh):
    assert advised(mapped(megatron, cpu_mesh, SPECS), cpu_mesh) == {}
    assert right(mapped(megatron, cpu_mesh, SPECS), cpu_mesh)
    for body, specs in ((only_whole, P()), (counted, SPECS), (divides_itself, SPECS)):
        advice = advised(mapped(body, cpu_mesh, specs), cpu_mesh)
        assert advice
        for said in advice.values():
            assert not said.startswith(CLAIM) and "--diff" not in said


def counted(ws, x):
    """A sum of equal counts over another one of as many: each divides the other."""
    count = jnp.float32(x.shape[0]) + 0 * ws["bias"].sum()
    mean = lax.psum(count * ws["bias"].mean(), "model") / lax.psum(count, "model")
    return {n: w * mean for n, w in ws.items()}
