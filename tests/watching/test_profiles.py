"""From a profile alone to verdicts with times: of CPU as it is recorded, of TPU and GPU by XLA's schema."""

import json
import os
import pathlib
import re
import statistics
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import shardrules
from shardrules import errors, report
from shardrules.costs import timings
from shardrules.report import drawn

try:
    from jaxlib._hlo import hlo_module_from_text
except ImportError:  # to JAX 0.9
    from jaxlib._jax import hlo_module_from_text
from shardrules.__main__ import main
from shardrules.watching.profiles import events, measured, wire

DATA = pathlib.Path(__file__).parents[1] / "hlo" / "data"
MESH = {"data": 4, "model": 2}
STEPS = 3


# --- recorded on CPU ---------------------------------------------------------------------------


@pytest.fixture(scope="module")
def recorded(tmp_path_factory, cpu_mesh):
    """The folder of a profile of three steps of four layers, its check off."""

    def local(ws, x):
        return jax.lax.scan(lambda h, w: (jnp.tanh(h @ w), None), x, ws)[0]

    f = jax.shard_map(
        local, mesh=cpu_mesh, in_specs=(P(), P("data")), out_specs=P("data"), check_vma=False
    )
    step = jax.jit(lambda ws, x: ws - jax.grad(lambda ws: (f(ws, x) ** 2).sum())(ws))
    sharding = jax.sharding.NamedSharding(cpu_mesh, P())
    ws = jax.device_put(np.full((4, 32, 32), 0.01, np.float32), sharding)
    x = np.ones((8, 32), np.float32)
    ws = step(ws, x).block_until_ready()
    folder = tmp_path_factory.mktemp("profile")
    with jax.profiler.trace(str(folder)):
        for number in range(STEPS):
            with jax.profiler.StepTraceAnnotation("train", step_num=number):
                ws = step(ws, x).block_until_ready()
    return folder


@pytest.fixture(scope="module")
def judged(recorded):
    return shardrules.profile(recorded, mesh=MESH)


def test_a_finding_has_its_time(judged):
    assert judged.step_count == STEPS and judged.marked
    (name,) = {one.verdict.collective.name for one in judged.findings}
    assert {one.verdict.verdict for one in judged.findings} == {"overwide"}
    assert all(one.seconds > 0 for one in judged.findings)
    assert 0 < judged.avoidable_seconds < sum(one.seconds for one in judged.findings)
    # 8 devices, of which the axis model has 2: (2 * 7/8 - 2 * 3/4) / (2 * 7/8) of the wire bytes
    finding = judged.findings[0]
    share = finding.avoidable_seconds / finding.exposed_seconds
    assert share == pytest.approx(1 / 7, rel=1e-3)
    assert re.fullmatch(
        r"avoidable: [\d.e-]+ ms of [\d.]+ ms a step \([\d.]+%\)", str(judged).splitlines()[0]
    )
    assert name in str(judged)


def test_the_times_are_those_that_jax_reads(recorded, judged):
    """All executions of the collective, divided by devices and steps, against the medians' range."""
    (file,) = recorded.rglob("*.xplane.pb")
    names = {one.verdict.collective.name for one in judged.lines}
    took = {}
    for plane in jax.profiler.ProfileData.from_file(str(file)).planes:
        for line in plane.lines:
            for event in line.events:
                stats = dict(event.stats)
                if stats.get("hlo_op") in names:
                    key = stats["device_ordinal"], stats["run_id"]
                    took[key] = took.get(key, 0) + event.duration_ns / 1e9
    assert len(took) == 8 * STEPS
    of_device = [
        statistics.median(t for (d, _), t in took.items() if d == device) for device in range(8)
    ]
    assert sum(one.seconds for one in judged.lines) == pytest.approx(max(of_device))
    fastest = sum(one.timing.fastest_seconds for one in judged.lines)
    assert fastest == pytest.approx(min(of_device))


