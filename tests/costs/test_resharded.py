"""From one sharding to another by gathering all: the way between that the hint names is followed."""

import re

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from costs.test_waste import follow, hints, structs
from shardrules import hlo, report
from shardrules.costs import waste

MATRIX = (1024, 512)
CUBE = (128, 128, 128)
DATA, MODEL = "data", "model"
# From, to, by way of; sent before and after.
WAYS = {
    "columns": (P(DATA), P(None, MODEL), P(DATA, MODEL), (1572864, 786432)),
    "few": (P(MODEL), P(None, DATA), P(MODEL, DATA), (1048576, 262144)),
    "rows": (P(None, MODEL), P(DATA), P(DATA, MODEL), (1048576, 262144)),
    "both": (P((DATA, MODEL)), P(None, DATA), P(None, (DATA, MODEL)), (1835008, 491520)),
    "minor": (P(None, (DATA, MODEL)), P(MODEL), P(MODEL, DATA), (1835008, 917504)),
    "turned": (P((MODEL, DATA)), P(None, DATA), P(MODEL, DATA), (1835008, 458752)),
}


def constrained(x, *specs):
    for spec in specs:
        x = lax.with_sharding_constraint(x, spec)
    return x


def moved(mesh, start, *specs):
    """A step that makes an array by one sharding and reads it by another."""
    out = NamedSharding(mesh, specs[-1])
    return jax.jit(lambda x: constrained(jnp.tanh(x), start, *specs) * 2, out_shardings=out)


def written(spec):
    """Write a PartitionSpec as one types it; JAX's versions print it in several ways."""
    axes = [a[0] if isinstance(a, tuple) and len(a) == 1 else a for a in spec]
    return f"P({', '.join(map(repr, axes))})"


@pytest.mark.parametrize("name", WAYS)
def test_from_one_sharding_to_another_by_gathering_all(platform, name):
    start, end, between, sent = WAYS[name]
    mesh = platform[1]
    with jax.set_mesh(mesh):
        f, g = moved(mesh, start, end), moved(mesh, start, between, end)
        (found,) = follow(platform[:2], f, g, structs(mesh, [(MATRIX, start)]), "resharded", sent)
    assert f"from {written(start)} to {written(end)}, and each device keeps a" in found.advice
    assert "XLA gathers all of f32[1024,512] of " in found.advice
    assert "test_resharded.py:" in found.advice.partition(" to bring it")[0]
    # What it says to type, typed.
    typed = re.search(r"write x = (jax\.lax\.with_sharding_constraint\(.*\))$", found.advice)[1]
    whole = jnp.ones(MATRIX) if platform[0] == "cpu" else None
    if whole is not None:
        array = eval(typed, {"jax": jax, "mesh": mesh, "P": P, "x": whole})
        assert array.sharding.spec == between


def added(mesh, start, *specs):
    """As in jax#21562, where no constraint stands on what is gathered."""
    out = NamedSharding(mesh, specs[-1])
    return jax.jit(lambda a, b, c: c + constrained(a + b, *specs), out_shardings=out)


@pytest.mark.parametrize(
    "platform", ["cpu", pytest.param("gpu", marks=pytest.mark.gpu)], indirect=True
)
def test_an_array_that_is_gathered_along_two_dimensions(platform):
    """Each gather has a hint; the second one is of what is left of the first."""
    start, end, mesh = P(MODEL, None, DATA), P(None, (DATA, MODEL)), platform[1]
    given = structs(mesh, [(CUBE, start), (CUBE, start), (CUBE, end)])
    with jax.set_mesh(mesh):
        f, g = added(mesh, start, end), added(mesh, start, P(MODEL, DATA), end)
        found = follow(platform[:2], f, g, given, "resharded", (7340032, 1310720))
    assert [h.round_trips_after for h in found] == [1, 1]
    whole, rest = sorted((h.advice for h in found), key=len, reverse=True)
    assert f"from {written(start)} to {written(end)}" in whole and written(P(MODEL, DATA)) in whole
    assert rest.startswith("goes away with the gather at ")


