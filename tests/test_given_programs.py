"""The forms in which a program is taken: exported, serialized, below JAX's stages."""

import pickle

import jax
import numpy as np
import programs
import pytest
from jax import export
from jax.experimental import serialize_executable
from jax.sharding import PartitionSpec as P
from raising import raises

from shardrules import errors, testing


def program(mesh):
    f = jax.shard_map(
        lambda x: jax.lax.psum(x, "data"), mesh=mesh, in_specs=P("data"), out_specs=P()
    )
    return jax.jit(f), programs.structs(mesh, ((8, 128), P("data")))


EXPECT = {"all-reduce(data)": {"count": 1, "bytes": 1024}}


def test_exported_programs_are_compiled_for_their_arguments(cpu_mesh):
    f, args = program(cpu_mesh)
    exported = export.export(f)(*args)
    testing.assert_collectives(exported, *args, expect=EXPECT)
    testing.assert_collectives(exported, *args, expect=EXPECT, level="logical")
    testing.assert_outputs_replicated(exported, *args)
    with pytest.raises(errors.ShardrulesError) as caught:
        testing.judge(exported)
    assert str(caught.value) == (
        "the exported program '<lambda>' holds StableHLO for 8 devices, which is not compiled "
        "yet; pass its 1 argument too, as arrays or ShapeDtypeStructs with shardings, and it is "
        "compiled for their devices"
    )
    with raises(
        errors.HloSyntaxError, text_line=lambda line: line.startswith(("#loc", "module @"))
    ):
        testing.judge(exported.mlir_module())


def test_deserialized_executables_hold_their_hlo(cpu_mesh):
    f, args = program(cpu_mesh)
    data = serialize_executable.serialize(f.lower(*args).compile())
    loaded = serialize_executable.deserialize_and_load(*data)
    testing.assert_collectives(loaded, expect=EXPECT)
    testing.assert_outputs_replicated(loaded)
    with raises(errors.ShardrulesError, program=data[0]):
        testing.judge(data[0])


def test_executables_and_modules_below_jax_stages(cpu_mesh):
    f, args = program(cpu_mesh)
    lowered = f.lower(*args)
    mesh = {"data": 4, "model": 2}
    executable = lowered.compile().runtime_executable()
    testing.assert_collectives(executable, mesh=mesh, expect=EXPECT)
    testing.assert_collectives(executable.hlo_modules()[0], mesh=mesh, expect=EXPECT)
    early = lowered.compiler_ir("hlo")
    with raises(errors.HloError, module="jit__lambda"):
        testing.assert_collectives(early, mesh=mesh, expect=EXPECT)
    testing.assert_collectives(early.as_hlo_text(), mesh=mesh, level="logical", expect=EXPECT)
    with raises(
        errors.HloSyntaxError, text_line=lambda line: line.startswith(("#loc", "module @"))
    ):
        testing.judge(lowered.as_text())


def test_lowered_programs_do_not_pickle_and_their_text_does(cpu_mesh):
    """JAX refuses; what can be kept is the text."""
    f, args = program(cpu_mesh)
    lowered = f.lower(*args)
    with pytest.raises(TypeError, match="cannot pickle"):
        pickle.dumps(lowered)
    text = pickle.loads(pickle.dumps(lowered.as_text(dialect="hlo")))
    testing.assert_collectives(text, mesh={"data": 4, "model": 2}, level="logical", expect=EXPECT)


class Executable:
    """An executable that a backend gives without its HLO."""

    def __init__(self, text):
        self.text = text

    def as_text(self):
        if isinstance(self.text, Exception):
            raise self.text
        return self.text


def test_executables_without_hlo_say_what_to_pass():
    with pytest.raises(errors.ShardrulesError) as caught:
        testing.judge(Executable(None))
    assert str(caught.value).startswith(
        "this executable does not give its HLO; pass the jax.stages.Compiled that f.lower(...)."
        "compile() returned"
    )
    with pytest.raises(errors.ShardrulesError) as caught:
        testing.judge(Executable(RuntimeError("UNIMPLEMENTED: no modules\nmore")))
    assert "(UNIMPLEMENTED: no modules);" in str(caught.value)

    class Many:
        def hlo_modules(self):
            return [1, 2]

    with pytest.raises(
        errors.ShardrulesError,
        match="this executable holds 2 HLO modules; pass the text of one, module.to_string()",
    ):
        testing.judge(Many())


@pytest.mark.parametrize(
    "args, said",
    [
        (
            (3,),
            "int is not a program; pass a function with its arguments, a jax.stages.Lowered or "
            "Compiled, HLO text, or the path of a file with it",
        ),
        (
            (bytearray(b"\x00StableHLO"),),
            "bytearray holds a serialized program, not HLO text; pass jax.export.deserialize(data) "
            "with its arguments, or what deserialize_and_load of jax.experimental."
            "serialize_executable returns",
        ),
        (
            ("HloModule m\n", 3),
            "1 argument was given with a program that is lowered already; pass arguments with a "
            "function only",
        ),
        (
            ("HloModule m\n", 3, 4),
            "2 arguments were given with a program that is lowered already; pass arguments with a "
            "function only",
        ),
    ],
)
def test_what_is_no_program_says_what_to_pass(args, said):
    with raises(errors.ShardrulesError, program=args[0]) as caught:
        testing.judge(*args)
    assert str(caught.value) == said


def test_files_of_bytes(tmp_path):
    path = tmp_path / "exported.bin"
    path.write_bytes(b"\xff\xfe" + np.arange(9).tobytes())
    with pytest.raises(
        errors.ShardrulesError,
        match="exported.bin is binary .* or a serialized program.*, not HLO text; pass text: "
        "compiled.as_text",
    ):
        testing.judge(path)
