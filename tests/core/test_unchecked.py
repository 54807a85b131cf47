"""``install(unchecked="check")``: shard_maps that say check_vma=False, switched on where equal."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import PartitionSpec as P
from raising import raises, wrong_out_specs

import shardrules
from core import versions
from shardrules import testing
from shardrules.hooks import shard_map
from shardrules.hooks.install import touched
from shardrules.unchecked import hooks as unchecked_hooks
from shardrules.unchecked import same, sites

pytestmark = versions.where(versions.types_values)

X = np.random.RandomState(0).rand(8, 16).astype(np.float32)
W = np.random.RandomState(1).rand(2, 16).astype(np.float32)
AXES = ("data", "model")
SPECS = (P("data"), P())


@pytest.fixture(autouse=True)
def nothing_held():
    """A declared op that another test called keeps JAX patched."""
    shardrules.install().uninstall(ops=True)


def double_kernel(x_ref, o_ref):
    o_ref[...] = 2 * x_ref[...]


@jax.custom_vjp
def double(x):
    return pl.pallas_call(double_kernel, jax.ShapeDtypeStruct(x.shape, x.dtype), interpret=True)(x)


double.defvjp(lambda x: (double(x), None), lambda _, g: (double(g),))


def reader(x):
    """Call a kernel that asks where it runs: it has no rule, and none can be proven."""

    def reader_kernel(x_ref, o_ref):
        o_ref[...] = x_ref[...] + jax.lax.axis_index("model").astype(jnp.float32)

    shape = jax.ShapeDtypeStruct(x.shape, x.dtype)
    return pl.pallas_call(reader_kernel, shape, interpret=True)(x)


def program_text(jaxpr):
    """Write a program without what differs by run, and by JAX version.

    JAX 0.6.0 has check_rep, and prints what wraps a bwd.
    """
    text = re.sub(r" at 0x\w+|<function .*>|\n+ *\d+ *: \w+ +\(.*\)|\n+(?= *Core:)", "", str(jaxpr))
    return text.replace("check_rep", "check_vma")


def off(f, mesh, in_specs, out_specs):
    """Return a function that asks for the shard_map when it is called, as libraries do."""
    return lambda *args: shard_map(f, mesh, in_specs, out_specs, check=False)(*args)


def jitted(f):
    """Return a function that is traced anew, with its value and its gradients."""

    def run(*args):
        def scalar(*args):
            out = f(*args)
            return sum(jnp.sum(jnp.sin(one)) for one in jax.tree_util.tree_leaves(out))

        return f(*args), jax.grad(scalar, tuple(range(len(args))))(*args)

    return jax.jit(run)


def both(f, *args):
    """Return what became of the shard_maps of f; values and gradients are equal."""
    plain = jitted(f)(*args)
    with shardrules.install(unchecked="check") as handle:
        switched = jitted(f)(*args)
    jax.tree_util.tree_map(
        lambda a, b: np.testing.assert_allclose(a, b, 1e-5, 1e-6), plain, switched
    )
    return handle.unchecked()


def sum_count(f, *args):
    return jitted(f).lower(*args).compile().as_text().count(" all-reduce(")


def test_a_kernels_defensive_psum_goes(cpu_mesh):
    f = off(double, cpu_mesh, P("data"), P("data"))
    (site,) = both(f, X)
    assert (site.switched, site.reason, site.function) == (True, "", "double")
    assert site.file.endswith("places.py") and (site.before_bytes, site.after_bytes) == (128, 0)
    assert sum_count(f, X) == 1
    with shardrules.install(unchecked="check"):
        assert sum_count(f, X) == 0
    assert touched() == ()


def test_leave_is_the_default_and_nothing_stays(cpu_mesh):
    def traced():
        return program_text(jax.make_jaxpr(off(double, cpu_mesh, P("data"), P("data")))(X))

    before = traced()
    with shardrules.install(unchecked="check"):
        made = shard_map(double, cpu_mesh, P("data"), P("data"), check=False)
        assert "check_vma=False" in before and "check_vma=True" in traced()
    assert program_text(jax.make_jaxpr(made)(X)) == before and touched() == ()
    with shardrules.install() as handle:
        assert traced() == before
    assert handle.unchecked() == ()


def summed(x):
    return jax.lax.psum(jnp.sin(x), AXES)


@jax.custom_vjp
def copied(x):  # Megatron's f: the identity, whose bwd sums
    return x


copied.defvjp(lambda x: (x, None), lambda _, g: (jax.lax.psum(g, "model"),))


@jax.custom_vjp
def reduced(x):  # Megatron's g: a sum, whose bwd is the identity
    return jax.lax.psum(x, "model")


reduced.defvjp(lambda x: (reduced(x), None), lambda _, g: (g,))


@jax.custom_vjp
def weighted(x, w):
    return x * w


def weighted_bwd(saved, g):
    x, w = saved
    return g * w, jax.lax.psum(g * x, "data")


weighted.defvjp(lambda x, w: (x * w, (x, w)), lambda r, g: weighted_bwd(r, g))


@jax.custom_vjp
def clipped(x):
    return x


clipped.defvjp(lambda x: (x, None), lambda _, g: (jnp.clip(g, -0.01, 0.01),))


@jax.custom_vjp
def decayed(x):
    return x


decayed.defvjp(lambda x: (x, x), lambda x, g: (g + 0.1 * x,))


def clip_kernel(g_ref, o_ref):
    o_ref[...] = jnp.clip(g_ref[...], -0.01, 0.01)


@jax.custom_vjp
def clipped_by_kernel(x):
    return x


clipped_by_kernel.defvjp(
    lambda x: (x, None),
    lambda _, g: (
        pl.pallas_call(clip_kernel, jax.ShapeDtypeStruct(g.shape, g.dtype), interpret=True)(g),
    ),
)


SWITCHED = {
    "a kernel": (double, P("data"), P("data"), (X,)),
    "sums": (summed, P("data", "model"), P(), (X,)),
    "a weight": (lambda x, w: x * w[0], (P("data"), P()), P("data"), (X, W)),
    "a mean": (lambda x: jax.lax.pmean(x, "data"), P("data"), P(), (X,)),
    "scan": (
        lambda x, w: jax.lax.scan(lambda c, _: (double(c) * w[0], None), x, None, length=3)[0],
        (P("data"), P()),
        P("data"),
        (X, W),
    ),
    "a carry that starts as a Python number": (
        lambda x, w: jax.lax.scan(lambda c, row: (c + (row * w[0]).sum(), None), 0.0, x)[0][None],
        (P("data"), P()),
        P("data"),
        (X, W),
    ),
    "a carry that is filled with a Python number": (
        lambda x, w: jax.lax.scan(
            lambda c, row: (jnp.maximum(c, row * w[0]), None), jnp.full(X.shape[1], -1e9), x
        )[0][None],
        (P("data"), P()),
        P("data"),
        (X, W),
    ),
    "a loop's number": (
        lambda x: (
            x
            * jax.lax.while_loop(
                lambda c: c[0] < 3,
                lambda c: (c[0] + 1, c[1] + jax.lax.stop_gradient(x).sum()),
                (0, 0.0),
            )[1]
        ),
        P("data"),
        P("data"),
        (X,),
    ),
    "remat": (jax.checkpoint(lambda x: jnp.sin(double(x))), P("data"), P("data"), (X,)),
    "jit": (jax.jit(lambda x: jnp.sin(double(x))), P("data"), P("data"), (X,)),
    "cond": (
        lambda x: jax.lax.cond(x.sum() > 0, double, lambda x: x, x),
        P("data"),
        P("data"),
        (X,),
    ),
    "branches that return numbers": (
        lambda x: x * jax.lax.cond(x.sum() > 0, lambda: 0.5, lambda: 3.0),
        P("data"),
        P("data"),
        (X,),
    ),
    "gathered": (
        lambda x: jax.lax.all_gather(x, "model", tiled=True),
        P("model"),
        P("model"),
        (X,),
    ),
    "a ring": (
        lambda x: x + jax.lax.ppermute(x, "model", [(0, 1), (1, 0)]),
        P("model"),
        P("model"),
        (X,),
    ),
    "all devices clip their own": (clipped, P(AXES), P(AXES), (X,)),
    "a kernel on each device clips": (clipped_by_kernel, P(AXES), P(AXES), (X,)),
}

LEFT = {
    "no rule": (
        lambda x: double(x) + reader(jax.lax.stop_gradient(x)),
        P("data", "model"),
        P("data", "model"),
        (X,),
        "no rule for reader_kernel",
    ),
    "out_specs": (
        lambda x: x,
        P("data"),
        P(),
        (X,),
        f"out_specs is {P()}, but it varies over data",
    ),
    "gradients": (
        lambda w, x: jax.grad(lambda w: jnp.sum(w[0] * x))(w),
        (P(), P()),
        P(),
        (W, X),
        "its body takes gradients, which may change",
    ),
    "bwd sums": (lambda x: copied(x), P(), P(), (X,), "in the derivative: the bwd '<lambda>' "),
    "bwd sums what varies": (
        lambda x, w: copied(x) * w,
        (P(), P(None, "model")),
        P(None, "model"),
        (X[:, :8], X),
        "in the derivative: the bwd '<lambda>' ",
    ),
    "bwd sums a weight's": (
        weighted,
        (P("data"), P()),
        P("data"),
        (X, W),
        "the bwd '<lambda>' returns a gradient that is summed over 'data'",
    ),
    "fwd sums": (
        lambda x: reduced(x),
        P("data", "model"),
        P("data"),
        (X,),
        "the forward of the bwd '<lambda>' makes results equal over 'model'",
    ),
    "clips": (clipped, P("data"), P("data"), (X,), "the bwd '<lambda>' is not known to be linear"),
    "a kernel clips": (
        clipped_by_kernel,
        P("data"),
        P("data"),
        (X,),
        "the bwd '<lambda>' is not known to be linear (it calls pallas_call kernel 'clip_kernel'",
    ),
    "decays": (decayed, P("data"), P("data"), (X,), "the bwd '<lambda>' is not known to be linear"),
}


class Lazy:
    """An object that loads what it stands for when an attribute is asked for, and can't here."""

    def __init__(self, limit):
        object.__setattr__(self, "limit", limit)

    def __getattr__(self, name):
        raise RuntimeError(f"{name} was asked for")

    @property
    def __class__(self):
        raise RuntimeError("the class was asked for")


