"""README and docs/: shell and TOML blocks are run and read as they are printed.

Python blocks are tests/test_docs.py's. What installs packages is run by .ci/run, not here: the pages
are held to it, and to what setup.cfg and the repository have.
"""

import configparser
import os
import pathlib
import re
import shlex
import shutil
import subprocess
import sys
import tomllib

import pytest
from core import versions

from shardrules import registry
from shardrules.checks import budget
from shardrules.costs import findings

ROOT = pathlib.Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
FENCE = re.compile(r"^```([^`\n]+)\n(.*?)^```$", re.DOTALL | re.MULTILINE)


def blocks(language):
    """From each block of a language to the page that has it."""
    return [
        (page.relative_to(ROOT).as_posix(), text)
        for page in PAGES
        for kind, text in FENCE.findall(page.read_text())
        if kind.strip() == language
    ]


INSTALLS = blocks("sh")


def test_each_block_is_of_a_language_that_is_tried():
    kinds = {kind for page in PAGES for kind, _ in FENCE.findall(page.read_text())}
    assert kinds == {"python", "text", "sh", "toml"}
    assert len(INSTALLS) >= 5 and len(blocks("toml")) == 2


def marks(text):
    """What a transcript asks of JAX."""
    return [versions.where(versions.names_gathers_by_use)] if "/fsdp.py" in text else []


TRANSCRIPTS = [
    pytest.param(page, text, id=page, marks=marks(text))
    for page, text in blocks("text")
    if text.startswith("$ ")
]
# JAX 0.12 traces a jit again whose first trace was the first to import these: they add to the key
# of its cache. The pages show programs that are compiled once.
IMPORTED_BEFORE = "from jax.experimental.pallas import fuser, tpu\n"


def wrong_lines(shown, printed):
    """The lines of a transcript that a command didn't print, in this order; ``...`` leaves text out."""
    rest = iter([re.sub(r"[ -]{2,}", " ", line).strip() for line in printed.splitlines()])
    for line in shown.splitlines():
        start, dots, _ = re.sub(r"[ -]{2,}", " ", line).strip().partition(" ...")
        if start in ("", "..."):
            continue
        if not any(other.startswith(start) if dots else other == start for other in rest):
            yield line


@pytest.mark.one_lane
@pytest.mark.parametrize("page, text", TRANSCRIPTS)
def test_a_transcript_is_what_is_printed(page, text, tmp_path):
    """Commands that a page shows behind ``$``, run in a copy of what they name."""
    shutil.copytree(ROOT / "examples", tmp_path / "examples")
    env = {k: v for k, v in os.environ.items() if not k.startswith(("JAX_", "XLA_", "SHARDRULES_"))}
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "sitecustomize.py").write_text(IMPORTED_BEFORE)
    paths = [str(tmp_path / "site"), *filter(None, [env.get("PYTHONPATH")])]
    env["PYTHONPATH"] = os.pathsep.join(paths)
    for command, shown in re.findall(r"^\$ (.*)\n((?:(?!\$ ).*\n)*)", text, re.MULTILINE):
        assert command.startswith(("shardrules ", "pytest "))
        done = subprocess.run(
            [sys.executable, "-m", *shlex.split(command)],
            cwd=tmp_path,
            env=env,
            capture_output=True,
            text=True,
        )
        assert list(wrong_lines(shown, done.stdout + done.stderr)) == [], command


def test_a_transcript_that_is_wrong_is_seen():
    assert list(wrong_lines("a  b\n...\nd ...\n", "a b\nc\nd e\n")) == []
    assert list(wrong_lines("a\nd\nc\n", "a\nc\nd\n")) == ["c"]


def test_what_is_installed_is_what_ci_installs():
    setup = configparser.ConfigParser()
    setup.read(ROOT / "setup.cfg")
    extras = set(setup["options.extras_require"])
    ci = (ROOT / ".ci" / "run").read_text()
    readme = (ROOT / "README.md").read_text()
    section = readme[readme.index("## On a fresh machine") :]
    typed = [text for kind, text in FENCE.findall(section) if kind == "sh"]
    # .ci/run takes them from the page, each by its number.
    assert re.findall(r"\$\(readme (\d)", ci) == [str(n + 1) for n in range(len(typed))]
    for page, text in INSTALLS:
        assert set(re.findall(r"'\.\[(\w+)\]'", text)) <= extras
        if page == "README.md" and text in typed:
            continue
        for step in re.split(r" && |\n", text.strip()):
            if step.startswith("pip install "):
                assert step.removeprefix("pip install ") == "shardrules" or "'.[" in step, step
            elif step.startswith("shardrules "):
                name = step.split()[1]
                assert (ROOT / "shardrules" / "commands" / f"{name}.py").exists(), (page, step)
            else:
                assert step.removesuffix(" | sh") in ci + readme, (page, step)


def test_the_readme_s_tables_have_their_headings():
    readme = (ROOT / "README.md").read_text()
    (shown,) = (text for kind, text in FENCE.findall(readme) if "$ shardrules migrate" in text)
    for heading in ("calls | verdict", "bytes now | bytes with the patch"):
        row = shown[: shown.index(heading)].count("\n") + 1
        cells = [line.count(" | ") for line in shown.splitlines()[row - 1 : row + 1]]
        assert cells[0] == cells[1], heading


def test_an_allowance_is_read(tmp_path):
    [text] = [text for page, text in blocks("toml") if page == "docs/ci.md"]
    path = tmp_path / "step.toml"
    path.write_text(text)
    allowed = budget.allowances(path)
    assert allowed == {
        "redundant backward all-reduce(model)": (
            "issue 12: attention is still under check_vma=False"
        )
    }
    assert findings.Allowances(allowed).selectors


def test_an_entry_point_ships_rules(tmp_path, monkeypatch):
    """As pip would install it: the metadata's entry points, and the module that the page shows."""
    page = "docs/rules.md"
    [text] = [text for where, text in blocks("toml") if where == page]
    [(group, points)] = tomllib.loads(text)["project"]["entry-points"].items()
    [source] = [text for where, text in blocks("python") if where == page and "# mylib/" in text]
    file = tmp_path / re.match(r"# (\S+)\n", source)[1]
    file.parent.mkdir()
    file.write_text(source)
    metadata = tmp_path / "mylib-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: mylib\nVersion: 1.0\n")
    lines = [f"[{group}]", *(f"{name} = {value}" for name, value in points.items())]
    (metadata / "entry_points.txt").write_text("\n".join(lines) + "\n")
    monkeypatch.syspath_prepend(tmp_path)
    found = registry.Registry(entry_points=group).find("mylib_ffi_norm")
    assert (found.library, repr(found.rule)) == ("mylib", "no_communication")


@pytest.mark.parametrize("broken", ["[[allow]\n", '[[allow]]\nwhat = "x"\n'])
def test_a_broken_block_is_seen(broken, tmp_path):
    path = tmp_path / "step.toml"
    path.write_text(broken)
    with pytest.raises(budget.BudgetError):
        budget.allowances(path)
