"""Written attention adds the causal mask of one sample, where what it added was that one, and only there."""

from __future__ import annotations

from functools import cache

import pytest
import torch
import transformers
from torch import Tensor, nn

import autopar
from autopar.emit import emit
from autopar.errors import PlanError
from autopar.ir.graph import Graph
from autopar.pipeline import template_of_graph
from autopar.substitute.triangles import under_expanded_masks, with_triangles
from autopar.trace import trace
from tests.equivalence.harness import differences, run_rank, run_single

LENGTH = 6
LEAST = torch.finfo(torch.float32).min


class Written(nn.Module):
    """Attention of two heads, written out, under a mask that forward makes for each sample."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.project = kind, nn.Linear(4, 4)

    def mask(self, x: Tensor) -> Tensor:
        positions = torch.arange(LENGTH).expand(len(x), LENGTH)
        seen = positions[:, None, None, :] <= positions[:, None, :, None]
        if self.kind == "window":
            seen = seen & (positions[:, None, None, :] > positions[:, None, :, None] - 3)
        if self.kind == "input":
            seen = seen & (x[:, None, None, :, 0] > -100)
        hidden = {"weak": -1.0, "least": LEAST}.get(self.kind, float("-inf"))
        made = torch.zeros(seen.shape).masked_fill(~seen, hidden)
        return made[:1] if self.kind == "small" else made

    def forward(self, x: Tensor) -> Tensor:
        heads = self.project(x).unflatten(-1, (2, 2)).transpose(1, 2)
        scores = heads @ heads.transpose(-1, -2) + self.mask(x)
        if self.kind == "other dim":
            return (scores.softmax(-2).nan_to_num() @ heads).sum()
        if self.kind == "read twice":
            return (scores.softmax(-1) @ heads).sum() + scores[..., 0].sum()
        return (scores.softmax(-1) @ heads).square().sum()


def traced(kind: str, batch: int = 3) -> tuple[nn.Module, dict[str, Tensor], Graph]:
    torch.manual_seed(0)
    model, x = Written(kind), torch.randn(batch, LENGTH, 4)
    return model, {"x": x}, trace(model, {"x": x})


@pytest.mark.parametrize("kind", ["plain", "least"])
def test_a_causal_mask_of_each_sample_is_one(kind: str) -> None:
    model, batch, graph = traced(kind)
    names = under_expanded_masks(graph)
    assert len(names) == 1
    after = with_triangles(graph, names)
    largest = max(t.num_elements for t in after.tensors.values() if not t.differentiable and t.name not in after.inputs)
    assert largest == LENGTH**2 and len(after.nodes) < len(graph.nodes)
    plan = template_of_graph(after, autopar.Mesh("cpu", devices_per_node=1))
    found = run_rank(0, 1, emit(after, plan), dict(model.state_dict()), batch, ("sgd",))
    assert differences(run_single(model, batch, ("sgd",)), found) == []
    assert under_expanded_masks(after) == ()


@pytest.mark.parametrize("kind", ["window", "input", "weak", "small", "other dim", "read twice"])
def test_another_mask_stays(kind: str) -> None:
    _, _, graph = traced(kind)
    assert under_expanded_masks(graph) == ()
    add = next(node for node in graph.nodes if node.op == "aten.add.Tensor")
    with pytest.raises(PlanError, match="causal mask"):
        with_triangles(graph, (add.name,))


@cache
def gpt2(dropout: float, kernel: str) -> tuple[nn.Module, dict[str, Tensor]]:
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        vocab_size=64, n_positions=LENGTH, n_embd=16, n_layer=2, n_head=2, use_cache=False, attn_pdrop=dropout,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_implementation=kernel,
    )  # fmt: skip
    tokens = torch.randint(0, 64, (4, LENGTH))
    return transformers.GPT2LMHeadModel(config), {"input_ids": tokens, "labels": tokens}


@pytest.mark.parametrize("dropout, kernel", [(0.1, "sdpa"), (0.0, "eager"), (0.1, "eager")])
def test_gpt2_that_writes_attention_out_keeps_no_masks(dropout: float, kernel: str) -> None:
    """With a dropout by default, and four microbatches, of which each kept its own."""
    model, batch = gpt2(dropout, kernel)
    plan = autopar.template_plan(model, autopar.Mesh("cpu", devices_per_node=1), batch, microbatches=4)
    assert "causal-scores" in {step.rule for step in plan.substitutions}
    assert plan.predicted.memory.get("constants", 0) <= LENGTH**2 * 4 + LENGTH * 8
    again = autopar.Plan.from_json(plan.to_json())
    program = autopar.parallelize(model, again.mesh, batch, plan=again)
    assert program.plan.substitutions == plan.substitutions
    if not dropout:
        found = run_rank(0, 1, program.source, dict(model.state_dict()), batch, ("sgd",))
        assert differences(run_single(model, batch, ("sgd",)), found) == []
