"""A step of FSDP whose backward pass moves activations: a constraint keeps them with the batch."""

import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from costs.test_waste import random_like
from shardrules import testing
from shardrules.costs import waste

pytestmark = pytest.mark.one_lane

KIND = "off the batch"
WIDTH, LAYERS, WORDS, LENGTH = 64, 3, 256, 16
ROWS = P(None, "data")


def make_step(where="", body=lambda f: f, tail=lambda x: 0.0):
    """Return a training step with a constraint of an activation at one place, or none."""

    def at(place, x):
        return lax.with_sharding_constraint(x, P("data")) if place == where else x

    def layer(x, w):
        x = at("layer", x)
        h = x * lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6) * w["scale"]
        q, k, v = jnp.split(h @ w["qkv"], 3, -1)
        x = x + (jax.nn.softmax(q @ k.swapaxes(1, 2) / 8, -1) @ v) @ w["out"]
        h = at("up", x @ w["up"])
        h = at("down", jax.nn.gelu(h) @ w["down"])
        return at("end", x + h), None

    def loss(ws, tokens):
        x = at("embedding", ws["words"][tokens])
        layers = {name: w for name, w in ws.items() if name != "words"}
        x, _ = lax.scan(body(layer), x, layers)
        scores = jax.nn.log_softmax((x @ ws["words"].T)[:, :-1])
        return tail(x) - jnp.take_along_axis(scores, tokens[:, 1:, None], -1).mean()

    def step(ws, momenta, tokens):
        value, g = jax.value_and_grad(loss)(ws, tokens)
        momenta = jax.tree.map(lambda m, g: 0.9 * m + g, momenta, g)
        return jax.tree.map(lambda w, m: w - 0.01 * m, ws, momenta), momenta, value

    return step


def given(mesh, batch, rows=ROWS, columns=ROWS, words=P("data"), tokens=P("data")):
    def array(spec, *shape):
        return jax.ShapeDtypeStruct(shape, jnp.float32, sharding=NamedSharding(mesh, spec))

    ws = {
        "qkv": array(rows, LAYERS, WIDTH, 3 * WIDTH),
        "out": array(columns, LAYERS, WIDTH, WIDTH),
        "up": array(rows, LAYERS, WIDTH, 2 * WIDTH),
        "down": array(columns, LAYERS, 2 * WIDTH, WIDTH),
        "scale": array(P(), LAYERS, WIDTH),
        "words": array(words, WORDS, WIDTH),
    }
    taken = jax.ShapeDtypeStruct((batch, LENGTH), jnp.int32, sharding=NamedSharding(mesh, tokens))
    return ws, ws, taken


def compiled(mesh, step, args):
    outs = jax.tree.map(lambda x: x.sharding, args[:2])
    with jax.set_mesh(mesh):
        return jax.jit(step, out_shardings=(*outs, None)).lower(*args).compile()


def found(program):
    return [h for h in waste.hints(testing.judge(program)) if h.kind == KIND]


def sent(program):
    return testing.account(program).total.wire_bytes


def line(devices):
    return jax.sharding.Mesh(np.array(devices).ravel(), ("data",))


@pytest.mark.parametrize(
    "where, body",
    [
        ("up", lambda f: f),
        ("up", jax.checkpoint),
        ("down", lambda f: f),
        ("down", jax.checkpoint),
        ("layer", lambda f: f),
        ("end", jax.checkpoint),
        ("embedding", jax.checkpoint),
    ],
    ids=["up", "up again", "down", "down again", "kept", "recomputed", "outside"],
)
def test_a_constraint_saves_what_is_said(platform, where, body):
    name, mesh = platform[0], line(platform[1].devices)
    args = given(mesh, 256)
    now, then = (compiled(mesh, make_step(place, body), args) for place in ("", where))
    hints = found(now)
    promised = sum(h.sent_before - h.sent_after for h in hints)
    assert sent(now) - sent(then) >= promised > 0.05 * sent(now)
    assert all(h.round_trips_after == h.round_trips_before for h in hints)
    (said,) = [h for h in hints if "with_sharding_constraint(x @ w, " in h.advice]
    # It names the line of one of the products whose results the first cases constrain.
    first = inspect.getsourcelines(make_step)[1]
    source = inspect.getsource(make_step).splitlines()[said.entry.line - first]
    assert 'at("up"' in source or 'at("down"' in source
    assert found(then) == []
    if name == "cpu":
        arrays = [
            x if x.dtype == jnp.int32 else 0.1 * x for x in random_like(jax.tree.leaves(args))
        ]
        arrays = jax.tree.unflatten(jax.tree.structure(args), arrays)
        for a, b in zip(jax.tree.leaves(now(*arrays)), jax.tree.leaves(then(*arrays)), strict=True):
            a, b = np.asarray(a), np.asarray(b)
            assert np.abs(a - b).max() <= 1e-5 * np.abs(a).max() + 1e-7


def apart(x):
    """The loss of each pair of rows, for which all rows are gathered."""
    x = x.reshape(len(x), -1)
    return jax.nn.logsumexp(x @ x.T, -1).mean()


COLUMNS = P(None, None, "data")
BOTH = P(None, "data", "model"), P(None, "model", "data")
NEAR = {
    "a small batch": ({"batch": 8}, {}),
    "a replicated batch": ({"batch": 256, "tokens": P()}, {}),
    "weights by columns": ({"batch": 64, "rows": COLUMNS, "columns": COLUMNS}, {}),
    "a loss of pairs": ({"batch": 256}, {"tail": apart}),
}
PARALLEL = {
    "tensor": (P(None, None, "model"), P(None, "model"), P("model")),
    "fsdp and tensor": (*BOTH, P(("data", "model"))),
}


@pytest.mark.parametrize("name", NEAR)
def test_no_hint_where_it_may_not_save(platform, name):
    mesh = line(platform[1].devices)
    shapes, options = NEAR[name]
    assert found(compiled(mesh, make_step(**options), given(mesh, **shapes))) == []


@pytest.mark.parametrize("name", PARALLEL)
def test_no_hint_on_a_product_that_is_shared_out(platform, name):
    rows, columns, words = PARALLEL[name]
    args = given(platform[1], 256, rows, columns, words)
    assert found(compiled(platform[1], make_step(), args)) == []
