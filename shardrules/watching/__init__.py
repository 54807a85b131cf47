"""Observe a process: the programs that it compiles, what it reads, its profile."""
