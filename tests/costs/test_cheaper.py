"""Psums that are needed where they stand and would move less elsewhere: found, and failed on."""

import jax
import jax.numpy as jnp
import programs
import pytest
from hlo import text as T
from jax import lax
from jax.sharding import PartitionSpec as P
from raising import raises

import shardrules as sr
from shardrules import errors, hlo, report, testing
from shardrules.costs import walk, waste
from shardrules.costs.waste.program import Program

ROWS = jnp.array([0, 1, 1, 2, 3, 0, 5, 6, 6, 7, 7, 7, 3, 2, 1, 0, 0])
EACH = 8 * 8 * 4


def total(h):
    return lax.psum((h**2).sum(), "data")


def repeated(w, x):
    return total(x @ jnp.repeat(w, 4, axis=0).T)


def gathered(w, x):
    return total(x @ w[ROWS].T)


def read_twice(w, x):
    return total((x @ w) * jnp.tanh(x @ w.T))


def in_a_loop(w, x):
    return total(lax.scan(lambda h, _: (jnp.tanh(h @ w), None), x, None, length=5)[0])


def gradient(body, mesh):
    f = jax.shard_map(body, mesh=mesh, in_specs=(P(), P("data")), out_specs=P())
    return jax.jit(jax.grad(f)), programs.structs(mesh, ((8, 8), P()), ((64, 8), P("data")))


def cheaper(f, args):
    found = waste.dearer(waste.hints(testing.judge(f.lower(*args).compile())))
    return [one.kind for one in found], found


CASES = {
    repeated: ("reduce first", 4 * EACH, EACH),
    read_twice: ("add first", 2 * EACH, EACH),
    in_a_loop: ("after the loop", 5 * EACH, EACH),
}


@pytest.mark.parametrize("body", CASES, ids=lambda body: body.__name__)
def test_each_is_found_and_gone_where_the_cast_is_early(body, cpu_mesh):
    kind, before, after = CASES[body]
    f, args = gradient(body, cpu_mesh)
    kinds, (found, *_) = cheaper(f, args)
    assert kinds == [kind]
    assert f"{before} B" in found.advice and f"become {after} B" in found.advice
    assert found.advice.endswith(" instead: x = shardrules.vary(x, 'data')")
    assert found.entry.source.startswith(__file__)
    f, args = gradient(lambda w, x: body(sr.vary(w, "data"), x), cpu_mesh)
    assert cheaper(f, args)[0] == []
    testing.assert_no_defensive_psum(f, *args, cheapest=True)


@pytest.mark.gpu
def test_a_gather(gpu_mesh):
    """XLA's compiler for CPU makes a loop of the scatter."""
    kinds, (found,) = cheaper(*gradient(gathered, gpu_mesh))
    assert kinds == ["reduce first"]
    assert (found.hint.bytes_before, found.hint.bytes_after) == (544, 256)


def test_an_assertion_fails_on_them(cpu_mesh):
    f, args = gradient(in_a_loop, cpu_mesh)
    compiled = f.lower(*args).compile()
    for program, given, cheapest in ((f, args, True), (compiled, (), True), (f, args, False)):
        with pytest.raises(errors.CollectiveAssertionError) as caught:
            testing.assert_no_defensive_psum(program, *given, cheapest=cheapest)
        title, _, *rest = str(caught.value).splitlines()
        assert title == (
            "1 of 1 collective is not shown to be needed, or could be cheaper (1 after the loop):"
        )
        (advice,) = [line for line in rest if line.startswith("    to do: ")]
        assert advice.startswith("    to do: its results are only added up over the loop's trips")
    allowed = {"needed backward all-reduce(data)": "issue 12"}
    testing.assert_no_defensive_psum(compiled, cheapest=True, allow=allowed)
    testing.assert_no_defensive_psum(compiled, allow=allowed)


def test_other_kinds_fail_only_where_asked(cpu_mesh):
    f, args = gradient(repeated, cpu_mesh)
    testing.assert_no_defensive_psum(f, *args)
    needed = lambda verdicts: [verdict.verdict for verdict in verdicts] == ["needed"]  # noqa: E731
    with raises(errors.CollectiveAssertionError, verdicts=needed):
        testing.assert_no_defensive_psum(f, *args, cheapest=True)


