"""The examples, run as the README says."""

import os
import pathlib
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parent.parent

pytestmark = pytest.mark.one_lane


def run(name, *arguments):
    done = subprocess.run(
        [sys.executable, f"examples/{name}", *arguments],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env=os.environ,
    )
    return done.returncode, done.stdout, done.stderr


def test_a_loop_on_the_host():
    code, out, err = run("loop_on_the_host.py")
    assert code == 0, err
    rows = [[cell.strip() for cell in line.split("|")] for line in out.splitlines() if "|" in line]
    assert rows[1:] == [
        ["update", "passes", "passes"],
        [
            "narrower",
            "1 of 3 donated arrays is not reused for an output (4096 B on each device)",
            "passes",
        ],
        [
            "forgotten",
            "1 of 4 donated arrays is not reused for an output (4096 B on each device)",
            "passes",
        ],
        ["chatty", "passes", "chatty talks to the host in 1 place"],
    ]
    assert "an array float32[] is read by the host (read) inside steady_state" in out


def test_jit_of_pmap_beside_jit_of_shard_map():
    code, out, err = run("pmap_to_shard_map.py")
    assert code == 0, err
    rows = [[cell.strip() for cell in line.split("|")] for line in out.splitlines() if "|" in line]
    assert {row[0]: row[1:3] for row in rows[1:]} == {
        "closed over, jit(pmap)": ["16384 kB", "0 collectives, 0 B"],
        "closed over, jit(shard_map)": ["16384 kB", "0 collectives, 0 B"],
        "passed, jit(shard_map)": ["0 kB", "2 collectives, 40 B"],
        "while_loop with a kernel, jit(shard_map)": ["0 kB", "0 collectives, 0 B"],
        "while_loop with a kernel, jit(pmap)": ["0 kB", "0 collectives, 0 B"],
        "evolution, jit(pmap)": ["0 kB", "5 collectives, 20 B"],
        "evolution, jit(shard_map)": ["0 kB", "5 collectives, 20 B"],
    }
    assert "f32[2,262144], 2097152 B on each of 8 devices, 16777216 B in all" in out


def test_two_processes():
    code, out, err = run("two_processes.py")
    assert code == 0, err
    for process in (0, 1):
        assert f"process {process} of 2: 1 collective, needed; the gradients are right" in out
        assert f"process {process}: the processes of this job hold different rules" in out
    assert out.count("process 0 has no rule 'ring_all_gather'; process 1 has it: all_gather(") == 2


def test_train_transformer():
    """Three steps in each arm, in the order of ARMS."""
    code, out, err = run("train_transformer.py", "3")
    assert code == 0, err
    rows = [[cell.strip() for cell in line.split("|")] for line in out.splitlines() if "|" in line]
    off, late, cheapest = rows[1:]
    assert "redundant" in off[4] and "overwide" in off[4]
    assert all(set(row[4].split()[1::2]) == {"needed"} for row in (late, cheapest))
    assert int(cheapest[3].split()[0]) < int(late[3].split()[0]) < int(off[3].split()[0])
    assert len({row[1] for row in rows[1:]}) == len({row[2] for row in rows[1:]}) == 1
    assert "The losses of 3 steps are the same in every arm." in out


@pytest.mark.gpu
def test_a_loop_of_tiny_kernels():
    code, out, err = run("loop_of_tiny_kernels.py")
    assert code == 0, err
    rows = [[cell.strip() for cell in line.split("|")] for line in out.splitlines() if "|" in line]
    assert [row[1] for row in rows[1:]] == ["not static", "8000", "8000", "1000", "in the kernel"]
    assert [row[4] for row in rows[1:]] == ["the host", "nobody", "nobody", "nobody", "the kernel"]
    assert "its bound is the argument count (s32[])" in out
