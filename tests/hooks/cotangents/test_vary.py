"""vary and already_summed: types, bytes, gradients, and what they refuse."""

import re
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from raising import raises

import shardrules as sr
from shardrules import errors, testing
from shardrules.hooks import user_casts

ROWS, COLUMNS = 8, 16


def inside(mesh, f, *args, specs=P("data"), out=P("data"), **kwargs):
    return jax.shard_map(f, mesh=mesh, in_specs=specs, out_specs=out, **kwargs)(*args)


def varying(x):
    return set(jax.typeof(x).manual_axis_type.varying)


def test_vary_casts_each_array_once(cpu_mesh):
    def f(x, w):
        tree = sr.vary({"x": x, "w": (w, None, 2.0)}, "data", "model")
        assert varying(tree["x"]) == varying(tree["w"][0]) == {"data", "model"}
        assert varying(tree["w"][2]) == {"data", "model"} and tree["w"][1] is None
        assert sr.vary(tree["x"], "model") is tree["x"]
        assert varying(sr.vary(w, "model")) == {"model"}
        return x

    x = jnp.ones(ROWS)
    inside(cpu_mesh, f, x, jnp.ones(3), specs=(P("data"), P()))


def test_vary_is_nothing_without_the_check(cpu_mesh):
    x = {"a": jnp.ones(ROWS)}
    assert sr.vary(x, "data") is x

    def f(x):
        assert sr.vary(x, "data") is x
        return x

    inside(cpu_mesh, f, jnp.ones(ROWS), check_vma=False)


SHARDED = lambda x: sr.vary(x, "data") + 1  # noqa: E731
NO_EFFECT = {
    "it is not inside of a shard_map": lambda mesh, x: jax.jit(SHARDED)(x),
    "the check of this shard_map is off": lambda mesh, x: inside(mesh, SHARDED, x, check_vma=False),
    "its arrays vary over these axes already. Drop the call": lambda mesh, x: inside(
        mesh, SHARDED, x
    ),
}


@pytest.mark.parametrize("why", NO_EFFECT)
def test_vary_that_does_nothing_is_warned_of_once(why, cpu_mesh, monkeypatch):
    monkeypatch.setattr(user_casts, "_settled", set())
    message = re.escape(f"shardrules.vary(x, 'data') does nothing here: {why}")
    with pytest.warns(UserWarning, match=message) as warned:
        NO_EFFECT[why](cpu_mesh, jnp.ones(ROWS))
    assert [w.filename for w in warned] == [__file__]
    jax.clear_caches()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        NO_EFFECT[why](cpu_mesh, jnp.ones(ROWS))


def test_a_claim_outside_of_a_shard_map_is_warned_of(cpu_mesh, monkeypatch):
    monkeypatch.setattr(user_casts, "_settled", set())
    claim = lambda ct: sr.already_summed(ct, "data")  # noqa: E731
    with pytest.warns(
        UserWarning, match="already_summed\\(ct, 'data'\\) does nothing here: it is not"
    ):
        claim(jnp.ones(ROWS))
    monkeypatch.setattr(user_casts, "_settled", set())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        inside(cpu_mesh, claim, jnp.ones(ROWS), check_vma=False)


def test_vary_that_casts_for_some_callers_is_not_warned_of(cpu_mesh, monkeypatch):
    monkeypatch.setattr(user_casts, "_settled", set())

    def body(w, x):
        both = (sr.vary(y, "data") for y in (w, x))
        return jnp.multiply(*both)

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        inside(cpu_mesh, body, jnp.ones(()), jnp.ones(ROWS), specs=(P(), P("data")))


@pytest.mark.parametrize(
    "axes, message",
    [
        (
            (),
            "vary(x, ...) takes the names of one or more mesh axes, not nothing; such as "
            "vary(x, 'model')",
        ),
        (
            (("data", "model"),),
            "vary(x, ...) takes the names of one or more mesh axes, not "
            "('data', 'model'); pass the axes one by one: vary(x, 'data', 'model')",
        ),
        (
            ("modle", "data"),
            "vary(x, 'modle', 'data'): {modle} is not a manual mesh axis here; they are {data, model}",
        ),
    ],
)
def test_vary_refuses_what_is_no_axis(cpu_mesh, axes, message):
    for check in (True, False):
        with pytest.raises(errors.AxisError) as caught:
            inside(cpu_mesh, lambda x: sr.vary(x, *axes), jnp.ones(ROWS), check_vma=check)
        assert str(caught.value) == message


