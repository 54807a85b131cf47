"""Hold declarations: axis types, rules, their bindings to functions, the table of names."""

from shardrules.registry.axistypes import AxisType, Effect, RuleContext
from shardrules.registry.rule import Rule
from shardrules.registry.table import (
    Overlay,
    Registration,
    Registry,
    default,
    normalise,
    register,
    rules,
)

__all__ = [
    "AxisType",
    "Effect",
    "Overlay",
    "Registration",
    "Registry",
    "Rule",
    "RuleContext",
    "default",
    "normalise",
    "register",
    "rules",
]
