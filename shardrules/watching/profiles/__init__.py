"""From a profile alone: each collective's verdict with the time that it took."""
