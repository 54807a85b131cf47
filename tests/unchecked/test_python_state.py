"""What a function changes is put back after it was traced to look at it, or it isn't looked at.

Each kind here makes a function that returns another value at each call, by state of its own.
"""

import argparse
import array
import builtins
import collections
import concurrent.futures
import configparser
import contextlib
import contextvars
import ctypes
import dataclasses
import functools
import io
import itertools
import logging
import multiprocessing
import os
import queue
import random
import sys
import threading
import types
import unittest.mock
import warnings
import weakref
from typing import NamedTuple

import jax
import jax as keys
import numpy as np
import pytest

from shardrules.unchecked.python_state import Kept
from shardrules.unchecked.unseen import unseen


class Counts:
    made = 0

    def __init__(self, value=0):
        self.n = value

    def __call__(self):
        self.n += 1
        return self.n


def of_an_attribute(owner):
    def draw():
        owner.n += 1
        return owner.n

    return draw


def of_an_item(owner, key=0):
    def draw():
        owner[key] += 1
        return int(owner[key])

    return draw


def in_thread():
    owner = threading.local()
    owner.n = 0
    return of_an_attribute(owner)


def in_a_container_of_its_own():
    """It loads what it holds when it is asked, as transformers' tables of models do."""

    class Table(collections.OrderedDict):
        def __init__(self, held):
            self.update(held)

        def values(self):
            raise ImportError("the module of a value isn't installed")

        items = keys = __iter__ = values

    return of_an_item(Table({"n": 0}), "n")


class Numbered(np.ndarray):
    n = 0


def in_slots():
    @dataclasses.dataclass(slots=True)
    class Slots:
        n: int = 0

    return of_an_attribute(Slots())


class Numbers(NamedTuple):
    n: int


@dataclasses.dataclass(frozen=True)
class Frozen:
    n: int


def in_a_new_one(make):
    def kind():
        held = make(0)

        def draw():
            nonlocal held
            held = make(held.n + 1)
            return held.n

        return draw

    return kind


def in_a_set():
    drawn = set()

    def draw():
        drawn.add(len(drawn))
        return len(drawn)

    return draw


def in_context():
    variable = contextvars.ContextVar("variable", default=0)

    def draw():
        variable.set(variable.get() + 1)
        return variable.get()

    return draw


def in_a_stream():
    stream = io.StringIO()

    def draw():
        stream.write("x")
        return stream.tell()

    return draw


def in_a_new_attribute():
    class New:
        pass

    def draw():
        New.n = getattr(New, "n", 0) + 1
        return New.n

    return draw


def in_a_module(text):
    def kind():
        variables = {"__name__": "counting"}
        exec(text, variables)
        return variables["draw"]

    return kind


in_a_new_variable = in_a_module("""
def draw():
    global new
    new = globals().get("new", 0) + 1
    return new
""")
by_a_made_name = in_a_module("""
name, held = "n" + "ew", [0]

def draw():
    globals()[name] = globals().get(name, 0) + 1
    globals()["he" + "ld"][0] += 1
    return globals()[name] + held[0]
""")


COUNTED = """
import itertools
numbers = itertools.count(3, 2)

def draw():
    return next(numbers)
"""


def in_a_submodule():
    package, inner = types.ModuleType("counting"), types.ModuleType("counting.inner")
    package.inner, inner.n = inner, 0
    sys.modules["counting"], sys.modules["counting.inner"] = package, inner

    def draw():
        import counting

        counting.inner.n += 1
        return counting.inner.n

    return draw


def in_the_environment():
    os.environ["SHARDRULES_TEST"] = "0"

    def draw():
        os.environ["SHARDRULES_TEST"] = str(int(os.environ["SHARDRULES_TEST"]) + 1)
        return int(os.environ["SHARDRULES_TEST"])

    return draw


def by_a_weak_key():
    owner = Counts()
    held = weakref.WeakKeyDictionary({owner: 0})
    return of_an_item(held, owner)


def of_a_value(owner):
    def draw():
        owner.value += 1
        return owner.value

    return draw


def in_a_cache():
    asked, Counts.made = Counts(), 0

    @functools.lru_cache
    def cached(n):
        Counts.made += 1
        return Counts.made

    return lambda: cached(asked())


def behind_a_reference():
    owner = Counts()
    reference = weakref.ref(owner)
    keep = [owner]
    return lambda: (len(keep), of_an_attribute(reference())())[1]


def behind_many_objects():
    many = [*({} for _ in range(30_000)), [Counts()]]
    return lambda: many[-1][0]()


