"""What a compiled program costs: accounts of its collectives, and findings. Imports no JAX."""
