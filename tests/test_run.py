"""``shardrules run``: the script's run is as Python's, whatever it does; and ``pytest --shardrules``."""

import collections
import json
import os
import pathlib
import re
import shlex
import subprocess
import sys
import types

import jax
import pytest

import shardrules
from shardrules.commands import closing, script
from shardrules.commands import run as command
from shardrules.costs import worth
from shardrules.hlo.reader import annotate

ROOT = pathlib.Path(shardrules.__file__).parents[1]

pytestmark = pytest.mark.one_lane


def run(*args, cwd=None, before=("-m", "shardrules", "run")):
    return subprocess.run(
        [sys.executable, *before, *map(str, args)],
        capture_output=True,
        text=True,
        cwd=cwd,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, map(str, sys.path)))},
    )


SCRIPT = """
import atexit, os, sys, threading, time
assert not {"jax", "numpy"} & set(sys.modules)
import __main__
assert __main__.__dict__ is globals()
print(__name__, __file__, __spec__, __package__, sys.argv, sys.path[0], flush=True)
atexit.register(print, "at exit")
what = sys.argv[1]
if "term" not in what:
    threading.Thread(target=lambda: (time.sleep(0.1), print("thread"))).start()
if what == "raise":
    raise ValueError("mine")
if what == "message":
    sys.exit("words")
if what == "_exit":
    os._exit(5)
if what == "interrupt":
    raise KeyboardInterrupt
if what == "hook":
    sys.excepthook = lambda *_: print("my hook")
    1 / 0
if what == "fork" and not os.fork():
    os._exit(0)
if what == "fork":
    os.wait()
if "term" in what:
    import signal
    if what == "own term":
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(7))
    for _ in range(20 if what == "fork term" else 0):
        child = os.fork()
        if not child:
            time.sleep(1)  # too late
            os._exit(0)
        os.kill(child, signal.SIGTERM)
        print(os.wait()[1])
    sys.stdout.flush()
    if what != "fork term":
        os.kill(os.getpid(), signal.SIGTERM)
sys.exit(int(what) if what.isdigit() else None)
"""


@pytest.mark.parametrize(
    "what",
    ["0", "3", "raise", "message", "_exit", "interrupt", "hook", "fork"]
    + ["term", "own term", "fork term"],
)
def test_a_script_runs_as_python_runs_it(tmp_path, what):
    path = tmp_path / "script.py"
    path.write_text(SCRIPT)
    done = run("script.py", what, "--format", "--", "-x", cwd=tmp_path)
    plain = run("script.py", what, "--format", "--", "-x", cwd=tmp_path, before=())
    assert done.stdout == plain.stdout and "__main__" in done.stdout
    word = (
        "shardrules: --format behind script.py went to the script; put a flag of shardrules "
        "before it: shardrules run --format ... script.py\n"
        "shardrules: the script compiled no program with JAX; nothing was judged\n"
    )
    # From Python 3.12 a fork beside JAX's threads is warned of, with the process's number.
    said, alone = (re.sub(r"\(pid=\d+\)", "", d.stderr) for d in (done, plain))
    assert said == alone + word
    # Nothing was judged, which is no success.
    assert done.returncode == (plain.returncode or 2)


def test_a_module_runs_as_python_runs_it(tmp_path):
    package = tmp_path / "package"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "__main__.py").write_text(
        "import sys\nfrom . import __name__ as own\nprint(__name__, own, __file__, __spec__.name, "
        "__package__, sys.argv, sys.path[0])\nsys.exit(4)\n"
    )
    done = run("-m", "package", "--keep", "x", cwd=tmp_path)
    plain = run("-m", "package", "--keep", "x", cwd=tmp_path, before=())
    assert (done.stdout, done.returncode) == (plain.stdout, plain.returncode) and done.stdout


