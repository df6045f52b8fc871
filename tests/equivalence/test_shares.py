"""Ranks with unequal shares of a batch compute what one device computes: loss, gradients, buffers, bytes exactly."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autopar
from autopar.cost.files import profiles_folder
from autopar.ir.plan import Plan
from autopar.pipeline import template_of_graph
from autopar.simulate.traffic import traffic
from autopar.trace import trace
from models import gpt, mlp, wide_resnet
from tests.equivalence.sharing import loss_of_own_rows
from tests.equivalence.step import Step, compare, step_alone, step_on_rank
from tests.rank_pool import pool

MODELS: dict[str, tuple[Any, Any]] = {
    "gpt": (gpt, gpt.Config(num_layers=2, hidden_size=16, num_heads=2, seq_len=8, vocab_size=50, batch_size=12)),
    "mlp": (mlp, mlp.Config(widths=(6, 9, 5), batch_size=13)),
    "wide_resnet": (wide_resnet, wide_resnet.Config(batch_size=6)),
}
CASES: dict[str, tuple[str, tuple[int, ...], dict[str, Any]]] = {
    # by name: the model, ranks of the fast kind and of the slow one, and what the template is asked for
    "gpt": ("gpt", (1, 1), {"dp": 2}),
    "gpt zero1 microbatches": ("gpt", (1, 1), {"dp": 2, "zero": 1, "microbatches": 2}),
    "gpt dp tp": ("gpt", (2, 2), {"dp": 2, "tp": 2}),
    "gpt zero3 recomputed": ("gpt", (1, 2), {"dp": 3, "zero": 3, "microbatches": 2, "recompute": "full"}),
    "mlp zero3": ("mlp", (1, 3), {"dp": 4, "zero": 3}),
    "wide_resnet": ("wide_resnet", (1, 1), {"dp": 2}),
}


@cache
def built(name: str) -> tuple[nn.Module, Mapping[str, Tensor]]:
    module, config = MODELS[name]
    torch.manual_seed(0)
    return module.build(config), module.example_inputs(config)


@cache
def single(name: str) -> Step:
    module, config = MODELS[name]
    copied = module.build(config)
    copied.load_state_dict(built(name)[0].state_dict())
    return step_alone(copied, dict(built(name)[1]))


@pytest.fixture(scope="module")
def kinds(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    """Profiles of a device so slow that the rows count even in tiny models, and of one that is three times slower."""
    folder, paths = tmp_path_factory.mktemp("profiles"), []
    for name, slower in (("fast", 1e4), ("slow", 3e4)):
        data = json.loads((profiles_folder() / "cpu.json").read_text())
        facts = data["facts"]
        least = 1e6  # FLOP/s: a profile that says less is refused
        facts["peak_flops"] = {dtype: max(least, rate / slower) for dtype, rate in facts["peak_flops"].items()}
        facts["memory_bandwidth"] /= slower
        paths.append(Path(folder / f"{name}.json"))
        paths[-1].write_text(json.dumps(data))
    return str(paths[0]), str(paths[1])


@pytest.mark.sampled(only=("gpt dp tp", "gpt zero3 recomputed", "mlp zero3", "wide_resnet"))
@pytest.mark.ranks
@pytest.mark.parametrize("case", CASES)
def test_unequal_shares_equal_the_model(case: str, kinds: tuple[str, str]) -> None:
    name, counts, asked = CASES[case]
    model, batch = built(name)
    graph = trace(model, batch)
    mesh = autopar.Mesh([(kind, 1, count) for kind, count in zip(kinds, counts, strict=True)])
    plan = template_of_graph(graph, mesh, split="speed", **asked)
    axis = next(axis for axis in plan.stage.axes if axis.name == "dp")
    assert axis.shares[0] > axis.shares[-1], "the faster device has more rows"
    program = autopar.parallelize(model, mesh, batch, plan=Plan.from_json(plan.to_json()))
    state = {**model.state_dict(), **dict(model.named_buffers())}
    ranks = pool(mesh.num_devices)
    faults = compare(single(name), ranks.run(step_on_rank, program.source, state, batch), sent(graph, plan)).faults()
    assert not faults, "\n".join(faults)
    if case == "gpt zero1 microbatches":
        by_shard = ranks.run(loss_of_own_rows, program.source, state, batch, plan.microbatches, axis.shares)
        assert by_shard == pytest.approx([single(name).loss.item()] * len(by_shard), rel=1e-5)


def sent(graph: Any, plan: Plan) -> Mapping[str, int]:
    return traffic(graph, plan)
