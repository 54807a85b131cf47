"""The transcripts in docs/training are what the commands print on its training script."""

import pathlib
import re
import sys

import pytest

FOLDER = pathlib.Path(__file__).parent.parent / "docs" / "training"


def unaligned(text):
    """The lines, without the padding under paths, which are longer or shorter elsewhere."""
    return [re.sub(r"[ -]{2,}", " ", line) for line in text.splitlines()]


@pytest.mark.libraries
@pytest.mark.parametrize(
    "name",
    [
        pytest.param("tpu", marks=[pytest.mark.tpu, pytest.mark.slow]),
        pytest.param("gpu", marks=[pytest.mark.gpu, pytest.mark.full]),
        pytest.param("cpu", marks=pytest.mark.full),
        pytest.param("run", marks=pytest.mark.full),
        pytest.param("migrate", marks=pytest.mark.full),
    ],
)
def test_a_transcript_is_what_is_printed(name, request, tmp_path, monkeypatch):
    if name in ("tpu", "gpu"):
        request.getfixturevalue(f"{name}_mesh")
    monkeypatch.syspath_prepend(FOLDER)
    sys.modules.pop("transcripts", None)
    import transcripts

    said = transcripts.written(name, str(tmp_path))
    assert unaligned(said) == unaligned((FOLDER / f"{name}.txt").read_text())
