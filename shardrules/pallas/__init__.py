"""What is particular to Pallas: the audit of a kernel's own jaxpr."""

from __future__ import annotations

from typing import Any

from shardrules.errors import UnsupportedJaxError
from shardrules.pallas.audit import Audit, audit_call
from shardrules.pallas.walk import Blocker
from shardrules.registry.table import default

__all__ = ["Audit", "Blocker", "audit_call"]

_READABLE = ("pallas_call", "mpmd_map", "core_map")


def _prover(primitive: str, params: dict[str, Any], operand_count: int) -> Audit | None:
    if primitive not in _READABLE:
        return None
    # The grid mapping of JAX 0.4.28 doesn't say which operands are inputs.
    if primitive == "pallas_call" and not hasattr(params["grid_mapping"], "num_inputs"):
        return None
    try:
        return audit_call(primitive, params, operand_count)
    except UnsupportedJaxError:  # its kernels are then declared, and never proven
        return None


default.add_prover(_prover)