class Holder:
    schema = Lazy(3.0)  # as pydantic's models hold their validator


def test_objects_that_a_body_reaches_are_not_asked(cpu_mesh):
    """Looking at what a body can reach runs no code of its objects."""
    lazy, holder = Lazy(2.0), Holder()

    def f(x):
        return double(x) * object.__getattribute__(lazy, "limit") * (holder is not None)

    (site,) = both(off(f, cpu_mesh, P("data"), P("data")), X)
    assert site.switched, site


@pytest.mark.sampled
@pytest.mark.parametrize("name", SWITCHED)
def test_a_program_that_is_switched(cpu_mesh, name):
    f, in_specs, out_specs, args = SWITCHED[name]
    (site,) = both(off(f, cpu_mesh, in_specs, out_specs), *args)
    assert site.switched and site.after_bytes <= site.before_bytes, site


@pytest.mark.parametrize("name", LEFT)
def test_a_program_that_is_left(cpu_mesh, name):
    f, in_specs, out_specs, args, reason = LEFT[name]
    (site,) = both(off(f, cpu_mesh, in_specs, out_specs), *args)
    said = re.sub(r"(?<=bwd '<lambda>') \(at \S*test_unchecked\.py:\d+\)", "", site.reason, count=1)
    assert not site.switched and said.startswith(reason), site
    assert said != site.reason or "bwd" not in reason  # a lambda is told from others by its line


