"""Write the lines after ``run``'s report: why the exit code, and which processes weren't watched.

Like ``flags``, this module imports neither jax nor NumPy.
"""

from __future__ import annotations

import os
import sys
import types
from collections.abc import Collection
from typing import TYPE_CHECKING

from shardrules.commands import flags
from shardrules.commands.script import Ended, Script

if TYPE_CHECKING:
    from shardrules.report.several import Several

_PROCESSES = (
    "of multiprocessing, and this report lacks the programs that such a process compiles; to "
    "see them, write `with shardrules.watch() as seen:` in the function that the process runs, "
    "and print(seen) at its end"
)


def exit_code(results: Several) -> int:
    if results.findings or results.unused:
        return flags.FOUND
    return flags.CLEAN if results.clean else flags.UNUSABLE


def counted(results: Several) -> str:
    """Summarize a report in a few words: ``2 findings``."""
    from shardrules.units import counted

    parts = [
        counted(results.findings, "finding") if results.findings else "",
        f"{counted(len(results.unused), 'allowance')} without a finding" if results.unused else "",
        f"{counted(len(results.failures), 'program')} not judged" if results.failures else "",
        f"interrupted, {results.missing} not judged" if results.missing else "",
    ]
    return ", ".join(filter(None, parts)) or results.first


def last_line(ended: Ended, code: int, said: str) -> str:
    """Say whether the exit code is the script's own or the report's; empty if both are 0.

    Args:
      ended: how the script ended.
      code: the report's exit code.
      said: the report's summary.
    """
    if ended.how:
        own = "" if ended.code is None else f"exit code {ended.code} is the script's own: "
        return f"{own}{ended.how}; the report on what it compiled before: {said}"
    return (
        f"exit code {code} is the report's ({said}); the script itself ended well" if code else ""
    )


def processes() -> str:
    """Say how to watch the multiprocessing processes that the script made; empty if none."""
    if "multiprocessing" not in sys.modules:
        return ""
    import multiprocessing

    # multiprocessing names a process by its number among this process's children.
    number = multiprocessing.Process().name.rpartition("-")[2].rpartition(":")[2]
    made = int(number) - 1 if number.isdecimal() else 0
    if not made:
        return ""
    return f"the script made {made} {'process' if made == 1 else 'processes'} {_PROCESSES}"


def behind(target: Script, ours: Collection[str], command: str) -> str:
    """Say which of our flags come after a script that doesn't know them; empty if none do."""
    words = [word.partition("=")[0] for word in target.argv[1:]]
    given = [w for w in dict.fromkeys(words) if w.startswith("--") and w in ours]
    known = _strings(target.code) if given else set()
    unknown = [w for w in given if not {w, w[2:], w[2:].replace("-", "_")} & known]
    if not unknown:
        return ""
    script = os.path.basename(target.argv[0])
    if target.spec is not None:
        script = f"-m {target.spec.name.removesuffix('.__main__')}"
    return (
        f"{', '.join(unknown)} behind {script} went to the script; put a flag of shardrules "
        f"before it: shardrules {command} {' '.join(unknown)} ... {script}"
    )


def _strings(code: types.CodeType) -> set[str]:
    """Return the strings and names in a program's code, including its functions."""
    found: set[str] = set(code.co_names)
    for constant in code.co_consts:
        if isinstance(constant, str):
            found |= {constant, *constant.split()}
        elif isinstance(constant, types.CodeType):
            found |= _strings(constant)
        elif isinstance(constant, (tuple, frozenset)):
            found |= {each for each in constant if isinstance(each, str)}
    return found
