"""Which operators of a graph may keep bits for their backward pass (`ops.in_bits`), and plans that say which do."""

from __future__ import annotations

from autopar.errors import PlanError
from autopar.ir.graph import Graph, Node
from autopar.ir.plan import EAGER, Plan
from autopar.ir.recompute import operators_again
from autopar.ops.table import operator


def may_be_in_bits(graph: Graph, node: Node) -> bool:
    """Whether a few bits of each element say all that the operator's backward pass asks of it."""
    rule = operator(node.op).in_bits
    is_trained = any(graph.tensors[name].differentiable for name in node.operands[:1])
    return rule is not None and is_trained and rule.bits(node, graph) is not None


def check_in_bits(graph: Graph, plan: Plan) -> None:
    """Raises PlanError where an operator cannot be kept in bits, or not beside what else the plan says."""
    nodes = {name: placed for stage in plan.stages for name, placed in stage.nodes.items() if placed.in_bits}
    if not nodes:
        return
    if plan.mode != "train":
        raise PlanError('expected mode="train" to keep operators in bits, found inference, in which nothing is kept')
    if plan.runs != EAGER:
        raise PlanError(
            f'expected a program that runs eagerly to keep operators in bits, found runs="{plan.runs}", which decides '
            f'itself what is kept; take runs="{EAGER}"'
        )
    again = operators_again(plan.recompute)
    for name in nodes:
        node = graph.node_by_name[name]
        if not may_be_in_bits(graph, node):
            raise PlanError(
                "expected operators of whose elements a few bits say enough (relu, relu6, leaky_relu, hardtanh, "
                "threshold, clamp by numbers, dropout, max_pool2d), "
                f"found {name} ({node.op}{f', {node.source}' if node.source else ''}) in bits"
            )
        if name in again:
            raise PlanError(
                f"expected operators kept in bits or computed again, found {name} to be both; take one of the two"
            )