def by_another_name():
    environment = os.environ
    environment["SHARDRULES_COUNTED"] = "0"

    def draw():
        environment["SHARDRULES_COUNTED"] += "1"
        return environment["SHARDRULES_COUNTED"]

    return draw


def of_a_mock():
    spy = unittest.mock.Mock(wraps=abs)
    return lambda: (spy(1), spy.call_count)


def of_a_stack():
    stack = contextlib.ExitStack()

    def draw():
        stack.callback(int)
        return len(stack._exit_callbacks)

    return draw


def of_a_configuration():
    settings = configparser.ConfigParser()
    settings["made"] = {"n": ""}

    def draw():
        settings["made"]["n"] += "1"
        return settings["made"]["n"]

    return draw


@dataclasses.dataclass(frozen=True, slots=True)
class Sealed:
    n: int = 0


def in_a_frozen_slot():
    owner = Sealed()

    def draw():
        object.__setattr__(owner, "n", owner.n + 1)
        return owner.n

    return draw


def in_viewed_bytes():
    counts = bytearray(1)
    view = memoryview(counts)
    return lambda: (of_an_item(view)(), bytes(counts))


PUT_BACK = {
    "environment by another name": by_another_name,
    "mock": of_a_mock,
    "stack": of_a_stack,
    "configuration": of_a_configuration,
    "frozen slot": in_a_frozen_slot,
    "bytes that are viewed": in_viewed_bytes,
    "attribute": lambda: of_an_attribute(Counts()),
    "called object": Counts,
    "simple namespace": lambda: of_an_attribute(types.SimpleNamespace(n=0)),
    "arguments": lambda: of_an_attribute(argparse.Namespace(n=0)),
    "slots": in_slots,
    "thread": in_thread,
    "context": in_context,
    "stream": in_a_stream,
    "array": lambda: of_an_item(array.array("i", [0])),
    "numpy array": lambda: of_an_item(np.zeros(1)),
    "large numpy array": lambda: of_an_item(np.zeros(300_000)),
    "objects in numpy": lambda: of_an_item(np.array([0, None], object)),
    "user dict": lambda: of_an_item(collections.UserDict(n=0), "n"),
    "new class attribute": in_a_new_attribute,
    "new variable": in_a_new_variable,
    "counter": in_a_module(COUNTED),
    "counter by a made name": in_a_module(
        COUNTED.replace("(numbers)", "(globals()['num' 'bers'])")
    ),
    "submodule": in_a_submodule,
    "cache": in_a_cache,
    "weak reference": behind_a_reference,
    "weak key": by_a_weak_key,
    "made name": by_a_made_name,
    "environment": in_the_environment,
    "number of C's": lambda: of_a_value(ctypes.c_int(0)),
    "array of C's": lambda: of_an_item((ctypes.c_double * 2)()),
    "deque's method": lambda: collections.deque(range(9)).popleft,
    "named tuple": in_a_new_one(Numbers),
    "frozen object": in_a_new_one(Frozen),
    "set": in_a_set,
    "generator's method": lambda: np.random.default_rng(0).normal,
    "python's generator": lambda: random.Random(0).random,
    "many objects": behind_many_objects,
    "container with methods of its own": in_a_container_of_its_own,
    "attribute of a container": lambda: of_an_attribute(type("Table", (dict,), {"n": 0})()),
    "attribute of an array": lambda: of_an_attribute(np.zeros(3).view(Numbered)),
}


@pytest.mark.parametrize("kind", PUT_BACK)
def test_what_a_function_changes_is_put_back(kind):
    draw = PUT_BACK[kind]()
    expected = [draw() for _ in range(3)]
    draw = PUT_BACK[kind]()
    kept = Kept(lambda: draw())
    assert not kept.why
    assert [draw(), draw()] == expected[:2]
    kept.put_back()
    assert [draw() for _ in range(3)] == expected


@pytest.mark.parametrize("kind", PUT_BACK)
def test_what_changed_is_compared_by_value(kind):
    draw = PUT_BACK[kind]()
    kept = Kept(lambda: draw())
    assert kept.put_back() == ()

    def changes(count):
        for _ in range(count):
            draw()
        return kept.put_back()

    one, two = changes(1), changes(2)
    assert one and two and one != two and changes(1) == one


def test_a_set_that_is_the_same_has_not_changed():
    """Its copy has another order, where some were taken out of it."""
    drawn = set(range(100))
    drawn -= {*range(100)} - {1, 8}
    kept = Kept(lambda: len(drawn))
    assert kept.put_back() == () and kept.put_back() == ()


