"""From HLO text to a module: instructions, attributes, shardings, device groups."""
