"""Programs as they should be, as users write them: no finding, and nothing that could be cheaper."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from costs.test_waste import D, hints, program, structs
from shardrules import report, testing

WEIGHTS = ((128, 128), P())
PART = ((128, 128), D)
BATCH = ((256, 128), D)


def loss(w, x):
    return jnp.mean(jnp.tanh(x @ w) ** 2)


def adam(w, g, m, v):
    m, v = 0.9 * m + 0.1 * g, 0.99 * v + 0.01 * g * g
    return (w - 1e-3 * m / (jnp.sqrt(v) + 1e-8)).astype(w.dtype), m, v


def zero_under_jit(mesh):
    """Each device has a part of the moments and updates as much of the weights."""
    outs = tuple(NamedSharding(mesh, spec) for _, spec in (WEIGHTS, PART, PART))
    return jax.jit(lambda w, m, v, x: adam(w, jax.grad(loss)(w, x), m, v), out_shardings=outs)


def zero_in_a_shard_map(mesh):
    def step(w, m, v, x):
        g = lax.psum_scatter(jax.grad(loss)(w, x), "data", tiled=True) / 4
        own = lax.dynamic_slice_in_dim(w, lax.axis_index("data") * len(m), len(m))
        own, m, v = adam(own, g, m, v)
        return lax.all_gather(own, "data", tiled=True), m, v

    return program(mesh, step, [WEIGHTS, PART, PART, BATCH], (P(), D, D))


def from_masters(mesh):
    """Each device has a part of the weights in f32, and all take them in their own type."""

    def step(w, master, v, x):
        g = lax.psum_scatter(jax.grad(loss)(w, x), "data", tiled=True) / 4
        master = master - 1e-3 * g.astype(master.dtype)
        return lax.all_gather(master.astype(w.dtype), "data", tiled=True), master, v

    return program(mesh, step, [WEIGHTS, PART, PART, BATCH], (P(), D, D))


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("make", [zero_under_jit, zero_in_a_shard_map, from_masters])
def test_weights_that_the_next_step_takes_whole(cpu_mesh, make, dtype):
    given = structs(cpu_mesh, [(*WEIGHTS, dtype), PART, PART, (*BATCH, dtype)])
    assert [h for h in hints(make(cpu_mesh), given) if h.kind == "only returned"] == []


def test_a_gradient_of_as_many_elements_may_stay_sharded(cpu_mesh):
    """It is made of the weights, and is no update of them."""

    def gradient(w, x):
        return lax.all_gather(
            lax.psum_scatter(jax.grad(loss)(w, x), "data", tiled=True), "data", tiled=True
        )

    f = program(cpu_mesh, gradient, [WEIGHTS, BATCH], P())
    assert "only returned" in [h.kind for h in hints(f, structs(cpu_mesh, [WEIGHTS, BATCH]))]


def test_what_the_partitioner_moves_for_products_in_a_loop(cpu_mesh):
    """No line gathers the array, so that none can be constrained to the whole layout."""
    sharded = NamedSharding(cpu_mesh, P(None, D[0]))
    shapes = {"up": (4, 128, 512), "down": (4, 512, 128)}
    ws = {k: jax.ShapeDtypeStruct(s, jnp.float32, sharding=sharded) for k, s in shapes.items()}

    def step(ws, x):
        def layer(h, w):
            return h + jax.nn.gelu(h @ w["up"]) @ w["down"], None

        return jax.grad(lambda ws: jnp.mean(lax.scan(layer, x, ws)[0] ** 2))(ws)

    f = jax.jit(step, out_shardings=sharded)
    assert not [h for h in hints(f, [ws, *structs(cpu_mesh, [BATCH])]) if h.kind == "gathered too"]


@pytest.mark.tpu
def test_weights_whose_parts_are_no_multiple_of_a_tile(tpu_mesh):
    """XLA reshapes what it gathers of 12 rows on each device."""
    given = structs(tpu_mesh, [((64, 48), D), ((48, 128), D)])
    assert hints(jax.jit(lambda x, w: jnp.tanh(x @ w)), given) == []


def unrolled(ws, x):
    for w in ws:
        x = jnp.tanh(x @ w.astype(jnp.bfloat16))
    return x


def scanned(ws, x):
    """Recomputed in the backward pass, too."""

    @jax.checkpoint
    def layer(h, w):
        up, down = (one.astype(h.dtype) for one in w)
        return h + jax.nn.silu(h @ up) @ down, None

    return jax.grad(lambda ws: jnp.mean(lax.scan(layer, x, ws)[0].astype(jnp.float32)))(ws)


def of_constrained(ws, x):
    return [x @ lax.with_sharding_constraint(jnp.sin(w).astype(x.dtype), D) for w in ws]


PRODUCTS = {
    "unrolled": (unrolled, [((64, 64), D)]),
    "scanned": (scanned, [((3, 64, 64), P(None, "data"))]),
    "constrained": (of_constrained, [((64, 64), D)]),
}


@pytest.mark.parametrize("name", PRODUCTS)
def test_what_the_partitioner_gathers_for_several_products(platform, name):
    """JAX 0.12 names it by the conversion or the constraint that made it; none asks to gather."""
    mesh = platform[1]
    f, (shaped,) = PRODUCTS[name]
    ws, x = [*structs(mesh, [shaped])] * 2, structs(mesh, [((64, 64), D, jnp.bfloat16)])[0]
    with jax.set_mesh(mesh):
        assert [h for h in hints(jax.jit(f), [ws, x]) if h.kind == "left apart"] == []


def test_what_a_product_gathers_and_a_constraint_turns(platform):
    """Whole, each device computes all of the product, and XLA for TPU gathers it in f32."""
    mesh = jax.sharding.Mesh(platform[1].devices.ravel(), ("data",))

    def orthogonal(m):
        u = lax.with_sharding_constraint(jnp.tanh(m), D)
        product = (u @ u.T) @ lax.with_sharding_constraint(u, P(None, "data"))
        return m - lax.with_sharding_constraint(product, D)

    with jax.set_mesh(mesh):
        found = hints(jax.jit(orthogonal), structs(mesh, [((64, 64), D)]))
    assert [h for h in found if h.kind == "gathered too"] == []


def test_an_output_over_half_of_an_axis(platform):
    """Two rows are on two of four devices: no spec says so."""
    mesh = platform[1]
    given = structs(mesh, [((64, 32), D)])
    f = jax.jit(lambda x: jnp.tanh(x).reshape(2, 32, 32).max(1))
    assert {e.axes for e in testing.account(f, *given) if e.kind == "all-gather"} == {None}
    assert hints(f, given) == []


# -- one program of each sort ---------------------------------------------------------------------

X, Y = ((256, 64), D), ((256, 64), D)
UP, DOWN = ((64, 256), P()), ((256, 64), P())
MODEL = "model"


def mlp(up, down, x):
    return jax.nn.gelu(x @ up) @ down


def sgd(loss):
    def step(*args):
        value, grads = jax.value_and_grad(loss, (0, 1))(*args)
        return value, [w - 0.1 * g for w, g in zip(args, grads)]

    return step


def squares(up, down, x, y):
    return jnp.mean((mlp(up, down, x) - y) ** 2)


def batch_norm(up, down, x, y):
    h = x @ up
    h = (h - h.mean(0)) / jnp.sqrt(h.var(0) + 1e-5)
    return jnp.mean((jax.nn.relu(h) @ down - y) ** 2)


def solve(a, b):
    return lax.fori_loop(0, 20, lambda _, x: x - 0.1 * (a @ x - b), jnp.zeros_like(b))


def clusters(x, centers):
    nearest = jnp.argmin(((x[:, None] - centers) ** 2).sum(-1), -1)
    ones = jax.nn.one_hot(nearest, len(centers))
    return (ones.T @ x) / jnp.maximum(ones.sum(0), 1)[:, None]


def power(x):
    def step(_, v):
        u = x.T @ (x @ v)
        return u / jnp.linalg.norm(u)

    return lax.fori_loop(0, 10, step, jnp.ones(x.shape[1]))


def stencil(u):
    step = lambda _, u: u + 0.1 * (jnp.roll(u, 1, 0) + jnp.roll(u, -1, 0) - 2 * u)  # noqa: E731
    return lax.fori_loop(0, 10, step, u)


def in_turn(w, x):
    """Microbatches of each device's own rows."""
    parts = x.reshape(-1, 4, x.shape[1]).swapaxes(0, 1)
    parts = lax.with_sharding_constraint(parts, P(None, "data"))
    return lax.scan(lambda total, part: (total + jnp.tanh(part @ w), None), x[:64] * 0, parts)[0]


