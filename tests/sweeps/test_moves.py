"""Random bwds and transposes: no gradient changes where casts move or checks are switched on."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import seeds
from core import versions
from jax.sharding import PartitionSpec as P

import shardrules
from shardrules.hooks import shard_map
from shardrules.hooks.cotangents import custom_vjp, linearity, summed_shares, whole_cotangents
from shardrules.jaxprs.walk import transposed_sums
from shardrules.unchecked import hooks as unchecked_hooks
from shardrules.unchecked import python_state
from sweeps import moves


@pytest.mark.slow
def test_no_gradient_changes(share):
    tried = share(range(50432, 50472))
    outcomes = dict(enumerate(seeds.in_this_process("sweeps.moves", tried)))
    said, is_well = moves.summary(outcomes)
    different = [one["note"] for one in outcomes.values() if one["note"][:4] in ("diff", "refu")]
    assert is_well, (said, different)
    kinds = [one["note"].partition(":")[0] for one in outcomes.values()]
    assert min(kinds.count("switched"), kinds.count("casts")) >= len(tried) // 20, said


def a_row_is_too_generous(monkeypatch):
    monkeypatch.setitem(linearity.ROWS, "max", linearity.ROWS["add"])


def no_step_rounds(monkeypatch):
    monkeypatch.setattr(linearity, "is_less", lambda *args: False)
    no_range_is_narrow(monkeypatch)


def transposes_are_trusted(monkeypatch):
    monkeypatch.setattr(summed_shares, "why_not_linear", lambda *args: "")
    rules_are_all_known(monkeypatch)


def one_derivative_is_enough(monkeypatch):
    monkeypatch.setattr(unchecked_hooks._Unchecked, "_has_rules", lambda *args: False)
    monkeypatch.setattr(summed_shares.CustomRules, "new", lambda *args: False)


def the_line_is_the_key(monkeypatch):
    monkeypatch.setattr(summed_shares, "told_apart", lambda *args: "")


def state_stays_changed(monkeypatch):
    monkeypatch.setattr(unchecked_hooks.Kept, "put_back", lambda self: None)


def a_scatter_applies_nothing(monkeypatch):
    monkeypatch.setattr(linearity, "_applies", lambda eqn: False)


def a_gather_fills_nothing(monkeypatch):
    row = lambda fold, eqn, given: given[0]  # noqa: E731
    monkeypatch.setitem(linearity.ROWS, "gather", row)


def devices_are_not_asked(monkeypatch):
    monkeypatch.setattr(whole_cotangents.WholeCotangents, "_communicates", lambda *args: False)
    monkeypatch.setitem(linearity.ROWS, "pmax", linearity.ROWS["ppermute"])
    monkeypatch.setattr(custom_vjp.CustomVjpHooks, "steps", custom_vjp.CustomVjpHooks.steps[1:])


def rules_are_all_known(monkeypatch):
    monkeypatch.setattr(summed_shares.CustomRules, "new", lambda *args: False)


def no_range_is_narrow(monkeypatch):
    for module in (linearity, summed_shares):
        monkeypatch.setattr(module, "is_narrow", lambda precision: False)
    one_derivative_is_enough(monkeypatch)  # the second one of such a step rounds, too


def caches_are_forgotten(monkeypatch):
    monkeypatch.setattr(unchecked_hooks, "UNSTEADY", "")


def iterators_are_forgotten(monkeypatch):
    monkeypatch.setattr(python_state, "_is_stuck", lambda kind: False)


def a_bwd_is_not_read(monkeypatch):
    monkeypatch.setattr(custom_vjp.CustomVjpHooks, "_unread", lambda *args: None)


CASE = moves.Case(
    (4, 2), ("data",), "plain", (("custom_vjp", "plain", "clipped"),), ("both",), False
)
FAULTS = {
    a_row_is_too_generous: {"steps": (("custom_vjp", "plain", "positive"),)},
    no_step_rounds: {"steps": (("nondiff", "plain", "rounded"),)},
    transposes_are_trusted: {"steps": (("linear_call", "plain", "clipped"),)},
    one_derivative_is_enough: {"steps": (("second", "plain", "squared"),), "asked": ("second",)},
    the_line_is_the_key: {
        "steps": (("nondiff", "plain", "scaled"), ("nondiff", "plain", "clipped"))
    },
    a_scatter_applies_nothing: {"steps": (("custom_vjp", "plain", "applied in a scatter"),)},
    a_gather_fills_nothing: {"steps": (("custom_vjp", "plain", "filled"),)},
    devices_are_not_asked: {"steps": (("custom_vjp", "plain", "largest on devices"),)},
    rules_are_all_known: {"steps": (("third", "plain", "clipped"),), "asked": ("third",)},
    no_range_is_narrow: {"steps": (("custom_vjp", "plain", "too small"),), "body": "split"},
    caches_are_forgotten: {
        "steps": (("custom_vjp", "plain", "scaled"),),
        "body": "jitted",
        "asked": ("forward", "both"),
    },
    iterators_are_forgotten: {"steps": (("custom_vjp", "plain", "scaled"),), "body": "iterated"},
    state_stays_changed: {"steps": (("custom_vjp", "plain", "scaled"),), "body": "counted"},
}


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_a_planted_fault_is_found(monkeypatch, fault):
    case = dataclasses.replace(CASE, **FAULTS[fault])
    monkeypatch.setattr(moves, "case_of", lambda seed: case)
    assert not moves.compare(0).startswith("different")
    fault(monkeypatch)
    assert moves.compare(0).startswith("different")


@pytest.mark.parametrize("casts", [True, False])
def test_a_cast_is_moved_over_the_axis_of_a_vmap(casts):
    """The bwd's cotangent was summed over that axis, and JAX rejected its type."""
    case = dataclasses.replace(
        CASE, body="looped", asked=("spmd_axis_name",), casts=casts, mesh=(2, 3)
    )
    case = dataclasses.replace(case, steps=(("nondiff", "plain", "negative"),))
    outcome = moves.compare_case(case)
    assert outcome == ("casts" if casts else "switched")


