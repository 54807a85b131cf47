"""What a process does: compiled programs, unchecked shard_maps, and what retracing them shows."""
