"""Each kind of waste in programs as people write them: found, followed, executed; and near misses."""

import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from core import versions
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from shardrules import hlo, testing
from shardrules.costs import waste

D = P("data")
X = ((64, 128), D)
BF16 = jnp.bfloat16
INDICES = ((64,), D, jnp.int32)
ROWS = np.linspace(0.5, 1, 64, dtype=np.float32)[:, None]


def structs(mesh, args):
    return [
        jax.ShapeDtypeStruct(
            shape, kind[0] if kind else jnp.float32, sharding=NamedSharding(mesh, spec)
        )
        for shape, spec, *kind in args
    ]


def program(mesh, body, args, outs=D):
    specs = tuple(spec for _, spec, *_ in args)
    return jax.jit(jax.shard_map(body, mesh=mesh, in_specs=specs, out_specs=outs, check_vma=False))


def hints(f, given):
    return waste.hints(testing.judge(f.lower(*given).compile()))


def random_like(given):
    rng = np.random.default_rng(0)
    arrays = []
    for one in given:
        if jnp.issubdtype(one.dtype, jnp.integer):
            values = rng.integers(0, 8, one.shape)
        else:
            values = rng.normal(size=one.shape)
        arrays.append(jax.device_put(jnp.asarray(values, one.dtype), one.sharding))
    return arrays


def follow(platform, before, after, given, kind, sent):
    """The hint says what the account of the followed program confirms; the values are equal."""
    found = [h for h in hints(before, given) if h.kind == kind]
    assert (sum(h.sent_before for h in found), sum(h.sent_after for h in found)) == sent
    totals = [testing.account(p, *given).total for p in (before, after)]
    assert totals[0].wire_bytes - totals[1].wire_bytes == sent[0] - sent[1]
    assert kind not in [h.kind for h in hints(after, given)]
    if platform[0] == "cpu":
        arrays = random_like(given)
        results = before(*arrays), after(*arrays)
        for one, other in zip(*map(jax.tree.leaves, results)):
            np.testing.assert_allclose(
                np.asarray(one, np.float32), np.asarray(other, np.float32), rtol=2e-5, atol=1e-5
            )
    return found


def gather(x):
    return lax.all_gather(x, "data", tiled=True)


def ranked_rows(x):
    return x * np.linspace(0.5, 1, len(x), dtype=np.float32)[:, None]


def index():
    return lax.axis_index("data")


def part(x, place, axis=0):
    size = x.shape[axis] // 4
    return lax.dynamic_slice_in_dim(x, place * size, size, axis)


NEXT = [(k, (k - 1) % 4) for k in range(4)]

