"""The silent costs that a report shows beside the collectives, each as a small table."""

from __future__ import annotations

from shardrules import hlo
from shardrules.costs import donation, launches, offloading, placement, transfers, walk
from shardrules.hlo.proof.customcalls import frontend_attributes
from shardrules.report.blocks import Block

__all__ = ["LOOPS", "sections"]

LOOPS = "Loops"

_LARGE_BYTES = 1 << 20  # of a constant that is shown


def sections(module: hlo.Module) -> tuple[Block, ...]:
    """List the sections of a module that hold anything."""
    made = (
        make(module)
        for make in (
            _donation,
            _transfers,
            _offloading,
            _loops,
            _constants,
            _gathered,
            _annotations,
        )
    )
    return tuple(section for section in made if section.rows)


def _donation(module: hlo.Module) -> Block:
    donated = [leaf for leaf in donation.read(module) if leaf.donated]
    reused = [leaf for leaf in donated if leaf.status == "aliased"]
    rows = tuple(
        (leaf.path, leaf.shape, leaf.bytes, leaf.output, leaf.reason)
        for leaf in donated
        if leaf.status != "aliased"
    )
    others = f"; the memory of {len(reused)} more is reused" if reused else ""
    return Block(
        "Donated memory",
        "by the module's alias table; before JAX 0.8 it drops what was donated in vain" + others,
        ("argument", "shape", "bytes", "output", "not reused because"),
        rows,
    )


def _transfers(module: hlo.Module) -> Block:
    rows = tuple((t.what, t.bytes, t.runs, t.loop_depth, t.source) for t in transfers.read(module))
    return Block(
        "Transfers between host and device",
        "bytes are of one run on one device",
        ("transfer", "bytes", "runs", "in loops", "source"),
        rows,
    )


def _offloading(module: hlo.Module) -> Block:
    def moved(accesses: list[offloading.Access]) -> int | None:
        known = [a.runs for a in accesses if a.runs is not None]
        if len(known) < len(accesses):
            return None
        return sum(a.bytes * n for a, n in zip(accesses, known))

    rows = tuple(
        (b.kind, b.shape, b.bytes, moved(b.stores), moved(b.loads), b.stores[0].source)
        if b.stores
        else (b.kind, b.shape, b.bytes, 0, moved(b.loads), b.loads[0].source if b.loads else "")
        for b in offloading.read(module)
    )
    return Block(
        "Host memory",
        "buffers of one device in its host's memory, with the bytes that one execution moves",
        ("buffer", "shape", "bytes", "stored bytes", "loaded bytes", "source"),
        rows,
    )


def _loops(module: hlo.Module) -> Block:
    rows = tuple(
        (
            "  " * loop.depth + loop.source,
            loop.trip_count,
            loop.launches,
            loop.copied_bytes,
            "the host" if loop.host_decides else "",
            loop.unknown,
        )
        for loop in launches.read(module)
    )
    return Block(
        LOOPS,
        "launches (counted for GPUs) and copied bytes are of one trip; ? is not known",
        ("loop", "trips", "launches", "copied bytes", "decides", "trips unknown because"),
        rows,
    )


def _constants(module: hlo.Module) -> Block:
    rows = tuple(
        (c.shape, c.bytes, c.device_count, c.bytes * c.device_count, c.source)
        for c in placement.constants(module, _LARGE_BYTES)
    )
    return Block(
        "Large constants",
        "arrays that the program closes over; each device holds them, pass them as arguments",
        ("shape", "bytes", "devices", "bytes in all", "used at"),
        rows,
    )


def _gathered(module: hlo.Module) -> Block:
    rows = tuple(
        (g.output, g.shape, g.bytes_before, g.bytes_after, g.source)
        for g in placement.gathered(module)
    )
    return Block(
        "Gathered outputs",
        "outputs that were sharded until they were returned; bytes are of one device",
        ("output", "shape", "bytes before", "bytes after", "source"),
        rows,
    )


def _annotations(module: hlo.Module) -> Block:
    rows: dict[tuple[str, ...], None] = {}
    for place in walk.executed(module):
        text = place.instruction.attribute("frontend_attributes")
        if text is None or "shardrules.widened" not in text:
            continue
        tag = frontend_attributes(text)
        for one in tag.get("shardrules.widened", "").split(","):
            output, _, axes = one.partition(":")
            kernel = tag.get("shardrules.kernel", "")
            rows[kernel, output, axes.replace("+", ", "), walk.where(module, place)] = None
    return Block(
        "Annotations less varying than the kernel",
        "the kernel's own jaxpr shows that the output varies over these axes too; plain JAX "
        "believes the annotation and loses the reduction over them, shardrules puts it in",
        ("kernel", "output", "also varies over", "called at"),
        tuple(rows),
    )
