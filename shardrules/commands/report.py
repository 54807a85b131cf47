"""Write the same report as ``verify``, and exit 0 whatever it finds.

FILE holds compiled HLO text (``compiled.as_text()``, or a file of ``--xla_dump_to``); - is stdin.
"""

from __future__ import annotations

import argparse

from shardrules.commands import reading, verify

__all__ = ["add_arguments", "run"]

add_arguments = verify.add_arguments


def run(arguments: argparse.Namespace) -> int:
    """Write the report."""
    reading.write(verify.written(verify.content(arguments), arguments), arguments)
    return reading.CLEAN
