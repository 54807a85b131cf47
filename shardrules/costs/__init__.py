"""Compute the costs of a compiled program: accounts of its collectives, and findings. No JAX."""
