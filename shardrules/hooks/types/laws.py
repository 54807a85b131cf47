"""The table of laws: what each primitive's results vary over, and who says so.

Every version of JAX (0.6 to 0.12) has primitives whose abstract evals forget mesh axes: the result
has the type of one operand, or none, where it depends on all. The indices of ``jnp.argsort`` are
typed invariant, and the gradient of what they pick is silently wrong; ``ragged_all_to_all`` has
the type of the zeros that it writes into, ``pmax`` within groups that of one group for all. A list
of those that forget is a list of what somebody noticed. So the default row is the law: *results
vary at least as the join of the operands*. It holds for every primitive, also for one of a JAX to
come, unless a row says otherwise; a new one errs to varying. Which other devices a collective reads
is left to JAX.
"""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class Row:
    """A row of the table."""

    # which of the hooks judges the primitive: ``join`` (the law above), ``called`` (the types are
    # those of the jaxprs that it calls), ``ref``, ``pallas_call``, ``mesh_kernel``, ``opaque`` (a
    # rule or a proof), ``hijax``
    law: str = "join"
    # it may drop the axes that it names: what it returns is equal along them, or is typed reduced
    # or unreduced. Within groups (``axis_index_groups``) it is neither.
    drops: bool = False
    adds: bool = False  # it adds the axes that it names: what comes from where is up to each device
    draws: bool = False  # it draws on every device for itself, whatever it takes: all mesh axes
    each: bool = False  # each result comes from the operand at its position alone
    # the result is the last operand; the others are there for the order of things
    last: bool = False
    # its operands are not cast: it calls jaxprs that were traced with them as they are
    keeps: bool = False


DEFAULT = Row()
USERS = Row("opaque")  # a primitive that isn't JAX's own
OURS = Row("called")  # of this package: identities that say their own types
HIJAX = Row("hijax")  # a hijax primitive of the older kind, a class of its own (JAX 0.8 to 0.11)


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
    # They call jaxprs with their operands: result by result, the types come from these.
    # (eval_jaxpr: closed_call of JAX 0.12, which a scan's body is where the scan is lowered.
    # custom_lin: from the outputs of the custom_vjp whose tangents they are.)
    **_rows(
        "jit pjit closed_call core_call eval_jaxpr remat2 checkpoint remat_opt custom_jvp_call "
        "custom_vjp_call custom_vjp_call_jaxpr custom_partitioning custom_dce_call "
        "custom_fusion cudnn_fusion linear_call composite compute_on fused_call program_order "
        "xla_metadata_call scan shard_map run_scoped custom_lin",
        Row("called"),
    ),
    # A branch is taken, or a loop runs on, where a predicate says so: what it writes to a ref
    # varies as the predicate does. What is read from a ref varies as what was written to it.
    **_rows("cond while get swap addupdate run_state", Row("ref")),
    "pallas_call": Row("pallas_call"),
    **_rows("mpmd_map core_map custom_vmap_call", Row("mesh_kernel")),
    **_rows(
        "ffi_call pure_callback io_callback buffer_callback call_exported tpu_custom_call",
        Row("opaque"),
    ),
    **_rows("call_hi_primitive call_hi_primitive_linearized", Row("hijax")),
}
