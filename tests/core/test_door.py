"""The table of JAX's private names: what is not as it was read is named, and nothing is changed."""

from __future__ import annotations

import functools
import json
import os
import pathlib
import subprocess
import sys

import jax
import pytest
from raising import raises

from core import versions as of_tests
from core.matrix import VERSIONS
from shardrules.door import lookup, seams, watching
from shardrules.door.symbols import SYMBOLS, WATCHED
from shardrules.errors import UnsupportedJaxError

HERE = [symbol for symbol in SYMBOLS if symbol.exists_in(jax.__version__)]
WATCHED_HERE = [symbol for symbol in WATCHED if symbol.exists_in(jax.__version__)]
TAKING = pathlib.Path(__file__).with_name("door_worker.py")


@functools.lru_cache
def refusals():
    """What ``install()`` said where each symbol was taken away, and where it was changed."""
    done = subprocess.run(
        [sys.executable, str(TAKING)],
        text=True,
        capture_output=True,
        env={**os.environ, "PYTHONPATH": str(TAKING.parents[2])},
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@of_tests.where(of_tests.here)
@pytest.mark.parametrize("symbol", HERE, ids=lambda symbol: symbol.key)
def test_a_symbol_that_is_gone_is_named(symbol):
    assert refusals()[symbol.key]["gone"] == (
        f"shardrules has no hooks for JAX {jax.__version__}: {symbol.path} is missing. "
        f"It is used for: {symbol.reason} (read in JAX {symbol.versions}). Nothing was changed. "
        "Install JAX 0.4.28 to 0.12, or a newer shardrules."
    )


WITH_PARAMETERS = [symbol for symbol in HERE if symbol.parameters]


@of_tests.where(of_tests.here)
@pytest.mark.parametrize("symbol", WITH_PARAMETERS, ids=lambda symbol: symbol.key)
def test_a_parameter_of_another_name_is_named(symbol):
    renamed = refusals()[symbol.key]["renamed"]
    assert set(renamed) == set(symbol.parameters)
    for parameter, message in renamed.items():
        others = [p for p in symbol.parameters if p != parameter]
        takes = f"(it takes {', '.join(['new_name', *others])})"
        assert f"{symbol.path} no longer takes {parameter} {takes}" in message


def test_of_each_name_there_is_one_row_for_each_version():
    for version in (*VERSIONS, "0.13.0.dev1", "1.0"):
        keys = [symbol.key for symbol in SYMBOLS if symbol.exists_in(version)]
        assert len(keys) == len(set(keys)) > 30, version
        keys = [symbol.key for symbol in WATCHED if symbol.exists_in(version)]
        assert len(keys) == len(set(keys)) > 15, version
    assert all(symbol.reason and symbol.parameters.count("") == 0 for symbol in SYMBOLS + WATCHED)


@pytest.mark.parametrize(
    "versions, there, not_there",
    [
        ("0.6.0", ("0.6.0", "0.6.0.post1"), ("0.5.3", "0.6.1")),
        ("0.4.28-0.5.3", ("0.4.28", "0.5.3", "0.5.0"), ("0.5.4", "0.6.0", "0.13.0")),
        ("0.6.0-0.9", ("0.6.2", "0.9.0", "0.9.2"), ("0.10.0", "0.5.3")),
        ("0.8.2+", ("0.8.2", "0.10.2", "0.13.0.dev1", "1.0"), ("0.8.1", "0.8")),
    ],
)
def test_where_a_symbol_exists(versions, there, not_there):
    (symbol,) = lookup.read(f"why\n    key  {versions}  .core:name(a, b)\n")
    assert (symbol.key, symbol.path, symbol.reason) == ("key", "jax._src.core:name", "why")
    assert symbol.parameters == ("a", "b")
    assert [v for v in there + not_there if symbol.exists_in(v)] == [*there]


@pytest.mark.parametrize("row", ["    key .core:name", "    key 0.6.0 a b", "    0.6.0 .core:name"])
def test_a_row_that_is_not_written_so_is_refused(row):
    with pytest.raises(ValueError, match="no row of the table of symbols: '    "):
        lookup.read(f"why\n{row}\n")


@pytest.mark.parametrize("symbol", WATCHED_HERE, ids=lambda symbol: symbol.key)
def test_what_a_watch_needs_is_there(symbol):
    value, (owner, name), problem = lookup.look(symbol)
    assert problem == "" and value is not None and hasattr(owner, name)


def test_what_a_watch_misses_is_named(monkeypatch):
    (lost,) = lookup.read("what it is for\n    lost  0.4.28+  .core:Primitive.lost\n")
    monkeypatch.setattr(seams, "WATCHED", (lost,))
    seams._found.cache_clear()
    with raises(UnsupportedJaxError, version=jax.__version__, symbol=lost.path):
        seams.intercept("lost", lambda original: None)
    seams._found.cache_clear()


def test_watches_end_in_any_order():
    """The first to come goes first: the second one still hears, and JAX gets back what it had."""

    class Hears(watching.Listener):
        def __init__(self):
            self.count = 0

        def reading(self, array, how):
            self.count += 1

    (symbol,) = [symbol for symbol in WATCHED_HERE if symbol.key == "read"]
    before, reads, listener = lookup.look(symbol)[0], [], Hears()
    ends = watching.on_reads(reads.append)
    stops = watching.start(listener)
    float(jax.numpy.ones(()))
    ends()
    float(jax.numpy.ones(()))
    stops()
    float(jax.numpy.ones(()))
    assert (len(reads), listener.count) == (1, 2)
    assert lookup.look(symbol)[0] is before
