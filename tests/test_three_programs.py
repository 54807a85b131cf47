"""docs/tutorial.md: three programs as new users write them, and each with its advice followed.

That the page prints what the commands print is tests/test_snippets.py's.
"""

import difflib
import json
import pathlib
import re
import subprocess
import sys

import numpy as np
import pytest
from core import versions

pytestmark = pytest.mark.one_lane

ROOT = pathlib.Path(__file__).parent.parent
PAGE = (ROOT / "docs" / "tutorial.md").read_text()
EXAMPLES = ROOT / "examples"
PROGRAMS = {
    "train": (EXAMPLES / "train.py", EXAMPLES / "tutorial" / "train_after.py"),
    "rnn": (EXAMPLES / "tutorial" / "rnn.py", EXAMPLES / "tutorial" / "rnn_after.py"),
    "fsdp": (EXAMPLES / "tutorial" / "fsdp.py", EXAMPLES / "tutorial" / "fsdp_after.py"),
}
each_program = pytest.mark.parametrize("name", PROGRAMS)
# What each program is advised to do, as its followed version does.
ADVICE = {
    "train": (
        f"run `shardrules migrate --diff on.patch {EXAMPLES / 'train.py'}`: it switches on the check"
    ),
    "rnn": "cast that array before the loop instead: x = shardrules.vary(x, 'data')",
    "fsdp": (
        "name what jax.lax.with_sharding_constraint gathers, "
        "w = checkpoint_name(w, 'gathered') (from jax.ad_checkpoint import checkpoint_name), and save it by the policy of "
        "jax.checkpoint, policy=jax.checkpoint_policies.save_only_these_names('gathered')"
    ),
}


def judged(path, tmp_path):
    """Run a program under ``shardrules run``: what it printed, and its step's report."""
    report = tmp_path / f"{path.stem}.json"
    done = subprocess.run(
        [sys.executable, "-m", "shardrules", "run", "--format=json", f"--output={report}", path],
        capture_output=True,
        text=True,
        cwd=ROOT,
    )
    assert done.returncode in (0, 1), done.stderr
    programs = json.loads(report.read_text())["programs"]
    return done.stdout, next(p for p in programs if p["title"] == "jit_step")


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    ["train", "rnn", pytest.param("fsdp", marks=versions.where(versions.names_gathers_by_use))],
)
def test_advice_that_is_followed_saves_what_was_promised(name, tmp_path):
    (printed, before), (again, after) = (judged(path, tmp_path) for path in PROGRAMS[name])
    (values, values_again) = (re.findall(r"\d+\.\d+", text) for text in (printed, again))
    assert values
    np.testing.assert_allclose(list(map(float, values_again)), list(map(float, values)), rtol=1e-5)
    pieces = [one["advice"] for one in before["findings"] + before["hints"]]
    assert pieces
    for piece in pieces:
        assert ADVICE[name] in piece
    promised = before["avoidable"]["bytes"]
    assert promised > 0
    assert before["total"]["wire_bytes"] - after["total"]["wire_bytes"] == promised
    assert after["findings"] == after["hints"] == []


@each_program
def test_the_page_shows_the_program_and_what_is_changed(name):
    before, after = (path.read_text() for path in PROGRAMS[name])
    blocks = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    assert any(block in before for block in blocks)
    docstring = 1  # of one line, and not shown
    lines = [text.splitlines()[docstring:] for text in (before, after)]
    changed = [
        line
        for line in list(difflib.unified_diff(*lines))[2:]
        if line[0] in "+-" and line[1:].strip()
    ]
    shown = [
        [line for line in block.splitlines() if line[:1] in ("+", "-")]
        for block in re.findall(r"```text\n(.*?)```", PAGE, re.DOTALL)
    ]
    assert changed in shown
