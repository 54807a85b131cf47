"""``shardrules migrate``: its table and its patch, on a script that knows nothing of shardrules."""

import argparse
import ast
import dataclasses
import io
import os
import pathlib
import re
import shutil
import subprocess
import sys
import tokenize

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import shardrules
from shardrules import paths
from shardrules.commands import migrate, trial
from shardrules.unchecked import migration, results, tried
from shardrules.unchecked.sites import Site, UncheckedCall

pytestmark = pytest.mark.one_lane

SCRIPT = '''\
"""Trains."""
import os, sys
os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"
assert not {"jax", "numpy"} & set(sys.modules)
from functools import partial
import jax
import jax.numpy as jnp
import numpy as np
from jax import shard_map
from jax.experimental import pallas as pl
from jax.sharding import Mesh, PartitionSpec as P

mesh = Mesh(np.array(jax.devices()).reshape(4, 2), ("data", "model"))
on = dict(mesh=mesh, in_specs=P("data"))


def kernel(x_ref, o_ref):
    o_ref[...] = 2 * x_ref[...]


@jax.custom_vjp
def double(x):
    return pl.pallas_call(kernel, jax.ShapeDtypeStruct(x.shape, x.dtype), interpret=True)(x)


double.defvjp(lambda x: (double(x), None), lambda _, g: (double(g),))


@partial(shard_map, out_specs=P("data"), check_vma=False, **on)
def layer(x):
    return double(x)


é = shard_map(lambda x: x.sum(), out_specs=P(), check_vma=False, **on)  # "é" is two bytes
later = partial(shard_map, check_vma=False)


@jax.jit
def step(x):
    third = later(lambda x: 3 * x, out_specs=P("data"), **on)
    return jax.grad(lambda x: (third(layer(x)) ** 2).sum() + é(x))(x)


if __name__ == "__main__":
    print(sys.argv[1:], step(np.ones((8, 16), np.float32)).sum())'''


def run(cwd, *args):
    return subprocess.run(
        [sys.executable, *args],
        capture_output=True,
        text=True,
        cwd=cwd,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, map(str, sys.path)))},
    )


def test_a_scripts_table_and_its_patch(tmp_path):
    path = tmp_path / "train.py"
    path.write_text(SCRIPT)
    (tmp_path / "our_rules.py").write_text(  # not before the script has set up JAX as it likes
        "import pathlib, sys\nassert 'jax' in sys.modules\npathlib.Path('imported').touch()\n"
    )
    flags = ("--import", "our_rules", "--rule", "k=no_communication", "--diff", "on.patch")
    migrate = ("-m", "shardrules", "migrate", *flags, "train.py", "--lr", "1")
    done = run(tmp_path, *migrate)
    assert (tmp_path / "imported").exists()
    assert done.stdout == "['--lr', '1'] 9248.0\n", done.stderr
    assert done.returncode == 1
    lines = done.stderr.splitlines()
    (layer,) = [line for line in lines if line.startswith("train.py:29 (layer) ")]
    assert layer.endswith("switch it now")
    (step,) = [line for line in lines if line.startswith("jit_step ")]
    now, then = (int(cell.split()[0]) for cell in step.split("|")[1:])
    assert then and now - then == 128  # other sums in it are one or two, by JAX's version
    (compared,) = [line for line in lines if line.startswith("compared: ")]
    assert compared.endswith("they are equal but for rounding")
    assert "out_specs is P(), but it varies over data:" in done.stderr
    assert "train.py:40 (<lambda>): this call has no check_vma=False" in lines[-2]
    patch = (tmp_path / "on.patch").read_text()
    assert patch.count("\n-") - patch.count("\n--") == 1 and "+shardrules.install(" in patch
    assert shutil.which("patch"), "this test needs patch"
    subprocess.run(["patch", "-p1", "-i", "on.patch"], cwd=tmp_path, check=True)
    patched = run(tmp_path, "train.py", "--lr", "1")
    assert patched.stdout == done.stdout, patched.stderr
    again = run(tmp_path, *migrate)
    assert "(layer)" not in again.stderr and "2 shard_maps with the check off" in again.stderr


FAILS = SCRIPT.replace(
    "if __name__",
    """\
def another():
    return shard_map(lambda x: 4 * x, out_specs=P("data"), check_vma=False, **on)


another()(np.ones((8, 16), np.float32))
import inspect
if "True" in inspect.getsource(another):
    raise ValueError("it is patched")


if __name__""",
)


