"""Ranks that have replicas of the experts which most tokens choose compute what one device does, while these change
within a step; what cannot be is refused."""

from __future__ import annotations

import pytest

import autopar
from autopar.by_hand import template_of_graph
from autopar.errors import PlanError
from autopar.ir.placement import R, S
from autopar.ops.call import call_of
from autopar.ops.experts import ROUTED_EXPERTS
from autopar.ops.replicas import replicas_error, replicas_of
from tests.equivalence import replicas

CASES = [
    ("mixtral", "ep_x4", 1), ("qwen3_moe", "two_levels", 3), ("gpt_oss", "tp", 3), ("deepseek", "zero3", 1),
    ("qwen3_moe", "pp", 1), ("gpt_oss", "recomputed", 1), ("mixtral", "chunks", 3),
]  # fmt: skip


@pytest.mark.sampled(only=("mixtral-ep_x4-1", "qwen3_moe-two_levels-3", "gpt_oss-tp-3", "deepseek-zero3-1"))
@pytest.mark.ranks
@pytest.mark.parametrize(("name", "plan", "count"), CASES)
def test_replicas_change_nothing(name: str, plan: str, count: int) -> None:
    """Loss, gradients and weights are those of one device, bytes as predicted, and replicas of several experts made."""
    found = replicas.faults(name, plan, count)
    assert not found, "\n".join(found)


def test_replicas_are_in_the_plan() -> None:
    """Read back from its file, replayed, and told."""
    plan, graph = replicas.planned("qwen3_moe", "ep", 3)
    assert {replicas_of(node) for node in graph.nodes if node.op == ROUTED_EXPERTS} == {3}
    assert "replicas of 3 experts" in str(plan)
    assert dict(plan.stage.storage) == dict(replicas.planned("qwen3_moe", "ep", 1)[0].stage.storage)


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"dp": 2}, "ep of at least 2"), ({"dp": 2, "ep": 2, "exchange": "adaptive"}, "adaptive"),
        ({"dp": 4, "ep": 2, "experts": "data"}, 'experts="data"'), ({"dp": 2, "ep": 2, "replicas": 8}, "0 to 7"),
        ({"dp": 2, "ep": 2, "replicas": -1}, "from 0 up"),
    ],
)  # fmt: skip
def test_replicas_that_cannot_be_are_refused(options: dict[str, object], told: str) -> None:
    mesh = autopar.Mesh("cpu", 1, int(str(options["dp"])))
    with pytest.raises(PlanError, match=told):
        template_of_graph(replicas.traced("qwen3_moe"), mesh, **{"replicas": 1, **options})  # type: ignore[arg-type]


def test_ranks_with_the_same_tokens_have_no_replicas() -> None:
    """Of tensor parallelism that splits experts, without sequences: tokens are split there, if nowhere else."""
    plan, graph = replicas.planned("qwen3_moe", "ep", 1)
    node = next(node for node in graph.nodes if node.op == ROUTED_EXPERTS)
    call, own = call_of(graph, node), plan.stage.nodes[node.name].operands
    alike = tuple((R,) if number < 3 else (S(0),) for number in range(len(own)))
    assert replicas_error(call, own, plan.stage.axes) is None
    assert "have the same tokens" in str(replicas_error(call, alike, plan.stage.axes))
    over = template_of_graph(replicas.traced("qwen3_moe"), autopar.Mesh("cpu", 1, 2), tp=2, ep=2, replicas=1)
    assert {over.stage.nodes[node.name].operands[n] for n in (0, 3)} == {(S(0),)}
