"""What every operator is: which types it may run with locally, and how it runs on local tensors."""

from autopar.ops.call import overload, real
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
    "shape_error",
]