def test_every_operation_is_read_as_jax_reads_it(recorded):
    (file,) = recorded.rglob("*.xplane.pb")
    ours, theirs = [], []
    seen = events.Events()
    seen.read(memoryview(file.read_bytes()), "host")
    names = list(seen.numbers)
    for (device, program), timeline in seen.timelines.items():
        ran = timeline.ran()
        for operation, start, end, run in zip(*(column.tolist() for column in ran)):
            ours.append((device, program.name, names[operation], run, start, end - start))
    for plane in jax.profiler.ProfileData.from_file(str(file)).planes:
        for line in plane.lines:
            for event in line.events:
                stats = dict(event.stats)
                if "hlo_op" in stats:
                    device = f"host CPU {stats['device_ordinal']}"
                    told = device, stats["hlo_module"], stats["hlo_op"], stats["run_id"]
                    theirs.append((*told, event.start_ns, event.duration_ns))
    assert len(ours) == len(theirs) > 500
    first = sorted(theirs)[0][4] - sorted(ours)[0][4]
    for mine, jaxs in zip(sorted(ours), sorted(theirs)):
        assert mine[:4] == jaxs[:4]
        assert mine[4] + first == pytest.approx(jaxs[4], abs=1000)  # JAX's are multiples of 256
        assert mine[5] == pytest.approx(jaxs[5], abs=1)


