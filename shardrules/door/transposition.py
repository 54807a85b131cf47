"""JAX's private names about linear programs and their transposition; a part of ``symbols``.

Also those by which a bwd becomes a jaxpr in the middle of it.
"""

from __future__ import annotations

from shardrules.door.lookup import Symbol

__all__ = ["TRANSPOSITION"]

TRANSPOSITION = (
    Symbol(
        "transpose_of",
        "jax._src.interpreters.ad:get_primitive_transpose",
        "0.6.0-0.12",
        ("p",),
        "looks up a primitive's transpose rule: a user's is held to its operands' types",
    ),
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
        "linearize",
        "jax._src.interpreters.ad:linearize",
        "0.6.0-0.12",
        ("traceable",),
        "traces what will be transposed later: also a gradient that is differentiated again",
    ),
    Symbol(
        "GradAccum",
        "jax._src.interpreters.ad:GradAccum",
        "0.8.3-0.12",
        (),
        "the same, where cotangents are accumulated in place",
        optional=True,
    ),
    Symbol(
        "inline_jaxpr",
        "jax._src.interpreters.partial_eval:inline_jaxpr_into_trace",
        "0.7.2-0.12",
        ("trace", "src", "jaxpr", "consts"),
        "puts the jaxpr of a bwd into the one that is being traced, as jit(inline=True) does",
        optional=True,
    ),
    Symbol(
        "stage_jaxpr",
        "jax._src.interpreters.partial_eval:trace_to_jaxpr_dynamic",
        "0.7.2-0.12",
        ("fun", "in_avals", "auto_dce"),  # where it has none, it returns something else, too
        "traces a bwd to a jaxpr",
        optional=True,
    ),
    Symbol(
        "constants_as_inputs",
        "jax._src.interpreters.partial_eval:convert_constvars_jaxpr",
        "0.7.2-0.12",
        ("jaxpr",),
        "lets a bwd close over values of the jaxpr that it is put into",
        optional=True,
    ),
    Symbol(
        "transpose_cast",
        "jax._src.interpreters.ad:_pvary_transpose_rule",
        "0.6.0",
        ("cts", "axes"),
        "a cast's transpose, which sums what is known to be zero, too",
        optional=True,
    ),
    Symbol(
        "JaxprTrace",
        "jax._src.interpreters.partial_eval:DynamicJaxprTrace",
        "0.7.2-0.12",
        (),
        "tells whether a jaxpr is being traced here",
        optional=True,
    ),
    Symbol("trace_here", "jax._src.core:trace_ctx", "0.7.2-0.12", (), "the same", optional=True),
    Symbol(
        "debug_info",
        "jax._src.api_util:debug_info",
        "0.7.2-0.12",
        ("traced_for", "fun", "args", "kwargs"),
        "names a function that is traced, for JAX's messages",
        optional=True,
    ),
)
