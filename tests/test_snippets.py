"""README and docs/: shell and TOML blocks are run and read as they are printed.

Python blocks are tests/test_docs.py's. What installs packages is not run here, but .ci/run does: it
is held to that, and to what setup.cfg and the repository have.
"""

import configparser
import os
import pathlib
import re
import shutil
import subprocess
import sys
import tomllib

import pytest

from shardrules import registry
from shardrules.checks import budget
from shardrules.costs import findings

ROOT = pathlib.Path(__file__).parent.parent
DATA = ROOT / "tests" / "hlo" / "data"
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


COMMANDS = [(page, text) for page, text in blocks("sh") if "shardrules verify" in text]
INSTALLS = [(page, text) for page, text in blocks("sh") if (page, text) not in COMMANDS]


def test_each_block_is_of_a_language_that_is_tried():
    """``{ .python }`` quotes the script of docs/training, which the transcripts run."""
    kinds = {kind for page in PAGES for kind, _ in FENCE.findall(page.read_text())}
    assert kinds == {"python", "text", "sh", "toml", " { .python }"}
    assert len(COMMANDS) == 1 and len(INSTALLS) >= 3 and len(blocks("toml")) == 2


# What each command of the block exits with, as the block's own comment says of the first: the
# programs have findings, and one call in the script would work with its check on.
EXITS = {"verify": 1, "report": 0, "diff": 1, "run": 1, "migrate": 0, "doctor": 0}


@pytest.mark.slow
def test_commands_run(tmp_path):
    [(page, text)] = COMMANDS
    for name in ("step", "before"):
        shutil.copy(DATA / "tpu_uvw.hlo", tmp_path / f"{name}.hlo")
    shutil.copy(DATA / "tpu_copy.hlo", tmp_path / "after.hlo")
    example = FENCE.findall((ROOT / page).read_text())[0]
    assert example[0] == "python"
    (tmp_path / "train.py").write_text(example[1])
    command = tmp_path / "bin" / "shardrules"
    command.parent.mkdir()
    command.write_text(f'#!/bin/sh\nexec {sys.executable} -m shardrules "$@"\n')
    command.chmod(0o755)
    env = {k: v for k, v in os.environ.items() if k != "XLA_FLAGS"}
    env |= {"PATH": f"{command.parent}:{env['PATH']}", "JAX_PLATFORMS": "cpu"}
    exits = {}
    for line in text.splitlines():
        done = subprocess.run(
            ["sh", "-c", line], cwd=tmp_path, env=env, capture_output=True, text=True
        )
        assert "Traceback" not in done.stderr, done.stderr
        exits[line.split()[1]] = done.returncode
    assert exits == EXITS
    assert (tmp_path / "step.html").read_text().startswith("<!doctype html>")


def test_what_is_installed_is_what_ci_installs():
    setup = configparser.ConfigParser()
    setup.read(ROOT / "setup.cfg")
    extras = set(setup["options.extras_require"])
    ci = (ROOT / ".ci" / "run").read_text()
    prose = (ROOT / "README.md").read_text()
    assert set(",".join(re.findall(r"pip install '\.\[([\w,]+)\]'", prose)).split(",")) <= extras
    section = prose[prose.index("## On a fresh machine") : prose.index("## Versions")]
    typed = re.findall(r"^```sh\n(.*)\n```$", section, re.MULTILINE)
    # .ci/run takes them from the page, each by its number.
    assert re.findall(r"\$\(readme (\d)\)?", ci) == [str(n + 1) for n in range(len(typed))]
    for page, text in INSTALLS:
        if page == "README.md" and text.strip() in typed:
            continue
        for step in re.split(r" && |\n", text.strip()):
            words = step.split()
            if words[:2] == ["pip", "install"]:
                continue
            if words[0] in (".", "python3"):  # the environment, which .ci/run makes elsewhere
                assert ".venv" in step
            elif words[0] in ("pytest", "nox"):
                assert re.search(rf"^\s*({words[0]} |if nox )", ci, re.MULTILINE)
                assert " ".join(words[1:]) in ci, (page, step)
            else:
                assert step.removesuffix(" | sh") in ci, (page, step)


def test_an_allowance_is_read(tmp_path):
    [text] = [text for page, text in blocks("toml") if page == "docs/budgets.md"]
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
    page = "docs/libraries.md"
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