# Before, after, the arguments, the kind, the bytes that a device sends before and after.
CASES = {
    "slice_of_a_psum": (
        lambda x: part(lax.psum(jnp.tanh(x), "data"), index()),
        lambda x: lax.psum_scatter(jnp.tanh(x), "data", scatter_dimension=0, tiled=True),
        [X],
        ("only a slice", 12288, 6144),
    ),
    "columns_of_a_psum": (
        lambda x: part(lax.psum(jnp.tanh(x), "data"), index(), 1),
        lambda x: lax.psum_scatter(jnp.tanh(x), "data", scatter_dimension=1, tiled=True),
        [X],
        ("only a slice", 12288, 6144),
    ),
    "the_next_shard": (
        lambda x: part(gather(x), (index() + 1) % 4) * 2,
        lambda x: lax.ppermute(x, "data", NEXT) * 2,
        [X],
        ("one part", 24576, 8192),
    ),
    "its_own_shard": (
        lambda x: part(gather(x), index()) * 2,
        lambda x: x * 2,
        [X],
        ("one part", 24576, 0),
    ),
    "columns_of_each_shard": (
        lambda x: part(gather(x), index(), 1) * 2,
        lambda x: lax.all_to_all(x, "data", 1, 0, tiled=True) * 2,
        [X],
        ("one part", 24576, 6144),
    ),
    "sum_of_a_gather": (
        lambda x: jnp.tanh(lax.all_gather(x, "data").sum(0)),
        lambda x: jnp.tanh(lax.psum(x, "data")),
        [X],
        ("reduce instead", 24576, 12288),
    ),
    "mean_of_a_gather": (
        lambda x: jnp.sin(x) * lax.all_gather((x**2).mean(0), "data").mean(0),
        lambda x: jnp.sin(x) * lax.pmean((x**2).mean(0), "data"),
        [X],
        ("reduce instead", 1536, 768),
    ),
    "max_of_a_gather": (
        lambda x: x - gather(x).max(0),
        lambda x: x - lax.pmax(x.max(0), "data"),
        [X],
        ("reduce instead", 24576, 768),
    ),
    "one_hot": (
        lambda i, x: x * (gather(jax.nn.one_hot(i, 128)) * ROWS).sum(0),
        lambda i, x: x * (jax.nn.one_hot(gather(i), 128) * ROWS).sum(0),
        [INDICES, X],
        ("narrow first", 24576, 192),
    ),
    "slice_of_a_large_psum": (
        lambda x: part(lax.psum(jnp.tanh(x), "data"), index()),
        lambda x: lax.psum_scatter(jnp.tanh(x), "data", scatter_dimension=0, tiled=True),
        [((8192, 128), D)],
        ("only a slice", 1572864, 786432),
    ),
    "there_and_back": (
        lambda x: lax.all_to_all(
            jnp.tanh(lax.all_to_all(x, "data", 0, 1, tiled=True)), "data", 1, 0, tiled=True
        ),
        jnp.tanh,
        [X],
        ("undone", 12288, 0),
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_each_is_found_and_gone_where_it_is_followed(platform, name):
    before, after, args, (kind, now, then) = CASES[name]
    if name == "one_hot" and platform[0] == "gpu":
        now //= 4  # XLA gathers it as predicates
    given = structs(platform[1], args)
    f, g = (program(platform[1], body, args) for body in (before, after))
    if platform[0] == "tpu" and name in ("slice_of_a_psum", "columns_of_a_psum"):
        assert hints(f, given) == []  # so small, XLA makes an all-reduce of the reduce-scatter
        return
    found = follow(platform, f, g, given, kind, (now, then))
    assert all(h.round_trips_before is not None for h in found)


ADVICE = {
    "slice_of_a_psum": "jax.lax.psum_scatter(x, 'data', scatter_dimension=0, tiled=True)",
    "the_next_shard": "jax.lax.ppermute(x, 'data', perm) with perm="
    "[(0, 3), (1, 0), (2, 1), (3, 2)]",
    "its_own_shard": "which is its own shard: read that",
    "columns_of_each_shard": "jax.lax.all_to_all(x, 'data', 1, 0, tiled=True)",
    "sum_of_a_gather": "reduce on each device and psum that",
    "max_of_a_gather": "reduce on each device and pmax that",
    "one_hot": "it moves 128 numbers for each index, and only one of them is not zero",
}


@pytest.mark.parametrize("name", ADVICE)
def test_what_to_type(cpu_mesh, name):
    before, _, args, _ = CASES[name]
    (found,) = hints(program(cpu_mesh, before, args), structs(cpu_mesh, args))
    assert ADVICE[name] in found.advice


def constrain(x, *spec):
    return lax.with_sharding_constraint(x, P(*spec))


def layers(x, w, layout):
    """A loop over layers that share their weights."""
    return lax.scan(lambda h, _: (jnp.tanh(h @ layout(w)), None), x, None, length=8)[0]


def over_shards(x):
    return x.reshape(4, -1, *x.shape[1:]).sum(1)


COLUMNS, WHOLE, SIDE = P(None, "data"), P(), ((128, 128), D)
# In a jit with shardings: before, after, the arguments, the output, the kind, where it is found.
JITS = {
    "repeated": (
        lambda x, w: layers(x, w, constrain),
        lambda x, w: layers(x, constrain(w), lambda w: w),
        [X, SIDE],
        D,
        ("tpu", "gpu"),  # XLA for CPU moves it by itself
    ),
    "only returned": (jnp.tanh, jnp.tanh, [X], WHOLE, ("cpu", "tpu", "gpu")),
    "reduce first": (
        lambda x: constrain(jnp.sin(x).sum(1)).sum(),
        lambda x: jnp.sin(x).sum((0, 1)),
        [((64, 128), COLUMNS)],
        WHOLE,
        ("tpu", "gpu"),  # of 64 numbers XLA for CPU reduces in two steps
    ),
    "reduce instead": (
        lambda x: constrain(jnp.sin(x)).max(0),
        lambda x: jnp.sin(x).max(0),
        [X],
        WHOLE,
        ("cpu", "tpu", "gpu"),
    ),
    "add first": (
        lambda x, y: jnp.cos(jnp.sin(x).sum(0) + y.sum(0)),
        lambda x, y: jnp.cos((over_shards(jnp.sin(x)) + over_shards(y)).sum(0)),
        [X, SIDE],
        WHOLE,
        ("cpu",),  # the others add first by themselves
    ),
    "one part": (
        lambda x: jnp.sin(constrain(constrain(jnp.tanh(x)), None, "data")),
        lambda x: jnp.sin(constrain(jnp.tanh(x), None, "data")),
        [X],
        COLUMNS,
        ("cpu", "gpu", "tpu"),
    ),
    "undone": (
        lambda x: jnp.sin(constrain(jnp.tanh(constrain(jnp.sin(x), None, "data")), "data")),
        lambda x: jnp.sin(jnp.tanh(jnp.sin(x))),
        [X],
        D,
        ("cpu", "gpu"),
    ),
    "narrow first": (
        lambda x, y: (
            y @ constrain(lax.optimization_barrier(constrain(x))).astype(BF16).astype(y.dtype)
        ),
        lambda x, y: y @ constrain(lax.optimization_barrier(x.astype(BF16))).astype(y.dtype),
        [X, ((64, 64), D)],
        D,
        ("gpu",),
    ),
    "left apart": (
        lambda x, y: (x @ constrain(jnp.sin(x)).T) @ constrain(jnp.sin(y)),
        lambda x, y: (lambda both: (x @ both[0].T) @ both[1])(
            constrain(jnp.stack([jnp.sin(x), jnp.sin(y)]))
        ),
        [X, X],
        D,
        ("cpu", "tpu"),  # XLA for GPU combines them
    ),
}


# From JAX 0.11.2 XLA names these gathers by the argument that they move alone: nothing tells then that
# the source asks for them.
UNNAMED = {
    ("cpu", "reduce instead"),
    ("cpu", "left apart"),
    ("tpu", "repeated"),
    ("tpu", "reduce instead"),
    ("tpu", "left apart"),
    ("gpu", "repeated"),
    ("gpu", "reduce instead"),
    ("gpu", "narrow first"),
}


@pytest.mark.parametrize("kind", JITS)
def test_a_jit_with_shardings(platform, kind):
    before, after, args, out, platforms = JITS[kind]
    name, mesh = platform
    given = structs(mesh, args)
    outs = out, (D if kind == "only returned" else out)
    with jax.set_mesh(mesh):
        f, g = (
            jax.jit(body, out_shardings=NamedSharding(mesh, spec))
            for body, spec in zip((before, after), outs)
        )
        is_unnamed = jax.__version_info__ >= (0, 11, 2) and (name, kind) in UNNAMED
        if name not in platforms or is_unnamed:
            assert hints(f, given) == []
            return
        found = hints(f, given)
        assert {h.kind for h in found} == {kind}
        totals = [testing.account(p, *given).total.wire_bytes for p in (f, g)]
        assert totals[0] - totals[1] >= sum(h.sent_before - h.sent_after for h in found)
        trips = [round_trips(testing.judge(p.lower(*given).compile())) for p in (f, g)]
        saved = sum(h.round_trips_before - h.round_trips_after for h in found)
        assert trips[0] - trips[1] >= saved and (saved or totals[0] > totals[1])
        assert hints(g, given) == []
        if name == "cpu":
            arrays = random_like(given)
            np.testing.assert_allclose(f(*arrays), g(*arrays), rtol=2e-5, atol=1e-5)


def round_trips(judgement):
    sites = {(v.collective.computation, v.collective.name): v for v in judgement.verdicts}
    return sum(v.collective.trip_count for v in sites.values())


MISSES = {
    # Slices and parts.
    "data_dependent": lambda x: part(lax.psum(jnp.tanh(x), "data"), (x[0, 0] > 0).astype(int)),
    "the_same_slice": lambda x: part(lax.psum(jnp.tanh(x), "data"), 1),
    "another_order": lambda x: part(lax.psum(jnp.tanh(x), "data"), 3 - index()),
    "overlapping": lambda x: lax.dynamic_slice_in_dim(lax.psum(x, "data"), index() * 2, 4, 0),
    "all_of_it_too": lambda x: (lambda s: part(s, index()) + s.sum())(lax.psum(x, "data")),
    "a_maximum": lambda x: part(lax.pmax(jnp.tanh(x), "data"), index()),
    "one_for_all": lambda x: part(gather(x), 2),
    "of_two_shards": lambda x: lax.dynamic_slice_in_dim(gather(x), index() * 8, 16, 0),
    "two_parts": lambda x: part(gather(x), (index() + 1) % 4) + part(gather(x), index() // 2),
    # Reductions of gathered arrays.
    "over_another_dimension": lambda x: gather(x).sum(1),
    "read_as_well": lambda x: (lambda g: g.sum(0) + g[0])(gather(x)),
    "more_bytes": lambda x: lax.all_gather(x, "data").sum(1).sum(1),
    "a_product": lambda x: lax.all_gather(x, "data").prod(0),
    "from_a_start": lambda x: lax.reduce(gather(x), x[0, 0], lax.add, (0,)),
    # All-to-alls.
    "elsewhere": lambda x: lax.all_to_all(
        jnp.roll(lax.all_to_all(x, "data", 0, 1, tiled=True), 128, 1), "data", 1, 0, tiled=True
    ),
    "other_groups": lambda x: lax.all_to_all(
        lax.all_to_all(x, "data", 0, 1, tiled=True), "model", 1, 0, tiled=True
    ),
    "with_what_differs": lambda x: lax.all_to_all(
        lax.all_to_all(x, "data", 0, 1, tiled=True) * (1 + index()), "data", 1, 0, tiled=True
    ),
    "another_part": lambda x: gather(x[:8])[:4] + lax.all_to_all(x[8:12], "data", 0, 0, tiled=True),
    # Widths.
    "zeros_on_devices_that_get_none": lambda x: ranked_rows(
        lax.ppermute(jax.nn.one_hot(x[:, 0].astype(int), 128), "data", NEXT[1:])
    ),
    "every_bit_is_read": lambda x: gather(x) @ gather(x).T,
    "not_one_hot": lambda x: gather((x > 0.5).astype(jnp.float32)) @ x.T,
    "weighted": lambda x: gather(jax.nn.one_hot(x[:, 0].astype(int), 128) * x) * 2,
}


@pytest.mark.parametrize("name", MISSES)
def test_near_misses(cpu_mesh, name):
    f = program(cpu_mesh, lambda x: jnp.atleast_1d(MISSES[name](x)), [X])
    given = structs(cpu_mesh, [X])
    found = hints(f, given)
    if name in ("not_one_hot", "zeros_on_devices_that_get_none"):  # as predicates, and that is all
        assert [(h.kind, h.bytes_before, h.bytes_after) for h in found] == [
            ("narrow first", 8192, 2048)
        ]
    else:
        assert found == []


def test_predicates_that_are_moved_as_integers(cpu_mesh):
    """XLA for TPU and GPU moves the predicates by itself."""
    args = [X]
    before = lambda x: x * ranked(gather((x > 0).astype(jnp.int32)))  # noqa: E731
    after = lambda x: x * ranked(gather(x > 0).astype(jnp.int32))  # noqa: E731
    f, g = (program(cpu_mesh, body, args) for body in (before, after))
    given = structs(cpu_mesh, args)
    (found,) = follow(("cpu", cpu_mesh), f, g, given, "narrow first", (24576, 6144))
    assert "its operand was converted from pred to s32 just before" in found.advice


def test_integers_of_64_bits(cpu_mesh):
    with jax.enable_x64(True):
        args = [INDICES, X]
        before = lambda i, x: x * ranked(gather(i.astype(jnp.int64)))  # noqa: E731
        after = lambda i, x: x * ranked(gather(i).astype(jnp.int64))  # noqa: E731
        f, g = (program(cpu_mesh, body, args) for body in (before, after))
        given = structs(cpu_mesh, args)
        follow(("cpu", cpu_mesh), f, g, given, "narrow first", (384, 192))


def ranked(x):
    """A sum in which each row counts differently."""
    return (x * jnp.arange(1, 65, dtype=x.dtype).reshape(64, *[1] * (x.ndim - 1))).sum()


WIDE = {
    "read_narrower": (lambda i, x: ranked(gather(i).astype(jnp.int32)), (384, 192)),
    "one_use_needs_all_bits": (
        lambda i, x: ranked(gather(i).astype(jnp.int32)) + ranked(gather(i)),
        None,
    ),
    "made_in_64_bits": (lambda i, x: ranked(gather(i * 3)), None),
    "two_predicates": (
        lambda i, x: ranked(gather(((x > 0) & (i[:, None] > 2)).astype(jnp.int32))),
        (24576, 6144),
    ),
    "counts_of_predicates": (
        lambda i, x: ranked(gather((x > 0).astype(jnp.int32).cumsum(0))),
        None,
    ),
    "two_hot": (
        lambda i, x: ranked(gather(jax.nn.one_hot(i, 128) + jax.nn.one_hot(i // 2, 128))),
        None,
    ),
}


@pytest.mark.parametrize("name", WIDE)
def test_integers_and_predicates(cpu_mesh, name):
    body, sent = WIDE[name]
    with jax.enable_x64(True):
        given = structs(cpu_mesh, [((64,), D, jnp.int64), X])
        f = program(cpu_mesh, lambda i, x: x * body(i, x).astype(x.dtype), [INDICES, X])
        found = [(h.kind, h.sent_before, h.sent_after) for h in hints(f, given)]
    assert found == ([("narrow first", *sent)] if sent else [])


@pytest.mark.gpu
def test_keys_that_are_gathered_wider_than_they_are_read(gpu_mesh):
    """Context parallel attention: the conversion stands in the loop over chunks of keys."""
    args = [((64, 128), D), ((64, 128), D)]

    def attend(q, chunks):
        def step(out, k):
            k = k.astype(BF16)
            return out + jax.nn.softmax(q.astype(BF16) @ k.T) @ k, None

        return lax.scan(step, jnp.zeros(q.shape, BF16), chunks.reshape(4, 16, 128))[0]

    before = lambda q, k: attend(q, gather(k))  # noqa: E731
    after = lambda q, k: attend(q, gather(k.astype(BF16)))  # noqa: E731
    f, g = (program(gpu_mesh, body, args) for body in (before, after))
    given = structs(gpu_mesh, args)
    found = follow(("gpu", gpu_mesh), f, g, given, "narrow first", (24576, 12288))
    assert "the loop that reads it converts it on each trip" in found[0].advice
    assert "x.astype(jnp.bfloat16)" in found[0].advice

    def both(q, k):
        k = gather(k)
        return attend(q, k).sum() + k.sum()

    assert not [
        h for h in hints(program(gpu_mesh, both, args, P()), given) if h.kind == "narrow first"
    ]


def test_floats_of_16_bits_on_cpu(cpu_mesh):
    """XLA's compiler for CPU moves them as 32 bits, whatever one writes."""
    body = lambda x: gather(x).astype(BF16) @ x.astype(BF16).T  # noqa: E731
    assert hints(program(cpu_mesh, body, [X]), structs(cpu_mesh, [X])) == []


def fsdp(layer):
    def step(x, ws):
        loss = lambda ws: (lax.scan(layer, x, ws)[0] ** 2).sum()  # noqa: E731
        value, grads = jax.value_and_grad(loss)(ws)
        return lax.psum(value, "data"), grads

    return step


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_weights_that_are_gathered_again(platform, dtype):
    """FSDP by hand: a scan over layers under jax.checkpoint gathers each weight twice."""
    name, mesh = platform
    args = [((64, 128), D, dtype), ((8, 128, 128), P(None, "data"), dtype)]
    outs = (P(), P(None, "data"))

    def layer(h, w):
        return jnp.tanh(h @ checkpoint_name(gather(w), "gathered")), None

    policy = jax.checkpoint_policies.save_only_these_names("gathered")
    again, kept = jax.checkpoint(layer), jax.checkpoint(layer, policy=policy)
    f, g = (program(mesh, fsdp(body), args, outs) for body in (again, kept))
    given = structs(mesh, args)
    found = [h for h in hints(f, given) if h.kind == "gathered twice"]
    accounts = [testing.account(p, *given) for p in (f, g)]
    gathers = [[e for e in account if e.kind == "all-gather"] for account in accounts]
    assert [sum(e.runs for e in entries) for entries in gathers] == [16, 8]
    saved = accounts[0].total.wire_bytes - accounts[1].total.wire_bytes
    if name == "tpu" and dtype == "float32":
        # XLA gathers these in bf16, and in f32 what is kept: fewer round trips, and as many bytes.
        assert not found and saved == 0
        return
    assert {h.entry.phase for h in found} == {"recompute"}
    # XLA for GPUs takes one trip out of the loop, from JAX 0.12 on in a form that is not followed.
    trips = sum(h.round_trips_before for h in found)
    assert trips == 8 or (name == "gpu" and trips == 7)
    sent = sum(h.sent_before - h.sent_after for h in found)
    assert 0 < sent <= saved and (sent == saved or trips == 7)
    assert "takes" in found[0].advice and "save_only_these_names('gathered')" in found[0].advice
    assert not [h for h in hints(g, given) if h.kind == "gathered twice"]
    if name == "cpu" and dtype == "float32":
        arrays = random_like(given)
        for one, other in zip(f(*arrays), g(*arrays)):
            np.testing.assert_allclose(one, other, rtol=1e-5)


@versions.where(versions.names_gathers_by_use)
def test_weights_that_a_jit_gathers_again(cpu_mesh):
    given = structs(cpu_mesh, [X, ((8, 128, 128), P(None, "data"))])
    whole = NamedSharding(cpu_mesh, P())
    policy = jax.checkpoint_policies.save_only_these_names("gathered")

    def step(x, ws, **options):
        def layer(h, w):
            w = checkpoint_name(lax.with_sharding_constraint(w, whole), "gathered")
            return jnp.tanh(h @ w), None

        body = jax.checkpoint(layer, **options)
        return jax.grad(lambda ws: (lax.scan(body, x, ws)[0] ** 2).sum())(ws)

    f = jax.jit(step)
    g = jax.jit(lambda x, ws: step(x, ws, policy=policy))
    (found,) = [h for h in hints(f, given) if h.kind == "gathered twice"]
    assert "save it by the policy of jax.checkpoint" in found.advice
    gathers = [
        [e.runs for e in testing.account(p, *given) if e.kind == "all-gather"] for p in (f, g)
    ]
    assert gathers == [[8, 8], [8]]
    arrays = random_like(given)
    np.testing.assert_allclose(f(*arrays), g(*arrays), rtol=1e-4, atol=1e-5)


def test_other_weights_in_the_backward_pass(cpu_mesh):
    """The same shapes over the same devices, of another array."""
    args = [((64, 128), D), ((128, 128), D), ((128, 128), D)]

    @jax.custom_vjp
    def layer(x, w, v):
        return x @ gather(w)

    layer.defvjp(
        lambda x, w, v: (layer(x, w, v), (w, v)),
        lambda kept, g: (g @ gather(kept[1]), kept[0], kept[1]),
    )
    body = lambda x, w, v: jax.grad(lambda x: (layer(x, w, v) ** 2).sum())(x)  # noqa: E731
    found = hints(program(cpu_mesh, body, args), structs(cpu_mesh, args))
    assert found == []
    of_one = lambda x, ws: body(x, ws[0], ws[1])  # noqa: E731
    args = [args[0], ((2, 128, 128), P(None, "data"))]
    found = hints(program(cpu_mesh, of_one, args), structs(cpu_mesh, args))
    assert found == []


@jax.custom_vjp
def indexed(x, ws, i, j):
    return jnp.tanh(x @ gather(ws[i]))


def indexed_fwd(x, ws, i, j):
    y = indexed(x, ws, i, j)
    return y, (y, ws, j)


def indexed_bwd(kept, g):
    y, ws, j = kept
    return g * (1 - y * y) @ gather(ws[j]).T, None, None, None


indexed.defvjp(indexed_fwd, indexed_bwd)
STACK = (4, 128, 128), P(None, "data")


def gathered_at(j, mesh, within=lambda layers: layers):
    """Return the hints for a loop whose forward pass gathers weight i, and its backward pass j."""

    def body(x, ws):
        def loss(x):
            layer = lambda x, i: (indexed(x, ws, i, j(i)), None)  # noqa: E731
            layers = within(lambda x: lax.scan(layer, x, jnp.arange(4))[0])
            return (layers(x) ** 2).sum()

        return jax.grad(loss)(x)

    args = [((64, 128), D), STACK]
    found = hints(program(mesh, body, args), structs(mesh, args))
    return [h for h in found if h.kind == "gathered twice"]


def twice(layers):
    return lambda x: lax.scan(lambda x, _: (layers(x), None), x, None, length=2)[0]


AGAIN_AT = {
    "same": (lambda i: i, 1),
    "next": (lambda i: i + 1, 0),  # the last one twice
    "some": (lambda i: (i * i) % 3, 0),
    "first": (lambda i: i * 0, 0),
}


@pytest.mark.parametrize("j, count", AGAIN_AT.values(), ids=AGAIN_AT)
@pytest.mark.parametrize("within", [lambda layers: layers, twice], ids=["loop", "inner loop"])
def test_weights_of_a_stack_are_gathered_again_only_at_the_same_indices(j, count, within, cpu_mesh):
    assert len(gathered_at(j, cpu_mesh, within)) == count


def test_two_indices_that_a_program_is_given(cpu_mesh):
    args = [((64, 128), D), STACK]
    indices = [jax.ShapeDtypeStruct((), jnp.int32)] * 2
    body = lambda x, ws, i, j: jax.grad(lambda x: indexed(x, ws, i, j).sum())(x)  # noqa: E731
    f = program(cpu_mesh, body, [*args, ((), P()), ((), P())])
    assert not hints(f, [*structs(cpu_mesh, args), *indices])


@pytest.mark.parametrize("axes", ["data", ("data", "model")])
def test_what_to_type_for_several_axes(cpu_mesh, axes):
    def body(x):
        rows = len(x) // jax.lax.axis_size(axes)
        place = lax.axis_index(axes) * rows
        return lax.dynamic_slice_in_dim(lax.psum(jnp.tanh(x), axes), place, rows, 0)

    args = [((64, 128), P(axes))]
    f = program(cpu_mesh, body, args, P(axes))
    (found,) = hints(f, structs(cpu_mesh, args))
    assert f"psum_scatter(x, {axes!r}, scatter_dimension=0, tiled=True)" in found.advice


def test_fsdp_of_one_layer_by_jit_on_cpu(cpu_mesh):
    """XLA for TPU and GPU makes the reduce-scatter by itself, so there is nothing to advise."""
    given = structs(cpu_mesh, [((128, 128), D), ((64, 128), D)])

    def step(w, x):
        return jax.grad(lambda w: (jnp.tanh(x @ w) ** 2).sum())(w)

    f = jax.jit(step, out_shardings=NamedSharding(cpu_mesh, D))
    assert "all-reduce" in [e.kind for e in testing.account(f, *given)]
    assert hints(f, given) == []


def test_an_array_that_is_gathered_and_moved(platform):
    """A jit that reads one array whole and, by another constraint, its columns."""
    name, mesh = platform
    given = structs(mesh, [X])
    whole, columns = (NamedSharding(mesh, spec) for spec in (P(), P(None, "data")))

    def before(x):
        y = jnp.tanh(x)
        a = lax.with_sharding_constraint(y, columns)
        b = lax.with_sharding_constraint(y, whole)
        return jnp.sin(a), jnp.cos(b)

    def after(x):
        b = lax.with_sharding_constraint(jnp.tanh(x), whole)
        return jnp.sin(lax.with_sharding_constraint(b, columns)), jnp.cos(b)

    outs = (columns, whole)
    f, g = (jax.jit(body, out_shardings=outs) for body in (before, after))
    found = follow(platform, f, g, given, "gathered too", (6144, 0))
    assert "constrain the array once to the whole layout" in found[0].advice


def test_another_array_is_moved(cpu_mesh):
    def body(x):
        return gather(x)[:16] + lax.all_to_all(jnp.sin(x), "data", 0, 0, tiled=True)

    assert hints(program(cpu_mesh, body, [X]), structs(cpu_mesh, [X])) == []


PIECES = """\
HloModule m, is_scheduled=true, num_partitions=2

ENTRY main {
  a = f32[8]{0} parameter(0), sharding={devices=[2]<=[2]}
  b = f32[8]{0} parameter(1), sharding={devices=[2]<=[2]}
  whole = f32[16]{0} all-gather(GATHERED), channel_id=1, replica_groups={{0,1}}, dimensions={0}, \
use_global_device_ids=true, metadata={op_name="jit(f)/shard_map/all_gather"}
  moved = (f32[8]{0}, f32[8]{0}) all-to-all(PIECES), channel_id=2, replica_groups={{0,1}}, \
metadata={op_name="jit(f)/shard_map/all_to_all"}
  read = f32[16]{0} negate(whole)
  ROOT t = (f32[16]{0}, (f32[8]{0}, f32[8]{0})) tuple(read, moved)
}
"""


@pytest.mark.parametrize("gathered", ["a", "b"])
@pytest.mark.parametrize(
    ("pieces", "kinds"), [("G, G", ["gathered too"]), ("a, b", []), ("b, a", []), ("O, O", [])]
)
def test_all_pieces_that_are_moved_are_of_the_gathered_array(gathered, pieces, kinds):
    pieces = pieces.replace("G", gathered).replace("O", "b" if gathered == "a" else "a")
    text = PIECES.replace("GATHERED", gathered).replace("PIECES", pieces)
    assert [h.kind for h in waste.hints(hlo.judge(hlo.parse(text)))] == kinds


SENT = """\
HloModule m, is_scheduled=true, num_partitions=4

ENTRY main {
  x = f32[8192]{0} parameter(0), sharding={devices=[8]<=[8]}
  sum = f32[8192]{0} send(x), channel_id=2, is_host_transfer=true, frontend_attributes={\
_xla_megascale_target="{1,2}x{0:3}",_xla_megascale_transfer_type="ALL_REDUCE",\
_xla_megascale_reduce_operation="SUM"}, metadata={op_name="jit(f)/shard_map/psum"}
  id = u32[] partition-id()
  four = u32[] constant(4)
  slice = u32[] divide(id, four)
  rows = u32[] constant(4096)
  start = u32[] multiply(slice, rows)
  ROOT part = f32[4096]{0} dynamic-slice(sum, start), dynamic_slice_sizes={4096}
}
"""


def test_a_sum_between_slices_names_no_computation():
    """No compiler prints a send whose result is the sum, and people may write one."""
    (found,) = waste.hints(hlo.judge(hlo.parse(SENT), slices=2))
    assert found.kind == "only a slice"


BARRIER = """\
HloModule m, is_scheduled=true, num_partitions=4

copies {
  p0 = f32[8]{0} parameter(0)
  p1 = f32[8]{0} parameter(1)
  c0 = f32[8]{0} copy(p0)
  c1 = f32[8]{0} copy(p1)
  ROOT t = (f32[8]{0}, f32[8]{0}) tuple(c0, c1)
}

ENTRY main {
  a = f32[8]{0} parameter(0), sharding={devices=[4]<=[4]}
  b = f32[8]{0} parameter(1), sharding={devices=[4]<=[4]}
  both = (f32[8]{0}, f32[8]{0}) fusion(a, b), kind=kLoop, calls=copies
  held = (f32[8]{0}, f32[8]{0}) opt-barrier(both)
  again = f32[8]{0} get-tuple-element(held), index=INDEX
  first = f32[32]{0} all-gather(b), channel_id=1, replica_groups={{0,1,2,3}}, dimensions={0}, \
use_global_device_ids=true, metadata={op_name="jit(f)/jvp()/shard_map/all_gather"}
  second = f32[32]{0} all-gather(again), channel_id=2, replica_groups={{0,1,2,3}}, \
dimensions={0}, use_global_device_ids=true, \
metadata={op_name="jit(f)/transpose(jvp())/shard_map/all_gather"}
  ROOT sum = f32[32]{0} add(first, second)
}
"""


@pytest.mark.parametrize("index, kinds", [("1", ["gathered twice"]), ("0", [])])
def test_an_array_is_followed_through_a_barrier_into_a_fusion(index, kinds):
    text = BARRIER.replace("INDEX", index)
    assert [h.kind for h in waste.hints(hlo.judge(hlo.parse(text)))] == kinds


OF_A_PSUM = """\
HloModule m, is_scheduled=true, num_partitions=4

ENTRY main {
  a = f32[8]{0} parameter(0), sharding={devices=[4]<=[4]}
  own = f32[8]{0} tanh(a), metadata={op_name="jit(f)/shard_map/tanh"}
  part = f32[8]{0} bitcast(own)
  whole = f32[32]{0} all-gather(part), channel_id=1, replica_groups={{0,1,2,3}}, dimensions={0}, \
use_global_device_ids=true
  ROOT copy = f32[32]{0} copy(whole)
}
"""


def test_a_result_that_two_gathers_bring_one_by_one(cpu_mesh):
    """The logits of an evaluation, by batch and vocabulary; XLA for TPU gathers both at once."""
    mesh, given = cpu_mesh, [((64, 512), P(None, "model")), ((256, 64), D)]
    f, g = (
        jax.jit(lambda w, x: x @ w, out_shardings=NamedSharding(mesh, spec))
        for spec in (P(), P("data", "model"))
    )
    with jax.set_mesh(mesh):
        sent = 64 * 256 * 4 + 3 * 64 * 512 * 4
        found = follow(("cpu", mesh), f, g, structs(mesh, given), "only returned", (sent, 0))
    assert [h for h in found if "over 'model' as well" in h.advice]


@pytest.mark.parametrize("name, kinds", [("all_gather", ["only returned"]), ("", [])])
def test_a_gather_that_no_shard_map_writes_is_not_to_be_left_out(name, kinds):
    """XLA for TPU makes one of a psum over two slices, and drops its name."""
    named = f'use_global_device_ids=true, metadata={{op_name="jit(f)/shard_map/{name}"}}'
    text = OF_A_PSUM.replace("use_global_device_ids=true", named) if name else OF_A_PSUM
    assert [h.kind for h in waste.hints(hlo.judge(hlo.parse(text)))] == kinds


def test_the_page_has_the_table_that_the_modules_write():
    """If not: python -c "from shardrules.costs import waste; print(waste.table())"."""
    page = (pathlib.Path(__file__).parents[2] / "docs" / "waste.md").read_text()
    assert page.count(waste.table()) == 1
