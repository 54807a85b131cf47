"""Computations that repeat an earlier one: recognised, read when asked for, and judged as alone."""

import pickle

import pytest
from raising import raises

from shardrules import hlo
from shardrules.errors import HloSyntaxError

from . import text as T

BODY = """%{name} (p: f32[8], q: f32[8]) -> f32[8] {{
  %p{n} = f32[8]{{0}} parameter(0)
  %q{n} = f32[8]{{0}} parameter(1)
  %c{n} = s32[] constant(3)
  %s{n} = f32[8]{{0}} subtract(%p{n}, %q{n}), metadata={{op_name="jit(f)/{n}/sub" stack_frame_id={n}}}
  ROOT %m{n} = f32[8]{{0}} multiply(%s{n}, %q{n}), metadata={{op_name="jit(f)/{n}/mul"}}
}}

"""
# Calls the computation of its own number.
OUTER = """%outer{n} (p: f32[8]) -> f32[8] {{
  %a{n} = f32[8]{{0}} parameter(0)
  ROOT %b{n} = f32[8]{{0}} fusion(%a{n}, %a{n}), kind=kLoop, calls=%f{callee}
}}

"""


def computation(n: int, old: str = "", new: str = "") -> str:
    text = BODY.format(name=f"f{n}", n=n)
    assert old in text
    return text.replace(old, new) if old else text


def parsed(*computations: str) -> hlo.Module:
    entry = T.parameter(T.DATA, "f32[32]") + "\n" + "%n = f32[8] negate(%x)"
    return hlo.parse(T.module(entry, before="".join(computations)))


def repeats(*computations: str) -> bool:
    """Tell whether the last of some computations repeats an earlier one."""
    module = parsed(*computations)
    *_, last, _ = module.computations.values()
    return last.original is not last


def test_names_and_metadata_may_differ():
    assert repeats(computation(1), computation(2))


def test_a_repetition_holds_what_reading_it_alone_gives():
    module, alone = parsed(computation(1), computation(2)), parsed(computation(2))
    repetition = module.computations["f2"]
    assert "instructions" not in vars(repetition)
    for one, other in zip(repetition.instructions, alone.computations["f2"].instructions):
        assert one[:5] == other[:5]
        assert one.text[one.start : one.end] == other.text[other.start : other.end]
    assert module.metadata(repetition.instructions[-1]).op_name == "jit(f)/2/mul"


def test_a_module_can_be_pickled():
    module = parsed(computation(1), computation(2))
    again = pickle.loads(pickle.dumps(module))
    assert repr(again.computations["f2"].instructions) == repr(
        module.computations["f2"].instructions
    )


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("f32[8]{0} subtract", "f32[8]{1} subtract"),
        ("subtract(%p2, %q2)", "subtract(%q2, %p2)"),
        ("subtract(%p2, %q2)", "divide(%p2, %q2)"),
        ("constant(3)", "constant(4)"),
        ("parameter(0)\n  %q2 = f32[8]{0} parameter(1)", "parameter(1)\n  %q2 = f32[8]{0} parameter(0)"),
        ("ROOT %m2", "%m2"),
        ("multiply(%s2, %q2)", "multiply(%s2, %q2), sharding={replicated}"),
        ("multiply(%s2, %q2)", "multiply(%s2, %s2)"),
        (', metadata={op_name="jit(f)/2/mul"}', ""),
        ('"jit(f)/2/mul"', '"jit(f)/2/\\"mul"'),
        ("stack_frame_id=2", "stack_frame_id={2}"),
    ],
)  # fmt: skip
def test_nothing_else_may_differ(old, new):
    assert not repeats(computation(1), computation(2, old, new))


@pytest.mark.parametrize(
    "extra",
    [
        ', frontend_attributes={a="%b"}',  # a name in a string
        ', frontend_attributes={a="x, metadata={y}z"}',  # metadata in a string
        ', frontend_attributes={a="\\""}',
        ", invented=1",
        ", control-predecessors={%s}",
    ],
)
def test_what_a_string_or_an_unknown_attribute_holds_is_no_name(extra):
    one, two = (computation(n, f"multiply(%s{n}, %q{n})", f"multiply(%s{n}, %q{n}){extra.replace('%s', f'%s{n}')}") for n in (1, 2))  # fmt: skip
    assert not repeats(one, two)


