"""Attributes: an instruction does what they say, in any order; an unknown one blocks the proof."""

import re

import pytest

from shardrules import errors, hlo
from shardrules.hlo.reader import attributes

from . import text as T

META = 'metadata={op_name="f" stack_frame_id=3}'
CONFIG = 'backend_config={"a":"}, x=1","b":[{}]}'
REDUCE = "channel_id=1, use_global_device_ids=true, to_apply=%add"
GROUPS = f"replica_groups={T.OVER_MODEL}"
ORDERS = [
    f"{REDUCE}, {GROUPS}",
    f"{GROUPS}, {REDUCE}, {META}",
    f"{META}, {GROUPS}, {CONFIG}, {REDUCE}",
    f"{CONFIG}, {REDUCE}, {META}, {GROUPS}",
    f"{META},\n  {CONFIG},\n    {REDUCE}, replica_groups=\n {T.OVER_MODEL}",
    f"{META} , {REDUCE}/*, replica_groups={T.ALL}*/, {GROUPS} // , replica_groups={{}}",
    f"{META}\n, {REDUCE}\n, {GROUPS}",
]


def judged(attributes, before=""):
    text = T.module(T.parameter(T.DATA), before)
    return hlo.judge(
        text.replace("ROOT %x =", "%x =")[: -len("}\n")]
        + f"  ROOT %r = f32[8] all-reduce(%x), {attributes}\n}}\n",
        mesh=T.MESH,
    )


@pytest.mark.parametrize("attributes", ORDERS)
def test_groups_count_wherever_they_stand(attributes):
    (verdict,) = judged(attributes).verdicts
    assert (verdict.verdict, verdict.collective.axes) == ("redundant", ("model",))


@pytest.mark.parametrize("attributes", ORDERS)
def test_and_are_needed_over_the_other_axis(attributes):
    (verdict,) = judged(attributes.replace(T.OVER_MODEL, T.OVER_DATA)).verdicts
    assert (verdict.verdict, verdict.collective.axes) == ("needed", ("data",))


def test_a_result_in_its_operands_place_is_the_same():
    """As XLA for GPUs prints each all-reduce-start from JAX 0.12 on."""
    text = T.module(
        f"""{T.parameter(T.DATA)}
        %s = ((f32[8]), f32[8]) all-reduce-start(%x), channel_id=1, replica_groups={T.OVER_MODEL},
          use_global_device_ids=true, to_apply=%add, output_to_operand_aliasing={{{{1}}: (0, {{}})}}
        %r = f32[8] all-reduce-done(%s)""".replace(",\n", ", ")
    )
    (verdict,) = hlo.judge(text, mesh=T.MESH).verdicts
    assert verdict.verdict == "redundant", verdict.reason


@pytest.mark.parametrize(
    "attributes",
    [f"{ORDERS[0]}, color=blue", f"color={{1, 2}}, {ORDERS[0]}", f"{ORDERS[1]},mode=flattened"],
)
def test_an_attribute_that_is_not_known_blocks_a_collective(attributes):
    (verdict,) = judged(attributes).verdicts
    assert verdict.verdict == "unproven"
    assert "all-reduce 'r' has an unknown attribute" in verdict.reason


@pytest.mark.parametrize(
    "line",
    [
        "%y = f32[8] negate(%x), color=blue",
        '%y = f32[8] negate(%x), metadata={op_name="n"},color=blue',
        '%y = f32[8] negate(%x), color=blue, metadata={op_name="n"}',
        "%y = f32[8] negate(\n  %x), color=blue",
        '%y = f32[8] negate(%x), metadata={op_name="n"},\tcolor=blue',
        '%y = f32[8] negate(%x), metadata={op_name="n"},/*red*/color=blue',
        '%y = f32[8] negate(%x), metadata={op_name="n"}, color/*red*/=blue',
        "%y = f32[8] call(%x), to_apply=%kept, color=blue",
        "%y = f32[8] negate(f32[8] copy(%x)), color=blue",  # not the copy's
        "%y = f32[8] add(f32[8] copy(%x), f32[8] negate(%x)), color=blue",
    ],
)
@pytest.mark.parametrize("known", [False, True])
def test_an_attribute_that_is_not_known_blocks_what_follows(line, known):
    if known:
        line = re.sub("color(.*)=blue", r'frontend_attributes\1={color="blue"}', line)
    kept = "%kept (k: f32[8]) -> f32[8] {\n  ROOT %k = f32[8] parameter(0)\n}\n\n"
    text = T.module(f"{T.parameter(T.DATA)}\n{line}\n{T.all_reduce('%y')}", kept)
    (verdict,) = hlo.judge(text, mesh=T.MESH).verdicts
    assert verdict.verdict == ("redundant" if known else "unproven")
    assert known or "color" in verdict.reason


