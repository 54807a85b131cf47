"""Arrays that XLA gathers for an FFT: each device computes all of it, and keeps its own part."""

from __future__ import annotations

from shardrules.costs import accounts
from shardrules.costs.waste.program import UNARY, WHOLE, Hint, Kind, Site
from shardrules.hlo.reader.flow import BARRIERS

_MOVES = WHOLE | BARRIERS | {"all-gather-done"}
_COMPLEX = ("FFT", "IFFT")  # of a real one the result has another size than its operand


def find(site: Site) -> Hint | None:
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
    "transformed whole": Kind(
        find,
        looks_like=(
            "an all-gather for an FFT that XLA does not partition: each device computes all of it, "
            "and keeps a part"
        ),
        in_shard_map="does not occur: an FFT there is of a device's own part",
        under_jit=(
            "a shard_map around the FFT of each dimension, over another one, and an all-to-all "
            "between"
        ),
    )
}
