"""What becomes of small loops, branches and calls whose operands vary over more axes."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from hooks import bodies
from shardrules.hooks.install import state
from shardrules.hooks.retyping.higher_order import HigherOrderOp
from shardrules.hooks.retyping.retyping import Retyping
from shardrules.registry import AxisType

N, D, M, DM = (AxisType(axes) for axes in ((), ("data",), ("model",), ("data", "model")))


def became(f, mesh, *types, what=None, name=None):
    """Trace ``f`` of invariant arguments, and give the equation operands of other types.

    Args:
      f: its first equation that calls jaxprs is looked at.
      mesh: of data and model.
      *types: of its operands; as many of the last as are missing.
      what: that which it stands in.
      name: the primitive, if not the first one that calls jaxprs.
    """

    def look(*args):
        retyping = state().of(Retyping)
        for eqn in jax.make_jaxpr(f)(*args).jaxpr.eqns:
            if name not in (None, eqn.primitive.name):
                continue
            avals = [atom.aval for atom in eqn.invars]
            op = HigherOrderOp.of(retyping, eqn.primitive, eqn.params, avals)
            if op is not None:
                given = [*types, *[types[-1]] * (len(avals) - len(types))]
                return op, op.retyped(op.wanted(given), what)
        return None

    return bodies.inside(mesh, look, (), ())


def test_what_calls_no_jaxpr_is_none(cpu_mesh, hooks):
    assert became(lambda a, b: jnp.sin(a) + b, cpu_mesh, D) is None


@pytest.mark.parametrize("wrap", [jax.jit, jax.checkpoint])
def test_a_call_returns_what_its_jaxpr_makes_of_its_operands(wrap, cpu_mesh, hooks):
    f = wrap(lambda a, b: (a * b, jnp.sin(b), b))
    op, new = became(f, cpu_mesh, D, M)
    assert op.traced == [N, N]
    assert list(new.operands) == [D, M]
    assert list(new.results) == [DM, M, M]


def test_a_sum_inside_drops_its_axis(cpu_mesh, hooks):
    _, new = became(jax.jit(lambda a, b: lax.psum(a, "data") + b), cpu_mesh, DM, N)
    assert list(new.results) == [M]


def test_a_call_that_fits_is_the_same(cpu_mesh, hooks):
    def f(a, b):
        return lax.scan(lambda c, x: (c + x, c), jnp.zeros(()), a)[0] * b

    _, new = became(f, cpu_mesh, N, name="scan")
    assert new is None


def test_a_scan_s_carry_meets_what_its_body_returns(cpu_mesh, hooks):
    def f(a, b):
        # The second carry gets the first, a step later: two passes to the fixpoint.
        return lax.scan(lambda c, x: ((x, c[0]), c[1] * 2), (b[0], b[0]), a)

    op, new = became(f, cpu_mesh, N, N, D, name="scan")
    assert [str(one) for one in new.operands] == [str(one) for one in (D, D, D)]
    assert list(new.results) == [D, D, D]
    inner = new.changes["jaxpr"]
    assert list(state().of(Retyping).results(inner)) == [D, D, D]


def test_a_loop_s_results_vary_as_its_condition_does(cpu_mesh, hooks):
    def f(a, b):
        return lax.while_loop(lambda c: c[0] < a[0], lambda c: (c[0] + 1, c[1] * 2), (b[0], b[0]))

    op, new = became(f, cpu_mesh, D, N, N, name="while")
    assert list(new.operands) == [D, D, D]
    assert list(new.results) == [D, D]


def test_branches_vary_as_the_predicate_and_as_the_widest(cpu_mesh, hooks):
    def f(a, b):
        return lax.cond(a[0] > 0, lambda a, b: (a, b * 2), lambda a, b: (b, b * 3), a, b)

    op, new = became(f, cpu_mesh, M, D, N, name="cond")
    predicate, *operands = new.operands
    assert predicate == M
    results = list(new.results)
    assert results == [DM, M]
    for branch in new.changes["branches"]:
        assert list(state().of(Retyping).results(branch)) == results


def test_of_a_solve_all_varies_alike(cpu_mesh, hooks):
    def f(a, b):
        return lax.custom_linear_solve(lambda x: a * x, b, solve=lambda _, y: y / a, symmetric=True)

    op, new = became(f, cpu_mesh, D, N, name="custom_linear_solve")
    assert set(new.operands) == {D} and set(new.results) == {D}
    assert op.wanted([N] * (len(op.traced) - 1) + [M]) == [M] * len(op.traced)


def test_a_custom_vjp_s_operands_vary_alike(cpu_mesh, hooks):
    @jax.custom_vjp
    def mul(a, b):
        return a * b

    mul.defvjp(lambda a, b: (a * b, (a, b)), lambda r, g: (g * r[1], g * r[0]))
    op, new = became(mul, cpu_mesh, D, N)
    assert list(new.operands) == [D, D]
    assert list(new.results) == [D]
    assert {"fwd_jaxpr_thunk", "bwd"} <= set(new.changes)