@pytest.mark.parametrize("comment", ["/* , /*index=1*/", "/*, /*index=1*/", "// , /*index=1*/\n"])
def test_a_comment_ends_where_one_that_looks_printed_does(comment):
    """What follows it was hidden up to the end of the next comment."""
    lines = [T.parameter("{replicated}"), T.parameter(T.BOTH, name="q", number=1)]
    lines += [f"%y = f32[8] add(%x {comment}, %q /* */)", T.all_reduce("%y")]
    (verdict,) = hlo.judge(T.module("\n".join(lines)), mesh=T.MESH).verdicts
    assert verdict.verdict == "needed"


LOOP = """%below (p: (s32[], f32[8], f32[8])) -> pred[] {
  %p = (s32[], f32[8], f32[8]) parameter(0)
  %i = s32[] get-tuple-element(%p), index=0
  %four = s32[] constant(4)
  ROOT %less = pred[] compare(%i, %four), direction=LT
}

%step (q: (s32[], f32[8], f32[8])) -> (s32[], f32[8], f32[8]) {
  %q = (s32[], f32[8], f32[8]) parameter(0)
  %j = s32[] get-tuple-element(%q), index=0
  %one = s32[] constant(1)
  %next = s32[] add(%j, %one)
  %k = f32[8] get-tuple-element(%q), index=1
  %kept = f32[8] copy(%k)
  %made = f32[8] negate(%kept)
  ROOT %u = (s32[], f32[8], f32[8]) tuple(%next, %kept, %made)
}

"""
BRANCH = """%copied (c: (f32[8])) -> (f32[8]) {
  %c = (f32[8]) parameter(0)
  %d = f32[8] get-tuple-element(%c), index=0
  %kept = f32[8] copy(%d)
  ROOT %cu = (f32[8]) tuple(%kept)
}

%passed (e: (f32[8])) -> (f32[8]) {
  %e = (f32[8]) parameter(0)
  %f = f32[8] get-tuple-element(%e), index=0
  ROOT %eu = (f32[8]) tuple(%f)
}

"""


@pytest.mark.parametrize(
    "line, element",
    [
        # a counter that counts by who knows what
        ("add(%j, %one)", 2),
        ("compare(%i, %four), direction=LT", 2),
        ("copy(%k)", 1),
        ("copy(%k)", 2),
    ],
)
@pytest.mark.parametrize("known", [False, True])
def test_an_unknown_attribute_in_a_loop(line, element, known):
    text = T.module(
        f"""{T.parameter(T.DATA)}
        %id = u32[] partition-id()
        %two = u32[] constant(2)
        %row = u32[] divide(%id, %two)
        %from = s32[] convert(%row)
        %nought = s32[] constant(0)
        %t = (s32[], f32[8], f32[8]) tuple(%START, %x, %x)
        %w = (s32[], f32[8], f32[8]) while(%t), condition=%below, body=%step
        %g = f32[8] get-tuple-element(%w), index={element}
        {T.all_reduce("%g")}""".replace("%START", "%from" if "copy" in line else "%nought"),
        LOOP.replace(line, line if known else f"{line}, color=blue"),
    )
    (verdict,) = hlo.judge(text, mesh=T.MESH).verdicts
    assert verdict.verdict == ("redundant" if known else "unproven")


