"""Replication rules for opaque kernels in shard_map, and a verifier of what they compile to.

Importing this package changes nothing in JAX and does not import it: every public name is
loaded on first use (PEP 562), so the verifier also runs where no JAX is installed.
"""

from __future__ import annotations

import importlib as _importlib

from shardrules.registry import binding as _binding

# The version is written here and nowhere else; setup.cfg reads it from this file.
__version__ = "0.1.0.dev0"

_RULES = (
    "all_gather",
    "all_gather_invariant",
    "all_reduce",
    "all_to_all",
    "linear",
    "no_communication",
    "outputs",
    "per_device",
    "permute",
    "reduce_scatter",
    "unreduced",
)
_HOME = {
    **dict.fromkeys(_RULES, "registry.builtin"),
    "AxisType": "registry.axistypes",
    "Effect": "registry.axistypes",
    "RuleContext": "registry.axistypes",
    "Rule": "registry.rule",
    "Registration": "registry.table",
    "Registry": "registry.table",
    "register": "registry.table",
    "rules": "registry.table",
    "install": "hooks",
    "already_summed": "hooks.autodiff.casts",
    "explain": "hooks.explain.explain",
    "scan_calls": "hooks.explain.explain",
    "vary": "hooks.autodiff.casts",
    "ShardrulesError": "errors",
}
_MODULES = (
    "aot",
    "checks",
    "costs",
    "errors",
    "hlo",
    "hooks",
    "pallas",
    "registry",
    "report",
    "testing",
)

__all__ = [*_HOME, "__version__"]


def __getattr__(name: str):
    if name in _HOME:
        value = getattr(_importlib.import_module(f"{__name__}.{_HOME[name]}"), name)
        globals()[name] = value
        return value
    if name in _MODULES:
        return _importlib.import_module(f"{__name__}.{name}")
    raise AttributeError(
        f"module {__name__!r} has no attribute {name!r}; "
        f"its public names are {', '.join(sorted(_HOME))}"
    )


def _call_declared(declared, *args, **kwargs):
    from shardrules.hooks import handles  # when an op is called: by then there is a JAX

    return handles.call_declared(declared, *args, **kwargs)


_binding.Declared.caller = staticmethod(_call_declared)


def __dir__():
    return sorted({*globals(), *_HOME, *_MODULES})
