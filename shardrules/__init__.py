"""Replication rules for opaque kernels in shard_map, and a verifier of compiled programs.

Importing this package neither imports nor changes JAX. Every public name is loaded on first use
(PEP 562), so the verifier also runs without JAX.
"""

from __future__ import annotations

import importlib as _importlib
from typing import TYPE_CHECKING
from typing import Any as _Any

from shardrules.registry import binding as _binding

if TYPE_CHECKING:  # for checkers and editors, the names in _HOME and _MODULES
    from shardrules import aot as aot
    from shardrules import checks as checks
    from shardrules import costs as costs
    from shardrules import errors as errors
    from shardrules import hlo as hlo
    from shardrules import hooks as hooks
    from shardrules import pallas as pallas
    from shardrules import registry as registry
    from shardrules import report as report
    from shardrules import testing as testing
    from shardrules.errors import ShardrulesError as ShardrulesError
    from shardrules.hooks.explain.explain import explain as explain
    from shardrules.hooks.explain.explain import scan_calls as scan_calls
    from shardrules.hooks.install import install as install
    from shardrules.hooks.processes import assert_same_rules as assert_same_rules
    from shardrules.hooks.user_casts import already_summed as already_summed
    from shardrules.hooks.user_casts import place_casts as place_casts
    from shardrules.hooks.user_casts import vary as vary
    from shardrules.registry.axistypes import AxisType as AxisType
    from shardrules.registry.axistypes import Effect as Effect
    from shardrules.registry.axistypes import RuleContext as RuleContext
    from shardrules.registry.builtin import all_gather as all_gather
    from shardrules.registry.builtin import all_gather_invariant as all_gather_invariant
    from shardrules.registry.builtin import all_reduce as all_reduce
    from shardrules.registry.builtin import all_to_all as all_to_all
    from shardrules.registry.builtin import linear as linear
    from shardrules.registry.builtin import no_communication as no_communication
    from shardrules.registry.builtin import outputs as outputs
    from shardrules.registry.builtin import per_device as per_device
    from shardrules.registry.builtin import permute as permute
    from shardrules.registry.builtin import reduce_scatter as reduce_scatter
    from shardrules.registry.builtin import unreduced as unreduced
    from shardrules.registry.rule import Rule as Rule
    from shardrules.registry.table import Registration as Registration
    from shardrules.registry.table import Registry as Registry
    from shardrules.registry.table import register as register
    from shardrules.registry.table import rules as rules
    from shardrules.watching.profiles.profile import profile as profile
    from shardrules.watching.programs import watch as watch

# The version is written only here; setup.cfg reads it from this file.
__version__ = "0.2.0"

# Maps modules to their public names.
_NAMES = {
    "errors": "ShardrulesError",
    "hooks": "install",
    "hooks.explain.explain": "explain scan_calls",
    "hooks.processes": "assert_same_rules",
    "hooks.user_casts": "already_summed place_casts vary",
    "registry.axistypes": "AxisType Effect RuleContext",
    "registry.builtin": "all_gather all_gather_invariant all_reduce all_to_all linear "
    "no_communication outputs per_device permute reduce_scatter unreduced",
    "registry.rule": "Rule",
    "registry.table": "Registration Registry register rules",
    "watching.profiles.profile": "profile",
    "watching.programs": "watch",
}
_HOME: dict[str, str] = {}
for _module, _names in _NAMES.items():
    _HOME |= dict.fromkeys(_names.split(), _module)
_MODULES = "aot checks costs errors hlo hooks pallas registry report testing".split()
__all__ = ["__version__", *sorted(_HOME)]


if not TYPE_CHECKING:  # if checkers saw this function, they would accept any name

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


def _call_declared(declared: _Any, *args: _Any, **kwargs: _Any) -> _Any:
    # Import this late: calling an op needs JAX, importing the package doesn't.
    from shardrules.hooks.install import call_declared

    return call_declared(declared, *args, **kwargs)


_binding.Declared.caller = staticmethod(_call_declared)


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOME, *_MODULES})
