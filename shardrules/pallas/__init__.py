"""What is particular to Pallas: the audit of a kernel's own jaxpr."""

from shardrules.pallas.audit import Audit, prove
from shardrules.pallas.walk import Blocker

__all__ = ["Audit", "Blocker", "prove"]
