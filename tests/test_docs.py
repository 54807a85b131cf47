"""README and docs/: each page runs as pasted into a fresh process, and prints what it says."""

import doctest
import json
import os
import pathlib
import re
import subprocess
import sys

import pytest

import shardrules

ROOT = pathlib.Path(__file__).parent.parent
DOCS = ROOT / "docs"
PAGES = [ROOT / "README.md", *sorted(DOCS.rglob("*.md"))]
BLOCK = re.compile(r"```python\n(.*?)```\n(?:\n?```text\n(.*?)```)?", re.DOTALL)

# Runs the blocks of stdin one after the other, as a reader would paste them, and prints what each printed.
READER = """
import contextlib, io, json, sys
names, printed = {"__name__": "__main__"}, []
for code in json.load(sys.stdin):
    with contextlib.redirect_stdout(io.StringIO()) as out:
        exec(compile(code, "<page>", "exec"), names)
    printed.append(out.getvalue())
print(json.dumps(printed))
"""


def pasted(page, folder):
    """Return what each block of a page printed, and what the page says that it prints."""
    blocks = BLOCK.findall(page)
    env = {k: v for k, v in os.environ.items() if not k.startswith(("JAX_", "XLA_", "SHARDRULES_"))}
    done = subprocess.run(
        [sys.executable, "-W", "ignore:Some donated buffers", "-c", READER],
        input=json.dumps([code for code, _ in blocks]),
        capture_output=True,
        text=True,
        env=env,
        cwd=folder,
    )
    assert done.returncode == 0, done.stderr

    def lines(text):
        return [line.rstrip() for line in text.splitlines()]

    printed = json.loads(done.stdout.splitlines()[-1])
    return [(lines(out), lines(shown)) for out, (_, shown) in zip(printed, blocks)]


@pytest.mark.one_lane
@pytest.mark.parametrize(
    "page", [page for page in PAGES if "```python" in page.read_text()], ids=lambda page: page.stem
)
def test_a_page_shows_what_happens(page, tmp_path):
    for printed, shown in pasted(page.read_text(), tmp_path):
        assert printed == shown


def test_a_page_that_is_wrong_fails(tmp_path):
    [(printed, shown)] = pasted("```python\nprint(1 + 1)\n```\n```text\n3\n```\n", tmp_path)
    assert printed != shown


@pytest.mark.slow
def test_a_page_that_takes_devices_for_granted_fails(tmp_path):
    page = "```python\nimport jax\nassert len(jax.devices('cpu')) == 8\n```\n"
    with pytest.raises(AssertionError):
        pasted(page, tmp_path)


@pytest.mark.parametrize("name, most", [("README.md", 130), ("CHANGELOG.md", 120)])
def test_a_page_is_short_and_its_lines_fit(name, most):
    lines = (ROOT / name).read_text().splitlines()
    assert len(lines) < most
    assert [line for line in lines if len(line) > 100] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.stem)
def test_links_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)#\s]+)", page.read_text()):
        assert target.startswith("https://") or (page.parent / target).exists(), target


MODULES = ("aot", "errors", "hlo", "registry", "report", "testing")


def test_the_reference_has_every_public_name(monkeypatch):
    monkeypatch.syspath_prepend(DOCS)
    import public_names

    written = public_names.written_out((DOCS / "reference.md").read_text())
    public = [f"shardrules.{name}" for name in shardrules.__all__ if name != "__version__"]
    for module in MODULES:
        names = getattr(shardrules, module).__all__
        public += [f"shardrules.{module}.{name}" for name in names]
    assert sorted(re.findall(r"^::: (.*)$", written, re.MULTILINE)) == sorted(public)


def test_the_page_of_commands_holds_each_ones_help(monkeypatch):
    monkeypatch.syspath_prepend(DOCS)
    import public_names

    from shardrules.__main__ import COMMANDS

    written = public_names.written_out((DOCS / "commands.md").read_text())
    assert sorted(re.findall(r"^## (\w+)$", written, re.MULTILINE)) == sorted(COMMANDS)
    assert written.count("usage: shardrules ") == len(COMMANDS) and ":::" not in written
    assert max(map(len, written.splitlines())) <= 100 and "--diff FILE" in written


# What a reader looks up first; each has an example in its docstring.
MAIN = {
    shardrules: "install register rules all_gather all_reduce permute per_device outputs vary "
    "place_casts explain scan_calls watch assert_same_rules",
    shardrules.testing: "account assert_no_defensive_psum assert_collectives assert_budget "
    "assert_outputs_replicated check_replicated_inputs check_rule at_most steady_state "
    "assert_donated assert_no_host_transfers assert_no_large_constants assert_output_sharding "
    "assert_loop",
    shardrules.aot: "gpu_names",
    shardrules.hlo: "judge",
    shardrules.report: "page",
}
EXAMPLES = [(module, name) for module, names in MAIN.items() for name in names.split()]


AT_HAND = """
import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

import shardrules
from shardrules import hlo, report, testing

mesh = Mesh(np.array(jax.devices()).reshape(4, 2), ("data", "model"))

def scale_kernel(x_ref, o_ref):
    o_ref[...] = 2 * x_ref[...]

def scale(x):
    out = jax.ShapeDtypeStruct(x.shape, x.dtype)
    return pl.pallas_call(scale_kernel, out, interpret=True)(x)

def loss(w, x):
    return jax.lax.psum((x @ w).sum(), "data")

on_mesh = jax.shard_map(loss, mesh=mesh, in_specs=(P(), P("data")), out_specs=P())
step = jax.jit(jax.grad(on_mesh))
f = jax.shard_map(scale, mesh=mesh, in_specs=P("data"), out_specs=P("data"))
w = jax.device_put(np.ones((128, 64), np.float32), NamedSharding(mesh, P()))
x = jax.device_put(np.ones((8, 128), np.float32), NamedSharding(mesh, P("data")))
"""


@pytest.fixture(scope="module")
def at_hand():
    """What the docstrings' examples take as given."""
    names: dict = {}
    exec(AT_HAND, names)
    return names


@pytest.mark.parametrize("module, name", EXAMPLES, ids=[name for _, name in EXAMPLES])
def test_an_example_in_a_docstring(module, name, at_hand):
    found = doctest.DocTestFinder(recurse=False).find(
        getattr(module, name), name, module=False, globs=dict(at_hand)
    )
    assert sum(len(test.examples) for test in found) >= 1
    for test in found:
        said = []
        doctest.DocTestRunner().run(test, out=said.append, clear_globs=False)
        assert not said, "".join(said)