def with_bwd(f):
    """Return f with a bwd that calls it again."""
    op = jax.custom_vjp(f)
    op.defvjp(lambda x: (f(x), x), lambda x, g: jax.vjp(f, x)[1](g))
    return op


# Programs around a shard_map.
AROUND = {
    "vmap": lambda f: lambda x: jax.vmap(f)(jnp.stack([x, 2 * x])),
    "scan": lambda f: lambda x: jax.lax.scan(lambda c, _: (f(c), None), x, None, length=2)[0],
    "remat": jax.checkpoint,
    "jit": jax.jit,
    "donated": lambda f: lambda x: jax.jit(f, donate_argnums=0)(jnp.sin(x)),
    "twice": lambda f: lambda x: f(f(x)),
    "grad": lambda f: lambda x: jax.grad(lambda x: f(x).sum())(x),
    "jvp": lambda f: lambda x: jax.jvp(f, (x,), (x,))[1],
    "second derivative": lambda f: (
        lambda x: jax.grad(lambda x: jax.grad(lambda x: jnp.sin(f(x)).sum())(x).sum())(x)
    ),
    "while": lambda f: lambda x: jax.lax.fori_loop(0, 3, lambda _, c: f(c), x),
    "cond": lambda f: lambda x: jax.lax.cond(x.sum() > 0, f, lambda x: x, x),
    "custom_vjp": lambda f: with_bwd(f),
    "scan of remat": lambda f: (
        lambda x: jax.lax.scan(jax.checkpoint(lambda c, _: (f(c), None)), x, None, length=2)[0]
    ),
    "vmap of jit": lambda f: lambda x: jax.vmap(jax.jit(f))(jnp.stack([x, 2 * x])),
    "remat of donated": lambda f: jax.checkpoint(lambda x: jax.jit(f, donate_argnums=0)(2 * x)),
}


