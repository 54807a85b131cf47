"""Add options to pytest: ``--shardrules``, ``--shardrules-check``, ``--update-budgets``."""

from __future__ import annotations

import os
from collections.abc import Generator
from typing import Any

import pytest

from shardrules.checks import updates

__all__: list[str] = []


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("shardrules")
    group.addoption(
        "--shardrules",
        action="store_true",
        help="judge every program that the tests compile with JAX; findings are exit code 1",
    )
    group.addoption(
        "--shardrules-format",
        choices=("text", "github", "sarif"),
        help="the same as --shardrules, written as text, as GitHub's workflow annotations, or as "
        "SARIF for code scanning",
    )
    group.addoption(
        "--shardrules-output",
        metavar="FILE",
        help="the same as --shardrules, written to this file; the terminal shows one line",
    )
    group.addoption(
        "--shardrules-allow",
        action="append",
        default=[],
        metavar="'FINDING: REASON'",
        help="a known finding and why it stays, as --allow of `shardrules run`; may be repeated",
    )
    group.addoption(
        "--shardrules-check",
        action="store_true",
        help="run each shard_map that says check_vma=False with its check on where the results "
        "are equal; a table lists them",
    )
    group.addoption(
        "--update-budgets",
        action="store_true",
        help="rewrite the budget files of shardrules.testing.assert_budget in the tests that pass; "
        "refused where CI is set",
    )
    group.addoption(
        "--update-budgets-in-ci", action="store_true", help="the same, also where CI is set"
    )


def pytest_configure(config: pytest.Config) -> None:
    forced = config.getoption("--update-budgets-in-ci")
    in_ci = os.environ.get("CI", "").lower() not in ("", "0", "false", "no")
    if config.getoption("--update-budgets") and not forced and in_ci:
        raise pytest.UsageError(
            f"--update-budgets where CI={os.environ['CI']}: each run would meet the budgets that "
            "it writes itself; write them on your machine and check them in, or pass "
            "--update-budgets-in-ci"
        )
    formatted = config.getoption("--shardrules-format")
    output = config.getoption("--shardrules-output")
    if not formatted and output and output.endswith(".sarif"):
        formatted = config.option.shardrules_format = "sarif"
    if formatted == "sarif" and not output:
        raise pytest.UsageError(
            "--shardrules-format=sarif writes a file; pass --shardrules-output=shardrules.sarif"
        )
    if output and os.path.isdir(output):
        raise pytest.UsageError(f"--shardrules-output={output} is a folder; name a file in it")
    if output and not os.path.isdir(os.path.dirname(os.path.abspath(output))):
        raise pytest.UsageError(f"--shardrules-output={output}: make its folder first")
    if formatted or output or config.getoption("--shardrules-allow"):
        config.option.shardrules = True
    updates.wanted = forced or config.getoption("--update-budgets")
    updates.said.clear()
    for option, plugin in (("--shardrules", "PytestWatch"), ("--shardrules-check", "PytestCheck")):
        name = f"shardrules.{plugin}"
        if config.getoption(option) and not config.pluginmanager.is_blocked(name):
            from shardrules.checks import watched

            config.pluginmanager.register(getattr(watched, plugin)(config), name)


def pytest_unconfigure(config: pytest.Config) -> None:
    updates.wanted = False  # a process may run pytest twice


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, Any, None]:
    """Hold back the budgets that a test writes until it has passed, including its fixtures."""
    if updates.wanted:
        _failed.clear()
        updates.wait()
    outcome = yield
    if updates.wanted:
        updates.settle(not _failed and outcome.excinfo is None)


_failed: list[str] = []


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, Any, None]:
    report = (yield).get_result()
    if report.failed or hasattr(report, "wasxfail"):
        _failed.append(report.nodeid)


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    """Send a worker's lines to the process that prints the summary (pytest-xdist)."""
    output = getattr(session.config, "workeroutput", None)
    if output is not None:
        output["shardrules_budgets"] = list(updates.said)


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any, error: Any) -> None:
    sent = getattr(node, "workeroutput", {}).get("shardrules_budgets", ())
    updates.said.update(dict.fromkeys(sent))


def pytest_terminal_summary(terminalreporter: Any) -> None:
    from shardrules.paths import here

    for line in updates.said:
        terminalreporter.write_line(here(f"shardrules: {line}"))
