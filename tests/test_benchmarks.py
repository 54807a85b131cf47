"""Each benchmark still runs, on as little as it can; its figures are looked at by nobody here."""

import os
import pathlib
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "benchmarks"))
import paired  # noqa: E402

pytestmark = pytest.mark.one_lane

# kernels.py compiles for TPU and GPU; tests/kernels runs its measure().
HERE = "saved transformer cost tracing hlo_speed models watching on_a_gpu verdicts".split()


def run(*arguments):
    return subprocess.run(
        [sys.executable, "-m", "benchmarks", *arguments],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env=os.environ,
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    "names", [HERE[:2], pytest.param([*HERE[2:], "scale"], marks=pytest.mark.full)], ids=len
)
def test_each_benchmark_runs_and_prints_a_table(names):
    done = run("--smallest", *names)
    assert done.returncode == 0, done.stderr
    for number, name in enumerate(names, 1):
        assert f"[{number} of {len(names)}] benchmarks/{name}.py" in done.stderr
    parts = dict(zip(names, done.stdout.split("\n## ")[1:]))
    assert list(parts) == [part.partition(".py")[0] for part in parts.values()]
    for name, part in parts.items():
        assert "|---|---:|" in part or (name == "on_a_gpu" and "There is no GPU here" in part)
    assert "the jaxprs are the same" in parts.get("cost", "the jaxprs are the same")


def test_a_name_that_is_no_benchmark_is_refused():
    done = run("nothing")
    assert done.returncode == 2
    assert "no benchmark is called 'nothing'; there are saved, transformer," in done.stderr


def test_help_runs_nothing():
    done = run("--help")
    assert done.returncode == 0 and "NAMEs are saved, transformer," in done.stdout


def test_all_programs_are_listed():
    sys.path.insert(0, str(ROOT))
    from benchmarks import __main__ as benchmarks

    there = {path.stem for path in (ROOT / "benchmarks").glob("*.py")}
    assert there == {*benchmarks.PROGRAMS, "__main__", "paired", "jitted"}


def test_arms_take_turns():
    turns = []

    def arm(name, took):
        return lambda: turns.append(name) or took

    found = paired.rounds({"a": arm("a", 1.0), "b": arm("b", 2.0)}, 3)
    assert turns == ["a", "b", "b", "a", "a", "b", "b", "a"]
    assert found == {"a": [1.0] * 3, "b": [2.0] * 3}
    assert paired.shown(paired.ratio(found["b"], found["a"])) == "2.00 (2.00 to 2.00)"
    assert paired.ratio([1, 2, 9, 4], [1, 1, 1, 1]) == (3, 1.75, 5.25)
