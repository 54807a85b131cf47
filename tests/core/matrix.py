"""The JAX versions that are tested, and whether each that was asked for was exercised.

python tests/core/matrix.py record FOLDER VERSION REPORT.xml [ONLY]   in VERSION's environment
python tests/core/matrix.py check FOLDER VERSION...
python tests/core/matrix.py ran REPORT.xml...    whether each test ran in one of these
python tests/core/matrix.py lanes    the Python of each of .ci/run's lanes: oldest PATH, newest PATH
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
import pathlib
import re
import shutil
import subprocess
import sys
import xml.etree.ElementTree as tree

ROOT = pathlib.Path(__file__).parents[2]

CORE = "the core suite on CPU"
ALL = "all: executed on CPU, compiled for TPU (v5e, v5p) and GPU (H100, B200)"

# From each JAX to its Python, what else pip must be told, and what is tested there.
VERSIONS = {
    "0.4.28": (
        "3.11",
        ("numpy<2", "scipy<1.14"),
        f"{CORE}; not there: `ffi_call` (JAX has none) and proofs by a kernel's own jaxpr "
        "(each kernel needs its rule)",
    ),
    "0.4.35": ("3.11", (), CORE),
    "0.5.3": ("3.11", (), CORE),
    "0.6.0": ("3.11", (), CORE),
    "0.6.2": ("3.11", (), CORE),
    "0.7.2": ("3.11", (), CORE),
    "0.8.3": ("3.11", (), CORE),
    "0.9.2": ("3.11", (), CORE),
    "0.10.2": ("3.11", (), ALL),
    "0.11.2": ("3.12", (), CORE),
    "0.12.0.1": ("3.13", (), ALL),
}

# What pip brings on the oldest and on the newest Python: all tests run there, in a lane of .ci/run.
LANES = ("0.10.2", "0.12.0.1")

# Those that run before each landing; .ci/run --full runs all.
LANDING = ("0.4.28", "0.5.3", "0.7.2", "0.10.2", "0.12.0.1")


def table():
    """Return the table in docs/versions.md."""
    rows = [("JAX", "Python", "tested"), ("---",) * 3]
    rows += [(jax, python, tested) for jax, (python, _, tested) in VERSIONS.items()]
    return "".join(f"| {' | '.join(row)} |\n" for row in rows).replace(
        "| --- | --- | --- |", "|---|---|---|"
    )


@functools.cache
def interpreter(version):
    """Return the path of a Python; pyenv has shims on PATH also for those that are not active."""
    names = [shutil.which(f"python{version}")]
    names += sorted(
        map(
            str,
            pathlib.Path(os.environ.get("PYENV_ROOT", "~/.pyenv"))
            .expanduser()
            .glob(f"versions/{version}.*/bin/python{version}"),
        ),
        reverse=True,
    )
    for name in filter(None, names):
        if subprocess.run([name, "-c", ""], capture_output=True).returncode == 0:
            return name
    return version  # noxfile.py's session interpreters says that it is missing


def lanes():
    """Return (lane, path of its Python), of the oldest and of the newest Python of the table."""
    numbers = {tuple(map(int, python.split("."))) for python, *_ in VERSIONS.values()}
    oldest, newest = (".".join(map(str, one(numbers))) for one in (min, max))
    return [("oldest", interpreter(oldest)), ("newest", interpreter(newest))]


def fingerprint():
    """Return a digest of the package and of these tests: a result of other files doesn't count."""
    digest = hashlib.sha256()
    for folder in ("shardrules", "tests/core", "tests/sweeps"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            digest.update(str(path.relative_to(ROOT)).encode())
            digest.update(path.read_bytes())
    return digest.hexdigest()


def read_report(path, only=""):
    """Return (tests that ran and passed, what keeps the run from counting).

    Args:
      path: pytest's --junitxml.
      only: how the class names of the tests that count begin.
    """
    cases = [c for c in tree.parse(path).iter("testcase") if c.get("classname").startswith(only)]
    bad = [
        f"{case.get('classname')}::{case.get('name')}: {child.tag}"
        for case in cases
        for child in case
        if child.tag in ("skipped", "failure", "error")
    ]
    return len(cases) - len(bad), bad


def never_ran(reports):
    """Return a line for each test that every report that names it calls skipped or leaves out."""
    skipped, executed = set(), set()
    for report in reports:
        left_out = pathlib.Path(report).with_suffix(".left_out.json")
        if left_out.exists():
            for nodeid in json.loads(left_out.read_text()):
                # The core suite runs on other versions: ``check`` looks at what it leaves out.
                if not nodeid.startswith("tests/core/"):
                    skipped.add(_as_reported(nodeid))
        for case in tree.parse(report).iter("testcase"):
            name = f"{case.get('classname')}::{case.get('name')}"
            (skipped if case.find("skipped") is not None else executed).add(name)
    if not executed:
        return ["no test ran"]
    return [f"{name} was skipped each time" for name in sorted(skipped - executed)]


def _as_reported(nodeid):
    """Return a test's class name and name, as --junitxml has them."""
    path, _, name = nodeid.partition("::")
    *classes, name = re.split(r"::(?![^[]*\])", name)
    return ".".join([path.removesuffix(".py").replace("/", "."), *classes]) + f"::{name}"


def record(folder, version, report, only=""):
    """Write down that a version's suite ran here; return what is wrong, empty if nothing is.

    Args:
      folder: where the result goes.
      version: the JAX that was asked for.
      report: pytest's --junitxml.
      only: how the class names of the tests that count begin.
    """
    import jax

    if jax.__version__ != version:
        return f"JAX {version} was asked for, but this environment has {jax.__version__}"
    passed, bad = read_report(report, only)
    if bad or not passed:
        return f"JAX {version}: {passed} tests passed; {'; '.join(bad) or 'none ran'}"
    result = {"jax": jax.__version__, "passed": passed, "files": fingerprint()}
    left_out = pathlib.Path(report).with_suffix(".left_out.json")
    names = json.loads(left_out.read_text()) if left_out.exists() else []
    if only:
        result["left_out"] = [name for name in names if name.startswith(only.replace(".", "/"))]
    (pathlib.Path(folder) / f"{version}.json").write_text(json.dumps(result))
    return ""


def check(folder, versions):
    """Return a line for each version that was not exercised, or not by as many tests as others.

    Args:
      folder: where ``record`` wrote.
      versions: what was asked for.
    """
    results, wrong = {}, []
    for version in versions:
        path = pathlib.Path(folder) / f"{version}.json"
        if not path.exists():
            wrong.append(f"JAX {version} was asked for and not exercised")
            continue
        results[version] = json.loads(path.read_text())
        if results[version]["jax"] != version:
            wrong.append(f"JAX {version}: the result is of JAX {results[version]['jax']}")
        if results[version]["files"] != fingerprint():
            wrong.append(f"JAX {version}: the result is of other files than these; run it again")
    # What is left to other versions counts: it is checked below to run on one of them. Of tests
    # that compilers add, which the lanes share, nobody knows how many are another's.
    shared = {v: r for v, r in results.items() if "left_out" in r}
    counts = {v: r["passed"] + len(r["left_out"]) for v, r in shared.items()}
    most = max(counts.values(), default=0)
    for version, count in counts.items():
        # A version may lack a feature (0.4.28 has no ffi_call), but not a fifth of the suite.
        if count < 0.8 * most:
            wrong.append(f"JAX {version}: only {count} of {most} tests passed there")
    nowhere = [set(result["left_out"]) for result in shared.values()]
    wrong += [
        f"{name} runs on none of these JAX versions"
        for name in sorted(set.intersection(*nowhere) if len(nowhere) > 1 else ())
    ]
    return wrong


def main(arguments):
    if arguments == ["lanes"]:
        for lane in lanes():
            print(*lane)
        return
    if len(arguments) in (4, 5) and arguments[0] == "record":
        wrong = list(filter(None, [record(*arguments[1:])]))
    elif len(arguments) > 1 and arguments[0] == "ran":
        wrong = never_ran(arguments[1:])
    elif len(arguments) > 2 and arguments[0] == "check":
        wrong = check(arguments[1], arguments[2:])
    else:
        wrong = [__doc__]
    if wrong:
        sys.exit("\n".join(wrong))
    done = {"record": "exercised JAX", "check": "each was exercised:", "ran": "every test ran"}
    said = {"record": arguments[2:3], "check": arguments[2:], "ran": ()}[arguments[0]]
    print(done[arguments[0]], *said)


if __name__ == "__main__":
    main(sys.argv[1:])
