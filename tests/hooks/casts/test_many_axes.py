"""Casts on meshes of many axes: those of one device cost nothing, and the search is bounded."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.extend.core import check_jaxpr
from jax.sharding import AbstractMesh, AxisType, Mesh
from jax.sharding import PartitionSpec as P

import shardrules as sr
from hooks.casts import bodies, optimum, promise
from shardrules.hooks.casts import cheapest, placing
from shardrules.unchecked import retrace

pytestmark = pytest.mark.one_lane

ONES = tuple(f"one{i}" for i in range(10))


def paper(names):
    """Return a mesh of two devices along each axis, of which none is there."""
    return AbstractMesh((2,) * len(names), tuple(names), (AxisType.Auto,) * len(names))


SIXTEEN = paper("abcdefghijklmnop")  # 65,536 devices


def mesh_of(*ones):
    """Return a mesh of 4 data x 2 tensor; its other axes are of one device each."""
    devices = np.array(jax.devices()).reshape(4, *(1 for _ in ones), 2)
    return Mesh(devices, ("data", *ones, "tensor"))


@pytest.fixture
def searched(monkeypatch):
    """For each search: its graph, its labels, and how many labels its cuts chose."""
    found, chosen = [], []
    solve, cut = placing.cheapest, cheapest.Cut

    def counted(limits, *args, **kwargs):
        chosen.append(len(limits.free))
        return cut(limits, *args, **kwargs)

    def search(limits):
        limits.least_bytes  # kept: it takes cuts that are not the search's
        chosen.clear()
        labels = solve(limits)
        found.append((limits.graph, labels, sum(chosen)))
        return labels

    monkeypatch.setattr(cheapest, "Cut", counted)
    monkeypatch.setattr(placing, "cheapest", search)
    return found


def gradient(body):
    with sr.install(casts="cheapest"):
        gradient = jax.grad(body.split(), argnums=(0, 1))
        closed = jax.make_jaxpr(gradient)(*body.arguments())
    check_jaxpr(closed.jaxpr)
    return closed


@pytest.mark.parametrize("seed", range(3))
def test_sixteen_axes_are_at_the_lower_bound(seed, searched):
    gradient(bodies.Body(seed, SIXTEEN))
    for graph, labels, _ in searched:
        assert cheapest.cost(graph, labels).bytes == cheapest.Limits(graph).least_bytes
    assert searched


def test_the_work_of_a_search_is_bounded(searched, monkeypatch):
    monkeypatch.setattr(cheapest, "_WORK", 20_000)
    gradient(bodies.Body(1, SIXTEEN, steps_count=40))
    for graph, labels, work in searched:
        limits = cheapest.Limits(graph)
        assert len(limits.groups) == 16
        # The order that is begun is cut to its end, and the bound takes a cut for each group.
        assert work < 20_000 + 40 * len(limits.free)
        assert cheapest.cost(graph, labels).bytes <= cheapest.cost_as_traced(graph).bytes
    assert searched


@pytest.mark.parametrize("seed", range(5))
def test_four_axes_reach_the_optimum(seed, searched):
    gradient(bodies.Body(seed, paper("abcd")))
    for graph, labels, _ in searched:
        assert cheapest.cost(graph, labels).bytes == optimum.cheapest_bytes(graph)
    assert searched


def total(ones):
    """The loss of scanned layers that share their weights, which is summed over the batch."""
    mesh = mesh_of(*ones)

    def local(w, scale, x):
        def step(h, _):
            return jnp.tanh((h * scale) @ w) + h, None

        h, _ = lax.scan(step, x, None, length=5)
        return lax.psum((h**2).sum(), ("data", *ones))

    specs = P(), P(), P(("data", *ones))
    return jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=P())


def test_axes_of_one_device_cost_nothing(searched):
    args = (
        np.linspace(-1, 1, 64, dtype=np.float32).reshape(8, 8),
        np.linspace(0, 1, 8, dtype=np.float32),
        np.linspace(0, 1, 128, dtype=np.float32).reshape(16, 8),
    )
    figures, work, got = [], [], []
    for ones in ((), ONES):
        for casts in ("late", "cheapest"):
            with sr.install(casts=casts):
                f = jax.grad(total(ones), argnums=(0, 1))
                closed = jax.make_jaxpr(f)(*args)
                got.append(jax.jit(f)(*args))
            figures.append(promise.summed(closed.jaxpr, mesh_of(*ones).shape))
        work.append(sum(one for *_, one in searched))
        searched.clear()
    assert figures[:2] == figures[2:] and figures[1] < figures[0]
    assert work[1] <= 4 * work[0]
    for other in got[1:]:
        for one, value in zip(got[0], other):
            np.testing.assert_allclose(one, value, rtol=1e-5)


def test_a_sum_over_an_axis_of_one_device_is_not_counted():
    mesh = mesh_of("one")
    specs = P(("data", "one"))

    def sums(axes):
        f = jax.shard_map(
            lambda x: lax.psum(x, axes), mesh=mesh, in_specs=specs, out_specs=specs, check_vma=False
        )
        return list(retrace.sums(jax.make_jaxpr(f)(jnp.ones(8))))

    assert not sums(("one",))
    (both,) = sums(("data", "one"))
    assert both.group_size == 4
