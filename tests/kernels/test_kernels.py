"""Every Pallas op that ships with JAX, its user's code unchanged: bytes, verdicts, gradients.

What plain JAX makes of the cases is shown by benchmarks/kernels.py; what they need, by
``kernels.case.Expected``, which was measured before shardrules was begun.
"""

import dataclasses
import functools
import importlib.util
import json
import os
import pathlib
import subprocess
import sys

import jax
import pytest

from kernels import build, cases
from kernels.case import Arg, Fails

HERE = pathlib.Path(__file__).parents[1]  # tests/
BENCHMARK = HERE.parent / "benchmarks" / "kernels.py"


@functools.lru_cache(maxsize=1)
def benchmark():
    """The benchmark's module: how a cell is judged stands there."""
    spec = importlib.util.spec_from_file_location("kernels_benchmark", BENCHMARK)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


# What test_how_a_cell_is_judged_can_fail reads.
JUDGED = ("matmul_user_vjp", "example_double_wrongspec")


@pytest.fixture(scope="module")
def cells(request, tpu_mesh, gpu_mesh):
    """The cases that this run asks for, compiled with shardrules: check off (tagged), on (rules)."""
    asked = {"tagged": set(), "rules": set(JUDGED)}
    for item in request.session.items:
        if getattr(item, "originalname", None) == "test_bytes_and_verdicts":
            asked[item.callspec.params["arm"]].add(item.callspec.params["case"].name)
    lines = []
    for arm, names in asked.items():
        if names:
            command = [sys.executable, str(BENCHMARK), f"--arms={arm}", "--json"]
            command.append(f"--only={','.join(sorted(names))}")
            done = subprocess.run(command, stdout=subprocess.PIPE, text=True)
            assert done.returncode == 0
            lines += done.stdout.splitlines()
    found = [benchmark().Cell(**json.loads(line)) for line in lines]
    return {(cell.case, cell.arm): cell for cell in found}


@pytest.mark.tpu
@pytest.mark.gpu
@pytest.mark.sampled
@pytest.mark.parametrize("arm", ["tagged", "rules"])
@pytest.mark.parametrize("case", cases.ALL, ids=lambda case: case.name)
def test_bytes_and_verdicts(cells, case, arm):
    """With the check on: no more bytes than needed, each *needed*; off: each one not needed."""
    cell = cells[case.name, arm]
    assert benchmark().as_expected(case, cell), cell


@pytest.mark.tpu
@pytest.mark.gpu
def test_how_a_cell_is_judged_can_fail(cells):
    """A byte more, another verdict, or any other error is not as expected."""
    judge = benchmark().as_expected
    case = cases.BY_NAME["matmul_user_vjp"]
    good = cells[case.name, "rules"]
    assert judge(case, good)
    for change in (
        {"axes_bytes": {"data": 131073}},
        {"axes_bytes": {"model": 4}},
        {"verdicts": {"unproven": 1}},
        {"axes_bytes": None, "error": "ValueError: x"},
    ):
        assert not judge(case, dataclasses.replace(good, **change))
    refused = cells["example_double_wrongspec", "rules"]
    assert not judge(
        cases.BY_NAME["example_double_wrongspec"],
        dataclasses.replace(refused, error="UnknownKernelError: no rule"),
    )


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


INTERPRETED = [
    case for case in cases.ALL if case.interpret and case.communicates is None and case.wrap
]
# One of each kind by default; the others, and the slow TPU interpreter, with --full.
QUICK = ("splash_mha_passed", "megablox_gmm_gs", "mha_mixedkv", "rms_norm", "softmax_fwd")


def interpreted(chosen):
    """The cases that are chosen; those that aren't quick are marked."""
    return [
        pytest.param(case, marks=() if case.name in QUICK else pytest.mark.full, id=case.name)
        for case in INTERPRETED
        if chosen(case)
    ]


@pytest.mark.sampled
@pytest.mark.parametrize("case", interpreted(lambda case: True))
@pytest.mark.slow
def test_interpreted_under_the_check_equals_one_device(hooks, case):
    """No annotation, no rule line; k and v, biases and weights replicated where the case is so."""
    build.assert_equals_one_device(case, check_vma=True)


@pytest.mark.parametrize("case", interpreted(lambda case: case.interpret == "argument"))
def test_interpreted_equals_one_device(case):
    build.assert_equals_one_device(case, check_vma=False)


@pytest.mark.full
def test_interpreted_on_the_tpu_interpreter_equals_one_device():
    code = """
from kernels import build
from kernels.test_kernels import INTERPRETED
for case in INTERPRETED:
    if case.interpret == "tpu":
        print(case.name, flush=True)
        build.assert_equals_one_device(case, check_vma=False)
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
        build.assert_equals_one_device(case, check_vma=False, wrap_local=stopped)


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
