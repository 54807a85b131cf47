"""Silent costs: what is read from the compiled module, against what happens when it runs."""

from __future__ import annotations

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from shardrules import hlo, testing
from shardrules.costs import placement
from shardrules.errors import CostAssertionError


def update(state, unused, x):
    """An optimiser's step in which one moment changes its type."""
    m = 0.9 * state["m"] + x
    return {"w": state["w"] - m, "m": m.astype(jnp.bfloat16), "count": state["count"] + 1}, x.sum()


def flip(a, b):
    return a.reshape(4, 8), a.sum() + b.astype(jnp.float32)


def swap(a, b):
    return b, a


def add(a, b):
    return a + b


F32, I32 = ((8, 4), jnp.float32), ((), jnp.int32)
PROGRAMS = {
    "update": (update, [{"w": F32, "m": F32, "count": I32}, ((3,), jnp.float32), F32], (0, 1)),
    "flip": (flip, [F32, ((8,), jnp.int8)], (0, 1)),
    "swap": (swap, [F32, F32], (0, 1)),
    "add": (add, [F32, F32], (0, 1)),
    "one of two": (swap, [F32, ((8, 4), jnp.bfloat16)], (1,)),
}


def is_leaf(x):
    return isinstance(x, tuple) and isinstance(x[0], tuple)


def tells_aliased_bytes():
    """JAX 0.4.28 says 0 on CPU whatever is aliased."""
    donating = jax.jit(lambda x: x + 1, donate_argnums=0)
    return donating.lower(jnp.ones(8)).compile().memory_analysis().alias_size_in_bytes == 32


@pytest.mark.filterwarnings("ignore:Some donated buffers")
@pytest.mark.parametrize("sharded", [False, True], ids=["one device", "sharded"])
@pytest.mark.parametrize("name", PROGRAMS)
def test_the_alias_table_is_what_happens(name, sharded, cpu_mesh):
    f, structs, donated = PROGRAMS[name]

    def put(struct):
        x = jnp.ones(*struct)
        if not sharded:
            return x
        spec = P("data") if x.ndim and x.shape[0] % 4 == 0 else P()
        return jax.device_put(x, NamedSharding(cpu_mesh, spec))

    args = jax.tree_util.tree_map(put, structs, is_leaf=is_leaf)
    jitted = jax.jit(f, donate_argnums=donated)
    try:
        leaves = testing.assert_donated(jitted, *args)
    except CostAssertionError as error:
        leaves = error.leaves
    stats = jitted.lower(*args).compile().memory_analysis()
    arrays = jax.tree_util.tree_leaves(args)
    assert [v.donated for v in leaves] == [
        n in donated for n, arg in enumerate(args) for _ in jax.tree_util.tree_leaves(arg)
    ]
    jax.block_until_ready(jitted(*args))
    assert [v.status == "aliased" for v in leaves] == [array.is_deleted() for array in arrays]
    if tells_aliased_bytes():
        aliased = sum(v.bytes for v in leaves if v.status == "aliased")
        assert stats.alias_size_in_bytes == aliased


def test_the_report_names_paths_bytes_and_reason():
    args = jax.tree_util.tree_map(
        lambda s: jax.ShapeDtypeStruct(*s), PROGRAMS["update"][1], is_leaf=is_leaf
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with pytest.raises(CostAssertionError) as caught:
            testing.assert_donated(jax.jit(update, donate_argnums=(0, 1)), *args)
    assert str(caught.value).splitlines()[1::2] == [
        # The first argument that fits has it: output [0]['w'] is written where state['m'] was.
        "  state['w'], f32[8,4], 128 B: output [0]['m'] is bf16[8,4]",
        "  unused, f32[3], 12 B: the compiled program does not take it",
    ]


def test_callbacks_are_found_with_their_loops():
    def f(x):
        def body(c, _):
            y = jax.pure_callback(np.asarray, jax.ShapeDtypeStruct(c.shape, c.dtype), c)
            return c * 2 + y, None

        return jax.lax.scan(body, x, None, length=5)[0]

    with pytest.raises(CostAssertionError) as caught:
        testing.assert_no_host_transfers(f, jnp.ones(8))
    [found] = caught.value.transfers
    assert (found.kind, found.runs, found.loop_depth) == ("callback", 5, 1)
    assert "test_costs.py" in found.source
    assert testing.assert_no_host_transfers(lambda x: x * 2, jnp.ones(8)) == []


def test_a_pmap_under_a_jit():
    """To JAX 0.7 its output is gathered on every device, from 0.8 on it stays where it is."""
    table = np.random.default_rng(0).standard_normal((2, 4096), np.float32)
    f = jax.jit(jax.pmap(lambda x: jnp.sin(x @ table).sum(-1)))
    x = jnp.ones((8, 2))
    with pytest.raises(CostAssertionError) as caught:
        testing.assert_no_large_constants(f, x, max_bytes=1000)
    [constant] = caught.value.constants
    assert (constant.bytes, constant.device_count) == (table.nbytes, 8)
    assert "test_costs.py:" in constant.source
    module = hlo.parse(f.lower(x).compile().as_text())
    whole = f(x).sharding.is_fully_replicated
    if whole:
        assert "jax.pmap" in str(caught.value)
    found = placement.gathered(module)
    assert [(g.bytes_before, g.bytes_after) for g in found] == ([(4, 32)] if whole else [])
