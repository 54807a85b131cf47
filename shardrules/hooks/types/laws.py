"""List in a table which law types each primitive's results.

JAX (0.6 to 0.12) has primitives whose abstract evals lose mesh axes: ``jnp.argsort`` types its
indices as invariant, and the gradient of the values they pick is silently wrong. No list of such
primitives would be complete. So the default law is: *results vary at least over the join of the
operands*. It may type an unknown primitive's results as too varying, but never as too invariant.
Effects are left to JAX.
"""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class Row:
    # The law that types the primitive: ``join`` (above), ``called`` (types from the jaxprs that it
    # calls), ``ref``, ``pallas_call``, ``mesh_kernel``, ``opaque`` (a rule or a proof), ``hijax``.
    law: str = "join"
    # The result may drop the axes that the primitive names: it is equal along them, or it is typed
    # reduced or unreduced. Neither is true within groups (``axis_index_groups``).
    drops: bool = False
    adds: bool = False  # the result gains the named axes: each device decides what it gets
    draws: bool = False  # each device draws its own values: the result varies over all mesh axes
    each: bool = False  # each result depends only on the operand at its position
    last: bool = False  # the result is the last operand; the others only order execution
    keeps: bool = False  # operands are not cast: refs, or operands of jaxprs with fixed types


DEFAULT = Row()
USERS = Row("opaque")  # a primitive that is not JAX's own
HIJAX = Row("hijax")  # a hijax primitive with a class of its own (JAX 0.8 to 0.11)


def _rows(names: str, row: Row) -> dict[str, Row]:
    return dict.fromkeys(names.split(), row)


# JAX's own primitives, by name.
ROWS: dict[str, Row] = {
    # Collectives that drop axes.
    **_rows(
        "psum_invariant_start pmax pmin all_gather_invariant all_gather_reduced "
        "all_gather_reduced_start vary_unreduced_cast vary_unreduced_cast_p",
        Row(drops=True),
    ),
    **_rows("psum psum_invariant", Row(drops=True, each=True)),
    "ragged_all_to_all": Row(adds=True),
    **_rows("rng_uniform infeed", Row(draws=True)),
    **_rows("optimization_barrier device_put", Row(each=True)),
    "tie": Row(last=True),
    "custom_linear_solve": Row(keeps=True),
    # This package's identities type their results themselves.
    **_rows("already_summed unchecked_shard_map place_casts", Row("called")),
    # Primitives that call jaxprs with their operands; each result has the type of the jaxpr's
    # output. (eval_jaxpr is JAX 0.12's closed_call, to which a scan's body is lowered. The results
    # of custom_lin are tangents, and have the types of the custom_vjp's outputs.)
    **_rows(
        "jit pjit closed_call core_call eval_jaxpr remat2 checkpoint remat_opt custom_jvp_call "
        "custom_vjp_call custom_vjp_call_jaxpr custom_partitioning custom_dce_call "
        "custom_vmap_call custom_fusion cudnn_fusion linear_call composite compute_on fused_call "
        "program_order xla_metadata_call scan shard_map run_scoped custom_lin "
        "call_hi_primitive_linearized",
        Row("called"),
    ),
    # A write to a ref in a branch or loop varies as the predicate does. A read from a ref varies as
    # the writes to the ref do, and as the read's indices do.
    **_rows("cond while swap addupdate run_state", Row("ref")),
    "get": Row(keeps=True),
    "pallas_call": Row("pallas_call"),
    **_rows("mpmd_map core_map", Row("mesh_kernel")),
    **_rows(
        "ffi_call pure_callback io_callback buffer_callback call_exported tpu_custom_call",
        Row("opaque"),
    ),
    "call_hi_primitive": Row("hijax"),
}
