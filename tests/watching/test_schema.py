"""From profiles of TPU and GPU, written by XLA's schema, to verdicts with times; steps, what is covered."""

import os
import pathlib
import re

import numpy as np
import pytest

import shardrules
from shardrules import errors
from shardrules.__main__ import main
from shardrules.watching.profiles import events, measured
from watching.xspaces import ASYNC, on_gpu, plane, written

DATA = pathlib.Path(__file__).parents[1] / "hlo" / "data"


def test_tpus_run_programs_in_one_line_and_operations_in_another(tmp_path):
    text = (DATA / "tpu_uvw.hlo").read_text()
    names = re.findall(r"^\s*(?:ROOT )?%?([\w.-]+) = .* all-reduce\(", text, re.MULTILINE)
    module = re.match(r"HloModule ([\w.]+)", text)[1]
    assert names
    window = f"{module}(7)"
    events = [f"%{name} = f32[8] all-reduce(%x), channel_id=1" for name in names]
    planes = ""
    for device, slow in ((0, 1), (1, 3)):
        ops = [
            (event, 100 * step + 10 * n, 4 * slow, {})
            for step in range(2)
            for n, event in enumerate(events)
        ]
        runs = [(window, 100 * step, 90, {}) for step in range(2)]
        planes += plane(
            f"/device:TPU:{device}", {"XLA Modules": runs, "XLA Ops": ops}, [window, *events]
        )
    written(tmp_path, "host0", text, module, planes)
    found = shardrules.profile(tmp_path, mesh={"data": 4, "model": 2})
    assert not found.marked and found.step_count == 2
    assert found.step_seconds == pytest.approx(95e-6)  # 100 to the second run, which takes 90
    took, fastest = {}, {}
    for line in found.lines:
        name = line.verdict.collective.name
        took[name] = took.get(name, 0) + line.seconds
        fastest[name] = fastest.get(name, 0) + line.timing.fastest_seconds
        assert line.timing.spread and line.timing.fastest_device == "host0 /device:TPU:0"
    assert took == {name: pytest.approx(12e-6) for name in names}
    assert fastest == {name: pytest.approx(4e-6) for name in names}
    assert list(found.planes.values()) == [2 * len(names)] * 2


@pytest.mark.parametrize(
    "start, duration, exposed", [(0, 5, 30), (10, 30, 0), (0, 25, 15), (20, 10, 20), (35, 50, 25)]
)
def test_what_nothing_else_covers_is_exposed(start, duration, exposed, tmp_path):
    written(tmp_path, "host", ASYNC, "jit_step", on_gpu(start, duration))
    (line,) = shardrules.profile(tmp_path).lines
    assert line.seconds == pytest.approx(30e-6)
    assert line.exposed_seconds == pytest.approx(exposed * 1e-6, abs=1e-12)


def test_on_a_tpu_an_asynchronous_pair_lasts_to_the_end_of_its_done(tmp_path):
    names = ["%all-reduce-start = f32[8] all-reduce-start(", "%work = f32[8] multiply("]
    names += ["%all-reduce-done = f32[8] all-reduce-done(", "jit_step(7)"]
    ops = [(names[0], 0, 1, {}), (names[1], 1, 20, {}), (names[2], 21, 9, {})]
    lines = {"XLA Modules": [(names[3], 0, 40, {})], "XLA Ops": ops}
    written(tmp_path, "host", ASYNC, "jit_step", plane("/device:TPU:0", lines, names))
    (line,) = shardrules.profile(tmp_path).lines
    assert line.seconds == pytest.approx(30e-6)
    assert line.exposed_seconds == pytest.approx(10e-6)


@pytest.mark.parametrize("command", ["verify", "report"])
def test_a_profile_without_collectives_says_so(command, tmp_path, capsys):
    text = re.sub(r"\n +%all-reduce.*", "", ASYNC).replace("%all-reduce-done", "%q")
    written(tmp_path, "host", text, "jit_step", on_gpu(0, 5))
    assert main([command, "--profile", str(tmp_path)]) == 0
    said = capsys.readouterr()
    assert "0 programs" in said.out
    assert "no collectives in any program that ran while the profile was recorded" in said.err


@pytest.mark.parametrize("shardings, verdict", [((), "unproven"), ((b"", b""), "redundant")])
def test_shardings_that_stand_beside_the_program_count(shardings, verdict, tmp_path):
    """JAX 0.11 and newer print none; no bytes are the sharding of what is replicated."""
    text = re.sub(r", sharding=\{.*?\}$", "", ASYNC, flags=re.MULTILINE)
    written(tmp_path, "host", text, "jit_step", on_gpu(0, 5), shardings)
    (line,) = shardrules.profile(tmp_path).lines
    assert line.verdict.verdict == verdict


