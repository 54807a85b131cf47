"""Find transfers between a compiled program and the host: callbacks, feeds, sends, copies."""

from __future__ import annotations

import re
from typing import NamedTuple

from shardrules import hlo
from shardrules.costs import walk
from shardrules.hlo.proof import slices

# The targets of JAX's callbacks (jax/_src/callback.py and interpreters/mlir.py, 0.4.28 to 0.12). On
# CPU and GPU, callbacks are custom calls (FFI calls from 0.5 on). A TPU sends and receives instead.
CALLBACK = re.compile(r"xla_(ffi_)?(partitioned_)?python_\w*callback")
_FEEDS = {"infeed": "from host", "outfeed": "to host"}
_SENDS = {"send": "to host", "recv": "from host"}


class Transfer(NamedTuple):
    """One place where data goes to the host or comes from it."""

    # ``callback``, ``infeed``, ``outfeed``, ``send``, ``recv``, ``copy`` or ``host computation``.
    kind: str
    direction: str  # ``to host``, ``from host`` or ``both``
    bytes: int  # in one run, on one device, without tokens
    # The most runs in one execution; None if a loop's trip count isn't known.
    runs: int | None
    loop_depth: int  # the number of while loops around it
    name: str  # the instruction's name
    target: str  # the target of a callback
    source: str  # its source line, or JAX's name for it

    @property
    def what(self) -> str:
        ways = {"to host": " to the host", "from host": " from the host"}
        return self.kind + ways.get(self.direction, "")


def read(module: hlo.Module) -> list[Transfer]:
    """Return a program's transfers, the most deeply nested in loops first, then by bytes."""
    # A TPU's callback is listed as its send and its recv. TPU and GPU print a buffer's memory in
    # its layout; CPU has only one memory, so it has no copies.
    transfers = []
    for place in walk.executed(module):
        described = _transfer(module, place)
        if described is not None:
            kind, direction, size, target = described
            name, source = (place.instruction.name, walk.where(module, place))
            run = (place.runs, place.loop_depth)
            transfers.append(Transfer(kind, direction, size, *run, name, target, source))
    # Loops of unknown length come first, since they may be the longest.
    return sorted(
        transfers, key=lambda t: (-t.loop_depth, t.runs is not None, -(t.runs or 1) * t.bytes)
    )


def _transfer(module: hlo.Module, place: walk.Place) -> tuple[str, str, int, str] | None:
    """Return kind, direction, bytes and target of an instruction's transfer, or None."""
    instruction = place.instruction
    opcode = instruction.opcode
    operands = [place.computation.instructions[o].shape for o in instruction.operands]
    if opcode in _FEEDS:
        size = operands[0].bytes if opcode == "outfeed" and operands else instruction.shape.bytes
        return opcode, _FEEDS[opcode], size, ""
    if opcode in _SENDS:
        if instruction.attribute("is_host_transfer") != "true" or slices.rendezvous(instruction):
            return None  # TPU slices reach each other through their hosts
        return opcode, _SENDS[opcode], instruction.shape.leaves()[0].bytes, ""
    if opcode.startswith("custom-call") and not opcode.endswith("-done"):
        target = walk.target(instruction)
        if CALLBACK.fullmatch(target):
            size = sum(s.bytes for s in operands) + instruction.shape.bytes
            return "callback", "both", size, target
    if opcode in walk.CALLS:  # jax.experimental.compute_on
        thread = (instruction.attribute("async_execution_thread") or "").strip('"')
        hints = instruction.attribute("frontend_attributes") or ""
        if thread == "host" or '_xla_compute_type="host"' in hints:
            # Operands may come later, in a call-update; the called parameters are always there.
            called = (module.computations[name] for name in instruction.calls)
            size = sum(p.shape.bytes for c in called for p in c.parameters)
            return "host computation", "both", size, ""
    if (moved := walk.moved(module, place)) is not None:
        return "copy", "to host" if moved.to_host else "from host", moved.bytes, ""
    return None
