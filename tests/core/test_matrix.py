"""The check that every JAX that was asked for was exercised can fail."""

from __future__ import annotations

import json

import jax
import pytest

from core import matrix

PASSED = '<testsuites><testsuite><testcase classname="a" name="b"/></testsuite></testsuites>'


def report(folder, text):
    path = folder / "report.xml"
    path.write_text(text)
    return str(path)


def test_the_docs_show_the_table_of_these_versions():
    page = (matrix.ROOT / "docs" / "versions.md").read_text()
    assert matrix.table() in page
    assert page.count("| JAX | Python |") == 1
    assert all(f"\n| {jax} | {row[0]} | " in matrix.table() for jax, row in matrix.VERSIONS.items())


def test_this_jax_is_one_of_the_matrix():
    assert jax.__version__ in matrix.VERSIONS


def test_recorded_version_counts(tmp_path):
    assert matrix.record(tmp_path, jax.__version__, report(tmp_path, PASSED)) == ""
    assert json.loads((tmp_path / f"{jax.__version__}.json").read_text())["passed"] == 1
    assert matrix.check(tmp_path, [jax.__version__]) == []


def test_a_test_that_runs_on_no_version_is_named(tmp_path):
    """Each is for other versions than those that were asked for: it would pass by running nowhere."""
    for version, left_out in (("0.1", ["a", "b"]), ("0.2", ["b"])):
        result = {"jax": version, "passed": 9, "files": matrix.fingerprint(), "left_out": left_out}
        (tmp_path / f"{version}.json").write_text(json.dumps(result))
    assert matrix.check(tmp_path, ["0.1", "0.2"]) == ["b runs on none of these JAX versions"]


def test_left_out_tests_are_recorded(tmp_path):
    path = report(tmp_path, MIXED)
    (tmp_path / "report.left_out.json").write_text('["tests/core/b", "tests/hlo/c"]')
    assert matrix.record(tmp_path, jax.__version__, path, "tests.core.") == ""
    result = json.loads((tmp_path / f"{jax.__version__}.json").read_text())
    assert result["left_out"] == ["tests/core/b"]  # never_ran looks at the others
    assert matrix.check(tmp_path, [jax.__version__]) == []  # one alone is no table
    (tmp_path / "0.1.json").write_text(json.dumps({**result, "jax": "0.1"}))
    versions = [jax.__version__, "0.1"]
    assert matrix.check(tmp_path, versions) == ["tests/core/b runs on none of these JAX versions"]


def test_versions_that_share_what_compilers_add_are_not_counted_against_each_other(tmp_path):
    """A lane records all of a report, without what it leaves to the other lane."""
    path = report(tmp_path, PASSED)
    assert matrix.record(tmp_path, jax.__version__, path) == ""
    few = json.loads((tmp_path / f"{jax.__version__}.json").read_text())
    versions = [jax.__version__, "0.1"]
    for more, wrong in (
        ({}, []),
        ({"left_out": []}, [f"JAX {versions[0]}: only 1 of 9 tests passed there"]),
    ):
        (tmp_path / f"{versions[0]}.json").write_text(json.dumps({**few, **more}))
        (tmp_path / "0.1.json").write_text(json.dumps({**few, "jax": "0.1", "passed": 9, **more}))
        assert matrix.check(tmp_path, versions) == wrong


MIXED = (
    '<testsuites><testsuite><testcase classname="tests.core.a" name="b"/>'
    '<testcase classname="tests.hlo.a" name="c"><skipped/></testcase></testsuite></testsuites>'
)


def test_the_core_suite_within_the_whole_suite_counts(tmp_path):
    """.ci/run records one JAX from the run of all tests."""
    path = report(tmp_path, MIXED)
    assert "tests.hlo.a::c: skipped" in matrix.record(tmp_path, jax.__version__, path)
    assert matrix.record(tmp_path, jax.__version__, path, "tests.core.") == ""
    assert json.loads((tmp_path / f"{jax.__version__}.json").read_text())["passed"] == 1


