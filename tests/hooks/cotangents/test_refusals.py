"""The words of each refusal of a cotangent; other tests look at its ``problem`` and its axes."""

import jax
import pytest
from jax.extend.core import Primitive
from jax.sharding import PartitionSpec as P
from jax.tree_util import SequenceKey
from raising import raises

import shardrules
from shardrules import AxisType, errors
from shardrules.door import internals
from shardrules.hooks.cotangents.refusals import Cotangent, Refusals
from shardrules.hooks.cotangents.traced import CustomVjpInfo

DATA, SHAPE = frozenset({"data"}), (2, 4)
rowsum = Primitive("rowsum")  # of its own rows
rowsum.def_abstract_eval(lambda x: jax.core.ShapedArray(x.shape[1:], x.dtype))
SHARE, EQUAL, REDUCED = AxisType("data"), AxisType(), AxisType((), "data")

UNDECIDED = """\
is varying over {data}, for a primal that needs invariant. One psum over {'data'} is missing if it \
is this device's share, and none if it is the full sum already; shardrules can't tell which, \
because WHY. If it is a share, return jax.lax.psum(ct, ('data',)) from bwd. If it is summed \
already, return shardrules.already_summed(ct, 'data'). Both forms are for primals that are invariant \
over {'data'}, as here; if the bwd serves varying primals too, let it return its share as it is, \
and cast this primal where the function is called, shardrules.vary(x, 'data')."""
OF_REDUCED = """\
is varying over {data}, for a primal that is reduced over {data}: it must be each device's share, \
and shardrules can't tell whether it is, because WHY. If it is a share, return jax.lax.pcast(ct, \
('data',), to='unreduced') from bwd. If it is the full sum already, return that cast of ct / \
jax.lax.axis_size(('data',))."""
MIXED = """\
is varying over {data}, for a primal that needs invariant. It depends on the cotangent of output \
1, which varies over {'data'}, and on that of output 0, which is invariant. In bwd, reduce each \
part by itself before they are added: for output 1, jax.lax.psum(part, ('data',)), since it is \
this device's share; for output 0, nothing if it is computed from values that are equal over \
{'data'}, and otherwise the same psum. One psum of both would count such a part once for \
each device, and shardrules.already_summed would not add up the shares."""
UNMOVED = """\
depends on the cotangent of output 0, for a primal that varies over {'data'}. That output is \
invariant over {'data'}, so its cotangent is the sum over all devices; WHY, so each device would \
receive the whole sum, while with the check off each receives its own part. Say which is meant:
    each device's own, as with the check off: return shardrules.vary(y, 'data') from the function \
and from its fwd, and reduce it after the call where an invariant value is needed, as by \
jax.lax.pmean(y, 'data')
    FORM
    the whole (the primal was reduced before the call): use shardrules.vary(ct, 'data') in place \
of ct in bwd"""
OF_A_MEAN = "the gradient of that mean: return ct / jax.lax.psum(1, 'data')"
OF_EITHER = """\
the gradient of a mean or a sum: pass jax.lax.pmean(x, 'data') or jax.lax.psum(x, 'data') for that \
primal"""
SUMMED = """\
it reduces over {'data'} (by psum), but the forward's outputs are invariant over {'data'} (by it), \
so the cotangent that bwd receives is the sum over them already, and would be counted once for \
each device. FORM
Where the same function must sum equal copies of such a primal, as the outer f of f(f(x)) does, \
cast it at the call, f(shardrules.vary(x, 'data')): then the form above is right for both uses."""
PASS_ON = "pass it on:\n    return (ct,)"
SLICE = """\
take this device's slice:
    i = jax.lax.axis_index('data')
    return (jax.lax.dynamic_slice_in_dim(ct, i * 2, 2),)"""
OF_OTHERS = """\
it reduces over {'data'} (by psum), for a primal that varies over {'data'} and that the forward \
does not move there: the other devices' cotangents belong to other values, and JAX itself sums \
those of a value that was cast. Return this device's:
    return (ct,); to keep copies equal, as with the check off, say so by a cast of what it returns now:
    return (shardrules.vary(reduced_ct, 'data'),)"""
