"""Rules of an author's behind JAX's wrappers, gradients of other types, weak types, metaclasses.

Each site was switched, with another gradient or result: no trace ran the rule, or compared the type.
"""

import functools

import jax
import jax.extend
import jax.numpy as jnp
import numpy as np
import pytest
from core import versions
from jax import lax
from jax.sharding import PartitionSpec as P

import shardrules
from shardrules.hooks import shard_map

pytestmark = versions.where(versions.types_values)

W = np.linspace(0.3, 1, 4, dtype=np.float32)
X = np.linspace(0.5, 2, 32, dtype=np.float32).reshape(8, 4)
LIMIT = 0.1


@jax.custom_vjp
def clipped(w):
    return w * 1.0


clipped.defvjp(lambda w: (w * 1.0, None), lambda _, g: (jnp.clip(g, -LIMIT, LIMIT),))


def looped(x):
    """A metric by which JAX takes no derivative, so that no trace takes one by all results."""
    return lax.while_loop(lambda c: c[0] < 3, lambda c: (c[0] + 1, c[1] * 2), (0, x))[1]


def decided(body, mesh, in_specs, run, out_specs=P()):
    """Return the results with the check off and with it decided, and the decision."""

    def results():
        return run(shard_map(body, mesh, in_specs, out_specs, check=False))

    before = results()
    with shardrules.install(unchecked="check") as handle:
        known = len(handle.unchecked())
        after = results()
        (site,) = handle.unchecked()[known:]
    for a, b in zip(*map(jax.tree.leaves, (before, after)), strict=True):
        assert a.dtype == b.dtype
        np.testing.assert_allclose(a, b, 1e-5)
    return site


def by_jvp():
    f = jax.custom_jvp(jnp.sin)
    f.defjvp(functools.partial(jax.jvp, lambda w: jnp.sin(clipped(w))))
    return f


def test_a_rule_behind_a_function_of_jax_leaves_its_site(cpu_mesh):
    f = by_jvp()
    body = lambda w: (f(w), looped(w))  # noqa: E731
    gradient = lambda f: jax.jit(jax.grad(lambda w: f(w)[0].sum()))(W)  # noqa: E731
    site = decided(body, cpu_mesh, P(), gradient)
    assert not site.switched and "derivative rules can't be looked at" in site.reason


def test_a_rule_for_vmap_behind_named_call_leaves_its_site(cpu_mesh):
    f = jax.custom_batching.custom_vmap(jnp.sin)
    f.def_vmap(jax.named_call(lambda size, given, w: (jnp.sin(clipped(w)), given[0])))
    mapped = lambda f: jax.grad(lambda w: jax.vmap(f)(w).sum())  # noqa: E731
    site = decided(f, cpu_mesh, P(), lambda f: jax.jit(mapped(f))(W.reshape(2, 2)))
    assert not site.switched


def test_its_second_derivative_is_traced(cpu_mesh):
    def second(f):
        return jax.jit(jax.grad(lambda w: jax.grad(lambda w: f(w).sum())(w).sum()))(W)

    site = decided(by_jvp(), cpu_mesh, P(), second)
    assert not site.switched and "is not known to be linear (it applies max" in site.reason


@pytest.mark.parametrize("f", [jax.nn.relu, jnp.sinc])
def test_a_rule_of_jax_alone_is_switched(f, cpu_mesh):
    body = lambda w, x: (f(w) * x, looped(x))  # noqa: E731
    gradient = lambda f: jax.jit(jax.grad(lambda w: f(w, X)[0].sum()))(W)  # noqa: E731
    assert decided(body, cpu_mesh, (P(), P("data")), gradient, P("data")).switched


def quantized():
    kind = getattr(jax.dtypes, "primal_tangent_dtype", None)
    if kind is None:
        kind = pytest.importorskip("jax._src.dtypes").primal_tangent_dtype
    return kind(jnp.dtype("int8"), jnp.dtype("float32"))


@jax.custom_vjp
def dequantize(q):
    return lax.convert_element_type(q, jnp.int8).astype(jnp.float32)


dequantize.defvjp(lambda q: (dequantize(q), None), lambda _, g: (jnp.clip(g, -LIMIT, LIMIT),))


def test_an_integer_that_has_a_gradient_leaves_its_site(cpu_mesh):
    def run(f):
        def step(i, x):
            out, pull = jax.vjp(f, lax.convert_element_type(i, quantized()), x)
            return pull(jnp.ones_like(out))[0]

        return jax.jit(step)(np.arange(4, dtype=np.int8), X)

    body = lambda q, x: dequantize(q) + lax.psum(x.sum(), "data")  # noqa: E731
    site = decided(body, cpu_mesh, (P(), P("data")), run)
    assert not site.switched and "whose gradients are of another type" in site.reason


