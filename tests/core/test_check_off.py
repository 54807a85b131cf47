"""``shardrules migrate``: what each shard_map without its check would be with it, on every JAX."""

import _thread
import contextlib
import functools
import inspect
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl
from jax.experimental.shard_map import shard_map as old
from jax.sharding import PartitionSpec as P

import shardrules
from core import versions
from shardrules.door import internals
from shardrules.hooks.install import touched
from shardrules.unchecked import check_off, migration, retrace
from shardrules.unchecked import hooks as unchecked_hooks

X = np.ones((8, 16), np.float32)
W = np.full((2, 16), 0.5, np.float32)


@contextlib.contextmanager
def looking():
    found = []
    stop = check_off.start(found.append)
    try:
        yield found
    finally:
        stop()


def off(f, mesh, in_specs, out_specs):
    return old(f, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_rep=False)


def one(found):
    (row,) = migration.rows(found)
    return row


def test_a_defensive_psum_that_goes_under_jit_and_grad(cpu_mesh):
    def loss(x):
        return (off(lambda x: 2 * x, cpu_mesh, P("data"), P("data"))(x) ** 2).sum()

    expected = jax.jit(jax.grad(loss))(X)
    with looking() as found:
        np.testing.assert_array_equal(jax.jit(jax.grad(loss))(X), expected)
    row = one(found)
    assert row.verdict == migration.SWITCH
    assert (row.shown(False), row.shown(True)) == ("128 B", "0 B")
    assert row.site.file == __file__
    assert row.site.line == inspect.getsourcelines(off)[1] + 1


def test_a_weight_in_a_scan(cpu_mesh):
    def body(x, w):
        return jax.lax.scan(lambda c, _: (c * w, None), x, None, length=5)[0]

    with looking() as found:
        off(body, cpu_mesh, (P("data"), P()), P("data"))(X, W)
    row = one(found)
    typed = internals.load().typed  # casts are placed from JAX 0.6 on
    assert row.verdict == (migration.SWITCH if typed else migration.MORE)
    assert row.shown(True) == ("192 B" if typed else "960 B") and row.shown(False) == "352 B"


def scaled(w, x):
    return (w * x).mean()


@jax.custom_vjp
def scaled_by_hand(w, x):
    return scaled(w, x)


scaled_by_hand.defvjp(
    lambda w, x: (scaled(w, x), (w, x)),
    lambda r, g: ((g * r[1]).sum(0) / r[1].size, g * r[0] / r[1].size + 0 * r[1]),
)


@pytest.mark.parametrize(
    "take",
    [
        lambda w, x: jax.grad(scaled)(w, x),
        lambda w, x: jax.grad(scaled_by_hand)(w, x),
        lambda w, x: jax.jit(jax.grad(scaled))(w, x),
        lambda w, x: jax.vjp(scaled, w, x)[1](jnp.float32(1))[0],
        lambda w, x: jax.lax.scan(lambda c, _: (c - jax.grad(scaled)(c, x), None), w, jnp.ones(2))[
            0
        ],
        lambda w, x: jax.hessian(scaled)(w, x).sum(1),
    ],
    ids=["grad", "custom_vjp", "jit", "vjp", "scan", "hessian"],
)
def test_gradients_that_a_body_takes_change_and_are_never_switched(cpu_mesh, take):
    """With the check on they are sums over the mesh axes already, and pmean makes no mean."""

    def step(w, x):
        return jax.lax.pmean(take(w, x), ("data", "model"))

    with looking() as found:
        off(step, cpu_mesh, (P(), P("data")), P())(W[0], X)
    row = one(found)
    assert row.calls[0].takes_gradients and row.verdict not in (migration.SWITCH, migration.MORE)
    text = migration.written([row])
    assert "compare the values of a step before and after" in text
    # Before JAX 0.6, a body's own gradients are those of each device with the check on, too.
    assert "shardrules.vary(w, 'data', 'model')" in text or not versions.types_values()
    assert migration.edited([row], __file__).sites == ()


def test_a_tangent_is_no_gradient(cpu_mesh):
    def pushed(w, x):
        return jax.jvp(lambda x: jnp.sin(w) * x, (x,), (x,))[1]

    with looking() as found:
        jax.grad(lambda w: off(pushed, cpu_mesh, (P(), P("data")), P("data"))(w, X).sum())(W[0])
    assert not one(found).calls[0].takes_gradients


def test_an_output_that_varies_is_named_by_its_path(cpu_mesh):
    def body(x):
        return {"y": x, "s": jnp.sum(x)}

    with looking() as found:
        off(body, cpu_mesh, P("data"), {"y": P("data"), "s": P()})(X)
    row = one(found)
    assert row.verdict == migration.OUTPUTS
    assert [(o.path, o.axes) for o in row.calls[0].outputs] == [("['s']", "data")]
    assert "it varies over data" in migration.written([row])


