"""Judge each collective of a profile, and measure the time that it took."""
