"""The options ``--update-budgets`` and ``--shardrules`` for pytest."""

from __future__ import annotations

from shardrules.checks import updates

__all__: list[str] = []


def pytest_addoption(parser):
    """Add the options."""
    group = parser.getgroup("shardrules")
    group.addoption(
        "--shardrules",
        action="store_true",
        help="judge every program that the tests compile with JAX; findings are exit code 1",
    )
    group.addoption(
        "--update-budgets",
        action="store_true",
        help="rewrite the files that shardrules.testing.assert_budget compares with",
    )


def pytest_configure(config):
    """Say to assert_budget what was asked for."""
    updates.wanted = config.getoption("--update-budgets")
    updates.written.clear()
    if config.getoption("--shardrules"):
        from shardrules.checks import watched

        config.pluginmanager.register(watched.Watched(config), "shardrules.watched")


def pytest_unconfigure(config):
    """Take it back: a process may run pytest twice."""
    updates.wanted = False


def pytest_terminal_summary(terminalreporter):
    """List the files that were written."""
    for path in updates.written:
        terminalreporter.write_line(f"shardrules: wrote the budget {path}")
