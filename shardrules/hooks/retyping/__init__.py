"""Loops, branches and refs: jaxprs whose inputs vary more than they were traced with."""
