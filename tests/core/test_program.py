"""The program of jax#21855: a copy kernel, sharded over data, on a mesh of data and model."""

from __future__ import annotations

import os
import pathlib
import subprocess
import sys

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import shardrules as sr
from core import kernels, versions
from shardrules import testing


def program(op, mesh, check=True):
    spec = P("data", None)
    f = versions.shard_map(op, mesh=mesh, in_specs=spec, out_specs=spec, check=check)
    x = jax.random.normal(jax.random.PRNGKey(0), (8, 128))
    # The sum of squares, since XLA folds a constant cotangent away.
    return jax.jit(jax.grad(lambda x: (f(x) ** 2).sum())), jax.device_put(
        x, NamedSharding(mesh, spec)
    )


@pytest.mark.parametrize("how", ["decorated kernel", "decorated op", "registered"])
def test_backward_pass_has_no_collective(how, hooks, cpu_mesh):
    def kernel(x_ref, o_ref):
        o_ref[...] = x_ref[...]

    if how == "decorated kernel":
        op = kernels.make_copy(sr.no_communication(kernel))
    elif how == "decorated op":
        op = sr.no_communication(kernels.make_copy(kernel))
    else:
        sr.register("kernel", sr.no_communication)
        op = kernels.make_copy(kernel)
    gradient, x = program(op, cpu_mesh)
    assert testing.judge(gradient, x).verdicts == ()
    np.testing.assert_array_equal(gradient(x), 2 * np.asarray(x))


def test_check_off_has_one_redundant_collective(hooks, cpu_mesh):
    op = kernels.make_copy(sr.no_communication(kernels.copy_kernel))
    gradient, x = program(op, cpu_mesh, check=False)
    judgement = testing.judge(gradient, x)
    [verdict] = judgement.verdicts
    assert verdict.verdict == "redundant"
    assert verdict.collective.kind == "all-reduce"
    assert judgement.mesh == {"data": 4, "model": 2}
    assert [sorted(group) for group in verdict.collective.groups] == [
        [0, 1],
        [2, 3],
        [4, 5],
        [6, 7],
    ]
    assert verdict.bytes == 2 * 128 * 4
    np.testing.assert_array_equal(gradient(x), 2 * np.asarray(x))


def test_declared_op_works_without_install(cpu_mesh):
    gradient, x = program(sr.no_communication(kernels.make_copy(kernels.copy_kernel)), cpu_mesh)
    assert testing.judge(gradient, x).verdicts == ()
    np.testing.assert_array_equal(gradient(x), 2 * np.asarray(x))


def test_without_rule_plain_jax_refuses_the_program(cpu_mesh):
    gradient, x = program(kernels.make_copy(kernels.copy_kernel), cpu_mesh)
    with pytest.raises((ValueError, TypeError, NotImplementedError)):
        gradient(x)


@pytest.mark.slow
@pytest.mark.one_lane
def test_the_example_prints_no_collective_where_shardrules_is_used():
    """The same file on every JAX, as a user runs it."""
    root = pathlib.Path(__file__).parents[2]
    environment = {k: v for k, v in os.environ.items() if k != "XLA_FLAGS"}
    environment["PYTHONPATH"] = str(pathlib.Path(sr.__file__).parents[1])
    done = subprocess.run(
        [sys.executable, root / "examples" / "issue_21855.py"],
        text=True,
        capture_output=True,
        cwd=root,
        env=environment,
    )
    assert done.returncode == 0, done.stderr
    rows = [
        [cell.strip() for cell in line.split("|")]
        for line in done.stdout.splitlines()
        if line.count("|") == 4
    ]
    header, *rows = rows
    assert header[-1] in ("check_vma=True, shardrules", "check_rep=True, shardrules")
    platforms = {row[0]: row for row in rows if row[0]}
    assert "CPU" in platforms
    assert {row[-1] for row in platforms.values()} == {"0 collectives"}
    assert platforms["CPU"][1].startswith("all-reduce over {model}, 512 B")
    assert "On 8 CPU devices the gradient equals the single-device one." in done.stdout
