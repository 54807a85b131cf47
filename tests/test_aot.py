"""What is said where a compiler, a topology or a GPU's description is missing."""

import importlib.metadata
import importlib.util
import os
import pathlib
import subprocess
import sys

import pytest

from shardrules import aot
from shardrules.errors import AotError


@pytest.fixture
def bare(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)


@pytest.mark.parametrize(
    "platform, package", [("tpu", "'libtpu"), ("gpu", "--no-deps jax-cuda12-")]
)
def test_a_missing_compiler_is_installed_by_this_python(bare, platform, package):
    """A bare pip may be another Python's: an environment that uv makes has none."""
    assert aot.missing_plugin(platform).startswith(f"python -m pip install {package}")


def test_a_missing_compiler_is_an_error_with_the_command(bare):
    with pytest.raises(AotError, match="takes\n    python -m pip install ") as caught:
        aot.tpu("v5e:2x4")
    assert caught.value.command == aot.missing_plugin("tpu")


@pytest.mark.parametrize(
    "make, said",
    [
        (lambda: aot.tpu("v5e"), "write one such as 'v5e:2x4'"),
        (lambda: aot.gpu("H1000", 8), "choose one of a100, b200, h100, h200"),
        (lambda: aot.gpu("h100", 12), "give 1 to 8, or a multiple of 8"),
        (lambda: aot.missing_plugin("cuda"), "pass 'tpu' or 'gpu'"),
    ],
)
def test_what_is_not_known_is_said_with_what_is(make, said):
    with pytest.raises(AotError, match=said):
        make()


def test_without_jax_it_says_what_to_install(monkeypatch, capsys):
    def version(name):
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", version)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(SystemExit, match="JAX is not installed, .*python -m pip install jax$"):
        aot._main()


@pytest.mark.parametrize(
    "missing, said, used",
    [
        ("", "", ["TPU and GPU", "shardrules.aot.tpu('v5e:2x4')", "shardrules.aot.gpu('h100', 8)"]),
        ("gpu", "install gpu", ["for TPU is", "shardrules.aot.tpu('v5e:2x4')"]),
        ("tpu gpu", "install tpu\ninstall gpu", []),
    ],
)
def test_how_to_use_what_is_installed_is_said_beside_what_to_install(
    monkeypatch, capsys, missing, said, used
):
    """On stderr: stdout goes to a shell."""
    command = {name: f"install {name}" for name in missing.split()}
    monkeypatch.setattr(aot, "missing_plugin", command.get)
    aot._main()
    out, err = capsys.readouterr()
    assert out.strip() == said and bool(err) == bool(used)
    assert all(word in err for word in used) and ("gpu" in err) == (missing == "")
    assert not err or "docs/install.md" in err


@pytest.mark.gpu
@pytest.mark.parametrize("before", ["", "import jax; jax.devices()"])
def test_absent_gpus_need_no_jax_platforms(before):
    """JAX refuses to load its CUDA plugin where there is no driver, unless it is told otherwise."""
    code = f"{before}\nfrom shardrules import aot\nimport jax\n"
    code += "print(len(aot.gpu('h100', 8)), jax.devices()[0].platform)"
    environment = {k: v for k, v in os.environ.items() if k != "JAX_PLATFORMS"}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True
    )
    here = "gpu" if pathlib.Path("/dev/nvidia0").exists() else "cpu"
    assert done.stdout.split() == ["8", here], done.stderr


SUMMED = """
import jax, jax.numpy as jnp, numpy as np
from jax.sharding import NamedSharding, PartitionSpec as P
from shardrules import aot, testing

mesh = jax.sharding.Mesh(np.array(aot.gpu(NAME, 8)), ("d",))
body = lambda x: jax.lax.psum(x @ x.T, "d")
f = jax.jit(jax.shard_map(body, mesh=mesh, in_specs=P("d"), out_specs=P()))
x = jax.ShapeDtypeStruct((64, 128), jnp.float32, sharding=NamedSharding(mesh, P("d")))
print(testing.account(f.lower(x).compile()))
"""


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["a100", "h200"])  # other tests compile for h100 and b200
def test_each_described_gpu_is_compiled_for(name):
    done = subprocess.run(
        [sys.executable, "-c", f"NAME = {name!r}{SUMMED}"], capture_output=True, text=True
    )
    assert done.stdout.strip() == "forward all-reduce(d): 1, 256 B", done.stderr


@pytest.mark.gpu
def test_under_set_mesh_nothing_runs_and_programs_compile():
    import jax
    import jax.numpy as jnp
    from jax.sharding import PartitionSpec as P

    if not hasattr(jax, "set_mesh"):
        pytest.skip("JAX 0.6 and older have no jax.set_mesh")
    with jax.set_mesh(jax.sharding.Mesh(aot.gpu("h100", 8), ("data",))):
        x = jax.ShapeDtypeStruct((8,), jnp.float32, sharding=P("data"))
        assert "all-reduce" in jax.jit(lambda x: x.sum()).lower(x).compile().as_text()
        with pytest.raises(AttributeError, match="local_devices"):  # the text of docs/install.md
            jnp.ones(8)


FOREIGN = """
import jax, jax.numpy as jnp, numpy as np
from jax.sharding import NamedSharding, PartitionSpec as P
from shardrules import aot, program

def compiled(target, **options):
    mesh = jax.sharding.Mesh(np.array(aot.gpu("h100", 4, **options)), "d")

    @jax.jit
    @jax.shard_map(mesh=mesh, in_specs=P("d"), out_specs=P(), check_vma=False)
    def f(x):
        out = jax.ShapeDtypeStruct(x.shape, x.dtype)
        for name in (target, f"{target}_too"):
            x = jax.ffi.ffi_call(name, out)(x, eps=1e-5)
        return jax.lax.psum(jax.lax.psum(x.sum(), "d") * 2, "d")

    x = jax.ShapeDtypeStruct((8, 16), jnp.float32, sharding=NamedSharding(mesh, P("d")))
    return program.judged(program.read(f, (x,), {}), None, None)

try:
    compiled("acme_norm")
except Exception as error:
    print("No FFI handler registered for acme_norm" in str(error))
for target in ("acme_norm", "acme_norm", "acme_mix"):
    print([verdict.verdict for verdict in compiled(target, stubs=True).verdicts])
"""


@pytest.mark.gpu
def test_a_program_with_a_foreign_ffi_target_compiles_and_is_judged():
    done = subprocess.run([sys.executable, "-c", FOREIGN], capture_output=True, text=True, cwd="/")
    assert done.stdout.split("\n")[0] == "True", done.stderr
    assert done.stdout.count("'redundant'") == 3, done.stdout + done.stderr


@pytest.mark.gpu
def test_stubs_are_refused_where_xla_would_not_take_them(monkeypatch):
    import jax

    monkeypatch.setattr(jax, "__version__", "0.7.2")
    with pytest.raises(AotError, match="stubs=True needs JAX 0.8 or newer"):
        aot.gpu("h100", 4, stubs=True)


def test_a_stub_raises_when_it_runs():
    import jax
    import numpy as np

    from shardrules.door import stubs

    stubs._register("shardrules_tests_stub", "cpu")
    x = np.ones(4, np.float32)
    call = jax.ffi.ffi_call("shardrules_tests_stub", jax.ShapeDtypeStruct(x.shape, x.dtype))
    with pytest.raises(Exception, match="'shardrules_tests_stub' is a stub .* not run"):
        jax.block_until_ready(jax.jit(call)(x))