def ran(folder, *texts):
    paths = []
    for number, text in enumerate(texts):
        paths.append(str(folder / f"{number}.xml"))
        (folder / paths[-1]).write_text(text)
    return matrix.never_ran(paths)


def test_what_was_skipped_in_each_run_is_named(tmp_path):
    assert ran(tmp_path, MIXED) == ["tests.hlo.a::c was skipped each time"]
    assert ran(tmp_path, MIXED, MIXED) == ["tests.hlo.a::c was skipped each time"]
    assert ran(tmp_path, MIXED, MIXED.replace("<skipped/>", "")) == []
    assert ran(tmp_path, "<testsuites/>") == ["no test ran"]


def test_what_is_marked_for_no_version_that_ran_is_named(tmp_path):
    """A test for other JAX versions is deselected, so that no report of pytest holds it."""
    inner = MIXED.replace("<skipped/>", "").replace('name="c"', 'name="c[a::b]"')
    for number, nodeids in enumerate((["tests/hlo/a.py::c[a::b]", "tests/core/a.py::d"], [])):
        (tmp_path / f"{number}.left_out.json").write_text(json.dumps(nodeids))
    assert ran(tmp_path, PASSED, PASSED) == ["tests.hlo.a::c[a::b] was skipped each time"]
    assert ran(tmp_path, PASSED, inner) == []


def test_version_that_was_not_run_is_named(tmp_path):
    matrix.record(tmp_path, jax.__version__, report(tmp_path, PASSED))
    assert matrix.check(tmp_path, [jax.__version__, "0.3.1"]) == [
        "JAX 0.3.1 was asked for and not exercised"
    ]
    assert matrix.check(tmp_path / "nowhere", ["0.3.1"])


def test_other_jax_than_asked_for_is_refused(tmp_path):
    assert "JAX 0.3.1 was asked for, but this environment has" in matrix.record(
        tmp_path, "0.3.1", report(tmp_path, PASSED)
    )
    assert not list(tmp_path.glob("*.json"))


@pytest.mark.parametrize(
    "text, message",
    [
        ("<testsuites/>", "none ran"),
        (PASSED.replace("/></testsuite>", "><skipped/></testcase></testsuite>"), "a::b: skipped"),
        (PASSED.replace("/></testsuite>", "><failure/></testcase></testsuite>"), "a::b: failure"),
    ],
)
def test_run_with_a_skip_or_without_tests_does_not_count(text, message, tmp_path):
    assert message in matrix.record(tmp_path, jax.__version__, report(tmp_path, text))
    assert matrix.check(tmp_path, [jax.__version__]) == [
        f"JAX {jax.__version__} was asked for and not exercised"
    ]


def test_version_that_ran_a_part_only_is_named(tmp_path):
    files = matrix.fingerprint()
    for version, passed in (("0.1", 100), ("0.2", 79), ("0.3", 95)):
        (tmp_path / f"{version}.json").write_text(
            json.dumps({"jax": version, "passed": passed, "files": files, "left_out": []})
        )
    assert matrix.check(tmp_path, ["0.1", "0.2", "0.3"]) == [
        "JAX 0.2: only 79 of 100 tests passed there"
    ]


def test_result_of_other_files_is_named(tmp_path, monkeypatch):
    matrix.record(tmp_path, jax.__version__, report(tmp_path, PASSED))
    (tmp_path / "shardrules").mkdir()
    (tmp_path / "shardrules" / "changed.py").write_text("")
    monkeypatch.setattr(matrix, "ROOT", tmp_path)
    assert matrix.check(tmp_path, [jax.__version__]) == [
        f"JAX {jax.__version__}: the result is of other files than these; run it again"
    ]


def test_main_exits_with_what_is_wrong(tmp_path):
    with pytest.raises(SystemExit, match="JAX 0.3.1 was asked for and not exercised"):
        matrix.main(["check", str(tmp_path), "0.3.1"])
    with pytest.raises(SystemExit, match="python tests/core/matrix.py record"):
        matrix.main(["check"])
