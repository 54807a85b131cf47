"""Which opcodes and attributes that the proof reads random modules hold."""

from __future__ import annotations

import pathlib
import re

from shardrules import hlo
from shardrules.hlo import known, proof
from shardrules.hlo.proof import handlers
from shardrules.hlo.reader import attributes

# Read for what people are told, not for the proof: nothing is proven of any send.
_FOR_PEOPLE = {"metadata", "is_host_transfer"}
# Known by name only, so that text that has them is no error.
_BY_NAME_ONLY = {"operand_layout_constraints", "origin", "original_value", "statistics"}


def read_opcodes() -> set[str]:
    """List the opcodes that the proof knows."""
    return set(handlers.HANDLERS.by_opcode)


def read_attributes() -> set[str]:
    """List the attributes that the proof's source names."""
    found: set[str] = set()
    for package in (known, proof):
        for path in pathlib.Path(package.__file__).parent.glob("*.py"):
            source = re.sub(r'"""[\s\S]*?"""', "", path.read_text())
            for quoted in re.findall(r'"([^"\n]+)"', source):
                found.update(w for w in quoted.split() if w in attributes.KNOWN)
    return found - _FOR_PEOPLE - _BY_NAME_ONLY - {"constrain_layout", "async_execution_thread"}


def generated(texts) -> tuple[set[str], set[str]]:
    """List the opcodes and attributes in some texts."""
    opcodes: set[str] = set()
    keys: set[str] = set()
    for text in texts:
        for computation in hlo.parse(text).computations.values():
            for instruction in computation.instructions:
                opcodes.add(instruction.opcode)
                keys.update(key for key, _, _ in instruction.attributes())
    return opcodes, keys


def missing(texts) -> tuple[list[str], list[str], str]:
    """List what the proof reads and the texts lack, and say how much they have."""
    opcodes, keys = generated(texts)
    all_opcodes, all_keys = read_opcodes(), read_attributes()
    report = (
        f"{len(all_opcodes & opcodes)} of {len(all_opcodes)} opcodes and "
        f"{len(all_keys & keys)} of {len(all_keys)} attributes that the proof reads"
    )
    return sorted(all_opcodes - opcodes), sorted(all_keys - keys), report
