"""The house: who may import whom, and where JAX's private names may stand."""

import ast
import importlib
import inspect
import pathlib
import re
import subprocess
import sys
import textwrap

import pytest

import shardrules
from shardrules import errors
from shardrules.hooks.handles import ORDER
from shardrules.hooks.state import Hooks

PACKAGE = pathlib.Path(shardrules.__file__).parent

# From each part of the package to the parts that it may import (CONTRIBUTING.md draws them). A part
# is a file or folder at the top, or a folder's folder where it has arrows of its own.
ARROWS = {
    "errors": set(),
    "registry": {"errors"},
    "hooks.door": {"errors", "registry"},
    "hooks": {"errors", "registry", "hooks"},
    "pallas": {"errors", "registry", "hooks.door"},
    "hlo.reader": {"errors"},
    "hlo.known": {"errors", "hlo.reader"},
    "hlo.proof": {"errors", "registry", "hlo.reader", "hlo.known"},
    "hlo": {"hlo"},
    "costs": {"errors", "registry", "hlo"},
    "report": {"errors", "hlo", "costs"},
    "program": {"errors", "registry", "hlo", "hooks"},
    "checks": {"errors", "registry", "hlo", "costs", "report", "program", "hooks"},
    "testing": {"errors", "registry", "hlo", "costs", "report", "program", "checks", "hooks"},
    "aot": {"errors"},
    "__main__": {"errors", "hlo", "costs", "report", "program"},
    "__init__": {"registry", "hooks"},  # the roof: it tells what is below what calls it
}
NO_JAX = {
    "errors",
    "registry",
    "hlo",
    "hlo.reader",
    "hlo.known",
    "hlo.proof",
    "costs",
    "report",
    "__init__",
    "__main__",
}
# Of checks/, which may use jax and hooks, these do without.
NO_JAX_FILES = {"budget.py", "expectations.py", "updates.py", "pytest_plugin.py"}


def imports(source):
    """Yield each module that a source file imports, ``from x import y`` as x.y too."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def part_of(path):
    """The name in ARROWS of a file of the package."""
    pieces = path.relative_to(PACKAGE).with_suffix("").parts
    return ".".join(pieces[:2]) if ".".join(pieces[:2]) in ARROWS else pieces[0]


def wrong_arrows(part, source, no_jax=False):
    """The imports of a source file that its part may not have."""
    allowed = ARROWS[part] | {part}
    for name in imports(source):
        pieces = name.split(".")
        if pieces[0] in ("jax", "jaxlib") and (no_jax or part in NO_JAX):
            yield f"{part} -> {name}"
        if pieces[0] != "shardrules" or len(pieces) == 1:
            continue
        if not {pieces[1], ".".join(pieces[1:3])} & allowed and not any(
            one.startswith(f"{pieces[1]}.") and len(pieces) == 2 for one in allowed
        ):
            yield f"{part} -> {name}"


def circles(arrows):
    """The files that import each other, however indirectly: from each to those it imports."""
    reached = {name: set(direct) for name, direct in arrows.items()}
    for middle in arrows:
        for name in arrows:
            if middle in reached[name]:
                reached[name] |= reached[middle]
    return sorted(name for name in arrows if name in reached[name])


def file_arrows():
    """From each module of the package to those that it imports, wherever the import stands."""
    names = {}
    for path in FILES:
        pieces = path.relative_to(PACKAGE.parent).with_suffix("").parts
        names[".".join(pieces[:-1] if pieces[-1] == "__init__" else pieces)] = path
    return {
        name: {one for one in imports(path.read_text()) if one in names and one != name}
        - {name.rpartition(".")[0]}
        for name, path in names.items()
        if name != "shardrules"
    }


def private_names(source):
    """The lines that name JAX's internals, read its version, or compare any with a number."""
    lines = source.splitlines()
    for number, line in enumerate(lines, 1):
        if any(
            word in line
            for word in (
                "jax._src",
                "jaxlib.",
                "jax.__version__",
                "jax.version",
                "__version_info__",
            )
        ):
            yield f"{number}: {line.strip()}"
    for name in imports(source):
        if name.startswith(("jax.version", "jax.__version__", "shardrules.hooks.door.versions")):
            yield f"imports {name}"
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Compare) and any(map(_is_of_a_version, ast.walk(node))):
            yield f"{node.lineno}: {lines[node.lineno - 1].strip()}"


def _is_of_a_version(node):
    """Whether an expression is a version's number, or asks for a version."""
    if isinstance(node, ast.Constant):
        return isinstance(node.value, str) and bool(re.fullmatch(r"\d+(\.\d+)+\w*", node.value))
    if isinstance(node, ast.Call):
        called = getattr(node.func, "attr", getattr(node.func, "id", ""))
        return called in ("version", "Version", "parse_version", "distribution")
    return False


FILES = sorted(PACKAGE.rglob("*.py"))
ROOT = pathlib.Path(__file__).parent.parent
USERS = sorted((ROOT / "examples").glob("*.py"))


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_imports_run_one_way(path):
    no_jax = path.parent.name == "checks" and path.name in NO_JAX_FILES
    assert list(wrong_arrows(part_of(path), path.read_text(), no_jax)) == []


# Still to be mended.
CIRCLE = {"shardrules.pallas.actions", "shardrules.pallas.events"}
LONG = {
    "costs/findings.py",
    "hlo/proof/verdict.py",
    "hlo/reader/parser.py",
    "hooks/autodiff/custom_vjp.py",
    "hooks/calls/mesh_kernels.py",
    "hooks/door/symbols.py",
    "pallas/actions.py",
    "pallas/events.py",
    "pallas/proof.py",
    "registry/rule.py",
}


