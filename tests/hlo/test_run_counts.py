"""How often collectives run: conditions once more than bodies, branches instead of each other."""

import pytest

from shardrules import hlo
from shardrules.checks import expectations
from shardrules.costs import accounts, launches
from shardrules.report.content import content

from . import text as T

ADD = "channel_id=1, replica_groups={{0,1,2,3,4,5,6,7}}, use_global_device_ids=true, to_apply=%addi"
LOOP = f"""%condition (c: (s32[], s32[8])) -> pred[] {{
  %c = (s32[], s32[8]) parameter(0)
  %ci = s32[] get-tuple-element(%c), index=0
  %ck = s32[] all-reduce(%ci), {ADD}
  %cn = s32[] constant(5)
  ROOT %cl = pred[] compare(%ci, %cn), direction=LT
}}

%body (b: (s32[], s32[8])) -> (s32[], s32[8]) {{
  %b = (s32[], s32[8]) parameter(0)
  %bi = s32[] get-tuple-element(%b), index=0
  %bx = s32[8] get-tuple-element(%b), index=1
  %bo = s32[] constant(1)
  %bn = s32[] add(%bi, %bo)
  %br = s32[8] all-reduce(%bx), {ADD}
  ROOT %bt = (s32[], s32[8]) tuple(%bn, %br)
}}

"""
ENTRY = """%x = s32[8] parameter(0), sharding={replicated}
%z = s32[] constant(0)
%t = (s32[], s32[8]) tuple(%z, %x)
%w = (s32[], s32[8]) while(%t), CALLS
ROOT %r = s32[8] get-tuple-element(%w), index=1"""


@pytest.mark.parametrize(
    "calls",
    [
        "condition=%condition, body=%body",
        "body=%body, condition=%condition",
        'metadata={op_name="w"}, body=%body, condition=%condition',
    ],
)
@pytest.mark.parametrize("known", [False, True])
def test_a_condition_runs_once_more_than_its_body(calls, known):
    if known:
        calls += ', backend_config={"known_trip_count":{"n":"5"}}'
    judgement = hlo.judge(T.module(ENTRY.replace("CALLS", calls), LOOP), mesh=T.MESH)
    runs = {v.collective.computation: v.collective.trip_count for v in judgement.verdicts}
    assert runs == {"condition": 6, "body": 5}
    assert not any(v.collective.at_most for v in judgement.verdicts)
    assert str(accounts.of(judgement).total).startswith("11, ")


def test_a_body_may_hold_a_loop_again():
    """The condition of an inner loop runs 6 times in each of 5 outer iterations."""
    inner = LOOP.replace("%condition", "%ic").replace("%body", "%ib").replace("all-reduce", "copy")
    inner = inner.replace(f", {ADD}", "").replace(
        "%ck = s32[] copy(%ci)", f"%ck = s32[] all-reduce(%ci), {ADD}"
    )
    outer = LOOP.replace(
        f"%br = s32[8] all-reduce(%bx), {ADD}",
        "%bz = s32[] constant(0)\n  %bu = (s32[], s32[8]) tuple(%bz, %bx)\n"
        "  %bw = (s32[], s32[8]) while(%bu), condition=%ic, body=%ib\n"
        "  %br = s32[8] get-tuple-element(%bw), index=1",
    )
    text = T.module(ENTRY.replace("CALLS", "condition=%condition, body=%body"), inner + outer)
    runs = {v.collective.computation: v.collective.trip_count for v in hlo.judge(text).verdicts}
    assert runs == {"ic": 30, "condition": 6}


def branches(count):
    made = "".join(
        f"""%branch{n} (p{n}: s32[8]) -> s32[8] {{
  %p{n} = s32[8] parameter(0)
  ROOT %q{n} = s32[8] all-reduce(%p{n}), {ADD}
}}

"""
        for n in range(count)
    )
    names = ", ".join(f"%branch{n}" for n in range(count))
    entry = f"""%x = s32[8] parameter(0), sharding={{replicated}}
    %i = s32[] parameter(1), sharding={{replicated}}
    ROOT %r = s32[8] conditional(%i{", %x" * count}), branch_computations={{{names}}}"""
    return hlo.judge(T.module(entry, made), mesh=T.MESH)


def test_branches_exclude_each_other():
    judgement = branches(3)
    account = accounts.of(judgement)
    assert [(e.runs, e.at_most) for e in account] == [(1, True)] * 3
    assert str(account.total) == "at most 3, 96 B"
    assert "3 collectives run at most 3 times; " in content(judgement).headline
    rows = [content(judgement).cells(row) for row in content(judgement).rows]
    assert {c.text for cells in rows for c in cells if c.column == "runs"} == {"at most 1"}
    key = "forward all-reduce(data, model)"
    expected = expectations.exactly({key.removeprefix("forward "): 1})
    ((line, _),) = expected.differences(account)
    assert line.endswith("expected 1, found at most 3, 96 B")
    assert not expectations.at_most({key.removeprefix("forward "): 3}).differences(account)


def test_one_branch_always_runs():
    account = accounts.of(branches(1))
    assert str(account.total) == "1, 32 B"


