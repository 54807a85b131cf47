"""The Pallas ops that ship with JAX 0.10.2, each wrapped in `jax.shard_map` as its users do."""
