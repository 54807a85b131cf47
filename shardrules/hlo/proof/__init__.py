"""The proof: how each instruction changes the facts about values, and each collective's verdict."""
