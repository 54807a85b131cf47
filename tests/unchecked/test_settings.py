"""Settings of the process that a function changes are put back, or it isn't traced to look at it."""

import atexit
import bz2
import collections
import csv
import decimal
import functools
import gc
import hashlib
import hmac
import io
import itertools
import json
import locale
import logging
import lzma
import mmap
import os
import re
import signal
import socket
import sqlite3
import sys
import threading
import types
import warnings
import weakref
import zlib
from concurrent.futures import ThreadPoolExecutor
from decimal import getcontext

import jax.numpy as jnp
import numpy as np
import pytest
import scipy.spatial
from jax._src.lib import xla_client

from shardrules.unchecked.python_state import Kept

NAMES = (f"shardrules_test_{n}" for n in itertools.count())


def of_a_logger():
    logger = logging.getLogger(next(NAMES))

    def draw():
        logger.setLevel(logger.level + 1)
        return logger.level, logger.isEnabledFor(2)

    return draw


def of_its_handlers():
    logger = logging.getLogger(next(NAMES))

    def draw():
        logger.addHandler(logging.NullHandler())
        return len(logger.handlers)

    return draw


def of_a_handler():
    handler = logging.NullHandler()

    def draw():
        handler.setLevel(handler.level + 1)
        handler.addFilter(lambda record: True)
        return handler.level, len(handler.filters)

    return draw


def of_a_named_logger():
    name = next(NAMES)
    logging.getLogger(name)

    def draw():
        logging.getLogger(name).setLevel(logging.getLogger(name).level + 1)
        return logging.getLogger(name).level

    return draw


def of_a_new_logger():
    name = next(NAMES)

    def draw():
        logging.getLogger(name).addHandler(logging.NullHandler())
        return len(logging.getLogger(name).handlers)

    return draw


def of_all_loggers():
    logging.disable(0)

    def draw():
        logging.disable(logging.root.manager.disable + 1)
        return logging.root.manager.disable

    return draw


def of_decimal():
    decimal.getcontext().prec = 9

    def draw():
        decimal.getcontext().prec += 1
        return decimal.Decimal(1) / 3

    return draw


def of_decimal_by_its_own_name():
    getcontext().prec = 9

    def draw():
        getcontext().prec += 1
        return getcontext().prec

    return draw


def of_another_context():
    decimal.setcontext(decimal.Context(prec=9))

    def draw():
        decimal.setcontext(decimal.Context(prec=decimal.getcontext().prec + 1))
        return decimal.getcontext().prec

    return draw


def of_a_context():
    context = decimal.Context(prec=9)

    def draw():
        context.prec += 1
        return context.divide(1, 3)

    return draw


def of_signals():
    """It asks for no setting: a flag of the context."""
    context = decimal.Context(prec=9)
    context.clear_flags()

    def draw():
        context.prec += 1
        context.divide(1, 3)
        was = context.flags[decimal.Inexact]
        return was, context.prec

    return draw


def of_warnings():
    warnings.resetwarnings()

    def draw():
        warnings.filterwarnings("ignore", message=str(len(warnings.filters)))
        return len(warnings.filters)

    return draw


def of_the_path():
    sys.path[:] = sys.path[:1]

    def draw():
        sys.path.append("folder")
        return len(sys.path)

    return draw


def of_a_new_path():
    sys.path = ["folder"]

    def draw():
        sys.path = [*sys.path, "folder"]
        return len(sys.path)

    return draw


def of_the_path_inside():
    sys.path[:] = sys.path[:1]

    def draw():
        import sys

        sys.path.append("folder")
        return len(sys.path)

    return draw


PUT_BACK = {
    kind.__name__: kind
    for kind in (
        of_a_logger,
        of_its_handlers,
        of_a_handler,
        of_a_named_logger,
        of_a_new_logger,
        of_all_loggers,
        of_decimal,
        of_decimal_by_its_own_name,
        of_another_context,
        of_a_context,
        of_signals,
        of_warnings,
        of_the_path,
        of_a_new_path,
        of_the_path_inside,
    )
}


@pytest.fixture(autouse=True)
def as_it_was(monkeypatch):
    monkeypatch.setattr(sys, "path", [*sys.path])
    disable = logging.root.manager.disable
    with warnings.catch_warnings(), decimal.localcontext():
        yield
    logging.disable(disable)


@pytest.mark.parametrize("kind", PUT_BACK)
def test_a_setting_is_put_back(kind):
    draw = PUT_BACK[kind]()
    expected = [draw() for _ in range(3)]
    draw = PUT_BACK[kind]()
    kept = Kept(lambda: draw())
    assert not kept.why
    assert kept.put_back() == ()
    assert [draw(), draw()] == expected[:2]
    two = kept.put_back()
    assert [draw() for _ in range(3)] == expected
    assert two and kept.put_back() != two
    assert [draw(), draw()] == expected[:2] and kept.put_back() == two


def test_which_loggers_are_on_is_read_anew():
    logger = logging.getLogger(next(NAMES))
    assert not logger.isEnabledFor(logging.DEBUG)

    def body():
        logger.setLevel(logging.DEBUG)
        return logger.isEnabledFor(logging.DEBUG)

    kept = Kept(body)
    assert body()
    kept.put_back()
    assert not logger.isEnabledFor(logging.DEBUG)


