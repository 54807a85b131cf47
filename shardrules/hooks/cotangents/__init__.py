"""Derivatives: the types of cotangents, and the casts that users place."""