def test_a_kernel_without_a_rule_comes_with_its_lines(cpu_mesh):
    def reader(x_ref, o_ref):
        o_ref[...] = x_ref[...] + jax.lax.axis_index("model").astype(jnp.float32)

    def body(x):
        return pl.pallas_call(reader, jax.ShapeDtypeStruct(x.shape, x.dtype), interpret=True)(x)

    with looking() as found:
        jax.make_jaxpr(off(body, cpu_mesh, P("data"), P("data", "model")))(X)
    row = one(found)
    assert row.verdict == migration.RULE
    assert [missing.kernel for missing in row.calls[0].missing] == ["reader"]
    assert "reader has no rule; write one of\n    " in migration.written([row])
    rule = shardrules.per_device("model")
    with looking() as found, shardrules.rules({"reader": rule}):
        jax.make_jaxpr(off(body, cpu_mesh, P("data"), P("data", "model")))(X)
    assert not one(found).calls[0].missing


if hasattr(jax, "shard_map"):  # shard_maps nest from JAX 0.6.1 on

    def test_one_inside_another_is_looked_at_with_it(cpu_mesh):
        def inner(x):
            return 3 * x

        def outer(x):
            spec = P(None, "model")
            some = {"axis_names": {"model"}, "check_vma": False}
            return jax.shard_map(inner, in_specs=spec, out_specs=spec, **some)(x)

        def mapped(body):
            some = {"axis_names": {"data"}, "check_vma": False}
            return jax.shard_map(
                body, mesh=cpu_mesh, in_specs=P("data"), out_specs=P("data"), **some
            )

        with looking() as found:
            jax.make_jaxpr(mapped(outer))(X)
        rows = migration.rows(found)
        assert [row.site.function for row in rows] == ["outer", "inner"]
        if rows[1].verdict == migration.LIMIT:  # JAX 0.6 to 0.8 can't transpose it with the check
            assert rows[1].calls[0].error.startswith("in the derivative: ")
            assert "PartitionSpec" in rows[1].calls[0].error and rows[0].verdict == migration.LIMIT
        else:
            assert [row.verdict for row in rows] == [migration.SWITCH] * 2

        def bad(x):
            spec = P(None, "model")
            some = {"axis_names": {"model"}, "check_vma": False}
            return jax.shard_map(inner, in_specs=spec, out_specs=P(), **some)(x)

        with looking() as found:
            jax.make_jaxpr(mapped(bad))(X)
        rows = migration.rows(found)
        assert [row.verdict for row in rows] == [migration.LIMIT, migration.OUTPUTS]
        assert rows[0].calls[0].error == f"waits for line {rows[1].site.line}"


def test_the_programs_errors_are_its_own(cpu_mesh):
    class Mine(Exception):
        pass

    def body(x):
        raise Mine("here")

    with looking() as found, pytest.raises(Mine, match="here"):
        off(body, cpu_mesh, P("data"), P("data"))(X)
    assert found == []


def test_what_the_body_does_to_the_generators_and_prints_is_taken_back(cpu_mesh, capsys):
    def body(x):
        print("traced")
        return x * np.random.rand()

    def run():
        np.random.seed(0)
        f = off(body, cpu_mesh, P("data"), P("data"))
        values = [np.asarray(jax.jit(f)(X))]
        return values, np.random.rand(), capsys.readouterr().out

    # A thread that Python didn't start stays listed (to 3.11): a callback that logs is in one.
    named = threading.Event()
    _thread.start_new_thread(lambda: (threading.current_thread(), named.set()), ())
    named.wait()
    plain = run()
    with looking() as found:
        seen = run()
    np.testing.assert_array_equal(plain[0], seen[0])
    assert plain[1:] == seen[1:] and len(found) == 1


def test_numbers_that_another_thread_draws_are_not_drawn_again(cpu_mesh):
    """It draws while the body is traced again: what it drew stays drawn."""
    wanted, drawn = threading.Barrier(2), []

    def body(x):
        wanted.wait(), wanted.wait()
        return 2 * x

    def draw():
        with contextlib.suppress(threading.BrokenBarrierError):
            while True:
                wanted.wait()
                drawn.append(np.random.rand())
                wanted.wait()

    np.random.seed(0)
    thread = threading.Thread(target=draw)
    thread.start()
    try:
        with looking() as found:
            off(body, cpu_mesh, P("data"), P("data"))(X)
    finally:
        wanted.abort()
        thread.join()
    assert len(found) == 1 and len(drawn) > 1
    np.random.seed(0)
    assert drawn == [np.random.rand() for _ in drawn]


