"""Every Pallas op that ships with JAX, its user's code unchanged: bytes, verdicts, gradients.

What plain JAX makes of the cases is shown by benchmarks/kernels.py; what they need, by
``kernels.case.Expected``, which was measured before shardrules was begun.
"""

import functools
import importlib.util
import json
import pathlib
import subprocess
import sys

import jax
import numpy as np
import pytest

from kernels import build, cases
from kernels.case import Fails

BENCHMARK = pathlib.Path(__file__).parents[2] / "benchmarks" / "kernels.py"


@functools.lru_cache(maxsize=1)
def benchmark():
    """The benchmark's module: how a cell is judged stands there."""
    spec = importlib.util.spec_from_file_location("kernels_benchmark", BENCHMARK)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def cells(tpu_mesh, gpu_mesh):
    """Each case compiled with shardrules, check off (tagged) and on (rules), one run for all."""
    done = subprocess.run(
        [sys.executable, str(BENCHMARK), "--arms=tagged,rules", "--json"],
        stdout=subprocess.PIPE,
        text=True,
    )
    assert done.returncode == 0
    found = [benchmark().Cell(**json.loads(line)) for line in done.stdout.splitlines()]
    return {(cell.case, cell.arm): cell for cell in found}


@pytest.mark.tpu
@pytest.mark.gpu
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
    import dataclasses

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


INTERPRETABLE = [
    case
    for case in cases.ALL
    if case.interpret
    and case.communicates is None
    and case.wrap
    and not isinstance(case.expected.unchecked, Fails)
]


@pytest.mark.parametrize("case", INTERPRETABLE, ids=lambda case: case.name)
@pytest.mark.slow
def test_interpreted_under_the_check_equals_one_device(hooks, case):
    """No annotation, no rule line; k and v, biases and weights replicated where the case is so."""
    mesh = build.mesh_for(case, jax.devices())
    f, args = build.build(case, mesh=mesh, interpret=True, check_vma=True)
    values = build.values(case)
    got = f(*(jax.device_put(v, a.sharding) for v, a in zip(values, args)))
    want = build.reference(case)(*values)
    for g, w in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        g, w = np.asarray(g, np.float32), np.asarray(w, np.float32)
        assert np.abs(w).max() > 0
        # bf16 partial sums are added in another order: three of its eight bits.
        np.testing.assert_allclose(g, w, rtol=0, atol=2**-5 * np.abs(w).max())
