"""The command line, in a process in which jax can't be imported."""

import gzip
import json
import pathlib
import re
import subprocess
import sys

import pytest
from hlo import text as T

from shardrules import __main__ as command_line

pytestmark = pytest.mark.one_lane

DATA = pathlib.Path(__file__).parent / "hlo" / "data"
UVW = str(DATA / "tpu_uvw.hlo")
MESH = "--mesh=data=4,model=2"

# Runs `python -m shardrules`, with every import of jax, and of what the benchmarks need, failing.
NO_JAX = (
    "import runpy, sys; sys.modules.update(dict.fromkeys(('jax', 'jaxlib', 'absl'))); "
    "sys.argv[0] = 'shardrules'; runpy.run_module('shardrules', run_name='__main__', "
    "alter_sys=True)"
)


def run(*args, stdin="", cwd=None):
    done = subprocess.run(
        [sys.executable, "-c", NO_JAX, *map(str, args)],
        input=stdin if isinstance(stdin, bytes) else stdin.encode(),
        capture_output=True,
        cwd=cwd,
    )
    done.stdout, done.stderr = done.stdout.decode(), done.stderr.decode()
    assert "Traceback" not in done.stderr, done.stderr
    return done


def judged(*args, stdin="", cwd=None, code=None):
    """Return what a command writes as JSON; ``code`` is its exit code."""
    done = run(*args, "--format=json", stdin=stdin, cwd=cwd)
    if code is not None:
        assert done.returncode == code, done.stderr
    return json.loads(done.stdout)


def kinds(found):
    return [finding["kind"] for finding in found["findings"]]


def clean_module():
    return T.module("\n".join([T.parameter(T.BOTH), T.all_reduce("%x")]))


def kernel_module():
    return T.module(
        "\n".join(
            [
                T.parameter(T.DATA),
                '%k = f32[8] custom-call(%x), custom_call_target="mine"',
                T.all_reduce("%k"),
            ]
        )
    )


def test_exit_codes_of_verify(tmp_path):
    done = run("verify", UVW, MESH)
    assert done.returncode == 1 and done.stderr == ""
    assert done.stdout.startswith(
        "tpu_uvw.hlo: 8320 B of 9088 B on the wire per device can be avoided (92%); 8 devices "
        "(data=4, model=2), 3 collectives run 3 times; 2 redundant, 1 overwide; the costliest: "
    )
    path = tmp_path / "clean.hlo"
    path.write_text(clean_module())
    assert judged("verify", path, code=0)["clean"]
    done = run("verify", "-", "--output=-", stdin=clean_module())
    assert done.returncode == 0 and done.stdout.startswith(
        "stdin: 8 devices (mesh not known: pass --mesh or mesh="
    )
    assert run("report", UVW, MESH).returncode == 0


