"""The package's words: phrases that had to be decoded, and names by metaphor, don't come back."""

import pathlib
import re

import pytest

ROOT = pathlib.Path(__file__).parent.parent
FILES = [
    *(ROOT / "shardrules").rglob("*.py"),
    *(ROOT / "docs").rglob("*.md"),
    *(ROOT / "examples").glob("*.py"),
    *(ROOT / name for name in ("README.md", "CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md")),
]

PHRASES = [
    r"left to JAX's errors",
    r"[Ww]ho watches here",
    r"[Aa]sked from when",
    r"[Ww]hat stands (for|in)\b",
    r"\bor die of\b",
    r"for its kind of\b",
    r"of its kind\b",
    r"is not asked\b",
    r"[Cc]all it for none",
    r"\bis no (rule|call|primitive|topology|version|axis|mesh|spec)\b",
    r"equal to itself alone",
    r"not known to be zero",
    r"got the sum of all\b",
    r"makes? it\s+unnecessary",
    r"need not be (there|here)\b",
    r"as it is to JAX",
    r"\bbut for (the|a|an|those|these)\b",
    r"\b(is|are|was|were) told\b",
    r"\blest\b",
    r"[Tt]ell of each",
    r"[Ww]ho does not, is",
]

NAMES = (
    "forgetful looks switching noted telling causes carriers recasts alike paste forms stage "
    "outside listing sends"
).split()
CLASSES = "Known Parts Caller Renewal Instead Seen".split()
FUNCTIONS = "renewed regained is_again hoped".split()


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_nothing_has_to_be_decoded(path):
    text = " ".join(path.read_text().split())
    found = [match[0] for phrase in PHRASES for match in re.finditer(phrase, text)]
    assert found == []


def test_names_say_what_they_are():
    modules = {path.stem for path in FILES if path.suffix == ".py"}
    assert modules & set(NAMES) == set()
    source = "\n".join(path.read_text() for path in FILES if path.suffix == ".py")
    assert re.findall(rf"^class ({'|'.join(CLASSES)})\b", source, re.MULTILINE) == []
    assert re.findall(rf"\bdef ({'|'.join(FUNCTIONS)}|hear_\w+)\b", source) == []
    assert re.findall(r"\b(jax = self\.\w+|self\.jax)\b", source) == []
