"""What the proof can tell beyond the plain rules; beside each claim, one that it must not make."""

import pytest

from shardrules import hlo

from . import text as T

INDEX = "%id = u32[] partition-id()\n%i = s32[] convert(%id)\n"


def classes(entry, before="", mesh=T.MESH):
    """Give the devices on which ROOT, an array, is equal."""
    (output,) = hlo.judge(T.module(entry, before), mesh=mesh).outputs
    return {tuple(c) for c in output.classes}


EVERYWHERE = {tuple(range(8))}
ALONE = {(d,) for d in range(8)}


def test_sums_that_some_devices_of_a_group_do_not_join_are_not_equal():
    """The sum runs where the index is even: half of each group never arrives."""
    before = """%with (a.5: s32[]) -> s32[] {
  %a.5 = s32[] parameter(0)
  ROOT %r = s32[] all-reduce(%a.5), channel_id=1, replica_groups={{0,1,2,3,4,5,6,7}}, use_global_device_ids=true, to_apply=%addi
}

%without (b.5: s32[]) -> s32[] {
  ROOT %b.5 = s32[] parameter(0)
}

"""
    entry = (
        INDEX + "%one = s32[] constant(1)\n%odd = s32[] and(%i, %one)\n"
        "%z = s32[] constant(0)\n"
        "ROOT %c = s32[] conditional(%odd, %z, %z), branch_computations={%with, %without}"
    )
    assert classes(entry, before) == {(0,), (2,), (4,), (6,), (1, 3, 5, 7)}
    (verdict,) = hlo.judge(T.module(entry, before), mesh=T.MESH).verdicts
    assert verdict.divergent


ALL_TO_ALL = (
    "%a = (f32[8], f32[8]) all-to-all({}), channel_id=1, "
    "replica_groups={{{{0,1}},{{2,3}},{{4,5}},{{6,7}}}}\n"
    "ROOT %e = f32[8] get-tuple-element(%a), index=1"
)


def test_one_value_sent_to_all():
    both = T.parameter(T.BOTH) + "\n%y = f32[8] negate(%x)\n"
    assert classes(both + ALL_TO_ALL.format("%x, %x")) == {(0, 1), (2, 3), (4, 5), (6, 7)}
    assert classes(both + ALL_TO_ALL.format("%x, %y")) == ALONE


def branches(number, *returned):
    """Choose by partition-id among branches that return elements of one tuple of x, y, x."""
    before = "".join(
        f"%br{n} (t.{n}: (f32[8], f32[8], f32[8])) -> (f32[8]) {{\n"
        f"  %t.{n} = (f32[8], f32[8], f32[8]) parameter(0)\n"
        f"  %e.{n} = f32[8] get-tuple-element(%t.{n}), index={element}\n"
        f"  ROOT %o.{n} = (f32[8]) tuple(%e.{n})\n}}\n\n"
        for n, element in enumerate(returned)
    )
    names = ", ".join(f"%br{n}" for n in range(len(returned)))
    entry = (
        T.parameter("{replicated}")
        + "\n"
        + T.parameter("{replicated}", name="y", number=1)
        + "\n"
        + INDEX
        + number
        + "\n%t = (f32[8], f32[8], f32[8]) tuple(%x, %y, %x)\n%c = (f32[8]) conditional(%n"
        + ", %t" * len(returned)
        + f"), branch_computations={{{names}}}\n"
        "ROOT %g = f32[8] get-tuple-element(%c), index=0"
    )
    return classes(entry, before)


def test_branches_that_return_one_thing_are_one_branch():
    odd = "%one = s32[] constant(1)\n%n = s32[] and(%i, %one)"
    assert branches(odd, 0, 2) == EVERYWHERE  # elements 0 and 2 are both x
    assert branches(odd, 0, 1) == {(0, 2, 4, 6), (1, 3, 5, 7)}
    assert branches(odd, 0, 2, 1) == EVERYWHERE  # nobody takes the third
    assert branches("%n = s32[] copy(%i)", 0, 2, 1) == {(0, 1), tuple(range(2, 8))}


