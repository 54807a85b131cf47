"""Shardings of parameters that a text lacks, as with JAX 0.12: from a dump, from flags, from JAX."""

import pathlib
import shlex

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from shardrules import __main__ as command_line
from shardrules import errors, hlo, program, testing
from shardrules.hlo.reader import files, shardings

from . import text as T

DATA = pathlib.Path(__file__).parent / "data"
BEFORE = (DATA / "dump_0_12_0_1_before_optimizations.hlo").read_text()
AFTER = (DATA / "dump_0_12_0_1_after_optimizations.hlo").read_text()
MESH = {"data": 4, "model": 2}


@pytest.mark.parametrize(
    "text, expected",
    [
        ("P('data')", "{mesh['data'=4,'model'=2], [{'data'}, {}]}"),
        ("P(data, None)", "{mesh['data'=4,'model'=2], [{'data'}, {}]}"),
        (
            "PartitionSpec(None, ('data', 'model'))",
            "{mesh['data'=4,'model'=2], [{}, {'data', 'model'}]}",
        ),
        ("jax.sharding.PartitionSpec()", "{mesh['data'=4,'model'=2], [{}, {}]}"),
        ("{devices=[8,1]<=[8]}", "{devices=[8,1]<=[8]}"),
    ],
)
def test_a_spec_as_hlo_writes_it(text, expected):
    (one,) = shardings.read_specs(text)
    assert shardings.as_hlo(one, MESH, 2) == expected


def test_several_specs_stand_behind_each_other():
    assert shardings.read_specs("P('a'); P();") == ["P('a')", "P()"]
    assert shardings.as_hlo("P()", None, 3) == "{replicated}"


@pytest.mark.parametrize(
    "text",
    [
        "",
        "data",
        "P(",
        "P(1)",
        "P(f())",
        "P('a b')",
        "P('a'), P()",
        "Q('a')",
        "{}",
        "P(" * 1000,
        "P(*a)",
        "P(a=1)",
    ],
)
def test_what_is_no_sharding(text):
    with pytest.raises(errors.ShardrulesError, match="is not a sharding; write P"):
        shardings.read_specs(text)


@pytest.mark.parametrize(
    "text, mesh, rank, message",
    [
        ("P('data')", None, 1, "needs a mesh: pass --mesh data=4,model=2"),
        ("P('dat')", MESH, 1, "names the axis 'dat', but the mesh has data, model"),
        ("P('data', None)", MESH, 1, "has 2 dimensions, but the parameter has 1"),
        ("P('data', 'data')", MESH, 2, "names an axis twice"),
    ],
)
def test_a_spec_that_does_not_fit(text, mesh, rank, message):
    with pytest.raises(errors.HloError) as caught:
        shardings.as_hlo(text, mesh, rank)
    assert message in str(caught.value)


# -- from the text before XLA's passes ---------------------------------------------------------------


@pytest.fixture
def dump(tmp_path):
    (tmp_path / "module_0001.jit_f.cpu_after_optimizations.txt").write_text(AFTER)
    (tmp_path / "module_0001.jit_f.before_optimizations.txt").write_text(BEFORE)
    return tmp_path


def test_a_dump_holds_them_beside_the_text(dump):
    path = dump / "module_0001.jit_f.cpu_after_optimizations.txt"
    assert hlo.judge(AFTER).unproven and hlo.judge(AFTER).mesh == MESH
    judgement = program.judge(path)
    assert not judgement.unproven and judgement.mesh == MESH
    assert [v.verdict for v in judgement.verdicts] == ["redundant", "redundant", "overwide"]
    (dump / "module_0001.jit_f.before_optimizations.txt").unlink()
    assert program.judge(path).unproven


@pytest.mark.parametrize(
    "after, before",
    [
        ("module_0003.jit_f.after_optimizations.txt", "module_0003.jit_f.before_optimizations.txt"),
        (
            "module_0003.jit_f.sm_9.0a_gpu_after_optimizations.txt.gz",
            "module_0003.jit_f.before_optimizations.txt.gz",
        ),
        (
            "module_0003.jit_f.cl_12.after_optimizations.txt",
            "module_0003.jit_f.cl_12.before_optimizations.txt",
        ),
    ],
)
def test_names_in_a_dump(tmp_path, after, before):
    (tmp_path / before).touch()
    (tmp_path / "module_0030.jit_f.before_optimizations.txt").touch()
    assert files.before_optimizations(tmp_path / after) == tmp_path / before
    assert files.before_optimizations(tmp_path / after.replace("0003", "0004")) is None
    assert files.before_optimizations(tmp_path / before) is None


