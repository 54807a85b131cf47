"""A summary of a computation gives what evaluating its instructions gives."""

import pytest

from shardrules import hlo
from shardrules.hlo.proof import evaluation, summaries

from . import text as T

REGIONS = """%least (a: s32[], b: s32[]) -> s32[] {
  %a.3 = s32[] parameter(0)
  %b.3 = s32[] parameter(1)
  ROOT %m = s32[] minimum(%a.3, %b.3)
}

%inner (a: s32[8], b: s32[8]) -> s32[8] {
  %a.4 = s32[8]{0} parameter(0)
  %b.4 = s32[8]{0} parameter(1)
  %even = s32[8]{0} subtract(%b.4, %b.4)
  ROOT %sum.4 = s32[8]{0} add(%a.4, %even)
}

%unused (a: s32[8], b: s32[8], c: s32[8]) -> s32[8] {
  %a.5 = s32[8]{0} parameter(0)
  %b.5 = s32[8]{0} parameter(1)
  %c.5 = s32[8]{0} parameter(2)
  ROOT %sum.5 = s32[8]{0} add(%c.5, %b.5)
}

"""
# What %r is made of the parameters %p, %q: and whether that has a summary.
BODIES = {
    "one": ("%r = s32[8]{0} negate(%p)", True),
    "two": ("%r = s32[8]{0} add(%q, %p)", True),
    "once": ("%s = s32[8]{0} add(%q, %p)\n%r = s32[8]{0} add(%s, %q)", True),
    "itself": ("%s = s32[8]{0} subtract(%p, %p)\n%r = s32[8]{0} add(%s, %q)", True),
    "itself and not": ("%s = s32[8]{0} subtract(%p, %p)\n%r = s32[8]{0} add(%s, %p)", True),
    "zero": (
        "%c = s32[] constant(0)\n%z = s32[8]{0} broadcast(%c), dimensions={}\n"
        "%r = s32[8]{0} multiply(%z, %q)",
        True,
    ),
    "number": (
        "%c = s32[] constant(3)\n%z = s32[8]{0} broadcast(%c), dimensions={}\n"
        "%l = pred[8]{0} compare(%p, %z), direction=LT\n%r = s32[8]{0} select(%l, %q, %z)",
        True,
    ),
    "chosen by a number": (
        "%c = pred[] constant(true)\n%r = s32[8]{0} select(%c, %p, %q)",
        False,
    ),
    "iota": (
        "%i = s32[8]{0} iota(), iota_dimension=0\n%r = s32[8]{0} add(%i, %p)",
        False,
    ),
    "sum": (
        "%c = s32[] constant(0)\n%s = s32[] reduce(%p, %c), dimensions={0}, to_apply=%addi\n"
        "%r = s32[8]{0} broadcast(%s), dimensions={}",
        True,
    ),
    "least": (
        "%c = s32[] constant(9)\n%s = s32[] reduce(%p, %c), dimensions={0}, to_apply=%least\n"
        "%b = s32[8]{0} broadcast(%s), dimensions={}\n%r = s32[8]{0} add(%b, %q)",
        True,
    ),
    "sorted": (
        "%s = (s32[8], s32[8]) sort(%p, %q), dimensions={0}, to_apply=%least\n%r = s32[8] add(%p, %q)",
        False,
    ),
    "nested": ("%r = s32[8]{0} fusion(%p, %q), kind=kLoop, calls=%inner", True),
    "nested, turned": ("%r = s32[8]{0} fusion(%q, %p), kind=kLoop, calls=%inner", True),
    "nested, lacking": ("%r = s32[8]{0} fusion(%q, %p), kind=kLoop, calls=%unused", False),
    "slice": ("%r = s32[4]{0} slice(%p), slice={[0:4]}", True),
    "slice at a number": (
        "%c = s32[] constant(2)\n%r = s32[4]{0} dynamic-slice(%p, %c), dynamic_slice_sizes={4}",
        False,
    ),
    "packed": ("%r = s32[16]{0} concatenate(%p, %q), dimensions={0}", False),
    "padded": ("%c = s32[] constant(0)\n%r = s32[9]{0} pad(%p, %c), padding=0_1", False),
    "several": ("%s = s32[8]{0} add(%q, %p)\n%r = (s32[8], s32[8], s32[8]) tuple(%p, %s, %q)", True),
    "operands of none": ("%r = s32[8]{0} iota(%p, %q), iota_dimension=0", False),
}  # fmt: skip
CALLS = [("x", "y"), ("y", "x"), ("z", "x"), ("x", "x"), ("z", "z"), ("w", "y"), ("w", "z")]