def loop(result, groups=T.OVER_MODEL, low=1):
    """Go through a loop partition-id // 2 + low times; its body returns (i + 1, result, c)."""
    before = f"""%again (q: (s32[], f32[8], f32[8], s32[])) -> pred[] {{
  %q = (s32[], f32[8], f32[8], s32[]) parameter(0)
  %k = s32[] get-tuple-element(%q), index=0
  %limit = s32[] get-tuple-element(%q), index=3
  ROOT %less = pred[] compare(%k, %limit), direction=LT
}}

%body (s: (s32[], f32[8], f32[8], s32[])) -> (s32[], f32[8], f32[8], s32[]) {{
  %s = (s32[], f32[8], f32[8], s32[]) parameter(0)
  %j = s32[] get-tuple-element(%s), index=0
  %u = f32[8] get-tuple-element(%s), index=1
  %c = f32[8] get-tuple-element(%s), index=2
  %m = s32[] get-tuple-element(%s), index=3
  %one = s32[] constant(1)
  %next = s32[] add(%j, %one)
  %made = {result}
  ROOT %back = (s32[], f32[8], f32[8], s32[]) tuple(%next, %made, %c, %m)
}}

"""
    entry = (
        T.parameter("{replicated}")
        + "\n"
        + T.parameter(T.MODEL, name="y", number=1)
        + "\n"
        + INDEX
        + f"%two = s32[] constant(2)\n%row = s32[] divide(%i, %two)\n"
        f"%low = s32[] constant({low})\n%trips = s32[] add(%row, %low)\n"
        "%z = s32[] constant(0)\n"
        "%start = (s32[], f32[8], f32[8], s32[]) tuple(%z, %x, %y, %trips)\n"
        "%w = (s32[], f32[8], f32[8], s32[]) while(%start), condition=%again, body=%body\n"
        "ROOT %g = f32[8] get-tuple-element(%w), index=1"
    )
    return classes(entry, before)


BY_MODEL = {(0, 2, 4, 6), (1, 3, 5, 7)}


def test_what_each_iteration_makes_anew_of_the_same_does_not_count_iterations():
    assert loop("f32[8] negate(%c)") == BY_MODEL
    # where rows 0 goes through the loop no time at all, it keeps x
    assert loop("f32[8] negate(%c)", low=0) == {(0, 1), (2, 4, 6), (3, 5, 7)}
    assert loop("f32[8] negate(%u)") == {(0, 1), (2, 3), (4, 5), (6, 7)}
    assert loop('f32[8] custom-call(%c), custom_call_target="f"') == ALONE
    assert loop("f32[8] rng(%c, %c), distribution=rng_uniform") == ALONE


def test_collectives_in_such_iterations_count_where_all_of_a_group_go_on():
    summed = (
        "f32[8] all-reduce(%c), channel_id=1, replica_groups={}, "
        "use_global_device_ids=true, to_apply=%add"
    )
    assert loop(summed.format(T.OVER_MODEL)) == EVERYWHERE
    assert loop(summed.format(T.OVER_DATA)) != BY_MODEL  # rows leave the loop at different times


@pytest.mark.parametrize("opcode", ["mulhi", "shift-left", "shift-right-logical", "and", "add"])
def test_scalars_that_often_become_equal_are_not_said_to_differ(opcode):
    """The high bits of small numbers' products are zero, and a shift may drop all that differs."""
    scalar = T.parameter("{devices=[8]<=[8]}", "u32[1]") + "\n%s = u32[] reshape(%x)\n"
    entry = f"{scalar}%c = u32[] constant(31)\nROOT %o = u32[] {opcode}(%s, %c)"
    (output,) = hlo.judge(T.module(entry)).outputs
    assert output.broken([0] * 8).differs is (opcode == "add")