@pytest.mark.sampled
@pytest.mark.parametrize("name", AROUND)
@pytest.mark.parametrize("in_it", ["kernel", "weight"])
def test_a_shard_map_inside_of_a_transformation(cpu_mesh, name, in_it):
    body = jnp.sin if name in ("jvp", "second derivative") else double

    def f(x):
        if in_it == "kernel":
            return off(body, cpu_mesh, P("data"), P("data"))(x)
        g = off(lambda x, w: body(x) * w[0], cpu_mesh, (P("data"), P()), P("data"))
        return g(x, W * jnp.mean(x))

    sites = both(AROUND[name](f), X)
    assert sites and all(site.switched for site in sites), sites


def traced(f, *args, **options):
    """Return the program of f, with and without, and what became of its shard_maps."""
    plain = program_text(jax.make_jaxpr(f)(*args))
    with shardrules.install(unchecked="check", **options) as handle:
        text = program_text(jax.make_jaxpr(f)(*args))
    return plain, text, handle.unchecked()


def test_a_mapped_axis_that_is_a_mesh_axis_too(cpu_mesh):
    f = off(lambda x: x * 2, cpu_mesh, P("model"), P("model"))
    (site,) = both(lambda x: jax.vmap(f, spmd_axis_name="data")(x), np.stack([X] * 4))
    assert site.switched


@versions.where(versions.has("jax", "new_ref"))
@pytest.mark.parametrize("axis", ["data", None])
def test_refs_that_a_mesh_axis_maps_are_left(cpu_mesh, axis):
    """JAX fails in the backward pass where the check is on."""

    def bwd(cosine, g):
        ref = jax.new_ref(jnp.zeros_like(g))
        ref[...] += g
        return (cosine * ref[...],)

    op = jax.custom_vjp(jnp.sin)
    op.defvjp(lambda x: (jnp.sin(x), jnp.cos(x)), lambda *args: jax.jit(bwd)(*args))
    f = off(lambda x: op(x), cpu_mesh, P("model"), P("model"))
    (site, *_) = both(lambda x: jax.vmap(f, spmd_axis_name=axis)(x), np.stack([X] * 4))
    why = "with the check on, JAX can't map refs by vmap's spmd_axis_name"
    assert site.reason == ("" if axis is None else why)


def test_called_outside_of_tracing_it_runs_as_written(cpu_mesh):
    with shardrules.install(unchecked="check") as handle:
        off(double, cpu_mesh, P("data"), P("data"))(X)
    (site,) = handle.unchecked()
    assert (site.switched, site.reason) == (False, "called outside of tracing")


def test_what_pmap_makes_is_left_and_not_listed():
    f = jax.pmap(lambda x: jax.lax.psum(x, "i"), "i")
    plain, text, sites = traced(f, np.ones((8, 2), np.float32))
    assert plain == text and sites == ()


