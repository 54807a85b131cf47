"""Handle opaque calls: find the rule of each, type it, and tag the lowered call."""
