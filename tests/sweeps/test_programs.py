"""Random programs with gradients, on eight devices and under vmap on one.

``python tests/seeds.py programs 2000`` runs as many as are asked for.
"""

from __future__ import annotations

import dataclasses

import jax
import pytest
import seeds

import shardrules as sr
from shardrules.hooks.cotangents.bwd import Bwd
from shardrules.hooks.cotangents.custom_vjp import CustomVjpHooks
from shardrules.hooks.retyping.replay import ReplayHooks
from shardrules.hooks.types.funnel import Law
from shardrules.hooks.types.join_law import JoinLawHooks
from sweeps import programs
from sweeps.generator import Block, Program, Step


@pytest.mark.slow
def test_random_programs_are_right(share):
    """In a process of their own: a program whose devices wait for each other ends its process."""
    tried = share(range(30000, 30040))
    outcomes = seeds.outcomes("sweeps.programs", len(tried), tried.start)
    said, is_well = programs.summary(outcomes)
    assert is_well and len(outcomes) == len(tried), said
    assert sum(one["what"] == "right" for one in outcomes.values()) >= len(tried) * 4 // 5


def program(*steps, specs=((), (), ()), integer=("a",), mode="outside"):
    """A program of three floats, replicated, and an integer that differs along one axis."""
    return Program(7, specs, integer, Block(3, steps), mode)


SUMMED = program(Step("custom", (0, 1), ("plain",)), specs=(("a",), (), ()))
BRANCHES = tuple(Block(2, (Step("plain", (0,), (name,)),)) for name in ("sin", "tanh"))
PREDICATE = program(Step("closed_cond", (0, 1), (), BRANCHES))
TWICE = program(Step("reducing", (0,), ("gathered loss", "a", True)))
IDENTITY = program(Step("reducing", (0,), ("identity", "a", False)))
FORGETS = program(Step("collective", (0,), ("pmax", ("a",), [[0, 1], [2, 3]])), specs=(("a",),) * 3)
TANGENT = program(
    Step("jvp", (0, 1), (), (Block(1, (Step("plain", (0,), ("sin",)),)),)), specs=((), ("a",), ())
)


SCALED = [Step("plain", (place,), ("scale",)) for place in (2, 3, 3)]
STACKED = program(
    *SCALED[:2],
    Step("scan", (3, 4, 3), (), (Block(3, tuple(SCALED)),)),
    Step("plain", (5,), ("scale",)),
    Step("ref", (2, 5)),
    specs=(("a", "b"), ("a",), ("b",)),
    integer=(),
    mode="hessian",
)


def test_what_plain_jax_dies_of_is_not_ours():
    """Seed 2106, reduced: a second derivative of a scan, with the hooks and without, to JAX 0.11."""
    assert judged(STACKED).what in ("jax", "right")


def judged(one):
    return programs.judge_program(one)


# They failed once: tangents that vary more than their primals (a product with an axis's index, a
# stack in a scan).
INDEX = Block(2, (Step("axis_index", (0,), ("a",)), Step("plain", (2,), ("tanh",))))
INDICES = program(
    Step("linearize", (2, 2, 2), (), (Block(2, (Step("vmap", (1, 1), (), (INDEX,)),)),)),
    specs=((), (), ("b",)),
    mode="hessian",
)
ROWS = program(
    Step(
        "scan_from_zeros",
        (1, 0),
        (),
        (
            Block(
                2,
                (
                    Step("collective", (0,), ("ppermute", ("a",), None)),
                    Step("jvp", (2, 2, 1), (), (Block(2, (Step("plain", (0, 1), ("mul",)),)),)),
                ),
            ),
        ),
    ),
    specs=(("b",), (), ("a", "b")),
    mode="hessian",
)


@pytest.mark.parametrize("one", [SUMMED, PREDICATE, FORGETS, TANGENT, INDICES, ROWS])
@pytest.mark.parametrize("casts", ["late", "cheapest"])
def test_they_are_right_as_it_is(one, casts):
    assert judged(dataclasses.replace(one, casts=casts)).what == "right"


@pytest.mark.parametrize("one", [TWICE, IDENTITY])
def test_what_bwd_sums_twice_is_refused_by_name(one):
    outcome = judged(one)
    assert (outcome.what, outcome.why.split(":")[0]) == ("refused", "CotangentError")


# Each mechanism taken away: the programs have to see it.


def no_sum(*args, original=CustomVjpHooks._cotangent):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(jax.lax, "psum", jax.lax.pmean)
        return original(*args)


def nothing(*args, **kwargs):
    return None


def undecided(*args):
    return None, frozenset()


def lawless(*args, **kwargs):
    return Law()


@pytest.mark.parametrize(
    "one, owner, name, fault",
    [
        (SUMMED, CustomVjpHooks, "_cotangent", no_sum),
        (PREDICATE, ReplayHooks, "_decides", undecided),
        (TWICE, Bwd, "check_share", nothing),
        (IDENTITY, Bwd, "_check_sums", nothing),
        (FORGETS, JoinLawHooks, "law", lawless),
    ],
)
def test_they_see_a_mechanism_that_is_taken_away(one, owner, name, fault, monkeypatch, request):
    sr.install().uninstall(ops=True)  # a declared op that was called keeps JAX patched as it was
    jax.clear_caches()
    request.addfinalizer(jax.clear_caches)
    monkeypatch.setattr(owner, name, fault)
    assert judged(one).what == "wrong"
