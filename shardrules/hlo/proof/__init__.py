"""The proof: what each instruction does to that, and the verdict on each collective."""