def test_the_program_s_own_dimensions_are_named(platform):
    """XLA transposes and splits what it gathers; no two dimensions are of one size here."""
    start, end, mesh, sizes = (
        P(MODEL, None, DATA),
        P(None, (DATA, MODEL)),
        platform[1],
        (128, 256, 64),
    )
    out = NamedSharding(mesh, P((DATA, MODEL)))
    with jax.set_mesh(mesh):
        f = jax.jit(lambda x: (constrained(x + x * 2, end) * 2).swapaxes(0, 1), out_shardings=out)
        found = hints(f, structs(mesh, [(sizes, start)]))
    said = max((h.advice for h in found if h.kind == "resharded"), key=len)
    assert said.startswith("XLA gathers all of f32[128,256,64] ")
    assert f"from {written(start)} to {written(end)}, and each device keeps a" in said
    assert f"by way of {written(P(MODEL, DATA))} it sends" in said


SQUARE = P(DATA, MODEL)


@pytest.mark.parametrize(
    "start, f",
    [
        (P(DATA), lambda x: constrained(jnp.tanh(x), P(DATA), P(None, DATA)) * 2),  # all-to-all
        (P(DATA), lambda x: constrained(jnp.tanh(x), P(DATA), P(DATA, MODEL)) * 2),  # a slice
        (SQUARE, lambda x: constrained(jnp.tanh(x), SQUARE, P(None, MODEL)) * 2),  # what it needs
        (P(DATA), lambda x: (lambda y: (y, constrained(y, P(None, MODEL))))(constrained(x, P()))),
        (P(DATA), lambda x: constrained(jnp.tanh(x) @ jnp.ones((512, 512)), P(None, MODEL))),
    ],
    ids="all_to_all slice gather whole product".split(),
)
def test_what_no_constraint_between_replaces(cpu_mesh, start, f):
    with jax.set_mesh(cpu_mesh):
        given = structs(cpu_mesh, [(MATRIX, start)])
        assert not [h for h in hints(jax.jit(f), given) if h.kind == "resharded"]


def test_a_small_array_is_not_worth_another_round_trip(cpu_mesh):
    start, end = P((DATA, MODEL)), P(None, DATA)
    with jax.set_mesh(cpu_mesh):
        given = structs(cpu_mesh, [((64, 64), start)])
        assert hints(moved(cpu_mesh, start, end), given) == []


def test_dimensions_that_the_way_between_does_not_divide(cpu_mesh):
    """A constraint to P(None, ('data', 'model')) is refused for 508 columns."""
    start, end = P((DATA, MODEL)), P(None, DATA)
    with jax.set_mesh(cpu_mesh):
        given = structs(cpu_mesh, [((1024, 508), start)])
        found = hints(moved(cpu_mesh, start, end), given)
    assert all(written(P(None, (DATA, MODEL))) not in h.advice for h in found)


def test_a_gradient_that_comes_back_another_way(cpu_mesh):
    """The constraint between would stand in the forward pass too, where it may cost more."""
    start, end = P(None, DATA), P((DATA, MODEL))
    out = NamedSharding(cpu_mesh, start)
    f = jax.grad(lambda x: (constrained(jnp.tanh(x), start, end) ** 2).sum())
    with jax.set_mesh(cpu_mesh):
        found = hints(jax.jit(f, out_shardings=out), structs(cpu_mesh, [(MATRIX, start)]))
    assert "resharded" not in [h.kind for h in found]


