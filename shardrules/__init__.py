"""Replication rules for opaque kernels in shard_map, and a verifier of what they compile to.

Importing this package changes nothing in JAX and does not import it: every public name is
loaded on first use (PEP 562), so the verifier also runs where no JAX is installed.
"""

from __future__ import annotations

import importlib as _importlib
from typing import TYPE_CHECKING
from typing import Any as _Any

from shardrules.registry import binding as _binding

if TYPE_CHECKING:  # the names of _HOME and _MODULES, for checkers and editors
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
    from shardrules.errors import ShardrulesError
    from shardrules.hooks.explain.explain import explain, scan_calls
    from shardrules.hooks.install import install
    from shardrules.hooks.processes import assert_same_rules
    from shardrules.hooks.user_casts import already_summed, place_casts, vary
    from shardrules.registry.axistypes import AxisType, Effect, RuleContext
    from shardrules.registry.builtin import (
        all_gather,
        all_gather_invariant,
        all_reduce,
        all_to_all,
        linear,
        no_communication,
        outputs,
        per_device,
        permute,
        reduce_scatter,
        unreduced,
    )
    from shardrules.registry.rule import Rule
    from shardrules.registry.table import Registration, Registry, register, rules
    from shardrules.watching.profiles.profile import profile
    from shardrules.watching.programs import watch

# The version is written here and nowhere else; setup.cfg reads it from this file.
__version__ = "0.1.0"

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
    "assert_same_rules": "hooks.processes",
    "already_summed": "hooks.user_casts",
    "explain": "hooks.explain.explain",
    "place_casts": "hooks.user_casts",
    "scan_calls": "hooks.explain.explain",
    "vary": "hooks.user_casts",
    "profile": "watching.profiles.profile",
    "watch": "watching.programs",
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

__all__ = [
    "__version__",
    "AxisType",
    "Effect",
    "Registration",
    "Registry",
    "Rule",
    "RuleContext",
    "ShardrulesError",
    "all_gather",
    "all_gather_invariant",
    "all_reduce",
    "all_to_all",
    "already_summed",
    "assert_same_rules",
    "explain",
    "install",
    "linear",
    "no_communication",
    "outputs",
    "per_device",
    "permute",
    "place_casts",
    "profile",
    "reduce_scatter",
    "register",
    "rules",
    "scan_calls",
    "unreduced",
    "vary",
    "watch",
]


if not TYPE_CHECKING:  # with it, checkers would take any name for one of the package

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
    from shardrules.hooks.install import (
        call_declared,  # when an op is called: by then there is a JAX
    )

    return call_declared(declared, *args, **kwargs)


_binding.Declared.caller = staticmethod(_call_declared)


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOME, *_MODULES})
