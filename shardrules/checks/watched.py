"""Watch the tests' programs for ``pytest --shardrules`` and ``--shardrules-check``."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import os
import pathlib
import shlex
import sys
from collections.abc import Generator
from typing import Any

import pytest

from shardrules import fitting
from shardrules.arguments import allowance
from shardrules.costs.advice import named
from shardrules.errors import ShardrulesError
from shardrules.unchecked import check_off

_TODO, _OURS = "to do: ", "shardrules: "  # the prefixes of advice in messages, and of notes
# Keys under which a pytest-xdist worker sends its results to the process that reports.
_KEY, _CHECKED = "shardrules", "shardrules_checked"

_WITH_VALUE = frozenset(
    "--shardrules-format --shardrules-output --shardrules-allow "
    "-n --numprocesses --maxprocesses --dist --tx".split()
)


def _given(config: Any) -> list[str]:
    """Return pytest's arguments as typed, without our flags, for a run in one process."""
    args, given = iter(map(str, config.invocation_params.args)), []
    for arg in args:
        name, equals, _ = arg.partition("=")
        if name in _WITH_VALUE:
            _ = equals or next(args, "")
        elif not name.startswith(("--shardrules", "--update-budgets", "-n")):
            given.append(arg)
    # The configuration's addopts may also ask for more processes.
    several = hasattr(config, "workerinput") or config.getoption("numprocesses", None)
    return [*["-n0"][: bool(several)], *given]


def _allowances(texts: list[str]) -> dict[str, str]:
    from shardrules.costs import findings

    try:
        return findings.Allowances(dict(allowance(t, "--shardrules-allow") for t in texts)).reasons
    except ShardrulesError as error:
        flag = "--shardrules-allow"
        message = error.message if flag in error.message else f"{flag}: {error.message}"
        raise pytest.UsageError(message) from None


