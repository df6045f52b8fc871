"""Routing through sort and grouped products becomes one operator, and nothing else does."""

from __future__ import annotations

import pytest
import torch
import transformers
import transformers.integrations.moe
from torch import Tensor, nn

from autopar.ops import coverage
from autopar.ops.experts import ROUTED_EXPERTS
from autopar.trace import trace
from tests.trace.interpret import check_flags, graph_gradients, run_graph

grouped_mm = torch.ops.transformers.grouped_mm_fallback
EXPERTS, WIDTH, HIDDEN = 5, 6, 4


class Routed(nn.Module):
    """Written as transformers writes it; `change` is one deviation."""

    def __init__(self, change: str = "") -> None:
        super().__init__()
        self.change = change
        if change in ("biased", "other bias", "scales"):
            self.bias = nn.Parameter(torch.randn(EXPERTS, 2 * HIDDEN))
        self.gate = nn.Linear(WIDTH, EXPERTS)
        self.up = nn.Parameter(torch.randn(EXPERTS, 2 * HIDDEN, WIDTH))
        self.down = nn.Parameter(torch.randn(EXPERTS, WIDTH, HIDDEN))

    def forward(self, x: Tensor) -> Tensor:
        weights, ids = self.gate(x).softmax(-1).topk(2)
        flat = ids.reshape(-1)
        numbers, order = torch.sort(flat, descending=self.change == "descending")
        counts = torch.histc(numbers.float(), bins=EXPERTS, min=0, max=EXPERTS - (self.change != "bins"))
        ends = torch.cumsum(counts, 0, dtype=torch.int32)
        hidden = grouped_mm(x[order // 2], self.up.transpose(-2, -1), ends)
        if self.change in ("biased", "other bias"):
            hidden = hidden + self.bias[numbers if self.change == "biased" else order % EXPERTS]
        left, right = (hidden[:, ::2], hidden[:, 1::2]) if self.change == "every other" else hidden.chunk(2, -1)
        if self.change == "clamped":
            left, right = left.clamp(max=0.5), (right + 1).clamp(-0.5, 0.5) * torch.sigmoid(left * 1.7)
        if self.change == "casts":
            left = left.double().float()
        if self.change == "scales":
            left = left * self.bias[0, :1]
        if self.change == "swapped":
            left, right = right, left
        if self.change == "mixes rows":
            left = left - left.mean(0)
        hidden = nn.functional.silu(left) * right
        rows = grouped_mm(hidden, self.down.transpose(-2, -1), ends) * weights.reshape(-1)[order].unsqueeze(-1)
        back = torch.empty_like(order)
        back[order] = torch.arange(order.size(0))
        shape = (2, x.size(0), WIDTH) if self.change == "other sum" else (x.size(0), 2, WIDTH)
        return rows[back].view(shape).sum(0 if self.change == "other sum" else 1).square().mean()


@pytest.mark.parametrize("change", ["", "swapped", "every other", "clamped", "biased"])
def test_routing_is_one_operator_that_computes_the_same(change: str) -> None:
    torch.manual_seed(0)
    model, x = Routed(change), torch.randn(12, WIDTH)
    graph = trace(model, (x,))
    assert [node.op for node in graph.nodes].count(ROUTED_EXPERTS) == 1
    assert not any("sort" in node.op or "grouped" in node.op for node in graph.nodes)
    check_flags(graph, run_graph(graph, model, {"x": x}))
    loss, gradients = graph_gradients(graph, model, {"x": x})
    expected = model(x)
    expected.backward()
    torch.testing.assert_close(loss, expected.detach())
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(gradients[name], parameter.grad)


@pytest.mark.parametrize("change", ["descending", "bins", "mixes rows", "other sum", "other bias", "casts", "scales"])
def test_what_deviates_stays_as_it_is(change: str) -> None:
    torch.manual_seed(0)
    graph = trace(Routed(change), (torch.randn(12, WIDTH),))
    assert ROUTED_EXPERTS not in [node.op for node in graph.nodes]
    assert coverage(graph)["transformers.grouped_mm_fallback.default"].startswith("replicated")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_weights_of_choices_may_have_a_dtype_of_their_own(dtype: torch.dtype) -> None:
    """Routers of models cast to bfloat16 compute in float32, as transformers' do; products read one dtype still."""
    config = transformers.MixtralConfig(
        vocab_size=16, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, num_local_experts=4, num_experts_per_tok=2, use_cache=False,
    )  # fmt: skip
    ids = torch.zeros(2, 4, dtype=torch.int64)
    graph = trace(transformers.MixtralForCausalLM(config), {"input_ids": ids, "labels": ids}, compute_dtype=dtype)
    (node,) = (node for node in graph.nodes if node.op == ROUTED_EXPERTS)
    x, _, weights, up, down = (graph.tensors[name].dtype for name in node.operands)
    assert {x, up, down} == {str(dtype).removeprefix("torch.")} and weights == "float32"
