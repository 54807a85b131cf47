"""Replication rules for opaque kernels in shard_map, and a verifier of what they compile to.

Importing this package changes nothing in JAX and does not import it: every public name is
loaded on first use (PEP 562), so the verifier also runs where no JAX is installed.
"""

from __future__ import annotations

import importlib as _importlib

# The version is written here and nowhere else; setup.cfg reads it from this file.
__version__ = "0.1.0.dev0"

_HOME = {
    "AxisType": "rules",
    "Effect": "rules",
    "Rule": "rules",
    "RuleContext": "rules",
    "no_communication": "rules",
    "Registration": "registry",
    "Registry": "registry",
    "register": "registry",
    "install": "hooks",
    "ShardrulesError": "errors",
}
_MODULES = ("aot", "errors", "hlo", "hooks", "pallas", "registry", "report", "rules", "testing")

__all__ = [*_HOME, "__version__"]


def __getattr__(name: str):
    if name in _HOME:
        value = getattr(_importlib.import_module(f"{__name__}.{_HOME[name]}"), name)
        globals()[name] = value
        return value
    if name in _MODULES:
        return _importlib.import_module(f"{__name__}.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}; "
                         f"its public names are {', '.join(sorted(_HOME))}")


def __dir__():
    return sorted({*globals(), *_HOME, *_MODULES})