# Replaces what each device holds by one thing for all, unless it runs no time.
REPLACING = """%condition (ca: (s32[], s32[], f32[8])) -> pred[] {
  %ca = (s32[], s32[], f32[8]) parameter(0)
  %ci = s32[] get-tuple-element(%ca), index=0
  %cb = s32[] get-tuple-element(%ca), index=1
  %cs = s32[] multiply(%ci, %ci)
  ROOT %cr = pred[] compare(COUNTER, %cb), direction=LT
}

%body (ba: (s32[], s32[], f32[8])) -> (s32[], s32[], f32[8]) {
  %ba = (s32[], s32[], f32[8]) parameter(0)
  %bi = s32[] get-tuple-element(%ba), index=0
  %bb = s32[] get-tuple-element(%ba), index=1
  %one = s32[] constant(1)
  %next = s32[] add(%bi, %one)
  %same = f32[8] constant({1,2,3,4,5,6,7,8})
  ROOT %br = (s32[], s32[], f32[8]) tuple(%next, %bb, %same)
}

%outlined (oa: (s32[], s32[], f32[8])) -> (s32[], s32[], f32[8]) {
  %oa = (s32[], s32[], f32[8]) parameter(0)
  ROOT %ow = (s32[], s32[], f32[8]) while(%oa), condition=%condition, body=%bodyTOLD
}

"""
FROM_SHARDS = f"""{T.parameter(T.DATA)}
{T.parameter("{replicated}", "s32[]", "given", 1)}
%id = u32[] partition-id()
%own = s32[] convert(%id)
%none = s32[] constant(0)
%five = s32[] constant(5)
%thirty = s32[] constant(30)
%t = (s32[], s32[], f32[8]) tuple(%none, BOUND, %x)
%w = (s32[], s32[], f32[8]) call(%t), to_apply=%outlined
ROOT %g = f32[8] get-tuple-element(%w), index=2"""


@pytest.mark.parametrize(
    "counter, bound, told, equal",
    [
        ("%ci", "%five", None, True),
        ("%ci", "%five", 5, True),
        ("%ci", "%none", None, False),
        ("%ci", "%none", 5, False),  # it runs no time, whatever the text tells
        ("%ci", "%five", 0, False),
        ("%cs", "%five", None, True),  # 0, 1, 4, 9: followed one by one
        ("%cs", "%five", 3, True),
        ("%cs", "%five", 5, False),
        ("%cs", "%none", 3, False),
        ("%cs", "%own", 3, False),
        ("%ci", "%own", 5, False),
        ("%ci", "%given", 5, False),  # the caller decides
        ("%ci", "%thirty", 30, True),
    ],
)
def test_a_count_that_the_text_tells_is_no_proof(counter, bound, told, equal):
    told = "" if told is None else f', backend_config={{"known_trip_count":{{"n":"{told}"}}}}'
    before = REPLACING.replace("COUNTER", counter).replace("TOLD", told)
    text = T.module(FROM_SHARDS.replace("BOUND", bound), before)
    (output,) = hlo.judge(text, mesh=T.MESH).outputs
    assert (len(output.classes) == 1) == equal


def test_a_loop_in_which_two_numbers_add_each_other():
    """``while a < 5: a, b = a + b, b + a``: neither is the other's step."""
    body = LOOP.replace("(s32[], s32[8])", "(s32[], s32[])")
    body = body.replace("%bx = s32[8]", "%bx = s32[]").replace("add(%bi, %bo)", "add(%bi, %bx)")
    body = body.replace(f"s32[8] all-reduce(%bx), {ADD}", "s32[] add(%bx, %bi)")
    entry = ENTRY.replace("(s32[], s32[8])", "(s32[], s32[])").replace("s32[8]", "s32[]")
    calls = entry.replace("CALLS", "condition=%condition, body=%body")
    (found,) = hlo.judge(T.module(calls, body)).verdicts
    assert (found.verdict, found.collective.trip_count) == ("redundant", None)


def test_a_condition_that_is_computed_in_many_steps_each_used_twice():
    """As random numbers are: each way through them was followed, 2**40 of them."""
    steps, last = "", "%ci"
    for n in range(40):
        steps += f"  %s{n} = s32[] multiply({last}, {last})\n"
        last = f"%s{n}"
    condition = LOOP.replace("  ROOT %cl", steps + "  ROOT %cl").replace(
        "(%ci, %cn)", f"({last}, %cn)"
    )
    calls = ENTRY.replace("CALLS", "condition=%condition, body=%body")
    (loop,) = launches.read(hlo.judge(T.module(calls, condition)).module)
    assert loop.unknown == "its condition reads what each trip computes: s32[]"


def test_the_trips_of_many_nested_loops_are_bounds_that_are_not_reached():
    """Forty loops, each with a bound of 2**31: their product is more than a float holds."""
    told = ', backend_config={"known_trip_count":{"n":"2147483647"}}'
    loops, calls = LOOP, f"condition=%condition, body=%body{told}"
    for n in range(39):
        outer = LOOP.replace("%condition", f"%c{n}").replace("%body", f"%b{n}")
        inner = (
            "%bz = s32[] constant(0)\n  %bu = (s32[], s32[8]) tuple(%bz, %bx)\n"
            f"  %bw = (s32[], s32[8]) while(%bu), {calls}\n"
            "  %br = s32[8] get-tuple-element(%bw), index=1"
        )
        outer = outer.replace(f"%br = s32[8] all-reduce(%bx), {ADD}", inner)
        loops += outer.replace(f"all-reduce(%ci), {ADD}", "copy(%ci)")
        calls = f"condition=%c{n}, body=%b{n}{told}"
    judgement = hlo.judge(T.module(ENTRY.replace("CALLS", calls), loops), mesh=T.MESH)
    assert [v.collective.trip_count for v in judgement.verdicts] == [None, None]
    assert "2 collectives in loops of unknown length" in content(judgement).headline
