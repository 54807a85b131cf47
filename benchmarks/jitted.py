"""Steps under jit as people write them, whose arrays XLA's partitioner shards over data and model.

``verdicts.py`` compiles them. Each takes a function that constrains an array by mesh axes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

WIDTH, LAYERS, ROWS = 256, 4, 512


class Step(NamedTuple):
    """One step: ``loss`` of weights and a batch, differentiated unless ``update`` does it."""

    loss: Callable[..., jax.Array]
    weights: dict[str, tuple[tuple[int, ...], P]]  # shape and spec of each
    batch: tuple[tuple[int, ...], P]
    integers: bool = False  # the batch is of tokens
    update: Callable[..., Any] | None = None


def compiled(name: str, mesh: Mesh):
    """Compile a step's gradient, or its update, whose results are sharded as its weights are."""

    def of(spec: P) -> NamedSharding:
        return NamedSharding(mesh, spec)

    step = STEPS[name](lambda x, *spec: lax.with_sharding_constraint(x, of(P(*spec))))

    def struct(shape, spec, dtype=jnp.float32):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=of(spec))

    weights = {k: struct(*w) for k, w in step.weights.items()}
    batch = struct(*step.batch, jnp.int32 if step.integers else jnp.float32)
    kept = {k: of(spec) for k, (_, spec) in step.weights.items()}
    function = step.update or jax.grad(step.loss)
    return jax.jit(function, out_shardings=kept).lower(weights, batch).compile()


def _attend(x, w):
    q, k, v = (jnp.einsum("btd,dhe->bthe", x, w[n]) for n in "qkv")
    scores = jax.nn.softmax(jnp.einsum("bthe,bshe->bhts", q, k) / 8)
    return jnp.einsum("bhts,bshe,hed->btd", scores, v, w["o"])


def _attention(axes: P, heads: P, out: P):
    def make(constrain):
        def loss(w, x):
            return ((x + constrain(_attend(x, w), *axes)) ** 2).mean()

        weights: dict[str, Any] = dict.fromkeys("qkv", ((WIDTH, 8, 32), heads))
        return Step(loss, weights | {"o": ((8, 32, WIDTH), out)}, ((8, 64, WIDTH), axes))

    return make


def _sequence(constrain):
    def loss(w, x):
        h = constrain(jax.nn.gelu(x @ w["up"]), "data", None, "model")
        return (constrain(x + h @ w["down"], "data", "model", None) ** 2).mean()

    up, down = P(None, "model"), P("model", None)
    weights = {"up": ((WIDTH, 4 * WIDTH), up), "down": ((4 * WIDTH, WIDTH), down)}
    return Step(loss, weights, ((8, 64, WIDTH), P("data", "model")))


def _experts(constrain):
    def loss(w, x):
        gates = jax.nn.softmax(x @ w["router"])
        place = jax.nn.one_hot(gates.argmax(-1), 8)
        sent = constrain(jnp.einsum("td,te->etd", x, place), "model", None, None)
        hidden = jax.nn.gelu(jnp.einsum("etd,edf->etf", sent, w["up"]))
        made = jnp.einsum("etf,efd->etd", hidden, w["down"])
        return (jnp.einsum("etd,te->td", made, place * gates) ** 2).mean()

    weights = {
        "router": ((WIDTH, 8), P()),
        "up": ((8, WIDTH, WIDTH), P("model")),
        "down": ((8, WIDTH, WIDTH), P("model")),
    }
    return Step(loss, weights, ((ROWS, WIDTH), P("data")))


def _vocabulary(constrain):
    def loss(w, tokens):
        x = jnp.tanh(w["table"][tokens] @ w["mix"])
        scores = jax.nn.log_softmax(x[:, :-1] @ w["table"].T)
        return -jnp.take_along_axis(scores, tokens[:, 1:, None], -1).mean()

    weights = {"table": ((1024, WIDTH), P("model")), "mix": ((WIDTH, WIDTH), P())}
    return Step(loss, weights, ((16, 32), P("data")), integers=True)


def _layers(w, x, layer=lambda x, w: (x + jnp.tanh(x @ w), None)):
    return (lax.scan(layer, x, w["w"])[0] ** 2).mean()


_SHARDED = {"w": ((LAYERS, WIDTH, WIDTH), P(None, "data"))}


def _rematerialised(constrain):
    def layer(x, w):
        w = constrain(w, None, None)
        return x + jnp.tanh(x @ w), None

    def loss(w, x):
        return _layers(w, x, jax.checkpoint(layer))

    return Step(loss, _SHARDED, ((ROWS, WIDTH), P(("data", "model"))))


def _microbatches(constrain):
    def update(w, x):
        def add(total, rows):
            return jax.tree.map(jnp.add, total, jax.grad(_layers)(w, rows)), None

        zero = jax.tree.map(jnp.zeros_like, w)
        return lax.scan(add, zero, x.reshape(-1, 4, WIDTH).swapaxes(0, 1))[0]

    whole = {"w": ((LAYERS, WIDTH, WIDTH), P())}
    return Step(_layers, whole, ((ROWS, WIDTH), P("data")), update=update)


def _clipped(constrain):
    def update(w, x):
        grads = jax.grad(_layers)(w, x)
        norm = jnp.sqrt(sum((g**2).sum() for g in jax.tree.leaves(grads)))
        return jax.tree.map(lambda w, g: w - 0.1 * g / jnp.maximum(norm, 1), w, grads)

    return Step(_layers, _SHARDED, ((ROWS, WIDTH), P("data")), update=update)


def _convolutions(constrain):
    def loss(w, x):
        for name in ("first", "second"):
            x = lax.conv_general_dilated(
                x, w[name], (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
            )
            mean, var = x.mean((0, 1, 2)), x.var((0, 1, 2))
            x = jax.nn.relu((x - mean) * lax.rsqrt(var + 1e-5))
        return (x**2).mean()

    weights = {"first": ((3, 3, 8, 16), P()), "second": ((3, 3, 16, 16), P())}
    return Step(loss, weights, ((16, 16, 16, 8), P(("data", "model"))))


def _rolled(constrain):
    def loss(w, xs):
        def trip(state, x):
            state = constrain(jnp.roll(state, 1, 0).at[0].set(x), "data", None, None)
            state = jax.vmap(lambda w, s: jnp.tanh(s @ w))(w["w"], state)
            return state, state[-1]

        start = constrain(jnp.zeros((LAYERS, *xs.shape[1:])), "data", None, None)
        return (lax.scan(trip, start, xs)[1] ** 2).mean()

    return Step(loss, {"w": ((LAYERS, WIDTH, WIDTH), P("data"))}, ((8, 32, WIDTH), P()))


STEPS: dict[str, Callable[..., Step]] = {
    "attention by heads, jit": _attention(P("data"), P(None, "model"), P("model")),
    "attention by context, jit": _attention(P("data", "model"), P(), P()),
    "sequence parallel, jit": _sequence,
    "experts, jit": _experts,
    "vocabulary, jit": _vocabulary,
    "FSDP with remat, jit": _rematerialised,
    "microbatches, jit": _microbatches,
    "clipped FSDP, jit": _clipped,
    "convolutions, jit": _convolutions,
    "rolled pipeline, jit": _rolled,
}
