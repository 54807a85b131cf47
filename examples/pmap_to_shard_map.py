"""jax#2926: three programs as jit of pmap and as jit of shard_map.

    python examples/pmap_to_shard_map.py

An array that the program closes over (2 GB in the report, 2 MB here) and that lands on each
device; a while_loop of data-dependent length with a kernel in its body, inside of shard_map; and
evolution strategies, where each device sends one number to the others on each step.
"""

import os

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import shardrules
from shardrules import hlo, report, testing
from shardrules.costs import placement
from shardrules.errors import CostAssertionError

COUNT, STEPS, WIDTH = 8, 5, 64
TABLE = np.random.default_rng(0).standard_normal((2, 1 << 18), np.float32)  # 2 MB


def mesh():
    return Mesh(np.array(jax.devices()[:COUNT]), ("i",))


# -- an array that is closed over ------------------------------------------------------------------


def lookup(x, table):
    return jnp.sin(x @ table).sum(-1)


def closed_over_pmap(x):
    return jax.pmap(lambda x: lookup(x, TABLE))(x)


def closed_over(x):
    body = lambda x: lookup(x, TABLE)  # noqa: E731
    return jax.shard_map(body, mesh=mesh(), in_specs=P("i"), out_specs=P("i"))(x)


def passed(x, table):
    """Take the array as an argument, an eighth of it on each device."""

    def body(x, columns):
        shares = lookup(jax.lax.all_gather(x, "i", tiled=True), columns)
        return jax.lax.psum_scatter(shares, "i", tiled=True)

    specs = P("i"), P(None, "i")
    return jax.shard_map(body, mesh=mesh(), in_specs=specs, out_specs=P("i"))(x, table)


# -- a while_loop of its own length on each device -------------------------------------------------


def halve_kernel(x_ref, o_ref):
    o_ref[...] = x_ref[...] * 0.5


def halve(x):
    return pl.pallas_call(
        halve_kernel, out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype), interpret=True
    )(x)


def until_small(x):
    """Halve until the norm is below 1; count the trips."""

    def body(state):
        return halve(state[0]), state[1] + 1

    return jax.lax.while_loop(lambda state: jnp.vdot(state[0], state[0]) > 1, body, (x, 0))


def loops_pmap(x):
    return jax.pmap(until_small)(x)


def loops(x):
    def body(x):
        x, trips = until_small(x[0])
        return x[None], trips[None]

    return jax.shard_map(body, mesh=mesh(), in_specs=P("i"), out_specs=P("i"))(x)


# -- evolution strategies: one number from each device on each step --------------------------------


def fitness(parameters):
    return -((parameters - 3) ** 2).sum()


def noise(key, step, member):
    key = jax.random.fold_in(jax.random.fold_in(key, step), member)
    return jax.random.normal(key, (WIDTH,))


def evolve(parameters, key):
    """Every device draws the others' noise again, so only their fitness is sent."""
    me = jax.lax.axis_index("i")

    def step(parameters, n):
        mine = fitness(parameters + 0.1 * noise(key, n, me))
        scores = jax.lax.all_gather(mine, "i")
        scores = (scores - scores.mean()) / (scores.std() + 1e-6)
        drawn = jax.vmap(functools.partial(noise, key, n))(jnp.arange(COUNT))
        return parameters + 0.05 * scores @ drawn, None

    return jax.lax.scan(step, parameters, jnp.arange(STEPS))[0]


def evolution_pmap(parameters, key):
    evolved = jax.pmap(lambda _, p, k: evolve(p, k), "i", in_axes=(0, None, None))
    return evolved(jnp.arange(COUNT), parameters, key)


def evolution(parameters, key):
    found = jax.shard_map(
        lambda p, k: evolve(jax.lax.pcast(p, "i", to="varying"), k)[None],
        mesh=mesh(),
        in_specs=(P(), P()),
        out_specs=P("i"),
    )(parameters, key)
    return found


def account(name, f, *args):
    """Compile one way; return it, and its row of the table."""
    compiled = jax.jit(f).lower(*args).compile()
    module = hlo.parse(compiled.as_text())
    carried = sum(c.bytes * c.device_count for c in placement.constants(module, 1 << 16))
    shardings = {
        str(getattr(s, "spec", s)) for s in jax.tree_util.tree_leaves(compiled.output_shardings)
    }
    try:
        moved = testing.account(compiled).total
        moved = f"{moved.count} collectives, {moved.bytes} B"
    except shardrules.errors.ShardrulesError as error:
        moved = str(error).splitlines()[0]
    return compiled, [name, f"{carried >> 10} kB", moved, ", ".join(sorted(shardings))]


def main():
    rows = [["program", "constants on all devices", "moved, a device", "outputs"]]
    shard = NamedSharding(mesh(), P("i"))
    x = jnp.arange(16.0).reshape(COUNT, 2)
    sharded = jax.device_put(x, shard)
    table = jax.device_put(TABLE, NamedSharding(mesh(), P(None, "i")))
    for name, f, args in (
        ("closed over, jit(pmap)", closed_over_pmap, (x,)),
        ("closed over, jit(shard_map)", closed_over, (sharded,)),
        ("passed, jit(shard_map)", passed, (sharded, table)),
    ):
        compiled, row = account(name, f, *args)
        rows.append(row)
        np.testing.assert_allclose(jax.jit(f)(*args), lookup(x, TABLE), rtol=1e-2, atol=1.0)
        try:
            testing.assert_no_large_constants(compiled)
        except CostAssertionError as error:
            message = str(error)

    with shardrules.install():
        data = jnp.arange(1.0, 1 + COUNT * 4).reshape(COUNT, 4) ** 2
        compiled, row = account("while_loop with a kernel, jit(shard_map)", loops, data)
        rows.append(row)
        done, trips = jax.jit(loops)(data)
        expected = [until_small(row) for row in data]
        np.testing.assert_array_equal(done, [e[0] for e in expected])
        np.testing.assert_array_equal(trips, [e[1] for e in expected])
        rows.append(account("while_loop with a kernel, jit(pmap)", loops_pmap, data)[1])

    start, key = jnp.zeros(WIDTH), jax.random.PRNGKey(0)
    rows.append(account("evolution, jit(pmap)", evolution_pmap, start, key)[1])
    compiled, row = account("evolution, jit(shard_map)", evolution, start, key)
    rows.append(row)
    every = jax.jit(evolution)(start, key)
    np.testing.assert_array_equal(every, np.broadcast_to(every[0], every.shape))
    np.testing.assert_allclose(jax.jit(evolution_pmap)(start, key), every, rtol=1e-4)
    assert fitness(every[0]) > fitness(start)
    testing.assert_collectives(
        compiled, expect={"all-gather(i)": {"count": STEPS, "bytes": 4 * STEPS}}
    )
    testing.assert_output_sharding(compiled, expect=P("i"))

    print(report.table(rows))
    print(f"\nTrips of the while_loop on each device: {[int(t) for t in trips]}")
    print(f"Evolution sends {STEPS} x 4 B from each device, as assert_collectives wants it.")
    print(f"\nWhat assert_no_large_constants says of the closed-over array:\n\n{message}")


if __name__ == "__main__":
    main()