@pytest.mark.parametrize("extra", ['frontend_attributes={{a="%p{n}"}}', "origin={{%z{n}}}"])
def test_a_name_elsewhere_does_not_stand_for_an_operand_without_percent(extra):
    one, two = (
        computation(n, f"%s{n} =", "%s =").replace(f"multiply(%s{n}, %q{n})", f"multiply(s, %q{n}), {extra.format(n=n)}").replace(f', metadata={{op_name="jit(f)/{n}/mul"}}', "")
        for n in (1, 2)
    )  # fmt: skip
    assert "multiply(s, " in one
    assert not repeats(one, two)


def test_unknown_attributes_of_repetitions_are_found():
    module = parsed(*[computation(n, "subtract(", "subtract(") for n in (1, 2)])
    assert not module.unknown
    both = [computation(n, f"multiply(%s{n}, %q{n})", f"multiply(%s{n}, %q{n}), invented=1") for n in (1, 2)]  # fmt: skip
    unknown = parsed(*both).unknown
    assert list(unknown.values()) == ["invented", "invented"]
    with pytest.warns(DeprecationWarning):
        assert parsed(*both).strange == unknown


def test_a_repetition_calls_a_repetition():
    outer = [OUTER.format(n=n, callee=n) for n in (1, 2)]
    module = parsed(computation(1), computation(2), *outer)
    one, two = module.computations["outer1"], module.computations["outer2"]
    assert two.original is one
    assert (one.called, two.called) == (("f1",), ("f2",))
    assert [calls for _, calls in two.calls()] == [("f2",)]


def test_what_calls_another_computation_is_no_repetition():
    other = computation(2, "subtract", "divide")
    outer = [OUTER.format(n=n, callee=n) for n in (1, 2)]
    assert not repeats(computation(1), other, *outer)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("multiply(%s2, %q2)", "multiply(%s2, %r2)"),
        ("%s2 =", "%q2 ="),
        ("%c2 =", "%p1 = f32[8]{0} negate(%z)\n  %c2 ="),
    ],
)
def test_a_wrong_computation_is_refused_as_if_it_were_alone(old, new):
    wrong = computation(2, old, new)
    with pytest.raises(HloSyntaxError) as alone:
        parsed(wrong)
    with pytest.raises(HloSyntaxError) as repeated:
        parsed(computation(1), wrong)
    assert repeated.value.reason == alone.value.reason
    assert repeated.value.column == alone.value.column


def test_a_repetition_of_a_call_whose_callee_is_missing_is_refused():
    outer = [OUTER.format(n=n, callee=n) for n in (1, 2)]
    with raises(HloSyntaxError, text_line=lambda line: "calls=%f2" in line):
        parsed(computation(1), *outer)


def test_each_layer_has_its_own_verdict():
    """Two layers are one computation; what they are given differs, and so do the verdicts."""
    entry = f"""
    {T.parameter(T.DATA, "f32[8]", "x", 0)}
    {T.parameter("{replicated}", "f32[8]", "y", 1)}
    %a = f32[8] fusion(%x, %y), kind=kLoop, calls=%f1
    %b = f32[8] fusion(%y, %y), kind=kLoop, calls=%f2
    {T.all_reduce("%a", T.OVER_DATA, name="r")}
    {T.all_reduce("%b", T.OVER_DATA, name="s")}
    %t = (f32[8], f32[8]) tuple(%r, %s)
    """
    module = hlo.parse(T.module(entry, before=computation(1) + computation(2)))
    judgement = hlo.judge(module, mesh=T.MESH)
    assert [v.verdict for v in judgement.verdicts] == ["needed", "redundant"]
    assert judgement.verdicts[0].reason == "not proven equal: parameter 0 (x) is sharded over data"
    assert "instructions" not in vars(module.computations["f2"])


def test_an_argument_that_is_missing_is_named_in_the_repetition():
    entry = f"""
    {T.parameter("{replicated}", "f32[8]", "y", 0)}
    %a = f32[8] fusion(%y, %y), kind=kLoop, calls=%f1
    %b = f32[8] fusion(%y), kind=kLoop, calls=%f2
    {T.all_reduce("%b", T.OVER_DATA)}
    """
    module = hlo.parse(T.module(entry, before=computation(1) + computation(2)))
    (verdict,) = hlo.judge(module, mesh=T.MESH).verdicts
    assert "parameter 1 of computation 'f2' has no argument" in verdict.reason