def test_what_a_cache_holds_is_kept_for_a_second_look():
    draw = in_a_cache()
    kept = Kept(lambda: draw())
    draw()
    changed = kept.put_back(caches=False)
    draw()  # from the cache
    assert kept.put_back(caches=False) != changed
    kept.doubt_caches()
    assert "can change 'cached', a cached function's state" in Kept(lambda: draw()).why


def by_default(numbers=itertools.count()):
    return next(numbers)


def of_function():
    return next(of_function.numbers)


of_function.numbers = itertools.count()


class OfClass:
    numbers = itertools.count()


def yields():
    yield from range(9)


def draws_children():
    seed = np.random.SeedSequence(0)
    return lambda: seed.spawn(1)[0].generate_state(1)


def draws_generators():
    generator = np.random.default_rng(0)
    return lambda: generator.spawn(1)[0].integers(100)


def in_empty_context():
    variable = contextvars.ContextVar("variable")
    return lambda: variable.set(variable.get(0) + 1)


def of_items(items, key=0):
    return lambda: next(items[key])


def in_a_file():
    file = open(os.devnull, "w")
    return lambda: print(1, file=file)


LEFT = {
    "file": in_a_file,
    "number of all processes": lambda: of_a_value(multiprocessing.Value("i", 0)),
    "iterator by a made name": in_a_module("""
it = iter(range(9))

def draw():
    return next(globals()["i" + "t"])
"""),
    "counter with two names": in_a_module(COUNTED + "other = numbers"),
    "counter of fractions": in_a_module(COUNTED.replace("(3, 2)", "(.5)")),
    "list": lambda: of_items([itertools.count()]),
    "dict": lambda: of_items({"n": itertools.count()}, "n"),
    "tuple": lambda: of_items((yields(),)),
    "default": lambda: by_default,
    "function's attribute": lambda: of_function,
    "class's attribute": lambda: lambda: next(OfClass.numbers),
    "method": lambda: itertools.count().__next__,
    "partial": lambda: functools.partial(next, itertools.count()),
    "queue": lambda: queue.Queue().get,
    "simple queue": lambda: queue.SimpleQueue().get,
    "seed's children": draws_children,
    "generator's children": draws_generators,
    "context without a value": in_empty_context,
}


@pytest.mark.parametrize("kind", LEFT)
def test_what_cannot_be_put_back_is_said(kind):
    draw = LEFT[kind]()
    assert "which can't be put back" in Kept(lambda: draw()).why


def test_too_much_to_keep_is_said(monkeypatch):
    monkeypatch.setattr("shardrules.unchecked.python_state._MOST_OBJECTS", 10)
    many = [[] for _ in range(20)]
    assert "reaches more than 10 objects" in Kept(lambda: many).why
    monkeypatch.setattr("shardrules.unchecked.python_state._MOST_BYTES", 10)
    large = np.zeros(9)
    assert "can change 'large', a numpy array of 72 bytes" in Kept(lambda: large.sum()).why


def test_an_iterator_that_no_code_names_is_no_reason():
    owner = types.SimpleNamespace(batches=iter([1]), n=0)
    assert not Kept(of_an_attribute(owner)).why


def test_a_pool_of_threads_is_not_touched():
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        owner = types.SimpleNamespace(pool=pool, tasks=queue.Queue(), n=0)
        kept = Kept(of_an_attribute(owner))
        owner.tasks.put(1)
        pool.submit(int).result()
        threads = len(pool._threads)
        kept.put_back()
        assert (owner.tasks.qsize(), len(pool._threads)) == (1, threads)


def test_draws_of_all_beside_another_thread():
    done = threading.Event()
    thread = threading.Thread(target=done.wait)
    thread.start()
    try:
        assert "other threads draw" in Kept(lambda: np.random.normal()).why
        assert not Kept(lambda: np.zeros(3)).why
    finally:
        done.set()
        thread.join()


drawing = types.ModuleType("drawing")  # a module of the body's own
drawing.random, drawing.jax = random, jax


def imports():
    import random

    return random.random()


def of_another_module():
    return drawing.random.random()


def both():
    def inner():
        return random.random()

    return jax.random.key(int(inner()))


def by_an_attribute(owner=drawing):
    return owner.random.random(), jax.random.key(0)


def by_a_variable():
    random = drawing.random
    return random.random()


def by_numpy():
    def inner():
        return lambda: np.random.normal()

    return inner()()


