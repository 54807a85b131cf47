"""The cheapest casts of real programs' steps (benchmarks/models.py), on a mesh of twelve axes."""

import pathlib
import sys

import jax
import numpy as np
import pytest

sys.path.insert(0, str(pathlib.Path(__file__).parents[3] / "benchmarks"))
import models

pytestmark = [pytest.mark.one_lane, pytest.mark.filterwarnings("ignore:shardrules.vary")]


@pytest.mark.sampled
@pytest.mark.slow
@pytest.mark.parametrize("make", models.MODELS, ids=lambda make: make.__name__)
def test_cheapest_moves_no_more_than_any_other_arm(make):
    model = make()
    mesh = model.mesh(jax.devices())
    arms = ("off", "late", "cheapest", "by hand")
    steps = {arm: models.lowered(model, mesh, arm).compile() for arm in arms}
    operands, wire, verdicts = models.figures(steps["cheapest"])
    assert set(verdicts) == {"needed"}
    for arm, step in steps.items():
        others = models.figures(step)[:2]
        assert operands <= others[0] and wire <= others[1], (arm, operands, wire, others)
    arguments = [
        jax.tree.map(lambda x, like: jax.device_put(x, like.sharding), *each)
        for each in zip(model.arguments, model.shapes(mesh))
    ]
    found, plain = steps["cheapest"](*arguments), steps["off"](*arguments)
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(plain), strict=True):
        np.testing.assert_allclose(one, other, rtol=2e-4, atol=2e-4 * np.abs(other).max())


@pytest.mark.slow
@pytest.mark.parametrize("make", [models.fsdp, models.context], ids=lambda make: make.__name__)
def test_placing_casts_takes_few_function_calls(make):
    """In these two, of all models, it takes the largest part of tracing and lowering."""
    model = make()
    mesh = model.mesh(jax.devices())
    models.calls(model, mesh, "cheapest")  # imports, and fills caches
    late, cheapest = (models.calls(model, mesh, arm) for arm in ("late", "cheapest"))
    # 1.099 alone (JAX 0.10.2), a little more after tests that filled JAX's caches.
    assert cheapest <= 1.11 * late, (late, cheapest)
