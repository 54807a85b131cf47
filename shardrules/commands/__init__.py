"""Define the command line's commands, one module each.

A command is a module with a docstring (its help; the list of commands shows the first line),
ARGUMENTS, and a function ``run(arguments)`` that returns the exit code; ``__main__`` lists them.
"""
