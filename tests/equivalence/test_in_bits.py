"""Programs whose operators keep bits compute what they do without, bit for bit, in the predicted memory."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from torch import nn

import autopar
from autopar.ir.graph import Graph
from autopar.ir.plan import Plan
from autopar.ir.recompute import operators_again
from autopar.microbatch import divided_graph
from autopar.step import simulated_again
from autopar.trace import trace
from autopar.zero import in_bits, rungs_in_bits, with_in_bits
from models import vgg
from tests.equivalence import copying_out
from tests.equivalence.hard import state_of
from tests.equivalence.harness import Tensors
from tests.equivalence.test_recompute import dropped_gpt
from tests.rank_pool import pool

pytestmark = pytest.mark.ranks

MESH = autopar.Mesh("cpu", devices_per_node=2)


def pooling_vgg() -> tuple[nn.Module, Tensors]:
    torch.manual_seed(0)
    config = vgg.Config((1, 2), (8, 16), 32, 32, 10, 8)
    return vgg.build(config), vgg.example_inputs(config)


class Clipping(nn.Module):
    """Norms whose results nothing keeps but what clips them, as in mobile networks."""

    def __init__(self) -> None:
        super().__init__()
        self.convolutions = nn.ModuleList(nn.Conv2d(channels, 16, 3, padding=1) for channels in (3, 16, 16))
        self.norms = nn.ModuleList(nn.GroupNorm(4, 16) for _ in range(3))
        self.head = nn.Linear(16, 4)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        first, second, third = (
            lambda x: nn.functional.relu6(x),
            lambda x: nn.functional.hardtanh(x, -0.7, 0.9),
            lambda x: nn.functional.threshold(x, 0.1, 0.05).clamp(-float("inf"), 1.5),
        )
        x = images
        for convolution, norm, clipped in zip(self.convolutions, self.norms, (first, second, third), strict=True):
            x = clipped(norm(convolution(x)))
        return self.head(x.mean((2, 3))).square().mean()


def clipping_network() -> tuple[nn.Module, Tensors]:
    torch.manual_seed(0)
    return Clipping(), {"images": torch.randn(8, 3, 24, 24)}


MODELS = {"vgg": pooling_vgg, "clipping": clipping_network, "gpt with dropout": dropped_gpt}

#: what is marked has no mechanism that the others lack: data parallel ranks are clipping's, stages' are zero bubble's
CASES: list[Any] = [
    pytest.param("vgg", {"dp": 2}, marks=pytest.mark.whole),
    ("vgg", {"dp": 2, "zero": 3, "microbatches": 2}),
    ("vgg", {"tp": 2}),
    ("clipping", {"dp": 2, "zero": 1}),
    ("gpt with dropout", {"tp": 2, "sequence_parallel": True}),
    ("gpt with dropout", {"dp": 2, "microbatches": 2, "recompute": "selective"}),
    ("gpt with dropout", {"dp": 2, "recompute": "full"}),
    pytest.param("gpt with dropout", {"pp": 2, "microbatches": 4}, marks=pytest.mark.whole),
    ("gpt with dropout", {"pp": 2, "microbatches": 4, "schedule": "zero_bubble"}),
    ("gpt with dropout", {"dp": 2, "offload": "activations"}),
]


@cache
def subject(name: str) -> tuple[nn.Module, Tensors, Graph]:
    """A model, its batch and graph."""
    model, batch = MODELS[name]()
    return model, batch, trace(model, batch)


def both(name: str, choices: dict[str, Any]) -> tuple[Plan, Plan]:
    """As a template says, and with all operators in bits that gain by it and are not computed again by themselves."""
    model, batch, graph = subject(name)
    plain = autopar.template_plan(model, MESH, batch, **choices)
    names = rungs_in_bits(divided_graph(graph, plain.microbatches), "cpu")[-1]
    kept = with_in_bits(plain, [name for name in names if name not in operators_again(plain.recompute)])
    return plain, simulated_again(Plan.from_json(kept.to_json()), graph)


@pytest.mark.sampled
@pytest.mark.parametrize(("name", "choices"), CASES, ids=str)
def test_bit_for_bit_and_below_the_prediction(name: str, choices: dict[str, Any]) -> None:
    (model, batch, _), found = subject(name), both(name, choices)
    sources = [autopar.parallelize(model, MESH, batch, plan=plan, check=False).source for plan in found]
    assert "_in_bits(" in sources[1] and "_in_bits(" not in sources[0]
    assert found[1].predicted.peak_bytes < found[0].predicted.peak_bytes
    assert found[1].predicted.step_time_ns > found[0].predicted.step_time_ns
    ranks, state = pool(2), state_of(model)
    runs = [ranks.run(copying_out.losses_and_gradients, source, state, batch) for source in sources]
    for (loss, gradients), (plain_loss, plain_gradients) in zip(runs[1], runs[0], strict=True):
        assert torch.equal(loss, plain_loss) and gradients.keys() == plain_gradients.keys()
        assert all(torch.equal(gradients[name], value) for name, value in plain_gradients.items())
    peaks = [max(ranks.run(copying_out.tracked_peak, source, state, batch)) for source in sources]
    assert peaks[0] <= found[0].predicted.peak_bytes
    assert found[1].predicted.peak_bytes * 0.95 <= peaks[1] <= found[1].predicted.peak_bytes
    assert peaks[1] < peaks[0]


def test_prediction_in_parts_is_that_of_the_whole() -> None:
    """Blocks that differ in nothing but what they keep are others."""
    (_, _, graph), (_, kept) = subject("gpt with dropout"), both("gpt with dropout", {"dp": 2})
    some = in_bits(kept)[:2]
    part = simulated_again(with_in_bits(kept, some), graph)
    other = simulated_again(with_in_bits(kept, ()), graph)
    assert kept.predicted.peak_bytes < part.predicted.peak_bytes < other.predicted.peak_bytes
    assert in_bits(part) == some and replace(with_in_bits(part, ()), predicted=other.predicted) == other
