"""What `run` says that a check saves is what a program sends less, compiled with the check on."""

import contextlib
import pathlib
import re
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hooks.casts import test_kernels_in_bwds as kernels
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import shardrules as sr
from shardrules import testing
from shardrules.door import again
from shardrules.unchecked import check_off, migration
from shardrules.units import size
from shardrules.watching import programs

sys.path.insert(0, str(pathlib.Path(__file__).parents[2] / "benchmarks"))
import models

pytestmark = [
    pytest.mark.one_lane,
    pytest.mark.filterwarnings("ignore:shardrules.vary"),
    pytest.mark.filterwarnings("ignore:.with mesh"),
]


@pytest.fixture(scope="module")
def mesh():
    return Mesh(np.array(jax.devices()).reshape(2, 4), ("data", "tensor"))


def watched(make, *args, around=contextlib.nullcontext):
    """Compile a step as a script under `run` does, and return its report."""
    with programs.watch() as seen:
        step = make()
        with around():
            jax.jit(step).lower(*args).compile()
    (content,) = (c for c in seen.judged().contents if c.account.entries)
    return content


def said(content):
    """Return what is said of each group of findings, in one line each."""
    return [
        dict(item.lines) for block in content.changes if block.title == "Findings"
        for item in block.items
    ]  # fmt: skip


def is_sure(finding):
    """Return whether the program was compiled with its checks on: the saving is no bound."""
    return "at most" not in finding.get("saves", "")


ARGS = np.ones((8, 8), np.float32), np.ones((16, 8), np.float32)


def test_a_step_of_kernels_saves_to_the_byte_what_is_said(mesh):
    args = kernels.arguments()
    content = watched(lambda: kernels.step(mesh, check=False), *args)
    with sr.install():
        on = testing.account(jax.jit(kernels.step(mesh)), *args).total.wire_bytes
    saved = content.account.total.wire_bytes - on
    assert 0 < saved == content.avoidable.bytes
    (first, *_) = said(content)
    # Alone, its all-reduce of the stream moves less than both findings save, and at most that.
    assert first["saves"].startswith(f"{size(saved)} (") and is_sure(first)
    assert first["saves"].endswith("together with 1 other finding")
    assert "migrate" in first["to do:"] and "test_kernels_in_bwds.py" in first["to do:"]


def test_a_kernel_that_is_not_linear_is_named_and_migrate_is_not(mesh):
    def make():
        return kernels.step(mesh, kernels.clipped_norm_bwd_kernel, check=False)

    (first, *_) = said(watched(make, *kernels.arguments()))
    assert not is_sure(first) and "migrate" not in first["to do:"]
    line = r"stays off: the bwd '<lambda>' \(at \S*\.py:\d+\) is not known to be linear"
    assert re.search(line, first["to do:"])
    assert "'clipped_norm_bwd_kernel'" in first["to do:"]


def test_a_gradient_that_a_body_takes_too_large_is_said_although_its_check_stays_off(mesh):
    def loss(w, x):
        return jnp.mean(lax.psum(jnp.tanh(x @ w[0]) @ w[1], "tensor") ** 2)

    def make():
        def body(w, x):
            return jax.tree.map(lambda g: lax.pmean(g, "data"), jax.grad(loss)(w, x))

        over = P(None, "tensor"), P("tensor")
        specs = dict(in_specs=(over, P("data")), out_specs=over, check_vma=False)
        return jax.shard_map(body, mesh=mesh, **specs)

    w, x = (np.ones((8, 16), np.float32), np.ones((16, 8), np.float32)), ARGS[1]
    found = [finding["to do:"] for finding in said(watched(make, w, x))]
    count = mesh.shape["tensor"]
    assert any(
        text.startswith(f"over tensor, this sums {count} equal values") and "stays off" in text
        for text in found
    ), found


def accumulated(x_ref, w_ref, o_ref, total):
    @pl.when(pl.program_id(1) == 0)
    def _():
        total[...] = jnp.zeros_like(total)

    total[...] += x_ref[...] @ w_ref[...]

    @pl.when(pl.program_id(1) == pl.num_programs(1) - 1)
    def _():
        o_ref[...] = total[...]


