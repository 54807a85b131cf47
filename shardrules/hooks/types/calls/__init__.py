"""Opaque calls: which rule each obeys, its types, and the tag on the lowered call."""
