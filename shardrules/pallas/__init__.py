"""Audit Pallas kernels by their own jaxprs."""

from shardrules.pallas.audit import Audit, prove
from shardrules.pallas.walk import Blocker

__all__ = ["Audit", "Blocker", "prove"]
