"""What ``migrate`` says of sites: by other names, beside threads, with gradients in the body."""

import os
import pathlib
import re
import shlex
import subprocess
import sys
import threading

import jax
import numpy as np
import pytest
from core import versions
from jax.sharding import PartitionSpec as P

import shardrules
from shardrules.hooks import shard_map
from shardrules.unchecked import check_off, migration, results

W, X = np.ones((8, 4, 4), np.float32), np.ones((8, 4), np.float32)


def rows(call):
    calls = []
    stop = check_off.start(calls.append)
    try:
        call()
    finally:
        stop()
    return migration.rows(calls)


def of_own_weights(w, x):
    """Each device has weights of its own, as pmap's replicas were."""
    gradient = jax.grad(lambda w: (jax.numpy.tanh(x @ w) ** 2).mean())(w[0])
    return w - jax.lax.pmean(gradient, "data")[None]


def of_one_loss(w, x):
    """The loss is summed before it is differentiated."""
    return w - jax.grad(lambda w: jax.lax.psum((x @ w[0]).sum() ** 2, "data"))(w)


@pytest.mark.parametrize("body, remain", [(of_own_weights, True), (of_one_loss, False)])
def test_gradients_that_hold_the_same_sums_are_to_be_compared(cpu_mesh, body, remain):
    mesh = jax.sharding.Mesh(np.array(jax.devices()), ("data",))

    def step(check):
        return jax.jit(shard_map(body, mesh, (P("data"), P("data")), P("data"), check=check))(W, X)

    (row,) = rows(lambda: step(False))
    assert row.verdict == migration.GRADIENTS
    said = migration.written([row])
    assert (
        "holds the same operations, including the same sums: switch it on by hand" in said
    ) is remain
    assert ("with respect to shardrules.vary(w, " in said) is not remain
    # Followed: what it says to compare is equal, or isn't.
    with shardrules.install():
        values = step(True)
    assert np.allclose(step(False), values, rtol=1e-5) is remain


def test_what_can_not_be_looked_at_is_not_called_refused(cpu_mesh):
    def call(body, out):
        return shard_map(body, cpu_mesh, P("data"), out, check=False)(np.ones(8, np.float32))

    done = threading.Event()
    thread = threading.Thread(target=done.wait)
    thread.start()
    try:
        (row,) = rows(lambda: call(lambda x: x * np.random.normal(), P("data")))
    finally:
        done.set()
        thread.join()
    assert row.verdict == migration.BLIND and "refused" not in migration.written([row])
    (row,) = rows(lambda: call(lambda x: x + x.sum(), P()))
    assert row.verdict == migration.OUTPUTS


@pytest.mark.parametrize(
    "after, shown",
    [(698_900, "699 kB (168 B less)"), (699_068, "699 kB"), (699_100, "699 kB (32 B more)")],
)
def test_a_saving_that_three_digits_hide_is_written(tmp_path, after, shown):
    site = migration.Site(str(tmp_path / "a.py"), 1, 0, 1, 9, "f")
    found = [migration.SiteRow(site, (), migration.SWITCH)]
    step = "jit_step", ("f32[8]",), 0
    runs = results.Outcome(sent={step: [699_068]}), results.Outcome(sent={step: [after]})
    said = migration.written(found, runs)
    (line,) = [line for line in said.splitlines() if line.startswith("jit_step")]
    assert [cell.strip() for cell in line.split("|")] == ["jit_step", "699 kB", shown]


@pytest.mark.parametrize("before, after, told", [(6, 9, True), (6, 6, False), (9, 6, False)])
def test_more_collectives_of_as_many_bytes_are_told(tmp_path, before, after, told):
    site = migration.Site(str(tmp_path / "a.py"), 1, 0, 1, 9, "f")
    found = [migration.SiteRow(site, (), migration.SWITCH)]
    step = "jit_step", (), 0
    runs = (
        results.Outcome(sent={step: [96]}, launched={step: [launched]})
        for launched in (before, after)
    )
    said = migration.written(found, tuple(runs))
    assert ("more collectives run: jit_step 9, 6 without it" in said) == told


