"""The public names as checkers see them: one list, and a user's file that uses all of it.

What mypy and pyright say about that file is checked by ``python tests/typing/check.py``.
"""

import ast
import importlib
import pathlib
import sys

import pytest
from house import PACKAGE

import shardrules

TYPING = pathlib.Path(__file__).with_name("typing")
sys.path.insert(0, str(TYPING))
import check  # noqa: E402

USES = ast.parse((TYPING / "uses.py").read_text())
ROOT = ast.parse((PACKAGE / "__init__.py").read_text())


def declared():
    """The names under TYPE_CHECKING in the package's __init__, each with its module."""
    (block,) = (
        node
        for node in ROOT.body
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
    )
    return {alias.asname or alias.name: node.module for node in block.body for alias in node.names}


def test_checkers_see_the_names_that_are_loaded():
    """The lazy table, the names declared for checkers, and ``__all__`` are one list."""
    names = declared()
    modules = {name for name, module in names.items() if module == "shardrules"}
    assert modules == set(shardrules._MODULES)
    assert set(names) - modules == set(shardrules._HOME)
    assert sorted(shardrules.__all__) == sorted([*shardrules._HOME, "__version__"])
    for name in set(names) - modules:
        assert getattr(importlib.import_module(names[name]), name) is getattr(shardrules, name)


def used(*modules):
    """The attributes of these names that the user's file reads."""
    return {
        node.attr
        for node in ast.walk(USES)
        if isinstance(node, ast.Attribute)
        and isinstance(node.value, ast.Name)
        and node.value.id in modules
    }


@pytest.mark.parametrize(
    "module", ["shardrules", "aot", "errors", "hlo", "registry", "report", "testing"]
)
def test_the_users_file_uses_every_public_name(module):
    if module == "shardrules":
        names = set(shardrules.__all__)
        assert names <= used("sr", "shardrules"), sorted(names - used("sr", "shardrules"))
        return
    names = set(getattr(shardrules, module).__all__)
    assert names <= used(module), sorted(names - used(module))


def test_what_is_planted_is_compared_line_by_line():
    source = "a = 1\nb: str = 1  # wrong\nc = 2\n"
    assert check.planted(source) == {2}
    assert check.differences({2}, {2: "bad"}, "mypy") == []
    assert check.differences({2}, {3: "worse"}, "mypy") == [
        "mypy misses the error in line 2",
        "mypy, line 3: worse",
    ]
    assert len(check.planted((TYPING / "uses.py").read_text())) >= 30