@versions.where(versions.has("jax", "shard_map"))
def test_a_shard_map_in_one_that_is_left_is_left(cpu_mesh):
    def nested(function, x):
        some = {"axis_names": {"model"}, "check_vma": False}
        return jax.shard_map(
            function, in_specs=P(None, "model"), out_specs=P(None, "model"), **some
        )(x)

    def around(check, out=P("data")):
        some = {"axis_names": {"data"}, "check_vma": check, "in_specs": P("data")}
        body = lambda x: nested(jnp.sin, x)  # noqa: E731
        return lambda x: jax.shard_map(body, mesh=cpu_mesh, out_specs=out, **some)(x)

    for check, out, count in ((True, P("data"), 1), (False, P(), 2), (False, P("data"), 2)):
        f = around(check, out)
        with shardrules.install():
            plain = program_text(jax.make_jaxpr(f)(X))
        _, text, sites = traced(f, X)
        assert plain == text and [site.switched for site in sites] == [False] * count
    # JAX 0.6 and 0.7 refuse the derivative themselves, in words of their own.
    reasons = {re.split(" of line|(?<=in the derivative): ", site.reason)[0] for site in sites}
    assert "inside" in reasons and len(reasons) == 2
    assert reasons - {"inside"} < {"its body holds another shard_map", "in the derivative"}
    both(around(False), X)


@versions.where(versions.has("jax", "shard_map"))
def test_a_mesh_of_which_an_axis_is_automatic(cpu_mesh):
    some = {"axis_names": {"data"}, "check_vma": False, "mesh": cpu_mesh}

    def f(x, w):
        body = lambda x, w: jnp.sin(x) * w[0]  # noqa: E731
        return jax.shard_map(body, in_specs=(P("data"), P()), out_specs=P("data"), **some)(x, w)

    (site,) = both(jax.jit(f), X, W)
    assert site.switched


def test_a_traced_value_that_the_body_closes_over(cpu_mesh):
    def f(x, w):
        return off(lambda x: x * w[0], cpu_mesh, P("data"), P("data"))(x)

    (site,) = both(f, X, W)
    assert "closes over values that are traced" in site.reason


def test_a_custom_vjp_around_shard_maps(cpu_mesh):
    """As libraries write it: forward and backward kernel each in a shard_map of its own."""
    call = off(lambda x: double(x), cpu_mesh, P("data"), P("data"))
    op = jax.custom_vjp(call)
    op.defvjp(lambda x: (call(x), None), lambda _, g: (call(g),))
    (site,) = both(op, X)
    assert site.switched


def test_a_library_with_a_cache_of_its_own(cpu_mesh):
    made = {}

    def f(x):
        if "layer" not in made:
            made["layer"] = jax.jit(off(double, cpu_mesh, P("data"), P("data")))
        return made["layer"](x)

    (site,) = both(f, X)  # traced before the hooks are there, with them, and again after
    assert site.switched
    assert "check_vma=True" not in program_text(jax.make_jaxpr(f)(X)) and touched() == ()


@functools.lru_cache
def layer_of(mesh):
    """Return the one layer of a mesh, as libraries keep it."""
    return jax.jit(lambda x, w: off(lambda x, w: double(x) * w[0], mesh, SPECS, P("data"))(x, w))


def test_a_function_that_a_library_made_and_traced_before_install(cpu_mesh):
    layer_of.cache_clear()
    layer = layer_of(cpu_mesh)
    plain = program_text(jax.make_jaxpr(layer)(X, W))
    layer(X, W)  # traced and compiled
    with shardrules.install(unchecked="check") as handle:
        assert layer_of(cpu_mesh) is layer
        assert "check_vma=True" in program_text(jax.make_jaxpr(layer)(X, W))
    (site,) = handle.unchecked()
    assert site.switched and program_text(jax.make_jaxpr(layer)(X, W)) == plain
    assert all(site.switched for site in both(layer_of(cpu_mesh), X, W))


def test_a_shard_map_made_before_install_is_left_and_not_listed(cpu_mesh):
    made = jax.jit(shard_map(double, cpu_mesh, P("data"), P("data"), check=False))
    plain, text, sites = traced(made, X)
    assert plain == text and sites == ()


