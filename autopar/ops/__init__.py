"""What every operator is: which types it may run with locally, and how it runs on local tensors."""

from autopar.ops.lookup import admits, axis_rules, coverage, register_rule, shape_error
from autopar.ops.call import overload

__all__ = ["admits", "axis_rules", "coverage", "overload", "register_rule", "shape_error"]
