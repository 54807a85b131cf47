"""The programs of public reports: the cause is the first thing said, and following it saves that."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from core import versions
from jax.sharding import NamedSharding

from costs import reported
from costs.test_waste import random_like, structs
from shardrules import install, report, testing
from shardrules.paths import here

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
