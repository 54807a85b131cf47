"""The examples, run as the README says."""

import os
import pathlib
import subprocess
import sys

ROOT = pathlib.Path(__file__).parent.parent


def run(name):
    done = subprocess.run(
        [sys.executable, f"examples/{name}"],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env=os.environ,
    )
    return done.returncode, done.stdout, done.stderr


def test_quickstart_prints_what_the_readme_shows():
    code, out, err = run("quickstart.py")
    assert code == 1
    shown = out + err[err.index("shardrules.errors.CollectiveAssertionError") :]
    block = shown.replace(f"{ROOT}/", "").strip()
    assert f"```text\n{block}\n```" in (ROOT / "README.md").read_text()


def test_a_loop_on_the_host():
    code, out, err = run("loop_on_the_host.py")
    assert code == 0, err
    rows = [[cell.strip() for cell in line.split("|")] for line in out.splitlines() if "|" in line]
    assert rows[1:] == [
        ["update", "passes", "passes"],
        [
            "narrower",
            "1 of 3 donated arrays are not reused for an output (4096 B on each device)",
            "passes",
        ],
        [
            "forgotten",
            "1 of 4 donated arrays are not reused for an output (4096 B on each device)",
            "passes",
        ],
        ["chatty", "passes", "chatty talks to the host in 1 places"],
    ]
    assert "an array float32[] is read by the host (read) inside steady_state" in out
