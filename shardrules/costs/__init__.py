"""Compute the costs of a compiled program, without JAX: accounts of its collectives, findings."""
