"""Handle derivatives: the types of cotangents, custom_vjp, batching, forward mode."""
