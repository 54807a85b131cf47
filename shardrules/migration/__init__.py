"""Decide which shard_maps can have their check on, write the patch, and measure what it saves."""