@versions.where(lambda: moves.FANCY is not None)
@pytest.mark.parametrize("casts", [True, False])
@pytest.mark.parametrize("body", ["plain", "looped", "split"])
def test_a_primitive_that_accumulates_is_known_by_its_author(casts, body):
    """Its transpose was lost under a rule of a scope, and taken for one of JAX's."""
    why = "casts" if casts else "left: the transpose of 'moves_identity' is not known to be linear"
    for what in ("clipped", "scaled"):
        steps = (("accumulating primitive", "plain", what),)
        case = dataclasses.replace(CASE, body=body, casts=casts, steps=steps)
        assert moves.compare_case(case).startswith(why)


UNREAD = sorted(moves.LATER.keys() & moves.STEPS.keys())


def has_unread(*kinds):
    """Mark a test or a case for those JAX that have such bwds: 0.11 and later, 0.12 and later."""
    return versions.where(lambda: bool(UNREAD) and set(kinds) <= set(UNREAD))


@has_unread()
def test_a_bwd_that_is_not_read_leaves_its_site(monkeypatch):
    """It was switched, and computed its clipped gradient of the sum."""
    cases = [dataclasses.replace(CASE, steps=((kind, "plain", "clipped"),)) for kind in UNREAD]
    for case in cases:
        assert moves.compare_case(case).startswith("left: the bwd '<lambda>' ")
    a_bwd_is_not_read(monkeypatch)
    # Of a bwd that takes accumulators, this finds that no look has bound it.
    monkeypatch.setattr(summed_shares.CustomRules, "outside", lambda self, called: [])
    for case in cases:
        assert moves.compare_case(case).startswith("different")


@pytest.mark.parametrize("kind", [pytest.param(k, marks=has_unread(k)) for k in moves.LATER])
def test_casts_move_beside_a_bwd_that_is_not_read(kind, cpu_mesh):
    """All casts of its program stood late."""
    op = moves.STEPS[kind](lambda g: jnp.clip(g, -0.1, 0.1))

    def body(x, w, v):
        step = lambda c, _: (jnp.tanh(c * v + op(jnp.sum(c * w, 1, keepdims=True))), None)  # noqa: E731
        return jax.lax.scan(step, x, None, length=5)[0]

    f = shard_map(body, cpu_mesh, (P("data"), P(), P()), P("data"), check=True)
    gradient = jax.grad(lambda v, x, w: jnp.sum(jnp.sin(f(x, w, v))), (0, 2))
    args = (*np.random.RandomState(0).rand(2, 6).astype("float32"), np.ones((8, 6), "float32"))
    v, w, x = args
    sums, results = {}, {}
    for casts in ("late", "cheapest"):
        with shardrules.install(casts=casts):
            traced = jax.make_jaxpr(gradient)(v, x, w)
            results[casts] = jax.jit(gradient)(v, x, w)
        sums[casts] = sum(size for size, _ in transposed_sums(traced.jaxpr))
    assert (sums["late"], sums["cheapest"]) == (2 * 5 * 24, 2 * 24)
    for late, cheapest in zip(results["late"], results["cheapest"]):
        np.testing.assert_allclose(late, cheapest, 1e-5, 1e-6)


@has_unread()
def test_no_cast_moves_past_a_bwd_that_is_not_read(monkeypatch):
    """JAX refused the type of the cotangent that it returned."""
    case = dataclasses.replace(CASE, body="looped", casts=True)
    cases = [dataclasses.replace(case, steps=((kind, "plain", "scaled"),)) for kind in UNREAD]
    for case in cases:
        assert moves.compare_case(case) == "casts"
    a_bwd_is_not_read(monkeypatch)
    for case in cases[: UNREAD.count("accums")]:
        assert moves.compare_case(case).startswith("refused")
