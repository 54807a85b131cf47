"""What is particular to Pallas: the audit of a kernel's own jaxpr."""

from shardrules.pallas.audit import Audit, audit_call, prove
from shardrules.pallas.walk import Blocker

__all__ = ["Audit", "Blocker", "audit_call", "prove"]
