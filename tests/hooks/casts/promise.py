"""What a gradient's psums move, counted in its jaxpr: no lowering, no compilation."""

from __future__ import annotations

import fractions
import math

import jax
from jax.interpreters import partial_eval

import shardrules as sr
from shardrules.door.jaxprs import SUMS, named_axes, opened

ARMS = {"off": ("late", False), "late": ("late", True), "cheapest": ("cheapest", True)}
WRONG = ("above late", "above the check off", "not explained")


def summed(jaxpr, sizes):
    """Return the bytes that a jaxpr's psums sum on each device, and what a device sends."""
    operands, wire = 0, fractions.Fraction(0)
    for eqn in jaxpr.eqns:
        if eqn.primitive.name in SUMS:
            count = math.prod(sizes[axis] for axis in named_axes(eqn.params))
            for atom in eqn.invars:
                size_bytes = math.prod(atom.aval.shape) * atom.aval.dtype.itemsize
                operands += size_bytes if count > 1 else 0
                wire += fractions.Fraction(2 * (count - 1) * size_bytes, count)
            continue
        runs = eqn.params["length"] if eqn.primitive.name == "scan" else 1
        inner = [
            summed(opened(one), sizes)
            for value in eqn.params.values()
            for one in (value if isinstance(value, (tuple, list)) else (value,))
            if opened(one) is not None and eqn.primitive.name != "pallas_call"
        ]
        merge = max if eqn.primitive.name == "cond" else sum
        if inner:
            operands += runs * merge(each[0] for each in inner)
            wire += runs * merge(each[1] for each in inner)
    return operands, wire


def moved(body, arm):
    """Return what the gradient of a random body moves, as ``summed`` counts it."""
    casts, check = ARMS[arm]
    params, x = body.arguments()
    with sr.install(casts=casts):
        jaxpr = jax.make_jaxpr(jax.grad(body.split(check), argnums=(0, 1)))(params, x).jaxpr
    jaxpr, _ = partial_eval.dce_jaxpr(jaxpr, [True] * len(jaxpr.outvars))
    return summed(jaxpr, body.mesh.shape)


def compare(body):
    """Return what each arm moves, and in which ways the cheapest casts move more than another."""
    figures = {arm: moved(body, arm) for arm in ARMS}
    above = [
        f"above {arm}"
        for arm in ("off", "late")
        if any(mine > other for mine, other in zip(figures["cheapest"], figures[arm]))
    ]
    return figures, above


def reasons(body):
    """Return what ``explain`` says of the gradient's casts that move more than the check off."""
    params, x = body.arguments()
    placements = sr.explain(jax.grad(body.split(), argnums=(0, 1)), params, x).placements
    return [why for one in placements for why in (*one.exceptions, one.why) if why]
