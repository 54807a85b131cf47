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

from shardrules import report, testing
from shardrules.costs import findings

SPECS = {"scale": P(), "up": P(None, "model"), "down": P("model"), "bias": P()}
SHAPES = {"scale": (8,), "up": (8, 16), "down": (16, 8), "bias": (8,)}
CLAIM = "over model, this sums 2 equal values, as the transpose of a psum does with the check off"


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
        x = layer(total, ws, x)
    return jnp.mean(x**2)


def layer(total, ws, x):
    return x + total(jnp.tanh((x * ws["scale"]) @ ws["up"]) @ ws["down"]) + ws["bias"]


def recomputed(total, ws, x):
    kept = jax.checkpoint(functools.partial(layer, total, ws))
    return jnp.mean(kept(kept(x)) ** 2)


def classes(total, ws, x):
    return -jnp.mean(jax.nn.log_softmax(layer(total, ws, x))[:, 0])


over_model = functools.partial(lax.psum, axis_name="model")


def value(loss, ws, x):
    return jax.value_and_grad(loss, 1)(over_model, ws, x)[1]


def vjp(loss, ws, x):
    return jax.vjp(lambda ws: loss(over_model, ws, x), ws)[1](jnp.float32(1))[0]


def microbatches(loss, ws, x):
    def add(total, x):
        return jax.tree.map(jnp.add, total, value(loss, ws, x)), None

    zeros = jax.tree.map(jnp.zeros_like, ws)
    total = lax.scan(add, zeros, x.reshape(2, -1, x.shape[-1]))[0]
    return jax.tree.map(lambda g: g / 2, total)


# The report's program, and variants: what is differentiated, and how.
WAYS = {
    "grad": (loss, lambda loss, ws, x: jax.grad(loss, 1)(over_model, ws, x)),
    "value_and_grad": (loss, value),
    "vjp": (loss, vjp),
    "microbatches": (loss, microbatches),
    "checkpoint": (recomputed, value),
    "classes": (classes, value),
}


def own(ws, x, way="grad"):
    f, gradient = WAYS[way]
    return lax.pmean(gradient(f, ws, x), "data")


def is_whole(name):
    return SPECS[name] == P()


def averaged(ws, x, way="grad"):
    """The gradient, with that of whole arrays averaged over model, too."""
    gradient = own(ws, x, way)
    return {n: lax.pmean(g, "model") if is_whole(n) else g for n, g in gradient.items()}


def divided(ws, x, way="grad"):
    """The advice: that of arrays which are sharded over model is divided by 2 as well."""
    return {n: g if is_whole(n) else g / 2 for n, g in averaged(ws, x, way).items()}


def mapped(body, mesh, out_specs, check=False):
    specs = (SPECS, P("data"))
    return jax.shard_map(body, mesh=mesh, in_specs=specs, out_specs=out_specs, check_vma=check)


def outside(mesh, loss=loss, check=False):
    """The other advice: the gradient of the shard_map of the loss."""
    body = lambda ws, x: lax.pmean(loss(over_model, ws, x), "data")  # noqa: E731
    return jax.grad(mapped(body, mesh, P(), check))


def advised(f, mesh):
    pairs = [*((SHAPES[n], SPECS[n]) for n in SHAPES), ((32, 8), P("data"))]
    *ws, x = programs.structs(mesh, *pairs)
    found = findings.find(testing.judge(jax.jit(f), dict(zip(SHAPES, ws)), x))
    return {(one.kind, one.entry.what): one.advice for one in found}


def ratios(f, mesh, loss=loss):
    """Return each gradient's size as so many times that of one device."""
    ws, x = arguments(mesh)
    alone = jax.grad(loss, 1)(lambda h: h, jax.device_get(ws), jax.device_get(x))
    given = jax.jit(f)(ws, x)
    return {n: np.asarray(given[n]) / np.asarray(g) for n, g in alone.items()}


def right(f, mesh, loss=loss):
    return all(np.allclose(ratio, 1, rtol=1e-3) for ratio in ratios(f, mesh, loss).values())


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("body", [averaged, divided])
def test_the_factor_is_said_and_the_advice_gives_the_gradient(platform, body, way):
    name, mesh = platform[:2]
    at = functools.partial(body, way=way)
    advice = advised(mapped(at, mesh, SPECS), mesh)
    # Of equal values in front of a loss, the sum of the forward pass may be for nothing, too.
    first, *others = advice
    assert first == ("redundant", "backward all-reduce(model)")
    assert others in ([], [("redundant", "forward all-reduce(model)")])
    said = advice[first]
    assert (
        said.startswith(CLAIM)
        and "unless it or the loss is divided by 2. Divide that gradient" in said
    )
    assert "jax.lax.pmean(g, 'model'); or take the gradient outside of the shard_map" in said
    assert "run `shardrules migrate --diff" not in said
    if name == "cpu":
        f = WAYS[way][0]
        for n, ratio in ratios(mapped(at, mesh, SPECS), mesh, f).items():
            wrong = body is averaged and not is_whole(n)
            np.testing.assert_allclose(ratio, 2 if wrong else 1, rtol=1e-3)
        assert right(outside(mesh, f), mesh, f)


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


@pytest.mark.parametrize("of", ["in the body", "outside"])
@pytest.mark.parametrize("script", ["", "-m a.b"])
def test_advice_names_the_script_where_it_is_known(cpu_mesh, of, script):
    """It is what `run` and `pytest --shardrules` were given; a text alone says what to put."""
    step = mapped(averaged, cpu_mesh, SPECS) if of == "in the body" else outside(cpu_mesh)
    judgement = testing.judge(jax.jit(step), *arguments(cpu_mesh))
    said = [one.advice for one in report.content(judgement, script=script).findings]
    said = [one for one in said if "shardrules migrate" in one]
    assert said
    for advice in said:
        assert ("SCRIPT" not in advice) == ("-m a.b`" in advice) == bool(script)
        assert ("SCRIPT` (SCRIPT: the one that compiles this program)" in advice) == (not script)


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
