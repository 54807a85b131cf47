"""The door to JAX: every private name, looked up once and checked; versions; patching."""