def program(body: str) -> str:
    lines = "\n".join("  " + line for line in body.splitlines()).replace("%r =", "ROOT %r =")
    shape = body.splitlines()[-1].removeprefix("%r = ").partition("{0}")[0]
    shape = shape if not shape.startswith("(") else shape.partition(")")[0] + ")"
    shape = shape.partition(" sl")[0].partition(" add")[0]
    before = REGIONS + (
        "%f (p: s32[8], q: s32[8]) -> s32[] {\n  %p = s32[8]{0} parameter(0)\n"
        f"  %q = s32[8]{{0}} parameter(1)\n{lines}\n}}\n\n"
    )
    entry = [
        T.parameter(sharding, "s32[8]", name, number)
        for number, (name, sharding) in enumerate(
            [("x", T.DATA), ("y", T.MODEL), ("z", "{replicated}"), ("w", T.BOTH)]
        )
    ]
    for number, given in enumerate(CALLS):
        operands = ", ".join("%" + name for name in given)
        entry.append(f"%c{number} = {shape} fusion({operands}), kind=kLoop, calls=%f")
    made = [f"%c{number}" for number in range(len(CALLS))]
    entry.append(f"%t = ({', '.join([shape] * len(made))}) tuple({', '.join(made)})")
    return T.module("\n".join(entry), before=before)


def states(text: str) -> tuple[list, evaluation.Proof]:
    """Give all that is known of each result, the differences and the causes in order too."""
    made = []
    prepare = evaluation.Proof.__init__

    def keep(self, *args, **named):
        prepare(self, *args, **named)
        made.append(self)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(evaluation.Proof, "__init__", keep)
        judgement = hlo.judge(hlo.parse(text), mesh=T.MESH)
    return [output._context[0] for output in judgement.outputs], made[0]


@pytest.mark.parametrize("name", BODIES)
def test_a_summary_gives_what_evaluation_gives(name, monkeypatch):
    body, has_summary = BODIES[name]
    found, proof = states(program(body))
    assert (proof._summaries["f"] is not None) == has_summary
    monkeypatch.setattr(summaries, "summarise", lambda *_: None)
    expected, _ = states(program(body))
    assert found == expected
    assert len({*expected}) > 2 or name == "operands of none"


def test_summaries_of_deep_calls_end():
    """Each computation calls the next one; a chain has a summary to a depth, and no end."""
    chain = "".join(
        f"%f{n} (p: s32[8]) -> s32[8] {{\n  %p{n} = s32[8]{{0}} parameter(0)\n  ROOT %r{n} = s32[8]{{0}} "
        + (f"fusion(%p{n}), kind=kLoop, calls=%f{n - 1}\n}}\n\n" if n else "negate(%p0)\n}\n\n")
        for n in range(120)
    )
    entry = f"""
    {T.parameter(T.DATA, "s32[8]")}
    %a = s32[8] fusion(%x), kind=kLoop, calls=%f119
    %b = s32[8] fusion(%a), kind=kLoop, calls=%f119
    %r = s32[8] fusion(%b), kind=kLoop, calls=%f10
    """
    found, proof = states(T.module(entry, before=chain))
    assert proof._summaries["f10"] == (0,)
    assert proof._summaries["f119"] is None
    assert found[0].causes