OTHERS = {
    "of another name": (BEFORE.replace("HloModule jit_f", "HloModule jit_g"), "of module 'jit_g'"),
    "of another width": (
        BEFORE.replace("%x.1 = f32[8,16]", "%x.1 = f32[64,16]"),
        "parameter 0 is f32[64,16]",
    ),
    "of another type": (
        BEFORE.replace("%x.1 = f32[8,16]", "%x.1 = bf16[8,16]"),
        "parameter 0 is bf16[8,16]",
    ),
    "of other arguments": (BEFORE.replace('op_name="w"', 'op_name="v"'), "parameter 1 is"),
    "itself without shardings": (AFTER, "it has no shardings either"),
}


@pytest.mark.parametrize("name", OTHERS)
def test_a_text_of_another_program_is_refused(name, dump):
    text, message = OTHERS[name]
    with pytest.raises(errors.HloError) as caught:
        shardings.of_other_text(hlo.parse(AFTER), hlo.parse(text))
    assert message in str(caught.value)
    (dump / "module_0001.jit_f.before_optimizations.txt").write_text(text)
    # In a dump, it is left alone: two runs may have written there.
    assert program.judge(dump / "module_0001.jit_f.cpu_after_optimizations.txt").unproven


def test_a_text_that_has_its_own_is_left_alone():
    text = T.module(f"{T.parameter(T.DATA)}\n{T.all_reduce('%x')}")
    assert not shardings.lacking(hlo.parse(text))
    assert shardings.lacking(hlo.parse(AFTER))


# -- from flags ------------------------------------------------------------------------------------


def verify(capsys, *arguments):
    code = command_line.main(["verify", *map(str, arguments)])
    output = capsys.readouterr()
    return code, output.out + output.err


FLAGS = ["--mesh", "data=4,model=2", "--in", "P('data'); P()"]


def test_flags_say_them(tmp_path, capsys):
    path = tmp_path / "f.hlo"
    path.write_text(AFTER)
    (tmp_path / "before.txt").write_text(BEFORE)
    code, text = verify(capsys, path)
    assert code == 1 and "unproven" in text
    assert text.count("shardrules.testing.verify_flags(compiled)") == 1
    assert "parameter_shardings" not in text
    told = [
        verify(capsys, path, *flags) for flags in (FLAGS, ["--parameters", tmp_path / "before.txt"])
    ]
    assert "unproven" not in told[0][1] and told[0] == told[1]


@pytest.mark.parametrize(
    "flags, message",
    [
        (["--in", "P()", "--parameters", "x"], "--in and --parameters say the same"),
        (
            ["--in", "P(); P(); P()"],
            "3 shardings were given for the 2 parameters that module 'jit_f' takes",
        ),
        (["--in", "data"], "--in=data: 'data' is not a sharding; write P('data', None)"),
        (["--slices", "two"], "--slices=two is not a number of slices; write --slices=2"),
        (["--slices", "0"], "--slices=0 is not a number of slices"),
    ],
)
def test_flags_that_say_nothing(tmp_path, capsys, flags, message):
    path = tmp_path / "f.hlo"
    path.write_text(AFTER)
    code, text = verify(capsys, path, *flags)
    assert code == 2 and message in text


# -- from JAX --------------------------------------------------------------------------------------


def test_a_compiled_program_prints_its_flags(tmp_path, capsys, cpu_mesh):
    def loss(w, x):
        return (jnp.tanh(x @ w) ** 2).mean()

    def struct(shape, spec):
        return jax.ShapeDtypeStruct(shape, "float32", sharding=NamedSharding(cpu_mesh, spec))

    args = struct((16, 16), P(None, "model")), struct((64, 16), P("data"))
    step = jax.jit(jax.grad(loss), out_shardings=NamedSharding(cpu_mesh, P(None, "model")))
    compiled = step.lower(*args).compile()
    said = testing.verify_flags(compiled)
    assert said.startswith(
        "--mesh data=4,model=2 --in \"P(None, 'model'); P('data')\" --out-shardings '{"
    )
    path = tmp_path / "step.hlo"
    path.write_text(compiled.as_text())
    code, text = verify(capsys, path, *shlex.split(said))
    judged = program.judge(compiled)
    assert code == 0 and "(data=4, model=2)" in text
    assert {v.verdict for v in judged.verdicts} == {"needed"}


def test_text_has_no_flags_to_print():
    with pytest.raises(
        errors.ShardrulesError, match="is text, which doesn't say how it is sharded"
    ):
        testing.verify_flags(AFTER)
