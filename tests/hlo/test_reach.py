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


def chosen_by(number):
    """Choose one of two sharded arrays by whether a number is 0."""
    return (
        T.parameter(T.DATA)
        + "\n"
        + T.parameter(T.DATA, name="y", number=1)
        + "\n"
        + INDEX
        + number
        + "\n%zero = s32[] constant(0)\n"
        "%p = pred[] compare(%n, %zero), direction=EQ\n"
        "ROOT %s = f32[8] select(%p, %x, %y)"
    )


def test_sums_of_known_integers_are_known():
    everywhere = T.all_reduce("%i", T.ALL, "s32[]", "n", "addi")  # 28 on every device
    assert classes(chosen_by(everywhere)) == {(0, 1), (2, 3), (4, 5), (6, 7)}
    pairs = T.all_reduce("%i", T.OVER_MODEL, "s32[]", "n", "addi")  # 1 5 9 13: never 0
    assert classes(chosen_by(pairs)) == {(0, 1), (2, 3), (4, 5), (6, 7)}
    assert classes(chosen_by("%n = s32[] copy(%i)")) == {(0,), (1,), (2, 3), (4, 5), (6, 7)}


def test_permuted_known_integers_are_known():
    permute = (
        "%n = s32[] collective-permute(%i), channel_id=1, source_target_pairs={{1,0},{5,1},{0,2}}"
    )
    # 1 5 0 0 0 0 0 0: a device that is no target holds zero
    assert classes(chosen_by(permute)) == {(0, 1), (2, 3), (4, 5), (6, 7)}
    less = permute.replace("{1,0},", "")  # 0 5 0 0 ...
    assert classes(chosen_by(less)) == {(0,), (1,), (2, 3), (4, 5), (6, 7)}


def test_sums_of_known_integers_by_devices_that_may_not_take_part_are_not_known():
    """The sum runs where the index is even: half of each group never arrives."""
    before = """%with (a.5: s32[]) -> s32[] {
  %a.5 = s32[] parameter(0)
  ROOT %r = s32[] all-reduce(%a.5), channel_id=1, replica_groups={{0,1,2,3,4,5,6,7}}, use_global_device_ids=true, to_apply=%addi
}

%without (b.5: s32[]) -> s32[] {
  ROOT %b.5 = s32[] parameter(0)
}

"""  # noqa: E501
    entry = (
        INDEX + "%one = s32[] constant(1)\n%odd = s32[] and(%i, %one)\n"
        "%z = s32[] constant(0)\n"
        "ROOT %c = s32[] conditional(%odd, %z, %z), branch_computations={%with, %without}"
    )
    assert classes(entry, before) == {(0,), (2,), (4,), (6,), (1, 3, 5, 7)}
    (verdict,) = hlo.judge(T.module(entry, before), mesh=T.MESH).verdicts
    assert verdict.divergent


SCATTER = (
    "ROOT %s = {0}[2] reduce-scatter(%w), channel_id=1, "
    "replica_groups={{{{0,2,4,6}},{{1,3,5,7}}}}, use_global_device_ids=true, "
    "dimensions={{0}}, to_apply=%{1}"
)


@pytest.mark.parametrize(
    "kind, sharding, apply, expected",
    [
        ("s32", T.DATA, "addi", EVERYWHERE),  # integers add up to one sum in any order
        # a ring adds each piece up from another member on
        ("f32", T.DATA, "add", {(0, 1), (2, 3), (4, 5), (6, 7)}),
        ("f32", T.MODEL, "add", {(0, 2, 4, 6), (1, 3, 5, 7)}),  # equal terms
        ("s32", T.MODEL, "addi", {(0, 2, 4, 6), (1, 3, 5, 7)}),
    ],
)
def test_equal_pieces_do_not_show_their_position(kind, sharding, apply, expected):
    entry = (
        T.parameter(sharding, f"{kind}[2]") + "\n"
        f"%b = {kind}[4,2]{{1,0}} broadcast(%x), dimensions={{1}}\n"
        f"%w = {kind}[8]{{0}} bitcast(%b)\n" + SCATTER.format(kind, apply)
    )
    assert classes(entry) == expected


