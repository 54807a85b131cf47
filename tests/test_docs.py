"""README and docs/: each Python block runs, and prints what the text block after it says."""

import contextlib
import doctest
import functools
import io
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
PAGES = sorted(DOCS.rglob("*.md"))
BLOCK = re.compile(r"```python\n(.*?)```\n(?:```text\n(.*?)```)?", re.DOTALL)


def run(page):
    """Yield what each block of a page printed, and what the page says that it prints."""
    names = {"__name__": "docs"}
    for code, shown in BLOCK.findall(page):
        out = io.StringIO()
        with contextlib.redirect_stdout(out):
            exec(compile(code, "<docs>", "exec"), names)
        said = [line.rstrip() for line in out.getvalue().splitlines()]
        yield said, shown.splitlines()


@pytest.fixture
def taken_back(monkeypatch):
    """What a page installs is taken back after it."""
    handles, install = [], shardrules.install

    @functools.wraps(install)
    def noted(*args, **kwargs):
        handles.append(install(*args, **kwargs))
        return handles[-1]

    monkeypatch.setattr(shardrules, "install", noted)
    yield
    for handle in handles:
        handle.uninstall()


@pytest.mark.filterwarnings("ignore:Some donated buffers")
@pytest.mark.usefixtures("taken_back")
@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.stem)
def test_a_page_shows_what_happens(page):
    for said, shown in run(page.read_text()):
        assert said == shown


README = """
import contextlib, io, json, re, sys
names, said = {"__name__": "readme"}, []
for code in json.load(sys.stdin):
    with contextlib.redirect_stdout(io.StringIO()) as out:
        exec(compile(code, "<README>", "exec"), names)
    said.append(out.getvalue())
print(json.dumps(said))
"""


def test_the_readme_shows_what_happens():
    """In a process of its own, since the first block says how many devices there are."""
    text = (ROOT / "README.md").read_text()
    text = text.replace("\n`python examples/quickstart.py` prints\n\n", "")
    blocks = BLOCK.findall(text)
    env = {k: v for k, v in os.environ.items() if k != "XLA_FLAGS"}
    done = subprocess.run(
        [sys.executable, "-c", README],
        input=json.dumps([code for code, _ in blocks]),
        capture_output=True,
        text=True,
        env=env,
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == [shown for _, shown in blocks]
    assert sum(bool(shown) for _, shown in blocks) >= 2


def test_the_readme_leads_with_what_most_need_and_stays_compact():
    text = (ROOT / "README.md").read_text()
    first, _, rest = text.partition("## An example")
    assert "Most kernels need no rule" in first
    for word in ("vma", "varying", "replication rule"):  # what the first sentence doesn't ask for
        assert word not in first.split(". ")[0]
    assert len(text.splitlines()) < 260


@pytest.mark.parametrize("page", [ROOT / "README.md", *PAGES], ids=lambda p: p.stem)
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


def test_a_page_that_is_wrong_fails():
    [(said, shown)] = run("```python\nprint(1 + 1)\n```\n```text\n3\n```\n")
    assert said != shown
