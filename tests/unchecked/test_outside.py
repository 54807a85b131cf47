"""A function that changes something outside of Python's objects isn't traced to look at it."""

import gc
import importlib
import importlib.util
import os
import pathlib
import pdb
import shutil
import socket
import sqlite3
import subprocess
import sys
import tempfile
import threading
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from core import versions
from jax.sharding import PartitionSpec as P

import shardrules
from shardrules.hooks import shard_map
from shardrules.unchecked.python_state import Kept
from shardrules.unchecked.retrace import Unseeable
from shardrules.unchecked.unseen import unseen


def appended(path):
    with open(path, "a") as file:
        file.write("traced")


def by_descriptor(path):
    os.write(os.open(path, os.O_WRONLY | os.O_TRUNC), b"traced")


def in_a_new_file(path):
    with tempfile.NamedTemporaryFile("w", dir=path.parent, delete=False) as file:
        file.write("traced")


def in_a_table(path):
    sqlite3.connect(path.with_name("of.db")).execute("create table traced (n)")


def to_the_standard_output(path):
    with open(os.dup(1), "w") as file:
        file.write("")


CHANGES = {
    "append": appended,
    "write_text": lambda path: path.write_text("traced"),
    "numpy": lambda path: np.save(path, np.ones(1)),
    "update": lambda path: path.open(mode="r+"),
    "descriptor": by_descriptor,
    "descriptor to write to": to_the_standard_output,
    "folder": lambda path: path.with_name("folder").mkdir(),
    "folders": lambda path: os.makedirs(path.with_name("a") / "b"),
    "temporary folder": lambda path: tempfile.mkdtemp(dir=path.parent),
    "temporary file": in_a_new_file,
    "removed": os.remove,
    "renamed": lambda path: path.rename(path.with_name("new")),
    "copied": lambda path: shutil.copy(path, path.with_name("new")),
    "folder removed": lambda path: shutil.rmtree(path.parent),
    "link": lambda path: path.with_name("new").symlink_to(path),
    "times": pathlib.Path.touch,
    "permissions": lambda path: path.chmod(0o600),
    "working folder": lambda path: os.chdir(path.parent),
    "process": lambda path: subprocess.run(["touch", path.with_name("new")]),
    "shell": lambda path: os.system(f"touch {path.with_name('new')}"),
    "database": in_a_table,
    "datagram": lambda path: socket.socket(type=socket.SOCK_DGRAM).sendto(b"", ("127.0.0.1", 9)),
    "connection": lambda path: socket.create_connection(("127.0.0.1", 9)),
    "input": lambda path: input(),
    "breakpoint": lambda path: breakpoint(),
    "debugger": lambda path: pdb.Pdb(),
}


def there(path):
    times = {name: (path.parent / name).stat() for name in os.listdir(path.parent)}
    return os.getcwd(), path.read_text(), [(n, t.st_mtime_ns, t.st_mode) for n, t in times.items()]


@pytest.mark.parametrize("kind", CHANGES)
def test_what_a_body_changes_outside_is_not_done(kind, tmp_path, monkeypatch):
    monkeypatch.chdir(os.getcwd())
    path = tmp_path / "of.npy"
    path.write_text("as it was")
    before = there(path)
    with pytest.raises(Unseeable, match="its body "), unseen(Kept()):
        CHANGES[kind](path)
    assert there(path) == before


def test_the_reason_names_what_is_done(tmp_path):
    def why(change):
        with pytest.raises(Unseeable) as caught, unseen(Kept()):
            change(tmp_path / "new")
        return str(caught.value)

    assert why(appended) == "its body opens a file to write to it"
    assert why(os.mkdir) == "its body calls os.mkdir"
    assert why(CHANGES["process"]) == "its body calls subprocess.Popen"


@versions.where(lambda: sys.version_info >= (3, 12))  # before, no event tells of it
def test_a_body_that_starts_a_thread_is_not_looked_at():
    with pytest.raises(Unseeable, match="its body starts a thread"), unseen(Kept()):
        threading.Thread(target=int).start()