def cross_entropy(w, x, labels):
    """Of a vocabulary that is sharded over model."""
    logits = x @ w
    chosen = jax.nn.one_hot(labels, w.shape[1])
    return jnp.mean(jax.nn.logsumexp(logits, -1) - (logits * chosen).sum(-1))


def by_way_of(x):
    for spec in (D, P("data", MODEL), P(None, MODEL)):
        x = lax.with_sharding_constraint(jnp.tanh(x), spec)
    return x


def padded(x):
    return lax.with_sharding_constraint(jnp.pad(jnp.tanh(x), ((0, 2), (0, 0))), D) * 2


JITS = {
    "data_parallel": (sgd(squares), [UP, DOWN, X, Y]),
    "batch_norm": (sgd(batch_norm), [UP, DOWN, X, Y]),
    "tensor_parallel": (sgd(squares), [((64, 256), P(None, MODEL)), ((256, 64), P(MODEL)), X, Y]),
    "evaluation": (lambda up, down, x: (mlp(up, down, x).argmax(-1) == 3).sum(), [UP, DOWN, X]),
    "lookup": (lambda w, x: w[x].sum(1), [((512, 64), P()), ((64, 8), D, jnp.int32)]),
    "embedding": (
        jax.grad(lambda w, x: jnp.mean(jnp.tanh(w[x]) ** 2)),
        [((512, 64), P()), ((64, 8), D, jnp.int32)],
    ),
    "solvers": (jax.vmap(solve), [((32, 16, 16), D), ((32, 16), D)]),
    "k_means": (clusters, [((512, 16), D), ((8, 16), P())]),
    "power_iteration": (power, [((512, 64), D)]),
    "stencil": (stencil, [((512, 64), D)]),
    "microbatches": (in_turn, [((64, 64), P()), X]),
    "cross_entropy": (cross_entropy, [((64, 512), P(None, MODEL)), X, ((256,), D, jnp.int32)]),
    "by_way_of": (by_way_of, [((1024, 512), D)]),
    "gradient_norm": (lambda g: jnp.sqrt(jnp.sum(g * g)), [((128, 512), P(None, "data"))]),
    "padded": (padded, [((30, 64), P())]),
}


