"""The proof against random programs that run; and the oracle against faults put into the proof."""

import numpy as np
import pytest

from shardrules.hlo.known import values
from shardrules.hlo.proof import collectives, control
from shardrules.hlo.reader import devices, notations

from . import oracle

pytestmark = pytest.mark.one_lane

FIRST, COUNT = 0, 30


@pytest.fixture(scope="module")
def outcomes():
    return [oracle.run_program(seed) for seed in range(FIRST, FIRST + COUNT)]


@pytest.mark.slow
def test_no_claim_of_equality_is_wrong(outcomes):
    assert not [claim for one in outcomes for claim in one.wrong]


def test_most_of_what_is_equal_is_proven(outcomes):
    equal = sum(one.equal_count for one in outcomes)
    proven = sum(one.proven_count for one in outcomes)
    assert proven > 0.85 * equal > 0  # of 30 programs; the oracle's own run asks for 94% of many


def drop_a_join(monkeypatch):
    """Take what an all-reduce gives to be equal everywhere, not in its groups."""
    original = collectives.Exchange.relation

    def relation(self, groups, ordered, how, number):
        return devices.EQUAL if how == "join" else original(self, groups, ordered, how, number)

    monkeypatch.setattr(collectives.Exchange, "relation", relation)


def swap_groups(monkeypatch):
    """Read groups with the first members of two groups exchanged."""
    original = notations.read_groups

    def read(text):
        (members, sizes), mesh = original(text)
        if len(sizes) > 1:
            members = members.copy()
            members[[0, sizes[0]]] = members[[sizes[0], 0]]
        return (members, sizes), mesh

    monkeypatch.setattr(notations, "read_groups", read)


def ignore_guards(monkeypatch):
    """Take branches and loops for equal whatever their predicates are."""
    monkeypatch.setattr(values.Values, "with_state", lambda self, value, state: value)
    monkeypatch.setattr(control, "_diverged", lambda values, value, predicate: value)
    monkeypatch.setattr(values.Values, "choose", lambda self, which, options: options[0])


def forget_positions(monkeypatch):
    """Take what reduce-scatter and all-to-all give for equal on all members."""
    monkeypatch.setattr(collectives, "result_how", lambda instruction, channel: "join")


def first_iteration_only(monkeypatch):
    """Judge a loop's result by its first iteration."""
    monkeypatch.setattr(
        control._LoopEvaluation,
        "unrolled",
        lambda self, carry, trips: self.proof.evaluate(self.body, (carry,), self.guard),
    )


def floor_for_truncation(monkeypatch):
    """Evaluate integers wrongly: partition-id one off."""
    original = values.Values.device_number

    def number(self, ids, what):
        return original(self, (ids + 1) % np.uint32(len(ids)) // np.uint32(2), what)

    monkeypatch.setattr(values.Values, "device_number", number)


def settle_at_once(monkeypatch):
    """Take what iterations make anew for what the loop began with."""
    original = control._LoopEvaluation.ages.func

    def ages(self):
        return {k: (0, collectives) for k, (_, collectives) in original(self).items()}

    monkeypatch.setattr(control._LoopEvaluation, "ages", property(ages))


def all_branches_are_one(monkeypatch):
    """Take what branches return for one thing, whatever it is."""
    monkeypatch.setattr(control, "_origin", lambda *a: "one")


def all_pieces_are_equal(monkeypatch):
    """Take a tuple all-to-all's operands, and a reduce-scatter's pieces, for equal ones."""
    original = collectives.result_how

    def how(*args):
        return "join" if original(*args) == "exchange" else original(*args)

    monkeypatch.setattr(collectives, "result_how", how)


@pytest.mark.parametrize(
    "fault",
    [
        drop_a_join,
        swap_groups,
        ignore_guards,
        forget_positions,
        first_iteration_only,
        floor_for_truncation,
        settle_at_once,
        all_branches_are_one,
        all_pieces_are_equal,
    ],
)
def test_the_oracle_catches_faults(fault, monkeypatch):
    fault(monkeypatch)
    for seed in range(FIRST, FIRST + 150):
        if oracle.run_program(seed).wrong:
            return
    pytest.fail(f"{fault.__name__} stood undetected for 150 programs")