class PytestWatch:
    """The plugin of ``--shardrules``; pytest-xdist's workers send it their reports."""

    def __init__(self, config: Any):
        from shardrules.watching import programs

        self._config = config
        self._allow = _allowances(config.getoption("--shardrules-allow"))
        self._seen: Any = programs.Watched(
            False, self._allow, lambda: os.environ.get("PYTEST_CURRENT_TEST", "").rpartition(" ")[0]
        )
        self._seen.script = shlex.join(["-m", "pytest", *_given(config)])
        self._seen.__enter__()
        self._format: str = config.getoption("--shardrules-format") or "text"
        self._output: str | None = config.getoption("--shardrules-output")
        self._reports: list[dict[str, Any]] = []
        self._found: list[str] = []
        self._failure = ""  # the reason for the exit code, if there are findings
        self._advice: dict[str, str] = {}  # our errors' advice, by test

    @pytest.hookimpl(hookwrapper=True)
    def pytest_runtest_makereport(self, item: Any, call: Any) -> Generator[None, Any, None]:
        report = (yield).get_result()
        if report.failed and call.excinfo is not None:
            advice = named(_advice(call.excinfo.value), self._seen.script)
            report.shardrules_advice = advice  # workers send it

    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.failed and (advice := getattr(report, "shardrules_advice", "")):
            self._advice[report.nodeid] = advice
        elif report.when == "call" and report.passed:  # a rerun of the test passed
            self._advice.pop(report.nodeid, None)

    @pytest.hookimpl(optionalhook=True)  # pytest-xdist's
    def pytest_testnodedown(self, node: Any, error: Any) -> None:
        sent = getattr(node, "workeroutput", {}).get(_KEY)
        if sent is not None:
            self._reports.append({**sent, "process": node.gateway.id})

    def pytest_sessionfinish(self, session: Any, exitstatus: int) -> None:
        """Judge the programs, and turn a success into exit code 1 if there are findings."""
        self._seen.__exit__()
        if len(self._seen):
            from shardrules.report import WRITERS

            judged = self._seen.judged()
            # An allowance that matches nothing in this process may match in another process.
            unused, judged = judged.unused, dataclasses.replace(judged, unused=())
            report = {
                "unused": unused,
                "text": WRITERS[self._format](judged),
                "headline": judged.headline,
                "clean": judged.clean,
                "process": "",
            }
            output = getattr(self._config, "workeroutput", None)
            if output is not None:
                output[_KEY] = report
                return
            self._reports.append(report)
        self._found = [r["headline"] for r in self._reports if not r["clean"]]
        if self._found:
            self._failure = "there are findings, too"
            if int(exitstatus) == 1:
                self._failure = "tests failed, and there are findings"
            elif int(exitstatus) == 0:
                session.exitstatus = 1
                self._failure = "the tests passed, and the exit code is 1 for findings"

    def pytest_unconfigure(self) -> None:
        """Print advice and the reason for exit code 1, below pytest's own summary."""
        reporter = self._config.pluginmanager.get_plugin("terminalreporter")
        if reporter is None:
            return
        # With --tb=short and shorter styles, pytest may omit an error's advice.
        lines = [f"{test}: {advice}" for test, advice in self._advice.items()]
        # A note, not a failure: pytest may have run only some of the tests.
        lines += [
            f"{what!r} of --shardrules-allow matches no finding of these tests; if they are all, "
            "remove it"
            for what in self._allow
            if all(what in report["unused"] for report in self._reports)
        ]
        if self._failure:
            lines.append(f"{self._failure}: {'; '.join(self._found)}")
        for line in lines:
            text = fitting.fitted(f"shardrules: {line}", fitting.width(sys.stdout))
            reporter.write_line(text, red=True)

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        columns = fitting.width(sys.stdout)
        for report in self._reports:
            where = f" ({report['process']})" if report["process"] else ""
            terminalreporter.section(f"shardrules: programs that were compiled{where}")
            text = report["headline"] if self._output else report["text"].rstrip()
            # A machine reads annotations, which are one line each, so don't wrap them.
            of_text = self._output or self._format == "text"
            terminalreporter.write_line(fitting.fitted(text, columns) if of_text else text)
        if not self._reports:
            terminalreporter.write_line("shardrules: no test compiled a program with JAX")
        if self._output:
            pathlib.Path(self._output).write_text(self._whole(), encoding="utf-8")
            terminalreporter.write_line(f"shardrules: the report is in {self._output}")

    def _whole(self) -> str:
        """Return the joined reports of pytest-xdist's workers."""
        from shardrules.report.annotations import merged, sarif

        texts = [report["text"] for report in self._reports]
        if self._format == "sarif":
            return merged(texts or [sarif([])])
        return "".join(texts)


def _advice(error: BaseException) -> str:
    """Return the advice in an error of ours, or in our note on JAX's error; empty if none."""
    notes = [note for note in getattr(error, "__notes__", ()) if note.startswith(_OURS)]
    if notes or not isinstance(error, ShardrulesError):
        return "; ".join(note.removeprefix(_OURS) for note in notes)
    lines = error.message.splitlines()
    todo = [line.partition(_TODO)[2].strip() for line in lines if _TODO in line]
    return "; ".join(dict.fromkeys(todo)) or (lines or [""])[-1].strip()


class PytestCheck:
    """The plugin of ``--shardrules-check``: it switches on checks of shard_maps and lists them."""

    def __init__(self, config: Any):
        self._config = config
        self._stack = contextlib.ExitStack()
        self._handles: list[Any] = []
        self._texts: list[str] = []
        self._stack.enter_context(
            check_off.switching(self._handles, lambda: None, self._texts.append)
        )

    @pytest.hookimpl(optionalhook=True)  # pytest-xdist's
    def pytest_testnodedown(self, node: Any, error: Any) -> None:
        self._texts += getattr(node, "workeroutput", {}).get(_CHECKED, [])

    def pytest_sessionfinish(self, session: Any) -> None:
        self._stack.close()
        from shardrules.unchecked.migration import decided

        sites = [*itertools.chain.from_iterable(h.unchecked() for h in self._handles)]
        self._texts += [decided(sites)] if sites else []
        if hasattr(self._config, "workeroutput"):
            self._config.workeroutput[_CHECKED] = self._texts

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        terminalreporter.section("shardrules: shard_maps with the check off")
        for text in self._texts or ["none was called"]:
            terminalreporter.write_line(fitting.fitted(text, fitting.width(sys.stdout)))
