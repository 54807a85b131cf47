"""Eight CPU devices, and the compilers for absent accelerators where they are installed."""

import gc
import importlib.metadata
import importlib.util
import os
import pathlib
import sys
import zlib

os.environ["JAX_PLATFORMS"] = "cpu"
# Where Python may write no bytecode beside sources, each process that a test starts would compile
# all of JAX, in three seconds.
if os.environ.pop("PYTHONDONTWRITEBYTECODE", ""):
    cache = pathlib.Path(__file__).parents[1] / ".pytest_cache" / "bytecode"
    os.environ["PYTHONPYCACHEPREFIX"] = str(cache)


def _fewer_passes():
    """What makes XLA for CPU compile in three quarters of the time, of the flags that jaxlib has.

    What is read of a program is fixed before them, and no test is about them: other emitters of
    fusions would halve it, and print other fusions. XLA ends a process at a flag of other versions.
    """
    flags = ["--xla_backend_optimization_level=0", "--xla_llvm_disable_expensive_passes=true"]
    if tuple(map(int, importlib.metadata.version("jaxlib").split(".")[:2])) >= (0, 5):
        flags.append("--xla_cpu_parallel_codegen_split_count=1")
    return flags


# Of a flag that stands twice XLA takes the last.
os.environ["XLA_FLAGS"] = " ".join(
    [*_fewer_passes(), os.environ.get("XLA_FLAGS", ""), "--xla_force_host_platform_device_count=8"]
)

# This process comes to hold millions of objects: to look at all of them as often as Python does by
# default takes a twentieth of the suite's time.
gc.set_threshold(*gc.get_threshold()[:2], 100)

# Kernels in TPU interpret mode wait for each other, in as many threads as there are devices; with
# fewer threads than that, XLA's CPU client hangs.
os.environ.setdefault("PJRT_NPROC", "32")

import numpy as np
import pytest

from shardrules import aot, registry

AXES = ("data", "model")


@pytest.hookimpl(trylast=True)  # the terminal's reporter is there
def pytest_configure(config):
    """Let reports have lines as long as they are; only pytest's own fit the terminal."""
    reporter = config.pluginmanager.get_plugin("terminalreporter")
    if reporter is not None:
        writer = config.get_terminal_writer()
        writer.fullwidth = writer.fullwidth
    os.environ["COLUMNS"] = "1000"


def pytest_addoption(parser):
    parser.addoption("--full", action="store_true", help="also run the tests that take long")
    parser.addoption(
        "--quick",
        action="store_true",
        help="one case of each test, none that is slow or compiles for TPU or GPU",
    )
    parser.addoption(
        "--lane",
        choices=("oldest", "newest", "other"),
        help="the tests that a lane of .ci/run takes, on the oldest or the newest Python, or that "
        "it runs with other JAX versions",
    )


def _lanes_of(item, first):
    """The lanes that run a test, if the lane's JAX can; what is left to --full is told apart before.

    Args:
      item: the test.
      first: the first case of each test.
    """
    marks = {mark.name for mark in item.iter_markers()} - _true_of_both(item)
    # tests/report is collected in one lane alone, and what shares its seeds runs some in each.
    is_in_each = item.nodeid.startswith("tests/report/") or "share" in item.fixturenames
    if is_in_each or not marks.isdisjoint(_IN_EACH_LANE):
        return {"oldest", "newest", "other"}
    if item in first and marks.isdisjoint(_SPLIT):
        is_of_core = item.nodeid.startswith("tests/core/")
        return {"oldest", "newest", "other"} if is_of_core else {"newest"}
    # What takes long, and further cases. The lane of the newest, which has the rest, gets fewer.
    return {"newest"} if zlib.crc32(item.nodeid.encode()) % 5 < 2 else {"oldest"}


def _true_of_both(item):
    """The mark ``where``, if it asks only for what the JAX of both lanes has: types of values."""
    from core import versions

    asked = {one for mark in item.iter_markers("where") for one in mark.args}
    return {"where"} if asked <= {versions.types_values} else set()


# They run where they can, or with --full alone.
_IN_EACH_LANE = ("where", "triton", "libraries", "full")
_SPLIT = frozenset({"one_lane", "slow", "tpu", "gpu"})
_LONG = ("tpu", "gpu", "triton", "libraries", "slow", "one_lane", "full")


def _first(items):
    """The first case of each test function."""
    found = {}
    for item in items:
        found.setdefault(item.nodeid.partition("[")[0], item)
    return set(found.values())


def _not_sampled(items):
    """Of tests that are marked sampled, two thirds of the cases, by their names; never the first."""
    marked = [item for item in items if item.get_closest_marker("sampled")]
    first = _first(marked)
    return [i for i in marked if i not in first and zlib.crc32(i.nodeid.encode()) % 3]


def _further_compiled(items):
    """Of the tests of costs, what is compiled for TPU or GPU, but the first case for each."""
    # Of all versions of JAX, so that the lanes agree which case is the first.
    compiled = [
        item
        for item in items
        if item.nodeid.startswith("tests/costs/") and not item.get_closest_marker("where")
    ]
    found = []
    for platform in ("tpu", "gpu"):
        cases = [item for item in compiled if item.get_closest_marker(platform)]
        first = _first(cases)
        found += [item for item in cases if item not in first]
    return found


