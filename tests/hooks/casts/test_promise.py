"""The promise: no more bytes than late casts, nor than the check off but where explain says why."""

from __future__ import annotations

import math
import re

import jax
import numpy as np
import pytest
from jax.sharding import Mesh

import shardrules as sr
from hooks.casts import bodies, promise
from hooks.casts.test_placing import MESHES


def harder_body(seed):
    shape, axes = MESHES[seed % len(MESHES)]
    devices = np.array(jax.devices()[: math.prod(shape)])
    return bodies.HarderBody(seed, Mesh(devices.reshape(shape), axes))


def check_promise(seed):
    body = harder_body(seed)
    figures, above = promise.compare(body)
    reasons = promise.reasons(body) if above else []
    assert "above late" not in above, (seed, figures)
    assert not above or (reasons and "unknown" not in reasons), (seed, figures)
    return bool(above)


@pytest.mark.slow
def test_random_bodies_keep_the_promise(share):
    assert any([check_promise(seed) for seed in share(range(40))])  # some exception is among them


@pytest.mark.full
def test_2000_random_bodies_keep_the_promise():
    for seed in range(40, 2000):
        check_promise(seed)


@pytest.mark.parametrize("seed", [8, 500, 502])
def test_gradients_of_harder_bodies_are_the_late_ones(seed):
    """In the first, a bwd differentiates by residuals, over an axis over which it was not run."""
    body, found = harder_body(seed), {}
    params, x = body.arguments()
    for casts in ("late", "cheapest"):
        with sr.install(casts=casts):
            found[casts] = jax.jit(jax.grad(body.split(), argnums=(0, 1)))(params, x)
    for one, other in zip(*map(jax.tree.leaves, found.values())):
        np.testing.assert_allclose(one, other, rtol=2e-4, atol=2e-4)


@pytest.mark.slow
def test_explain_and_the_report_name_an_exception_with_both_figures():
    body = harder_body(500)
    params, x = body.arguments()
    gradient = jax.grad(body.split(), argnums=(0, 1))
    beyond = (
        r" sum at least 1,024 B on each device, and 768 B with the check off: the operation at "
        r"\S*bodies\.py:\d+ takes whole cotangents \(opaque, or a solve that iterates\)"
    )
    text = " ".join(str(sr.explain(gradient, params, x)).split())
    assert re.search(f"the psums of these cotangents{beyond}$", text)
    with sr.install(), sr.watch() as seen:
        jax.jit(gradient)(params, x)
    place = r"tests/hooks/casts/bodies\.py:\d+"
    assert re.search(f"the psums of the gradient of local at {place}{beyond}", str(seen))
    with sr.install(), sr.watch() as seen:
        jax.jit(jax.grad(lambda w: w.sum()))(x)
    assert "check off" not in str(seen)
