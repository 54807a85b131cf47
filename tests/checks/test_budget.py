"""Budgets: what is written, what is compared, what can't be read, and pytest's option."""

import importlib.metadata
import itertools
import os
import pathlib
import re
import subprocess
import sys
import textwrap
import tomllib

import pytest
from hlo import text as T
from raising import raises

from shardrules import errors, testing
from shardrules.checks import budget, updates
from shardrules.costs import accounts, comparing

pytestmark = pytest.mark.one_lane

MESH = {"data": 4, "model": 2}


def module(*collectives, sharding=T.BOTH, source="/home/me/project/model.py"):
    where = f', metadata={{op_name="jit(f)/psum" source_file="{source}" source_line=7}}'
    lines = [T.parameter(sharding)]
    for number, (groups, shape) in enumerate(collectives):
        before = f"%r{number - 1}" if number else "%x"
        lines.append(T.all_reduce(before, groups, shape, f"r{number}", extra=where))
    return T.module("\n".join(lines))


TWO = module((T.OVER_MODEL, "f32[8]"), (T.OVER_DATA, "f32[8]"))
TEXT = """\
# What a program's collectives may cost; pytest --update-budgets rewrites it.
# Bytes are of one execution on one device; [[allow]] is written by hand and kept.

version = 1
level = "compiled"
mesh = "data=4,model=2"

[[collective]]
what = "forward all-reduce(data)"
element_type = "f32"
source = "model.py"
sites = 1
count = 1
bytes = 32
wire_bytes = 48

[[collective]]
what = "forward all-reduce(model)"
element_type = "f32"
source = "model.py"
sites = 1
count = 1
bytes = 32
wire_bytes = 32
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    (tmp_path / "pyproject.toml").write_text("")
    return tmp_path


@pytest.fixture
def updating(monkeypatch):
    monkeypatch.setattr(updates, "wanted", True)
    monkeypatch.setattr(updates, "said", {})


def test_a_budget_is_written_and_met(folder, monkeypatch):
    path = folder / "budgets" / "train.toml"
    with pytest.raises(errors.CollectiveAssertionError) as caught:
        testing.assert_budget(TWO, path, mesh=MESH)
    assert f"there is no budget {path}; write it with pytest --update-budgets. It would hold\n" in (
        str(caught.value)
    )
    assert TEXT in str(caught.value)
    monkeypatch.setattr(updates, "wanted", True)
    testing.assert_budget(TWO, path, mesh=MESH)
    assert path.read_text() == TEXT and list(updates.said) == [f"wrote the budget {path}"]
    monkeypatch.setattr(updates, "wanted", False)
    updates.said.clear()
    testing.assert_budget(TWO, path, mesh=MESH)
    # Another machine, another checkout, other instruction names: the same budget.
    other = TWO.replace("/home/me/project", "/ci/build").replace("%r0", "%all-reduce.77")
    testing.assert_budget(other, path, mesh=MESH)


def test_differences_are_said_collective_by_collective(folder):
    path = folder / "train.toml"
    path.write_text(TEXT)
    now = module((T.ALL, "f32[8]"), (T.OVER_DATA, "f32[8]"), (T.OVER_DATA, "f32[8]"))
    with pytest.raises(errors.CollectiveAssertionError) as caught:
        testing.assert_budget(now, path, mesh=MESH)
    assert str(caught.value) == (
        f"the collectives are not those of the budget {path} (- budget, + program):\n"
        "  + forward all-reduce(data, model) f32 at model.py: 1, 32 B\n"
        "  ~ forward all-reduce(data) f32 at model.py: grew from 1, 32 B to 2, 64 B\n"
        "  - forward all-reduce(model) f32 at model.py: 1, 32 B\n"
        "if that is meant: pytest --update-budgets"
    )
    gone = ("- forward all-reduce(data) f32 at model.py: 1, 32 B",)
    with raises(errors.CollectiveAssertionError, differences=gone):
        testing.assert_budget(module((T.OVER_MODEL, "f32[8]")), path, mesh=MESH)
    of_mesh = lambda lines: lines[0] == "~ mesh is data=8, was data=4,model=2"  # noqa: E731
    with raises(errors.CollectiveAssertionError, differences=of_mesh):
        testing.assert_budget(TWO, path, mesh={"data": 8})


def test_findings_need_a_reason_in_the_file(folder, updating):
    path = folder / "train.toml"
    redundant = module((T.OVER_MODEL, "f32[8]"), sharding=T.DATA)
    for _ in range(2):
        with pytest.raises(errors.CollectiveAssertionError) as caught:
            testing.assert_budget(redundant, path, mesh=MESH)
        assert [verdict.verdict for verdict in caught.value.verdicts] == ["redundant"]
        assert str(caught.value).startswith("1 finding that nothing allows:\n  redundant: ")
        assert str(caught.value).endswith(
            f"if they may stay, say why in {path} (a new file may hold just that); until then "
            'nothing is written there:\n[[allow]]\nwhat = "redundant forward all-reduce(model)"\n'
            'reason = "..."\n'
        )
    path.write_text(
        path.read_text() + '\n[[allow]]\nwhat = "redundant forward all-reduce(model)"\n'
        'reason = "issue \\"12\\""\n'
    )
    written = path.read_text()
    testing.assert_budget(redundant, path, mesh=MESH)  # which rewrites it
    assert path.read_text() == written
    with raises(errors.CollectiveAssertionError, verdicts=()):
        testing.assert_budget(TWO, path, mesh=MESH)


@pytest.mark.parametrize("mesh", [MESH, None])
def test_what_is_printed_of_findings_can_be_pasted(folder, monkeypatch, mesh):
    """Before there is a file, when it is to be written, and of a text whose mesh is not known."""
    path = folder / "train.toml"
    redundant = module((T.OVER_MODEL, "f32[8]"), (T.OVER_DATA, "f32[8]"), sharding=T.DATA)
    with pytest.raises(errors.CollectiveAssertionError) as caught:
        testing.assert_budget(redundant, path, mesh=mesh)
    text = str(caught.value)
    path.write_text(text[text.index("\n[[allow]]\n") :])
    monkeypatch.setattr(updates, "wanted", True)
    testing.assert_budget(redundant, path, mesh=mesh)
    path.write_text("")
    with pytest.raises(errors.CollectiveAssertionError) as caught:
        testing.assert_budget(redundant, path, mesh=mesh)
    text = str(caught.value)
    path.write_text(text[text.index("\n[[allow]]\n") :])
    testing.assert_budget(redundant, path, mesh=mesh)
    monkeypatch.setattr(updates, "wanted", False)
    testing.assert_budget(redundant, path, mesh=mesh)


def test_a_logical_budget_has_no_findings(folder, updating):
    path = folder / "logical.toml"
    redundant = module((T.OVER_MODEL, "f32[8]"), sharding=T.DATA)
    testing.assert_budget(redundant, path, mesh=MESH, level="logical")
    assert tomllib.loads(path.read_text())["level"] == "logical"
    updates.wanted = False
    testing.assert_budget(redundant, path, mesh=MESH, level="logical")
    differences = ("~ level is compiled, was logical",)
    with raises(errors.CollectiveAssertionError, differences=differences):
        testing.assert_budget(redundant, path, mesh=MESH)


def test_paths_are_relative_to_the_project(tmp_path):
    root = str(tmp_path)
    assert comparing.relative_file(f"{root}/pkg/model.py", root) == "pkg/model.py"
    installed = f"{root}/.venv/lib/site-packages/flax/nn.py"
    assert comparing.relative_file(installed, root) == "flax/nn.py"
    assert comparing.relative_file("/elsewhere/train.py", root) == "train.py"
    assert comparing.relative_file("C:\\work\\train.py", root) == "train.py"
    assert comparing.relative_file("model.py", root) == "model.py"


def test_a_relative_path_is_relative_to_the_caller(tmp_path):
    with pytest.raises(errors.CollectiveAssertionError) as caught:
        testing.assert_budget(TWO, "no/such.toml", mesh=MESH)
    assert caught.value.path == pathlib.Path(__file__).parent / "no" / "such.toml"


@pytest.mark.parametrize("args", [(), (3,)])
def test_a_path_is_asked_for(args):
    with pytest.raises(errors.ShardrulesError, match="assert_budget takes the budget's path last"):
        testing.assert_budget(TWO, *args)


def test_the_file_is_toml(folder):
    rows = {
        ("backward all-to-all(a, b)", "s4", 'we"ird \\ \u00e9 \x7f.py (<lambda>)'): accounts.Totals(
            2, 5, 7, 8, 1
        ),
        ("x all-gather(1 group of 8)", "f32", ""): accounts.Totals(1, 0, 0, 0, 1, unknown_bytes=9),
    }
    one = budget.Budget("logical", "", rows, {"all-reduce(data)": "tab\tand \x01"})
    path = folder / "b.toml"
    path.write_text(budget.dump(one), encoding="utf-8")
    again = budget.load(path)
    assert (again.level, again.mesh, again.rows, again.allow) == (
        one.level,
        one.mesh,
        one.rows,
        one.allow,
    )
    held = tomllib.loads(path.read_text(encoding="utf-8"))
    assert {(r["what"], r["element_type"], r.get("source", "")) for r in held["collective"]} == {
        *rows
    }
    assert held["allow"] == [{"what": "all-reduce(data)", "reason": "tab\tand \x01"}]


@pytest.mark.parametrize(
    "text, message",
    [
        ("", "version is None, but this shardrules reads 1"),
        (TEXT.replace("version = 1", "version = 2"), "version is 2, but this shardrules reads 1"),
        (TEXT.replace("sites = 1", "sites = 1.5"), "number 1: 'sites' is 1.5, not a count"),
        (TEXT.replace("sites = 1", "sites = -1"), "number 1: 'sites' is -1, not a count"),
        (TEXT.replace("sites = 1", "sites = true"), "'sites' is True, not a count"),
        (
            TEXT.replace("[[collective]]", "[[collectives]]"),
            "the head: 'collectives' is not one of",
        ),
        (
            TEXT.replace("sites", "site"),
            "number 1: 'site' is not one of what, element_type, source",
        ),
        (TEXT.replace("sites = 1", 'sites = "1"'), "number 1: 'sites' is '1', not a count"),
        (TEXT.replace('"f32"', "32"), "number 1: 'element_type' is 32, not text"),
        (
            TEXT.replace("(data)", "(model)"),
            "[[collective]] number 2: 'forward all-reduce(model)' at 'model.py' is given twice",
        ),
        (TEXT.replace("count = 1\n", "count = 1\ncount = 1\n"), "it is not TOML: Cannot overwrite"),
        (TEXT + '[[allow]]\nwhat = "x"\n', "[[allow]] number 1: 'reason' is missing"),
        (
            TEXT + '[allow]\nwhat = "x"\n',
            "'allow' is not a list of tables; each begins with [[allow",
        ),
        (TEXT.replace('level = "compiled"\n', ""), "the head: 'level' is missing"),
        (TEXT.replace('"f32"', '"\\q"'), "it is not TOML: "),
    ],
)
def test_files_that_cant_be_read(folder, text, message):
    path = folder / "b.toml"
    path.write_text(text)
    with pytest.raises(errors.BudgetError) as caught:
        testing.assert_budget(TWO, path, mesh=MESH)
    assert str(caught.value).startswith(f"{path}: ") and message in str(caught.value)
    assert str(caught.value).endswith(
        "; repair it, or delete the file and run pytest --update-budgets"
    )


def test_any_toml_is_read(folder):
    path = folder / "b.toml"
    path.write_text(TEXT.replace('level = "compiled"', "level = 'compiled' # as it runs"))
    testing.assert_budget(TWO, path, mesh=MESH)
    rows = budget.load(path).rows
    path.write_text(
        'version = 1\nlevel = \'compiled\'\nmesh = """data=4,model=2"""\ncollective = ['
        + ", ".join(
            f"{{what = '{what}', element_type = '{kind}', source = '{source}', sites = {t.sites}, "
            f"count = 0x{t.count:x}, bytes = {t.bytes}, wire_bytes = {t.wire_bytes}}}"
            for (what, kind, source), t in rows.items()
        )
        + "]\n"
    )
    testing.assert_budget(TWO, path, mesh=MESH)


def test_a_folder_and_bytes_that_cant_be_read(folder):
    with pytest.raises(errors.BudgetError, match="can't read the budget .*: Is a directory"):
        testing.assert_budget(TWO, folder, mesh=MESH)
    path = folder / "b.toml"
    path.write_bytes(b"\xff")
    with pytest.raises(errors.BudgetError, match="is not UTF-8 .byte 0."):
        testing.assert_budget(TWO, path, mesh=MESH)


def test_a_new_file_may_hold_allowances_alone(folder, updating):
    path = folder / "train.toml"
    path.write_text("[[allow]]\nwhat = 'redundant all-reduce(model)'\nreason = 'issue 12'\n")
    testing.assert_budget(module((T.OVER_MODEL, "f32[8]"), sharding=T.DATA), path, mesh=MESH)
    assert budget.load(path).allow == {"redundant all-reduce(model)": "issue 12"}


def test_many_differences_are_cut(folder, updating):
    path = folder / "train.toml"
    testing.assert_budget(TWO, path, mesh=MESH)
    updates.wanted = False
    many = module(*((T.OVER_MODEL, f"f32[{n}]") for n in range(1, 40)))
    number = itertools.count()
    many = re.sub("model.py", lambda _: f"m{next(number)}.py", many)
    with pytest.raises(errors.CollectiveAssertionError) as caught:
        testing.assert_budget(many, path, mesh=MESH)
    assert len(caught.value.differences) > 24
    assert len(str(caught.value).splitlines()) < 30


@pytest.fixture
def suite(folder):
    """A project with a program and tests of its budgets; returns what runs pytest there."""
    (folder / "program.hlo").write_text(TWO)
    (folder / "test_it.py").write_text(
        textwrap.dedent("""
        import pathlib
        import pytest
        from shardrules import testing

        def check(name):
            program = pathlib.Path(__file__).parent / "program.hlo"
            testing.assert_budget(program, name, mesh={"data": 4, "model": 2})

        def test_budget():
            check("budgets/it.toml")
    """)
    )

    # Where the package is installed, pytest finds the plugin by itself.
    names = {one.name for one in importlib.metadata.entry_points(group="pytest11")}
    known = "shardrules.pytest_plugin" in names
    plugin = [] if known else ["-p", "shardrules.checks.pytest_plugin"]

    def pytest_there(*options, ci="", cwd=folder):
        return subprocess.run(
            [sys.executable, "-m", "pytest", "-q", *plugin, *options],
            capture_output=True,
            text=True,
            cwd=cwd,
            env=os.environ | {"CI": ci},
        )

    return pytest_there


def test_pytest_rewrites_budgets_when_asked(folder, suite):
    done = suite()
    assert done.returncode == 1
    done = suite("--update-budgets")
    assert done.returncode == 0, done.stdout
    assert (folder / "budgets" / "it.toml").read_text() == TEXT
    assert suite().returncode == 0
    (folder / "program.hlo").write_text(module((T.OVER_MODEL, "f32[8]")))
    done = suite()
    assert done.returncode == 1
    assert "def assert_budget" not in done.stdout  # pytest shows the user's lines alone


def test_pytest_says_where_a_budget_is(folder, suite):
    """A budget's path begins at its test, which may be run from elsewhere."""
    done = suite("--update-budgets", folder, cwd=folder.parent)
    assert f"shardrules: wrote the budget {folder.name}/budgets/it.toml\n" in done.stdout


