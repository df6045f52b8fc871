"""torch.compile of a rank: compiled programs equal themselves uncompiled, which equal the model.

Losses 1e-5 relative, gradients and weights 1e-4 of the larger of their norm and 1e-3 of the global one.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import autopar
from autopar import runtime as rt
from models import gpt, mlp
from tests.equivalence.compiled import Steps, Tensors, run_rank
from tests.rank_pool import pool


def tiny_gpt() -> tuple[nn.Module, Tensors]:
    torch.manual_seed(0)
    config = gpt.Config(vocab_size=64, seq_len=16, hidden_size=32, num_layers=2, num_heads=2, batch_size=4)
    return gpt.build(config), gpt.example_inputs(config)


def tiny_mlp() -> tuple[nn.Module, Tensors]:
    torch.manual_seed(0)
    config = mlp.Config(widths=(8, 16, 4), batch_size=8)
    return mlp.build(config), mlp.example_inputs(config)


class Twice(nn.Module):
    """A block with a buffer that it updates, called outside of a loop; a constant; dropout off."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(8)
        self.inner = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8))
        self.register_buffer("scale", torch.linspace(0.5, 1.5, 8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.inner(self.norm(x)) * (self.scale * 2)
        return (y + x).square().mean()


def twice() -> tuple[nn.Module, Tensors]:
    torch.manual_seed(0)
    return Twice(), {"x": torch.randn(8, 8)}


MODELS = {"gpt": tiny_gpt, "mlp": tiny_mlp, "twice": twice}


def run(name: str, backend: str, in_place: bool = True, **choices: Any) -> tuple[Steps, Steps, int, list[str]]:
    model, batch = MODELS[name]()
    mesh = autopar.Mesh("cpu", devices_per_node=choices.get("dp", 1) * choices.get("tp", 1))
    plan = autopar.template_plan(model, mesh, batch, **choices)
    source = autopar.parallelize(model, mesh, batch, plan=plan).source
    state = {**model.state_dict(), **dict(model.named_buffers())}
    ranks = pool(mesh.num_devices)
    patience, ranks.timeout_s = ranks.timeout_s, 150.0  # compiling takes its time on a busy machine
    try:
        return ranks.run(run_rank, source, state, batch, backend, in_place)[0]
    finally:
        ranks.timeout_s = patience


def check(eager: Steps, compiled: Steps) -> None:
    torch.testing.assert_close(torch.stack(compiled[0]), torch.stack(eager[0]), rtol=1e-5, atol=0)
    for found, expected in zip(compiled[1:], eager[1:], strict=True):
        assert set(found) == set(expected)
        total = torch.stack([tensor.float().norm() for tensor in expected.values()]).norm()
        for name, tensor in expected.items():
            assert (found[name] - tensor).float().norm() <= 1e-4 * max(tensor.float().norm(), 1e-3 * total), name


@pytest.mark.sampled(
    only=(
        "gpt-True-{'dp': 2, 'zero': 3, 'microbatches': 2}",
        "gpt-False-{'tp': 2, 'sequence_parallel': True}",
        "twice-True-{'dp': 2}",
    )
)
@pytest.mark.ranks
@pytest.mark.parametrize(
    ("name", "in_place", "choices"),
    [
        ("gpt", True, {"dp": 2, "zero": 3, "microbatches": 2}),
        ("gpt", False, {"tp": 2, "sequence_parallel": True}),
        ("gpt", False, {"dp": 2, "zero": 3, "precision": "bf16"}),
        ("twice", True, {"dp": 2}),
    ],
    ids=str,
)
def test_compiled_ranks_equal_eager_ones(name: str, in_place: bool, choices: dict[str, Any]) -> None:
    eager, compiled, num_graphs, told = run(name, "aot_eager", in_place, **choices)
    check(eager, compiled)
    assert num_graphs >= 2
    if "zero" in choices:
        (text,) = told
        assert "the statements of Program run eagerly, since they call their blocks in a loop" in text
        assert "compiled are those of Attention, " in text


@pytest.mark.ranks
def test_inductor_compiles_gathered_parameters() -> None:
    """ZeRO-3 frees and gathers what compiled code has saved for its backward pass."""
    eager, compiled, num_graphs, told = run("mlp", "inductor", dp=2, zero=3)
    check(eager, compiled)
    assert num_graphs >= 1
    assert not told


def test_fullgraph_is_refused() -> None:
    model, batch = tiny_mlp()
    rank = autopar.parallelize(model, autopar.Mesh("cpu", devices_per_node=1), batch).build()
    with pytest.raises(rt.ProgramError, match="expected fullgraph=False: collectives"):
        rank.compile(fullgraph=True)
