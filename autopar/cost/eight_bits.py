"""Which operators of a graph may keep their activations in 8 bits (`ops.eight_bits`), and plans that say which do.

Their gradients are inexact: a plan has such operators where that is allowed by name, `allow=("compression",)`.
"""

from __future__ import annotations

from autopar.cost.memory import packed_in_eight_bits
from autopar.errors import PlanError
from autopar.ir.graph import Graph, Node
from autopar.ir.plan import EAGER, Plan, Stage
from autopar.ir.recompute import operators_again
from autopar.ops.communication import inner_communication

COMPRESSION = "compression"
"""Of `allow`: what lets a plan have them."""


def may_be_in_eight_bits(graph: Graph, node: Node) -> bool:
    """Whether 8 bits a value say nearly all that the operator's backward pass asks of some activation."""
    return packed_in_eight_bits(node, graph) != ((), False)


def runs_by_itself(graph: Graph, node: Node, stage: Stage) -> bool:
    """Whether a stage runs the operator itself: where a function of the runtime talks to other ranks in its place,
    another tensor may be what is kept; a branch keeps what it reads, whatever its operators do."""
    placed = stage.nodes.get(node.name)
    in_branch = any(node.name in branch.nodes for fork in stage.forks for branch in fork.branches)
    return (
        placed is not None
        and not in_branch
        and inner_communication(graph, node, placed.operands, stage.axes) == ([], [])
    )


def check_in_eight_bits(graph: Graph, plan: Plan) -> None:
    """Raises PlanError where an operator cannot be kept in 8 bits, may not, or not beside what else the plan says."""
    found = [
        (stage, name, placed) for stage in plan.stages for name, placed in stage.nodes.items() if placed.in_eight_bits
    ]
    if not found:
        return
    for is_met, expected, other in (
        (COMPRESSION in plan.allow, f'allow=("{COMPRESSION}",) to keep activations in 8 bits', f"{plan.allow}"),
        (plan.mode == "train", 'mode="train" to keep activations in 8 bits', "inference, in which nothing is kept"),
        (plan.runs == EAGER, f'runs="{EAGER}" to keep activations in 8 bits', f'"{plan.runs}"'),
    ):
        if not is_met:
            raise PlanError(f"expected {expected}, found {other}; plan again without the one or the other")
    again = operators_again(plan.recompute)
    for stage, name, placed in found:
        node = graph.node_by_name[name]
        at = f"{name} ({node.op}{f', {node.source}' if node.source else ''})"
        if not may_be_in_eight_bits(graph, node) or not runs_by_itself(graph, node, stage):
            raise PlanError(
                f"expected operators that run by themselves, and whose activations 8 bits tell nearly (products, "
                f"norms, gelu, silu, softmax, …), found {at} in 8 bits; leave it out"
            )
        if placed.in_bits or name in again:
            raise PlanError(
                f"expected operators kept in 8 bits, in fewer, or computed again, found {at} to be two of these; take "
                "one"
            )
