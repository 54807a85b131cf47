"""What a finding advises computes the same values: each advice followed, and both programs run."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hlo import text as T
from hlo.modules import run
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from shardrules import hlo, testing
from shardrules.costs import findings

D, M, BOTH = "data", "model", ("data", "model")
SAME, BY_DATA = P(), P(None, "data")  # of an array of 8 rows
OWN = "drop it: each device can compute the result from its own operand"
ALIKE = "(the devices along model hold the same)"
SUM = "for a sum, not for a mean, multiply it by"


def piece(x, axis=D):
    """A device's own piece of the rows."""
    size = x.shape[0] // jax.lax.axis_size(axis)
    return lax.dynamic_slice_in_dim(x, lax.axis_index(axis) * size, size)


def pieces_along_model(x, order):
    """Of the rows, cut into a piece for each device, those for this device's place along model."""
    sizes = [jax.lax.axis_size(a) for a in order]
    parts = x.reshape(*sizes, -1, *x.shape[1:])
    own = lax.dynamic_index_in_dim(parts, lax.axis_index(M), order.index(M), keepdims=False)
    return own.reshape(-1, *x.shape[1:])


def repeated(x):
    """Each shard twice: the two devices along model have the same."""
    parts = lax.all_gather(x, D)
    return jnp.repeat(parts, 2, axis=0).reshape(-1, *x.shape[1:])


ONE = [(0, 1), (1, 2), (2, 3)]
ADVICE = {
    "psum": (
        SAME,
        lambda x: lax.psum(x, D),
        lambda x: 4 * x,
        f"{OWN} (the sum of 4 equal values is 4 times that value, and their mean is that value)",
    ),
    "pmean": (
        SAME,
        lambda x: lax.pmean(x, D),
        lambda x: x,
        f"{OWN} (the sum of 4 equal values is 4 times that value, and their mean is that value)",
    ),
    "pmax": (
        SAME,
        lambda x: lax.pmax(x, D),
        lambda x: x,
        "drop it: each device's result is its own operand",
    ),
    "all_gather": (
        SAME,
        lambda x: lax.all_gather(x, D, axis=1, tiled=True),
        lambda x: jnp.concatenate([x] * 4, axis=1),
        f"{OWN}, concatenated 4 times along dimension 1",
    ),
    "all_gather as a psum": (
        SAME,
        lambda x: lax.psum(
            lax.dynamic_update_slice_in_dim(
                jnp.zeros((4 * x.shape[0], x.shape[1])), x, lax.axis_index(D) * x.shape[0], 0
            ),
            D,
        ),
        lambda x: jnp.concatenate([x] * 4),
        f"{OWN}, concatenated 4 times along dimension 0",
    ),
    "all_to_all": (
        SAME,
        lambda x: lax.all_to_all(x, D, 0, 0, tiled=True),
        lambda x: jnp.concatenate([piece(x)] * 4),
        f"{OWN}: its own piece of it, 4 times in a row",
    ),
    "psum_scatter": (
        SAME,
        lambda x: lax.psum_scatter(x, D, tiled=True),
        lambda x: 4 * piece(x),
        f"{OWN}: its own piece of it; {SUM} 4",
    ),
    "ppermute of all": (
        SAME,
        lambda x: lax.ppermute(x, D, [*ONE, (3, 0)]),
        lambda x: x,
        "drop it: each device's result is its own operand",
    ),
    "ppermute of some": (
        SAME,
        lambda x: lax.ppermute(x, D, ONE),
        lambda x: jnp.where(lax.axis_index(D) > 0, x, 0),
        "replace it by jnp.where(reached, x, 0), with reached true on the devices that receive "
        "data: they already hold it, and the others get zeros",
    ),
    "psum over both": (
        BY_DATA,
        lambda x: lax.psum(x, BOTH),
        lambda x: 2 * lax.psum(x, D),
        f"run it over data only; {SUM} 2 {ALIKE}",
    ),
    "pmean over both": (
        BY_DATA,
        lambda x: lax.pmean(x, BOTH),
        lambda x: lax.pmean(x, D),
        f"run it over data only; {SUM} 2 {ALIKE}",
    ),
    "pmax over both": (
        BY_DATA,
        lambda x: lax.pmax(x, BOTH),
        lambda x: lax.pmax(x, D),
        f"run it over data only {ALIKE}",
    ),
    "all_gather over both": (
        BY_DATA,
        lambda x: lax.all_gather(x, BOTH, tiled=True),
        repeated,
        "run it over data only; where the whole result is needed, repeat each shard on the "
        f"device {ALIKE}",
    ),
    **{
        f"psum_scatter over {order}": (
            BY_DATA,
            lambda x, order=order: lax.psum_scatter(x, order, tiled=True),
            lambda x, order=order: (
                2 * lax.psum_scatter(pieces_along_model(x, order), D, tiled=True)
            ),
            "on each device, keep the pieces of the operand that belong to the devices at the "
            f"same place along model, and run it on those over data only; {SUM} 2 {ALIKE}",
        )
        for order in (BOTH, BOTH[::-1])
    },
}