def gathered(up, down, x):
    """Fully sharded: each layer gathers its weights, and its gradient scatters them."""
    up, down = (lax.all_gather(w, "data", tiled=True) for w in (up, down))
    return lax.pmean(jnp.mean(mlp(up, down, x) ** 2), "data")


def sequence_parallel(up, down, x):
    h = lax.all_gather(x, "model", axis=0, tiled=True)
    return x + lax.psum_scatter(mlp(up, down, h), "model", scatter_dimension=0, tiled=True)


def experts(up, down, x):
    """Each device's rows for each expert, there and back."""
    rows = lax.all_to_all(x.reshape(4, -1, x.shape[1]), "data", 0, 0, tiled=True)
    h = mlp(up[0], down[0], rows.reshape(-1, x.shape[1])).reshape(rows.shape)
    return x + lax.all_to_all(h, "data", 0, 0, tiled=True).reshape(x.shape)


def ring(q, k, v):
    def step(carry, _):
        k, v, out, total = carry
        p = jnp.exp(jnp.einsum("hqd,hkd->hqk", q, k) / 8)
        out, total = out + jnp.einsum("hqk,hkd->hqd", p, v), total + p.sum(-1)
        k, v = (lax.ppermute(a, "data", [(j, (j + 1) % 4) for j in range(4)]) for a in (k, v))
        return (k, v, out, total), None

    _, _, out, total = lax.scan(step, (k, v, q * 0, q[..., 0] * 0), None, length=4)[0]
    return out / total[..., None]


def accumulated(w, xs):
    add = lambda g, x: (g + jax.grad(loss)(w, x), None)  # noqa: E731
    return lax.pmean(lax.scan(add, w * 0, xs)[0], "data")


SEQUENCE = ((8, 512, 64), P(None, "data"))
EXPERTS = [((4, 64, 256), D), ((4, 256, 64), D), X]
MAPS = {
    "fully_sharded": (gathered, [(UP[0], D), (DOWN[0], D), X], P()),
    "sequence_parallel": (
        sequence_parallel,
        [((64, 256), P(None, MODEL)), ((256, 64), P(MODEL)), ((256, 64), P(MODEL))],
        P(MODEL),
    ),
    "experts": (experts, EXPERTS, D),
    "ring_attention": (ring, [SEQUENCE] * 3, P(None, "data")),
    "accumulated": (accumulated, [WEIGHTS, ((4, 256, 128), P(None, "data"))], P()),
}


@pytest.mark.one_lane
@pytest.mark.parametrize("name", [*JITS, *MAPS])
def test_a_program_as_it_should_be_is_silent(platform, name):
    mesh = platform[1]
    if name in JITS:
        body, args = JITS[name]
        f = jax.jit(body)
    else:
        body, args, outs = MAPS[name]
        f = program(mesh, body, args, outs)
        if name == "fully_sharded":
            specs = tuple(spec for _, spec in args)
            f = jax.shard_map(body, mesh=mesh, in_specs=specs, out_specs=outs)
            f = jax.jit(jax.grad(f, (0, 1)))
    with jax.set_mesh(mesh):
        content = report.content(testing.judge(f.lower(*structs(mesh, args)).compile()))
    assert content.clean and content.changes == (), report.plain(content)
    assert content.spent in content.about