@pytest.mark.parametrize("size, counts", [(4, True), (1024, False)])
def test_a_sum_in_a_loop_counts_above_one_percent_of_the_bytes(size, counts, cpu_mesh):
    def body(x):
        def step(carry, k):
            return carry + lax.psum((x * k).sum(), "data"), None

        steps = jnp.arange(5, dtype=jnp.float32)
        return lax.scan(step, jnp.float32(0), steps)[0], lax.psum(x[:size], "data")

    f = jax.jit(jax.shard_map(body, mesh=cpu_mesh, in_specs=P("data"), out_specs=P()))
    (x,) = programs.structs(cpu_mesh, ((4096,), P("data")))
    content = report.content(testing.judge(f.lower(x).compile()))
    assert [one.kind for one in content.findings] == ["after the loop"] * counts
    assert [one.kind for one in content.hints] == ["after the loop"] * (not counts)
    strict = report.content(content.judgement, cheapest=True)
    assert [one.kind for one in strict.findings] == ["after the loop"] and not strict.hints


def test_an_assertion_fails_on_what_only_the_traced_program_shows(cpu_mesh):
    """Two psums, of what is then multiplied by what varies in no text that says so."""
    f, args = gradient(lambda w, x: total((x @ jnp.sin(w)) * (x @ jnp.cos(w))), cpu_mesh)
    assert cheaper(f, args)[0] == []
    with pytest.raises(errors.CollectiveAssertionError) as caught:
        testing.assert_no_defensive_psum(f, *args, cheapest=True)
    (placement,) = caught.value.placements
    assert (placement.before_bytes, placement.after_bytes) == (512, 256)
    with sr.install(casts="cheapest"):
        testing.assert_no_defensive_psum(gradient(repeated, cpu_mesh)[0], *args, cheapest=True)


def local(mesh, body, outs=P()):
    f = jax.shard_map(
        body, mesh=mesh, in_specs=(P("data"), P("data")), out_specs=outs, check_vma=False
    )
    return jax.jit(f), programs.structs(mesh, ((32, 8), P("data")), ((32, 8), P("data")))


over = lambda x, axis="data": lax.psum(x, axis)  # noqa: E731


def accumulated(step, x, total=None):
    """A loop over rows that adds up."""
    total = jnp.ones(8) if total is None else total
    return lax.scan(lambda total, row: (step(row, total), None), total, x)[0]


@pytest.mark.parametrize(
    "body",
    [
        lambda x, y: over(x).astype(jnp.int32).sum(0),
        lambda x, y: (lambda p: (p.sum(0), p[0]))(over(x)),
        lambda x, y: over(x) + lax.pmax(y, "data"),
        lambda x, y: over(x) - over(jnp.sin(y)),
        lambda x, y: over(x) + over(jnp.sin(y) * lax.axis_index("model"), ("data", "model")),
        lambda x, y: (lambda p: (p + over(jnp.sin(y)), p * 2))(over(x)),
        lambda x, y: over(x).astype(jnp.bfloat16) + over(jnp.sin(y).astype(jnp.bfloat16)),
        lambda x, y: jnp.tanh(over(x)) + over(jnp.sin(y)),
        # Each device would start from 3 as well, and all of these be summed.
        lambda x, y: lax.reduce(over(x), jnp.float32(3), lax.add, (0,)),
        lambda x, y: lax.reduce(over(x), jnp.sin(y)[0, 0], lax.add, (0,)),
        # Not linear, or not of the sum alone.
        lambda x, y: accumulated(lambda one, total: total + over(one) / total, x),
        lambda x, y: accumulated(lambda one, total: 0.5 * total + lax.pmean(one, "data"), x),
        lambda x, y: accumulated(
            lambda one, total: total + over((8 * one).astype(int)) // 4, x, jnp.zeros((8,), int)
        ),
        # The loop ends by the whole sum.
        lambda x, y: lax.while_loop(
            lambda s: s[1].sum() < 1e3,
            lambda s: (s[0] + 1, s[1] + over(x * s[0].astype(float))),
            (jnp.int32(0), jnp.ones_like(x)),
        )[1],
    ],
    ids=(
        "rounded used maximum subtracted axes twice narrower bent from_3 from_another divided "
        "averaged floored until"
    ).split(),
)
def test_what_must_stay(body, cpu_mesh):
    assert cheaper(*local(cpu_mesh, body))[0] == []


@pytest.mark.parametrize(
    "step",
    [
        lambda one, total: total + lax.pmean(one, "data"),
        lambda one, total: over(jnp.sin(one)) / 3 + total,
        lambda one, total: total + over(one, "data") * jnp.arange(8.0),
    ],
    ids="mean divided scaled".split(),
)
def test_a_sum_that_is_scaled_is_summed_after_the_loop(step, cpu_mesh):
    """A pmean is a psum times a constant: what accumulates gradients or losses takes it."""
    f, args = local(cpu_mesh, lambda x, y: accumulated(step, x))
    kinds, (found,) = cheaper(f, args)
    assert kinds == ["after the loop"]
    assert (found.hint.bytes_before, found.hint.bytes_after) == (256, 32)
    assert (found.hint.round_trips_before, found.hint.round_trips_after) == (8, 1)