@pytest.mark.parametrize(
    "args, message",
    [
        (["missing.py"], "can't read the script missing.py: No such file or directory"),
        (["."], "can't read the script .: Is a directory"),
        ([], "nothing to run; write SCRIPT ARGS, or -m MODULE ARGS"),
        (["-m"], "nothing to run"),
        (["--"], "nothing to run"),
        (["-m", "no_such_module"], "can't find the module no_such_module"),
        (["-m", "no.such.module"], "can't find the module no.such.module: No module named 'no'"),
        (["bad.py"], "bad.py is not a Python script: "),
        (["a b.ipynb"], "a b.ipynb is a notebook, not a script: convert it with"),
        (["--format", "pdf", "bad.py"], "argument --format: invalid choice: 'pdf'"),
        (["--allow", "all-reduce(model)", "good.py"], "gives no reason"),
        (["--allow", "everything: reason", "good.py"], "'everything' names no collectives"),
        (["--output", "no/such/file", "good.py"], "can't write no/such/file: No such file or"),
        (["--keep", "good.py", "good.py"], "can't make the folder good.py: File exists"),
        (["--target", "v4", "good.py"], "argument --target: invalid choice: 'v4'"),
        (["--rule", "k=no_comunication", "good.py"], "did you mean 'no_communication'?"),
        (["--import", "no_such_rules", "good.py"], "--import=no_such_rules can't be imported: "),
        (["--format", "text", "--format", "html", "good.py"], "--format was given twice"),
        (["--output", "no/r.html", "--format", "text", "good.py"], "can't write no/r.html: "),
    ],
)
def test_what_can_not_be_run(tmp_path, args, message, capsys, monkeypatch):
    from shardrules import __main__ as command_line

    monkeypatch.chdir(tmp_path)
    (tmp_path / "bad.py").write_text("def (")
    (tmp_path / "good.py").write_text("raise SystemExit(9)")
    first = sys.path[0]
    assert command_line.main(["run", *args]) == 2
    sys.path[0] = first
    said = capsys.readouterr().err
    assert said.startswith("shardrules: ") and message in said


class Found:
    """What a command reports on."""

    findings = unused = ()
    clean = True


def test_what_can_not_be_run_is_said_in_lines_that_fit(capsys, monkeypatch):
    from shardrules import __main__ as command_line

    monkeypatch.setenv("COLUMNS", "80")
    for args in (["run", "a.ipynb"], ["rnn", "a.py"], ["run", "--profle", "3", "a.py"]):
        assert command_line.main(args) == 2
        lines = capsys.readouterr().err.splitlines()
        assert max(map(len, lines)) <= 80 and len(lines) > 1


@pytest.mark.parametrize(
    "values, code",
    [({}, 0), ({"findings": 1, "clean": False}, 1), ({"clean": False}, 2), ({"unused": "x"}, 1)],
)
def test_exit_codes(values, code):
    found = Found()
    vars(found).update(values)
    assert closing.exit_code(found) == code


TESTS = """
import sys


def test_jax():
    import jax, numpy as np
    from jax.sharding import Mesh, PartitionSpec as P

    mesh = Mesh(np.array(jax.devices()).reshape(4, 2), ("data", "model"))
    f = jax.shard_map(lambda x: 2 * x, mesh=mesh, in_specs=P("data"), out_specs=P("data"),
                      check_vma=False)
    jax.jit(jax.grad(lambda x: (f(x) ** 2).sum()))(np.ones((8, 16), np.float32))


def test_nothing():
    pass
"""


