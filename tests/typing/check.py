"""``python tests/typing/check.py``: what mypy --strict and pyright say about ``uses.py``.

Exit 0 if each line that ends in ``# wrong`` is an error for both, and no other line is.
"""

import json
import os
import pathlib
import re
import subprocess
import sys

USES = pathlib.Path(__file__).with_name("uses.py")
ROOT = pathlib.Path(__file__).parents[2]


def planted(source):
    """The numbers of the lines that must be errors."""
    return {n for n, line in enumerate(source.splitlines(), 1) if line.endswith("  # wrong")}


def of_mypy(path):
    """From each line that mypy --strict refuses to its message."""
    command = [sys.executable, "-m", "mypy", "--strict", "--no-error-summary", "--no-pretty"]
    done = subprocess.run(
        [*command, "--hide-error-context", str(path)],
        capture_output=True,
        text=True,
        env={**os.environ, "MYPYPATH": str(ROOT)},
        cwd=path.parent,
    )
    if done.returncode not in (0, 1):
        sys.exit(f"mypy failed:\n{done.stdout}{done.stderr}")
    lines = re.findall(rf"^{re.escape(path.name)}:(\d+): error: (.*)$", done.stdout, re.MULTILINE)
    return {int(number): message for number, message in lines}


def of_pyright(path):
    """From each line that pyright refuses to its message."""
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "pyright",
            "--outputjson",
            "--pythonpath",
            sys.executable,
            str(path),
        ],
        capture_output=True,
        text=True,
        cwd=ROOT,
    )
    try:
        found = json.loads(done.stdout)["generalDiagnostics"]
    except (ValueError, KeyError):
        sys.exit(f"pyright failed:\n{done.stdout}{done.stderr}")
    return {
        one["range"]["start"]["line"] + 1: one["message"]
        for one in found
        if one["severity"] == "error" or one.get("rule") == "reportAttributeAccessIssue"
    }


def differences(wanted, found, who):
    """What a checker missed, and what it refuses and should not."""
    missed = [f"{who} misses the error in line {n}" for n in sorted(wanted - set(found))]
    return missed + [f"{who}, line {n}: {found[n]}" for n in sorted(set(found) - wanted)]


def main():
    """Run both on ``uses.py``."""
    wanted = planted(USES.read_text())
    wrong = []
    for who, run in (("mypy --strict", of_mypy), ("pyright", of_pyright)):
        found = run(USES)
        wrong += differences(wanted, found, who)
        print(f"{who}: {len(wanted & set(found))} of {len(wanted)} planted errors found, ", end="")
        print(f"{len(set(found) - wanted)} other errors")
    print(*wrong, sep="\n", end="\n" if wrong else "")
    return 1 if wrong or not wanted else 0


if __name__ == "__main__":
    sys.exit(main())
