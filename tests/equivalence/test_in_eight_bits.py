"""Programs whose operators keep activations in 8 bits: the loss is exact, gradients as far off as the plan states, and
memory as predicted."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autopar
from autopar.cost.eight_bits import COMPRESSION
from autopar.ir.graph import Graph
from autopar.ir.plan import Plan
from autopar.ir.recompute import operators_again
from autopar.microbatch import divided_graph
from autopar.step import simulated_again
from autopar.trace import gradient_error, trace
from autopar.zero import in_eight_bits, rungs_in_eight_bits, that_run, with_in_bits
from models import gpt, llama
from tests.equivalence import compressed, copying_out
from tests.equivalence.hard import state_of
from tests.equivalence.harness import Tensors
from tests.equivalence.test_in_bits import pooling_vgg
from tests.rank_pool import pool

MESH = autopar.Mesh("cpu", devices_per_node=2)
SIZES: dict[str, Any] = {
    "vocab_size": 256, "seq_len": 32, "num_layers": 2, "hidden_size": 64, "num_heads": 4, "batch_size": 8
}  # fmt: skip


def small_gpt() -> tuple[nn.Module, Tensors]:
    torch.manual_seed(0)
    config = gpt.Config(**SIZES)
    return gpt.build(config), gpt.example_inputs(config)


def small_llama() -> tuple[nn.Module, Tensors]:
    torch.manual_seed(0)
    config = llama.Config(**SIZES, num_kv_heads=4, mlp_size=176)
    return llama.build(config), llama.example_inputs(config)


MODELS = {"gpt": small_gpt, "llama": small_llama, "vgg": pooling_vgg}
CASES: list[tuple[str, dict[str, Any]]] = [
    ("gpt", {"dp": 2}),
    ("gpt", {"tp": 2, "sequence_parallel": True}),
    ("gpt", {"dp": 2, "recompute": "full"}),
    ("gpt", {"dp": 2, "offload": "activations"}),
    ("gpt", {"pp": 2, "microbatches": 4, "schedule": "zero_bubble"}),
    ("llama", {"tp": 2}),
    ("vgg", {"tp": 2}),
]


@cache
def subject(name: str) -> tuple[nn.Module, Tensors, Graph]:
    """A model, its batch and graph."""
    model, batch = MODELS[name]()
    return model, batch, trace(model, batch)


def both(name: str, choices: dict[str, Any]) -> tuple[Plan, Plan]:
    """As a template says, and with all in 8 bits that gain by it."""
    model, batch, graph = subject(name)
    plain = autopar.template_plan(model, MESH, batch, **choices)
    part = divided_graph(graph, plain.microbatches)
    rung, again = rungs_in_eight_bits(part, "cpu")[-1], operators_again(plain.recompute)
    bits, eight = ([name for name in names if name not in again] for names in rung)
    kept = with_in_bits(replace(plain, allow=(COMPRESSION,)), bits, that_run(part, plain, eight))
    kept = replace(kept, gradient_error=gradient_error(kept, graph, model, batch, None, None))
    return plain, simulated_again(Plan.from_json(kept.to_json()), graph)


def distance(found: dict[str, Tensor], exact: dict[str, Tensor]) -> float:
    square = sum(float((found[name] - x).double().square().sum()) for name, x in exact.items())
    return float((square / sum(float(x.double().square().sum()) for x in exact.values())) ** 0.5)


@pytest.mark.ranks
@pytest.mark.sampled
@pytest.mark.parametrize(("name", "choices"), CASES, ids=str)
def test_as_far_off_as_stated_and_below_the_predicted_peak(name: str, choices: dict[str, Any]) -> None:
    (model, batch, _), (plain, kept) = subject(name), both(name, choices)
    assert in_eight_bits(kept) and "not what one device computes" in str(kept)
    sources = [autopar.parallelize(model, MESH, batch, plan=plan, check=False).source for plan in (plain, kept)]
    assert "in_eight_bits(lambda: " in sources[1] and "in_eight_bits(" not in sources[0]
    ranks, state = pool(2), state_of(model)
    (loss, exact), (near_loss, near) = (
        ranks.run(compressed.first_gradients, source, state, batch)[0] for source in sources
    )
    stated = kept.gradient_error
    assert torch.equal(loss, near_loss) and stated is not None and stated.how == "measured"
    assert 0 < distance(near, exact) <= 3 * stated.relative <= 0.03
    peak = max(ranks.run(copying_out.tracked_peak, sources[1], state, batch))
    assert 0.94 * kept.predicted.peak_bytes <= peak <= kept.predicted.peak_bytes
    if "recompute" not in choices:
        assert kept.predicted.peak_bytes < plain.predicted.peak_bytes


@pytest.mark.ranks
@pytest.mark.parametrize("algorithm", ["int8", "topk(0.05)", "powersgd(2)"])
def test_sums_are_as_far_off_as_stated(algorithm: str) -> None:
    model, batch, _ = subject("gpt")
    plans = [autopar.template_plan(model, MESH, batch, dp=2, algorithm=kind) for kind in (None, algorithm)]
    sources = [autopar.parallelize(model, MESH, batch, plan=plan, check=False).source for plan in plans]
    (_, exact), (_, near) = (
        pool(2).run(compressed.first_gradients, source, state_of(model), batch)[0] for source in sources
    )
    stated = plans[1].gradient_error
    assert plans[0].gradient_error is None and stated is not None and stated.how == "measured"
    assert distance(near, exact) == pytest.approx(stated.relative, rel=0.1)
    assert Plan.from_json(plans[1].to_json()).gradient_error == stated and f"{stated}" in str(plans[1])
