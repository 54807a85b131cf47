"""What a test asserts; ``shardrules.testing`` gathers it, and the pytest plugin."""