def test_partial_sums_are_refused(cpu_mesh):
    def f(x):
        partial = jax.lax.pcast(x, "data", to="unreduced")
        for helper in (sr.vary, sr.already_summed):
            said = (
                f"{helper.__name__} over {{data}} was given a value that is unreduced over {{data}}"
            )
            with pytest.raises(
                errors.AxisError,
                match=re.escape(f"{said}: a partial sum. Reduce it first, with jax.lax.psum"),
            ):
                helper(partial, "data")
        return x

    jax.eval_shape(lambda x: inside(cpu_mesh, f, x), jnp.ones(ROWS))


def test_an_early_cast_costs_fewer_bytes(cpu_mesh):
    """A row that is broadcast over the local batch of 2: half the bytes where the row is cast."""

    def gradient(early):
        def f(x, b):
            row = sr.vary(b, "data") if early else b
            block = jnp.broadcast_to(row, (2, COLUMNS))
            return x * jnp.sin(sr.vary(block, "data"))

        return jax.jit(
            jax.grad(
                lambda b, x: inside(cpu_mesh, f, x, b, specs=(P("data"), P()), out=P("data")).sum()
            )
        )

    arguments = [
        jax.ShapeDtypeStruct(
            shape, jnp.float32, sharding=jax.sharding.NamedSharding(cpu_mesh, spec)
        )
        for shape, spec in (((COLUMNS,), P()), ((ROWS, COLUMNS), P("data")))
    ]
    for early, size in ((True, 4 * COLUMNS), (False, 2 * 4 * COLUMNS)):
        testing.assert_collectives(
            gradient(early), *arguments, expect={"all-reduce(data)": {"count": 1, "bytes": size}}
        )


# already_summed.


def dense(summed):
    """x * w with a replicated w, whose bwd gathers the shares and sums them itself."""

    @jax.custom_vjp
    def op(x, w):
        return x * w

    def backward(res, g):
        x, w = res
        return g * w, summed((x * g).sum(0))

    op.defvjp(lambda x, w: (op(x, w), (x, w)), backward)
    return op


def gathered(share):
    return jax.lax.all_gather(share, "data").sum(0)


def gradient_of(op, mesh, **kwargs):
    f = lambda x, w: inside(mesh, op, x, w, specs=(P("data"), P()), **kwargs)  # noqa: E731
    return jax.grad(lambda x, w: (f(x, w) ** 2).sum(), argnums=(0, 1))


def arguments():
    keys = jax.random.split(jax.random.key(0))
    return jax.random.normal(keys[0], (ROWS, COLUMNS)), jax.random.normal(keys[1], (COLUMNS,))


def single_device():
    return jax.grad(lambda x, w: ((x * w) ** 2).sum(), argnums=(0, 1))


@pytest.mark.parametrize("installed", [True, False])
@pytest.mark.parametrize("jit", [True, False])
def test_a_cotangent_that_bwd_has_summed(cpu_mesh, installed, jit):
    op = dense(lambda share: sr.already_summed(gathered(share), "data"))
    gradient = gradient_of(op, cpu_mesh)
    handle = sr.install() if installed else None
    try:
        got = (jax.jit(gradient) if jit else gradient)(*arguments())
    finally:
        handle and handle.uninstall()
    for one, other in zip(got, single_device()(*arguments())):
        np.testing.assert_allclose(one, other, rtol=1e-5)


def test_no_reduction_is_added(cpu_mesh, hooks):
    op = dense(lambda share: sr.already_summed(gathered(share), "data"))
    text = str(jax.make_jaxpr(gradient_of(op, cpu_mesh))(*arguments()))
    assert "already_summed[axes=('data',)]" in text and "all_gather[" in text
    assert "psum" not in text


def test_types_come_from_the_operand(cpu_mesh):
    def f(x, w):
        both = sr.vary({"x": x, "w": w, "none": None}, "model")
        out = sr.already_summed(both, "model")
        assert varying(out["x"]) == {"data"} and varying(out["w"]) == set()
        assert sr.already_summed(w, "data", "model") is w
        return out["x"]

    inside(cpu_mesh, f, jnp.ones(ROWS), jnp.ones(3), specs=(P("data"), P()))
    x = jnp.ones(3)
    assert sr.already_summed(x, "data") is x

    def unchecked(x):
        assert sr.already_summed(x, "data") is x
        return x

    inside(cpu_mesh, unchecked, jnp.ones(ROWS), check_vma=False)