@pytest.mark.parametrize("branches", ["%copied, %passed", "%passed, %copied"])
@pytest.mark.parametrize("known", [False, True])
def test_an_unknown_attribute_in_a_branch(branches, known):
    text = T.module(
        f"""{T.parameter(T.DATA)}
        %id = u32[] partition-id()
        %which = s32[] convert(%id)
        %t = (f32[8]) tuple(%x)
        %c = (f32[8]) conditional(%which, %t, %t), branch_computations={{{branches}}}
        %g = f32[8] get-tuple-element(%c), index=0
        {T.all_reduce("%g")}""",
        BRANCH if known else BRANCH.replace("copy(%d)", "copy(%d), color=blue"),
    )
    (verdict,) = hlo.judge(text, mesh=T.MESH).verdicts
    assert (verdict.verdict == "redundant") == known


@pytest.mark.parametrize("key", ["Color", "_color", "2color"])
def test_whatever_its_first_letter(key):
    text = T.module(
        f"{T.parameter(T.DATA)}\n%y = f32[8] negate(%x), {key}=blue\n{T.all_reduce('%y')}"
    )
    (verdict,) = hlo.judge(text).verdicts
    assert f"has an unknown attribute, {key}" in verdict.reason


@pytest.mark.parametrize("key, expected", [("color", "unproven"), ("", "redundant")])
@pytest.mark.parametrize(
    "runs",
    [
        'custom-call(%own), custom_call_target="k", color=%work',
        "negate(%own), color={%work}",
        "all-reduce(%own), channel_id=1, replica_groups={}, to_apply=%add, color=%work",
    ],
)
def test_it_may_run_what_it_names(runs, key, expected):
    """And what a call shows of equal operands doesn't hold for others."""
    if not key:
        runs = re.sub(", color=.*", "", runs)
    work = "%work (w: f32[8]) -> f32[8] {\n  %w = f32[8] parameter(0)\n  ROOT REDUCED\n}\n\n"
    text = T.module(
        f"""{T.parameter("{replicated}")}
        %id = u32[] partition-id()
        %f = f32[] convert(%id)
        %own = f32[8] broadcast(%f), dimensions={{}}
        %c = f32[8] call(%x), to_apply=%work
        %k = f32[8] {runs}""",
        work.replace("REDUCED", T.all_reduce("%w")),
    )
    assert hlo.judge(text).verdicts[0].verdict == expected


BRANCHES = """%yes (y: f32[8]) -> f32[8] {{
  %y = f32[8] parameter(0)
  ROOT %a = f32[8] negate(%y)
}}

%no (n: f32[8]) -> f32[8] {{
  ROOT %n = f32[8] parameter(0)
}}

ENTRY %main {{
  %p = pred[] parameter(0)
  %x = f32[8] parameter(1)
  ROOT %c = f32[8] conditional(%p, %x, %x), {}
}}
"""


@pytest.mark.parametrize(
    "attributes",
    [
        "true_computation=%yes, false_computation=%no",
        "false_computation=%no, true_computation=%yes",
        f"{META}, false_computation=%no, {CONFIG}, true_computation=%yes",
        'metadata={op_name="f"}, branch_computations={%yes,\n  %no}',
    ],
)
def test_branches_are_told_by_their_names(attributes):
    module = hlo.parse("HloModule m\n\n" + BRANCHES.format(attributes))
    assert module.entry.instructions[-1].calls == ("yes", "no")


def test_channel_zero_is_a_channel_where_it_makes_no_difference():
    """XLA's text keeps it, its protocol buffers lose it: where that differs, nothing is sure."""
    header = "num_partitions=4, replica_count=2"
    one = "%r = f32[8] all-reduce(%x), channel_id=N, replica_groups={{0,1}}, to_apply=%add"
    text = T.module(T.parameter("{replicated}") + "\n" + one, header=header)
    grouped = {
        number: hlo.judge(text.replace("=N", f"={number}")).verdicts[0]
        for number in ("0", "-1", "1")
    }
    assert [len(v.collective.groups[0]) for v in grouped.values()] == [8, 8, 8]
    assert [v.verdict for v in grouped.values()] == ["unproven", "unproven", "overwide"]
    assert "channel_id=0, which XLA reads in two ways" in grouped["0"].reason
    # With one partition per replica both readings give the same groups.
    alike = T.module("%x = f32[8] constant({1,2,3,4,5,6,7,8})\n" + one, header="replica_count=2")
    assert hlo.judge(alike.replace("=N", "=0")).verdicts[0].verdict == "redundant"


