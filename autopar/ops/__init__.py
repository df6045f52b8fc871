"""What every operator is, a row each: the types that it runs with, its work, memory, collectives, and local call."""

from autopar.ops.call import overload, real, run
from autopar.ops.definitions import defining_module
from autopar.ops.lookup import admits, axis_rules, call_key, coverage, has_rules, register_rule, shape_error

__all__ = [
    "admits",
    "axis_rules",
    "call_key",
    "coverage",
    "defining_module",
    "has_rules",
    "overload",
    "real",
    "register_rule",
    "run",
    "shape_error",
]