@pytest.fixture
def another_thread():
    done = threading.Event()
    thread = threading.Thread(target=done.wait)
    thread.start()
    yield
    done.set()
    thread.join()


@pytest.mark.parametrize(
    "body",
    [
        lambda: jax.random.normal(jax.random.key(0), (3,)),
        lambda: keys.random.split(keys.random.key(0)),
        lambda: "random",
    ],
)
def test_keys_of_jax_are_the_programs_own(another_thread, body):
    assert not Kept(body).why


@pytest.mark.parametrize(
    "body", [imports, of_another_module, both, by_an_attribute, by_a_variable, by_numpy]
)
def test_draws_beside_another_thread_however_they_are_written(another_thread, body):
    assert "other threads draw" in Kept(body).why


def test_a_submodule_that_is_imported_stays():
    package = types.ModuleType("lazily")
    sys.modules["lazily"] = package
    kept = Kept(lambda: package.inner)
    package.inner = types.ModuleType("lazily.inner")
    kept.put_back()
    assert package.inner.__name__ == "lazily.inner"


def test_what_cannot_be_compared_is_put_back_all_the_same():
    class Unread(dict):
        def __iter__(self):
            raise RuntimeError("not now")

    class Meta(type):
        __eq__ = type.__eq__

    held, other = {}, [0]
    kept = Kept(lambda: (held, other))
    held["unhashable"] = Meta("Unhashable", (), {})()
    other.append(Unread())
    assert kept.put_back() != ()
    assert (held, other) == ({}, [0])


@pytest.mark.parametrize("action", ["default", "once", "module", "always"])
def test_a_look_takes_no_warning_of_the_programs(action):
    def warn():
        warnings.warn("slow", UserWarning, stacklevel=1)

    with warnings.catch_warnings(record=True) as shown:
        warnings.simplefilter(action)
        with unseen(Kept(warn)):
            warn()
        assert not shown
        warn()
        warn()
    assert len(shown) == (2 if action == "always" else 1)


def test_other_threads_warn_and_log_while_one_looks(caplog):
    def tell():
        warnings.warn("from a thread", UserWarning, stacklevel=1)
        logging.getLogger("kernels").warning("from a thread")

    looks = threading.Event()
    thread = threading.Thread(target=lambda: (looks.wait(), tell()))
    thread.start()
    with warnings.catch_warnings(record=True) as shown:
        warnings.simplefilter("always")
        with unseen(Kept()):
            tell()
            looks.set()
            thread.join()
    assert len(shown) == len(caplog.records) == 1


def test_two_threads_that_look_leave_nothing_behind():
    """The one that began later put back what the first had put in place."""
    handle, show, out = logging.Logger.callHandlers, warnings.showwarning, sys.stdout
    looks, began, end = threading.Event(), threading.Event(), threading.Event()

    def look():
        looks.wait()
        with unseen(Kept()):
            began.set()
            end.wait()

    thread = threading.Thread(target=look)
    thread.start()
    with unseen(Kept()):
        looks.set()
        began.wait()
    end.set()
    thread.join()
    assert (logging.Logger.callHandlers, warnings.showwarning, sys.stdout) == (handle, show, out)


def test_what_a_first_import_sets_in_the_environment_stays(monkeypatch):
    monkeypatch.delenv("SHARDRULES_TEST", raising=False)
    monkeypatch.delitem(sys.modules, "shardrules_test", raising=False)

    def imports():
        os.environ["SHARDRULES_TEST"] = "1"
        sys.modules["shardrules_test"] = types.ModuleType("shardrules_test")

    kept = Kept(imports)
    imports()
    kept.put_back()
    assert os.environ["SHARDRULES_TEST"] == "1"


def test_a_function_of_c_is_no_state():
    """A library that a module loads holds many; MaxText's body reaches some."""
    call = ctypes.CFUNCTYPE(ctypes.c_int)(lambda: 1)
    assert call._objects is not None and not Kept(lambda: call()).why


@pytest.mark.parametrize("names", [vars(builtins), sys.modules], ids=["builtins", "modules"])
def test_python_s_own_tables_are_left_alone(names):
    """What a body imports, or what a library adds while it is traced, stays."""
    held = {"names": names}
    kept = Kept(lambda: held)
    names["one_more_of_shardrules"] = types.ModuleType("one_more_of_shardrules")
    try:
        assert kept.put_back() == ()
        assert "one_more_of_shardrules" in names
    finally:
        del names["one_more_of_shardrules"]