def test_so_does_one_that_a_body_closes_over(cpu_mesh):
    def of(q):
        body = lambda x: dequantize(q) + lax.psum(x.sum(), "data")  # noqa: E731
        return shard_map(body, cpu_mesh, P("data"), P(), check=False)

    def gradient():
        def step(i):
            q = lax.convert_element_type(i, quantized())
            return jax.vjp(lambda q: of(q)(X), q)[1](jnp.ones(4))[0]

        return jax.jit(step)(np.arange(4, dtype=np.int8))

    before = gradient()
    with shardrules.install(unchecked="check") as handle:
        np.testing.assert_allclose(before, gradient(), 1e-6)
        (site,) = handle.unchecked()
    assert not site.switched and "closes over values that are traced" in site.reason


@pytest.mark.parametrize("reduce", [lax.psum, lax.pmean, lax.pmax])
def test_a_weak_type_that_the_check_keeps_leaves_its_site(reduce, cpu_mesh):
    """bfloat16 divided by it was bfloat16, and float32 with the check off."""

    def body(x):
        return reduce(jnp.where(jnp.isfinite(x).all(), 1.1, 0.0), "data")

    run = lambda f: jax.jit(lambda x: x / f(x))(jnp.asarray(X, jnp.bfloat16))  # noqa: E731
    decided(body, cpu_mesh, P("data"), run)


def test_a_weak_type_of_a_gradient(cpu_mesh):
    def run(f):
        gradient = jax.grad(lambda scale: f(X, scale).sum())
        return jax.jit(lambda x: x * gradient(2.0))(jnp.asarray(W, jnp.bfloat16))

    decided(lambda x, s: x * s, cpu_mesh, (P("data"), P()), run, P("data"))


# -- rules that only JAX's objects hold, jaxprs that were traced before ---------------------------


class Making:
    def __new__(cls, w):
        return jnp.sin(clipped(w))


def own_vjp():
    op = jax.custom_vjp(jnp.sin)
    op.defvjp(lambda w: (jnp.sin(w), w), lambda w, g: (jnp.clip(g * jnp.cos(w), -LIMIT, LIMIT),))
    return op


def of_a_package_named_like_jax():
    kind = type("Layer", (), {"__call__": lambda self, w: jnp.sin(clipped(w))})
    kind.__module__ = "jaxlike.layers"
    return kind()


HELD = {
    "fwd and bwd": own_vjp,
    "__new__": lambda: Making,
    "jaxlike": of_a_package_named_like_jax,
    "a jaxpr": lambda: jax.closure_convert(lambda w: jnp.sin(clipped(w)), W)[0],
}


@pytest.mark.parametrize("name", HELD)
def test_a_rule_that_an_object_holds_leaves_its_site(name, cpu_mesh):
    f = jax.custom_jvp(jnp.sin)
    f.defjvp(functools.partial(jax.jvp, HELD[name]()))
    body = lambda w: (f(w), looped(w))  # noqa: E731
    gradient = lambda f: jax.jit(jax.grad(lambda w: f(w)[0].sum()))(W)  # noqa: E731
    assert not decided(body, cpu_mesh, P(), gradient).switched


def converted(f):
    return lambda w: jax.closure_convert(f, w)[0](w)


def as_function(f):
    made = jax.make_jaxpr(f)(W)
    return lambda w: jax.extend.core.jaxpr_as_fun(made)(w)[0]


def doubled(w):
    return w * 2.0


double = jax.custom_vjp(doubled)
double.defvjp(lambda w: (w * 2.0, None), lambda _, g: (2.0 * g,))
BEFORE = {"clips": as_function(clipped), "doubles": as_function(double)}


@pytest.mark.parametrize("name", BEFORE)
@pytest.mark.parametrize("held", [False, True], ids=["before install", "after install"])
def test_a_jaxpr_that_was_traced_before_leaves_its_site(name, held, cpu_mesh):
    made = {}

    def body(w, x):
        return made.setdefault("f", BEFORE[name])(w) * x

    def gradient(f):
        if held:
            made["f"] = as_function({"clips": clipped, "doubles": double}[name])
        return jax.jit(jax.grad(lambda w: f(w, X).sum()))(W)

    site = decided(body, cpu_mesh, (P(), P("data")), gradient, P("data"))
    assert not site.switched and "traced outside of " in site.reason
    assert "in the function that is mapped" in site.reason  # what to do