@pytest.mark.parametrize("name", ADVICE)
def test_what_is_advised_gives_the_same_values(name, cpu_mesh):
    spec, given, followed, advice = ADVICE[name]
    x = jax.device_put(
        np.random.default_rng(0).integers(-9, 9, (8, 16)).astype(np.float32),
        NamedSharding(cpu_mesh, spec),
    )
    values, found = [], []
    for body in (given, followed):
        mapped = jax.shard_map(
            lambda x, body=body: body(x)[None],
            mesh=cpu_mesh,
            in_specs=spec,
            out_specs=P(BOTH),
            check_vma=False,
        )
        compiled = jax.jit(mapped).lower(x).compile()
        values.append(np.asarray(compiled(x)))
        judgement = testing.judge(compiled)
        found.append({f.advice for f in findings.find(judgement)})
    np.testing.assert_array_equal(*values)  # of whole numbers
    assert found == [{advice}, set()]


def test_a_product_of_equal_values(cpu_mesh):
    """JAX has no such collective: the module is run as it is."""
    line = (
        "%r = f32[8] all-reduce(%x), replica_groups={{0,1,2,3},{4,5,6,7}}, to_apply=%max, "
        'metadata={op_name="jit(f)/psum"}'
    )
    text = T.module(
        f"%x = f32[8] parameter(0), parameter_replication={{true}}\n{line}",
        header="is_scheduled=true, replica_count=8",
        regions=T.REGIONS.replace("maximum", "multiply"),
    ).replace("() -> f32[]", "(x: f32[8]) -> f32[8]")
    (finding,) = findings.find(hlo.judge(text))
    assert finding.advice == f"{OWN}: reduce 4 copies of it"
    x = np.arange(1, 9, dtype=np.float32)
    given = jax.device_put(np.tile(x, 8), NamedSharding(cpu_mesh, P(BOTH)))
    ran = run.compile_text(text).execute_sharded([given])
    for value in ran.disassemble_into_single_device_arrays()[0]:
        np.testing.assert_allclose(value, x**4)


@pytest.mark.parametrize(
    "groups, advice",
    [
        ("{{0,1,2,3},{4,5,6,7}}", "drop it: each device's result is its own operand"),
        ("{{0,1,2}}", "replace it by jnp.where(reached, x, 0), with reached true on the devices"),
    ],
)
def test_a_broadcast_of_equal_values(groups, advice):
    """XLA's compiler for CPU has none to run: devices of no group get zeros (operation semantics)."""
    line = f"%r = f32[8] collective-broadcast(%x), channel_id=1, replica_groups={groups}"
    (finding,) = findings.find(hlo.judge(T.module(f"{T.parameter('{replicated}')}\n{line}")))
    assert finding.advice.startswith(advice)


def test_backward_collectives_that_no_cast_makes_get_the_advice_of_their_kind():
    line = (
        "%r = f32[8] collective-permute(%x), channel_id=1, source_target_pairs={{0,1}}, "
        'metadata={op_name="jit(f)/transpose(jvp())/ppermute"}'
    )
    text = T.module(f"{T.parameter('{replicated}')}\n{line}")
    (finding,) = findings.find(hlo.judge(text, mesh=T.MESH))
    assert finding.advice.startswith("replace it by jnp.where(reached, x, 0)")


