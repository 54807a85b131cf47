"""Show what the hooks do with a program: ``explain`` and ``scan_calls``."""