def test_pytest_judges_what_the_tests_compile(tmp_path):
    (tmp_path / "test_it.py").write_text(TESTS)
    flags = ["-p", "shardrules.checks.pytest_plugin", "-p", "no:cacheprovider", "--noconftest"]
    flags += ["-p", "no:shardrules.pytest_plugin", "-q"]
    pytest_ = ("-m", "pytest")
    done = run(*flags, "--shardrules", "-n", "1", cwd=tmp_path, before=pytest_)
    assert done.returncode == 1, done.stdout + done.stderr
    assert (
        "2 passed" in done.stdout and "shardrules: programs that were compiled (gw0)" in done.stdout
    )
    assert "test_it.py::test_jax" in done.stdout and "redundant" in done.stdout
    assert "saves 128 B (100%)" in done.stdout  # as it is with the check on, not at most
    last = done.stdout.splitlines()[-1]
    assert last.startswith("shardrules: the tests passed, and the exit code is 1 for findings: ")
    alone = "-p", "no:xdist", "--shardrules", "-k", "nothing"  # as if pytest-xdist weren't there
    here = run(*flags, *alone, cwd=tmp_path, before=pytest_)
    assert here.returncode == 0 and "no test compiled a program with JAX" in here.stdout
    # Without the option nothing of it is loaded, and jax is not.
    (tmp_path / "test_it.py").write_text(
        "import sys\n\n\ndef test_it():\n    assert 'jax' not in sys.modules\n"
        "    assert 'shardrules.checks.watched' not in sys.modules\n"
        "    assert 'shardrules.watching.programs' not in sys.modules\n"
    )
    assert run(*flags, cwd=tmp_path, before=pytest_).returncode == 0


@pytest.mark.parametrize("processes", ["0", "1"])
def test_pytest_allows_findings_with_a_reason(tmp_path, processes):
    (tmp_path / "test_it.py").write_text(TESTS)
    flags = ["-p", "shardrules.checks.pytest_plugin", "-p", "no:cacheprovider", "--noconftest"]
    flags += ["-p", "no:shardrules.pytest_plugin", "-q", "-n", processes, "--shardrules-allow"]
    known, other = "all-reduce(model): issue 12", "redundant all-gather(data): issue 13"
    done = run(*flags, known, *flags[-1:], other, cwd=tmp_path, before=("-m", "pytest"))
    assert done.returncode == 0, done.stdout + done.stderr
    assert "issue 12" in done.stdout
    noted = [line for line in done.stdout.splitlines() if "matches no finding" in line]
    assert len(noted) == 1 and noted[0].startswith("shardrules: 'redundant all-gather(data)' of")
    for text, why in ((known.partition(":")[0], "gives no reason"), ("nothing: x", "nothing")):
        refused = run(*flags, text, cwd=tmp_path, before=("-m", "pytest"))
        assert refused.returncode == 4 and why in refused.stderr, refused.stderr
        assert "--shardrules-allow" in refused.stderr and "Traceback" not in refused.stderr


FAILING = """

def test_asserted():
    import shardrules.testing

    shardrules.testing.assert_no_defensive_psum(test_jax())


def test_note():
    import jax, shardrules
    from jax.sharding import PartitionSpec as P

    mesh = jax.sharding.Mesh(jax.devices(), "data")
    with shardrules.install():
        summed = jax.shard_map(lambda x: x.sum(), mesh=mesh, in_specs=P("data"), out_specs=P())
        summed(jax.numpy.ones(8))
"""


@pytest.mark.parametrize("processes", ["0", "1"])
def test_pytest_ends_with_what_failed_tests_have_to_do(tmp_path, processes):
    """Its own summary has one line of each, cut to the terminal; --tb=no shows nothing else."""
    head, call = TESTS.replace("    jax.jit", "    return jax.jit").split("(np.ones(")
    tests = f"{head}.lower(np.ones({call.replace('float32))', 'float32)).compile()', 1)}"
    (tmp_path / "test_it.py").write_text(tests + FAILING)
    flags = ["-p", "shardrules.checks.pytest_plugin", "-p", "no:cacheprovider", "--noconftest"]
    flags += ["-p", "no:shardrules.pytest_plugin", "-q", "--tb=no", "-n", processes]
    done = run(*flags, "--shardrules", cwd=tmp_path, before=("-m", "pytest"))
    assert done.returncode == 1, done.stdout + done.stderr
    asserted, note, last = sorted(done.stdout.splitlines()[-3:])
    first = (
        "shardrules: test_it.py::test_asserted: run `shardrules migrate --diff on.patch -m pytest"
    )
    assert asserted.startswith(first) and "SCRIPT" not in asserted
    assert note.startswith("shardrules: test_it.py::test_note: don't switch the check off, since ")
    assert last.startswith("shardrules: tests failed, and there are findings: ")


