"""What ``python tests/typing/check.py`` compares with what mypy and pyright say."""

import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).with_name("typing")))
import check


def test_what_is_planted_is_compared_line_by_line():
    source = "a = 1\nb: str = 1  # wrong\nc = 2\n"
    assert check.planted(source) == {2}
    assert check.differences({2}, {2: "bad"}, "mypy") == []
    assert check.differences({2}, {3: "worse"}, "mypy") == [
        "mypy misses the error in line 2",
        "mypy, line 3: worse",
    ]
    assert len(check.planted(check.USES.read_text())) >= 30
