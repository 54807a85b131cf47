"""Retype loops, branches and refs: jaxprs whose inputs vary more than when they were traced."""
