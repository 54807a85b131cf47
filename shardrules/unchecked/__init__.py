"""shard_maps whose check is off: what each would be with it on, and how to switch it on."""
