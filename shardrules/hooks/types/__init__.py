"""Opaque calls: which rule each obeys, how it is typed, and its tag in the lowered program."""