def test_what_an_import_sets_up_stays(monkeypatch):
    name = next(NAMES)

    def body():
        logging.getLogger(name).addHandler(logging.NullHandler())
        sys.modules.setdefault(name, types.ModuleType(name))

    kept = Kept(body)
    body()
    kept.put_back()
    monkeypatch.delitem(sys.modules, name)
    assert len(logging.getLogger(name).handlers) == 1


def writes():
    os.write(1, b"")


def writes_inside():
    def inner():
        import os as system

        return system, os.umask(0o22)

    return inner()


def of_an_outer_function():
    import os as system

    return lambda: system.umask(0o22)


def registers():
    atexit.register(int)


def starts():
    threading.Thread(target=int).start()


def starts_some():
    with ThreadPoolExecutor() as pool:
        pool.submit(int)


def sets():
    os.putenv("SHARDRULES_TEST", "1")


def disables():
    gc.disable()


def handles():
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)


def speaks():
    locale.setlocale(locale.LC_ALL, "")


def ends(owner=types.SimpleNamespace()):
    weakref.finalize(owner, int)


def nests():
    sys.setrecursionlimit(5000)


def waits():
    socket.setdefaulttimeout(1)


def asks():
    return sys.stdin.readline()


def shows():
    sys.__stdout__.write("")


@pytest.mark.parametrize(
    "body",
    [
        writes,
        writes_inside,
        of_an_outer_function(),
        registers,
        starts,
        disables,
        handles,
        speaks,
        ends,
        nests,
        waits,
    ],
)
def test_what_no_event_tells_of_is_not_called(body):
    assert "whose effect can't be put back" in Kept(body).why


@pytest.mark.parametrize("body", [asks, shows])
def test_the_process_s_own_streams_are_files(body):
    assert "which can't be put back" in Kept(body).why


def test_the_reason_names_what_is_called():
    assert Kept(writes).why == "its body can call posix.write, whose effect can't be put back"


ADVANCING = {
    "hash": hashlib.sha256,
    "old hash": hashlib.md5,
    "new hash": hashlib.blake2b,
    "keyed hash": lambda: hmac.new(b"key", b"", "sha256"),
    "zlib": zlib.compressobj,
    "bz2": bz2.BZ2Compressor,
    "lzma": lzma.LZMACompressor,
    "database": lambda: sqlite3.connect(":memory:"),
    "memory": lambda: mmap.mmap(-1, 8),
    "socket": socket.socket,
    "rows": lambda: csv.writer(io.StringIO()),
}


def by_default(made):
    def body(held=made):
        return held.update(b"")

    return body


def by_an_attribute(made):
    owner = types.SimpleNamespace(held=made)
    return lambda: owner.held.update(b"")


@pytest.mark.parametrize(
    "held",
    [
        lambda made: lambda: made.update(b""),
        by_default,
        by_an_attribute,
        lambda made: functools.partial(getattr, made),
        lambda made: (lambda found: lambda: found[0].update(b""))([made]),
    ],
)
@pytest.mark.parametrize("kind", ADVANCING)
def test_an_object_that_advances_is_said(kind, held):
    assert "which can't be put back" in Kept(held(ADVANCING[kind]())).why


def test_an_object_of_somebody_s_c_is_said():
    tree = scipy.spatial.cKDTree(np.zeros((1, 1)))
    assert "'tree', a cKDTree, which can't be put back" in Kept(lambda: tree.query([0])).why


class Plain:
    pass


class Slots:
    __slots__ = ("__dict__", "__weakref__", "one", "two")


class Table(dict):
    __slots__ = ("one",)


class Failed(Exception):
    pass


class More(Slots, collections.abc.Sized):
    def __len__(self):
        return 0


# Functions of an extension, which nanobind makes.
NANOBIND_S = [f for f in vars(xla_client._xla).values() if type(f).__name__ == "nb_func"]
VALUES = [
    *NANOBIND_S[:1],
    *(kind() for kind in (Plain, Slots, Table, Failed, More)),
    collections.namedtuple("Pair", "a b")(1, 2),
    re.compile("a"),
    decimal.Decimal(1),
    np.float32(1),
    jnp.float32(1),
    json.JSONDecoder(),
    threading.Lock(),
    logging.getLogger("held"),
    hashlib.sha256,
]


@pytest.mark.parametrize("value", VALUES, ids=lambda value: type(value).__name__)
def test_what_does_not_advance_is_no_reason(value):
    assert not Kept(lambda: value).why


def uses_the_standard_library(x):
    if sys.stdout is not None and os.environ.get("HOME"):
        print(os.path.join("a", "b"), file=sys.stderr)
    sys.stdout.write("")
    logging.getLogger("kernels").debug("traced")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return functools.reduce(lambda a, b: a + b, itertools.chain([x], [x]))


def test_what_programs_use_of_the_standard_library_is_no_reason():
    kept = Kept(uses_the_standard_library)
    assert not kept.why
    uses_the_standard_library(1)
    assert kept.put_back() == ()
