"""From a profile alone to verdicts with times: of CPU as it is recorded, of TPU and GPU by XLA's schema."""

import json
import pathlib
import re
import statistics

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import shardrules
from shardrules import errors, report, testing
from shardrules.__main__ import main
from shardrules.costs import timings
from shardrules.report import drawn
from shardrules.watching.profiles import events, wire
from watching.xspaces import ASYNC, field

pytestmark = pytest.mark.one_lane

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
        r"avoidable: [\d.e-]+ ms of [\d.]+ ms a step \([\d.]+%\), on CPU, unlike TPU or GPU",
        str(judged).splitlines()[0],
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
    # What all findings rest on stands once, below them.
    assert out.count("hold the same data on every device") == 1
    assert out.index("to do: ") < out.index("what all findings rest on:\n  arrays that")
    # What the loop stacks is one, though its first trip's part is known apart.
    assert "overwide: backward all-reduce(data, model), 16.4 kB" in out
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
    assert judged._repr_html_().startswith("<iframe srcdoc=")
    (program,) = judged.programs
    ran, busy = program.timings.ran, program.timings.busy
    picture = report.page(program.content).partition("A step as it ran</h2>")[2]
    picture = picture.partition("</svg>")[0]
    bars = re.findall(
        r'<rect data-row="row\d+".*? x="([\d.]+)" y="(\d+)" width="([\d.]+)"', picture
    )
    last = max(end for *_, end in (*ran, *busy))
    assert len(bars) == len(ran) > 0
    lane = max(map(len, re.findall(r'<text class="dim" x="0" y="\d+">(.*?)</text>', picture)))
    left = 6 + 6.2 * lane
    bars.sort(key=lambda bar: float(bar[0]))  # whatever lane they are in
    for (x, _, width), (_, start, end) in zip(bars, sorted(ran, key=lambda run: run[1])):
        assert float(x) == pytest.approx(left + (1080 - left) * start / last, abs=0.01)
        assert float(width) == pytest.approx((1080 - left) * (end - start) / last, abs=0.01)
    assert busy[0][1] < ran[0][1] and all(0 <= a < b <= last for a, b in busy)
    assert picture.count("h", picture.index('class="busy"')) >= len(busy) > 1
    assert "A step as it ran" not in report.page(report.content(program.content.judgement))


def test_collectives_that_overlap_are_drawn_below_each_other():
    times = {"<a>": (0.0, 2.0), "b": (1.0, 3.0), "c": (2.0, 4.0)}
    runs = [(drawn.BarLabel("row0", "needed", says), *when) for says, when in times.items()]
    picture = drawn.timed(runs, [(0.5, 1.0)])
    assert re.findall(r'<rect .*? y="(\d+)"', picture) == ["4", "28", "4"]
    assert "<a>" not in picture and "4 s" in picture


def test_findings_stand_in_the_order_of_their_exposed_time(cpu_mesh):
    """The one that moves fewer bytes stands first where it is exposed for longer."""
    f = jax.shard_map(
        lambda ws, x: jnp.tanh(x @ ws[0]) @ ws[1],
        mesh=cpu_mesh,
        in_specs=(P(), P("data")),
        out_specs=P("data"),
        check_vma=False,
    )
    gradient = jax.jit(jax.grad(lambda ws, x: (f(ws, x) ** 2).sum()))
    ws = [np.ones((32, 64), np.float32), np.ones((64, 16), np.float32)]
    judgement = testing.judge(gradient, ws, np.ones((8, 32), np.float32))
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
    assert "2 ms (fastest: 1 ms, 1)" in "\n".join(map(str, map(content.cells, content.rows)))
    none = report.content(judgement, timings=timings.Timings(0.1, (None,) * len(each)))
    assert none.avoidable.exposed_seconds == 0


@pytest.mark.parametrize("form", ["text", "markdown", "json", "html"])
def test_report_and_verify_take_a_profile(form, recorded, judged, capsys):
    flags = ["--profile", str(recorded), "--mesh", "data=4,model=2", "--format", form]
    assert main(["report", *flags]) == 0
    captured = capsys.readouterr()
    said = judged.headline
    if form == "html":  # a tile: the figures, and what they are of
        saved, step = re.match(r"avoidable: (.*) of (.*) a step", said).groups()
        said = f"</b>avoidable of {step} a step, measured on CPU"
        assert f"<b>{saved}, " in captured.out
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


def test_a_mesh_that_is_not_given_or_does_not_fit_is_said(recorded):
    told = shardrules.profile(recorded)
    # From JAX 0.12 a program says by itself what its axes are called.
    is_known = told.programs[0].content.judgement.mesh == MESH
    assert ("name its axes: --mesh data=4,model=2 (mesh=)" in str(told)) is not is_known
    (note,) = shardrules.profile(recorded, mesh={"data": 4}).notes
    assert " is judged without the mesh (data=4), which does not fit it: " in note
    assert "(mesh=)" not in str(shardrules.profile(recorded, mesh=MESH))


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
        (field(1, HOST + field(3, field(4, b"\x08\x01" * 1000))), "more than 256 fields"),
        (field(1, HOST + field(3, b"\x22\x00" * 1000)), "no operation of a CPU, GPU or TPU"),
        (field(1, HOST + field(3, b"\x22\x01\x08")), "ends in a number"),
    ],
)
def test_events_that_none_can_be_are_refused(data, said, tmp_path):
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
