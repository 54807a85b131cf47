"""Read HLO text into a module: instructions, attributes, shardings, device groups."""