@pytest.mark.parametrize("around", [converted, jax.checkpoint, jax.jit, lambda f: f])
def test_what_is_traced_in_the_body_is_switched_if_it_is_linear(around, cpu_mesh):
    gradient = lambda f: jax.jit(jax.grad(lambda w: f(w, X).sum()))(W)  # noqa: E731
    for op, is_switched in ((double, True), (clipped, False)):
        body = lambda w, x, op=op: around(op)(w) * x  # noqa: E731
        site = decided(body, cpu_mesh, (P(), P("data")), gradient, P("data"))
        assert site.switched is is_switched


def test_two_rules_for_vmap_are_decided_one_by_one(cpu_mesh):
    """No text shows which rule a custom_vmap has."""

    def of_device(w):
        return jax.grad(lambda u: (u * (1.0 + lax.axis_index("data"))).sum())(w)

    def run():
        for rule in (jnp.sin, of_device):
            f = jax.custom_batching.custom_vmap(jnp.sin)
            f.def_vmap(jax.custom_batching.sequential_vmap(rule).vmap_rule)
            mapped = shard_map(f, cpu_mesh, P(), P("data"), check=False)
            made = jax.jit(jax.vmap(mapped))(W.reshape(4, 1))
        return made

    before = run()
    with shardrules.install(unchecked="check"):
        np.testing.assert_array_equal(before, run())


def test_an_array_and_a_number_are_decided_one_by_one(cpu_mesh):
    def run():
        mapped = shard_map(
            lambda c, x: (x * 1.0, lax.psum(c, "data")),
            cpu_mesh,
            (P(), P("data")),
            (P("data"), P()),
            check=False,
        )
        step = jax.jit(lambda c, x: x / mapped(c, x)[1])
        x = jnp.asarray(X, jnp.bfloat16)
        return [step(c, x).dtype for c in (jnp.float32(1.1), 1.1)]

    before = run()
    with shardrules.install(unchecked="check"):
        assert run() == before


def test_the_weak_type_of_a_gradient_that_no_look_takes(cpu_mesh):
    def body(c, x):
        return c * x, lax.fori_loop(0, (x[0, 0] > 0).astype(int), lambda _, z: z * c, x)

    def run(f):
        gradient = lambda x: jax.grad(lambda c: f(c, x)[0].sum())(2.0)  # noqa: E731
        return jax.jit(lambda x: gradient(x) * jnp.ones(2, jnp.bfloat16))(X)

    decided(body, cpu_mesh, (P(), P("data")), run, (P("data"), P("data")))


def test_a_python_number_has_no_gradient_unless_it_is_traced(cpu_mesh):
    specs = P("data"), P()
    divide = lambda x, t: x / t  # noqa: E731
    run = lambda f: jax.jit(lambda x: f(x, 0.7))(X)  # noqa: E731
    assert decided(divide, cpu_mesh, specs, run, P("data")).switched
    traced = lambda f: jax.jit(lambda x, t: f(x, t))(X, 0.7)  # noqa: E731
    site = decided(divide, cpu_mesh, specs, traced, P("data"))
    assert "pass an array, jnp.float32(x)" in site.reason
    followed = lambda f: jax.jit(lambda x, t: f(x, t))(X, jnp.float32(0.7))  # noqa: E731
    assert decided(divide, cpu_mesh, specs, followed, P("data")).switched


class Counting:
    made = 0

    def scaled(self, x):
        self.made += 1
        return x * self.made


def test_what_a_jitted_method_counts_is_put_back(cpu_mesh):
    def run(f):
        return jax.jit(f)(X)

    layers = []

    def body(x):
        layers.append(Counting())
        return jax.jit(layers[-1].scaled)(x)

    decided(body, cpu_mesh, P("data"), run, P("data"))
    kept = Counting()
    jitted = jax.jit(kept.scaled)
    before = run(shard_map(lambda x: jitted(x), cpu_mesh, P("data"), P("data"), check=False))
    kept.made = 0
    jax.clear_caches()
    with shardrules.install(unchecked="check"):
        after = run(shard_map(lambda x: jitted(x), cpu_mesh, P("data"), P("data"), check=False))
    np.testing.assert_array_equal(before, after)


class Named(type):
    made = 0

    def __call__(cls):
        Named.made += 1
        layer = super().__call__()
        layer.number = Named.made
        return layer


class Layer(metaclass=Named):
    def __call__(self, w, x):
        return x * w * (1 + jax.random.uniform(jax.random.key(self.number), w.shape))


def test_what_a_metaclass_counts_is_put_back(cpu_mesh):
    """The number of a layer seeds its weights: five traces made other numbers of it."""

    def run(f):
        Named.made = 0
        made = jax.jit(f)(W, X)
        assert Named.made == 1
        return made

    body = lambda w, x: Layer()(w, x)  # noqa: E731
    assert decided(body, cpu_mesh, (P(), P("data")), run, P("data")).switched
