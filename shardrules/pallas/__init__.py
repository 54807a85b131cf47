"""What is particular to Pallas: the audit of a kernel's own jaxpr."""

from __future__ import annotations

from shardrules.pallas.audit import Audit, audit, audit_call, prove
from shardrules.pallas.events import Blocker

__all__ = ["Audit", "Blocker", "audit", "audit_call", "prove"]