def test_a_site_whose_patched_script_raises_is_not_switched(tmp_path):
    path = tmp_path / "train.py"
    path.write_text(FAILS)
    done = run(tmp_path, "-m", "shardrules", "migrate", "--diff", "on.patch", "train.py")
    assert done.stdout == "[] 9248.0\n" and done.returncode == 1, done.stderr
    assert path.read_text() == FAILS
    table = {
        line.partition(" ")[0]: line.rpartition("| ")[2]
        for line in done.stderr.splitlines()
        if line.startswith("train.py:") and "|" in line
    }
    assert table["train.py:45"] == migration.RAISES and table["train.py:29"] == migration.SWITCH
    assert "with this switched on, the script fails: ValueError: it is patched" in done.stderr
    patch = (tmp_path / "on.patch").read_text()
    assert patch.count("def layer") and not patch.count("4 * x")
    once = run(tmp_path, "-m", "shardrules", "migrate", "--once", "train.py")
    assert migration.SWITCH not in once.stderr and migration.UNTRIED in once.stderr


def test_a_script_that_fails_by_itself_is_not_tried(tmp_path):
    (tmp_path / "train.py").write_text(SCRIPT + "\n    raise SystemExit(3)\n")
    done = run(tmp_path, "-m", "shardrules", "migrate", "train.py")
    assert done.returncode == 3 and migration.SWITCH not in done.stderr
    assert "the script as it is fails: exit code 3" in done.stderr
    assert "again" not in done.stderr


def test_a_script_that_fails_before_any_shard_map_is_not_called_without(tmp_path):
    (tmp_path / "train.py").write_text("import jax, nothing_there\n")
    done = run(tmp_path, "-m", "shardrules", "migrate", "--diff=on.patch", "train.py")
    assert done.returncode == 1 and "until the script failed (ModuleNotFoundError" in done.stderr
    assert "on.patch is empty: no shard_map was seen before the script failed" in done.stderr


def test_a_flag_behind_the_script_is_pointed_out(tmp_path):
    (tmp_path / "train.py").write_text("import sys\nprint(sys.argv)\n")
    done = run(tmp_path, "-m", "shardrules", "migrate", "-m", "train", "--once", "--own=1")
    assert "'--once', '--own=1'" in done.stdout
    assert done.stderr.startswith(
        "shardrules: --once behind -m train went to the script; put a flag of shardrules "
        "before it: shardrules migrate --once ... -m train\n"
    )


@pytest.mark.parametrize("is_imported", [True, False])
def test_modules_are_run_from_the_patch(tmp_path, is_imported):
    head, main = SCRIPT.split("if __name__")
    # By then the other file has installed the hooks.
    whole = SCRIPT.replace('assert not {"jax", "numpy"} & set(sys.modules)\n', "")
    (tmp_path / "model.py").write_text(head if is_imported else whole)
    runs = "import runpy\n\nrunpy.run_path('./model.py', run_name='__main__')\n"
    text = f"from model import *\n\n\nif __name__{main}\n" if is_imported else runs
    (tmp_path / "train.py").write_text(text)
    run(tmp_path, "train.py")  # its bytecode is there
    done = run(tmp_path, "-m", "shardrules", "migrate", "--diff", "on.patch", "-m", "train", "1")
    assert done.stdout == "['1'] 9248.0\n", done.stderr
    (step,) = [line for line in done.stderr.splitlines() if line.startswith("jit_step ")]
    now, then = (int(cell.split()[0]) for cell in step.split("|")[1:])
    assert then and now - then == 128  # other sums in it are one or two, by JAX's version
    patch = (tmp_path / "on.patch").read_text()
    files = [line[6:] for line in patch.splitlines() if line.startswith("+++")]
    assert files == ["model.py", "train.py"]


