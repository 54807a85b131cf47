"""The programs of public reports: the cause is the first thing said, and following it saves that."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from core import versions
from jax.sharding import NamedSharding

from costs import reported
from costs.test_waste import random_like, structs
from shardrules import hlo, install, report, testing
from shardrules.door.compiled import placements
from shardrules.paths import here
from shardrules.program import matching
from shardrules.report.text import markdown, plain

pytestmark = pytest.mark.one_lane


def cases():
    for name, table in reported.REPORTS.items():
        for variant, pair in table.items():
            # What calls another platform's functions does not compile.
            for platform in pair.platforms if name == "jax#38551" else reported.ALL:
                marks = [] if platform == "cpu" else [getattr(pytest.mark, platform)]
                if name == "jax#25010":
                    marks.append(versions.where(versions.names_gathers_by_use))
                yield pytest.param(platform, pair, marks=marks, id=f"{name}-{variant}-{platform}")


def compiled(mesh, body, pair):
    outs = {} if pair.outs is None else {"out_shardings": NamedSharding(mesh, pair.outs)}
    with jax.set_mesh(mesh), install():
        return jax.jit(body, **outs).lower(*structs(mesh, pair.args)).compile()


def assert_equal(one, other):
    one, other = (np.asarray(a, np.float32) for a in (one, other))
    cut = other[tuple(map(slice, one.shape))]  # what is padded to stay sharded
    np.testing.assert_allclose(one, cut, rtol=2e-5, atol=1e-5)


@pytest.mark.sampled
@pytest.mark.parametrize("platform, pair", [*cases()], indirect=["platform"])
def test_the_cause_is_said_first_and_following_it_saves_as_much(platform, pair):
    name, mesh = platform
    jnp.linalg.cholesky(jnp.eye(2)).block_until_ready()  # loads LAPACK
    now, then = (compiled(mesh, body, pair) for body in (pair.before, pair.after))
    found = report.content(testing.judge(now))
    if name not in pair.platforms:
        assert pair.kind not in [h.kind for h in found.hints]
        return
    assert found.hints[0].kind == pair.kind and not found.failing
    assert f"could be cheaper: {pair.kind}" in found.about
    place = found.hints[0].entry.place  # its line or, on JAX 0.12, the argument that it moves
    assert place or name != "cpu"  # XLA for GPU leaves some with neither
    assert found.about.partition("could be cheaper")[2].find(here(place)) > 0
    after = report.content(testing.judge(then))
    assert pair.kind not in [h.kind for h in after.hints]
    hints = [h for h in found.hints if h.kind == pair.kind]
    if pair.kind == "asked each trip":  # of unknown length
        assert after.account.total.wire_bytes == 0 and not after.judgement.verdicts
    else:
        said = sum(h.sent_before - h.sent_after for h in hints)
        had = found.account.total.wire_bytes - after.account.total.wire_bytes
        # Of a mask nothing is left to be counted either.
        assert had == said or (pair.kind == "narrow first" and had > said)
    if name == "cpu":
        arrays = random_like(structs(mesh, pair.args))
        if pair.positive:
            arrays = [jnp.abs(a) + 0.1 for a in arrays]
        jax.tree.map(assert_equal, now(*arrays), then(*arrays))


def without_names(text):
    return re.sub(r", metadata=\{[^}]*\}", "", text)


def texts(mesh, body, args, folder):
    """Compile a program; return it, its text, and that from behind XLA's partitioner."""
    options = {"xla_dump_to": str(folder), "xla_dump_hlo_pass_re": "spmd-partitioning"}
    options["xla_dump_hlo_as_text"] = True
    lowered = jax.jit(body).lower(*structs(mesh, args))
    compiled = lowered.compile(compiler_options=options)
    (early,) = folder.glob("*after_spmd-partitioning*.txt")
    return compiled, compiled.as_text(), early.read_text()


@pytest.mark.parametrize("name", reported.UNNAMED)
def test_a_text_without_names_or_before_the_last_passes(cpu_mesh, name, tmp_path):
    """A public module of a 70B model was told that a quarter of its bytes go by a shard_map."""
    body, args = reported.UNNAMED[name]
    with jax.set_mesh(cpu_mesh):
        program, named, early = texts(cpu_mesh, body, args, tmp_path)
    for text in (without_names(named), early, without_names(early)):
        module = hlo.parse(text)
        shardings = matching(module, placements(program).parameters())
        judgement = hlo.judge(module, mesh=dict(cpu_mesh.shape), parameter_shardings=shardings)
        content = report.content(judgement)
        said = [as_text(content) for as_text in (plain, markdown, report.as_json)]
        if text is not early:
            assert all("shard_map" not in what and "partitioner" not in what for what in said)
        if text != without_names(named):
            assert not content.hints and content.about.startswith("not compiled: ")
        # What is proven redundant is so in any text.
        assert bool(content.findings) == (name == "equal")


def names_gathers_by_array():
    return not versions.names_gathers_by_use()


@versions.where(names_gathers_by_array)
@pytest.mark.parametrize("name", reported.TWICE)
def test_a_gather_for_a_constraint_is_named_as_one_without(cpu_mesh, name):
    """Why there is no *gathered twice* under jit on JAX 0.12: advice on the constraint may cost."""
    pair, named = reported.TWICE[name], []
    layer = {"residual": reported.residual}.get(name, reported.dense)
    for layout in (reported.whole, lambda w: w):
        body = reported.trained(layout, False, layer)
        judgement = testing.judge(compiled(cpu_mesh, body, pair))
        found = [v.collective for v in judgement.verdicts if v.collective.kind == "all-gather"]
        named.append([c.op_name for c in found if "transpose" in c.op_name])
        assert not report.content(judgement).hints
    assert named[0] == named[1] != []


@pytest.mark.parametrize("constrained", [False, True], ids=["none", "sharded"])
@pytest.mark.parametrize("name", reported.TWICE)
def test_a_gather_that_no_constraint_asks_for(platform, name, constrained):
    """XLA's partitioner gathers for the product, twice: what a policy keeps is sharded then."""
    # JAX 0.12 names a gather by the array that it moves, also one that a constraint sharded.
    _, mesh = platform
    pair = reported.TWICE[name]
    own = reported.P(*pair.args[1][1][1:])  # as a weight is sharded

    def layout(w):
        return reported.constrained(w, own) if constrained else w

    body = reported.trained(layout, False, reported.dense)
    judgement = testing.judge(compiled(mesh, body, pair))
    assert "gathered twice" not in [h.kind for h in report.content(judgement).hints]
