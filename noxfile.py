"""The core suite on every JAX that is supported, each in an environment of its own.

    nox                          all versions, then whether each was exercised
    nox -s "core(0.4.28)"        one of them
    nox -s interpreters          whether there is a Python for each
    nox -R                       again, in the environments as they are

``MATRIX_WHEEL`` is the package as a wheel, for sessions that run side by side.
"""

import os
import pathlib
import shutil
import sys

import nox

ROOT = pathlib.Path(__file__).parent
sys.path.insert(0, str(ROOT / "tests"))
from core import matrix  # noqa: E402

nox.options.default_venv_backend = "venv"
nox.options.error_on_missing_interpreters = True
nox.options.sessions = ["core", "exercised"]

OUT = ROOT / "build" / "matrix"


def wheel(session):
    """Return the package as pip installs it, built once for all sessions of a run."""
    given = os.environ.get("MATRIX_WHEEL")
    if given:
        return given
    if not _built:
        folder = OUT / "wheel"
        shutil.rmtree(folder, ignore_errors=True)
        session.run("pip", "wheel", "-q", "--no-deps", "-w", str(folder), str(ROOT))
        _built.append(str(next(folder.glob("*.whl"))))
    return _built[0]


_built = []


def install(session, jax):
    """Install a JAX, what the tests need, and the package."""
    session.install(
        "-q", f"jax=={jax}", f"jaxlib=={jax}", *matrix.VERSIONS[jax][1], "absl-py", "pytest"
    )
    session.install("-q", "--no-deps", "--force-reinstall", wheel(session))


def run_recorded(session, jax, folder, *arguments):
    """Run pytest, and write down that this JAX was exercised."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{jax}.json").unlink(missing_ok=True)
    report = str(folder / f"{jax}.xml")
    session.run("pytest", "-q", f"--junitxml={report}", *arguments)
    session.run("python", "tests/core/matrix.py", "record", str(folder), jax, report, "tests.core.")


@nox.session
@nox.parametrize(
    "python,jax",
    [
        nox.param(matrix.interpreter(python), jax, id=jax)
        for jax, (python, *_) in matrix.VERSIONS.items()
    ],
)
def core(session, jax):
    """Run the core suite with one JAX."""
    install(session, jax)
    run_recorded(session, jax, OUT, "tests/core", *session.posargs)


@nox.session(python=False)
def interpreters(session):
    """Fail if there is no Python for one of the versions, with what to do."""
    for python in dict.fromkeys(python for python, *_ in matrix.VERSIONS.values()):
        if matrix.interpreter(python) == python:
            needed = [jax for jax, row in matrix.VERSIONS.items() if row[0] == python]
            session.error(
                f"JAX {', '.join(needed)} are tested with Python {python}, and no "
                f"python{python} runs here: install it, with pyenv say "
                f"(pyenv install {python}; it is found there without being active)"
            )


@nox.session(python=False)
def exercised(session):
    """Fail if a version (with ``-- landing``, one of those) or ``-- lanes`` was not exercised."""
    versions = matrix.LANDING if "landing" in session.posargs else matrix.VERSIONS
    session.run(sys.executable, "tests/core/matrix.py", "check", str(OUT), *versions)
    if "lanes" in session.posargs:
        compiled = str(OUT / "compile")
        session.run(sys.executable, "tests/core/matrix.py", "check", compiled, *matrix.LANES)
