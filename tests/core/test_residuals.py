"""What becomes of each checkpoint_name, on every JAX: read from the trace, nothing is compiled."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest
from jax.ad_checkpoint import checkpoint_name

from shardrules.errors import ShardrulesError
from shardrules.hooks.explain.residuals import named_values

WEIGHTS, X = jnp.ones((3, 8, 8)), jnp.ones((4, 8))


def model(saved=(), offloaded=(), unrolled=False, jitted=False, remat=True):
    policy = jax.checkpoint_policies.save_and_offload_only_these_names(
        names_which_can_be_saved=list(saved),
        names_which_can_be_offloaded=list(offloaded),
        offload_src="device",
        offload_dst="pinned_host",
    )

    def block(x, w):
        x = checkpoint_name(x, "input")
        h = checkpoint_name(x @ w, "hidden")
        x = checkpoint_name(x + jax.nn.relu(h) @ w, "output")
        return x, None

    if remat:
        block = jax.checkpoint(block, policy=policy, prevent_cse=unrolled)
    if jitted:
        block = jax.jit(block)

    def loss(weights, x):
        if unrolled:
            for n in range(3):
                x, _ = block(x, weights[n])
        else:
            x, _ = jax.lax.scan(block, x, weights)
        return (x**2).mean()

    return jax.jit(jax.value_and_grad(loss))


def statuses(program):
    return {v.name: v.status for v in named_values(program, WEIGHTS, X)}


@pytest.mark.parametrize("jitted", [False, True], ids=["", "jitted"])
@pytest.mark.parametrize(
    "saved, offloaded, expected",
    [
        ((), (), {"input": "recomputed", "hidden": "recomputed", "output": "not a residual"}),
        (("hidden",), (), {"input": "recomputed", "hidden": "saved", "output": "not a residual"}),
        (
            (),
            ("hidden",),
            {"input": "recomputed", "hidden": "offloaded", "output": "not a residual"},
        ),
        (
            (),
            ("output",),
            {"input": "recomputed", "hidden": "recomputed", "output": "not a residual"},
        ),
        (
            (),
            ("input",),
            {"input": "offloaded", "hidden": "recomputed", "output": "not a residual"},
        ),
    ],
)
def test_the_names_of_a_scanned_block(saved, offloaded, expected, jitted):
    assert statuses(model(saved, offloaded, jitted=jitted)) == expected


def test_bytes_sources_and_what_is_returned():
    values = {v.name: v for v in named_values(model(offloaded=["hidden"]), WEIGHTS, X)}
    assert {n: (v.shape, v.bytes) for n, v in values.items()} == dict.fromkeys(
        ["input", "hidden", "output"], ("float32[4,8]", 3 * 4 * 8 * 4)
    )
    assert values["output"].is_output and not values["hidden"].is_output
    assert "test_residuals.py:" in values["hidden"].source


@pytest.mark.parametrize("jitted", [False, True], ids=["", "jitted"])
def test_one_name_offloaded_does_not_lend_its_status_to_another(jitted):
    found = statuses(model(offloaded=["input"], unrolled=True, jitted=jitted))
    assert found["input"] == "offloaded"
    assert found["output"] != "offloaded"


def test_without_a_backward_pass_or_a_checkpoint():
    for program in (lambda w, x: checkpoint_name(x, "x"), model(remat=False)):
        with pytest.raises(ShardrulesError, match="holds no backward pass of a jax.checkpoint"):
            named_values(program, WEIGHTS, X)
    with pytest.raises(ShardrulesError, match="f is a function, not 'text' \\(str\\)"):
        named_values("text", WEIGHTS, X)
