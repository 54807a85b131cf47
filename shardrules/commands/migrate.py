"""Run a script, and say which of its shard_maps can have their check switched on.

Flags stand before the script; what follows it, or -m MODULE, is its own. Beside each call of a
shard_map whose check is off (check_vma=False, check_rep=False) the same call and its derivative are
traced with the check on, under the rules that are there. The table goes to stderr, or to a file.

Exit code: the script's own where it is not 0; else 1 if something stands in the way anywhere, 0 if
all can be switched, or none is off.
"""

from __future__ import annotations

import argparse
import contextlib
import pathlib
import sys
from collections.abc import Iterator

from shardrules import registry
from shardrules.commands import flags, rules, script

__all__ = ["add_arguments", "run"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of ``migrate``."""
    rules.add_arguments(parser)
    parser.add_argument(
        "--diff",
        action=flags.Once,
        metavar="FILE",
        help="write a patch there (patch -p1 < FILE) that switches on what can be; - is stdout",
    )
    parser.add_argument(
        "--output",
        action=flags.Once,
        metavar="FILE",
        help="write the table there instead of to stderr; - is stdout",
    )
    script.add_arguments(parser)


def run(arguments: argparse.Namespace) -> int:
    """Run the script, write the table, and return the exit code."""
    # Nothing here may import jax or numpy: the script sets what they read from its environment.
    from shardrules.watching import check_off

    target = script.find(arguments)
    for file in (arguments.diff, arguments.output):
        if file not in (None, "-"):
            pathlib.Path(file).open("a").close()  # said now if it can't be written
    rules.check(arguments)
    calls: list[check_off.Call] = []
    given: dict[str, list[registry.Registration]] = {}

    @contextlib.contextmanager
    def watched() -> Iterator[None]:
        stop = check_off.start(calls.append, lambda: given.update(rules.register(arguments)))
        try:
            yield
        finally:
            stop()

    def report() -> int:
        from shardrules import migration

        found = migration.rows(calls)
        text = migration.written(found)
        declared = {place for call in calls for place in call.declared}
        used = [flag for flag, some in given.items() if declared & {one.where for one in some}]
        missing = list(dict.fromkeys(one.kernel for call in calls for one in call.missing))
        for flag, some in given.items():
            if some and flag not in used:
                line = rules.unmatched(flag, some[0].name, missing)
                print(f"shardrules: {line}", file=sys.stderr, flush=True)
        if arguments.diff is not None:
            patch, left = migration.patch(found, target.file, [rules.to_write(f) for f in used])
            _write(arguments.diff, patch)
            if left:
                text += "".join(["\nnot in the patch:\n", *(f"  {line}\n" for line in left)])
        _write(arguments.output, text)
        return 0 if all(row.verdict == migration.SWITCH for row in found) else 1

    code = script.run(target, watched(), report)
    if code == script.INTERRUPTED:
        script.end_by_interrupt()
    return code


def _write(file: str | None, text: str) -> None:
    if file is None or file == "-":
        out = sys.stdout if file == "-" else sys.stderr
        out.write(text)
        out.flush()
    else:
        pathlib.Path(file).write_text(text, encoding="utf-8")