def test_a_partial_is_called_as_its_function(cpu_mesh):
    def scale(x, *, by):
        return by * x

    with looking() as found:
        off(functools.partial(scale, by=2), cpu_mesh, P("data"), P("data"))(X)
    assert migration.place(found[0].site).endswith("(scale)")


def test_what_is_to_happen_before_a_look_happens_once(cpu_mesh):
    happened, found = [], []

    def fail():
        happened.append(1)
        if len(happened) == 1:
            raise ImportError("not there yet")

    stop = check_off.start(found.append, fail)
    try:
        for _ in range(3):
            off(lambda x: 2 * x, cpu_mesh, P("data"), P("data"))(X)
    finally:
        stop()
    assert [call.error for call in found] == ["it can't be looked at: not there yet", "", ""]
    assert len(happened) == 2


@pytest.mark.parametrize(
    "text",
    [
        "A mismatch. Please open an issue at https://github.com/google/jax/issues, and as a "
        "temporary workaround pass the check_rep=False argument to shard_map",
        "A mismatch. Please open an issue at https://github.com/jax-ml/jax/issues and as a "
        "temporary workaround pass the check_vma=False argument to `jax.shard_map`",
    ],
)
def test_nobody_is_told_to_switch_the_check_off_again(text):
    assert retrace.words(ValueError(text)) == "A mismatch."


@pytest.mark.slow
def test_a_jitted_function_inside_is_traced_anew(cpu_mesh):
    """With the check off it was traced before, by the same types: nothing of that may be used."""
    seen = []
    for wrapped in (lambda f: f, jax.jit):
        inner = wrapped(lambda x: jax.lax.psum(x * x, "data"))
        body = wrapped(lambda x: inner(x) + inner(2 * x))
        with looking() as found:
            jax.grad(lambda x: off(body, cpu_mesh, P("data"), P("data"))(x).sum())(X)
            off(body, cpu_mesh, P("data"), P())(X)
            off(body, cpu_mesh, P(None, "model"), P())(X)
        seen.append([(call.before, call.after, call.outputs) for call in found])
    assert seen[0] == seen[1] and len(seen[0]) == 3
    assert [len(outputs) for _, _, outputs in seen[0]] == [0, 0, 1]
    assert [bool(after) for _, after, _ in seen[0]] == [True, True, False]


def test_jaxs_own_words_and_an_integer_program(cpu_mesh):
    def body(x):
        return jax.lax.while_loop(lambda c: c[0, 0] < 9, lambda c: c + 1, x)

    with looking() as found:
        jax.make_jaxpr(off(body, cpu_mesh, P("data"), P("data")))(X.astype(np.int32))
        jax.make_jaxpr(off(body, cpu_mesh, P("data"), P("data")))(X)
    why = [call.undifferentiated for call in found]
    assert why[0] == "TypeError: no argument is of a float type" and "while_loop" in why[1]
    said = migration.written(migration.rows(found))
    assert f"its gradient was not compared: {why[0]}" in " ".join(said.split())


def test_a_missing_derivative_is_not_said_in_words_of_jaxs_inside():
    def failing(*_):
        raise ValueError("Linearization failed to produce known values for all output primals.")

    made, why = retrace.derivatives(failing, (X,), lambda _: False)
    assert (made, why) == ([], "an operation in it has no derivative in JAX")


@pytest.mark.slow
def test_another_body_at_the_same_place_is_looked_at(cpu_mesh):
    with looking() as found:
        for body in (lambda x: 2 * x, lambda x: jnp.zeros_like(x) + x.sum()):
            off(body, cpu_mesh, P("data"), P("data"))(X)
            f = off(body, cpu_mesh, P("data"), P())
            f(X), f(X)
    assert len(found) == 4
    assert one(found).verdict == migration.OUTPUTS


def test_what_goes_wrong_in_the_look_is_not_the_programs(cpu_mesh, monkeypatch):
    def broken(*_):
        raise RuntimeError("broken")

    monkeypatch.setattr(unchecked_hooks._Unchecked, "look", broken)
    with looking() as found:
        off(lambda x: 2 * x, cpu_mesh, P("data"), P("data"))(X)
    assert one(found).verdict == migration.BLIND
    assert found[0].error == "it can't be looked at: broken"


def test_checks_that_are_on_and_jaxs_own_are_left_alone(cpu_mesh):
    shardrules.install().uninstall(ops=True)  # a declared op of another test keeps hooks
    with looking() as found:
        old(lambda x: x, mesh=cpu_mesh, in_specs=P("data"), out_specs=P("data"))(X)
        jax.pmap(lambda x: x)(np.ones((8, 2), np.float32))
    assert found == [] and touched() == ()
