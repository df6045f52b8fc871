"""A `torch.autograd.Function` as one operator: the program calls its forward and its backward as the model does.

    autopar.function("models.layers:Reverse", operands, arguments, differentiable, draws)

arguments: the call's arguments as Python text, in which `{0}` stands for the first operand. differentiable: of each
result, whether a gradient flows through it. draws: whether its forward draws random numbers. What a backward does with
a gradient is its own affair, clip it for one, so it is given whole gradients of the whole batch: the only rule that
all of them have is I → I. `autopar.register_rule` adds others.

    autopar.gradient_hook((x, *others), "lambda gradient, …: …", pointwise, linear)

passes x on; its gradient is what the lambda makes of it.
"""

from __future__ import annotations

from typing import Any

import torch

from autopar.errors import RuleError
from autopar.ir.graph import Node
from autopar.ir.placement import P, R
from autopar.ir.structure import FUNCTION, HOOK
from autopar.ops.call import Call
from autopar.ops.local import LocalCall
from autopar.ops.notation import AxisRule, einsum_rules
from autopar.ops.operator import Operator

_LIBRARY: Any = torch.library.Library("autopar", "FRAGMENT")  # type: ignore[no-untyped-call]
_LIBRARY.define(
    "function(str function, Tensor[] operands, str arguments, bool[] differentiable, bool draws) -> Tensor[]"
)
_LIBRARY.define("gradient_hook(Tensor[] operands, str hook, bool pointwise, bool linear) -> Tensor")


def gradient_hook(call: Call) -> list[AxisRule]:
    """A hook's rules beside I → I. The gradient of summands is whole, and slices of it do for what is pointwise."""
    others = len(call.node.operands) - 1
    _, _, is_pointwise, is_linear = call.node.args
    rules = [AxisRule((P, *(R,) * others), (P,))]
    if is_linear:
        rules.append(AxisRule((R,) * (others + 1), (R,)))
    if is_pointwise:
        text = ", ".join(["..."] * (others + 1)) + " -> ..."
        rules += einsum_rules(text, call.operand_shapes, call.result_shapes)
    return rules


def _hook_local(local: LocalCall) -> str:
    first, *others = local.names
    return f"rt.hooked({', '.join([first, local.call.node.args[1], *others])})"


def _function_local(local: LocalCall) -> str:
    """The model's own forward and backward, by the runtime's function."""
    function, _, arguments, _, draws = local.call.node.args
    text = ", ".join(filter(None, (repr(function), arguments.format(*local.names))))
    return f"rt.draw(rt.apply, {text})" if draws else f"rt.apply({text})"


FUNCTIONS: dict[str, Operator] = {
    FUNCTION: Operator(local=_function_local),
    HOOK: Operator(gradient_hook, local=_hook_local),
}


def rule_key(node: Node) -> str:
    """What rules are registered for: the operator, or the Function that the node calls."""
    return str(node.args[0]) if node.op == FUNCTION else node.op


def function_name(function: type[torch.autograd.Function]) -> str:
    """How programs name it: "module:qualified.name". Raises RuleError where no import would find it."""
    if reason := import_error(function):
        raise RuleError(f"expected an autograd Function that programs can import, found one that {reason}")
    return f"{function.__module__}:{function.__qualname__}"


def call_own(node: Node, operands: list[torch.Tensor]) -> Any:
    """What the call of a Function returns, or a hook's operator, as an emitted program has it: the model's own text."""
    from autopar import runtime as rt

    names = [f"x{position}" for position in range(len(operands))]
    known = {"torch": torch, "aten": torch.ops.aten, "rt": rt, **dict(zip(names, operands, strict=True))}
    if node.op == HOOK:
        return rt.hooked(operands[0], eval(node.args[1], known), *operands[1:])
    function, _, arguments, *_ = node.args
    made = rt.apply(function, *eval(f"({arguments.format(*names)},)" if arguments else "()", known))
    return made if isinstance(made, tuple) else (made,)


def import_error(function: Any) -> str | None:
    """Why a program could not import a class or function by module and name; None where it can."""
    import sys

    module, name = getattr(function, "__module__", None), getattr(function, "__qualname__", None)
    if not isinstance(module, str) or not isinstance(name, str) or "<locals>" in name or "<lambda>" in name:
        return "is defined inside of a function"
    if module == "__main__":
        return "is defined in the script that runs (__main__)"
    found: Any = sys.modules.get(module)
    for part in name.split("."):
        found = getattr(found, part, None)
    return None if found is function else f"{module} does not hold under the name {name}"