def test_a_bitcast_to_another_element_type_ends_it():
    text = """HloModule m
ENTRY %main (x: s32[8]) -> f32[8] {{
  %x = s32[8] parameter(0)
  %moved = s32[8]{{0}} bitcast(%x)
  %bits = {0}[8] bitcast(%moved)
  ROOT %less = {0}[8] negate(%bits)
}}"""
    for kind, end in (("s32", 3), ("f32", 2)):
        program = Program(hlo.judge(text.format(kind)))
        nodes = program.flat("main").at
        (use,) = program.uses(nodes[0], 0, walk.PASS_ON)
        assert use.user is nodes[end]


def test_a_sum_that_starts_from_an_argument_stays():
    """Each device would add it once more; parameter(0) is not a zero."""
    text = """HloModule m, is_scheduled=true, num_partitions=4
add {{
  a = f32[] parameter(0)
  b = f32[] parameter(1)
  ROOT c = f32[] add(a, b)
}}
ENTRY main {{
  start = f32[] {0}
  x = f32[64]{{0}} parameter({1}), sharding={{devices=[4]<=[4]}}
  sum = f32[64]{{0}} all-reduce(x), channel_id=1, replica_groups={{{{0,1,2,3}}}}, \
use_global_device_ids=true, to_apply=add, metadata={{op_name="jit(f)/shard_map/psum"}}
  ROOT total = f32[] reduce(sum, start), dimensions={{0}}, to_apply=add
}}"""
    for start, number, kinds in (("constant(0)", 0, ["reduce first"]), ("parameter(0)", 1, [])):
        judgement = hlo.judge(hlo.parse(text.format(start, number)))
        assert [h.kind for h in waste.hints(judgement)] == kinds


def test_siblings_are_found_once(cpu_mesh):
    body = lambda x, y: over(x) + over(jnp.sin(y)).reshape(8, 8)  # noqa: E731
    assert cheaper(*local(cpu_mesh, body))[0] == ["add first"]


@pytest.mark.parametrize("order", [1, -1], ids=["before", "behind"])
def test_a_sum_beside_one_that_is_redundant(cpu_mesh, order):
    """Adding first would replace both by one sum, and so does dropping the redundant one."""

    def body(w, x):
        first, last = (over(w), over(jnp.sin(x)))[::order]
        return first + last

    f = jax.shard_map(
        body, mesh=cpu_mesh, in_specs=(P(), P("data")), out_specs=P(), check_vma=False
    )
    args = programs.structs(cpu_mesh, ((8, 8), P()), ((32, 8), P("data")))
    found = report.content(testing.judge(jax.jit(f).lower(*args).compile()))
    assert [one.kind for one in found.findings] == ["redundant"] and not found.hints
    assert found.avoidable.bytes * 2 == found.account.total.wire_bytes


@pytest.mark.gpu
def test_a_scatter_at_places_that_differ_stays(gpu_mesh):
    """Each device adds the whole sum at its own places: not the sum of what each adds."""

    def body(x, y):
        places = (y[:, 0] > 0).astype(jnp.int32)
        return jnp.zeros((2, 8)).at[places].add(over(x))[None]

    f, args = local(gpu_mesh, body, P("data"))
    assert cheaper(f, args)[0] == []
    for start, kinds in ((jnp.zeros((2, 8)), ["reduce first"]), (jnp.ones((2, 8)), [])):
        constant = lambda x, y: start.at[jnp.array([0, 1] * 4)].add(over(x))[None]  # noqa: E731
        assert cheaper(*local(gpu_mesh, constant, P("data")))[0] == kinds


def test_an_index_of_many_sums_is_read_once():
    """A value was read once for each of the paths that lead to it, 2 ** 40 here."""
    index = ["%a0 = u32[] partition-id()"]
    index += [f"%a{n + 1} = u32[] add(%a{n}, %a{n})" for n in range(40)]
    reduced = T.all_reduce("%x", extra=', metadata={op_name="jit(f)/shard_map/psum"}')
    cut = "%s = f32[4] dynamic-slice(%r, %a40), dynamic_slice_sizes={4}"
    text = T.module("\n".join([T.parameter(T.BOTH), *index, reduced, cut]))
    judgement = hlo.judge(text, mesh={"data": 4, "model": 2})
    assert len(judgement.verdicts) == 1 and waste.hints(judgement) == []