@pytest.mark.slow
def test_transformations(cpu_mesh):
    """jvp, transpose and vmap: as of the common value, which the gathered sum is."""

    def f(x):
        return sr.already_summed(jax.lax.all_gather(x, "data").sum(0), "data") ** 2

    def g(x):
        return inside(cpu_mesh, f, x, out=P(None)).sum()

    x = jax.random.normal(jax.random.key(2), (ROWS, 3))
    plain = lambda x: (x.reshape(4, 2, 3).sum(0) ** 2).sum()  # noqa: E731
    np.testing.assert_allclose(g(x), plain(x), rtol=1e-5)
    np.testing.assert_allclose(jax.grad(g)(x), jax.grad(plain)(x), rtol=1e-5)
    np.testing.assert_allclose(
        jax.jit(jax.jvp, static_argnums=0)(g, (x,), (x,))[1],
        jax.jvp(plain, (x,), (x,))[1],
        rtol=1e-5,
    )
    np.testing.assert_allclose(jax.hessian(g)(x), jax.hessian(plain)(x), rtol=1e-5)
    xs = jnp.stack([x, 2 * x])
    np.testing.assert_allclose(jax.vmap(jax.grad(g))(xs), jax.vmap(jax.grad(plain))(xs), rtol=1e-5)


def test_a_type_is_computed_at_every_bind(cpu_mesh):
    """Batched over another mesh axis, the value varies over that one too."""

    def f(x):
        out = sr.already_summed(jax.lax.all_gather(x, "model").sum(0), "model")
        return out

    mapped = jax.vmap(
        jax.shard_map(f, mesh=cpu_mesh, in_specs=P("model"), out_specs=P(None)),
        spmd_axis_name="data",
    )
    (call,) = [
        line
        for line in str(jax.make_jaxpr(mapped)(jnp.ones((4, 6)))).splitlines()
        if "already_summed[" in line
    ]
    assert re.search(r"\{V:\(?data\)?\} = already_summed", call), call


def test_a_wrong_claim_is_detected(cpu_mesh, hooks):
    """The share itself, called the sum: wrong gradients, and an error where claims are compared."""
    wrong, right = (
        dense(lambda share: sr.already_summed(share, "data")),
        dense(lambda share: sr.already_summed(gathered(share), "data")),
    )
    with user_casts.checking_claims() as claims:
        jax.jit(gradient_of(right, cpu_mesh))(*arguments())
    assert len(claims.made) == 1 and not claims.wrong

    gradient = jax.jit(gradient_of(wrong, cpu_mesh))
    got = gradient(*arguments())[1]
    assert not np.allclose(got, single_device()(*arguments())[1])
    with pytest.raises(errors.CotangentError) as caught:
        with user_casts.checking_claims():
            gradient(*arguments())  # traced before, without comparing
    assert re.fullmatch(
        r"already_summed was given a cotangent that differs between devices, so it is not a full "
        r"sum:\n  at .*test_vary.py:\d+, over \{data\}\n"
        r"return jax.lax.psum\(ct, axes\) there instead",
        str(caught.value),
    )


def test_already_summed_refuses_what_is_no_axis(cpu_mesh):
    with pytest.raises(
        errors.AxisError,
        match=re.escape(
            "already_summed(ct, 'modle'): {modle} is not a manual mesh axis here; they are "
            "{data, model}"
        ),
    ):
        inside(cpu_mesh, lambda x: sr.already_summed(x, "modle"), jnp.ones(ROWS))


@pytest.mark.slow
def test_a_librarys_bwd_is_not_to_be_edited(cpu_mesh, hooks):
    """What it says to type before the call is right, and gives the gradient of one device."""
    from jax.experimental.ode import odeint

    def solve(y, ts, w):
        return odeint(lambda y, t, w: -w * y, y, ts, w)[-1]

    def cast(y, ts, w):
        ts, w = sr.vary((ts, w), "data")
        return solve(y, ts, w)

    def gradient(f):
        mapped = jax.shard_map(
            f, mesh=cpu_mesh, in_specs=(P("data"), P(), P()), out_specs=P("data")
        )
        return jax.jit(jax.grad(lambda *a: mapped(*a).sum(), argnums=2))

    args = jnp.ones((8, 3)), jnp.linspace(0.0, 1.0, 3), jnp.float32(2.0)
    with raises(errors.CotangentError, axes={"data"}) as caught:
        gradient(solve)(*args)
    for part in (
        "It belongs to a library, so change the call",
        "(inputs 1, 2 of the flattened arguments)",
        "ts, w = shardrules.vary((ts, w), 'data')",
    ):
        assert part in str(caught.value)
    want = jax.grad(lambda *a: solve(*a).sum(), argnums=2)(*args)
    np.testing.assert_allclose(gradient(cast)(*args), want, rtol=1e-5)
