"""What is said where a compiler, a topology or a GPU's description is missing."""

import importlib.util

import pytest

from shardrules import aot
from shardrules.errors import AotError


@pytest.fixture
def bare(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)


@pytest.mark.parametrize(
    "platform, package", [("tpu", "'libtpu"), ("gpu", "--no-deps jax-cuda12-")]
)
def test_a_missing_compiler_is_installed_by_this_python(bare, platform, package):
    """A bare pip may be another Python's: an environment that uv makes has none."""
    assert aot.missing_plugin(platform).startswith(f"python -m pip install {package}")


def test_a_missing_compiler_is_an_error_with_the_command(bare):
    with pytest.raises(AotError, match="takes\n    python -m pip install ") as caught:
        aot.tpu("v5e:2x4")
    assert caught.value.command == aot.missing_plugin("tpu")


@pytest.mark.parametrize(
    "make, said",
    [
        (lambda: aot.tpu("v5e"), "one looks like 'v5e:2x4'"),
        (lambda: aot.gpu("H1000", 8), "there is one of b200, h100"),
        (lambda: aot.gpu("h100", 12), "give 1 to 8, or a multiple of 8"),
        (lambda: aot.missing_plugin("cuda"), "pass 'tpu' or 'gpu'"),
    ],
)
def test_what_is_not_known_is_said_with_what_is(make, said):
    with pytest.raises(AotError, match=said):
        make()