@pytest.mark.sampled
@pytest.mark.parametrize(
    "args, stdin, message",
    [
        (["verify", "missing.hlo"], "", "shardrules: can't read missing.hlo: No such file or dir"),
        (["verify", "-"], "", "shardrules: stdin is empty"),
        (
            ["verify", "-"],
            "nonsense\n",
            "shardrules: stdin is not HLO text: expected 'HloModule NAME'",
        ),
        (["verify", "-"], "HloModule m\n\nENTRY %e (", "line 3, column "),
        (
            ["verify", "-"],
            "#loc = loc(unknown)\nmodule @jit_f attributes {}\n",
            "shardrules: stdin is StableHLO or another MLIR module, which no compiler has partitioned "
            "yet; pass f.lower(...).compile().as_text()\n  line 1, column 1:",
        ),
        (["verify", "."], "", "shardrules: . holds no text of a compiled program (no *after_opt"),
        (["verify", "*.hlo"], "", "shardrules: no file matches *.hlo"),
        (
            ["verify", "-"],
            "HloModule m\n\nENTRY %e () -> f32[] {\n  %c = f32[] const",
            "stdin is cut",
        ),
        (
            ["verify", "-"],
            "HloModule m\n\n%f () -> f32[] {\n  %c = f32[] constant(1)\n",
            "is cut of",
        ),
        (["verify"], "", "shardrules: nothing to judge; name a FILE of compiled HLO, or a folder"),
        (["verify", "train.py"], "", "is a Python script; shardrules run train.py judges the pr"),
        (
            ["verify", UVW, "--out-shardings={replicated};{replicated}"],
            "",
            "2 shardings were given for",
        ),
        (
            ["verify", "--profile=."],
            "",
            ". holds no profile (*.xplane.pb); to record one, run some",
        ),
        (
            ["verify", "--profile=.", "--out-shardings={replicated}"],
            "",
            "--out-shardings describes a FILE",
        ),
        (["diff", UVW], "", "shardrules: the following arguments are required: B"),
        (["diff", "-", "-"], "", "shardrules: only one of the two programs can be read from stdin"),
        (
            [],
            "",
            "shardrules: the following arguments are required: COMMAND\n(shardrules --help says",
        ),
        (
            ["frobnicate"],
            "",
            "shardrules: argument COMMAND: invalid choice: 'frobnicate' (choose from",
        ),
        (
            ["verify", UVW, "--nothing"],
            "",
            "shardrules: unrecognized arguments: --nothing\n(shardrules verify --help says",
        ),
        (["verify", UVW, "--form=json"], "", "unrecognized arguments: --form=json"),
        (["verify", UVW, "--flagfile=x"], "", "unrecognized arguments: --flagfile=x"),
        (["verify", UVW, "--undefok=x"], "", "unrecognized arguments: --undefok=x"),
        (["diff", UVW, UVW, "--format=pdf"], "", "argument --format: invalid choice: 'pdf'"),
        (
            ["verify", UVW, "--rule=mine"],
            "",
            "--rule=mine is not a rule; write --rule='kernel=no_com",
        ),
        (["verify", UVW, "--rule=k=no_comunication"], "", "did you mean 'no_communication'?"),
        (
            ["verify", UVW, "--rule=k=all_gather"],
            "",
            "all_gather takes mesh axes, --rule='k=all_ga",
        ),
        (
            ["verify", UVW, "--rule=k=no_communication(a)"],
            "",
            "no_communication takes no mesh axes",
        ),
        (["diff", UVW, UVW, "--strict"], "", "unrecognized arguments: --strict"),
        (["verify", UVW, MESH, MESH], "", "shardrules: --mesh was given twice; give it once"),
        (
            ["verify", UVW, "--format=pdf"],
            "",
            "argument --format: invalid choice: 'pdf' (choose from",
        ),
        (
            ["verify", UVW, "--mesh=data"],
            "",
            "shardrules: --mesh=data is not a mesh; write --mesh=data=4,model=2",
        ),
        (
            ["verify", UVW, "--mesh=data=4,data=2"],
            "",
            "shardrules: --mesh=data=4,data=2 names the axis 'data' twice",
        ),
        (["verify", UVW, "--mesh=data=3"], "", "shardrules: the mesh (data=3) has 3 devices, but"),
        (
            ["verify", UVW, "--allow=all-reduce(model)"],
            "",
            "shardrules: --allow='all-reduce(model)' gives no reason; write --allow='redundant "
            "all-reduce(model): issue 12'",
        ),
        (["verify", UVW, "--allow=all-reduce: x"], "", "'all-reduce' names no collectives; write"),
        (
            ["verify", UVW, "--import=no_such_module"],
            "",
            "shardrules: --import=no_such_module can't be imported: ModuleNotFoundError: ",
        ),
        (
            ["report", UVW, "--output=no/such/folder"],
            "",
            "can't write no/such/folder: No such file or directory",
        ),
        (["verify", UVW, ""], "", "one of the files has an empty name; is a variable not set?"),
    ],
)
def test_what_cant_be_read_exits_with_2(args, stdin, message, tmp_path):
    done = run(*args, stdin=stdin, cwd=tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    assert message in done.stderr


WHOLE = clean_module().encode()


@pytest.mark.parametrize(
    "data, message",
    [
        (
            b"\x0a\x05jit_f\x12\x00\x1a",
            "is binary (a protocol buffer or a serialized program), not",
        ),
        (b"HloModule m\x00", "is binary"),
        (b"ML\xefR\x0dStableHLO", "is MLIR bytecode, not HLO text; pass text: compiled.as_te"),
        (
            clean_module().encode("utf-16"),
            "is UTF-16; write it as UTF-8: iconv -f UTF-16 -t UTF-8 ",
        ),
        (clean_module().encode("utf-32"), "is UTF-32; write it"),
        (b"HloModule m\n// caf\xe9\n", "is not UTF-8: byte 0xe9 in line 2 is invalid there; wri"),
        (gzip.compress(WHOLE, mtime=0)[:-20], "is cut off: its gzip data has no end"),
        (gzip.compress(WHOLE, mtime=0)[:9] + b"\xff" * 99, "is damaged: gzip says "),
        (gzip.compress(WHOLE[: len(WHOLE) // 2], mtime=0), "is cut off: "),
        (WHOLE[:-2], "is cut off: the text ends inside computation 'main': '}' is missing"),
        (WHOLE.replace(b"ENTRY %main () -> f32[] {\n", b"ENTRY %main (\n"), "program.bin: "),
        (b"", "is empty"),
    ],
)
def test_a_file_that_cant_be_judged_says_what_it_is(data, message, tmp_path):
    path = tmp_path / "program.bin"
    path.write_bytes(data)
    done = run("verify", path)
    assert (done.returncode, done.stdout) == (2, "")
    assert message in done.stderr and "program.bin" in done.stderr


def test_gzip_is_read(tmp_path):
    path = tmp_path / "clean.hlo.gz"
    path.write_bytes(gzip.compress(WHOLE, mtime=0))
    assert run("verify", path).returncode == 0
    found = judged("verify", "-", stdin=gzip.compress(WHOLE, mtime=0), code=0)
    assert (found["title"], found["device_count"]) == ("stdin", 8)


def test_text_behind_a_whole_module_is_not_called_cut(tmp_path):
    path = tmp_path / "step.hlo"
    path.write_text(clean_module() + "Done.\n")
    done = run("verify", path)
    assert done.returncode == 2 and "step.hlo" in done.stderr and "cut" not in done.stderr


TPU_COPY = str(DATA / "tpu_copy.hlo")


@pytest.mark.parametrize(
    "name", ["*", "*/pallas_call", "shard_map", "jit(<lambda>)/*jvp*/shard_map/pallas_call"]
)
def test_a_rule_is_given_by_op_name_where_the_text_has_no_kernel_s_name(name):
    found = judged("verify", TPU_COPY, MESH, code=1)
    assert kinds(found) == ["unproven"]
    rule = "--rule=jit(<lambda>)/transpose(jvp())/shard_map/pallas_call=no_communication"
    assert f"'{rule}'" in found["findings"][0]["advice"]
    done = run("verify", TPU_COPY, MESH, f"--rule={name}=no_communication", "--format=json")
    found = json.loads(done.stdout)
    assert kinds(found) == ["redundant"] and done.stderr == ""
    redundant = found["collectives"][found["findings"][0]["collective"]]
    where = [support["detail"] for support in redundant["rests_on"]]
    assert any(f"--rule={name}=no_communication" in detail for detail in where)


def test_a_rule_that_matches_nothing_says_so(tmp_path):
    done = run("verify", TPU_COPY, MESH, "--rule=copy_kernel=no_communication")
    assert done.returncode == 1
    assert (
        "shardrules: --rule=copy_kernel=no_communication matches no kernel; without a rule: "
        "jit(<lambda>)/jvp()/shard_map/pallas_call, jit(<lambda>)/transpose(jvp())/shard_map/pal"
    ) in done.stderr
    (tmp_path / "our_rules.py").write_text(
        "import shardrules\nshardrules.register('mime', shardrules.no_communication)\n"
    )
    done = run("verify", "-", "--import=our_rules", stdin=kernel_module(), cwd=tmp_path)
    assert "--import=our_rules matches no kernel; did you mean 'mine'?" in done.stderr
    done = run("verify", UVW, MESH, "--rule=k=no_communication")
    assert "matches no kernel; every kernel has a rule" in done.stderr


def test_a_rule_by_op_name_is_not_for_kernels_that_have_a_name():
    """Where the text tells the kernel's name, the scope around it is no name of it."""
    text = kernel_module().replace('"mine"', '"mine", metadata={op_name="jit(f)/scope/mine_call"}')
    found = judged("verify", "-", "--rule=scope=no_communication", stdin=text, code=1)
    assert kinds(found) == ["unproven"]


def test_a_kernels_rule_is_not_for_another_kernel_in_a_function_of_that_name(tmp_path):
    """A module that declares the kernel ``scale`` says nothing of what jit(scale) calls."""
    (tmp_path / "our_rules.py").write_text(
        "import shardrules\nshardrules.register('scale', shardrules.no_communication)\n"
    )
    text = pathlib.Path(TPU_COPY).read_text()
    verdicts = {}
    for scope in ("jit(scale)/pallas_call", "scale/pallas_call"):
        path = tmp_path / "copy.hlo"
        path.write_text(text.replace("shard_map/pallas_call", f"shard_map/{scope}"))
        for flag in ("--import=our_rules", "--rule=scale=no_communication"):
            found = judged("verify", path, MESH, flag, cwd=tmp_path)
            verdicts[scope, flag.partition("=")[0]] = kinds(found)
    # JAX makes the scope of a kernel's name=; a rule for this very text may name the function, too.
    assert verdicts.pop(("jit(scale)/pallas_call", "--import")) == ["unproven"]
    assert list(verdicts.values()) == [["redundant"]] * 3


def test_rules_come_from_a_module(tmp_path):
    (tmp_path / "our_rules.py").write_text(
        "import shardrules\nshardrules.register('mine', shardrules.no_communication)\n"
    )
    (tmp_path / "broken.py").write_text("1 / 0\n")
    found = judged("verify", "-", stdin=kernel_module(), cwd=tmp_path, code=1)
    assert kinds(found) == ["unproven"]
    assert "register('mine'" in found["findings"][0]["advice"]
    found = judged("verify", "-", "--import=our_rules", stdin=kernel_module(), cwd=tmp_path, code=1)
    assert kinds(found) == ["redundant"]
    assert "our_rules.py:2" in str(found["collectives"][0]["rests_on"])
    done = run("verify", "-", "--import=broken", stdin=kernel_module(), cwd=tmp_path)
    assert done.returncode == 2
    assert "--import=broken can't be imported: ZeroDivisionError: division by zero" in done.stderr


def test_allowances_and_strictness():
    known = ["--allow=redundant all-reduce(model): issue 12", "--allow=all-reduce(data, model): 13"]
    found = judged("verify", UVW, MESH, *known, code=0)
    assert [one["reason"] for one in found["allowed"]] == ["13", "issue 12", "issue 12"]
    found = judged("verify", UVW, MESH, *known, "--allow=all-gather(data): gone", code=1)
    assert found["unused_allowances"] == ["all-gather(data)"]
    tagged = (
        kernel_module()
        .replace(
            'target="mine"',
            'target="mine", frontend_attributes={shardrules.effects="local",'
            'shardrules.kernel="mine",shardrules.status="declared"}',
        )
        .replace(T.DATA, T.BOTH)
    )
    assert run("verify", "-", stdin=tagged).returncode == 0
    found = judged("verify", "-", "--strict", stdin=tagged, code=1)
    assert kinds(found) == ["declared"] and "'mine'" in found["findings"][0]["advice"]


def test_what_could_move_less_is_a_finding_where_asked():
    lines = [
        T.parameter(T.BOTH),
        T.all_reduce("%x", T.ALL, extra=', metadata={op_name="jit(f)/shard_map/psum"}'),
        "%zero = f32[] constant(0)",
        "%total = f32[] reduce(%r, %zero), dimensions={0}, to_apply=%add",
    ]
    text = T.module("\n".join(lines)).replace("[8]{", "[64]{").replace("f32[8]", "f32[64]")
    found = judged("verify", "-", MESH, stdin=text, code=0)
    assert [hint["kind"] for hint in found["hints"]] == ["reduce first"] and not kinds(found)
    found = judged("verify", "-", MESH, "--cheapest", stdin=text, code=1)
    assert kinds(found) == ["reduce first"] and found["hints"] == []
    assert found["findings"][0]["saves"]["bytes"] == 2 * (256 - 4) * 7 // 8
    known = "--allow=all-reduce(data, model): issue 12"
    assert run("verify", "-", MESH, "--cheapest", known, stdin=text).returncode == 0


def test_diff_of_two_programs(tmp_path):
    one, other = tmp_path / "one", tmp_path / "other"
    one.write_text(clean_module())
    done = run("diff", one, one, MESH)
    assert (done.returncode, done.stdout) == (0, "the same collectives: 1, 32 B\n")
    other.write_text(
        T.module(
            "\n".join(
                [
                    T.parameter(T.BOTH),
                    T.all_reduce("%x", name="a"),
                    T.all_reduce("%a", name="b"),
                    T.all_reduce("%b", T.OVER_DATA),
                ]
            )
        )
    )
    done = run("diff", one, "-", MESH, stdin=other.read_text())
    assert done.returncode == 1
    assert done.stdout == (
        "- one: 1, 32 B, 32 B on the wire\n+ stdin: 3, 96 B, 112 B on the wire\n\n"
        "+ unknown all-reduce(data) f32: 1, 32 B\n"
        "~ unknown all-reduce(model) f32: grew from 1, 32 B to 2, 64 B\n"
    )
    assert run("diff", one, "missing").returncode == 2
    found = json.loads(run("diff", one, other, MESH, "--format=json").stdout)
    assert [change["status"] for change in found["changes"]] == ["came", "grew"]
    assert (found["before"]["title"], found["after"]["total"]["count"]) == ("one", 3)
    done = run("diff", one, other, MESH, "--format=markdown")
    assert "| came: unknown all-reduce(data) f32 |  | 1, 32 B |\n" in done.stdout
    path = tmp_path / "d.html"
    assert run("diff", one, other, MESH, "--format=html", "--output", path).returncode == 1
    assert path.read_text().startswith("<!doctype html>") and "grew" in path.read_text()
    assert run("diff", one, one, MESH, "--format=markdown").returncode == 0


def test_diff_knows_a_file_of_another_checkout_and_a_renamed_one(tmp_path):
    def program(*files):
        lines = [T.parameter(T.BOTH)]
        for n, file in enumerate(files):
            extra = f', metadata={{op_name="jit(f)/psum" source_file="{file}" source_line={n + 7}}}'
            lines.append(T.all_reduce(f"%r{n - 1}" if n else "%x", name=f"r{n}", extra=extra))
        return T.module("\n".join(lines))

    one, other = tmp_path / "one", tmp_path / "other"
    one.write_text(program(f"{tmp_path}/old/pkg/model.py", "/a/old/pkg/sub/model.py"))
    other.write_text(program("/b/new/pkg/sub/model.py", "/b/new/pkg/model.py"))
    done = run("diff", one, other, MESH, cwd=tmp_path)
    assert (done.returncode, done.stdout[:21]) == (0, "the same collectives:"), done.stdout
    other.write_text(program("/b/new/pkg/sub/model.py", "/b/new/pkg/data.py"))
    done = run("diff", one, other, MESH, cwd=tmp_path)
    assert (done.returncode, done.stdout[:21]) == (0, "the same collectives:"), done.stdout
    other.write_text(program("/b/new/pkg/sub/model.py", *["/b/new/pkg/data.py"] * 2))
    found = judged("diff", one, other, MESH, cwd=tmp_path)  # another file: it has two
    changes = {
        (change["status"], change["what"].rpartition(" at ")[2]): change[side]["count"]
        for change in found["changes"]
        for side in ("before", "after")
        if change[side]["count"]
    }
    assert changes == {("came", "data.py"): 2, ("went", "old/pkg/model.py"): 1}


def test_paths_below_the_working_directory_are_relative(tmp_path):
    where = f', metadata={{op_name="jit(f)/psum" source_file="{tmp_path}/train.py" source_line=7}}'
    lines = [T.parameter(T.DATA), T.all_reduce("%x", extra=where)]
    (tmp_path / "a.hlo").write_text(T.module("\n".join(lines)))
    for form, elsewhere in (("text", 3), ("markdown", 3)):
        args = ("report", tmp_path / "a.hlo", MESH, f"--format={form}")
        shown = run(*args, cwd=tmp_path).stdout
        assert str(tmp_path) not in shown and "train.py:7" in shown
        assert run(*args).stdout.count(f"{tmp_path}/train.py:7") == elsewhere


def test_a_folder_has_one_program_for_diff(tmp_path):
    for name in ("a.hlo", "b.hlo"):
        (tmp_path / name).write_text(clean_module())
    done = run("diff", tmp_path, UVW)
    assert done.returncode == 2 and "holds 2 programs; give one of them: " in done.stderr
    (tmp_path / "b.hlo").unlink()
    assert run("diff", tmp_path, tmp_path / "a.hlo").returncode == 0


def test_diff_compares_the_groups_themselves(tmp_path):
    """Where one axis took another's place there are as many groups of as many devices."""
    one, other = tmp_path / "one", tmp_path / "other"
    one.write_text(T.module(f"{T.parameter(T.BOTH)}\n{T.all_reduce('%x', '[2,4]<=[8]')}"))
    other.write_text(one.read_text().replace("[2,4]<=[8]", "[2,4]<=[4,2]T(1,0)"))
    came = judged("diff", one, other, code=1)["changes"][0]
    assert came["what"].endswith("all-reduce(2 groups of 4: [2,4]<=[4,2]T(1,0)) f32")
    assert (came["status"], came["after"]["count"], came["after"]["bytes"]) == ("came", 1, 32)
    assert run("diff", one, one).returncode == 0


def test_ctrl_c_while_judging_is_said_in_a_line(monkeypatch, capsys):
    def stopped(arguments):
        raise KeyboardInterrupt

    monkeypatch.setattr("shardrules.commands.verify.run", stopped)
    assert command_line.main(["verify", str(UVW)]) == 130
    assert capsys.readouterr().err == "shardrules: interrupted\n"


def test_diff_names_axes_by_the_mesh_that_one_of_two_texts_tells(tmp_path):
    bare, told = tmp_path / "bare", tmp_path / "told"
    bare.write_text(clean_module())
    header, rest = clean_module().split("\n", 1)
    mesh = ', frontend_attributes={shardrules.mesh="data=4,model=2"}'
    told.write_text(f"{header}{mesh}\n{rest}")
    for pair in ((bare, told), (told, bare)):
        done = run("diff", *pair)
        assert (done.returncode, done.stdout) == (0, "the same collectives: 1, 32 B\n"), done.stderr
    bare.write_text(T.module(f"{T.parameter(T.BOTH)}\n{T.all_reduce('%x', '[2,4]<=[8]')}"))
    found = judged("diff", bare, told, code=1)  # along no axes of that mesh
    assert "(2 groups of 4: [2,4]<=[8])" in found["changes"][0]["what"]


def dump(folder):
    """What --xla_dump_to leaves of two modules, one of them without text, and more beside it."""
    (folder / "module_0000.jit_step").mkdir(parents=True)
    step = pathlib.Path(UVW).read_text()
    for name, text in {
        "module_0000.jit_step.before_optimizations.txt": "HloModule unused\n",
        "module_0000.jit_step.cpu_after_optimizations-buffer-assignment.txt": "BufferAssignment:\n",
        "module_0000.jit_step.cpu_after_optimizations.txt": step,
        "module_0000.jit_step.0003.simplify.after_x.before_y.txt": step,
        "module_0007.jit_sum.sm_9.0_gpu_after_optimizations.txt": clean_module(),
        "module_0009.jit_g.before_optimizations.txt": "HloModule unused\n",
        "module_0009.jit_g.hlo.pb": "",
        "notes.txt": "nothing\n",
        "kept.txt": clean_module(),
    }.items():
        (folder / name).write_text(text)
    return folder


def test_a_folder_of_dumps(tmp_path):
    folder = dump(tmp_path / "dump")
    done = run("verify", folder, MESH, "--format=json")
    found = json.loads(done.stdout)
    assert done.returncode == 1
    assert [one["title"] for one in found["programs"]] == [
        "module_0000.jit_step.cpu_after_optimizations.txt",
        "kept.txt",
        "module_0007.jit_sum.sm_9.0_gpu_after_optimizations.txt",
    ]
    assert done.stderr == (
        f"shardrules: {folder}: 3 of 9 files are judged, those after optimizations; left out: "
        "6 other files, the folder module_0000.jit_step; without such a text (was it dumped with "
        "XLA_FLAGS='--xla_dump_to=DIR --xla_dump_hlo_as_text'?): module_0009.jit_g\n"
    )
    done = run("verify", folder, MESH)
    assert done.stdout.startswith(
        "3 programs, 3 with collectives or other costs, 3 findings, in module_0000.jit_step."
        "cpu_after_optimizations.txt 8320 B of 9088 B on the wire per device can be avoided (92%)"
    )
    assert "times" not in done.stdout.splitlines()[2]
    assert run("report", folder, MESH).returncode == 0
    for form in ("markdown", "html"):
        done = run("report", folder, MESH, f"--format={form}")
        assert "module_0007.jit_sum" in done.stdout and "how often" not in done.stdout


def test_several_files_and_patterns(tmp_path):
    for name in ("a.hlo", "b.hlo", "c.txt"):
        (tmp_path / name).write_text(clean_module())
    (tmp_path / "again").symlink_to("a.hlo")
    twice = tmp_path / "a.hlo", tmp_path / ".." / tmp_path.name / "a.hlo", tmp_path / "again"
    done = run("verify", tmp_path / "*.hlo", *twice, MESH)
    assert done.returncode == 0 and done.stdout.startswith("2 programs, ")
    (tmp_path / "again").unlink()
    unused = "--allow=all-reduce(data): none such"
    found = judged("verify", tmp_path / "*.hlo", UVW, MESH, unused, code=1)
    assert found["unused_allowances"] == ["all-reduce(data)"]
    (tmp_path / "b.hlo").write_text("HloModule b\n\nENTRY %e (")
    found = judged("verify", tmp_path / "[ab].hlo", MESH, code=2)
    assert [failure["program"] for failure in found["failures"]] == ["b.hlo"]
    assert [program["title"] for program in found["programs"]] == ["a.hlo"]
    assert run("report", tmp_path, MESH).returncode == 2
    (tmp_path / "a.hlo").write_text("")
    found = judged("verify", tmp_path / "[ab].hlo", code=2)
    assert [failure["program"] for failure in found["failures"]] == ["a.hlo", "b.hlo"]


def test_a_mesh_is_for_the_programs_of_as_many_devices(tmp_path):
    (tmp_path / "alone.hlo").write_text(
        "HloModule m, is_scheduled=true, num_partitions=2\n\nENTRY %e () -> f32[] {\n  ROOT %c = f32[] constant(1)\n}\n"
    )
    (tmp_path / "step.hlo").write_text(clean_module())
    found = judged("verify", tmp_path, MESH, code=0)
    meshes = {program["title"]: program["mesh"] for program in found["programs"]}
    assert meshes == {"step.hlo": {"data": 4, "model": 2}, "alone.hlo": None}
    assert run("verify", tmp_path, "--mesh=model=2,data=4").returncode == 2
    assert run("verify", tmp_path / "alone.hlo", MESH).returncode == 2


def test_folders_without_a_program(tmp_path):
    assert "nor any other file; a dump is made by XLA_FLAGS=" in run("verify", tmp_path).stderr
    for n in range(6):
        (tmp_path / f"module_000{n}.jit_f.hlo.pb").write_bytes(b"\x0a")
    done = run("verify", tmp_path)
    assert done.returncode == 2 and "module_0003.jit_f.hlo.pb and 2 more; a dump" in done.stderr


@pytest.mark.parametrize("command", ["verify", "report"])
def test_what_is_not_partitioned_is_no_answer(command):
    done = run(command, DATA / "dump_0_12_0_1_before_optimizations.hlo")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("shardrules: module 'jit_f' is not partitioned yet")


def test_a_mesh_that_contradicts_the_groups_is_refused():
    done = run("verify", "-", "--mesh=model=2,data=4", stdin=clean_module())
    assert done.returncode == 2 and "--mesh=data=4,model=2" in done.stderr


def test_a_target_adds_estimated_times(tmp_path):
    done = run("report", UVW, MESH, "--target=v5e")
    rows = [[cell.strip() for cell in line.split("|")] for line in done.stdout.splitlines()]
    titles = next(row for row in rows if "est. a run" in row)
    row = next(row for row in rows if row[0] == "backward all-reduce(model)")
    cells = dict(zip(titles, row))
    assert (cells["est. a run"], cells["est. in all"]) == ("~1 us", "~2 us")
    (tmp_path / "a.hlo").write_text(clean_module())
    two = run("report", UVW, tmp_path, MESH, "--target=h100").stdout
    assert two.count("for H100 SXM: ") == 1
    assert judged("report", UVW, MESH)["estimated_on"] is None


def test_report_as_json(tmp_path):
    path = tmp_path / "report.json"
    assert run("report", UVW, MESH, "--format", "json", "--output", path).returncode == 0
    found = json.loads(path.read_text())
    assert (found["schema"], found["clean"], found["device_count"]) == (1, False, 8)
    assert found["mesh"] == {"data": 4, "model": 2}
    assert found["total"] == {
        "sites": 3,
        "count": 3,
        "bytes": 8704,
        "wire_bytes": 9088,
        "unknown": 0,
        "unknown_bytes": 0,
        "unknown_wire_bytes": 0,
        "at_most": 0,
    }
    assert found["by_axes"]["model"]["bytes"] == 8192
    assert (
        [found["collectives"][f["collective"]]["verdict"] for f in found["findings"]]
        == [f["kind"] for f in found["findings"]]
        == ["redundant", "redundant", "overwide"]
    )
    overwide = found["collectives"][found["findings"][-1]["collective"]]
    assert overwide["axes"] == ["data", "model"] and overwide["needed_axes"] == ["data"]
    assert overwide["rests_on"][0]["status"] == "standing"
    assert len(found["outputs"]) == 3


def test_report_as_markdown():
    done = run("report", UVW, MESH, "--format=markdown")
    assert done.stdout.startswith(
        "# tpu_uvw.hlo\n\n8320 B of 9088 B on the wire per device can be avoided (92%); 8 devices "
    )
    assert {
        "| backward all-reduce(data, model) | overwide | 1 | 1 | 512 B | 896 B | 896 B | 9.9% | "
        "program.py:29 (l) |",
        "- **overwide**: backward all-reduce(data, model), 512 B (psum.23), `program.py:29 (l)`",
        "  - because its operand is proven equal over model; needed over data",
    } < {*done.stdout.splitlines()}


def test_report_as_a_page():  # what it holds is looked at in report/test_page.py
    done = run("report", UVW, MESH, "--format=html")
    assert done.returncode == 0 and done.stdout.startswith("<!doctype html>")
    assert "<h1>tpu_uvw.hlo</h1>" in done.stdout and done.stdout.endswith("</html>\n")
    assert set(re.findall(r'(?:src|href)="(.)', done.stdout)) == {"#"}
    assert "program.py:29" in done.stdout
    empty = "HloModule m\n\nENTRY %e () -> f32[] {\n  ROOT %c = f32[] constant(1)\n}\n"
    assert "No collectives." in run("report", "-", "--format=html", stdin=empty).stdout


def test_help_names_the_commands_and_flags():
    done = run("--help")
    assert done.returncode == 0
    for word in ("verify", "report", "diff", "--version"):
        assert word in done.stdout
    of_verify, of_diff = (run(name, "--help").stdout for name in ("verify", "diff"))
    for word in ("FILE", "--import", "--strict", "--mesh", "--allow", "--format", "--output"):
        assert word in of_verify
    for word in ("A B", "--import", "--mesh", "--output", "--format"):
        assert word in of_diff
    for word in ("--flagfile", "--undefok", "--helpfull", "--strict"):
        assert word not in of_diff


@pytest.mark.parametrize("columns", [80, 100])
@pytest.mark.parametrize("command", command_line.COMMANDS)
def test_no_line_of_help_is_wider_than_the_terminal(monkeypatch, capsys, command, columns):
    monkeypatch.setenv("COLUMNS", str(columns))
    with pytest.raises(SystemExit):
        command_line.main([command, "--help"])
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) > 8 and [line for line in lines if len(line) > columns] == []
    paragraphs = "\n".join(lines).split("options:")[0].split("\n\n")
    assert len(paragraphs) > 3  # its paragraphs stay apart


def test_version():
    import shardrules

    assert run("--version").stdout == f"shardrules {shardrules.__version__}\n"


def test_without_numpy_it_is_named():
    block = "sys.modules['numpy'] = None"
    done = subprocess.run(
        [
            sys.executable,
            "-c",
            NO_JAX.replace("sys.argv[0]", f"{block}; sys.argv[0]"),
            "verify",
            UVW,
        ],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 2 and done.stdout == ""
    assert done.stderr == "shardrules: not installed, and needed: numpy; pip install numpy\n"


def test_main_is_callable(capsys):
    assert command_line.main(["verify", UVW, MESH, "--format=json"]) == 1
    assert kinds(json.loads(capsys.readouterr().out)) == ["redundant", "redundant", "overwide"]


@pytest.mark.parametrize(
    "given, meant",
    [
        (["repot", "x.hlo"], "did you mean report?"),
        (["rnu", "x.py"], "did you mean run?"),
        (["verify", "x.hlo", "--fromat=json"], "did you mean --format?"),
        (["verify", "x.hlo", "--zzz"], ""),
        (["zzz"], ""),
    ],
)
def test_a_near_command_or_flag_is_named(given, meant, capsys):
    assert command_line.main(given) == 2
    first = capsys.readouterr().err.splitlines()[0]
    assert first.partition("; ")[2] == meant


@pytest.mark.parametrize(
    "file, flags, starts",
    [
        ("r.HTML", [], "<!doctype html>"),
        ("r.md", [], "# "),
        ("r.json", [], "{"),
        ("r.txt", [], "a.hlo: "),
        ("r", [], "a.hlo: "),
        ("r.html", ["--format", "json"], "{"),
    ],
)
def test_the_format_follows_the_suffix_of_the_file(tmp_path, monkeypatch, file, flags, starts):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.hlo").write_text(clean_module())
    assert command_line.main(["verify", "a.hlo", "--output", file, *flags]) == 0
    assert (tmp_path / file).read_text().startswith(starts)


def test_a_misspelt_suffix_is_refused(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.hlo").write_text(clean_module())
    assert command_line.main(["verify", "a.hlo", "--output", "r.hmtl"]) == 2
    assert "did you mean .html?" in capsys.readouterr().err and not (tmp_path / "r.hmtl").exists()
    for given in (["r.hmtl", "--format", "text"], ["r.log"]):
        assert command_line.main(["verify", "a.hlo", "--output", *given]) == 0
        assert (tmp_path / given[0]).read_text().startswith("a.hlo: ")


def test_a_suffix_that_a_command_does_not_write_is_refused(tmp_path, capsys):
    assert command_line.main(["profile", str(tmp_path), "--output", str(tmp_path / "r.html")]) == 2
    assert "looks like html, but this command writes text, json" in capsys.readouterr().err
    assert not (tmp_path / "r.html").exists()
