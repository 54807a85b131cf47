"""``run --profile`` records steps of a script, and ``diff`` compares two profiles."""

import json
import os
import pathlib
import subprocess
import sys

import pytest

from shardrules.__main__ import main
from watching.xspaces import ASYNC

pytestmark = pytest.mark.one_lane

SCRIPT = """
import sys
import jax, jax.numpy as jnp, numpy as np
from jax.sharding import NamedSharding, PartitionSpec as P
mesh = jax.sharding.Mesh(np.array(jax.devices()).reshape(4, 2), ("data", "model"))
f = jax.shard_map(
    lambda w, x: jnp.tanh(x @ w), mesh=mesh, in_specs=(P(), P("data")), out_specs=P("data"),
    check_vma={check},
)
step = jax.jit(lambda w, x: w - jax.grad(lambda w: (f(w, x) ** 2).sum())(w))
w = jax.device_put(np.ones((8, 8), np.float32), NamedSharding(mesh, P()))
x = np.ones((4, 8), np.float32)
for number in range({count}):
    with {around}:
        w = step(w, x)
        {more}
sys.exit({code})
"""


def script(path, check=False, count=8, around="mesh", more="", code=0):
    path.write_text(SCRIPT.format(check=check, count=count, around=around, more=more, code=code))
    return path


def run(*args):
    flags = "--xla_force_host_platform_device_count=8"
    env = {**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags}
    return subprocess.run(
        [sys.executable, "-m", "shardrules", *map(str, args)],
        capture_output=True,
        text=True,
        env=env,
    )


MARKED = 'jax.profiler.StepTraceAnnotation("train", step_num=number)'


@pytest.mark.parametrize(
    "around, more, runs", [("mesh", "", 1), ("mesh", "x + x", 1), (MARKED, "w = step(w, x)", 2)]
)
def test_run_records_steps_after_the_warm_up(around, more, runs, tmp_path):
    path = script(tmp_path / "train.py", around=around, more=more)
    done = run("run", "--profile", 3, "--format", "json", "--output", "-", path)
    assert done.returncode == 1, done.stderr
    data = json.loads(done.stdout)
    found = data["profile"]
    (measured_one,) = (one["measured"] for one in data["programs"] if one["measured"])
    assert measured_one["avoidable_seconds"] == pytest.approx(found["avoidable_seconds"])
    assert found["steps"]["count"] == 3 and found["steps"]["marked"] == (around == MARKED)
    (collective,) = found["collectives"]
    assert collective["what"] == "backward all-reduce(data, model)"  # the mesh is known
    assert collective["verdict"] == "overwide" and collective["runs"] == runs
    assert 0 < collective["avoidable_seconds"] < collective["exposed_seconds"]


def test_run_says_where_the_script_ends_too_early(tmp_path):
    done = run("run", "--profile", 3, script(tmp_path / "train.py", count=2, code=3))
    assert done.returncode == 3
    assert "--profile recorded nothing: the script ended before it had warmed up" in done.stderr
    assert "let the script run 5 steps or more after its last compilation" in done.stderr
    assert "1 overwide" in done.stderr  # the report of its programs stands
    done = run("run", "--profile", 3, script(tmp_path / "train.py", count=4))
    assert "the script ended after" in done.stderr and "of --profile's 3 steps; " in done.stderr
    assert "let the script run 5 steps or more after its last compilation" in done.stderr
    (tmp_path / "alone.py").write_text("import jax\njax.jit(lambda x: x + 1)(1.0)\n")
    done = run("run", "--profile", 3, tmp_path / "alone.py")
    assert "nothing: no program with collectives was called in the main thread" in done.stderr
    done = run("run", "--profile", "0", tmp_path / "train.py")
    assert done.returncode == 2 and "write --profile 3" in done.stderr


MICROBATCHES = """
import jax, jax.numpy as jnp, numpy as np
from jax.sharding import NamedSharding, PartitionSpec as P
mesh = jax.sharding.Mesh(np.array(jax.devices()).reshape(4, 2), ("data", "model"))
put = lambda x, *spec: jax.device_put(x, NamedSharding(mesh, P(*spec)))
ones = np.ones((8, 8), np.float32)
grad = jax.jit(lambda w, x: jax.grad(lambda w: (jnp.tanh(x @ w) ** 2).sum())(w))
add = jax.jit(lambda a, b: a + b)
apply = jax.jit(lambda w, g: w - g, out_shardings={results})
w = {first}
for number in range(4):
    total = grad(w, put(ones, "data"))
    for _ in range(3):
        total = add(total, grad(w, put(ones, "data")))
    w = apply(w, total)
"""


