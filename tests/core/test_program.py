"""The program of jax#21855: a copy kernel, sharded over data, on a mesh of data and model."""

from __future__ import annotations

import re

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec as P

import shardrules as sr
from tests.core import kernels, versions

_COLLECTIVE = re.compile(
    r"= .*?\b(all-reduce|all-gather|reduce-scatter|all-to-all|collective-permute)(?:-start)?\(")


def program(op, check=True):
    mesh = versions.mesh_of(data=4, model=2)
    spec = P("data", None)
    f = versions.shard_map(op, mesh=mesh, in_specs=spec, out_specs=spec, check=check)
    x = jax.random.normal(jax.random.PRNGKey(0), (8, 128))
    # The sum of squares, since XLA folds a constant cotangent away.
    return jax.jit(jax.grad(lambda x: (f(x) ** 2).sum())), jax.device_put(
        x, NamedSharding(mesh, spec))


def collectives(gradient, x):
    return _COLLECTIVE.findall(gradient.lower(x).compile().as_text())


@pytest.mark.parametrize("how", ["decorated kernel", "decorated op", "registered"])
def test_backward_pass_has_no_collective(how, installed):
    def kernel(x_ref, o_ref):
        o_ref[...] = x_ref[...]

    if how == "decorated kernel":
        op = kernels.make_copy(sr.no_communication(kernel))
    elif how == "decorated op":
        op = sr.no_communication(kernels.make_copy(kernel))
    else:
        kernel.__name__ = f"kernel_of_{__name__.replace('.', '_')}"
        sr.register(kernel.__name__, sr.no_communication)
        op = kernels.make_copy(kernel)
    gradient, x = program(op)
    assert collectives(gradient, x) == []
    np.testing.assert_array_equal(gradient(x), 2 * np.asarray(x))


def test_check_off_has_one_collective(installed):
    gradient, x = program(kernels.make_copy(sr.no_communication(kernels.copy_kernel)), check=False)
    assert collectives(gradient, x) == ["all-reduce"]
    np.testing.assert_array_equal(gradient(x), 2 * np.asarray(x))


def test_declared_op_works_without_install():
    gradient, x = program(sr.no_communication(kernels.make_copy(kernels.copy_kernel)))
    assert collectives(gradient, x) == []
    np.testing.assert_array_equal(gradient(x), 2 * np.asarray(x))