def test_pytest_s_report_is_written_for_code_review(tmp_path):
    (tmp_path / "test_it.py").write_text(TESTS)
    flags = ["-p", "shardrules.checks.pytest_plugin", "-p", "no:cacheprovider", "--noconftest"]
    flags += ["-p", "no:shardrules.pytest_plugin", "-q"]
    pytest_ = ("-m", "pytest")
    shown = run(*flags, "--shardrules-format", "github", cwd=tmp_path, before=pytest_)
    assert shown.returncode == 1, shown.stdout + shown.stderr
    assert "\n::error file=test_it.py,line=" in shown.stdout
    no_file = run(*flags, "--shardrules-format", "sarif", cwd=tmp_path, before=pytest_)
    assert no_file.returncode == 4 and "pass --shardrules-output=shardrules.sarif" in no_file.stderr
    for name, why in (("no/out.txt", "make its folder first"), (".", ". is a folder; name a file")):
        refused = run(*flags, "--shardrules-output", name, cwd=tmp_path, before=pytest_)
        assert refused.returncode == 4 and why in refused.stderr, refused.stderr
    flags += ["--shardrules-output", "out.sarif", "-n", "2"]  # the suffix says which format
    written = run(*flags, cwd=tmp_path, before=pytest_)
    assert written.returncode == 1 and "the report is in out.sarif" in written.stdout
    log = json.loads((tmp_path / "out.sarif").read_text())
    (result,) = [result for one in log["runs"] for result in one["results"]]
    assert result["ruleId"] == "redundant"
    assert location_of(result)["artifactLocation"]["uri"] == "test_it.py"


def location_of(result):
    return result["locations"][0]["physicalLocation"]


def test_run_and_verify_write_annotations_and_sarif(tmp_path):
    script = TESTS.replace("def test_nothing", "test_jax()\n\n\ndef test_nothing")
    (tmp_path / "train.py").write_text(script)
    flags = ("--keep", "hlo", "--format")
    shown = run(*flags, "github", "train.py", cwd=tmp_path)
    assert shown.returncode == 1 and "\n::error file=train.py,line=" in "\n" + shown.stderr
    run(*flags[:-1], "--output", "out.sarif", "train.py", cwd=tmp_path)
    run("--output", "out.html", "train.py", cwd=tmp_path)
    page = (tmp_path / "out.html").read_text()
    said = rf"train\.py: \d{{4}}-\d\d-\d\d \d\d:\d\d, JAX {jax.__version__}, 8 devices \(cpu\)"
    assert page.startswith("<!doctype html>") and re.search(f"<title>{said}</title>", page)
    assert "<h1>train.py</h1>" in page
    verify = ("-m", "shardrules", "verify")
    again = run("hlo", "--format", "sarif", cwd=tmp_path, before=verify)
    assert again.returncode == 1, again.stderr
    for text in ((tmp_path / "out.sarif").read_text(), again.stdout):
        results = json.loads(text)["runs"][0]["results"]
        errors = [result for result in results if result["level"] == "error"]
        assert [location_of(error)["artifactLocation"]["uri"] for error in errors] == ["train.py"]
    annotated = run("hlo", "--format", "github", cwd=tmp_path, before=verify)
    assert annotated.stdout.startswith("::error file=train.py,line=")