def test_an_attribute_given_twice_is_an_error():
    with pytest.raises(errors.HloSyntaxError, match="attribute 'replica_groups' is given twice"):
        judged(f"{ORDERS[0]}, replica_groups={T.ALL}")


@pytest.mark.parametrize("opcode", ["opt-barrier", "optimization-barrier"])
def test_barriers_pass_their_operands_on(opcode):
    text = T.module(
        f"""{T.parameter(T.DATA)}
        %t = (f32[8], f32[8]) tuple(%x, %x)
        %b = (f32[8], f32[8]) {opcode}(%t)
        %y = f32[8] get-tuple-element(%b), index=1
        {T.all_reduce("%y")}"""
    )
    assert [v.verdict for v in hlo.judge(text, mesh=T.MESH).verdicts] == ["redundant"]


def test_an_infeed_is_each_devices_own_whatever_its_sharding_says():
    text = T.module(
        f"""%k = token[] after-all()
        %i = (f32[8], token[]) infeed(%k), sharding={{replicated}}
        %y = f32[8] get-tuple-element(%i), index=0
        {T.all_reduce("%y")}"""
    )
    assert [v.verdict for v in hlo.judge(text, mesh=T.MESH).verdicts] == ["needed"]


def test_a_brace_may_end_a_line_of_attributes():
    text = """HloModule m
c { a = s32[] parameter(0) b = s32[] constant(3) ROOT r = pred[] compare(a, b), direction=LT }
b { i = s32[] parameter(0) o = s32[] constant(1) ROOT n = s32[] add(i, o) }
ENTRY e { z = s32[] constant(0) ROOT w = s32[] while(z), condition=c, body=b}
"""
    module = hlo.parse(text)
    assert [len(c.instructions) for c in module.computations.values()] == [3, 3, 2]
    assert module.computations["c"].instructions[-1].attribute("direction") == "LT"


VALUES = {
    "a": "word.1->b-2",
    "b": '"quoted, c=1 \\" }"',
    "c": "{[0:2], [1:3:2]}",
    "d": "{{0,1},{2,3}}",
    "e": '{op_name="f{(" stack_frame_id=3}',
    "f": '{x={[1,2],"}"},y=(1,0)}',
    "g": "{{{0}},{1}}",
    "h": "[2,4]<=[8]T(1,0)",
    "i": "{mesh['a'=2,'b'=4], [{'a'}, {}]}",
    "backend_config": '{"a":["}"],"b":{"c":{"d":"]("}}}',
    "k": "last",
}


@pytest.mark.parametrize("between", [", ", ",", ",\n  ", " ,   "])
@pytest.mark.parametrize("key", VALUES)
def test_each_value_ends_where_its_brackets_do(key, between):
    """As XLA prints attributes, and spaced otherwise; whatever stands before and behind."""
    listed = "".join(f"{between}{name}={value}" for name, value in VALUES.items())
    found = {n: listed[a:b] for n, a, b in attributes.iter_attributes(listed, 0, len(listed))}
    assert found == VALUES
    alone = f"{between}{key}={VALUES[key]}{between}k=1"
    found = {n: alone[a:b] for n, a, b in attributes.iter_attributes(alone, 0, len(alone))}
    assert found == {key: VALUES[key], "k": "1"} | ({"k": "1"} if key == "k" else {})


@pytest.mark.parametrize("value", ['{"a', "{{(1}}", '"a\\"', "{a={b}", "[1", '{"a"[1}'])
def test_a_value_that_never_ends_is_an_error(value):
    with pytest.raises(errors.HloSyntaxError, match="never closed|no value"):
        list(attributes.iter_attributes(f", x={value}", 0, len(value) + 4))
