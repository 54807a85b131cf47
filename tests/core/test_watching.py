"""Every program that JAX compiles or takes from a cache is noted, on every JAX."""

import importlib
import importlib.util
import re
import subprocess
import sys
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from raising import raises

import shardrules
from core import versions
from shardrules import hooks
from shardrules.costs import outputs
from shardrules.door.patching import WhenImported
from shardrules.errors import ShardrulesError
from shardrules.watching import compiling


def doubled(mesh):
    """A gradient with a defensive psum over model."""
    f = hooks.shard_map(lambda x: 2 * x, mesh, P("data"), P("data"), check=False)
    return jax.jit(jax.grad(lambda x: (f(x) ** 2).sum()))


def names(seen):
    return [one.name for one in seen]


def test_a_defensive_psum_is_found_with_its_axes(cpu_mesh, monkeypatch):
    x = np.ones((8, 16), np.float32)
    expected = doubled(cpu_mesh)(x)
    with shardrules.watch() as seen:
        found = doubled(cpu_mesh)(x)
    np.testing.assert_array_equal(found, expected)
    (one,) = [p for p in seen if p.judgement.verdicts]
    assert one.judgement.mesh == {"data": 4, "model": 2}
    assert [v.collective.axes for v in one.judgement.redundant] == [("model",)]
    assert not seen.clean and [f.kind for f in one.content.findings] == ["redundant"]
    (note,) = seen.judged().notes
    assert note.startswith("compiled for CPU: XLA for TPU or GPU turns some all-reduces into")
    for shown in (seen, one):  # in a notebook
        frame = shown._repr_html_()
        assert frame.startswith('<iframe srcdoc="&lt;!doctype html&gt;') and frame.count("<") == 2
        assert "redundant" in frame
    monkeypatch.setenv("COLUMNS", "80")
    assert max(map(len, str(seen).splitlines())) <= 80


def test_it_says_clean_and_leaves_jax_as_it_was(cpu_mesh):
    pxla = sys.modules["jax._src.interpreters.pxla"]
    before = dict(vars(pxla.MeshComputation)), pxla.lower_sharding_computation
    with shardrules.watch() as seen:
        assert pxla.MeshComputation.compile is not before[0]["compile"]
        jax.jit(lambda x: jnp.sin(x) + 1.0)(np.ones(3, np.float32))
    assert dict(vars(pxla.MeshComputation)) == before[0]
    assert pxla.lower_sharding_computation is before[1]
    assert len(seen) and seen.clean
    (note,) = seen.judged().notes
    assert note.startswith("every program runs on one device, of 8")
    count = len(seen)
    jax.jit(lambda x: jnp.sin(x) + 2.0)(np.ones(3, np.float32))
    assert len(seen) == count


