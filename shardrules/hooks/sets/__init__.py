"""Handle the check of JAX 0.4.28 to 0.5.3, which keeps replication sets beside the values."""