def test_there_is_no_circle():
    assert set(circles(file_arrows())) <= CIRCLE


def test_the_test_of_circles_can_fail():
    assert circles({"a": {"b"}, "b": {"c"}, "c": {"a"}, "d": {"a"}}) == ["a", "b", "c"]


def test_files_and_folders_stay_small():
    long = [path for path in FILES if len(path.read_text().splitlines()) > 500]
    assert {str(path.relative_to(PACKAGE)) for path in long} <= LONG
    folders = {path.parent for path in FILES}
    assert [str(one) for one in folders if len(list(one.glob("*.py"))) > 13] == []


@pytest.mark.parametrize(
    "part, source",
    [
        ("hlo", "import jax"),
        ("hlo", "def f():\n    from jax import numpy"),
        ("hlo", "from shardrules import hooks"),
        ("hlo.proof", "from shardrules.hooks.door import compat"),
        ("hlo.reader", "from shardrules.hlo.proof import loops"),
        ("hooks.door", "from shardrules.hooks.calls import opaque"),
        ("registry", "from shardrules.hooks import install"),
        ("hooks", "from shardrules import pallas"),
        ("hooks", "import shardrules.testing"),
        ("pallas", "from shardrules.hooks.calls import opaque"),
        ("aot", "from shardrules import registry"),
        ("report", "from shardrules import testing"),
    ],
)
def test_the_test_of_arrows_can_fail(part, source):
    assert list(wrong_arrows(part, source))


# The docstrings of these copy a fact from JAX and say from where; a test compares the two.
CITED = {"table.py": "jax._src.interpreters.mlir.sanitize_name"}


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_jax_internals_stand_in_hooks_alone(path):
    if part_of(path).startswith("hooks"):
        return
    cited = CITED.get(path.name, "\0")
    assert [line for line in private_names(path.read_text()) if cited not in line] == []


@pytest.mark.parametrize("path", USERS, ids=lambda p: p.name)
def test_examples_are_of_every_jax(path):
    assert list(private_names(path.read_text())) == []


@pytest.mark.parametrize(
    "source",
    [
        "import jax\nif jax.__version__ > limit: pass",
        "import jax\nif jax.__version_info__ < (0, 5): pass",
        "from jax import __version__",
        "from jax.version import __version__ as v",
        "from jax._src import core",
        "from shardrules.hooks.door import versions",
        "from shardrules.hooks.door.versions import order",
        "import jaxlib.xla_client",
        "new = version_of_jax() >= '0.6.1'",
        "new = '0.10' in supported",
        "if Version(found) < limit: pass",
        "import importlib.metadata as m\nold = m.version('jax') in OLD",
    ],
)
def test_the_test_of_internals_can_fail(source):
    assert list(private_names(source))


def test_the_test_of_internals_lets_others_pass():
    assert (
        list(
            private_names(
                "x = (0, 5)\nif x > (0, 4) and name != '0.5 s': f(f'{jax}==0.5.1')\n"
                "import importlib.metadata as m\nprint(m.version('jax'))"
            )
        )
        == []
    )


def test_importing_needs_no_jax():
    code = textwrap.dedent("""
        import sys
        sys.modules["jax"] = None  # an import of it raises
        import shardrules
        from shardrules import hlo, report
        shardrules.register("k", shardrules.no_communication)
        assert shardrules.no_communication(print)
        assert not [name for name in sys.modules if name.startswith("jax.")]
    """)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_every_class_of_hooks_is_in_the_order_of_installing():
    found = set()
    for path in (PACKAGE / "hooks").rglob("*.py"):
        name = ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts)
        module = importlib.import_module(name.removesuffix(".__init__"))
        found |= {
            value
            for value in vars(module).values()
            if isinstance(value, type) and value.__module__ == module.__name__
            if issubclass(value, Hooks) or value.__name__.endswith("Hooks")
        }
    assert len(ORDER) == len(set(ORDER)) and found - {Hooks} == set(ORDER)
    for one in ORDER:
        assert list(inspect.signature(one).parameters) == ["jax", "state"]
        assert list(inspect.signature(one.install).parameters) == ["self", "patches"]
        assert one.install is not Hooks.install


def test_public_names_are_all_there():
    for name in shardrules.__all__:
        assert getattr(shardrules, name) is not None
    with pytest.raises(AttributeError, match="has no attribute 'nothing'; its public names are"):
        shardrules.nothing


def test_every_error_is_a_builtin_too():
    for name in errors.__all__:
        error = getattr(errors, name)
        assert issubclass(error, errors.ShardrulesError)
        assert name == "ShardrulesError" or any(
            base.__module__ == "builtins" and base is not Exception and issubclass(base, Exception)
            for base in error.__mro__[1:-2]
        )


def test_normalised_names_are_those_of_jax():
    from jax._src.interpreters import mlir

    from shardrules.registry import normalise

    for name in ("foo bar/1", "a.b-c", "é ", "x" * 99, "jit(f)/kernel<4>"):
        assert normalise(name) == mlir.sanitize_name(name)


def test_the_readme_shows_the_example_that_is_there():
    root = pathlib.Path(__file__).parent.parent
    readme = (root / "README.md").read_text()
    example = (root / "examples" / "quickstart.py").read_text()
    assert f"```python\n{example}```" in readme
