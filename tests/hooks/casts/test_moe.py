"""Blocks as MaxText has them: the check off's bytes at most, and one device's gradients."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from costs.blocks import grouped
from jax import lax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import shardrules as sr
from shardrules import testing

pytestmark = pytest.mark.one_lane

EXPERTS, WIDTH, HIDDEN, ROWS, TOP = 4, 8, 16, 32, 2


def routed(params, x):
    """Rows sorted by expert, each one's gates, and the way back."""
    gates, chosen = lax.top_k(jax.nn.softmax(x @ params["router"]), TOP)
    order = jnp.argsort(chosen.reshape(-1), stable=True)
    sizes = (chosen.reshape(-1, 1) == jnp.arange(EXPERTS)).sum(0)
    return gates, order, sizes


def experts(params, rows, sizes):
    h = jax.nn.silu(grouped(rows, params["gate"], sizes)) * grouped(rows, params["up"], sizes)
    return grouped(h, params["down"], sizes)


def back(out, order, gates):
    out = jnp.zeros_like(out).at[order].set(out).reshape(*gates.shape, -1)
    return (out * gates[..., None]).sum(1)


def fsdp_tensor(params, x):
    """Weights gathered over fsdp, their hidden width over tensor; rows over fsdp."""
    names = ("gate", "up", "down")
    gathered = {n: lax.all_gather(params[n], "fsdp", axis=0, tiled=True) for n in names}
    params = params | gathered
    gates, order, sizes = routed(params, x)
    out = lax.psum(experts(params, jnp.repeat(x, TOP, axis=0)[order], sizes), "tensor")
    return x + back(out, order, gates)


def expert_tensor(params, x):
    """Each device's experts alone; the others' rows are zeros, and all are summed."""
    gates, order, sizes = routed(params, x)
    first = lax.axis_index("expert") * params["gate"].shape[0]
    count = params["gate"].shape[0]
    rows = jnp.repeat(x, TOP, axis=0)[order]
    start = jnp.where(jnp.arange(EXPERTS) < first, sizes, 0).sum()
    mine = lax.dynamic_slice(sizes, (first,), (count,))
    inside = (jnp.arange(rows.shape[0]) >= start) & (jnp.arange(rows.shape[0]) < start + mine.sum())
    out = experts(params, jnp.roll(jnp.where(inside[:, None], rows, 0), -start, axis=0), mine)
    out = jnp.where(inside[:, None], jnp.roll(out, start, axis=0), 0)
    return x + back(lax.psum(out, ("expert", "tensor")), order, gates)


def context_attention(params, x):
    """Attention over rows that are split over context: keys and values are gathered."""
    q, k, v = ((x @ params[name]).reshape(len(x), -1, WIDTH) for name in "qkv")  # by heads
    k, v = (lax.all_gather(one, "context", axis=0, tiled=True) for one in (k, v))
    scores = jax.nn.softmax(jnp.einsum("qhd,khd->hqk", q, k) / WIDTH**0.5)
    out = jnp.einsum("hqk,khd->qhd", scores, v).reshape(len(x), -1)
    return x + lax.psum(out @ params["out"], "tensor")


WIDE = P(None, None, "tensor")
BLOCKS = {
    "fsdp x tensor": (
        fsdp_tensor,
        ("fsdp", "tensor"),
        P("fsdp"),
        {
            "router": P(),
            "gate": P("fsdp", None, "tensor"),
            "up": P("fsdp", None, "tensor"),
            "down": P("fsdp", "tensor"),
        },
    ),
    "expert x tensor": (
        expert_tensor,
        ("expert", "tensor"),
        P(),
        {
            "router": P(),
            "gate": P("expert", None, "tensor"),
            "up": P("expert", None, "tensor"),
            "down": P("expert", "tensor"),
        },
    ),
    "context parallel": (
        context_attention,
        ("context", "tensor"),
        P("context"),
        {
            "q": P(None, "tensor"),
            "k": P(None, "tensor"),
            "v": P(None, "tensor"),
            "out": P("tensor"),
        },
    ),
}


def arrays(specs):
    rng = np.random.RandomState(0)
    shapes = {"router": (WIDTH, EXPERTS), "out": (HIDDEN, WIDTH)}
    shapes |= dict.fromkeys("qkv", (WIDTH, HIDDEN))
    shapes |= dict.fromkeys(("gate", "up"), (EXPERTS, WIDTH, HIDDEN))
    shapes |= {"down": (EXPERTS, HIDDEN, WIDTH)}
    made = {name: rng.randn(*shapes[name]).astype(np.float32) * 0.3 for name in specs}
    return made, rng.randn(ROWS, WIDTH).astype(np.float32)


def moved(program):
    found = testing.account(program, level="logical").by("kind").get(("all-reduce",))
    return (found.bytes, found.wire_bytes) if found else (0, 0)


@pytest.mark.slow
@pytest.mark.parametrize("name", BLOCKS)
def test_at_most_the_bytes_of_the_check_off(name):
    body, axes, rows, specs = BLOCKS[name]
    devices = np.array(jax.devices()[:8])
    args, found = arrays(specs), {}

    def gradient(mesh, check):
        f = jax.shard_map(body, mesh=mesh, in_specs=(specs, rows), out_specs=rows, check_vma=check)
        return jax.jit(jax.grad(lambda params, x: (f(params, x) ** 2).sum(), (0, 1)))

    mesh = Mesh(devices.reshape(4, 2), axes)
    for arm, casts, check in (
        ("off", "late", False),
        ("late", "late", True),
        ("cheapest", "cheapest", True),
    ):
        with sr.install(casts=casts):
            found[arm] = gradient(mesh, check).lower(*args)
    for arm in ("off", "late"):
        assert all(a <= b for a, b in zip(moved(found["cheapest"]), moved(found[arm]))), arm
    with sr.install(casts="late"):
        want = gradient(Mesh(devices[:1].reshape(1, 1), axes), True)(*args)
    got = found["cheapest"].compile()(*args)
    for one, other in zip(jax.tree.leaves(got), jax.tree.leaves(want)):
        np.testing.assert_allclose(one, other, rtol=1e-3, atol=1e-4)
