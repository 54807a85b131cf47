"""What a test asserts of costs that JAX is silent about."""
