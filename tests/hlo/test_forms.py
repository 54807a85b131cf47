"""HLO as people write it: what XLA's own parser takes is read, and says the same."""

import re

import pytest

from shardrules import errors, hlo

from . import text as T
from .forms import FORMS, NESTED
from .test_parser import compare

bindings = pytest.importorskip("jaxlib._hlo")


@pytest.mark.parametrize("name", FORMS)
def test_as_xla_reads_it(name):
    compare(FORMS[name], bindings)


@pytest.mark.parametrize("name", FORMS)
@pytest.mark.parametrize("change", ["\ufeff", "\r\n", "\t"])
def test_and_with_other_white_space(name, change):
    text = FORMS[name]
    changed = (
        change + text if change == "\ufeff" else text.replace("\n", change.replace("\t", "\n\t"))
    )
    ours, theirs = hlo.parse(changed), hlo.parse(text)
    assert [[(i.name, i.opcode) for i in c.instructions] for c in ours.computations.values()] == [
        [(i.name, i.opcode) for i in c.instructions] for c in theirs.computations.values()
    ]


COMMENTED = """HloModule m, num_partitions=4

add {
  a = s32[] parameter(0)
  ROOT s = s32[] add(a, a)
}

ENTRY e {
  p = s32[] parameter(0), sharding={replicated}
  t = s32[2]{0} parameter(1), sharding={devices=[2,2]<=[4] last_tile_dim_replicate}
  c = s32[] constant(5)
  k = s32[2] constant({1, 2})
  d = s32[2] add(t, k)
  r = s32[2] broadcast(c), dimensions={}
  m = s32[2] multiply(r, d)
  ROOT o = s32[2] all-reduce(m), channel_id=1, replica_groups={{0,1},{2,3}}, use_global_device_ids=true, to_apply=add
}
"""


@pytest.mark.parametrize("comment", ["/*, x={) */", "/*index=1*/", "// }\n"])
def test_comments_between_any_two_words(comment):
    def judged(text):
        judgement = hlo.judge(hlo.parse(text))
        (verdict,) = judgement.verdicts
        return verdict.verdict, [one.classes for one in judgement.outputs]

    assert judged(COMMENTED) == ("redundant", [((0, 1), (2, 3))])
    valid = 0
    for found in re.finditer(r"[(){},=\[\]]|(?<=[(){},=\[\] ])\w", COMMENTED):
        text = COMMENTED[: found.start()] + comment + COMMENTED[found.start() :]
        try:
            bindings.hlo_module_from_text(text)
        except Exception:
            continue
        valid += 1
        assert judged(text) == judged(COMMENTED), text
    assert valid > 150


def test_instructions_written_as_operands():
    module = hlo.parse(NESTED)
    assert [i.opcode for i in module.entry.instructions] == [
        *("parameter", "parameter", "negate", "constant", "negate", "multiply", "add")
    ]
    assert [i.operands for i in module.entry.instructions][2:] == [(0,), (), (3,), (1, 4), (2, 5)]
    assert module.entry.instructions[3].literal == "{1, 2, 3, 4}"
    theirs = list(bindings.hlo_module_from_text(NESTED).computations())[0]
    assert len(list(theirs.instructions())) == len(module.entry.instructions)


BAD = {
    "HloModule m\nENTRY e {\n  p = f32[] parameter(0),\n}\n": "expected an attribute, 'key=value'",
    "HloModule m\nENTRY e {\n  p = f32[] parameter(0) p\n}\n": "expected an instruction",
    "HloModule m\nENTRY e {\n  p = f32[] parameter(0), x= }\n": "attribute 'x' has no value",
    "HloModule m\nENTRY e {\n  ROOT c = convolution()\n}\n": "the shape of 'c' is left out; write "
    "it before 'convolution'",
    "HloModule m, entry_computation_layout={(f32[4])->f32[]}\na {\n  p = f32[] parameter(0)\n}\n": (
        "is cut off: has no ENTRY computation"
    ),
    "HloModule m\nENTRY e {\n  p = f32[] parameter(\u00b2)\n}\n": "expected the parameter's number",
    "f32[] add(a, b)": "is not HLO text",
    "HloModule m\nENTRY e {\n  p = f32[] add("
    + "f32[] negate(" * 5000: "operands are nested too deep",
    "HloModule m\nENTRY e {\n  p = f32[] call(), to_apply={ ROOT a = f32[] parameter(0) }\n}": (
        "expected the name of a computation"
    ),
    "HloModule m\nENTRY e {\n  p = f32[] call(), to_apply="
    + "{ a = f32[] call(), to_apply=" * 300: ("is never closed"),
}


@pytest.mark.parametrize("bad", BAD, ids=range(len(BAD)))
def test_what_is_no_hlo_is_an_error(bad):
    with pytest.raises(errors.HloSyntaxError) as caught:
        hlo.parse(bad)
    assert BAD[bad] in str(caught.value)


def test_nothing_stands_on_a_line_unread():
    """Each of these lines looks like one instruction to whoever reads up to its end."""
    lines = T.parameter(T.DATA) + "\n" + T.all_reduce("%x")
    text = T.module(lines).replace("\n  ROOT %r", " ROOT %r")
    assert [i.opcode for i in hlo.parse(text).entry.instructions] == ["parameter", "all-reduce"]
    text = T.module(lines).replace("\n  ROOT %r =", " ROOT %r=")
    assert [i.opcode for i in hlo.parse(text).entry.instructions] == ["parameter", "all-reduce"]
    whole = (
        T.module(lines).replace("\n\n", "\n").replace("}\n%", "} %").replace("}\nENTRY", "} ENTRY")
    )
    assert len(hlo.parse(whole).computations) == 4