def test_one_look_for_each_site_and_program(cpu_mesh, monkeypatch):
    looks = []
    look = unchecked_hooks._Unchecked._compare
    monkeypatch.setattr(
        unchecked_hooks._Unchecked, "_compare", lambda *args: looks.append(1) or look(*args)
    )

    def f(x):
        for _ in range(3):
            x = off(lambda x: double(x) * 3, cpu_mesh, P("data"), P("data"))(x)
        return x

    with shardrules.install(unchecked="check") as handle:
        first = program_text(jax.make_jaxpr(f)(X))
        jax.clear_caches()
        assert program_text(jax.make_jaxpr(f)(X)) == first and len(looks) == 1
        jax.make_jaxpr(f)(X[:4])
        assert len(looks) == 2
        for scale in (4, 5):  # another body at the same place
            jax.make_jaxpr(off(lambda x: scale * x, cpu_mesh, P("data"), P("data")))(X)
    assert len(looks) == 4 and len(handle.unchecked()) == 4


def test_a_derivative_that_fails_either_way_is_not_listed(cpu_mesh):
    def double_in_scratch(x_ref, o_ref, scratch_ref):
        scratch_ref[...] = 2 * x_ref[...]
        o_ref[...] = scratch_ref[...]

    def body(x):
        shape = jax.ShapeDtypeStruct(x.shape, x.dtype)
        scratch = [pltpu.VMEM(x.shape, x.dtype)]
        return pl.pallas_call(double_in_scratch, shape, scratch_shapes=scratch, interpret=True)(x)

    f = off(body, cpu_mesh, P("data"), P("data"))
    with shardrules.install(unchecked="check") as handle:
        jax.make_jaxpr(f)(X)
        with pytest.raises((AssertionError, NotImplementedError)):  # the kernel has no derivative
            jax.make_jaxpr(jax.grad(lambda x: f(x).sum()))(X)
    (site,) = handle.unchecked()
    assert site.switched


def test_check_stays_in_force(cpu_mesh):
    f = off(double, cpu_mesh, P("data"), P("data"))
    with shardrules.install(unchecked="check"), shardrules.install():
        assert "check_vma=True" in program_text(jax.make_jaxpr(f)(X))
    with shardrules.install():
        assert "check_vma=False" in program_text(jax.make_jaxpr(f)(X))
    with raises(shardrules.errors.ShardrulesError, unchecked="on"):
        shardrules.install(unchecked="on")


def test_it_moves_more_with_late_casts(cpu_mesh):
    def f(x, w):
        body = lambda x, w: jax.lax.scan(lambda c, _: (c * w[0], None), x, None, length=9)[0]  # noqa: E731
        return off(body, cpu_mesh, (P("data"), P()), P("data"))(x, w)

    *_, (site,) = traced(f, X, W, casts="late")
    assert site.reason.startswith("its all-reduces would move")
    *_, (site,) = traced(f, X, W)
    assert site.switched and site.after_bytes <= site.before_bytes


def test_the_assertion_compares_and_can_fail(cpu_mesh, monkeypatch):
    f = off(double, cpu_mesh, P("data"), P("data"))
    (site,) = shardrules.testing.assert_same_unchecked(f, X)
    assert site.switched
    monkeypatch.setattr(unchecked_hooks, "why_left", lambda call: "")
    g, in_specs, out_specs, args, _ = LEFT["clips"]
    said = r"gradient\[0\] is not the same with the check of unchecked shard_maps on"
    with pytest.raises(shardrules.errors.ShardrulesError, match=said):
        shardrules.testing.assert_same_unchecked(off(g, cpu_mesh, in_specs, out_specs), *args)


