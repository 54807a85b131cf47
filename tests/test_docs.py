"""The pages of docs/: each Python block runs, and prints what the text block after it says."""

import contextlib
import io
import pathlib
import re

import pytest

DOCS = pathlib.Path(__file__).parent.parent / "docs"
PAGES = sorted((DOCS / "costs").glob("*.md"))
BLOCK = re.compile(r"```python\n(.*?)```\n(?:```text\n(.*?)```)?", re.DOTALL)


def run(page):
    """Yield what each block of a page printed, and what the page says that it prints."""
    names = {}
    for code, shown in BLOCK.findall(page):
        out = io.StringIO()
        with contextlib.redirect_stdout(out):
            exec(compile(code, "<docs>", "exec"), names)
        said = [line.rstrip() for line in out.getvalue().splitlines()]
        yield said, shown.splitlines()


@pytest.mark.filterwarnings("ignore:Some donated buffers")
@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.stem)
def test_a_page_shows_what_happens(page):
    for said, shown in run(page.read_text()):
        assert said == shown


def test_a_page_that_is_wrong_fails():
    [(said, shown)] = run("```python\nprint(1 + 1)\n```\n```text\n3\n```\n")
    assert said != shown
