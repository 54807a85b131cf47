"""What a clumsy user gives to the assertions: it is taken where it is clear, else an error says what."""

import os
import pathlib
import subprocess
import sys

import jax
import numpy as np
import pytest
from hlo import text as T
from jax.sharding import PartitionSpec as P
from raising import raises

import shardrules
from shardrules import errors, hlo, testing
from shardrules.costs import estimates

ONE = T.module("\n".join([T.parameter(T.BOTH), T.all_reduce("%x")]))


class JaxMesh:
    """What of a jax.sharding.Mesh is read; the real one is below."""

    shape = T.MESH


@pytest.mark.parametrize("mesh", [T.MESH, JaxMesh()])
def test_a_mesh_is_a_mapping_or_jax_s(mesh):
    assert testing.judge(ONE, mesh=mesh).verdicts[0].collective.axes == ("model",)


def test_a_mesh_of_jax_is_taken(cpu_mesh):
    assert testing.judge(ONE, mesh=cpu_mesh).mesh == T.MESH
    assert testing.account(ONE, mesh=cpu_mesh).mesh == T.MESH


@pytest.mark.parametrize("mesh", ["data=4,model=2", 8, (4, 2), np.ones(8)])
def test_what_is_no_mesh(mesh):
    with pytest.raises(
        errors.HloError, match="is not a mesh; pass axis names and sizes, mesh={'data"
    ):
        hlo.judge(ONE, mesh=mesh)


def no_defensive(allow):
    testing.assert_no_defensive_psum(ONE, mesh=T.MESH, allow=allow)


def expects(expect, **options):
    testing.assert_collectives(ONE, mesh=T.MESH, expect=expect, **options)


@pytest.mark.parametrize(
    "ask, said",
    [
        (
            lambda: no_defensive({"all-reduce(model)": " "}),
            "the allowance for 'all-reduce(model)' gives no reason; write why the finding stays, "
            "allow={'all-reduce(model)': 'issue 12'}",
        ),
        (
            lambda: expects({"all-reduse(data)": 1}),
            "'all-reduse(data)' names no collectives; did you mean 'all-reduce'? Write the kind "
            "and its mesh axes, such as 'all-reduce(data)' or 'backward all-gather(data, model)'; "
            "phases are forward, backward, recompute, mixed, unknown",
        ),
        (
            lambda: no_defensive({"redundant all-reduce(dta)": "issue 12"}),
            "'redundant all-reduce(dta)' names the axis 'dta', but the mesh has data, model; "
            "did you mean 'data'?",
        ),
        (
            lambda: expects({"cuda": {}, "gpu": {}}, platform="gpu"),
            "expectations for cuda, gpu: two are for one platform",
        ),
        (
            lambda: expects({"cpu": {}}, platform="gpus"),
            "platform='gpus' is not one of cpu, gpu, tpu; did you mean 'gpu'?",
        ),
        (
            lambda: expects({"cpu": {}, "gpu": {}}, platform="tpu"),
            "expectations are given for cpu, gpu, but the program is for tpu",
        ),
        (
            lambda: expects({"cpu": {}, "gpu": {"all-reduce(model)": 1}}),
            "expectations are given for cpu, gpu, but the text does not say which of these it is "
            "for; pass platform=",
        ),
        (
            lambda: testing.judge("no such.hlo"),
            f"there is no file 'no such.hlo' here ({os.getcwd()}), and it is not HLO text either; "
            "pass the path of a file that is there, or what compiled.as_text() returns",
        ),
        (
            lambda: testing.judge(pathlib.Path("/no/such/file")),
            "can't read /no/such/file: No such file or directory",
        ),
        (
            lambda: testing.account(ONE, level="logic"),
            "level='logic' is unknown; there are compiled and logical",
        ),
        (
            lambda: testing.assert_outputs_replicated(ONE, output_shardings=["{replicated}"] * 2),
            "2 shardings were given for the 1 array that module 'test' returns; give one for each, "
            "or one for all",
        ),
        (
            lambda: testing.assert_outputs_replicated(ONE, output_shardings=["{devices=[3]<=[3]}"]),
            "the output has a sharding that can't be read: the sharding '{devices=[3]<=[3]}' is "
            "for 3 devices, the module has 8 partitions",
        ),
        (
            lambda: testing.assert_loop(ONE),
            "<text> holds no loop; its loops: none (unrolled, or inside a kernel)",
        ),
        (
            lambda: estimates.target("h10"),
            "target='h10' is not one of v5e, v5p, v6e, a100, h100, h200, b200; did you mean "
            "'h100'?",
        ),
        (
            lambda: shardrules.install(unchecked="on"),
            "install(unchecked='on') is not known; it is one of 'leave', 'check'",
        ),
        (
            lambda: shardrules.assert_same_rules(timeout_s=0),
            "assert_same_rules(timeout_s=0): pass a number of seconds above zero",
        ),
    ],
)
def test_what_a_mistake_is_told(ask, said):
    with pytest.raises(errors.ShardrulesError) as caught:
        ask()
    assert str(caught.value) == said


@pytest.mark.parametrize("count", [1, np.int64(1), np.uint8(1)])
def test_counts_may_be_numpy_s(count):
    testing.assert_collectives(ONE, mesh=T.MESH, expect={"all-reduce(model)": count})
    testing.assert_collectives(ONE, mesh=T.MESH, expect={"all-reduce(model)": {"count": count}})


