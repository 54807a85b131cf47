"""Print what a bug report needs; exit 1 if the hooks can't be used here.

Versions, a self-test of the hooks, devices, compilers, rules, and the private names of JAX in use.
"""

from __future__ import annotations

import argparse
import collections
import importlib.metadata
import platform
import warnings
from collections.abc import Callable, Iterator

import shardrules
from shardrules import aot, registry
from shardrules.commands import flags, rules
from shardrules.door import internals, places
from shardrules.errors import AotError, RegistrationError, UnsupportedJaxError, first_line
from shardrules.hooks import selftest
from shardrules.hooks.install import install, state

ARGUMENTS = flags.RULES
_OURS = "shardrules' table"  # the beginning of ``where`` for rules that this package ships
_ABSENT: dict[str, tuple[str, Callable[[], object]]] = {  # absent devices to test each compiler
    "tpu": ("v5e:2x4", lambda: aot.tpu("v5e:2x4")),
    "gpu": ("8 h100", lambda: aot.gpu("h100", 8)),
}


def run(arguments: argparse.Namespace) -> int:
    try:
        internals.load()
    except UnsupportedJaxError as error:
        if error.version is None:  # JAX is not installed
            print(error)
            return 1
    except Exception as error:  # importing JAX may raise anything  # noqa: BLE001
        print(f"JAX can't be imported here: {first_line(error)}")
        return 1
    print(", ".join(_versions()))
    rules.register(arguments)
    trouble = _trouble()
    print(f"hooks: {trouble or 'can be used'}")
    print(f"devices: {_devices()}")
    for name in _ABSENT:
        print(f"compiler for {name}: {_compiler(name)}")
    try:
        entries = registry.default.entries()
    except RegistrationError as error:
        trouble = str(error)
        print(f"rules: {error}")
    else:
        others = [entry for entry in entries if not entry.where.startswith(_OURS)]
        ours = _counted(entry.library for entry in entries if entry not in others)
        print(f"rules: {len(others)}, and in {_OURS}: {ours}")
        for entry in others:
            print(f"  {entry.name}: {entry.rule.name}, from {entry.where}")
    print("private names of JAX:")
    for name, path, wrong in internals.names():
        print(f"  {name}: {path} {wrong or 'found'}")
    return 1 if trouble else 0


def _counted(kinds: Iterator[str]) -> str:
    return ", ".join(f"{n} {kind}" for kind, n in sorted(collections.Counter(kinds).items()))


def _versions() -> Iterator[str]:
    yield f"shardrules {shardrules.__version__}"
    for name in ("jax", "jaxlib", "numpy"):
        try:
            yield f"{name} {importlib.metadata.version(name)}"
        except importlib.metadata.PackageNotFoundError:
            yield f"{name} (not installed by a package manager)"
    yield f"Python {platform.python_version()}"
    yield platform.platform()


def _trouble() -> str:
    """Return why the hooks can't be used (empty if they can); print the self-test's result."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the warning about an untested JAX is printed below
        try:
            handle = install()
        except UnsupportedJaxError as error:
            return str(error)
    with handle:
        door = internals.load()
        if door.untested:
            print(f"JAX {door.version} is {door.untested}")
        try:
            door.need_types("the self-test")
        except UnsupportedJaxError as error:
            print(f"self-test: not run; {error}")
            return ""
        different = selftest.differences(state())
        count = sum(1 for _ in selftest.bodies())
        print(f"self-test: {'; '.join(different) or f'{count} programs are as expected'}")
    return "the self-test failed" if different else ""


def _devices() -> str:
    try:
        return _counted(f"{d.platform} ({d.device_kind})" for d in places.devices())
    except Exception as error:  # a backend may raise anything  # noqa: BLE001
        return first_line(error)


def _compiler(name: str) -> str:
    devices, describe = _ABSENT[name]
    try:
        if missing := aot.missing_plugin(name):
            return f"not installed; {missing}"
        describe()
        return f"can be used (tried: {devices})"
    except AotError as error:
        return f"can't be used: {str(error).splitlines()[0]}"
