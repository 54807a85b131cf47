"""``shardrules run --check`` and ``pytest --shardrules-check``: a library's check_vma=False."""

import re

import pytest
from test_run import run

from shardrules.unchecked import migration
from shardrules.unchecked.sites import UncheckedSite

pytestmark = pytest.mark.one_lane

# A library as people have it: JAX's own normalization kernel, in a shard_map of its own.
LIBRARY = """
import functools
import jax
from jax.experimental.pallas.ops.gpu.layer_norm import layer_norm
from jax.sharding import PartitionSpec as P

def norm(mesh, x, weight, bias):
    norm = functools.partial(layer_norm, num_warps=1, interpret=True)
    return jax.shard_map(norm, mesh=mesh, in_specs=(P("data"), P(), P()), out_specs=P("data"),
                         check_vma=False)(x, weight, bias)

def shifted(mesh, x):
    return jax.shard_map(lambda x: x + jax.lax.axis_index("data"), mesh=mesh, in_specs=P(),
                         out_specs=P(), check_vma=False)(x)
"""

SCRIPT = """
import os
os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"
import jax
jax.config.update("jax_platforms", "cpu")
import jax.numpy as jnp
import numpy as np
import library

mesh = jax.sharding.Mesh(np.array(jax.devices()).reshape(4, 2), ("data", "model"))
x = jnp.arange(8 * 16 * 32, dtype=jnp.float32).reshape(8, 16, 32) % 7
params = jnp.ones(32), jnp.zeros(32)

@jax.jit
def step(params):
    def loss(params):
        return jnp.mean(jnp.sin(library.norm(mesh, x, *params)))

    value, grads = jax.value_and_grad(loss)(params)
    return value, jax.tree.map(lambda w, g: w - g, params, grads)

for _ in range(3):
    loss, params = step(params)
    print(f"{float(loss):.6f} {float(params[0].sum()):.4f}")
print(float(jax.jit(lambda x: library.shifted(mesh, x))(x).sum()))
"""


def test_a_library_runs_with_its_check_on_and_the_values_stay(tmp_path):
    (tmp_path / "library.py").write_text(LIBRARY)
    (tmp_path / "train.py").write_text(SCRIPT)
    plain, checked = run("train.py", cwd=tmp_path), run("--check", "train.py", cwd=tmp_path)
    assert plain.stdout == checked.stdout and plain.stdout.count("\n") == 4, plain.stderr
    moved = [
        int(re.search(r"^jit_step +\|.*?(\d+) B", done.stderr.replace(",", ""), re.M)[1])
        for done in (plain, checked)
    ]
    assert 0 < moved[1] < moved[0], (plain.stderr, checked.stderr)
    table = checked.stderr[checked.stderr.index("2 shard_maps with the check off: 1 switched on") :]
    assert re.search(r"library.py:9 \(layer_norm\) +\| \S+ B +\| \S+ B +\| runs with its", table)
    assert re.search(r"library.py:13 \(<lambda>\).*as written: out_specs is P\(\)", table)
    assert "shard_maps with the check off" not in plain.stderr


TESTS = """
import jax, library, numpy as np

def test_it():
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:1]).reshape(1, 1), ("data", "model"))
    jax.jit(lambda x: library.shifted(mesh, x))(np.ones(3, np.float32))
"""


@pytest.mark.parametrize("flags", [(), ("-n", "1")])
def test_pytest_says_what_became_of_each(tmp_path, flags):
    (tmp_path / "library.py").write_text(LIBRARY)
    (tmp_path / "test_it.py").write_text(TESTS)
    always = ["-p", "shardrules.checks.pytest_plugin", "-p", "no:cacheprovider", "--noconftest"]
    always += ["-p", "no:shardrules.pytest_plugin", "--shardrules-check"]
    done = run(*always, *flags, cwd=tmp_path, before=("-m", "pytest"))
    assert done.returncode == 0 and "library.py:13 (<lambda>) | 0 B" in done.stdout, done.stdout
    none = run(*always, "-k", "nothing", cwd=tmp_path, before=("-m", "pytest"))
    assert "none was called" in none.stdout


def test_the_table_is_of_sites_the_costliest_first():
    a = UncheckedSite("/lib/a.py", 3, "f", True, "", 1000, 0, "float32(8)")
    b = UncheckedSite("/lib/b.py", 5, "g", False, "no rule for ring", 4000, None)
    again = UncheckedSite("/lib/a.py", 3, "f", True, "", 500, 10, "float32(4)")
    heading, *lines = migration.decided([a, b, again]).splitlines()
    assert heading == "2 shard_maps with the check off: 1 switched on, 1 left"
    assert [re.split(r" *\| *", line) for line in lines if "-+-" not in line] == [
        ["shard_map", "bytes off", "bytes on", "outcome"],
        ["/lib/b.py:5 (g)", "4000 B", "?", "as written: no rule for ring"],
        ["/lib/a.py:3 (f)", "1500 B", "10 B", "runs with its check on"],
    ]
    assert migration.decided([]) == "no shard_map with its check off was called"
