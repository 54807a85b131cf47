"""The house: who may import whom, and where JAX's private names may stand."""

import ast
import collections
import importlib
import inspect
import pathlib
import re
import subprocess
import sys
import textwrap

import covered
import pytest
from house import (
    FILES,
    PACKAGE,
    ROOT,
    SHARED,
    circles,
    file_arrows,
    imports,
    map_of,
    part_of,
    shared_in_package,
    shared_names,
    wrong_arrows,
    wrong_arrows_of,
)

import shardrules
from shardrules import errors
from shardrules.hooks.order import SETS, TYPES
from shardrules.hooks.state import Hooks
from shardrules.hooks.types.funnel import Funnel


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
        if name.startswith(("jax.version", "jax.__version__", "shardrules.door.versions")):
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


USERS = sorted((ROOT / "examples").glob("*.py"))


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_imports_run_one_way(path):
    assert wrong_arrows_of(path) == []


def test_there_is_no_circle():
    assert circles(file_arrows()) == []  # printed by python tests/house.py


def test_the_test_of_circles_can_fail():
    assert circles({"a": {"b"}, "b": {"c"}, "c": {"a"}, "d": {"a"}}) == ["a", "b", "c"]


def test_one_name_is_one_class():
    """A noun means one thing; ``house.SHARED`` says where two classes have to share one."""
    assert set(shared_in_package()) == set(SHARED)


def test_the_test_of_names_can_fail():
    one, other = "class Step: ...", "def f():\n    class _Step: ..."
    assert dict(shared_names({"a.py": one, "b.py": other})) == {"Step": ["a.py", "b.py"]}
    assert dict(shared_names({"a.py": one, "b.py": "class Steps: ...\nStep = 1"})) == {}


def wrong_map(text):
    """Paths that the page draws and that aren't there, and paths that it lacks."""
    paths = map_of(text)
    there = {str(path.relative_to(PACKAGE)) for path in FILES}
    folders = {f"{path.parent.relative_to(PACKAGE)}/" for path in FILES} - {"./"} | {"targets/"}
    yield from (f"{path} is not there" for path in paths - there - folders)
    yield from (f"{path} is not drawn" for path in folders - paths)
    yield from (f"{path} is not drawn" for path in there - paths if "/" not in path)


MAP = (ROOT / "CONTRIBUTING.md").read_text()


def test_the_map_is_that_of_the_tree():
    """Every folder and every file at the top has its line in CONTRIBUTING.md."""
    assert list(wrong_map(MAP)) == []


def undecided(table):
    """Yield the functions that the table of questions names, and that aren't where it says."""
    for path, functions in re.findall(
        r"`(\w[\w/]*\.py)`: (`\w+`(?:(?:, (?:then )?| and )`\w+`)*)", table
    ):
        code = (ROOT / "shardrules" / path).read_text()
        for name in re.findall(r"`(\w+)`", functions):
            if not re.search(rf"^ *def {name}\(", code, re.MULTILINE):
                yield f"{path}: {name}"


def test_questions_lead_to_functions():
    table = MAP[MAP.index("### Where it is decided") : MAP.index("### The path of one kernel call")]
    assert list(undecided(table)) == []
    wrong = table.replace("`why_left`", "`why_kept`").replace(
        "`_dma`, `_signal`", "`_dma`, `_single`"
    )
    assert set(undecided(wrong)) == {"unchecked/sites.py: why_kept", "pallas/actions.py: _single"}


@pytest.mark.parametrize(
    "line, instead, wrong",
    [
        ("  aot.py ", "  oat.py ", {"aot.py is not drawn", "oat.py is not there"}),
        ("    sets/ ", "    gets/ ", {"hooks/sets/ is not drawn", "hooks/gets/ is not there"}),
    ],
)
def test_the_test_of_the_map_can_fail(line, instead, wrong):
    assert line in MAP
    assert set(wrong_map(MAP.replace(line, instead))) == wrong


def test_files_and_folders_stay_small():
    assert [str(path) for path in FILES if len(path.read_text().splitlines()) > 505] == []
    modules = collections.Counter(path.parent for path in FILES if path.name != "__init__.py")
    assert [str(folder) for folder, count in modules.items() if count > 15] == []


def test_each_file_of_tests_has_a_name_of_its_own():
    names = collections.Counter(path.name for path in (ROOT / "tests").rglob("test_*.py"))
    assert [name for name, count in names.items() if count > 1] == []


def test_modules_that_the_tests_take_little_of_are_named():
    files = {
        name: {"summary": {"percent_covered": p}}
        for name, p in (("a", 90.0), ("b", 89.9), ("c", 3.0))
    }
    assert list(covered.below(files)) == [("c", 3.0), ("b", 89.9)]