LOST = """\
is typed invariant over {'data'}, but it depends on sort, whose operands vary over them and whose \
result JAX types as invariant. Cast its result: shardrules.vary(x, 'data')."""


def summed(want, shape, form):
    """Return a sum of a cotangent that arrives whole, where the outputs have a shape."""
    return (
        "summed",
        (SHARE, want),
        lambda say, ct: say.summed(ct, DATA, "psum", "it", [shape]),
        SUMMED.replace("FORM", form),
    )


@pytest.mark.parametrize(
    "problem, types, refusal, text",
    [
        ("undecided", (SHARE, EQUAL), lambda say, ct: say.undecided(ct, DATA, "WHY"), UNDECIDED),
        ("undecided", (SHARE, REDUCED), lambda say, ct: say.undecided(ct, DATA, "WHY"), OF_REDUCED),
        ("mixed", (SHARE, EQUAL), lambda say, ct: say.mixed(ct, DATA, 1, 0), MIXED),
        (
            "unmoved",
            (EQUAL, SHARE),
            lambda say, ct: say.unmoved(ct, "data", 0, "WHY", False),
            UNMOVED.replace("FORM", OF_EITHER),
        ),
        (
            "averaged",
            (EQUAL, SHARE),
            lambda say, ct: say.unmoved(ct, "data", 0, "WHY", True),
            UNMOVED.replace("FORM", OF_A_MEAN),
        ),
        summed(EQUAL, SHAPE, f"The primal is invariant over {{'data'}}, so {PASS_ON}"),
        summed(
            SHARE, SHAPE, f"The output has the primal's shape, as after an all-reduce: {PASS_ON}"
        ),
        summed(SHARE, (8, 4), f"The output is the primal's, gathered along dimension 0: {SLICE}"),
        summed(
            SHARE,
            (3, 3),
            f"After an all-reduce, {PASS_ON}\nafter an all-gather, {SLICE.replace('2', 'n')}",
        ),
        ("of_others", (SHARE, SHARE), lambda say, ct: say.of_others(ct, DATA, "psum"), OF_OTHERS),
        ("lost", (EQUAL, SHARE), lambda say, ct: say.lost(ct, DATA, DATA, "sort"), LOST),
    ],
)
def test_what_a_refusal_says(problem, types, refusal, text):
    avals = (jax.ShapeDtypeStruct(SHAPE, "float32"),)
    parts = CustomVjpInfo("f_bwd", None, (), (), None, avals, place="model.py:7")
    ct = Cotangent((SequenceKey(0),), 0, *types)
    error = refusal(Refusals(internals.load(), parts), ct)
    assert str(error) == (
        f"the bwd 'f_bwd' (at model.py:7) returns a cotangent at output[0] that {text}"
    )
    assert (error.problem, error.path, error.axes) == (problem, ct.path, DATA)
    assert (error.have, error.want) == types


@pytest.mark.parametrize("kernel", [True, False])
def test_a_rule_that_nothing_proves_is_suspected(cpu_mesh, kernel):
    """A psum in bwd is wrong after an all-reduce, and right if the kernel sums its own rows."""
    total = rowsum.bind if kernel else lambda x: jax.lax.psum(x.sum(0), "data")
    op = jax.custom_vjp(total)
    spread = lambda n, g: jax.numpy.broadcast_to(jax.lax.psum(g, "data"), (n, *g.shape))  # noqa: E731
    op.defvjp(lambda x: (op(x), x.shape[0]), lambda n, g: (spread(n, g),))
    f = jax.shard_map(op, mesh=cpu_mesh, in_specs=P("data"), out_specs=P())
    with shardrules.install(), shardrules.rules({"rowsum": shardrules.all_reduce("data")}):
        with raises(errors.CotangentError, problem="summed") as caught:
            jax.make_jaxpr(jax.grad(lambda x: f(x).sum()))(jax.numpy.ones((8, 4)))
    *_, last = str(caught.value).splitlines()
    said = "This takes for granted what rowsum does, all_reduce('data') (declared at "
    assert last.startswith(said) == kernel
    assert ("shardrules.testing.check_rule(op, mesh, *args, gradients=False)" in last) == kernel