@pytest.mark.parametrize("count", [True, np.True_, 1.0, np.float32(1), -1, "1", None, [1]])
def test_what_is_no_count(count):
    with raises(
        errors.ShardrulesError, key="all-reduce(model)", value=lambda value: value is count
    ):
        testing.assert_collectives(ONE, mesh=T.MESH, expect={"all-reduce(model)": count})


@pytest.mark.parametrize(
    "name, near",
    [
        ("all-reduse(model)", "did you mean 'all-reduce'?"),
        ("backwards all-reduce(model)", "did you mean 'backward'?"),
        ("redundent all-reduce(model)", "did you mean 'redundant'?"),
        ("redundant forwrd all-reduce(model)", "did you mean 'forward'?"),
        ("all-reduce", "names no collectives; write the kind and its mesh axes"),
    ],
)
def test_a_near_name_is_suggested(name, near):
    with pytest.raises(errors.ShardrulesError) as caught:
        testing.assert_collectives(ONE, mesh=T.MESH, expect={name: 1})
    assert near in str(caught.value)
    with pytest.raises(errors.ShardrulesError) as caught:
        testing.assert_no_defensive_psum(ONE, mesh=T.MESH, allow={name: "issue 12"})
    assert near in str(caught.value)


def test_a_name_is_text():
    with raises(errors.ArgumentError, argument="numbers", value={3: 1}):
        testing.assert_collectives(ONE, mesh=T.MESH, expect={3: 1})
    with raises(errors.ShardrulesError, key=3):
        testing.assert_no_defensive_psum(ONE, mesh=T.MESH, allow={3: "issue 12"})


def test_an_axis_that_the_mesh_lacks_is_no_zero():
    for expect in ({"all-reduce(dta)": 0, "all-reduce(model)": 1}, {"all-reduce(model, dta)": 1}):
        with raises(errors.ShardrulesError, key=lambda key: key in expect and "dta" in key):
            testing.assert_collectives(ONE, mesh=T.MESH, expect=expect)


def test_a_platform_among_others_has_a_near_name():
    with raises(errors.ShardrulesError, platform="tpuu"):
        testing.assert_collectives(ONE, mesh=T.MESH, expect={"cpu": {}, "tpuu": {}})


@pytest.mark.parametrize(
    "allow", [["all-reduce(model)"], "all-reduce(model)", {"all-reduce(model)"}]
)
def test_allowances_need_reasons(allow):
    with pytest.raises(errors.ShardrulesError, match="gives no reasons; write what may stay and w"):
        testing.assert_no_defensive_psum(ONE, mesh=T.MESH, allow=allow)


@pytest.mark.parametrize("platform", ["gpu", "GPU", "cuda", "rocm", "CUDA"])
def test_a_platform_has_jax_s_names_too(platform):
    for name in ("gpu", platform):
        expect = {"cpu": {}, name: {"all-reduce(model)": 1}}
        testing.assert_collectives(ONE, mesh=T.MESH, expect=expect, platform=platform)


@pytest.mark.parametrize("name", ["nofile.hlo", "runs/3/step (1).txt", "a b"])
def test_a_file_that_is_not_there_is_no_bad_text(name):
    with raises(errors.ShardrulesError, program=name):
        testing.judge(name)


def test_empty_text_is_no_path():
    with raises(errors.HloSyntaxError, line=1, column=1, text_line=""):
        testing.judge("")


def test_a_path_of_any_kind_is_read(tmp_path):
    (tmp_path / "one.hlo").write_text(ONE)
    for path in (tmp_path / "one.hlo", str(tmp_path / "one.hlo")):
        assert len(testing.judge(path, mesh=T.MESH).verdicts) == 1


def test_install_comes_before_the_check_is_switched_off(cpu_mesh):
    """JAX's own text recommends check_vma=False."""
    f = jax.shard_map(lambda x: x, mesh=cpu_mesh, in_specs=P("data"), out_specs=P())
    x = np.ones(8, np.float32)
    with pytest.raises(errors.NotInstalledError) as caught:
        testing.judge(f, x)
    assert "before you switch the check off, as JAX's text says, call shardrules.install()" in str(
        caught.value
    )
    assert "check_vma=False" in str(caught.value)
    with shardrules.install(), pytest.raises(ValueError, match="check_vma=False"):
        testing.judge(f, x)


_UNCHECKED = """
import jax, jax.numpy as jnp, numpy as np
from jax.sharding import PartitionSpec as P
from shardrules import testing

mesh = jax.sharding.Mesh(np.array(jax.devices()).reshape(4, 2), ("data", "model"))
loss = jax.shard_map(
    lambda w, x: jax.lax.psum(jnp.sin(x @ w).sum(), "data"),
    mesh=mesh, in_specs=(P(), P("data")), out_specs=P(), check_vma=False,
)
shapes = [jax.ShapeDtypeStruct((n, 16), "float32") for n in (16, 8)]
for verdict in testing.judge(jax.grad(loss), *shapes).verdicts:
    print(verdict.collective.source)
"""


@pytest.mark.slow
def test_a_psum_of_the_transpose_has_the_caller_s_line(tmp_path):
    """JAX gives it the innermost frame that is not its own, which was one of shardrules' files."""
    script = tmp_path / "script.py"
    script.write_text(_UNCHECKED)
    flags = {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": "--xla_force_host_platform_device_count=8"}
    done = subprocess.run(
        [sys.executable, str(script)], capture_output=True, text=True, env={**os.environ, **flags}
    )
    assert done.returncode == 0, done.stderr
    sources = done.stdout.splitlines()
    assert sources and all("script.py" in source for source in sources), sources
