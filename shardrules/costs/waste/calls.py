"""Operands that XLA gathers for calls and FFTs that it can't partition, computed on each device."""

from __future__ import annotations

from shardrules.costs import accounts
from shardrules.costs.waste.program import UNARY, WHOLE, Hint, Kind, Program, Site
from shardrules.hlo.reader.flow import BARRIERS, Node, made_by

# What JAX calls a kernel or a foreign function; XLA's own calls have the names of operations.
_CALLS = frozenset(["ffi_call", "pallas_call", "triton_kernel_call", "tpu_custom_call"])
_MOVES = WHOLE | BARRIERS | {"all-gather-done"}
_COMPLEX = ("FFT", "IFFT")  # of a real one the result has another size than its operand
_KEEPS = BARRIERS | {"copy", "copy-done", "copy-start", "all-gather-done"}


def find(site: Site) -> Hint | None:
    """Find a gather of a batch, the first dimension, whose result one call of a user takes."""
    entry, size = site.entry, site.collective.group_size
    if site.collective.kind != "all-gather" or site.in_shard_map or site.is_unnamed or size < 2:
        return None
    if site.collective.dimension != "0" or not site.whole or site.result is None:
        return None
    uses = site.uses(_KEEPS)
    if len(uses) != 1 or uses[0].user.opcode != "custom-call":
        return None
    call = uses[0].user
    name = site.program.module.metadata(call.instruction).op_name
    if name.rpartition("/")[2] not in _CALLS or "shard_map/" in name:
        return None
    rows = site.result.dimensions[0]
    if any(leaf.dimensions[:1] != (rows,) for leaf in call.shape.leaves()):
        return None  # its results have no such batch
    split = [_gathered(site.program, operand, site) for operand in call.operands]
    for operand, is_split in zip(call.operands, split):
        if not is_split and operand.shape.leaves()[0].dimensions[:1] == (rows,):
            return None  # it may be a batch that was never split, or none
    spec = f"P({site.over})"
    specs = ", ".join(spec if is_split else "P()" for is_split in split)
    outs = ", ".join([spec] * len(call.shape.leaves()))
    outs = f"({outs})" if call.shape.is_tuple else outs
    advice = (
        f"XLA can't partition the call that takes it: each device gathers all {rows} rows and "
        f"computes them, though its own are 1/{size} of them. If no row depends on another, "
        "wrap the call, jax.shard_map(shardrules.no_communication(call), mesh=mesh, "
        f"in_specs=({specs},), out_specs={outs}) after shardrules.install(), or give it a rule "
        f"by jax.custom_partitioning, and {entry.wire_bytes} B become 0 B where its result "
        "stays sharded"
    )
    return site.hint(advice)


def _gathered(program: Program, operand: Node, site: Site) -> bool:
    """Return whether an operand of the call is a batch that is gathered over the same devices."""
    node = made_by(operand, _KEEPS)
    return any(
        other.collective.kind == "all-gather"
        and other.collective.dimension == "0"
        and other.collective.notation == site.collective.notation
        for other in ([] if node.fused else program.parts(node.instruction))
    )


def of_a_transform(site: Site) -> Hint | None:
    """Find a gather for an FFT of which each device reads a slice."""
    entry, size = site.entry, site.collective.group_size
    if site.collective.kind != "all-gather" or site.in_shard_map or site.is_unnamed:
        return None
    uses = site.uses(_MOVES | {"convert"}) if site.whole and size > 1 and entry.axes else []
    if len(uses) != 1 or uses[0].user.opcode != "fft":
        return None
    transform = uses[0].user
    if transform.instruction.attribute("fft_type") not in _COMPLEX:
        return None
    if sum(n % size == 0 for n in transform.shape.dimensions) < 2:
        return None  # no other dimension can be sharded while one is transformed
    readers = site.program.uses(transform, 0, _MOVES | UNARY)
    if not readers or any(r.user.opcode != "dynamic-slice" for r in readers):
        return None
    part = transform.shape.bytes // size  # complex, where what is gathered may be real
    sent = 2 * accounts.wire_bytes("all-to-all", part, size)
    if sent >= entry.wire_bytes:
        return None
    advice = (
        "XLA does not partition this FFT: each device computes all of it, and keeps 1/"
        f"{size}. Transform one dimension at a time while another one is sharded: of a matrix, "
        "jax.shard_map(lambda x: jnp.fft.fft(x, axis=1), mesh=mesh, in_specs=P(axes), "
        f"out_specs=P(axes)) with {site.over} for axes, jax.lax.with_sharding_constraint to "
        "P(None, axes), and there the same along axis 0; a device then sends at most "
        f"{sent} B, there and back, instead of {entry.wire_bytes} B (equal up to rounding)"
    )
    return site.hint(
        advice,
        bytes_after=site.in_all(2 * part),
        trips_after=site.in_all(2),
        sent_after=site.in_all(sent),
    )


ROWS = {
    "called whole": Kind(
        find,
        looks_like=(
            "an all-gather, of the first dimension, for an `ffi_call`, a Pallas kernel or a "
            "Triton kernel, which XLA can't partition: each device computes all of it"
        ),
        in_shard_map="does not occur: in a shard_map a call takes a device's own rows",
        under_jit=(
            "wrap the call in a shard_map, or give it a rule by jax.custom_partitioning, if no "
            "row depends on another"
        ),
    ),
    "transformed whole": Kind(
        of_a_transform,
        looks_like=(
            "an all-gather for an FFT that XLA does not partition: each device computes all of it, "
            "and keeps a part"
        ),
        in_shard_map="does not occur: an FFT there is of a device's own part",
        under_jit=(
            "a shard_map around the FFT of each dimension, over another one, and an all-to-all "
            "between"
        ),
    ),
}
