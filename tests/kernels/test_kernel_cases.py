"""The kernel cases compute what one device computes, so what is compiled of them is sensible."""

import os
import pathlib
import subprocess
import sys

import jax
import numpy as np
import pytest

from kernels import build, cases
from kernels.case import Arg, Fails

HERE = pathlib.Path(__file__).parents[1]  # tests/
# One of each kind by default; the others, and the slow TPU interpreter, with --full.
QUICK = ("splash_mha_passed", "megablox_gmm_gs", "mha_mixedkv", "rms_norm", "softmax_fwd")


def interpreted(mode):
    return [c for c in cases.ALL if c.interpret == mode and c.communicates is None and c.wrap]


def assert_equals_one_device(case, **kwargs):
    """Assert that `case` gives on eight CPU devices what its local function gives on one."""
    mesh = build.mesh_for(case, jax.devices())
    f, args = build.build(case, mesh=mesh, interpret=True, **kwargs)
    values = build.values(case)
    got = f(*(jax.device_put(v, a.sharding) for v, a in zip(values, args)))
    want = build.reference(case)(*values)
    for g, w in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        g, w = np.asarray(g, np.float32), np.asarray(w, np.float32)
        assert np.abs(w).max() > 0
        # bf16 partial sums are added in another order: three of its eight bits.
        np.testing.assert_allclose(g, w, rtol=0, atol=2**-5 * np.abs(w).max())


def test_importing_the_cases_imports_neither_jax_nor_numpy():
    code = "import sys, kernels.cases; print({'jax', 'numpy'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], cwd=HERE, capture_output=True, text=True)
    assert done.stdout.strip() == "set()", done.stdout + done.stderr


@pytest.mark.parametrize("case", cases.ALL, ids=lambda c: c.name)
def test_case_is_well_formed(case):
    sizes = dict(case.mesh)
    for args in (case.args, case.small_args or ()):
        for arg in args:
            assert isinstance(arg, Arg)
            for dim, axis in zip(arg.shape, arg.spec):
                assert axis is None or dim % sizes[axis] == 0
    assert [v.shape for v in build.values(case)] == [a.shape for a in case.small_args or case.args]
    assert not case.expected.wrong or not isinstance(case.expected.checked, Fails)


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(c, marks=() if c.name in QUICK else pytest.mark.full, id=c.name)
        for c in interpreted("argument")
    ],
)
def test_interpreted_equals_one_device(case):
    assert_equals_one_device(case, check_vma=False)


@pytest.mark.full
def test_interpreted_on_the_tpu_interpreter_equals_one_device():
    code = """
from kernels import build
import kernels.test_kernel_cases as here
for case in here.interpreted("tpu"):
    print(case.name, flush=True)
    here.assert_equals_one_device(case, check_vma=False)
"""
    env = dict(
        os.environ,
        PJRT_NPROC="32",
        JAX_PLATFORMS="cpu",
        XLA_FLAGS="--xla_force_host_platform_device_count=8",
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=HERE, env=env, capture_output=True, text=True, timeout=900
    )
    assert done.returncode == 0, done.stdout + done.stderr[-4000:]


def test_a_wrong_gradient_is_noticed():
    """The comparison fails for a kernel whose weights' gradient is left unreduced."""
    case = cases.BY_NAME["rms_norm"]

    def stopped(f):
        return lambda x, w, b: f(x, jax.lax.stop_gradient(w), b)

    with pytest.raises(AssertionError, match="Not equal to tolerance"):
        assert_equals_one_device(case, check_vma=False, wrap_local=stopped)


def test_too_few_threads_are_refused(monkeypatch):
    monkeypatch.setenv("PJRT_NPROC", "8")
    case = cases.BY_NAME["matmul_fwd"]
    mesh = build.mesh_for(case, jax.devices())
    with pytest.raises(RuntimeError, match="hangs with 8 threads; .* PJRT_NPROC=32 before"):
        build.build(case, check_vma=False, mesh=mesh, interpret=True)


def test_what_cannot_be_interpreted_is_refused():
    case = cases.BY_NAME["hopper_matmul"]
    with pytest.raises(ValueError, match="hopper_matmul has no interpret mode"):
        build.build(case, check_vma=False, mesh=None, interpret=True)


@pytest.mark.gpu
def test_a_second_gpu_in_one_process_is_refused(gpu_mesh, monkeypatch):
    monkeypatch.setattr(build, "_GPUS", ["h100"])
    with pytest.raises(RuntimeError, match="compiles for h100 already; compile for b200 in ano"):
        build.devices("b200")