def test_the_command_prints_it_and_exits_by_its_findings(recorded, capsys):
    assert main(["profile", str(recorded), "--mesh", "data=4,model=2"]) == 1
    out = capsys.readouterr().out
    assert out.startswith("avoidable: ")
    assert "overwide: 2 x backward all-reduce(data, model)" in out  # those alike are one
    assert main(["profile", str(recorded), "--format", "json"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert found["steps"]["count"] == STEPS
    assert all(one["seconds"] >= one["exposed_seconds"] > 0 for one in found["collectives"])
    assert found["avoidable_seconds"] > 0  # without a mesh, by the groups


def test_a_report_has_the_times(judged):
    (program,) = judged.programs
    content, verdicts = program.content, program.content.judgement.verdicts
    first, exposed = judged.headline, sum(one.exposed_seconds for one in judged.findings)
    assert content.measured == first
    assert content.ledger.exposed_seconds(content.findings) == pytest.approx(exposed)
    text, markdown = report.plain(content), report.markdown(content)
    assert text.startswith(first + "\n") and f"\n{first}.\n" in markdown
    for written in (text, markdown, report.page(content)):
        assert "measured, a step" in written and "exposed" in written
        assert f"{judged.findings[0].exposed_seconds * 1e3:.3g} ms" in written
    data = json.loads(report.as_json(content))
    assert data["measured"]["avoidable_seconds"] == pytest.approx(judged.avoidable_seconds)
    assert data["measured"]["step_seconds"] == judged.step_seconds
    measured_each = [one["measured"]["exposed_seconds"] for one in data["collectives"]]
    assert len(measured_each) == len(verdicts)
    assert sum(measured_each) == pytest.approx(sum(one.exposed_seconds for one in judged.lines))


def test_a_page_draws_the_step_to_time(judged):
    (program,) = judged.programs
    ran, busy = program.timings.ran, program.timings.busy
    picture = report.page(program.content).partition("A step as it ran</h2>")[2]
    picture = picture.partition("</svg>")[0]
    bars = re.findall(
        r'<rect data-row="row\d+".*? x="([\d.]+)" y="(\d+)" width="([\d.]+)"', picture
    )
    last = max(end for *_, end in (*ran, *busy))
    assert len(bars) == len(ran) > 0
    for (x, y, width), (_, start, end) in zip(bars, ran):
        assert float(x) == pytest.approx(4 + 1080 * start / last, abs=0.01) and y == "4"
        assert float(width) == pytest.approx(1080 * (end - start) / last, abs=0.01)
    assert busy[0][1] < ran[0][1] and all(0 <= a < b <= last for a, b in busy)
    assert picture.count("h", picture.index('class="busy"')) >= len(busy) > 1
    assert "A step as it ran" not in report.page(report.content(program.content.judgement))


def test_collectives_that_overlap_are_drawn_below_each_other():
    times = {"<a>": (0.0, 2.0), "b": (1.0, 3.0), "c": (2.0, 4.0)}
    runs = [(drawn.Mark("row0", "needed", says), *when) for says, when in times.items()]
    picture = drawn.timed(runs, [(0.5, 1.0)])
    assert re.findall(r'<rect .*? y="(\d+)"', picture) == ["4", "28", "4"]
    assert "<a>" not in picture and "4 s" in picture


def test_findings_stand_in_the_order_of_their_exposed_time(judged):
    """The one that moves fewer bytes stands first where it is exposed for longer."""
    judgement = judged.programs[0].content.judgement
    by_bytes = report.content(judgement).findings
    assert by_bytes[0].entry.bytes > by_bytes[1].entry.bytes
    order = [judgement.verdicts.index(one.verdict) for one in by_bytes[:2]]
    each = [None] * len(judgement.verdicts)
    each[order[0]] = timings.Timing(9e-3, 1e-3, 9e-3, 1, "0", "0")
    each[order[1]] = timings.Timing(2e-3, 2e-3, 1e-3, 1, "0", "1")
    content = report.content(judgement, timings=timings.Timings(0.1, tuple(each)))
    assert [one.entry.bytes for one in content.findings[:2]] == [
        by_bytes[n].entry.bytes for n in (1, 0)
    ]
    assert "2 ms (from 1 ms, on 1)" in "\n".join(map(str, map(content.cells, content.rows)))
    none = report.content(judgement, timings=timings.Timings(0.1, (None,) * len(each)))
    assert "not measured" in report.plain(none) and none.avoidable.exposed_seconds == 0


@pytest.mark.parametrize("form", ["text", "markdown", "json", "html"])
def test_report_and_verify_take_a_profile(form, recorded, judged, capsys):
    flags = ["--profile", str(recorded), "--mesh", "data=4,model=2", "--format", form]
    assert main(["report", *flags]) == 0
    captured = capsys.readouterr()
    said = judged.headline.removeprefix("avoidable: ") if form == "html" else judged.headline
    said = '"avoidable_seconds": ' if form == "json" else said
    assert said in captured.out
    assert "3 steps (marked by the profile)" in captured.err
    assert main(["verify", *flags]) == 1
    assert capsys.readouterr().out == captured.out
    allow = ["--allow", "overwide all-reduce(data, model): known"]
    assert main(["verify", *flags, *allow]) == 0


def test_files_take_their_times_from_a_profile(recorded, judged, tmp_path, capsys):
    (program,) = judged.programs
    module = program.content.judgement.module
    (tmp_path / "step.hlo").write_text(module.text)
    (tmp_path / "other.hlo").write_text(ASYNC)
    mesh = ["--mesh", "data=4,model=2", "--format", "json"]
    profile = ["--profile", str(recorded), *mesh]
    assert main(["report", str(tmp_path / "step.hlo"), *profile]) == 0
    data = json.loads(capsys.readouterr().out)
    assert data["title"] == "step.hlo"
    assert data["measured"]["avoidable_seconds"] == pytest.approx(judged.avoidable_seconds)
    assert main(["report", str(tmp_path), *profile]) == 0
    both = {one["title"]: one for one in json.loads(capsys.readouterr().out)["programs"]}
    assert both["other.hlo"]["measured"] is None and both["step.hlo"]["measured"]
    assert main(["verify", str(tmp_path / "other.hlo"), "--profile", str(recorded)]) == 2
    assert "no program of the files ran there with a collective" in capsys.readouterr().err
    assert main(["verify", "--profile", str(tmp_path)]) == 2
    assert "holds no profile" in capsys.readouterr().err


def test_an_allowed_finding_stays(recorded, capsys):
    allow = ["--allow", "overwide all-reduce(data, model): known", "--mesh", "data=4,model=2"]
    assert main(["profile", str(recorded), *allow]) == 0
    assert "needed, or allowed:" in capsys.readouterr().out


# --- TPU and GPU, by XLA's schema ---------------------------------------------------------------


def field(number, data):
    """A field of bytes, as protocol buffers write it."""
    size, length = len(data), b""
    while size > 127:
        length, size = length + bytes([size & 127 | 128]), size >> 7
    return bytes([number << 3 | 2]) + length + bytes([size]) + data


def written(folder, host, text, program, planes, shardings=()):
    """Write an .xplane.pb: a program's HLO, its parameters' OpShardings, and planes as text."""
    proto = hlo_module_from_text(text).as_serialized_hlo_module_proto()
    proto += b"".join(field(14, sharding) for sharding in shardings)
    stat = field(6, field(1, proto))
    metadata = field(2, f"{program}(7)".encode()) + field(5, stat)
    plane = field(2, b"/host:metadata") + field(4, field(2, metadata))
    times = jax.profiler.ProfileData.text_proto_to_serialized_xspace(planes)
    path = folder / f"{host}.xplane.pb"
    path.write_bytes(field(1, plane) + times)
    return path


def plane(name, lines, names, stats=()):
    """A plane: lines of (event, start, duration, stats) in microseconds, each event by its name."""
    ids = {event: number for number, event in enumerate(names, 1)}
    stat_ids = {stat: number for number, stat in enumerate(stats, 1)}

    def event(one):
        told = "".join(
            f'stats {{ metadata_id: {stat_ids[k]} str_value: "{v}" }}' for k, v in one[3].items()
        )
        return (
            f"events {{ metadata_id: {ids[one[0]]} offset_ps: {one[1]}000000 "
            f"duration_ps: {one[2]}000000 {told} }}"
        )

    text = "".join(
        f'lines {{ name: "{line}" {" ".join(map(event, events))} }} '
        for line, events in lines.items()
    )
    for key, known in (("event_metadata", ids), ("stat_metadata", stat_ids)):
        text += "".join(
            f'{key} {{ key: {n} value {{ id: {n} name: "{name}" }} }} ' for name, n in known.items()
        )
    return f'planes {{ name: "{name}" {text} }} '


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
    found = shardrules.profile(tmp_path, mesh=MESH)
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


ASYNC = """HloModule jit_step, is_scheduled=true, entry_computation_layout={(f32[8]{0}, f32[8]{0})->f32[8]{0}}, num_partitions=2

%add (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %sum = f32[] add(f32[] %a, f32[] %b)
}

ENTRY %main (p: f32[8], q: f32[8]) -> f32[8] {
  %p = f32[8]{0} parameter(0), sharding={devices=[2]<=[2]}
  %q = f32[8]{0} parameter(1), sharding={devices=[2]<=[2]}
  %all-reduce-start = f32[8]{0} all-reduce-start(f32[8]{0} %p), channel_id=1, replica_groups={{0,1}}, use_global_device_ids=true, to_apply=%add
  %work = f32[8]{0} multiply(f32[8]{0} %q, f32[8]{0} %q)
  %all-reduce-done = f32[8]{0} all-reduce-done(f32[8]{0} %all-reduce-start)
  ROOT %result = f32[8]{0} add(f32[8]{0} %all-reduce-done, f32[8]{0} %work)
}
"""


def on_gpu(compute_start, compute_duration):
    """One step in which NCCL's kernel runs from 10 to 40 on a stream of its own."""
    stats = ("hlo_op", "hlo_module")

    def op(name):
        return {"hlo_op": name, "hlo_module": "jit_step"}

    return plane(
        "/device:GPU:0",
        {
            "Stream #1": [("nccl", 10, 30, op("all-reduce-start"))],
            "Stream #2": [("kernel", compute_start, compute_duration, op("work"))],
        },
        ["nccl", "kernel"],
        stats,
    )


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
    assert "2 hosts" in str(found)


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


@pytest.mark.parametrize(
    "option, value, said",
    [
        ("enable_hlo_proto", False, "leave enable_hlo_proto"),
        ("host_tracer_level", 0, "at 1 or more"),
    ],
)
def test_what_the_profiler_left_out_is_said(option, value, said, tmp_path, cpu_mesh):
    options = jax.profiler.ProfileOptions()
    setattr(options, option, value)
    f = jax.jit(
        jax.shard_map(lambda x: jax.lax.psum(x, "data"), mesh=cpu_mesh, in_specs=P(), out_specs=P())
    )
    x = np.ones(8, np.float32)
    f(x).block_until_ready()
    with jax.profiler.trace(str(tmp_path), profiler_options=options):
        f(x).block_until_ready()
    with pytest.raises(errors.ProfileError, match=said):
        shardrules.profile(tmp_path)


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
    assert any("ran, and is not judged: jit_other" in note for note in found.notes)


# --- what can't be read -------------------------------------------------------------------------


def unreadable(kind, folder, recorded):
    if kind == "nothing":
        return folder / "nowhere"
    if kind == "empty":
        return folder
    (whole,) = recorded.rglob("*.xplane.pb")
    held = {"text": b"hello, world", "cut": whole.read_bytes()[:-1000], "no bytes": b""}[kind]
    path = folder / "host.xplane.pb"
    path.write_bytes(held)
    return path


@pytest.mark.parametrize(
    "kind, said",
    [
        ("nothing", "there is no such file or folder"),
        ("empty", "holds no profile"),
        ("text", "is not a whole profile of JAX's"),
        ("cut", "is not a whole profile of JAX's"),
        ("no bytes", "it is empty"),
    ],
)
def test_what_is_no_profile_is_said_in_one_line(kind, said, tmp_path, recorded, capsys):
    path = unreadable(kind, tmp_path, recorded)
    assert main(["profile", str(path)]) == 2
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert line.startswith("shardrules: ") and said in line


@pytest.mark.parametrize("seed", range(5))
def test_bytes_changed_by_chance_end_in_a_report_or_in_one_line(seed, tmp_path, recorded):
    (file,) = recorded.rglob("*.xplane.pb")
    random = np.random.default_rng(seed)
    path = tmp_path / "host.xplane.pb"
    for _ in range(20):
        data = np.frombuffer(file.read_bytes(), np.uint8).copy()
        at = random.integers(0, len(data), random.choice([1, 2, 50]))
        data[at] ^= np.left_shift(1, random.integers(0, 8, len(at))).astype(np.uint8)
        path.write_bytes(data.tobytes())
        try:
            str(shardrules.profile(path))
        except errors.ProfileError as error:
            assert "\n" not in str(error)


HOST = field(2, b"/host:CPU")


@pytest.mark.parametrize(
    "data, said",
    [
        (b"\x0a\x00" * 5000, "more than 4096 planes"),
        (field(1, HOST + b"\x1a\x00" * 2_100_000), "more than 2097152 parts"),
        (field(1, HOST + field(3, field(4, b"\x08\x01" * 1000))), "more than 256 fields"),
        (field(1, HOST + field(3, b"\x22\x00" * 1000)), "no operation of a CPU, GPU or TPU"),
        (field(1, HOST + field(3, b"\x22\x01\x08")), "ends in a number"),
    ],
)
def test_what_would_take_long_is_refused(data, said, tmp_path):
    path = tmp_path / "host.xplane.pb"
    path.write_bytes(data)
    with pytest.raises(errors.ProfileError, match=said):
        shardrules.profile(path)


@pytest.mark.parametrize(
    "data", [b"\x0a\xff", b"\x0a" + b"\xff" * 11, b"\x0b", b"\x0a\x05ab", b"\x09\x01", b"\x00"]
)
def test_damaged_messages_are_refused(data):
    with pytest.raises(errors.ProfileError):
        list(wire.fields(memoryview(data)))


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
    of = {"all-reduce": measured.Site("all-reduce", None)}
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


# --- run --profile, and two profiles ------------------------------------------------------------

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
    assert "--profile recorded nothing: no program with collectives was called" in done.stderr
    assert "1 overwide" in done.stderr  # the report of its programs stands
    done = run("run", "--profile", 3, script(tmp_path / "train.py", count=4))
    assert "the script ended after" in done.stderr and "of --profile's 3 steps" in done.stderr
    done = run("run", "--profile", "0", tmp_path / "train.py")
    assert done.returncode == 2 and "write --profile 3" in done.stderr


def test_diff_says_what_each_change_saved(tmp_path, capsys):
    for name, check in (("before", False), ("after", True)):
        path = script(tmp_path / "train.py", check=check)
        done = run("run", "--profile", 3, "--keep", tmp_path / name, path)
        assert "avoidable: " in done.stderr
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