@pytest.mark.parametrize("flags", [[], ["--output", "-"]])
def test_a_report_that_a_machine_reads_has_stdout_for_itself(tmp_path, flags):
    """What the script and its children print there goes to stderr, in words."""
    (tmp_path / "train.py").write_text(
        "import subprocess, sys, jax\nprint('mine')\n"
        "subprocess.run([sys.executable, '-c', 'print(\"its child\")'])\n"
        "print(jax.jit(lambda x: x + 1)(1))\nsys.exit(3)\n"
    )
    done = run("--format", "json", *flags, "train.py", cwd=tmp_path)
    assert json.loads(done.stdout)["programs"] and done.returncode == 3
    said = done.stderr.splitlines()
    assert [line for line in said if "shardrules" not in line] == ["mine", "its child", "2"]
    assert said[-1].startswith("shardrules: exit code 3 is the script's own: it called sys.exit")


LOOP = """
import jax, numpy as np
from jax import lax
from jax.sharding import Mesh, PartitionSpec as P

mesh = Mesh(np.array(jax.devices()), "data")
step = lambda x: lambda total, k: (total + lax.psum((x * k).sum(), "data"), None)
f = lambda x: lax.scan(step(x), np.float32(0), np.arange(3, dtype=np.float32))[0]
jax.jit(jax.shard_map(f, mesh=mesh, in_specs=P("data"), out_specs=P()))(np.ones(8, np.float32))
"""


# The script looks for one of these flags, and --cheapest is not one of its own.
CRASH = """
import multiprocessing, sys
multiprocessing.Process(target=print)
"--strict" in sys.argv and int("a crash")
"""


@pytest.mark.parametrize("crash", ["", CRASH])
def test_a_finding_and_a_crash_are_told_apart_in_the_last_line(tmp_path, crash):
    """A sum in a loop that one after it replaces is a finding."""
    (tmp_path / "loop.py").write_text(LOOP + crash)
    done = run(tmp_path / "loop.py", *(["--strict", "--cheapest"] if crash else []))
    assert done.returncode == 1, done.stderr
    assert "12 B in 3 round trips become 4 B" in done.stderr
    lines = done.stderr.splitlines()
    own = "exit code 1 is the script's own: it raised ValueError; the report on what it compiled "
    expected = f"{own}before: 1 finding"
    expected = (
        expected
        if crash
        else ("exit code 1 is the report's (1 finding); the script itself ended well")
    )
    assert lines[-1] == f"shardrules: {expected}"
    misplaced = [line for line in lines if "went to the script" in line]
    made = [line for line in lines if "of multiprocessing" in line]
    assert len(misplaced) == len(made) == bool(crash)
    if crash:
        assert misplaced[0].startswith("shardrules: --cheapest behind loop.py went to the script")
        assert made[0].startswith("shardrules: the script made 1 process of multiprocessing")


def test_a_console_script_s_folder_is_not_the_scripts(tmp_path):
    """It searches where Python would, with rules given too."""
    (tmp_path / "bin").mkdir()
    (tmp_path / "there").mkdir()
    (tmp_path / "mine.py").write_text("")
    cli = tmp_path / "bin" / "shardrules"
    cli.write_text("import runpy; runpy.run_module('shardrules', run_name='__main__')")
    (tmp_path / "there" / "script.py").write_text("import sys; print(sys.path)")
    plain = run("there/script.py", cwd=tmp_path, before=())
    for flags in ((), ("--import", "mine")):
        assert (
            run(*flags, "there/script.py", cwd=tmp_path, before=(cli, "run")).stdout == plain.stdout
        )


def test_kept_programs_save_what_run_says(tmp_path):
    """The text alone can't tell what is sent with the check on, so the files say it."""
    step = TESTS.replace("def test_nothing", "test_jax()\ntest_jax()\n\n\ndef test_nothing")
    (tmp_path / "train.py").write_text(step)
    done = run("--keep", "hlo", "train.py", cwd=tmp_path)
    saves = [line.strip() for line in done.stderr.splitlines() if "saves " in line]
    assert "saves 128 B (100%)" in saves
    again = run("hlo", cwd=tmp_path, before=("-m", "shardrules", "report"))
    from_files = [line.strip() for line in again.stdout.splitlines() if "saves " in line]
    assert {*from_files} == {*saves}, again.stdout