@pytest.mark.slow
def test_the_assertion_knows_a_gradient_that_is_rounding_alone(monkeypatch):
    """The bias of keys adds the same to all scores of a query, so its gradient is zero."""
    devices = np.array(jax.devices()[:6]).reshape(2, 3)  # a third of a cotangent is rounded
    mesh, draw = jax.sharding.Mesh(devices, AXES), np.random.RandomState(0)

    def attention(x, w, bias):
        scores = jnp.einsum("bsd,btd->bst", x @ w, x + bias) / 3
        return 300 * jnp.einsum("bst,btd->bsd", jax.nn.softmax(scores, -1), x)

    specs = (P("data"), P(), P())
    x, w, bias = (draw.randn(*shape).astype("float32") for shape in ((8, 16, 6), (6, 6), (6,)))
    f = off(attention, mesh, specs, P("data"))
    (site,) = testing.assert_same_unchecked(f, x, w, bias)
    assert site.switched
    monkeypatch.setattr(same, "_is_rest", lambda *args: False)
    with raises(shardrules.errors.ShardrulesError, name="gradient[2]"):
        testing.assert_same_unchecked(f, x, w, bias)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_assertion_finds_a_small_gradient_that_is_wrong(cpu_mesh, monkeypatch, dtype):
    """Beside one a million times as large; in bfloat16, 200 units were more than the number."""
    monkeypatch.setattr(unchecked_hooks, "why_left", lambda call: "")
    small = jnp.asarray(W[0], dtype)

    def body(x, w, small):
        return 1e3 * x * w + clipped(1e-3 * small)

    f = off(body, cpu_mesh, (P("data"), P(), P()), P("data"))
    args = [jnp.asarray(a, dtype) for a in (X, W[0])]
    with raises(shardrules.errors.ShardrulesError, name="gradient[2]"):
        testing.assert_same_unchecked(f, *args, small)


def test_explain_says_it(cpu_mesh):
    with shardrules.install(unchecked="check"):
        text = str(shardrules.explain(off(double, cpu_mesh, P("data"), P("data")), X))
        words = " ".join(text.split())  # lines break where the folder's name is long
        assert re.search("unchecked: double at .* runs with its check on", words)
    assert "unchecked:" not in str(shardrules.explain(off(double, cpu_mesh, P(), P()), X))


def test_a_shard_map_that_was_made_before_compares_nothing_and_says_so(cpu_mesh):
    make = lambda: jax.jit(shard_map(double, cpu_mesh, P("data"), P("data"), check=False))  # noqa: E731
    early = make()
    with raises(shardrules.errors.ShardrulesError, count=1):
        testing.assert_same_unchecked(early, X)
    (site,) = testing.assert_same_unchecked(lambda x: make()(x), X)
    assert site.switched
    with shardrules.install():
        late = make()
    assert len(testing.assert_same_unchecked(late, X)) == 1
    assert testing.assert_same_unchecked(jax.jit(jnp.sin), X) == ()


@pytest.mark.parametrize(
    "error, outcome",
    [
        ("ValueError: one line", "ValueError: one line"),
        ("It does that. Say which is meant:\n    a\n    b", "It does that"),
        ("types differ:\n  here and there", "types differ"),
        ("It is long.\n\nAnd more.", "It is long"),
    ],
)
def test_an_outcome_is_a_whole_sentence_of_an_error(error, outcome):
    site = sites.Site("a.py", 1, 0, 1, 9, "f")
    said = sites.why_left(sites.UncheckedCall(site, None, "", error=error))
    more = " (shardrules migrate prints all of it)" if "\n" in error else ""
    assert said == outcome + more


def ours(error):
    return [note for note in getattr(error, "__notes__", ()) if note.startswith("shardrules: ")]


def test_jaxs_advice_to_switch_the_check_off_gets_a_sentence_beside_it(cpu_mesh):
    f = lambda: shard_map(lambda x: x.sum(), cpu_mesh, P("data"), P(), check=True)  # noqa: E731
    with shardrules.install(), wrong_out_specs() as caught:
        jax.jit(f())(X)
    (note,) = ours(caught.value)
    # JAX 0.7.2 writes PartitionSpec() for P().
    assert re.search("out_specs is P\\w*\\(\\), but it varies over data; name the axes", note)
    early = f()
    with wrong_out_specs() as caught:
        jax.jit(early)(X)
    assert ours(caught.value) == []
    with shardrules.install(), pytest.raises(ValueError) as caught:  # another error
        jax.jit(shard_map(lambda x: x.sum(), cpu_mesh, P("data"), P(), check=True))(X[:3])
    assert ours(caught.value) == []
