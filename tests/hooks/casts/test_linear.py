"""The graph of small linear programs: tangents, casts, what may move and what must stay."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from hooks import bodies
from shardrules.door import internals
from shardrules.hooks.casts.linear import BwdSums, Graph, Unplaceable
from shardrules.hooks.cotangents.linearity import linearity

DATA, NONE = frozenset({"data"}), frozenset()


def cast(t, axes="data"):
    return lax.pcast(t, axes, to="varying")


def graph(f, mesh, wanted=None):
    """The graph of ``f`` of a residual that varies over data and an invariant tangent."""

    def look(r, t):
        closed = jax.make_jaxpr(f)(r, t)
        assert not closed.consts
        used = [True] * len(closed.jaxpr.outvars) if wanted is None else wanted
        made = Graph(internals.load(), closed.jaxpr, [False, True], used, lambda eqn: False)
        made.settle(lambda eqn: BwdSums([], NONE, None))
        return made

    return bodies.inside(mesh, look, ("data",), ())


def test_a_cast_costs_its_bytes(cpu_mesh, hooks):
    made = graph(lambda r, t: r * cast(t), cpu_mesh)
    ((given, result),) = made.casts
    assert given is made.inputs[0] and given.cast_bytes == 16 and given.castable
    assert (given.varying, result.varying) == (NONE, DATA)
    (end,) = made.ends
    assert end.live and given.live
    (mul,) = made.at.values()
    assert mul.needed == DATA and mul.inputs == [result] and mul.outputs == [end]
    assert mul.fixed == NONE
    assert made.device_count(DATA) == 4 and made.device_count(frozenset(bodies.AXES)) == 8


def test_what_is_not_asked_for_is_not_live(cpu_mesh, hooks):
    made = graph(lambda r, t: (t * 2, r * cast(t)), cpu_mesh, [True, False])
    ((given, result),) = made.casts
    assert given.live and not result.live


def test_a_cast_in_a_loop_costs_its_runs_and_a_carry_is_one_value(cpu_mesh, hooks):
    def f(r, t):
        def step(c, x):
            return c + cast(t) * r, x

        return lax.scan(step, cast(jnp.zeros(4)), jnp.arange(3.0))[0]

    made = graph(f, cpu_mesh)
    ((given, result),) = [pair for pair in made.casts if pair[0].runs > 1]
    assert given.runs == 3 and given.cast_bytes == 3 * 16
    labels = dict.fromkeys([key for v in made.values.values() for key in (v, v.use)], NONE)
    (placed,) = made.placed({**labels, given.use: DATA})
    assert (placed.value, placed.axes, placed.runs) == ("float32[4]", ("data",), 3)
    ties = [step for step in made.steps if step.ties]
    assert len(ties) == 1 and ties[0].outputs[0].runs == 1


def test_no_cast_may_stand_in_a_branch_that_some_devices_take(cpu_mesh, hooks):
    def f(choose):
        def program(r, t):
            of = r[0] if choose == "by device" else jnp.float32(1) + lax.psum(r[0], "data")
            varied = cast(t)
            return lax.cond(of > 0, lambda t: t * 2, lambda t: t * 3, varied)

        return graph(program, cpu_mesh)

    for choose, castable in (("by device", False), ("alike", True)):
        inside = [value for (where, _), value in f(choose).values.items() if where]
        assert inside and {value.castable for value in inside} == {castable}


def test_a_collective_keeps_the_types_along_its_axes(cpu_mesh, hooks):
    made = graph(lambda r, t: lax.psum(cast(t) * r, "data"), cpu_mesh)
    (psum,) = [s for s in made.at.values() if s.fixed]
    assert psum.fixed == DATA


def test_a_tangent_less_precise_than_what_is_cast_is_not_cast(cpu_mesh, hooks):
    def f(r, t):
        narrow = t.astype(jnp.bfloat16)
        return cast(narrow.astype(jnp.float32)) * r

    made = graph(f, cpu_mesh)
    by_kind = {str(v.aval.dtype): v for v in made.values.values() if not v.varying and v.live}
    assert by_kind["bfloat16"].stays == DATA
    (given, _), *_ = made.casts
    assert not given.stays and not made.inputs[0].narrow


def test_what_a_wider_cast_makes_is_not_cast_later_as_less(cpu_mesh, hooks):
    made = graph(lambda r, t: cast(t).astype(jnp.bfloat16) * r.astype(jnp.bfloat16), cpu_mesh)
    ends = [v for v in made.values.values() if str(v.aval.dtype) == "bfloat16"]
    assert ends and all(v.narrow == DATA for v in ends)


def test_a_step_sums_what_is_left_by_itself(cpu_mesh, hooks):
    made = graph(lambda r, t: r * cast(t), cpu_mesh)
    (step,) = made.at.values()
    every = frozenset(bodies.AXES)
    step.sums, step.moves = [(16, DATA), (64, every), (8, every - DATA)], every
    assert [*step.left(NONE)] == step.sums
    assert [*step.left(every - DATA)] == [(16, DATA), (64, DATA)]
    assert [*step.left(every)] == []
    step.moves = DATA
    assert [*step.left(every)] == [(64, every - DATA), (8, every - DATA)]


def test_a_ref_that_a_loop_takes_has_no_form(cpu_mesh, hooks):
    def f(r, t):
        ref = jax.new_ref(t)

        def step(i, c):
            ref[...] = ref[...] * 2
            return c

        lax.fori_loop(0, 2, step, 0)
        return ref[...]

    with pytest.raises(Unplaceable, match="a gradient flows through Ref"):
        graph(f, cpu_mesh)


@pytest.mark.parametrize(
    ("f", "axes"),
    [
        (lambda r, t: t * 2 + t[::-1], NONE),
        (lambda r, t: r * t, NONE),
        (lambda r, t: t / r, NONE),
        (lambda r, t: lax.psum(r * cast(t), "data"), DATA),
        (lambda r, t: jax.jit(lambda t: lax.psum(t, "model"))(t), frozenset({"model"})),
        (lambda r, t: jnp.where(r > 0, t, -t), NONE),
        (lambda r, t: t.astype(jnp.float16), NONE),
        (lambda r, t: t * t, None),
        (lambda r, t: r / t, None),
        (lambda r, t: jnp.sin(t), None),
        (lambda r, t: jnp.where(t > 0, r, r), None),
        (lambda r, t: t + r, None),  # affine
        (lambda r, t: t.astype(jnp.int32), None),
        (lambda r, t: (t, r), None),
        (lambda r, t: lax.all_gather(t, "data"), None),
    ],
)
def test_what_is_linear_and_over_which_axes_it_sums(f, axes, cpu_mesh, hooks):
    jaxpr = bodies.inside(cpu_mesh, lambda r, t: jax.make_jaxpr(f)(r, t).jaxpr, ("data",), ())
    assert linearity(jaxpr, jaxpr.invars[1:]).summed == axes
