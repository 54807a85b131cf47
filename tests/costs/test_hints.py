"""What a needed collective could cost less: each hint, and programs that must not get it."""

import jax
import jax.numpy as jnp
import programs
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

from shardrules import testing
from shardrules.costs import waste


def hints(mesh, body, in_specs, out_specs, *shapes):
    # Unchecked, as without a rule for a kernel: what is returned replicated is not looked at.
    mapped = jax.shard_map(body, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False)
    args = programs.structs(mesh, *zip(shapes, in_specs))
    return waste.hints(testing.judge(jax.jit(mapped).lower(*args).compile()))


def gather(x):
    return lax.all_gather(x, "data", tiled=True)


def test_a_gather_that_is_only_returned(platform):
    (hint,) = hints(platform[1], gather, (P("data"),), P(), (1024, 128))
    assert (hint.kind, hint.bytes_before, hint.bytes_after) == ("only returned", 131072, 0)
    assert hint.advice == (
        "its result is only returned: leave that output sharded over data, with the axis in its "
        "out_specs instead of the all_gather, and 131072 B become 0 B (the array is the same; a "
        "device then holds its shard of it)"
    )


@pytest.mark.parametrize(
    "body, out_specs",
    [
        (lambda x: gather(x) * 2, P()),
        (lambda x: (lambda y: (y, y.sum(0)))(gather(x)), (P(), P())),
        (lambda x: lax.sort(gather(x), dimension=0), P()),
        (lambda x: gather(x).reshape(-1), P()),
        (lambda x: lax.all_gather(x, "data", axis=1, tiled=True).reshape(-1), P()),
    ],
    ids=["computed", "used too", "sorted", "reshaped", "reshaped across"],
)
def test_a_gather_that_is_used(cpu_mesh, body, out_specs):
    assert hints(cpu_mesh, body, (P("data"),), out_specs, (1024, 128)) == []


def accumulate(body, **kwargs):
    def f(x, ws):
        start = jnp.zeros((x.shape[0], ws.shape[2]), jnp.float32)
        return lax.scan(lambda c, w: body(c, x, w), start, ws, **kwargs)[0]

    return f


SPECS = (P(None, "model"), P(None, "model"))
SHAPES = ((64, 32), (8, 32, 48))


def test_a_sum_that_a_scan_accumulates(platform):
    """Eight trips of 64 x 48 floats; for TPU and GPU, XLA moves it behind the loop itself."""
    found = hints(
        platform[1],
        accumulate(lambda c, x, w: (c + lax.psum(jnp.tanh(x @ w), "model"), None)),
        SPECS,
        P(),
        *SHAPES,
    )
    if platform[0] != "cpu":
        assert found == []
        return
    (hint,) = found
    assert (hint.kind, hint.bytes_before, hint.bytes_after) == ("after the loop", 98304, 12288)
    assert hint.advice == (
        "its results are only added up over the loop's trips: carry the sum of its operands and "
        "psum that once after the loop, and 98304 B in 8 round trips become 12288 B in 1 (equal up "
        "to rounding)"
    )


@pytest.mark.parametrize(
    "body",
    [
        lambda c, x, w: (c - lax.psum(jnp.tanh(x @ w), "model"), None),
        lambda c, x, w: (c * 0.5 + lax.psum(jnp.tanh(x @ w), "model"), None),
        lambda c, x, w: (c + lax.psum(jnp.tanh(x @ w + c), "model"), None),
        lambda c, x, w: (c + jnp.tanh(lax.psum(x @ w, "model")), None),
        lambda c, x, w: (c + lax.pmax(jnp.tanh(x @ w), "model"), None),
        lambda c, x, w: (jnp.tanh(c + lax.psum(jnp.tanh(x @ w), "model")), None),
        lambda c, x, w: (c + lax.psum(jnp.tanh(x @ w), "model"), c[0]),
    ],
    ids=[
        "subtracted",
        "scaled carry",
        "carry read",
        "not linear",
        "maximum",
        "outside",
        "carry kept too",
    ],
)
def test_sums_that_must_stay_in_the_loop(cpu_mesh, body):
    def f(x, ws):
        start = jnp.zeros((x.shape[0], ws.shape[2]), jnp.float32)
        return lax.scan(lambda c, w: body(c, x, w), start, ws)

    found = hints(cpu_mesh, f, SPECS, P(), *SHAPES)
    assert not [h for h in found if h.kind == "after the loop"]
