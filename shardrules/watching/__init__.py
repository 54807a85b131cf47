"""Observe a process: its compiled programs and its unchecked shard_maps."""
