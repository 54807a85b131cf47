"""The reader: what XLA prints, what people write, and text that is not HLO."""

import gc
import importlib.metadata
import pathlib

import pytest
from core import versions

from shardrules import errors, hlo

from . import forms
from . import text as T

DATA = pathlib.Path(__file__).parent / "data"
# Dumps of JAX 0.12 write %tuple#0 for a get-tuple-element, which XLA's parser gives a name of
# its own; test_notations reads that.
FILES = sorted(p for p in DATA.glob("*.hlo") if not p.name.startswith("dump_0_12"))
# The parser of an older jaxlib rejects these.
READ_SINCE_0_12 = ("gpu_broadcast", "tpu7x_sparsecore")

MIXED = """HloModule jit_f, is_scheduled=true, num_partitions=8, replica_count=2

// a comment
%region (x: f32[], y: f32[]) -> f32[] {
  x = f32[] parameter(0)
  y = f32[] parameter(1)
  ROOT add.1 = f32[] add(x, y)
}

ENTRY %main.1 (p: f32[8,128]) -> (f32[8,128], (s32[], f32[2])) {
  %p = f32[8,128]{1,0:T(8,128)(2,1)S(1)} parameter(0), metadata={op_name="x[\\"a\\"]"}
  %c = f32[2,2]{1,0} constant({ { 1, 2 },
    { 3, -inf } })
  %t = (s32[], (f32[8,128]{1,0:T(8,128)}, u4[4]{0:E(4)}), token[]) custom-call(f32[8,128]{1,0} %p), custom_call_target="f", backend_config={debug = false, ir = "ML\\EF{\\"}", name = "k"}
  %n = bf16[<=8]{0} copy(
      %p /* the operand */)
  %many = f32[8,128] custom-call(%p, %p, %p, %p, %p, /*index=5*/%p), custom_call_target="g"
  %sum = f32[8,128]{1,0} add(f32[8,128]{1,0} %p, f32[8,128]{1,0} %many), sharding={devices=[4,1,2]<=[8] last_tile_dim_replicate}, frontend_attributes={a="b, c={d}",e=f}
  %u = f32[8] frobnicate(%n), color=blue, set={{1,2},{3}}, shape=[2,4]<=[8]T(0)
  ROOT %out = (f32[8,128], (s32[], f32[2])) tuple(%sum, %t) // the end
}, execution_thread="main"
"""


def test_every_notation_in_one_module():
    module = hlo.parse(MIXED)
    assert (module.name, module.num_partitions, module.replica_count) == ("jit_f", 8, 2)
    assert list(module.computations) == ["region", "main.1"]
    by_name = {i.name: i for i in module.entry.instructions}
    assert by_name["p"].shape == ("f32", (8, 128), "1,0:T(8,128)(2,1)S(1)", None, False)
    assert by_name["c"].literal.split() == "{ { 1, 2 }, { 3, -inf } }".split()
    assert str(by_name["t"].shape) == "(s32[], (f32[8,128], u4[4]), token[])"
    assert by_name["t"].shape.bytes == 4 + 8 * 128 * 4 + 2
    assert by_name["t"].attribute("custom_call_target") == '"f"'
    assert by_name["t"].attribute("backend_config").endswith('name = "k"}')
    assert by_name["n"].shape.dimensions == (8,)
    assert len(by_name["many"].operands) == 6
    names = [module.entry.instructions[o].name for o in by_name["sum"].operands]
    assert names == ["p", "many"]
    assert by_name["u"].opcode == "frobnicate"
    assert by_name["u"].attribute("set") == "{{1,2},{3}}"
    assert by_name["u"].attribute("shape") == "[2,4]<=[8]T(0)"
    assert module.metadata(by_name["p"]).op_name == 'x["a"]'
    assert module.entry.root == len(module.entry.instructions) - 1


def test_a_whole_module_on_few_lines():
    module = hlo.parse("HloModule m\nENTRY e (p: f32[]) -> f32[] { ROOT p = f32[] parameter(0) }")
    assert [i.opcode for i in module.entry.instructions] == ["parameter"]


def test_windows_line_ends():
    assert len(hlo.parse(MIXED.replace("\n", "\r\n")).entry.instructions) == 8


def test_stack_frames_and_old_metadata():
    module = hlo.parse((DATA / "gpu_uvw.hlo").read_text())
    instruction = next(i for i in module.entry.instructions if i.name == "all-reduce-start")
    metadata = module.metadata(instruction)
    assert metadata.op_name == "jit(l)/transpose(jvp())/shard_map/psum"
    # stack_frame_id=8 is line 29 in l, called at line 71 of the module
    assert [(f.file, f.line, f.function) for f in metadata.frames] == [
        ("program.py", 29, "l"),
        ("program.py", 71, "<module>"),
    ]
    old = hlo.parse(
        "HloModule m\nENTRY e {\n  ROOT p = f32[] parameter(0), metadata={op_name="
        '"a" source_file="b.py" source_line=7}\n}\n'
    )
    assert str(old.metadata(old.entry.instructions[0]).frames[0]) == "b.py:7"


