"""Take each symbol of JAX away, and rename each parameter; print what ``install()`` says.

Run by test_door.py in a process of its own, where nothing else has hooked JAX.
"""

from __future__ import annotations

import importlib
import inspect
import json
import sys
from unittest import mock

import jax

import shardrules
from shardrules import errors, hooks
from shardrules.door import internals
from shardrules.door.symbols import SYMBOLS


def values(touched):
    """What stands now where ``install()`` would put its own."""
    found = [
        (owner if isinstance(owner, dict) else vars(owner)).get(name) for owner, name in touched
    ]
    return [*map(id, found)]


def refusal(touched):
    """Install; return what the error says."""
    internals.load.cache_clear()
    before = values(touched)
    try:
        shardrules.install().uninstall()
    except errors.UnsupportedJaxError as error:
        assert error.version == jax.__version__ and error.symbol in str(error)
        assert not hooks.touched() and not hooks.installed() and values(touched) == before
        return str(error)
    return "was not refused"


def other(parameters, renamed):
    """A function that takes the parameters, one of them under another name."""
    names = ["new_name", *(p for p in parameters if p != renamed)]

    def function(*args, **kwargs):
        raise AssertionError("was called")

    kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
    function.__signature__ = inspect.Signature([inspect.Parameter(n, kind) for n in names])
    return function


def main():
    with shardrules.install():
        touched = hooks.touched()
    assert len(touched) >= 8
    found = {}
    for symbol in SYMBOLS:
        if not symbol.exists_in(jax.__version__):
            continue
        module, _, name = symbol.path.partition(":")
        said = found[symbol.key] = {"renamed": {}}
        if not name:
            with mock.patch.dict(sys.modules, {module: None}):
                said["gone"] = refusal(touched)
            continue
        owner = importlib.import_module(module)
        value = getattr(owner, name)
        with mock.patch.object(owner, name):
            delattr(owner, name)
            said["gone"] = refusal(touched)
        for parameter in symbol.parameters:
            with mock.patch.object(owner, name, other(symbol.parameters, parameter)):
                said["renamed"][parameter] = refusal(touched)
        assert getattr(owner, name) is value
    internals.load.cache_clear()
    shardrules.install().uninstall()
    print(json.dumps(found))


main()