def test_hosts_are_read_together(tmp_path):
    for host in ("a", "b"):
        written(tmp_path, host, ASYNC, "jit_step", on_gpu(0, 5))
    found = shardrules.profile(tmp_path)
    assert list(found.planes) == ["a /device:GPU:0", "b /device:GPU:0"]


def test_hosts_that_end_in_another_second_are_of_one_trace(tmp_path):
    for host, folder, ended in (("a", "12_00", 1000), ("b", "12_01", 1001), ("a", "11_00", 900)):
        (tmp_path / folder).mkdir(exist_ok=True)
        os.utime(written(tmp_path / folder, host, ASYNC, "jit_step", on_gpu(0, 5)), (ended, ended))
    assert list(shardrules.profile(tmp_path).planes) == ["a /device:GPU:0", "b /device:GPU:0"]


def test_a_program_without_its_hlo_is_taken_from_dumps(tmp_path):
    folder = tmp_path / "profile"
    folder.mkdir()
    other = ASYNC.replace("jit_step", "jit_other")
    written(folder, "host", other, "jit_other", on_gpu(0, 5))
    with pytest.raises(
        errors.ProfileError, match=r"no program can be judged \(jit_step\).*enable_hlo_proto"
    ):
        shardrules.profile(folder)
    dump = tmp_path / "dump"
    dump.mkdir()
    with pytest.raises(errors.ProfileError, match="holds no HLO text"):
        shardrules.profile(folder, hlo=dump)
    before = ASYNC.replace("%work", "%other")  # the same name, without the operation that ran
    (dump / "module_0001.jit_step.gpu_after_optimizations.txt").write_text(before)
    with pytest.raises(errors.ProfileError, match="holds none with these operations"):
        shardrules.profile(folder, hlo=dump)
    (dump / "module_0002.jit_step.gpu_after_optimizations.txt").write_text(ASYNC)
    (line,) = shardrules.profile(folder, hlo=dump).lines
    assert line.seconds == pytest.approx(30e-6)
    more = ASYNC.replace("multiply", "subtract")
    (dump / "module_0009.jit_step.gpu_after_optimizations.txt").write_text(more)
    with pytest.raises(errors.ProfileError, match="holds 2 programs jit_step"):
        shardrules.profile(folder, hlo=dump)


def test_what_another_program_does_on_the_device_covers_a_collective(tmp_path):
    other = plane(
        "/device:GPU:0",
        {"Stream #3": [("nccl", 15, 10, {"hlo_op": "fusion.1", "hlo_module": "jit_other"})]},
        ["nccl"],
        ("hlo_op", "hlo_module"),
    )
    written(tmp_path, "host", ASYNC, "jit_step", on_gpu(0, 5) + other)
    found = shardrules.profile(tmp_path)
    (line,) = found.lines
    assert line.exposed_seconds == pytest.approx(20e-6)
    assert any("ran, but was not judged: jit_other" in note for note in found.notes)


# --- steps and what is covered ------------------------------------------------------------------


@pytest.mark.parametrize(
    "starts, markers, steps",
    [
        ([5, 15, 25], [0, 10, 20], [0, 1, 2]),
        ([12, 22, 32], [0, 10, 20], [0, 1, 2]),  # the device lags a step behind the host
        ([1, 2, 11, 12], [0, 10], [0, 0, 1, 1]),
        ([1, 11, 12], [0, 10], [0, 1, 1]),
        ([-1, 11, 12], [0, 10], [0, 1, 1]),
    ],
)
def test_runs_are_counted_before_the_clock_is_asked(starts, markers, steps):
    assert measured.steps_of(starts, markers) == steps


def test_a_collective_in_a_loop_adds_up_in_each_step():
    timeline = events.Timeline()
    for run in range(2):
        start = 100.0 * run + 10 * np.arange(4)
        timeline.parts.append(events.Ran(np.zeros(4, int), start, start + 1 + run, np.full(4, run)))
    of = {"all-reduce": measured.ProfiledSite("all-reduce", None)}
    ran = {"device": measured.executions(timeline, {"all-reduce": 0}, [0.0, 100.0], of)}
    nothing = measured.Covered(np.zeros(0), np.zeros(0))
    took = measured.measure(ran, {"device": 2}, {"device": nothing})
    assert took["all-reduce"].seconds == pytest.approx((4 + 8) / 2 / 1e9)
    assert took["all-reduce"].runs == 4


@pytest.mark.parametrize("seed", range(20))
def test_what_is_covered_is_counted_once(seed):
    """Against a count of whole nanoseconds."""
    random = np.random.default_rng(seed)
    start = random.integers(0, 60, 8)
    end = start + random.integers(0, 12, 8)
    busy = np.zeros(100, bool)
    for a, b in zip(start, end):
        busy[a:b] = True
    first = random.integers(0, 80, 30)
    last = first + random.integers(0, 20, 30)
    within = measured.Covered(start.astype(float), end.astype(float)).within(first, last)
    assert within.tolist() == [busy[a:b].sum() for a, b in zip(first, last)]