def test_pytest_rewrites_nothing_in_ci(folder, suite):
    done = suite("--update-budgets", ci="true")
    assert done.returncode == 4 and not (folder / "budgets").exists()
    assert "--update-budgets where CI=true: each run would meet the budgets that it" in done.stderr
    assert suite("--update-budgets-in-ci", ci="true").returncode == 0
    assert (folder / "budgets" / "it.toml").exists()
    assert suite("--update-budgets", ci="false").returncode == 0


def test_a_failing_test_leaves_the_file_as_it_was(folder, suite):
    with (folder / "test_it.py").open("a") as file:
        file.write(
            textwrap.dedent("""
            def test_fails_later():
                check("later.toml")
                assert False

            @pytest.fixture
            def breaks():
                yield
                raise ValueError

            def test_fails_at_its_end(breaks):
                check("end.toml")

            @pytest.mark.xfail
            def test_fails_as_expected():
                check("expected.toml")
                assert False
        """)
        )
    (folder / "later.toml").write_text("[[allow]]\nwhat = 'all-reduce(model)'\nreason = 'x'\n")
    before = (folder / "later.toml").read_text()
    done = suite("--update-budgets", "-p", "xdist", "-n", "1")
    assert done.returncode == 1
    assert (folder / "later.toml").read_text() == before
    assert sorted(path.name for path in folder.rglob("*.toml")) == [
        "it.toml",
        "later.toml",
        "pyproject.toml",
    ]
    told = [line for line in done.stdout.splitlines() if line.startswith("shardrules: ")]
    assert sorted(told) == [
        "shardrules: left the budget end.toml: its test failed",
        "shardrules: left the budget expected.toml: its test failed",
        "shardrules: left the budget later.toml: its test failed",
        "shardrules: wrote the budget budgets/it.toml",
    ]


def test_the_plugin_is_an_entry_point():
    import configparser

    setup = configparser.ConfigParser()
    setup.read(pathlib.Path(__file__).parents[2] / "setup.cfg")
    plugins = setup["options.entry_points"]["pytest11"].split("\n")
    assert "shardrules.pytest_plugin = shardrules.checks.pytest_plugin" in plugins