# What XLA makes of jax#21562 for TPU v5e (JAX 0.10.2), without what isn't read here.
ON_TPU = """HloModule jit_f, is_scheduled=true, num_partitions=8

%sliced (p: f32[128,128,128], i: s32[]) -> f32[128,16,128] {
  %p = f32[128,128,128]{1,2,0:T(8,128)S(1)} parameter(0)
  %zero = s32[]{:T(128)} constant(0)
  %i = s32[]{:T(128)S(6)} parameter(1)
  ROOT %slice = f32[128,16,128]{1,2,0:T(8,128)S(1)} dynamic-slice(%p, %zero, %i, %zero),
    dynamic_slice_sizes={128,16,128}
}

ENTRY %main (a: f32[64,128,32], b: f32[64,128,32], c: f32[128,16,128]) -> f32[128,16,128] {
  %rows = s32[]{:T(128)} constant(16)
  %a = f32[64,128,32]{1,2,0:T(8,128)} parameter(0),
    sharding={devices=[2,1,4]<=[4,2]T(1,0)}, metadata={op_name="a"}
  %b = f32[64,128,32]{1,2,0:T(8,128)} parameter(1),
    sharding={devices=[2,1,4]<=[4,2]T(1,0)}, metadata={op_name="b"}
  %c = f32[128,16,128]{2,1,0:T(8,128)} parameter(2),
    sharding={devices=[1,8,1]<=[8]}, metadata={op_name="c"}
  %sum = f32[64,128,32]{1,2,0:T(8,128)S(1)} add(%a, %b), metadata={op_name="jit(f)/add"}
  %id = u32[]{:T(128)S(6)} partition-id()
  %number = s32[]{:T(128)S(6)} convert(%id)
  %start = s32[]{:T(128)S(6)} multiply(%number, %rows)
  %all-gather = f32[512,128,32]{1,2,0:T(8,128)S(1)} all-gather(%sum), channel_id=2,
    replica_groups=mesh['axis_0'=2,'axis_1'=1,'axis_2'=4], device_ids=([4,2]T(1,0))
    {'axis_0','axis_2'}, dimensions={0}, use_global_device_ids=true, metadata={op_name="jit(f)/add"}
  %split = f32[2,64,128,4,32]{2,4,1,3,0:T(8,128)S(1)} bitcast(%all-gather)
  %copy = f32[2,64,128,4,32]{2,4,3,1,0:T(8,128)S(1)} copy(%split)
  %joined = f32[128,128,128]{1,2,0:T(8,128)S(1)} bitcast(%copy)
  %own = f32[128,16,128]{1,2,0:T(8,128)S(1)} fusion(%joined, %start), kind=kLoop, calls=%sliced
  %turned = f32[128,16,128]{2,1,0:T(8,128)S(1)} copy(%own)
  ROOT %add = f32[128,16,128]{2,1,0:T(8,128)} add(%c, %turned), metadata={op_name="jit(f)/add"}
}
"""
NEAR_MISSES = {
    # The shards of the last dimension are not its major part.
    "minor": (
        "{2,4,1,3,0:T(8,128)S(1)} bitcast|{2,4,3,1,0:T(8,128)S(1)} copy|"
        "f32[128,128,128]{1,2,0:T(8,128)S(1)} bitcast",
        "{2,4,1,3,0:T(8,128)S(1)} bitcast|{2,3,4,1,0:T(8,128)S(1)} copy|"
        "f32[128,128,128]{1,2,0:T(8,128)S(1)} bitcast",
    ),
    # 2 x 4 shards of 64 rows, of which the copy keeps the order: another dimension is sliced.
    "not split": ("{2,4,3,1,0:T(8,128)S(1)} copy", "{2,4,1,3,0:T(8,128)S(1)} copy"),
    # 32 rows don't fill tiles of 64.
    "tiles": ("T(8,128)S(1)} copy(%split)", "T(64,128)S(1)} copy(%split)"),
    "whole": ("multiply(%number, %rows)", "multiply(%rows, %rows)"),
    "another place": ("multiply(%number, %rows)", "add(%number, %rows)"),
}


def hints_of(text):
    judgement = hlo.judge(text, mesh={DATA: 4, MODEL: 2})
    assert [verdict.verdict for verdict in judgement.verdicts] == ["needed"]
    return waste.hints(judgement)


def test_a_gather_over_both_axes_that_is_split_again():
    (hint,) = hints_of(ON_TPU)
    assert (hint.kind, hint.sent_before, hint.sent_after) == ("resharded", 7340032, 1310720)
    assert hint.round_trips_after == 2 and written(P(MODEL, DATA)) in hint.advice
    way = f"from {written(P(MODEL, None, DATA))} to {written(P(None, (DATA, MODEL)))}, and each"
    assert f"XLA gathers all of f32[128,128,128] of jit(f)/add to bring it {way}" in hint.advice
    said = report.plain(report.content(hlo.judge(ON_TPU, mesh={DATA: 4, MODEL: 2})))
    assert re.search(r"saves [^\n]*6\.03 MB \(82%\), for 1 round trip more", said), said


@pytest.mark.parametrize("change", NEAR_MISSES)
def test_what_is_split_another_way(change):
    text = ON_TPU
    for old, new in zip(*(side.split("|") for side in NEAR_MISSES[change])):
        assert old in text
        text = text.replace(old, new)
    assert "resharded" not in [hint.kind for hint in hints_of(text)]