def test_a_header_holds_what_a_program_sends_with_its_checks_on():
    key = "backward all-reduce(model)", 'tra"in.py:3 (step.<locals>.f)'
    off = ("other.py:4 (g)", "no rule for 'kernel={1}', \\ which\nis needed; a=b, c")
    switched = worth.Switched(7, collections.Counter({key: 2}), ("train.py:3 (é)",), (off,), ("s",))
    for tag in ("", ', frontend_attributes={shardrules.mesh="a=2"}'):
        text = f"HloModule f{tag}\n\nENTRY e {{\n  ROOT x = f32[] constant(1)\n}}\n"
        assert worth.Switched.kept(shardrules.hlo.parse(text)) == ""
        kept = shardrules.hlo.parse(annotate.tagged(text, worth.SWITCHED, switched.as_text()))
        assert worth.Switched.kept(kept) == switched


def test_what_can_t_be_read_is_kept_as_it_is(tmp_path):
    class Program:
        name, text = "jit_step", "HloModule jit_step\n%not HLO"

        def annotated_text(self):
            return shardrules.hlo.parse(self.text).text

    command._keep([Program()], tmp_path)
    assert (tmp_path / "0001.jit_step.hlo").read_text() == Program.text


def test_programs_that_an_earlier_run_kept_are_pointed_out(tmp_path, capsys):
    """Where a change leaves out a program, the earlier run's would be judged beside this one's."""

    def program(name):
        return types.SimpleNamespace(name=name, annotated_text=lambda: f"HloModule {name}")

    command._keep([program("jit_f"), program("jit_step")], tmp_path)
    assert capsys.readouterr().err == ""
    (tmp_path / "mine.hlo").write_text("HloModule mine")
    command._keep([program("jit_step")], tmp_path)
    said = " ".join(capsys.readouterr().err.split())
    assert "still holds 2 programs of an earlier run: 0001.jit_f.hlo, 0002.jit_step.hlo" in said


KERNELS = """
import sys
import jax, jax.numpy as jnp, numpy as np
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
from shardrules import aot

mesh = Mesh(np.array(aot.gpu("h100", 8)).reshape(4, 2), ("data", "model"))
params = triton.CompilerParams(num_warps=1)

def body(x_ref, o_ref):
    o_ref[...] = x_ref[...] * 2

def double(x):
    out = jax.ShapeDtypeStruct(x.shape, x.dtype)
    return pl.pallas_call(body, out_shape=out, compiler_params=params)(x)

kernel = jax.custom_vjp(lambda w, x: double(w) * x)
kernel.defvjp(lambda w, x: (double(w) * x, (w, x)), lambda r, g: (double(g) * r[1], g * r[0]))

def loss(w, x):
    f = jax.shard_map(kernel, mesh=mesh, in_specs=(P(), P("data")), out_specs=P("data"),
                      check_vma="check" in sys.argv)
    return (f(w, x) ** 2).sum()

def argument(rows, spec):
    return jax.ShapeDtypeStruct((rows, 128), jnp.float32, sharding=NamedSharding(mesh, spec))

jax.jit(jax.grad(loss)).lower(argument(8, P()), argument(32, P("data"))).compile()
"""


@pytest.mark.gpu
def test_a_kernel_is_judged_as_with_the_hooks(tmp_path):
    (tmp_path / "train.py").write_text(KERNELS)
    plain = run("train.py", cwd=tmp_path)
    assert plain.returncode == 1 and "unproven" in plain.stderr, plain.stderr
    assert "the kernel 'body' needs no line: shardrules.install() proves it" in plain.stderr
    refused = run("train.py", "check", cwd=tmp_path)
    assert "ValueError" in refused.stderr  # JAX's own: vma is not given
    off = run("--install", "train.py", cwd=tmp_path)
    assert off.returncode == 1 and "overwide:" in off.stderr, off.stderr
    on = run("--install", "train.py", "check", cwd=tmp_path)
    assert on.returncode == 0, on.stderr