def test_no_site_of_so_many_programs():
    assert migration.written([], None, 3) == (
        "no shard_map with its check off was called by the 3 programs that the script compiled\n"
    )


MODEL = """
import jax
import numpy as np
from jax.experimental import pallas as pl
from jax.sharding import PartitionSpec as P

jax.config.update("jax_platforms", "cpu")
MESH = jax.sharding.Mesh(np.array(jax.devices()).reshape(4, 2), ("data", "model"))


@jax.custom_vjp
def double(x):
    return pl.pallas_call(
        lambda x_ref, o_ref: o_ref.__setitem__(..., 2 * x_ref[...]),
        jax.ShapeDtypeStruct(x.shape, x.dtype), interpret=True,
    )(x)


double.defvjp(lambda x: (double(x), None), lambda _, g: (2 * g,))


@jax.jit
def step(x):
    layer = jax.shard_map(double, mesh=MESH, in_specs=P("data"), out_specs=P("data"), check_vma=False)
    return jax.grad(lambda x: (layer(x) ** 2).sum())(x)
"""
TESTS = """
import model
import numpy as np


def test_it():
    assert model.step(np.ones((8, 4), np.float32)).sum() == 256
"""
FLAGS = ["-q", "-p", "no:cacheprovider", "-p", "shardrules.checks.pytest_plugin"]
FLAGS += ["-p", "no:shardrules.pytest_plugin"]  # as which it is there where it is installed


@pytest.mark.slow
def test_what_a_suite_is_told_to_run_does_what_was_said(tmp_path):
    (tmp_path / "model.py").write_text(MODEL)
    (tmp_path / "test_it.py").write_text(TESTS)

    def run(*args):
        return subprocess.run(
            [sys.executable, "-m", *args],
            capture_output=True,
            text=True,
            cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, map(str, sys.path)))},
        )

    chosen = "-k", "test_it or other"
    watch = "--shardrules", "--shardrules-format", "text"
    before = run("pytest", *FLAGS, *watch, *chosen, "test_it.py")
    assert before.returncode == 1, before.stdout + before.stderr
    advice = re.search(r"run `shardrules (migrate --diff on.patch [^`]*)`", before.stdout)[1]
    assert advice == "migrate --diff on.patch -m pytest " + shlex.join(
        [*FLAGS, *chosen, "test_it.py"]
    )
    migrated = run("shardrules", *shlex.split(advice))
    assert "switch it now" in migrated.stderr, migrated.stderr
    assert "(for pytest, in conftest.py)" in " ".join(migrated.stderr.split())
    subprocess.run(["patch", "-p1", "-i", "on.patch"], cwd=tmp_path, check=True)
    pathlib.Path(tmp_path / "conftest.py").write_text("import shardrules\nshardrules.install()\n")
    after = run("pytest", *FLAGS, "--shardrules", "test_it.py")
    assert after.returncode == 0, after.stdout + after.stderr


@versions.where(versions.types_values)
def test_what_is_computed_by_a_type_is_not_advised_as_a_linear_bwd_is(cpu_mesh):
    """A rule may be linear in its cotangent, and twice as large with the check on."""
    op = jax.custom_vjp(lambda x: x * 3)
    typed = lambda g: jax.numpy.broadcast_to(1.0, g.shape) if _varying(g) else 2.0  # noqa: E731
    op.defvjp(lambda x: (op(x), None), lambda _, g: (g * typed(g),))
    body = lambda x, w: op(x * w)  # noqa: E731

    def loss(w):
        step = shard_map(body, cpu_mesh, (P("data"), P()), P("data"), check=False)
        return jax.numpy.sum(step(X, w) ** 2)

    with shardrules.install():
        (row,) = rows(lambda: jax.grad(loss)(W[0, 0]))
    assert row.verdict == migration.CHANGES
    said = migration.written([row])
    assert "the type of a value decides nothing" in said and "twice as much" not in said


def _varying(x):
    kind = jax.typeof(x)
    return kind.vma if hasattr(kind, "vma") else kind.manual_axis_type.varying
