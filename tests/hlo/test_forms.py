"""HLO as people write it: what XLA's own parser takes is read, and says the same."""

import re

import pytest

from shardrules import errors, hlo

from . import text as T
from .forms import FORMS, INLINE, NESTED
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
        except Exception:  # noqa: BLE001, S112 - it is no place for a comment
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


def test_computations_written_where_they_are_called():
    module = hlo.parse(INLINE)
    theirs = bindings.hlo_module_from_text(INLINE).computations()
    assert sorted(len(list(c.instructions())) for c in theirs) == sorted(
        len(c.instructions) for c in module.computations.values()
    )
    assert [v.verdict for v in hlo.judge(module).verdicts] == ["redundant"]
    assert [len(i.calls) for i in module.entry.instructions] == [0, 0, 2, 1]


@pytest.mark.parametrize(
    "text, operands",
    [
        ("ROOT r = f32[4] add(f32[4] a, f32[4] b)", 2),
        ("f32[4] add(f32[4]{0} %a, f32[4] %a)", 1),
        ("%r = f32[4] add(f32[4], f32[4])", 2),
        ('(f32[4], f32[]) tuple(f32[4] a, f32[] b), metadata={op_name="t"}\n', 2),
    ],
)
def test_one_instruction_alone(text, operands):
    module = hlo.parse(text)
    assert [i.opcode for i in module.entry.parameters] == ["parameter"] * operands
    theirs = list(bindings.hlo_module_from_text(text).computations())
    assert len(list(theirs[0].instructions())) == len(module.entry.instructions) == operands + 1


WINDOWS = """HloModule m
add {
  a = f32[] parameter(0)
  b = f32[] parameter(1)
  ROOT s = f32[] add(a, b)
}
ENTRY e {
  x = f32[2,9,7,4] parameter(0)
  k = f32[3,2,2,6] parameter(1)
  h = bf16[] constant(0)
  z = f32[] constant(0)
  GIVEN
}
"""


@pytest.mark.parametrize(
    "given",
    [
        "reduce-window(x, z), window={size=1x3x2x1}, to_apply=add",
        "reduce-window(x, h), window={size=1x3x2x1 stride=1x2x3x1 pad=0_0x1_2x0_3x0_0}, "
        "to_apply=add",
        "reduce-window(x, z), window={size=2x2x2x2 lhs_dilate=1x1x1x3 pad=1_9x1_1x0_0x-1_2}, "
        "to_apply=add",
        "reduce-window(x, z), window={size=1x4x2x1 rhs_dilate=1x3x1x1}, to_apply=add",
        "convolution(x, k), window={size=3x2}, dim_labels=b01f_01io->b01f, feature_group_count=2",
        "convolution(x, k), window={size=3x2 pad=1_1x0_2 stride=2x1 rhs_dilate=2x1}, "
        "dim_labels=b01f_01io->bf10, feature_group_count=2",
        "convolution(x, k), window={size=3x2 lhs_dilate=2x3}, dim_labels=b01f_01oi->01bf, "
        "feature_group_count=1, batch_group_count=2",
    ],
)
def test_shapes_of_windows_are_jaxlibs(given):
    """XLA's own tests leave them out in 16 modules."""
    text = WINDOWS.replace("GIVEN", "ROOT r = " + given)
    if "batch_group_count" in given:
        text = text.replace("f32[3,2,2,6]", "f32[3,2,6,4]")
    theirs = hlo.parse(bindings.hlo_module_from_text(text).to_string()).entry
    ours = hlo.parse(text).entry
    want, have = (e.instructions[e.root].shape for e in (theirs, ours))
    assert (have.element_type, have.dimensions) == (want.element_type, want.dimensions)


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
    "f32[] add(a, b)": "operand 'a' has neither a definition nor a shape",
    "a = f32[] add(f32[] b)\nc = f32[] add(f32[] d)": "expected the end after one instruction",
    "HloModule m\nENTRY e {\n  p = f32[] add(" + "negate(" * 5000: "operands are nested too deep",
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