@pytest.mark.slow
def test_source_lines_are_those_of_the_program():
    """In a process of its own: install() leaves the frames out, too, and for good."""
    code = (
        "import shardrules\n"
        "with shardrules.watch() as seen:\n"
        "    import jax\n"
        "    key = jax.random.PRNGKey(0)\n"
        "    jax.random.normal(key, (3,)).block_until_ready()\n"
        "assert len(seen)\n"
        "assert not [one.name for one in seen if 'compiling.py' in one.text]\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_each_way_to_a_program(cpu_mesh):
    def one(x):
        return jnp.cos(x) * 3

    def two(x):
        return jnp.cos(x) * 5

    def three(x):
        return jnp.cos(x) * 7

    def four(x):
        return jax.lax.psum(x, "i")

    def five(x):
        return jnp.cos(x) * 11

    x = np.ones(8, np.float32)
    with shardrules.watch() as seen:
        jax.jit(one)(x)
        jax.jit(two).lower(x).compile()
        thread = threading.Thread(target=lambda: jax.jit(three)(x))
        thread.start()
        thread.join()
        jax.pmap(four, axis_name="i")(np.ones((8, 2), np.float32))
        lowered = jax.jit(five, donate_argnums=0).lower(x)
        lowered.compile()
        lowered.compile()  # handed out twice, noted once
    found = names(seen)
    for name in ("one", "two", "three", "five"):
        assert sum(n.endswith(f"_{name}") for n in found) == 1, (name, found)
    (pmapped,) = [p for p in seen if p.judgement.verdicts]  # its name depends on the JAX
    assert [v.collective.kind for v in pmapped.judgement.needed] == ["all-reduce"]


def test_what_was_compiled_before_is_noted_when_it_is_called_again(cpu_mesh):
    def before(x):
        return jnp.tan(x)

    def never(x):
        return jnp.tan(x) + 1

    x = np.ones(8, np.float32)
    for f in (f1 := jax.jit(before), jax.jit(never)):
        f(x), f(x)
    with shardrules.watch() as outer:
        f1(x)
        with shardrules.watch() as inner:
            f1(x), f1(x)
    # JAX 0.5 and 0.6.0 lower it anew, with each watch.
    assert set(names(outer)) == set(names(inner)) == {"jit_before"}


@pytest.fixture
def persistent_cache(tmp_path):
    """JAX's cache on disk, for one test."""
    from jax.experimental.compilation_cache import compilation_cache

    options = {
        "jax_compilation_cache_dir": str(tmp_path),
        "jax_persistent_cache_min_compile_time_secs": 0.0,
        "jax_persistent_cache_min_entry_size_bytes": -1,
    }
    old = {name: getattr(jax.config, name) for name in options}
    try:
        for name, value in options.items():
            jax.config.update(name, value)
        compilation_cache.reset_cache()
        yield tmp_path
    finally:
        for name, value in old.items():
            jax.config.update(name, value)
        compilation_cache.reset_cache()


def test_what_comes_from_the_persistent_cache_is_noted(cpu_mesh, persistent_cache):
    x = jax.device_put(np.ones((8, 16), np.float32), NamedSharding(cpu_mesh, P("data")))
    hits = []
    jax.monitoring.register_event_listener(lambda event, **_: hits.append(event))
    for _ in range(2):
        jax.clear_caches()
        del hits[:]
        with shardrules.watch() as seen:
            doubled(cpu_mesh)(x)
    assert any(persistent_cache.iterdir())
    assert "/jax/compilation_cache/cache_hits" in hits
    (one,) = [p for p in seen if p.judgement.verdicts]
    assert [v.collective.axes for v in one.judgement.redundant] == [("model",)]


def test_the_persistent_cache_gives_no_other_programs_source_lines(cpu_mesh, persistent_cache):
    x = jax.device_put(np.ones((8, 16), np.float32), NamedSharding(cpu_mesh, P("data")))
    doubled(cpu_mesh)(x)  # the same operations, from other lines; not watched
    jax.clear_caches()
    f = hooks.shard_map(lambda x: 2 * x, cpu_mesh, P("data"), P("data"), check=False)
    before = jax.config.jax_compilation_cache_include_metadata_in_key
    with shardrules.watch() as seen:
        jax.jit(jax.grad(lambda x: (f(x) ** 2).sum()))(x)
        line = sys._getframe().f_lineno - 1
    assert jax.config.jax_compilation_cache_include_metadata_in_key == before
    (verdict,) = [v for p in seen for v in p.judgement.redundant]
    assert verdict.collective.source.line == line


def test_alike_programs_are_one_row(cpu_mesh):
    with shardrules.watch() as seen:
        for _ in range(3):
            doubled(cpu_mesh)(np.ones((8, 16), np.float32))
    found = seen.judged()
    assert found.findings == 1 and found.counts[0] == 3
    assert found.programs.rows[0][1] == "3"


def test_why_a_program_was_compiled_again_is_said(cpu_mesh):
    @jax.jit
    def total(x):
        return x.sum()

    def placed(*shape):
        return jax.device_put(np.ones(shape, np.float32), NamedSharding(cpu_mesh, P("data")))

    with shardrules.watch() as seen:
        total(placed(8, 16))
        total(placed(16, 16))
    note = seen.judged().notes[0].replace("argument 0 (x)", "argument 0")  # where JAX names it
    assert note.startswith("jit_total was compiled 2 times: argument 0 is f32[2,16] a device")
    assert re.findall(r"f32\[\d+,16\] a device", note) == [f"f32[{n},16] a device" for n in (2, 4)]
    with shardrules.watch() as seen:
        for _ in range(2):
            doubled(cpu_mesh)(np.ones((8, 16), np.float32))
    note = seen.judged().notes[0]
    assert "was compiled 2 times for arguments of the same shapes and shardings" in note


@versions.where(versions.types_values)  # JAX 0.5.3 compiles it once more
def test_what_jax_only_lowers_again_was_compiled_once(cpu_mesh):
    """P() is another key than P(None, None) to jit, and XLA's program is the same."""
    step = jax.jit(lambda x: jax.lax.with_sharding_constraint(x.T, NamedSharding(cpu_mesh, P())))
    with shardrules.watch() as seen:
        for spec in (P("data"), P("data", None), P("data"), P("model")):
            step(jax.device_put(np.ones((8, 16), np.float32), NamedSharding(cpu_mesh, spec)))
    assert len([p for p in seen if "lambda" in p.name]) == 2
    (note,) = [note for note in seen.judged().notes if "compiled 2 times" in note]
    assert "argument 0" in note and "same shapes" not in note


def test_needed_all_reduces_on_cpu_are_said_to_be_cpus(cpu_mesh):
    x = jax.device_put(np.ones((8, 16), np.float32), NamedSharding(cpu_mesh, P("data")))
    for f, is_said in ((jnp.sum, True), (lambda x: jnp.roll(x, 1, 0), False)):
        with shardrules.watch() as seen:
            jax.jit(f)(x)
        assert seen.clean and any(len(p.judgement.verdicts) for p in seen)
        assert ("compiled for CPU: " in str(seen)) == is_said
        # They may be installed: then that command says how to use them.
        assert ("`python -m shardrules.aot` says how to compile for them" in str(seen)) == is_said
        assert "how to install" not in str(seen)


def test_programs_of_which_the_report_says_the_same_are_one_row(cpu_mesh):
    """Another constant makes another text; a loop of random bits alone makes no row."""
    x = jax.device_put(np.ones((8, 16), np.float32), NamedSharding(cpu_mesh, P("data")))
    with shardrules.watch() as seen:
        for n in range(3):
            jax.jit(lambda x: (x * n).sum())(x)
        jax.random.normal(jax.random.PRNGKey(0), (8,)).block_until_ready()
    found = seen.judged()
    assert len({one.text for one in seen if "lambda" in one.name}) > 1
    assert [row[1] for row in found.programs.rows] == ["3"]


def test_errors_are_the_users_own():
    with pytest.raises(ZeroDivisionError), shardrules.watch() as seen:
        raise ZeroDivisionError
    with seen, pytest.raises(ShardrulesError, match="is on already"):
        seen.__enter__()
    with raises(ShardrulesError, key="redundant all-reduce(model)"):
        shardrules.watch(allow={"redundant all-reduce(model)": ""})


def test_an_executable_without_hlo_is_said_and_not_raised():
    class Executable:
        @property
        def xla_executable(self):
            raise RuntimeError("no HLO here\nat all")

    with shardrules.watch() as seen:
        for watcher in compiling._watchers:
            watcher(Executable(), Executable())
    assert "a program does not give its HLO (RuntimeError: no HLO here)" in str(seen)
    assert not seen.clean


def test_an_inner_context_leaves_the_outer_one_unwatched():
    def compiled(number):
        return jax.jit(lambda x: x + number).lower(jnp.ones(3)).compile()

    names = []
    stop = compiling.start(lambda executable, traced: names.append(traced.definition))
    try:
        with compiling.unwatched():
            with compiling.unwatched():
                compiled(1)
            compiled(2)
        assert not names
        compiled(3)
        assert names
    finally:
        stop()


def test_other_import_hooks_are_left_their_modules(monkeypatch):
    """JAX may come from a zip, an editable install, or through a hook that checks types."""

    class Hook:
        def find_spec(self, name, path=None, target=None):
            return importlib.util.spec_from_loader(name, self) if name == "late_module" else None

        def create_module(self, spec):
            return None

        def exec_module(self, module):
            module.made_by = "the hook"

        def get_source(self, name):
            return "its source"

    told, hook = [], Hook()
    monkeypatch.setattr(sys, "meta_path", [hook, *sys.meta_path])
    waiting = WhenImported("late_module", lambda module: told.append(module.made_by))
    try:
        module = importlib.import_module("late_module")
        again = importlib.util.find_spec("no_such_module_at_all")
    finally:
        waiting.stop()
        sys.modules.pop("late_module", None)
    assert told == ["the hook"] and again is None
    assert module.__loader__ is module.__spec__.loader is hook


SCRIPT = """
import os, sys
os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"
os.environ["JAX_PLATFORMS"] = "cpu"
assert not {"jax", "numpy"} & set(sys.modules)
import jax
import numpy as np
from jax.sharding import Mesh, PartitionSpec as P
from shardrules import hooks
from shardrules.costs import outputs

mesh = Mesh(np.array(jax.devices()).reshape(4, 2), ("data", "model"))
f = hooks.shard_map(lambda x: 2 * x, mesh, P("data"), P("data"), check=False)


@jax.jit
def step(x):
    return jax.grad(lambda x: (f(x) ** 2).sum())(x)


if __name__ == "__main__":
    print(sys.argv[1:], step(np.ones((8, 16), np.float32)).sum())
"""


@pytest.mark.slow
def test_run_waits_until_the_script_imports_jax(tmp_path):
    path = tmp_path / "train.py"
    path.write_text(SCRIPT)
    flags = ["--keep", "kept", "--target", "v5e", "--rule", "k=no_communication"]
    done = subprocess.run(
        [sys.executable, "-m", "shardrules", "run", *flags, str(path), "--format", "-x"],
        capture_output=True,
        text=True,
        cwd=tmp_path,
    )
    assert done.stdout == "['--format', '-x'] 1024.0\n", done.stderr
    for word in (
        "(data=4, model=2)",
        "all-reduce(model)",
        "TPU v5e",
        "train.py:",
        "=no_communication",
    ):
        assert word in done.stderr
    assert done.returncode == 1
    # What is kept is judged alike later, axes and all.
    (kept,) = (tmp_path / "kept").glob("*step*")
    judgement = shardrules.testing.judge(str(kept))
    assert judgement.mesh == {"data": 4, "model": 2}
    assert [v.collective.axes for v in judgement.redundant] == [("model",)]


def test_a_watch_that_has_not_begun_says_so():
    with pytest.raises(shardrules.ShardrulesError, match="has not begun.*`with shardrules.watch"):
        str(shardrules.watch())


def test_what_one_line_asks_for_is_one_item(cpu_mesh):
    """Whose advice differs in numbers alone; two lines are two."""
    place = lambda *shape: jax.device_put(  # noqa: E731
        np.ones(shape, np.float32), NamedSharding(cpu_mesh, P("data", "model"))
    )
    trees = [place(64, 32), place(32, 16)]

    def one(x, y):
        return sum(jnp.vdot(a, a) for a in (jnp.tanh(x), jnp.tanh(y)))

    def two(x, y):
        total = jnp.vdot(jnp.tanh(x), jnp.tanh(x))
        return total + jnp.vdot(jnp.tanh(y), jnp.tanh(y))

    for f, count in ((one, 1), (two, 2)):
        with shardrules.watch() as seen:
            jax.jit(f)(*trees)
        text = str(seen)
        assert text.count("\n    to do: its result is only reduced to one number") == count, text


@versions.where(versions.types_values)
def test_a_shard_map_that_runs_without_jit_lacks_no_reduction(cpu_mesh):
    """JAX runs it step by step, and at the end takes one of values that were equal before."""

    def differing(call):
        with shardrules.watch() as seen:
            call(np.ones((8, 8), np.float32))
        assert len(seen)
        return [one.kind for program in seen for one in outputs.find(program.judgement)]

    options = {"mesh": cpu_mesh, "out_specs": P("data"), "check": False}
    f = versions.shard_map(lambda x: jnp.tanh(x) * 2, in_specs=P("data"), **options)
    assert differing(f) == []
    # A jit of what that last program does is judged.
    taken = versions.shard_map(lambda x: x, in_specs=P(("data", "model")), **options)
    assert differing(jax.jit(taken)) == ["differs"]