def test_a_body_that_goes_on_without_it_is_not_looked_at(tmp_path):
    """It would compute something else than the program does."""
    with pytest.raises(Unseeable, match=r"calls os\.mkdir"), unseen(Kept()):
        try:
            os.mkdir(tmp_path / "new")
        except Exception:  # whatever it is
            os.listdir(tmp_path)


def test_what_changes_nothing_is_done(tmp_path):
    path = tmp_path / "text"
    path.write_text("as it was")
    with unseen(Kept()):
        assert path.read_text() == "as it was" and os.listdir(tmp_path) == ["text"]
        with open(os.devnull, "w") as file:
            file.write("")


def test_other_threads_write_while_one_looks(tmp_path):
    began, looks = threading.Event(), threading.Event()
    path = tmp_path / "text"

    def write():
        began.set()
        looks.wait()
        appended(path)

    thread = threading.Thread(target=write)
    thread.start()
    began.wait()
    with unseen(Kept()):
        looks.set()
        thread.join()
    assert path.read_text() == "traced"
    appended(path)
    assert path.read_text() == "tracedtraced"


def test_what_a_module_does_when_it_is_imported_is_done(tmp_path, monkeypatch):
    """It stays imported, so that it doesn't do so again."""
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "dont_write_bytecode", False)
    text = f"import os\nos.mkdir({str(tmp_path / 'made')!r})\n"
    module = tmp_path / "makes_a_folder.py"
    module.write_text(text)
    with unseen(Kept()):
        importlib.import_module("makes_a_folder")
    sys.modules.pop("makes_a_folder")
    bytecode = pathlib.Path(importlib.util.cache_from_source(str(module)))
    assert (tmp_path / "made").is_dir() and bytecode.exists()


@pytest.mark.parametrize("how", ["finalizer", "method"])
def test_what_is_due_when_an_object_goes_is_done(how, tmp_path):
    class Folder:
        def __init__(self):
            self.path = tmp_path / how
            self.path.mkdir()
            self.itself = self
            if how == "finalizer":
                weakref.finalize(self, os.rmdir, self.path)

        def __del__(self):
            if how == "method":
                os.rmdir(self.path)

    Folder()
    with unseen(Kept()):
        gc.collect()
    assert not (tmp_path / how).exists()


def test_jax_writes_its_cache_in_a_look(tmp_path):
    asked = {
        "jax_compilation_cache_dir": str(tmp_path / "cache"),
        "jax_persistent_cache_min_compile_time_secs": 0.0,
        "jax_persistent_cache_min_entry_size_bytes": -1,
    }
    before = {name: getattr(jax.config, name) for name in asked}
    cache = importlib.import_module("jax.experimental.compilation_cache.compilation_cache")
    try:
        for name, value in asked.items():
            jax.config.update(name, value)
        cache.reset_cache()
        with unseen(Kept()):
            jax.jit(lambda x: jnp.sin(x) * 1.234567)(1.0)
        assert os.listdir(tmp_path / "cache")
    finally:
        for name, value in before.items():
            jax.config.update(name, value)
        cache.reset_cache()


@versions.where(versions.types_values)
def test_a_body_that_makes_folders_runs_as_written(tmp_path, cpu_mesh):
    made = []

    def body(x, w):
        os.makedirs(tmp_path / str(len(made)))
        made.append(None)
        return x * w

    with shardrules.install(unchecked="check") as handle:
        program = shard_map(body, cpu_mesh, (P("data"), P()), P("data"), check=False)
        jax.jit(program)(np.ones(8), np.ones(()))
        (site,) = handle.unchecked()
    assert not site.switched and site.reason.endswith("its body calls os.mkdir")
    assert os.listdir(tmp_path) == ["0"]


def test_what_is_printed_by_other_ways_is_dropped(capfd):
    with unseen(Kept()):
        sys.stdout.writelines(["a", "look"])
        sys.stderr.buffer.write(b"a look")
        sys.stdout.flush()
        sys.stderr.flush()
    sys.stdout.flush()
    assert capfd.readouterr() == ("", "")