@jax.custom_vjp
def product(x, w):
    (rows, inner), columns = x.shape, w.shape[1]
    return pl.pallas_call(
        accumulated,
        grid=(1, 2),
        in_specs=[
            pl.BlockSpec((rows, inner // 2), lambda i, k: (i, k)),
            pl.BlockSpec((inner // 2, columns), lambda i, k: (k, 0)),
        ],
        out_specs=pl.BlockSpec((rows, columns), lambda i, k: (i, 0)),
        out_shape=jax.ShapeDtypeStruct((rows, columns), x.dtype),
        scratch_shapes=[pltpu.VMEM((rows, columns), x.dtype)],
        interpret=True,
    )(x, w)


product.defvjp(
    lambda x, w: (product(x, w), (x, w)),
    lambda kept, g: (product(g, kept[1].T), product(kept[0].T, g)),
)


def test_a_kernel_whose_lowering_traces_jits_is_traced_again(mesh):
    """JAX multiplies the sizes of a grid by a jit to interpret one, after it traced the program."""

    def loss(w, x):
        return lax.pmean((lax.psum(product(x, w), "tensor") ** 2).sum(), "data")

    def make():
        specs = dict(in_specs=(P("tensor"), P("data", "tensor")), out_specs=P(), check_vma=False)
        return jax.grad(jax.shard_map(loss, mesh=mesh, **specs))

    args = np.ones((16, 8), np.float32), np.ones((8, 16), np.float32)
    (first, *_) = said(watched(make, *args))
    assert "at most" not in first["saves"], first


def test_run_and_migrate_decide_alike_on_a_body_that_takes_gradients(mesh):
    def step(w, x):
        return lax.pmean(jax.grad(lambda w: lax.psum((x @ w).sum(), "tensor"))(w), "data")

    def make():
        specs = dict(mesh=mesh, in_specs=(P(), P("data")), out_specs=P(), check_vma=False)
        return jax.shard_map(step, **specs)

    (only,) = said(watched(make, *ARGS))
    assert "takes gradients" in only["to do:"] and "migrate" not in only["to do:"]
    calls = []
    stop = check_off.start(calls.append)
    jax.jit(make()).lower(*ARGS)
    stop()
    (row,) = migration.rows(calls)
    assert row.verdict == migration.GRADIENTS


@pytest.mark.parametrize("around", ["with mesh", "set_mesh"])
def test_a_program_is_traced_again_under_its_mesh(mesh, around):
    context = {"with mesh": lambda: mesh, "set_mesh": lambda: jax.set_mesh(mesh)}[around]
    content = watched(lambda: kernels.step(mesh, check=False), *kernels.arguments(), around=context)
    assert is_sure(said(content)[0])


def test_under_other_settings_than_then_a_saving_is_at_most(mesh):
    def around():
        return jax.default_matmul_precision("highest")

    content = watched(lambda: kernels.step(mesh, check=False), *kernels.arguments(), around=around)
    saves = said(content)[0]["saves"]
    assert saves.startswith("at most ")
    assert saves.endswith("how much: a mesh or a setting of JAX that was active then no longer is")


@pytest.mark.parametrize("value, same", [(None, True), (False, True), (True, False), ("x", False)])
def test_an_option_that_jax_adds_since_counts_where_it_is_set(value, same, monkeypatch):
    """JAX 0.12 adds one when it first lowers a kernel, and no program is traced as it was then."""
    noted = again.Again(None, (), (), {}, (1, None), (None, None), None)
    monkeypatch.setattr(again.seams, "named", lambda name: lambda: (1, None, value))
    with noted.entered() as is_same:
        assert is_same is same


def test_of_a_shard_map_that_was_made_before_the_watch_a_saving_is_at_most(mesh):
    sr.install().uninstall(ops=True)  # an op that another test called keeps JAX patched
    step = kernels.step(mesh, check=False)
    saves = said(watched(lambda: step, *kernels.arguments()))[0]["saves"]
    assert saves.startswith("at most ")
    assert saves.endswith("how much: its shard_maps were not made inside of the watch")


def test_a_step_that_advances_an_iterator_is_not_traced_again(mesh):
    numbers = iter(range(10))

    def make():
        step = kernels.step(mesh, check=False)
        return lambda params, x: step(params, x * float(next(numbers)))

    content = watched(make, *kernels.arguments())
    saves = said(content)[0]["saves"]
    assert next(numbers) == 1 and saves.startswith("at most ")
    assert saves.endswith("can change 'numbers', a range_iterator, which can't be put back")


def test_no_watch_sees_that_it_is_compiled_again(mesh):
    before = jax.shard_map.__globals__["_shard_map"]
    with programs.watch() as seen:
        jax.jit(kernels.step(mesh, check=False)).lower(*kernels.arguments()).compile()
        assert "at most" not in str(seen) and len(seen) == 1
    assert jax.shard_map.__globals__["_shard_map"] is before


def test_a_jit_stays_compiled_after_it_was_compiled_again(mesh):
    traced = []

    def counted(*args):
        traced.append(args)
        return kernels.step(mesh, check=False)(*args)

    step, args = jax.jit(counted), kernels.arguments()
    with programs.watch() as seen:
        step(*args)
        assert "at most" not in str(seen)
    count = len(traced)
    with programs.watch() as again:
        step(*args)
    assert len(traced) == count
    assert len(again) == 1 and seen is not again


def test_hooks_that_a_script_installed_stay_as_run_ends(mesh, monkeypatch):
    names = jax.shard_map.__globals__
    monkeypatch.setitem(names, "_shard_map", names["_shard_map"])  # put it back after the test
    with check_off.kept():
        handle = sr.install(unchecked="check")
    with handle:
        jax.jit(kernels.step(mesh, check=False)).lower(*kernels.arguments())
        assert any(s.switched and s.file == kernels.__file__ for s in handle.unchecked())


@pytest.mark.sampled
@pytest.mark.slow
@pytest.mark.parametrize("make", models.MODELS, ids=lambda make: make.__name__)
def test_real_steps_save_to_the_byte_what_is_said(make):
    model = make()
    mesh = model.mesh(jax.devices())
    content = watched(lambda: model.step(mesh, False, False), *model.shapes(mesh))
    with sr.install():
        lowered = model.step(mesh, True, False).lower(*model.shapes(mesh))
    saved = content.account.total.wire_bytes - models.figures(lowered.compile())[1]
    assert saved == sum(content.ledger.switched.values())
    for finding in said(content):
        assert is_sure(finding)
        assert ("migrate" in finding["to do:"]) == (saved > 0)
