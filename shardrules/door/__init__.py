"""Reach JAX's internals: look up and check every private name once; versions; patching."""