def test_a_script_that_installs_the_hooks_for_a_part_is_tried_as_it_is(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    head, _ = SCRIPT.split("if __name__")
    model = tmp_path / "model.py"
    model.write_text(head)
    (tmp_path / "train.py").write_text(
        "from model import *\nimport shardrules\nx = np.ones((8, 16), np.float32)\n"
        "with shardrules.install():\n    pass\nlayer(x)\n"
    )
    arguments = argparse.Namespace(module=None, script=["train.py"], rule=[], rules=[])
    on = head.replace('P("data"), check_vma=False', 'P("data"), check_vma=True')
    texts = {str(model): on.splitlines(keepends=True)}
    assert not trial.run(arguments, look=False).failure
    assert trial.run(arguments, look=False, texts=texts).failure


def test_a_suite_s_test_files_are_run_from_the_patch(tmp_path):
    """Its findings, of --shardrules in its addopts, are no failure of it."""
    head, _ = SCRIPT.split("if __name__")
    head = head.replace('assert not {"jax", "numpy"} & set(sys.modules)\n', "")
    head = head.replace("out_specs=P(), check_vma=False, ", "out_specs=P('data'), ")
    head += "def test_it():\n    assert step(np.ones((8, 16), np.float32)).sum()\n"
    (tmp_path / "test_it.py").write_text(
        head.replace(" + é(x))(x)", ")(x)").replace("x.sum()", "x")
    )
    plugin = "-p shardrules.checks.pytest_plugin -p no:shardrules.pytest_plugin"
    (tmp_path / "pytest.ini").write_text(f"[pytest]\naddopts = --shardrules {plugin}\n")
    done = run(tmp_path, "-m", "shardrules", "migrate", "-m", "pytest", "test_it.py")
    assert "the script as it is fails" not in done.stderr, done.stderr
    (step,) = [line for line in done.stderr.splitlines() if line.startswith("jit_step ")]
    now, then = (int(cell.split()[0]) for cell in step.split("|")[1:])
    assert now > then, done.stderr


@pytest.mark.parametrize("sent, verdict", [(9, "SWITCH"), (10, "SWITCH"), (11, "MORE")])
def test_what_the_patched_script_sends_decides(tmp_path, monkeypatch, sent, verdict):
    monkeypatch.chdir(tmp_path)
    site = call(pathlib.Path("file.py"), "x = shard_map(f, check_vma=False)\n")
    # By a derivative that the script never takes, it would send more.
    found = [migration.SiteRow(site, (), migration.MORE)]
    rows, outcome = tried.tried(
        found,
        results.Outcome(sent={("jit_f", (), 0): [10]}),
        lambda some: migration.edited(some, "file.py"),
        lambda _: results.Outcome(sent={("jit_f", (), 0): [sent]}),
    )
    assert [row.verdict for row in rows] == [getattr(migration, verdict)]
    assert (outcome is None) == (verdict == "MORE")
    assert ("send 10 B now, and 11 B with this on" in rows[0].note) == (verdict == "MORE")


@pytest.mark.parametrize(
    "before, after, sums",
    [
        ({"A": 100, "B": 7}, {"A": 90, "B": 7}, (107, 97)),
        # Placed otherwise, a result makes JAX compile once more in one of the runs.
        ({"A": 100, "B": 80}, {"A": 90}, (180, 180)),
        ({"A": 100}, {"A": 90, "C": 300}, (200, 390)),
        ({"A": 100, "B": 80}, {"A": 90, "C": 85}, (180, 175)),
        ({}, {"A": 90}, (0, 90)),
    ],
)
def test_bytes_are_compared_for_the_same_arguments(before, after, sums):
    sides = [{("jit_f", (key,), 0): [n] for key, n in side.items()} for side in (before, after)]
    (row,) = results.sent_by_name(*sides)
    assert row[:3] == ("jit_f", *sums)
    # What other programs send is not theirs.
    sides[0]["jit_g", ("A",), 0] = [5]
    assert ("jit_g", 5, 0, 1, True) in results.sent_by_name(*sides)


@pytest.mark.parametrize(
    "before, after, sums, programs, saves",
    [
        # Four functions that jit calls alike, each compiled twice; the patch changes the first.
        ([9] * 8, [0, 0] + [9] * 6, (18, 9), 2, True),
        ([9] * 8, [0] * 2 + [9] * 5, (9, 9), 1, True),  # JAX compiled one of them less often
        ([9] * 3, [9] * 3, (9, 9), 1, False),
        ([9] * 3, [9] * 2, (9, 9), 1, False),
        ([9, 7], [9, 7], (16, 16), 2, False),
        ([9, 7], [7, 9], (16, 16), 2, True),
        ([9, 0], [9, 0], (9, 9), 1, False),  # one sends nothing
    ],
)
def test_programs_of_one_name_are_compared_in_their_order(before, after, sums, programs, saves):
    """Of programs for the same arguments the last one counted, which hid what others save."""
    key = "jit__lambda", ("f32[8]",), 0
    compared = results.sent_by_name({key: before}, {key: after})
    assert compared == [("jit__lambda", *sums, programs, saves)]


def test_a_function_that_is_compiled_again_sends_once(cpu_mesh):
    sharded = NamedSharding(cpu_mesh, P("data"))
    x = jax.device_put(np.ones((8, 16), np.float32), sharded)

    def total():
        return jax.jit(lambda x: x.sum(0), out_shardings=NamedSharding(cpu_mesh, P()))

    with shardrules.watch() as seen:
        for _ in range(3):
            total()(x)
        total()(jax.device_put(np.ones((16, 16), np.float32), sharded))
    assert len(seen) == 4
    sent, launched = trial._sent(seen)
    assert [*sent.values()] == [[96] * 3, [96]] and [*launched.values()] == [[1] * 3, [1]]
    (row,) = results.sent_by_name(sent, sent)
    assert row == ("jit__lambda", 192, 192, 2, False)


@pytest.mark.parametrize("off, verdict", [(1e-5, "SWITCH"), (0.5, "CHANGES")])
def test_what_the_patched_script_returns_decides(tmp_path, monkeypatch, off, verdict):
    monkeypatch.chdir(tmp_path)
    site = call(pathlib.Path("file.py"), "x = shard_map(f, check_vma=False)\n")

    def returned(value):
        return {
            "jit_f": [results.ProgramRun((None, results.Result("float32", (1,), value, (value,))))]
        }

    rows, _ = tried.tried(
        [migration.SiteRow(site, (), migration.SWITCH)],
        results.Outcome(results=returned(1.0)),
        lambda some: migration.edited(some, "file.py"),
        lambda _: results.Outcome(results=returned(1.0 + off)),
    )
    assert [row.verdict for row in rows] == [getattr(migration, verdict)]
    assert ("result 1 of jit_f, run 1, differs by up to 0.5" in rows[0].note) == (off == 0.5)


CLIPS = """
@jax.custom_vjp
def clipped(w):
    return w


clipped.defvjp(lambda w: (w, None), lambda _, g: (jax.lax.pmax(g, "data") / 4,))
"""


def test_a_site_whose_gradient_would_change_is_left_and_why(tmp_path):
    text = SCRIPT.replace("@partial(shard_map, out", CLIPS + "\n\n@partial(shard_map, out", 1)
    text = text.replace("return double(x)", "return clipped(x)")
    (tmp_path / "train.py").write_text(text)
    done = run(tmp_path, "-m", "shardrules", "migrate", "train.py")
    assert done.returncode == 1 and migration.SWITCH not in done.stderr, done.stderr


COUNTS = """
count = [0]


@jax.jit
def counted(w):
    count[0] += 1
    return w * count[0]
"""


def test_a_site_that_counts_traces_is_told_what_to_change(tmp_path):
    """It was told of cotangents, which aren't its reason."""
    text = SCRIPT.replace("@partial(shard_map, out", COUNTS + "\n\n@partial(shard_map, out", 1)
    text = text.replace("return double(x)", "return counted(x)")
    (tmp_path / "train.py").write_text(text)
    said = " ".join(run(tmp_path, "-m", "shardrules", "migrate", "train.py").stderr.split())
    assert "or by how often its functions are traced" in said
    assert "count outside of the body" in said and "gets the sum" not in said


@pytest.mark.parametrize(
    "off, rest, is_rounding",
    [
        (1e-8, 1e-8, True),
        (1e-2, 1e-8, False),
        (None, 1e-8, False),
        (0.0, 1e-8, False),  # of equal arguments
        (1e-8, 7.0, False),  # a gradient that a step computes from them
    ],
)
def test_rounding_that_a_script_prints_is_told_as_what_it_may_be(off, rest, is_rounding):
    """Of `g - reference` nothing but rounding is left, so no size tells it from a wrong gradient."""

    def runs(g, rest):
        took = () if off is None else (results.Result("float32", (1,), g, (g,)),)
        left = results.Result("float32", (1,), rest, (rest,))
        return {"jit_subtract": [results.ProgramRun((left,), took, "train.py:7")]}

    said = results.different(runs(1.0, 3e-8), runs(1.0 + (off or 0), rest))
    assert said.startswith("result 0 of jit_subtract at train.py:7, run 1, differs by up to ")
    assert ("This may be rounding alone: what it takes differs by 1e-08" in said) == is_rounding
    assert ("shardrules.testing.assert_same_unchecked" in said) == is_rounding


NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize(
    "before, after, said",
    [
        ([NAN, 1, 2], [NAN, 1, 2], ""),
        ([1, INF, -INF], [1, INF, -INF], ""),
        ([NAN, 1, 2], [NAN, 9, 2], "differs by up to 8, and its largest value is 9"),
        ([1, INF, 2], [9, INF, 2], "differs by up to 8, and its largest value is 9"),
        ([NAN, 1, 2], [0, 1, 2], "has NaN or infinite elements that differ"),
        ([0, INF, 2], [0, 1, 2], "has NaN or infinite elements that differ"),
        ([0, INF, 2], [0, -INF, 2], "has NaN or infinite elements that differ"),
    ],
)
def test_nan_and_infinity_equal_themselves_and_hide_no_other_element(before, after, said):
    def runs(values):
        read = results._read(np.array(values, np.float32).view(Addressable))
        return {"jit_f": [results.ProgramRun((read,))]}

    different = results.different(runs(before), runs(after))
    assert said in different and bool(said) == bool(different)


class Addressable(np.ndarray):
    is_fully_addressable = True  # as an array of JAX in one process


def test_the_results_of_both_runs_are_recorded(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text(SCRIPT)
    arguments = argparse.Namespace(module=None, script=["train.py"], rule=[], rules=[])
    outcome = trial.run(arguments, look=False)
    (first, *_) = outcome.results["jit_step"]
    result = first.returned[0]
    assert result.shape == (8, 16) and result.dtype == "float32" and result.largest > 1
    assert first.line.startswith(str(tmp_path / "train.py")) and not first.took
    runs = [run for runs in outcome.results.values() for run in runs]
    assert [run.took for run in runs if run.took] == [(result,)]  # the sum of it


ANNOTATED = SCRIPT.replace(
    "jax.ShapeDtypeStruct(x.shape, x.dtype)",
    "jax.ShapeDtypeStruct(x.shape, x.dtype, "
    "manual_axis_type=jax.sharding.ManualAxisType(varying=frozenset()))",
)


def test_an_annotation_that_a_kernel_contradicts_is_named_at_its_shard_map(tmp_path):
    (tmp_path / "train.py").write_text(ANNOTATED)
    done = run(tmp_path, "-m", "shardrules", "migrate", "train.py")
    assert done.stdout == "[] 9248.0\n", done.stderr
    (at,) = [n for n, x in enumerate(done.stderr.splitlines()) if x.startswith("train.py:29 (")][1:]
    line = done.stderr.splitlines()[at + 1]
    assert line.startswith("  output 0 of pallas_call kernel 'kernel' (defined at ")
    assert "annotated" in line


def test_rules_of_flags_are_in_the_patch_and_those_that_match_nothing_are_named(tmp_path):
    text = SCRIPT.replace("2 * x_ref[...]", "2 * x_ref[...] + 0 * jax.lax.axis_index('model')")
    text = text.replace('P("data")', 'P(("data", "model"))')  # its bwd has nothing to sum
    (tmp_path / "train.py").write_text(text)
    (tmp_path / "our_rules.py").write_text(
        "import shardrules\nshardrules.register('kernel', shardrules.permute('model'))\n"
    )
    plain = run(tmp_path, "train.py")
    for flags, line in (
        (("--rule", "ker*=per_device(model)"), "shardrules.register('ker*', "),
        (("--import", "our_rules"), "import our_rules"),
    ):
        flags += ("--rule", "kernl=no_communication", "--diff", "on.patch")
        done = run(tmp_path, "-m", "shardrules", "migrate", *flags, "train.py")
        assert "--rule=kernl=no_communication" in done.stderr
        patch = (tmp_path / "on.patch").read_text()
        assert f"\n+{line}" in patch and "kernl" not in patch, done.stderr
        shutil.copy(tmp_path / "train.py", tmp_path / "patched.py")
        subprocess.run(["patch", "-p1", "-i", "on.patch", "patched.py"], cwd=tmp_path, check=True)
        patched = run(tmp_path, "patched.py")
        assert patched.stdout == plain.stdout, patched.stderr


@pytest.mark.parametrize(
    "before, after",
    [
        ("import shardrules as sr\nsr.install()\n", ""),
        ("def main():\n    from shardrules import install\n    install()\n", ""),
        ("import shardrules.testing\nshardrules.install()\n", ""),
        ("import shardrules\nif __name__ == '__main__':\n    shardrules.install()\n", ""),
        ("import shardrules\nwith shardrules.install() as handle:\n    pass\n", ""),
        ("import shardrules\nif flag:\n    shardrules.install()\n", "import shardrules\n"),
        ("import shardrules\nf = lambda: shardrules.install()\n", "import shardrules\n"),
        ("from other import install\ninstall()\n", "from other import install\n"),
        (
            "import os\nos.environ['JAX_PLATFORMS'] = 'cpu'\nprint()\n",  # read with jax
            "import os\nos.environ['JAX_PLATFORMS'] = 'cpu'\n",
        ),
        (
            "import os\nos.environ.setdefault('A', 'b')\nmain(os.environ)\n",
            "import os\nos.environ.setdefault('A', 'b')\n",
        ),
        ("import os\n\ndef set():\n    os.environ.clear()\n", "import os\n"),
    ],
)
def test_hooks_are_installed_once_and_where_the_environment_is_set(
    tmp_path, monkeypatch, before, after
):
    monkeypatch.chdir(tmp_path)
    path = pathlib.Path("file.py")
    site = call(path, before + "x = shard_map(f, check_vma=False)\n")
    patch, left = patched([migration.SiteRow(site, (), migration.SWITCH)], str(path))
    assert left == []
    pathlib.Path("on.patch").write_text(patch)
    subprocess.run(["patch", "-p1", "-i", "on.patch"], check=True)
    imports = "" if "import shardrules\n" in after else "import shardrules\n\n"
    added = f"\n{imports}shardrules.install()\n\n" if after else ""
    rest = before.removeprefix(after)
    assert path.read_text().replace("\n\n\n", "\n\n") == (
        f"{after}{added}{rest}x = shard_map(f, check_vma=True)\n".replace("\n\n\n", "\n\n")
    )


@pytest.mark.parametrize("arguments", ["casts='late'", "unknown='warn'", "**settings"])
def test_an_install_with_other_arguments_is_named(tmp_path, monkeypatch, arguments):
    monkeypatch.chdir(tmp_path)
    text = (
        f"import shardrules\nshardrules.install({arguments})\nx = shard_map(f, check_vma=False)\n"
    )
    row = migration.SiteRow(call(pathlib.Path("file.py"), text), (), migration.SWITCH)
    patch, left = patched([row], "file.py")
    assert "+shardrules.install()" in patch
    assert left == [
        f"file.py:2: shardrules.install({arguments}) replaces what the patch adds; "
        "drop its arguments"
    ]


@pytest.mark.parametrize(("after", "is_said"), [(64, True), (60, False)])
def test_a_patch_that_saves_no_bytes_says_so(tmp_path, after, is_said):
    site = call(tmp_path / "file.py", "x = shard_map(f, check_vma=False)\n")
    rows = [migration.SiteRow(site, (), migration.SWITCH)]
    step = "jit_step", ("f32[8]",), 0
    runs = results.Outcome(sent={step: [64]}), results.Outcome(sent={step: [after]})
    said = migration.written(rows, runs)
    assert ("saves no bytes" in said) is is_said


def test_rules_are_to_be_written_by_hand_where_the_script_installs_already(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path = pathlib.Path("file.py")
    text = "import shardrules\nshardrules.install()\nx = shard_map(f, check_vma=False)\n"
    row = migration.SiteRow(call(path, text), (), migration.SWITCH)
    line = "shardrules.register('k', shardrules.no_communication)"
    patch, left = patched([row], str(path), [line])
    assert line not in patch and left == [f"file.py: write {line} there"]


def patched(rows, script, rules=()):
    """The patch as text, and what is left to edit by hand."""
    made = migration.edited(rows, script, rules)
    return migration.diff(made), made.left


def call(path, text, function="f"):
    """The site of the first call of shard_map in a file."""
    path.write_bytes(text.encode())
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Call) and "shard_map" in ast.unparse(node.func):
            spot = node.lineno, node.col_offset, node.end_lineno, node.end_col_offset
            return Site(str(path), *spot, function)
    raise AssertionError


@pytest.mark.parametrize(
    "text, changed",
    [
        ("x = shard_map(f, check_vma=False)", "x = shard_map(f, check_vma=True)"),
        (
            "é = 'é', shard_map(f, check_rep =\tFalse)\r\n",
            "é = 'é', shard_map(f, check_rep =\tTrue)",
        ),
        (
            "x = partial(shard_map, check_vma=False)(f, mesh=mesh)\n",
            "x = partial(shard_map, check_vma=True)(f, mesh=mesh)",
        ),
        ("x = partial(shard_map, check_vma=False)(f, check_vma=off)\n", None),
        ("later = partial(f, check_vma=False)\nx = (later or shard_map)(f)\n", None),
        ("x = shard_map(f, check_vma=off)\n", None),
        ("x = shard_map(f, **off)\n", None),
        ("x = shard_map(f, check_vma=not True)\n", None),
    ],
)
def test_only_a_literal_in_the_call_itself_is_changed(tmp_path, monkeypatch, text, changed):
    monkeypatch.chdir(tmp_path)
    path = pathlib.Path("file.py")
    site = call(path, "import os\n" + text)
    row = migration.SiteRow(site, (), migration.SWITCH)
    patch, left = patched([row], str(path))
    if changed is None:
        assert patch == "" and "no check_vma=False" in left[0]
        return
    assert f"\n+{changed}" in patch and left == []
    with open("on.patch", "w", newline="") as file:
        file.write(patch)
    subprocess.run(["patch", "-p1", "--binary", "-i", "on.patch"], check=True)
    assert path.read_bytes().decode().rstrip().endswith(changed)


@pytest.mark.parametrize(
    "text, left",
    [
        (
            "shard_map(\n  f,\n  # check_vma=False, since\n  # of it\n  check_vma=False,  # why\n)",
            "",
        ),
        ("shard_map(f, check_vma=False)  # no check_vma: pallas", ""),
        ("shard_map(f, check_vma=False)  # another matter", "# another matter"),
        (
            "shard_map(\n  f,\n  # an axis\n  check_vma=False,  # noqa: E501\n)",
            "# an axis# noqa: E501",
        ),
        ("shard_map(f,  # replicated\n  check_vma=False, a='#vma')", "# replicated"),
    ],
)
def test_the_reason_for_which_the_check_was_off_goes_with_it(tmp_path, monkeypatch, text, left):
    monkeypatch.chdir(tmp_path)
    path = pathlib.Path("file.py")
    site = call(path, f"f = 1\n\nx = {text}\n")
    patch, _ = patched([migration.SiteRow(site, (), migration.SWITCH)], "other.py")
    pathlib.Path("on.patch").write_text(patch)
    subprocess.run(["patch", "-p1", "-i", "on.patch"], check=True)
    after = path.read_text()
    comments = [
        t.string
        for t in tokenize.generate_tokens(io.StringIO(after).readline)
        if t.type == tokenize.COMMENT
    ]
    assert "".join(comments) == left and after.replace(" ", "").count("check_vma=True") == 1


ONE_NAME = """\
import os
os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"
import functools
import jax
import jax.numpy as jnp
import numpy as np
from jax import shard_map
from jax.sharding import Mesh, PartitionSpec as P

mesh = Mesh(np.array(jax.devices()).reshape(4, 2), ("data", "model"))
specs = dict(mesh=mesh, in_specs=P("data"), out_specs=P("data"))


def square(x):
    return x**2


own = functools.partial(
    shard_map,
    check_vma=False,
    **specs,
)(square)
shared = functools.partial(shard_map, check_vma=False)
x = jnp.ones((8, 256))
for f in (own, shared(square, **specs), shared(square, **specs)):
    print(jax.jit(jax.grad(lambda x: f(x).sum()))(x).sum())
"""


def test_a_program_that_shares_its_name_shows_what_it_saves(tmp_path):
    (tmp_path / "train.py").write_text(ONE_NAME)
    done = run(tmp_path, "-m", "shardrules", "migrate", "--diff", "on.patch", "train.py")
    lines = done.stderr.splitlines()
    verdicts = [line.split(" | ")[2] for line in lines if line.startswith("train.py:")][:3]
    assert verdicts == [migration.SWITCH, migration.BY_HAND, migration.BY_HAND], done.stderr
    (row,) = [line for line in lines if line.startswith("jit__lambda")]
    assert [*map(str.strip, row.split("|"))] == ["jit__lambda (2 programs)", "4096 B", "2048 B"]
    assert "saves no bytes" not in done.stderr
    patch = (tmp_path / "on.patch").read_text()
    assert "-    check_vma=False,\n+    check_vma=True," in patch


def test_programs_are_counted_as_run_counts_them(tmp_path):
    """Those of one function and one kind of arguments counted once."""
    (tmp_path / "train.py").write_text(
        "import jax\nfor _ in range(3):\n    jax.jit(lambda x: x + 1)(1.0)\n"
    )
    reported = run(tmp_path, "-m", "shardrules", "run", "train.py").stderr
    count = re.match(r"(\d+) programs compiled", reported).group(1)
    done = run(tmp_path, "-m", "shardrules", "migrate", "train.py")
    assert int(count) >= 3 and f"by the {count} programs that the script compiled" in done.stderr
    # Nor does a name count as one program.
    one = results.Result("float32", (1,), 1.0, (1.0,))
    runs = {"jit_f": [results.ProgramRun((one, one), program=number) for number in (4, 4, 5)]}
    assert results.compared(runs, runs).startswith("compared: 6 results of 2 programs, ")


def test_what_was_looked_at_together_is_switched_together_or_not_at_all(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    site = call(pathlib.Path("one.py"), "x = shard_map(f, check_vma=False)\n")
    good = migration.SiteRow(site, (), migration.SWITCH)
    same_line = migration.SiteRow(dataclasses.replace(site, function="other"), (), migration.RULE)
    patch, left = patched([good, same_line], "one.py")
    assert patch == "" and "together with one.py:1 (other)" in left[0]
    inner = call(pathlib.Path("two.py"), "x = shard_map(f, **off)\n")
    within = UncheckedCall(inner, site, "", (), (), "", "", False, None, None)
    rows = [good, migration.SiteRow(inner, (within,), migration.SWITCH)]
    patch, left = patched(rows, "one.py")
    assert patch == "" and len(left) == 2 and "together with two.py:1 (f)" in left[0]
    assert patched([good], "one.py")[0]


def test_what_is_not_below_this_folder_or_installs_already_is_left(tmp_path, monkeypatch):
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    elsewhere = call(tmp_path / "other.py", "x = shard_map(f, check_vma=False)\n")
    rows = [migration.SiteRow(elsewhere, (), migration.SWITCH)]
    patch, (reason,) = patched(rows, "script.py")
    assert patch == "" and "run migrate in a folder above it" in reason
    path = pathlib.Path("script.py")
    text = "import shardrules\nshardrules.install()\nx = shard_map(f, check_vma=False)\n"
    patch, _ = patched([migration.SiteRow(call(path, text), (), migration.SWITCH)], str(path))
    assert "install" not in "".join(line for line in patch.splitlines() if line[0] == "+")
    blocked = [row._replace(verdict=migration.RULE) for row in rows]
    assert patched(blocked, str(path)) == ("", [])


def test_a_script_in_another_folder_is_patched_there(tmp_path, monkeypatch):
    (tmp_path / "here").mkdir()
    (tmp_path / "own code").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    path = tmp_path / "own code" / "train.py"
    site = call(path, "x = shard_map(f, check_vma=False)\n")
    own = migration.SiteRow(site, (), migration.SWITCH)
    edits = migration.edited([own], str(path))
    assert "+++ b/train.py\n" in migration.diff(edits) and not edits.left
    pathlib.Path("on.patch").write_text(migration.diff(edits))
    applied = migrate._applied(edits, "on.patch", 1, 1, "").partition("apply it: ")[2].strip("`")
    subprocess.run(applied, shell=True, check=True)
    assert "check_vma=True" in path.read_text() and "shardrules.install()" in path.read_text()
    # One patch for two folders, and nothing for a command that pip installed.
    site = call(path, "x = shard_map(f, check_vma=False)\n")
    model = call(pathlib.Path("model.py"), "x = shard_map(f, check_vma=False)\n")
    both = [own, migration.SiteRow(model, (), migration.SWITCH)]
    patch, _ = patched(both, str(path))
    assert re.findall(r"^\+\+\+ b/(.*\w)", patch, re.M) == ["own code/train.py", "here/model.py"]
    subprocess.run(["patch", "-p1", "-d", ".."], input=patch, text=True, check=True)
    assert "check_vma=True" in path.read_text() and "=True" in pathlib.Path("model.py").read_text()
    monkeypatch.setattr(paths, "_COMMANDS", str(path.parent))
    patch, left = patched([own], str(path))
    assert patch == "" and "not your own file" in left[0]


def test_a_script_in_another_folder_is_tried(tmp_path):
    (tmp_path / "here").mkdir()
    (tmp_path / "train.py").write_text(ONE_NAME)
    done = run(tmp_path / "here", "-m", "shardrules", "migrate", "../train.py")
    rows = [line for line in done.stderr.splitlines() if "train.py:" in line and " | " in line]
    assert [row.split(" | ")[2] for row in rows] == [migration.SWITCH, *[migration.BY_HAND] * 2]
    # Why a site is left is said without --diff, too.
    assert done.stderr.count("this call has no check_vma=False") == 2


def test_a_library_that_is_installed_below_this_folder_is_left(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    installed = tmp_path / ".venv" / "lib" / "site-packages"
    installed.mkdir(parents=True)
    (installed / "pytest.py").write_text("import sys\n")
    text = "x = shard_map(f, check_vma=False)\n"
    kinds = [call(tmp_path / "own.py", text), call(installed / "layers.py", text)]
    rows = [migration.SiteRow(site, (), migration.SWITCH) for site in kinds]
    patch, left = patched(rows, str(installed / "pytest.py"))
    assert re.findall(r"^\+\+\+ (.*)", patch, re.MULTILINE) == ["b/own.py"]
    assert len(left) == 2 and "not your own file" in left[0], left


IN_ITS_BODY = """\
import os
os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"
import jax
import numpy as np
from jax.sharding import PartitionSpec as P
mesh = jax.sharding.Mesh(np.array(jax.devices()), ("data",))
def body(w, x):
    return jax.lax.pmean(jax.grad(lambda w: ((x @ w) ** 2).mean())(w), "data")
step = jax.shard_map(body, mesh=mesh, in_specs=(P(), P("data")), out_specs=P(), check_vma=False)
print(jax.jit(step)(np.ones((4, 4), np.float32), np.ones((8, 4), np.float32)).sum())
"""


def test_it_says_how_to_apply_the_patch_and_when_it_is_empty(tmp_path, monkeypatch):
    (tmp_path / "train.py").write_text(SCRIPT)
    done = run(tmp_path, "-m", "shardrules", "migrate", "--diff", "on.patch", "train.py")
    last = done.stderr.splitlines()[-1]
    assert last == (
        "shardrules: on.patch switches on the check of 1 shard_map; in this folder, apply it: "
        "`patch -p1 < on.patch`"
    )
    subprocess.run(last.partition("apply it: ")[2].strip("`"), shell=True, cwd=tmp_path, check=True)
    assert "check_vma=True" in (tmp_path / "train.py").read_text()
    (tmp_path / "body.py").write_text(IN_ITS_BODY)
    monkeypatch.setenv("COLUMNS", "80")
    done = run(tmp_path, "-m", "shardrules", "migrate", "--diff", "on.patch", "body.py")
    assert done.returncode == 1 and (tmp_path / "on.patch").read_text() == ""
    last = done.stderr.partition("shardrules: on.patch")[2]
    assert (
        last.split()
        == (
            "is empty, as a patch can't switch on the check of 1 shard_map: the script did not run "
            "with a patch, and nothing was compared"
        ).split()
    )
    assert max(map(len, done.stderr.splitlines())) <= 80
    assert "with respect to shardrules.vary(w, 'data'), naming each axis of the psum" in " ".join(
        done.stderr.split()
    )
    assert "with the check on, its body" not in done.stderr
    # It has no custom rule, and what differs is no matter of a bwd.
    assert "custom rule" not in done.stderr and "twice as much" not in done.stderr
    done = run(tmp_path, "-m", "shardrules", "migrate", "body.py")
    assert "--diff" not in done.stderr