def _since_0_12():
    """Whether XLA's parser here is that of jaxlib 0.12 or newer."""
    jaxlib = importlib.metadata.version("jaxlib").split(".")
    return tuple(map(int, jaxlib[:2])) >= (0, 12)


@pytest.mark.parametrize(
    "path",
    [
        pytest.param(p, marks=[versions.where(_since_0_12)] if p.stem in READ_SINCE_0_12 else [])
        for p in FILES
    ],
    ids=lambda p: p.stem,
)
def test_as_xla_reads_it(path):
    """Opcodes, operands and users equal what XLA's own parser gives."""
    bindings = pytest.importorskip("jaxlib._hlo")
    text = path.read_text()
    if "call-start()" in text:  # whose operands come later: XLA rejects that in a schedule
        text = text.replace("is_scheduled=true, ", "", 1)
    compare(text, bindings)


def compare(text, bindings):
    """Fail where our module differs from XLA's."""
    module = hlo.parse(text)
    theirs = {c.name: c for c in bindings.hlo_module_from_text(text).computations()}
    # XLA wraps `all-gather-start` and its kin in computations that the text doesn't show.
    assert set(module.computations) <= set(theirs)
    assert all(n.startswith("async_wrapped") for n in set(theirs) - set(module.computations))
    for computation in module.computations.values():
        rows = {i.name: i for i in theirs[computation.name].instructions()}
        assert set(rows) == {i.name for i in computation.instructions}
        users = computation.users()
        for position, ours in enumerate(computation.instructions):
            row = rows[ours.name]
            name = str(row.opcode).rpartition(".")[2][1:].replace("-", "").lower()
            opcode = ours.opcode.replace("-", "")
            assert opcode in (name, _SPELLED.get(name)) or name in (
                "asyncstart",
                "asyncdone",
                "asyncupdate",
            ), (ours.name, name, opcode)
            assert [computation.instructions[o].name for o in ours.operands] == [
                o.name for o in row.operands()
            ]
            assert {computation.instructions[u].name for u in users[position]} == {
                u.name for u in row.users()
            }


_SPELLED = {
    "sin": "sine",
    "cos": "cosine",
    "exp": "exponential",
    "clz": "countleadingzeros",
    "expm1": "exponentialminusone",
    "log1p": "logplusone",
    "populationcount": "popcnt",
    "topk": "topk",
}

BAD = {
    "": "<text> is empty: expected HLO text, which begins with 'HloModule NAME'; pass what "
    "compiled.as_text() returns\n  line 1, column 1:",
    "  \n// nothing\n": "<text> is empty",
    "dump/step.hlo": "<text> is not HLO text: expected 'HloModule NAME', as compiled.as_text() "
    "prints it (this looks like a file's name: pass the text that the file holds)\n"
    "  line 1, column 1:\n    dump/step.hlo\n    ^",
    "hello": "<text> is not HLO text: expected 'HloModule NAME', as compiled.as_text() prints it\n"
    "  line 1, column 1:\n    hello\n    ^",
    "module @jit_f {\n}": "as compiled.as_text() prints it (this looks like StableHLO: compile it "
    "first)",
    "HloModule m\n": "<text> has no ENTRY computation: is the text cut?\n  line 2, column 1:",
    "HloModule m\nENTRY e {\n  p = f32[] parameter(0)\n": "the text ends inside computation 'e': '}' is missing\n  line 4, column 1:",
    "HloModule m\nENTRY e {\n}\n": "computation 'e' holds no instruction\n  line 2, column 9:",
    "HloModule m\nENTRY e {\n  p = f32[] add(q)\n}\n": "operand 'q' of 'p' is not defined before it in computation 'e'\n  line 3, column 1:",
    "HloModule m\nENTRY e {\n  p = f32[] parameter(0)\n  p = f32[] parameter(1)\n}\n": "instruction 'p' is defined twice in computation 'e'\n  line 4, column 1:",
    "HloModule m\nENTRY e {\n  p = f32[] parameter(zero)\n}\n": "expected the parameter's number\n  line 3, column 23:",
    "HloModule m\nENTRY e {\n  p = f32[] parameter(1)\n}\n": "parameter 1 of computation 'e': it has only 1 parameters\n  line 3, column 1:",
    "HloModule m\nENTRY e {\n  p = f32[] parameter(0\n}\n": "this '(' is never closed\n  line 3, column 22:\n      p = f32[] parameter(0\n"
    "                         ^",
    "HloModule m\nENTRY e {\n  p = float parameter(0)\n}\n": "expected a shape such as f32[8,128]{1,0}\n  line 3, column 7:",
    "HloModule m\nENTRY e {\n  p = f32[x] parameter(0)\n}\n": "expected sizes such as 8,128 or <=8\n  line 3, column 11:",
    "HloModule m\nENTRY e {\n  what is this\n}\n": "expected an instruction, '%name = shape opcode(operands)', or '}'\n  line 3, column 3:",
    "HloModule m\nENTRY e {\n  p = f32[] parameter(0)\n  ROOT f = f32[] fusion(p), kind=kLoop, "
    "calls=%gone\n}\n": "'f' calls computation 'gone', which is not defined before it\n  line 4, column 1:",
    "HloModule m\na {\n  ROOT x = f32[] call(), to_apply=b\n}\nb {\n  ROOT x = f32[] call(), "
    "to_apply=a\n}\nENTRY e {\n  ROOT p = f32[] parameter(0)\n}\n": "'x' calls computation 'b', which is not defined before it\n  line 3, column 1:",
    "HloModule m\nENTRY e {\n  ROOT p = f32[] parameter(0)\n}\nHloModule n\n": "a second module begins here; pass one module at a time\n  line 5, column 1:",
    "HloModule m\nENTRY e {\n  ROOT p = f32[] parameter(0)\n}\nENTRY f {\n  ROOT p = f32[] "
    "parameter(0)\n}\n": "a second ENTRY computation\n  line 5, column 1:",
    "HloModule m, num_partitions=many\nENTRY e {\n  ROOT p = f32[] parameter(0)\n}\n": "num_partitions is 'many', not a positive count\n  line 1, column 29:",
    "HloModule m\nENTRY e {\n  a = f32[] add(b)\n  ROOT b = f32[] add(a)\n}\n": "operand 'b' of 'a' is not defined before it in computation 'e'\n  line 3, column 1:",
    "HloModule m\n???\n": "expected a computation, '%name (parameters) -> shape {', a table or the "
    "end\n  line 2, column 1:",
}


