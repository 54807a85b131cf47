"""What the hooks did with a program: ``explain`` and ``scan_calls``."""
