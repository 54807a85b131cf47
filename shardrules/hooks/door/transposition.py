"""JAX's private names about linear programs and their transposition; a part of ``symbols``."""

from __future__ import annotations

from shardrules.hooks.door.lookup import Symbol

__all__ = ["TRANSPOSITION"]

TRANSPOSITION = (
    Symbol(
        "backward_pass",
        "jax._src.interpreters.ad:backward_pass",
        "0.6.0-0.12",
        ("jaxpr", "transform_stack", "consts", "primals_in"),
        "a linear program before it is transposed, when its casts are placed",
    ),
    Symbol(
        "backward_pass3",
        "jax._src.interpreters.ad:backward_pass3",
        "0.7.2-0.12",
        ("jaxpr", "transform_stack", "consts", "primals_in"),
        "the same, where cotangents are accumulated in place",
        optional=True,
    ),
    Symbol(
        "older_backward_pass",
        "jax._src.interpreters.ad:backward_pass",
        "0.6.0-0.7.2",
        ("cotangents_in",),
        "the one that takes linear equations only",
        optional=True,
    ),
    Symbol(
        "partial_eval_jaxpr",
        "jax._src.interpreters.partial_eval:partial_eval_jaxpr_nounits",
        "0.6.0-0.12",
        ("jaxpr", "unknowns", "instantiate"),
        "what of a program is known before it is transposed",
    ),
    Symbol(
        "close_jaxpr",
        "jax._src.interpreters.partial_eval:close_jaxpr",
        "0.6.0-0.12",
        ("jaxpr",),
        "the same",
    ),
    Symbol("jaxpr_as_fun", "jax._src.core:jaxpr_as_fun", "0.6.0-0.12", (), "the same"),
    Symbol(
        "UndefinedPrimal",
        "jax._src.interpreters.ad:UndefinedPrimal",
        "0.6.0-0.12",
        (),
        "an input of a linear program that is a tangent",
    ),
    Symbol(
        "LinearizeTracer",
        "jax._src.interpreters.ad:LinearizeTracer",
        "0.6.0-0.12",
        (),
        "a value whose derivative is to be transposed later",
    ),
    Symbol(
        "GradAccum",
        "jax._src.interpreters.ad:GradAccum",
        "0.8.3-0.12",
        (),
        "the same, where cotangents are accumulated in place",
        optional=True,
    ),
)