@pytest.mark.parametrize("bad", BAD, ids=range(len(BAD)))
def test_what_is_not_hlo_is_an_error_with_its_place(bad):
    with pytest.raises(errors.HloSyntaxError) as caught:
        hlo.parse(bad)
    assert BAD[bad] in str(caught.value)
    assert caught.value.line >= 1 and caught.value.column >= 1


def test_cut_text_is_an_error_wherever_it_is_cut():
    whole = (DATA / "gpu_copy.hlo").read_text().rstrip()
    for stop in range(0, len(whole), 37):
        with pytest.raises(errors.HloSyntaxError):
            hlo.parse(whole[:stop])


def test_deep_nesting_is_no_recursion_error():
    deep = "(" * 20_000
    with pytest.raises(errors.HloSyntaxError):
        hlo.parse(f"HloModule m\nENTRY e {{\n  p = {deep} parameter(0)\n}}\n")
    nested = "(" * 5000 + "f32[]" + ")" * 5000
    module = hlo.parse(f"HloModule m\nENTRY e {{\n  ROOT p = {nested} parameter(0)\n}}\n")
    assert len(module.entry.instructions[0].shape.leaves()) == 1


def test_only_text_is_taken():
    with pytest.raises(
        TypeError,
        match=r"parse takes HLO text as a str, not bytes; read a file "
        r"first, or pass compiled.as_text\(\).",
    ):
        hlo.parse(b"HloModule m")


def test_builder_makes_modules():
    module = hlo.parse(T.module(T.parameter(T.DATA) + "\n" + T.all_reduce("%x")))
    assert module.entry.instructions[-1].calls == ("add",)


def test_attributes_that_run_over_several_lines():
    """JAX writes a kernel's metadata as JSON with line breaks into frontend_attributes."""
    module = hlo.parse("""HloModule m, num_partitions=8

ENTRY %main (a: f32[4]) -> f32[4] {
  %a = f32[4]{0} parameter(0)
  %k = f32[4]{0} custom-call(%a), custom_call_target="tpu_custom_call", frontend_attributes={kernel_metadata={
"mesh_axes":"[\\"data\\", \\"model\\"]"
},shardrules.effects="local",shardrules.kernel="k"}, metadata={op_name="f"}
  ROOT %n = f32[4]{0} custom-call(%k), custom_call_target="t", frontend_attributes={kernel_metadata={
"x":"y"
}}
}
""")
    kernel, other = module.entry.instructions[1:]
    assert (kernel.opcode, kernel.name, other.name) == ("custom-call", "k", "n")
    assert 'shardrules.effects="local"' in kernel.attribute("frontend_attributes")
    assert module.metadata(kernel).op_name == "f"
    assert other.attribute("frontend_attributes").count("\n") == 2


@pytest.mark.parametrize("text", [forms.NESTED, *forms.FORMS.values()])
def test_the_instructions_that_call_are_listed(text):
    """However they are written, and in whatever order."""
    for computation in hlo.parse(text).computations.values():
        found = [k for k, one in enumerate(computation.instructions) if one.calls]
        assert list(computation.calling) == found


def test_what_is_read_is_old_at_once():
    """The cycle collector walks a module in full collections alone, and what was frozen stays."""
    gc.enable()
    gc.unfreeze()
    module = hlo.parse(MIXED)
    old = {id(one) for one in gc.get_objects(generation=2)}
    assert {id(one) for one in module.entry.instructions} <= old and gc.isenabled()
    gc.freeze()
    try:
        hlo.parse(MIXED)
        assert gc.get_freeze_count()
    finally:
        gc.unfreeze()
