"""The outputs of a pipeline's last stage, which a psum brings to all, who compute one loss of them."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

from costs.test_waste import D, follow, hints, structs
from shardrules import testing

pytestmark = pytest.mark.one_lane

STAGES, STEPS = ((4, 64, 64), D), ((8, 16, 64), P())
HEAD, LABELS = ((64, 256), P()), ((8, 16), P(), jnp.int32)
SENT = 2 * 3 * 8 * 16 * 64 * 4 // 4


def stage():
    return lax.axis_index("data")


def outputs(w, xs):
    """Run each microbatch through all stages; those of the last one are the outputs."""

    def step(carry, t):
        state, outs = carry
        y = jnp.tanh(jnp.where(stage() == 0, xs[jnp.minimum(t, 7)], state) @ w[0])
        kept = lax.dynamic_update_index_in_dim(outs, y, jnp.maximum(t - 3, 0), 0)
        outs = jnp.where(stage() == 3, kept, outs)
        return (lax.ppermute(y, "data", [(k, (k + 1) % 4) for k in range(4)]), outs), None

    start = xs[0] + 0 * w[0, 0], xs + 0 * w[0, 0]
    return lax.scan(step, start, jnp.arange(11))[0][1]


def from_last(y, last=3):
    return lax.psum(jnp.where(stage() == last, y, 0), "data")


def squares(y, t):
    return ((y - t) ** 2).mean()


def entropy(y, head, labels):
    logits = y @ head
    chosen = jnp.take_along_axis(logits, labels[..., None], -1)[..., 0]
    return (jax.nn.logsumexp(logits, -1) - chosen).mean()


def brought(loss):
    """Bring the outputs to all stages, and compute the loss outside."""

    def f(w, xs, *rest):
        body = lambda w, xs: from_last(outputs(w, xs))  # noqa: E731
        return loss(jax.shard_map(body, in_specs=(D, P()), out_specs=P())(w, xs), *rest)

    return f


def computed(loss):
    """Compute the loss where the outputs are."""

    def f(w, xs, *rest):
        body = lambda w, xs, *rest: from_last(loss(outputs(w, xs), *rest))  # noqa: E731
        specs = D, *[P()] * (1 + len(rest))
        return jax.shard_map(body, in_specs=specs, out_specs=P())(w, xs, *rest)

    return f


LOSSES = {
    "squares": (squares, [STAGES, STEPS, STEPS]),
    "entropy": (entropy, [STAGES, STEPS, HEAD, LABELS]),
    "rows": (lambda y, t: ((y - t) ** 2).sum(-1), [STAGES, STEPS, STEPS]),
}


@pytest.mark.parametrize("name", LOSSES)
def test_a_loss_of_the_last_stage_s_outputs(platform, name):
    mesh, (loss, args) = platform[1], LOSSES[name]
    count = 8 * 16 if name == "rows" else 1
    if platform[0] == "tpu" and name == "entropy":
        return  # a custom call there makes the places that are looked up
    with jax.set_mesh(mesh):
        f, g = jax.jit(brought(loss)), jax.jit(computed(loss))
        sent = SENT, 2 * 3 * count * 4 // 4
        (found,) = follow(platform, f, g, structs(mesh, args), "reduce first", sent)
    assert "jnp.where(jax.lax.axis_index('data') == 3, f(y), 0), 'data')" in found.advice
    assert (found.round_trips_before, found.round_trips_after) == (1, 1)


@pytest.mark.parametrize("name", ["squares", "entropy"])
def test_the_gradient_of_the_stages(cpu_mesh, name):
    """What the backward pass makes of the outputs, the last stage alone reads."""
    loss, args = LOSSES[name]
    with jax.set_mesh(cpu_mesh):
        f, g = (jax.jit(jax.value_and_grad(arm(loss))) for arm in (brought, computed))
        follow(("cpu", cpu_mesh), f, g, structs(cpu_mesh, args), "reduce first", (SENT, 6))


def test_a_gradient_without_the_loss(cpu_mesh):
    """No other stage reads the outputs; a loss that nothing reads is not summed."""
    with jax.set_mesh(cpu_mesh):
        f, g = (jax.jit(jax.grad(arm(squares))) for arm in (brought, computed))
        given = structs(cpu_mesh, [STAGES, STEPS, STEPS])
        (found,) = hints(f, given)
        totals = [testing.account(p, *given).total.wire_bytes for p in (f, g)]
    assert found.kind == "reduce first" and (found.sent_before, found.sent_after) == (SENT, 6)
    assert totals[0] - totals[1] == SENT


def sliced(y, t):
    return squares(y[:4], t[:4])


@pytest.mark.parametrize(
    "f, args",
    [
        (brought(lambda y: y), [STAGES, STEPS]),
        (brought(lambda y, t: (squares(y, t), y)), [STAGES, STEPS, STEPS]),
        # Each device has its own targets.
        (brought(squares), [STAGES, STEPS, (STEPS[0], P(None, "data"))]),
        # The head's gradient would be the last stage's alone, and a psum brings it to all.
        (jax.grad(brought(entropy), (0, 2)), [STAGES, STEPS, HEAD, LABELS]),
        (
            lambda w, xs: jax.shard_map(
                lambda w, xs: (from_last(outputs(w, xs)) * stage()).sum(),
                in_specs=(D, P()),
                out_specs=P(),
                check_vma=False,
            )(w, xs),
            [STAGES, STEPS],
        ),
        (
            lambda w, xs: squares(
                jax.shard_map(
                    lambda w, xs: lax.psum(jnp.where(stage() > 1, outputs(w, xs), 0), "data"),
                    in_specs=(D, P()),
                    out_specs=P(),
                )(w, xs),
                0,
            ),
            [STAGES, STEPS],
        ),
        (computed(squares), [STAGES, STEPS, STEPS]),
    ],
    ids="returned returned_too own_targets head own_numbers two_stages computed".split(),
)
def test_what_a_psum_of_the_loss_does_not_replace(cpu_mesh, f, args):
    with jax.set_mesh(cpu_mesh):
        found = hints(jax.jit(f), structs(cpu_mesh, args))
    assert not [h for h in found if h.kind == "reduce first"]


def test_a_cut_of_the_outputs(cpu_mesh):
    """What all compute up to a smaller array may be a part of it."""
    with jax.set_mesh(cpu_mesh):
        f, g = jax.jit(brought(sliced)), jax.jit(computed(sliced))
        given = structs(cpu_mesh, [STAGES, STEPS, STEPS])
        follow(("cpu", cpu_mesh), f, g, given, "reduce first", (SENT, 6))
