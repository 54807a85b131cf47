"""Write the same report as verify, and exit 0 whatever it finds.

FILE is compiled HLO text (what compiled.as_text() returns, or a file of --xla_dump_to, which gzip
may have compressed), a folder of --xla_dump_to, or a pattern of files; - is stdin. Exit 2 if one of
them can't be judged.
"""

from __future__ import annotations

import argparse

from shardrules.commands import flags, verify

# This is a command rather than a flag ``verify --exit-zero``: users who want a page look for a
# command of this name, and a flag would need as many lines.
ARGUMENTS = verify.ARGUMENTS


def run(arguments: argparse.Namespace) -> int:
    code = verify.run(arguments)
    return flags.UNUSABLE if code == flags.UNUSABLE else flags.CLEAN