@pytest.mark.parametrize("pairs", ["{{0,1}}", "{{0,1},{1,0},{2,3},{3,2},{4,5},{5,4},{6,7},{7,6}}"])
def test_a_permute_in_place_moves_slices(pairs):
    """What is left of it is no whole operand, whoever gets one."""
    text = T.module(
        f"""{T.parameter("{replicated}")}
        %i = s32[] constant(4)
        %t = (s32[]) tuple(%i)
        %r = f32[8] collective-permute(%x, %x, %t, %t), channel_id=1, source_target_pairs={pairs}, slice_sizes={{{{4}}}}"""
    )
    (finding,) = findings.find(hlo.judge(text, mesh=T.MESH))
    assert finding.advice.startswith(
        "replace it by jax.lax.dynamic_update_slice with each device's"
    )


def test_without_a_mesh_the_equal_devices_are_counted():
    line = T.all_reduce("%x", T.ALL, extra=', metadata={op_name="jit(f)/psum"}')
    (finding,) = findings.find(hlo.judge(T.module(f"{T.parameter(T.DATA)}\n{line}")))
    assert finding.advice == (
        f"run it over one device of each 2 that hold the same; {SUM} 2 (2 devices of each group "
        "hold the same)"
    )


def test_a_kernel_that_is_proven_needs_no_line():
    call = '%k = f32[8] custom-call(%x), custom_call_target="mine"'
    text = T.module("\n".join([T.parameter(T.DATA), call, T.all_reduce("%k")]))
    (verdict,) = hlo.judge(text, mesh=T.MESH).verdicts
    assert findings.advice(verdict).startswith("if the kernel reads no other device")
    assert findings.advice(verdict, {"mine"}) == (
        "the kernel 'mine' needs no line: shardrules.install() proves it; see the verdict with "
        "shardrules run --install"
    )


@pytest.mark.parametrize(
    "name, told", [("psum", True), ("psum_invariant", False), ("psum2", False)]
)
def test_a_program_that_is_checked_is_not_told_to_be(name, told):
    extra = f', metadata={{op_name="jit(f)/transpose(jvp(f))/shard_map/{name}"}}'
    text = T.module("\n".join([T.parameter(T.DATA), T.all_reduce("%x", extra=extra)]))
    (verdict,) = hlo.judge(text, mesh=T.MESH).verdicts
    assert verdict.verdict == "redundant"
    assert ("shardrules migrate" in findings.advice(verdict)) is told


def checked(cpu_mesh, body):
    """Judge a body that takes its gradients with the check on; return findings and results."""
    key = np.random.default_rng(0)
    w = key.normal(size=(16, 16)).astype(np.float32)
    x = key.normal(size=(8, 16)).astype(np.float32)
    given = [jax.device_put(a, NamedSharding(cpu_mesh, s)) for a, s in ((w, P()), (x, P(D)))]
    mapped = jax.shard_map(body, mesh=cpu_mesh, in_specs=(P(), P(D)), out_specs=P())
    compiled = jax.jit(mapped).lower(*given).compile()
    return findings.find(testing.judge(compiled)), np.asarray(compiled(*given))


def square(w, x):
    return jnp.mean((x @ w) ** 2)


def test_a_mean_of_gradients_that_are_summed_already(cpu_mesh):
    mean = jax.grad(lambda w, x: lax.pmean(square(w, x), D))
    (found,), wrong = checked(cpu_mesh, lambda w, x: lax.pmean(jax.grad(square)(w, x), D))
    assert found.advice.startswith(
        "if it averages gradients that the body takes itself, they come "
    )
    assert "divide them by 4 instead. Otherwise drop it" in found.advice
    left, followed = checked(cpu_mesh, lambda w, x: jax.grad(square)(w, x) / 4)
    _, right = checked(cpu_mesh, mean)
    assert not left
    np.testing.assert_allclose(followed, right, rtol=1e-5)
    np.testing.assert_allclose(wrong, 4 * right, rtol=1e-5)


def test_a_sum_that_no_line_writes(cpu_mesh):
    """A penalty that is equal on the devices is added to each one's loss, and cast for that."""

    def loss(w, x):
        return square(w, x) + jnp.tanh(w).mean() * w[0, 0]

    (found,), own = checked(cpu_mesh, jax.grad(lambda w, x: lax.pmean(loss(w, x), D)))
    assert found.advice.endswith(
        "Combine them after the psum or pmean of the one that differs, and nothing is cast"
    )
    left, followed = checked(
        cpu_mesh, jax.grad(lambda w, x: lax.pmean(square(w, x), D) + jnp.tanh(w).mean() * w[0, 0])
    )
    assert not left
    np.testing.assert_allclose(followed, own, rtol=1e-5, atol=1e-6)