@pytest.mark.parametrize(
    "made, equal",
    [
        ("%b = s32[2,4]{1,0} broadcast(%x), dimensions={0}\n%w = s32[8]{0} bitcast(%b)", False),
        ("%b = s32[4,2]{0,1} broadcast(%x), dimensions={1}\n%w = s32[8]{0} bitcast(%b)", False),
        ("%b = s32[4,2]{0,1} broadcast(%x), dimensions={1}\n%w = s32[8]{0} reshape(%b)", True),
        (
            "%b = s32[4,2]{1,0} broadcast(%x), dimensions={1}\n%c = s32[8]{0} bitcast(%b)\n"
            "%w = s32[8]{0} add(%c, %c)",
            True,
        ),
        (
            "%b = s32[4,2]{1,0} broadcast(%x), dimensions={1}\n%c = s32[8]{0} bitcast(%b)\n"
            "%k = s32[8]{0} iota(), iota_dimension=0\n%w = s32[8]{0} add(%c, %k)",
            False,
        ),
        ("%w = s32[8]{0} fusion(%x), kind=kLoop, calls=%tiled", True),
        ("%w = s32[8]{0} fusion(%x), kind=kLoop, calls=%strange", False),
    ],
)
def test_which_arrays_consist_of_equal_pieces(made, equal):
    before = """%tiled (p.7: s32[2]) -> s32[8] {
  %p.7 = s32[2]{0} parameter(0)
  %b.7 = s32[4,2]{1,0} broadcast(%p.7), dimensions={1}
  ROOT %w.7 = s32[8]{0} bitcast(%b.7)
}

%strange (p.8: s32[2]) -> s32[8] {
  %p.8 = s32[2]{0} parameter(0)
  %b.8 = s32[4,2]{1,0} broadcast(%p.8), dimensions={1}
  %r.8 = s32[8]{0} bitcast(%b.8)
  ROOT %w.8 = s32[8]{0} cumulate(%r.8)
}

"""
    entry = (
        T.parameter("{replicated}", "s32[2]") + "\n" + made + "\n" + SCATTER.format("s32", "addi")
    )
    assert (classes(entry, before) == EVERYWHERE) == equal


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


def test_fusions_in_fusions_are_not_followed_for_ever():
    """Each of forty fusions adds two calls of the one before it."""
    before = (
        "%f0 (p.0: s32[8]) -> s32[8] {\n  %p.0 = s32[8]{0} parameter(0)\n"
        "  ROOT %a.0 = s32[8]{0} add(%p.0, %p.0)\n}\n\n"
    )
    for n in range(1, 40):
        before += (
            f"%f{n} (p.{n}: s32[8]) -> s32[8] {{\n  %p.{n} = s32[8]{{0}} parameter(0)\n"
            f"  %l.{n} = s32[8]{{0}} fusion(%p.{n}), kind=kLoop, calls=%f{n - 1}\n"
            f"  %r.{n} = s32[8]{{0}} fusion(%p.{n}), kind=kLoop, calls=%f{n - 1}\n"
            f"  ROOT %a.{n} = s32[8]{{0}} add(%l.{n}, %r.{n})\n}}\n\n"
        )
    entry = (
        T.parameter("{replicated}", "s32[]") + "\n%b = s32[8]{0} broadcast(%x), dimensions={}"
        "\n%w = s32[8]{0} fusion(%b), kind=kLoop, calls=%f39\n" + SCATTER.format("s32", "addi")
    )
    assert classes(entry, before) == {(0, 1), (2, 3), (4, 5), (6, 7)}
    assert classes(entry.replace("%f39", "%f1"), before) == EVERYWHERE
