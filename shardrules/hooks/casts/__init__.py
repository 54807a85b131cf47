"""Placement of casts: the linear program, its cheapest cut, and the writer of the new jaxpr."""