def test_equations_are_read_in_three_places():
    """What reads a jaxpr another way has an idea of its own of loops, branches and refs."""
    found = [
        str(p.relative_to(PACKAGE))
        for p in FILES
        if re.search(r"\bin [\w.]+\.eqns\b", p.read_text())
    ]
    assert found == ["jaxprs/fold.py", "jaxprs/rewrite.py", "jaxprs/walk.py"]


def test_the_hooks_keep_one_thread_local():
    held = [str(p.relative_to(PACKAGE)) for p in FILES if "threading.local" in p.read_text()]
    assert [path for path in held if path.startswith("hooks")] == ["hooks/frames.py"]


def test_what_runs_before_a_commit_is_what_decides():
    entries = re.findall(r"entry: (.*)", (ROOT / ".pre-commit-config.yaml").read_text())
    decides = (ROOT / ".ci" / "run").read_text().splitlines()
    assert len(entries) >= 5
    for entry in entries:
        assert any(line.strip().removeprefix("quietly ").startswith(entry) for line in decides), (
            entry
        )


@pytest.mark.parametrize(
    "part, source",
    [
        ("hlo", "import jax"),
        ("hlo", "def f():\n    from jax import numpy"),
        ("hlo", "from shardrules import hooks"),
        ("hlo.proof", "from shardrules.door import internals"),
        ("hlo.reader", "from shardrules.hlo.proof import loops"),
        ("door", "from shardrules.hooks.types import opaque"),
        ("registry", "from shardrules.hooks import install"),
        ("hooks", "from shardrules import pallas"),
        ("hooks.types", "from shardrules.hooks import install"),
        ("hooks.types", "from shardrules.hooks.retyping import retyping"),
        ("hooks.retyping", "from shardrules.hooks.cotangents import bwd"),
        ("hooks.cotangents", "from shardrules.hooks.casts import placing"),
        ("hooks.casts", "from shardrules.hooks.sets import rep"),
        ("hooks", "import shardrules.testing"),
        ("pallas", "from shardrules.hooks.types import opaque"),
        ("aot", "from shardrules import registry"),
        ("report", "from shardrules import testing"),
    ],
)
def test_the_test_of_arrows_can_fail(part, source):
    assert list(wrong_arrows(part, source))


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_jax_internals_stand_behind_the_door_alone(path):
    if part_of(path) == "door":
        return
    assert list(private_names(path.read_text())) == []


def test_the_form_of_the_check_is_chosen_once():
    """Replication sets or axis types: install() chooses the hooks, and nothing else asks."""
    asking = {
        str(path.relative_to(PACKAGE)): path.read_text().count("door.typed")
        for path in FILES
        if "door.typed" in path.read_text()
    }
    assert asking == {"hooks/install.py": 1}


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
        "from shardrules.door import versions",
        "from shardrules.door.versions import order",
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
    for path in (*(PACKAGE / "hooks").rglob("*.py"), PACKAGE / "unchecked" / "hooks.py"):
        name = ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts)
        module = importlib.import_module(name.removesuffix(".__init__"))
        found |= {
            value
            for value in vars(module).values()
            if isinstance(value, type) and value.__module__ == module.__name__
            if issubclass(value, Hooks) or value.__name__.endswith("Hooks")
        }
    assert len(TYPES) == len(set(TYPES)) and len(SETS) == len(set(SETS))
    assert found - {Hooks, Funnel} == {*TYPES, *SETS} - {Funnel}
    for one in {*TYPES, *SETS}:
        assert list(inspect.signature(one).parameters) == ["door", "state"]
        assert list(inspect.signature(one.install).parameters) == ["self", "patches"]


ROOF = ast.parse((PACKAGE / "__init__.py").read_text())
USES = ast.parse((ROOT / "tests" / "typing" / "uses.py").read_text())


def declared():
    """The names under TYPE_CHECKING in the package's __init__, each with its module."""
    (block,) = (
        node
        for node in ROOF.body
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


@pytest.mark.parametrize(
    "module", ["shardrules", "aot", "errors", "hlo", "registry", "report", "testing"]
)
def test_what_users_may_call_says_what_it_does(module):
    """ruff asks for no docstring, since inside of the package a name and its types may do."""
    module = shardrules if module == "shardrules" else getattr(shardrules, module)
    silent = []
    for name in module.__all__:
        value = getattr(module, name)
        if not inspect.isclass(value) and not inspect.isfunction(value):
            continue
        members = vars(value) if inspect.isclass(value) else {}
        silent += [name] * (not value.__doc__) + [
            f"{name}.{member}"
            for member, made in members.items()
            if not member.startswith("_")
            if inspect.isfunction(made) or isinstance(made, (property, classmethod, staticmethod))
            if not made.__doc__
        ]
    assert not silent


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