INTERPRETED = """
import jax, numpy as np
from jax.experimental import pallas as pl
from jax.sharding import PartitionSpec as P
jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 8)
mesh = jax.sharding.Mesh(np.array(jax.devices()), ("data",))

def place(x_ref, o_ref):
    o_ref[...] = x_ref[...] + jax.lax.axis_index("data").astype(x_ref.dtype)

def kernel(x):
    out = jax.ShapeDtypeStruct(x.shape, x.dtype)
    return pl.pallas_call(place, out, interpret=True, name="place")(x)

f = jax.shard_map(kernel, mesh=mesh, in_specs=P("data"), out_specs=P("data"))
print(jax.jit(f)(np.ones((8, 128), np.float32)).sum())
"""


def test_a_rule_that_a_trace_obeyed_is_used_though_the_text_names_no_kernel(tmp_path):
    """In interpret mode, a kernel's name stands in the trace alone."""
    (tmp_path / "train.py").write_text(INTERPRETED)
    rules = ("--rule", "place=per_device(data)", "--rule", "plaice=per_device(data)")
    done = run("--install", *rules, "train.py", cwd=tmp_path)
    assert done.stdout == "4608.0\n", done.stderr
    said = [line for line in done.stderr.splitlines() if "matches no kernel" in line]
    assert [line.split()[1] for line in said] == ["--rule=plaice=per_device(data)"]


READS = """
import os
os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=2")
import jax, jax.numpy as jnp, numpy as np
step = jax.jit(lambda w: (w * 0.9, w.sum()))
w = jnp.ones(4)
for _ in range(9):
    w, loss = step(w)
    float(loss)
kept = []
for n in range(9):
    w, loss = step(w)
    kept.append(loss)
print([float(loss) for loss in kept][:0])  # when all of them are there
for _ in range(7):  # not often
    w, loss = step(w)
    loss.item()
print(sum(np.ones(9)))
"""


def test_a_metric_that_is_read_in_each_step_is_named_with_its_line(tmp_path):
    (tmp_path / "train.py").write_text(READS)
    done = run("train.py", cwd=tmp_path)
    assert done.returncode == 0 and done.stdout == "[]\n9.0\n"
    (note,) = re.findall(r"\((\S+ read an array .*)\)\n", done.stderr)
    assert note.startswith(
        "train.py:9 read an array (float32[]) on the host 9 times, after each run of a "
        "program, which waits for the device: "
    )
    assert "shardrules.testing.steady_state" in note


@pytest.mark.parametrize(
    "given, typed",
    [
        (["train.py", "--lr", "1"], "train.py --lr 1"),
        (["--", "train.py", "--", "x"], "train.py -- x"),
        (["--", "-train.py", "x"], "-- -train.py x"),
        (["-m", "pytest", "-k", "a b"], "-m pytest -k 'a b'"),
        (
            ["--rule", "k*=per_device(a)", "--import", "kernels", "--strict", "train.py"],
            "--import kernels --rule 'k*=per_device(a)' train.py",
        ),
    ],
)
def test_a_script_is_named_as_migrate_reads_it(given, typed):
    from shardrules import __main__ as command_line

    arguments = command_line._parser("run").parse_args(["run", *given])
    assert script.typed(arguments) == typed
    again = command_line._parser("migrate").parse_args(["migrate", *shlex.split(typed)])
    for name in ("module", "script", "rule", "rules"):
        have, want = getattr(again, name), getattr(arguments, name)
        assert have == want or (name == "script" and have == want[1:])