@pytest.mark.parametrize(
    "first, results, compiled_anew",
    [
        # The same sharding as apply's results have, in other words: lowered again, not compiled.
        ("put(ones, None, None)", "NamedSharding(mesh, P())", False),
        # Not placed on the devices before: compiled again in the second step.
        ("ones", "None", True),
    ],
)
def test_run_records_a_loop_of_microbatches(first, results, compiled_anew, tmp_path):
    path = tmp_path / "train.py"
    path.write_text(MICROBATCHES.format(first=first, results=results))
    done = run("run", "--profile", 3, "--format", "json", "--output", "-", path)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["profile"]["steps"]["count"] == 3
    (times,) = (each["times"] for each in found["programs"] if each["measured"])
    assert times == 1 + compiled_anew


def test_steps_before_a_last_compilation_are_kept(tmp_path):
    path = script(tmp_path / "train.py", count=5)
    text = path.read_text().replace("sys.exit", "print((w + 1).sum())\nsys.exit")
    path.write_text(text)
    done = run("run", "--profile", 3, path)
    assert "the script ended after 2 of --profile's 3 steps; it has warmed" in done.stderr
    assert "avoidable: " in done.stderr


def test_diff_says_what_each_change_saved(tmp_path, capsys):
    for name, check in (("before", False), ("after", True)):
        path = script(tmp_path / "train.py", check=check)
        done = run("run", "--profile", 3, "--keep", tmp_path / name, path)
        assert "avoidable" in done.stderr
    both = [str(tmp_path / name) for name in ("before", "after")]
    assert main(["diff", *both]) == 1
    out = capsys.readouterr().out
    assert " a step by 2 changes of collectives; a step took" in out
    assert main(["diff", *both, "--format", "json"]) == 1
    found = json.loads(capsys.readouterr().out)
    changes = {change["what"].partition(" f32")[0]: change for change in found["changes"]}
    went = changes["backward all-reduce(data, model)"]
    came = changes["backward all-reduce(data)"]
    assert (went["status"], came["status"]) == ("went", "came")
    assert went["saved_seconds"] == went["exposed_seconds"][0] > 0
    assert came["saved_seconds"] == -came["exposed_seconds"][1] < 0
    assert main(["diff", both[0], both[0], "--format", "markdown"]) == 0
    assert "| same |" in capsys.readouterr().out
    (tmp_path / "one.hlo").write_text(ASYNC)
    assert main(["diff", both[0], str(tmp_path / "one.hlo")]) == 2
    assert "one.hlo is not a profile" in capsys.readouterr().err


@pytest.fixture
def recorder(monkeypatch, tmp_path):
    """A recorder whose profiler writes how many steps were left, in one and the same second."""
    import jax

    from shardrules.watching.profiles import recording

    recorder, into = recording.Recorder(9, str(tmp_path)), []

    def stop():
        own = pathlib.Path(into[-1], "plugins", "profile", "now")
        own.mkdir(parents=True)
        (own / "host.xplane.pb").write_text(str(recorder.left))

    monkeypatch.setattr(jax.profiler, "start_trace", lambda folder, **_: into.append(folder))
    monkeypatch.setattr(jax.profiler, "stop_trace", stop)
    return recorder


def record(recorder, steps):
    recorder._start(None)
    recorder.left -= steps
    recorder.compiling("step")


def test_only_its_own_profiles_go_and_the_longest_one_stays(recorder, tmp_path):
    """Other processes may write to the folder of --keep, in the same second, too."""
    other = tmp_path / "plugins" / "profile" / "now" / "host.xplane.pb"
    for steps in (1, 4, 2):
        record(recorder, steps)
        other.parent.mkdir(parents=True, exist_ok=True)
        other.write_text("another's")
    recorder.end()
    recorder.end()
    assert other.read_text() == "another's"
    assert recorder.recorded == tmp_path / "plugins" / "profile" / "now_1"
    assert (recorder.recorded / "host.xplane.pb").read_text() == "5"
    assert recorder.shortfall.startswith("the script ended after 4 of --profile's 9 steps; ")
    assert [path.name for path in tmp_path.iterdir()] == ["plugins"]


@pytest.mark.parametrize("steps", [0, 3])
def test_recording_does_not_begin_anew_without_bound(recorder, steps):
    """A script may compile again and again, and each recording takes its time."""
    for _ in range(10):
        assert not recorder.shortfall.startswith("recording ended")
        record(recorder, steps)
    said = recorder.shortfall if steps else recorder.trouble
    why = "recording ended, since the script compiled in each of 10 recordings, "
    assert said.startswith(why + ("after 3 of" if steps else "before a step did; "))


def test_a_script_that_is_too_short_is_told_how_many_steps_it_takes(monkeypatch, tmp_path):
    import jax

    from shardrules.watching.profiles import recording

    monkeypatch.setattr(jax.profiler, "stop_trace", lambda: None)
    recorder = recording.Recorder(3, str(tmp_path))
    monkeypatch.setattr(jax.profiler, "start_trace", lambda folder, **_: None)
    recorder._start(None)
    recorder.end()
    assert recorder.trouble.startswith("the script ended before a step did; it has warmed up once")
    assert "unless jax.profiler.StepTraceAnnotation marks the steps" in recorder.trouble
    assert recorder.trouble.endswith(
        "; let the script run 5 steps or more after its last compilation"
    )
