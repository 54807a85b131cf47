"""Faults put into what no execution shows: counts, stages, meshes, groups, what a verdict rests on.

Each has to make a test fail that stands guard over it.
"""

import pytest

from shardrules.costs import comparing
from shardrules.hlo.known import states as hs
from shardrules.hlo.proof import loops, verdict
from shardrules.hlo.reader import notations, partitioned

from . import test_meshes, test_paths, test_run_counts, test_stages
from . import text as T


def supports_are_cut(monkeypatch):
    original = hs.union
    monkeypatch.setattr(hs, "union", lambda a, b: original(a, b)[:8])


def no_stage_is_early(monkeypatch):
    monkeypatch.setattr(partitioned, "check", lambda module: None)


def conditions_run_as_bodies_do(monkeypatch):
    original = loops._calls

    def calls(module, computation, instruction, called, outer):
        found = list(original(module, computation, instruction, called, outer))
        body = found[-1][1]
        return [(name, body) for name, _ in found] if instruction.opcode == "while" else found

    monkeypatch.setattr(loops, "_calls", calls)


def branches_all_run(monkeypatch):
    original = loops.Run
    monkeypatch.setattr(loops, "Run", lambda depth, count, *rest: original(depth, count))


def groups_are_counted_alone(monkeypatch):
    monkeypatch.setattr(notations, "notation", lambda rows, **how: f"{len(rows)} groups")


def groups_are_not_compared(monkeypatch):
    original = comparing.grouped
    monkeypatch.setattr(comparing, "grouped", lambda entries, groups: original(entries))


def a_notations_names_are_the_programs(monkeypatch):
    original = verdict.hd.mesh_of
    known = []

    def mesh_of(named, relations):
        known.append(original(named, relations))
        return next((mesh for mesh in known if mesh is not None), None)

    monkeypatch.setattr(verdict.hd, "mesh_of", mesh_of)


def any_mesh_fits(monkeypatch):
    monkeypatch.setattr(verdict.hd, "check_order", lambda *args: None)


# Each with a test, and a case of it.
FAULTS = {
    supports_are_cut: (test_paths.test_a_verdict_lists_all_that_it_rests_on,),
    no_stage_is_early: (
        test_stages.test_what_is_not_partitioned_is_refused,
        "a constraint",
        "num_partitions=8",
    ),
    conditions_run_as_bodies_do: (
        test_run_counts.test_a_condition_runs_once_more_than_its_body,
        "condition=%condition, body=%body",
        False,
    ),
    branches_all_run: (test_run_counts.test_branches_exclude_each_other,),
    groups_are_counted_alone: (
        test_meshes.test_swapped_groups_are_a_difference,
        T.OVER_DATA,
        "{{0,1,2,3},{4,5,6,7}}",
    ),
    groups_are_not_compared: (test_meshes.test_groups_are_named_where_only_they_differ,),
    a_notations_names_are_the_programs: (
        test_meshes.test_of_two_meshes_each_collective_has_its_own_names,
    ),
    any_mesh_fits: (test_meshes.test_a_mesh_of_another_order_is_refused, T.OVER_MODEL),
}


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_a_test_stands_guard(fault, monkeypatch):
    guard, *case = FAULTS[fault]
    guard(*case)
    fault(monkeypatch)
    with pytest.raises((AssertionError, pytest.fail.Exception)):
        guard(*case)