def _quick(items):
    """The first case of each test function that is not slow and needs no accelerator's compiler."""
    return _first(item for item in items if not any(map(item.get_closest_marker, _LONG)))


def _for_other_versions(item):
    """Whether a test is marked (core/versions.py) for other versions of JAX than this."""
    return not all(asked() for mark in item.iter_markers("where") for asked in mark.args)


def pytest_collection_modifyitems(config, items):
    lane = config.getoption("--lane")
    # The lanes leave these to --full, as they do what is marked so.
    further = {*_further_compiled(items), *_not_sampled(items)} if lane else set()
    if lane or any(item.get_closest_marker("where") for item in items):
        from core import versions

        # Deselected, not passed by an early return: core/matrix.py checks that each runs somewhere.
        here = [item for item in items if not _for_other_versions(item)]
        first = _first(here)
        kept = {item for item in here if not lane or lane in _lanes_of(item, first)}
        left_out = [item for item in items if item not in kept and item not in further]
        if config.option.xmlpath:  # for core/matrix.py
            versions.write_left_out(config.option.xmlpath, [item.nodeid for item in left_out])
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if item in kept or item in further]
    if config.getoption("--quick"):
        kept = _quick(items)
        config.hook.pytest_deselected(items=[item for item in items if item not in kept])
        items[:] = [item for item in items if item in kept]
        return
    # Deselected, not skipped: a skipped test is a test that runs nowhere, and .ci/run refuses it.
    if config.getoption("--full"):
        return
    long = {item for item in items if item.get_closest_marker("full")} | further
    config.hook.pytest_deselected(items=[item for item in items if item in long])
    items[:] = [item for item in items if item not in long]


# From each mark to what is missing for it, None if nothing is. Whether a module can be found is
# asked without importing it: klujax's own import switches float64 on for all.
NEEDS = {
    "tpu": lambda: aot.missing_plugin("tpu"),
    "gpu": lambda: aot.missing_plugin("gpu"),
    "triton": lambda: _missing("triton", "jax_triton"),
    "libraries": lambda: _missing("libraries", "equinox", "jax_finufft", "klujax"),
}


def _missing(extra, *modules):
    """The pip command for an extra of which a module is not installed."""
    if all(map(importlib.util.find_spec, modules)):
        return None
    return f"pip install '.[{extra}]'"


def pytest_runtest_setup(item):
    """Skip by its mark a test that needs what is not installed; .ci/run runs all with all of it."""
    for mark, missing in NEEDS.items():
        command = item.get_closest_marker(mark) and missing()
        if command:
            pytest.skip(f"marked {mark}: {command}")


def _mesh(devices):
    import jax

    return jax.sharding.Mesh(np.array(devices).reshape(4, 2), AXES)


@pytest.fixture(scope="session")
def cpu_mesh():
    """Eight CPU devices as (4 data, 2 model)."""
    import jax

    return _mesh(jax.devices())


@pytest.fixture(scope="session")
def tpu_mesh():
    """TPU v5e:2x4 as (4 data, 2 model); compiles only."""
    return _mesh(aot.tpu("v5e:2x4"))


@pytest.fixture(scope="session")
def gpu_mesh():
    """8xH100 as (4 data, 2 model); compiles only."""
    return _mesh(aot.gpu("h100", 8))


PLATFORMS = [
    pytest.param("cpu"),
    pytest.param("tpu", marks=pytest.mark.tpu),
    pytest.param("gpu", marks=pytest.mark.gpu),
]


@pytest.fixture(params=PLATFORMS)
def platform(request):
    """Each platform's name and mesh."""
    return request.param, request.getfixturevalue(f"{request.param}_mesh")


@pytest.fixture
def share(request):
    """A function from random seeds to those that this lane tries, a twelfth; without --lane, all."""
    lane = request.config.getoption("--lane")

    def of(seeds):
        some = max(len(seeds) // 12, 1)
        return {"oldest": seeds[:some], "newest": seeds[-some:]}.get(lane, seeds)

    return of


@pytest.fixture
def hooks():
    """The hooks, installed for one test."""
    import shardrules

    with shardrules.install() as handle:
        yield handle


@pytest.fixture
def declared_only():
    """The hooks, installed for one test; kernels are not proven, declarations alone count."""
    import shardrules

    with shardrules.install(prove=False) as handle:
        yield handle


@pytest.fixture(autouse=True)
def fresh_registry():
    """The default registry as it is on import, whatever the test registers."""
    entries = dict(registry.default._entries)
    yield registry.default
    registry.default._entries.clear()
    registry.default._entries.update(entries)
    registry.default._functions.clear()
    registry.default._changed()


@pytest.fixture(autouse=True)
def narrow_types():
    """JAX as it is on import after each test: klujax's own import switches float64 on for all."""
    yield
    if "jax" in sys.modules:
        sys.modules["jax"].config.update("jax_enable_x64", False)


@pytest.fixture(autouse=True)
def no_decisions():
    """No decision on a shard_map after each test: a declared op that was called keeps them all."""
    yield
    hooks = sys.modules.get("shardrules.hooks.install")
    if hooks is not None and hooks._holders == {hooks._OPS}:
        hooks._state.of(hooks.UncheckedHooks).decisions = {}
