"""Programs whose parameters are stored packed compute what the model computes, and keep its names and shapes."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autopar
from autopar.emit import emit
from autopar.ir.graph import Graph
from autopar.pipeline import template_of_graph
from autopar.program import PlannedProgram, load_source, model_state
from autopar.substitute.packing import packed
from autopar.trace import trace
from tests.equivalence import planned, precision, zoo
from tests.equivalence.harness import differences, run_rank, run_single
from tests.rank_pool import pool
from tests.substitute.rewriting import REWRITES

Tensors = dict[str, Tensor]
CASES = (("llama", "merged"), ("hf_gpt2", "split"), ("hf_gpt2", "transposed"))
PLANS: dict[str, dict[str, Any]] = {
    "dp": {"dp": 2},
    "tp": {"tp": 2},
    "zero1": {"dp": 2, "zero": 1},
    "zero3": {"dp": 2, "zero": 3},
    "zero3_tp": {"dp": 2, "tp": 2, "zero": 3},
    "stages": {"pp": 2, "dp": 2, "microbatches": 2},
    "stages_recomputed": {"pp": 2, "zero": 2, "dp": 2, "microbatches": 2, "recompute": "full"},
}


@cache
def graph(name: str, how: str, dtype: torch.dtype | None = None) -> Graph:
    model, batch = zoo.build(name)
    traced = planned.graph(name) if dtype is None else trace(model, batch, compute_dtype=dtype)
    found = packed(REWRITES[how](traced))
    assert len(found.packed) >= 4
    assert not {piece.name for item in found.packed.values() for piece in item.pieces} & set(found.stored_by_tensor)
    return found


@cache
def program(name: str, how: str, plan_name: str, low: str | None = None) -> PlannedProgram:
    own = graph(name, how, torch.bfloat16 if low else None)
    return program_of(own, zoo.build(name)[0], PLANS.get(plan_name, {}), low)


def program_of(own: Graph, model: nn.Module, choices: dict[str, Any], low: str | None = None) -> PlannedProgram:
    world = choices.get("dp", 1) * choices.get("tp", 1) * choices.get("pp", 1)
    plan = template_of_graph(own, autopar.Mesh("cpu", devices_per_node=world), precision=low, **choices)
    return PlannedProgram(own, plan, emit(own, plan), model_state(model))


@cache
def single(name: str) -> Any:
    model, batch = zoo.build(name)
    return run_single(model, batch, ("adamw",))


@pytest.mark.parametrize(("name", "how"), CASES)
def test_on_one_device(name: str, how: str) -> None:
    """Also with what `program.build` starts from, and names as the model has them, tied ones too."""
    model, batch = zoo.build(name)
    what = program(name, how, "one device")
    found = run_rank(0, 1, what.source, {**model.state_dict(), **dict(model.named_buffers())}, batch, ("adamw",))
    assert not differences(single(name), found)
    rank, own = what.build(), model.state_dict()
    torch.testing.assert_close(rank.full_state_dict(), own, rtol=0, atol=0)
    rank.train_step(**batch)
    gradients = rank.full_gradients()
    assert gradients.keys() == {n for n, p in model.named_parameters(remove_duplicate=False) if p.requires_grad}


@pytest.mark.sampled
@pytest.mark.ranks
@pytest.mark.parametrize(
    ("name", "how", "plan_name"),
    [
        *(("llama", "merged", plan) for plan in ("tp", "zero3", "zero3_tp", "stages")),
        *(("hf_gpt2", "split", plan) for plan in ("dp", "tp", "zero1", "stages_recomputed")),
        ("hf_gpt2", "transposed", "zero3"),
    ],
)
def test_on_ranks(name: str, how: str, plan_name: str) -> None:
    model, batch = zoo.build(name)
    what = program(name, how, plan_name)
    state = {**model.state_dict(), **dict(model.named_buffers())}
    results = pool(what.plan.mesh.num_devices).run(run_rank, what.source, state, batch, ("adamw",))
    found = differences(single(name), results[0])
    assert not found, "\n".join(found)
    assert {loss.item() for loss, *_ in results} == {results[0][0].item()}


def there_and_back(rank: int, world: int, source: str, state: Tensors, broadcast: bool) -> Tensors:
    """What a program makes of a state that the first rank alone has, if it is broadcast."""
    from autopar import runtime as rt

    built = rt.build(load_source(source).Program)
    own = state if rank == 0 or not broadcast else {name: torch.zeros_like(tensor) for name, tensor in state.items()}
    built.load_full_state_dict(own, broadcast=broadcast)
    return built.full_state_dict()


@pytest.mark.sampled
@pytest.mark.ranks
@pytest.mark.parametrize(("plan_name", "broadcast"), [("zero3_tp", True), ("stages", True), ("stages", False)])
def test_state_goes_in_and_comes_out_as_it_is(plan_name: str, broadcast: bool) -> None:
    """Unequal numbers in every element, so that none can be in another's place."""
    model, _ = zoo.build("llama")
    start = 0
    state = {}
    for name, tensor in model.state_dict().items():
        state[name] = torch.arange(start, start + tensor.numel()).float().reshape(tensor.shape)
        start += tensor.numel()
    what = program("llama", "merged", plan_name)
    for found in pool(what.plan.mesh.num_devices).run(there_and_back, what.source, state, broadcast):
        torch.testing.assert_close(found, state, rtol=0, atol=0)


def test_what_a_state_lacks_is_named_as_in_the_model() -> None:
    model, _ = zoo.build("llama")
    rank, state = program("llama", "merged", "one device").build(), model.state_dict()
    name = "layers.1.attention.key.weight"
    with pytest.raises(autopar.runtime.ProgramError, match=rf"missing: {name}; unexpected: none; other shape: none"):
        rank.load_full_state_dict({key: tensor for key, tensor in state.items() if key != name})
    with pytest.raises(autopar.runtime.ProgramError, match=rf"{name}: expected \(16, 32\), found \(17, 32\)"):
        rank.load_full_state_dict({**state, name: torch.zeros(17, 32)})


@pytest.mark.ranks
def test_bf16_with_masters_in_float32() -> None:
    model, batch = zoo.build("hf_gpt2")
    state = {**model.state_dict(), **dict(model.named_buffers())}
    own = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    low_loss, low = precision.gradients_of(model, own, batch, torch.bfloat16)
    what = program("hf_gpt2", "split", "zero3", "bf16")
    loss, gradients, _, _, weights = pool(2).run(precision.run_rank, what.source, state, batch, 1)[0]
    assert abs(loss - low_loss) <= 2**-7 * abs(low_loss)
    assert {tensor.dtype for tensor in (*gradients.values(), *weights.values())} == {torch.float32}
    total = torch.stack([tensor.norm() for tensor in low.values()]).norm()
    for name, tensor in low.items():
        assert (gradients[name] - tensor).norm() <= 3e-2 * max(tensor.norm(), 1e-2 * total), name


# Pieces on several stages, and checkpoints ----------------------------------------


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(8, 8)

    def forward(self, x: Tensor, weight: Tensor) -> Tensor:
        return torch.relu(self.fc(x)) @ weight


class OneForAll(nn.Module):
    """Every block reads its columns of one matrix; first and last share a vector's two halves."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.columns = nn.Parameter(torch.randn(8, 32) / 3)
        self.halves = nn.Parameter(torch.randn(16))

    def forward(self, x: Tensor) -> Tensor:
        x = x * self.halves[:8]
        for number, block in enumerate(self.blocks):
            x = x + block(x, self.columns[:, number * 8 : number * 8 + 8])
        return (x * self.halves[8:]).square().mean()


class JoinedForAll(nn.Module):
    """Every block reads the same two matrices, joined."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.above, self.below = nn.Parameter(torch.randn(3, 8) / 3), nn.Parameter(torch.randn(5, 8) / 3)

    def forward(self, x: Tensor) -> Tensor:
        weight = torch.cat([self.above, self.below])
        for block in self.blocks:
            x = x + block(x, weight)
        return x.square().mean()


@pytest.mark.ranks
def test_a_packed_parameter_that_two_stages_read() -> None:
    """Each stores it, and gradients are summed."""
    torch.manual_seed(0)
    model, batch = JoinedForAll(), {"x": torch.randn(4, 8)}
    stages = program_of(packed(trace(model, batch)), model, {"pp": 2, "microbatches": 2})
    assert all("above_below" in stage.storage for stage in stages.plan.stages)
    results = pool(2).run(run_rank, stages.source, model.state_dict(), batch, ("adamw",))
    assert not differences(run_single(model, batch, ("adamw",)), results[0])


def train(rank: Any, optimizer: torch.optim.Optimizer, batch: Tensors) -> list[float]:
    losses = []
    for _ in range(2):
        optimizer.zero_grad()
        losses.append(rank.train_step(**batch).item())
        optimizer.step()
    return losses


def save(rank: int, world: int, source: str, state: Tensors, batch: Tensors, folder: str) -> tuple[Any, Tensors]:
    from autopar import runtime as rt

    built = rt.build(load_source(source).Program)
    built.init_from(state, broadcast=False)
    optimizer = torch.optim.AdamW(built.parameters(), lr=0.01)
    train(built, optimizer, batch)
    rt.save_checkpoint(folder, built, optimizer, step=2)
    return train(built, optimizer, batch), built.full_state_dict()


def resume(rank: int, world: int, source: str, batch: Tensors, folder: str) -> tuple[Any, Tensors]:
    from autopar import runtime as rt

    built = rt.build(load_source(source).Program)
    optimizer = torch.optim.AdamW(built.parameters(), lr=0.5)
    assert rt.load_checkpoint(folder, built, optimizer) == 2
    return train(built, optimizer, batch), built.full_state_dict()


@pytest.mark.ranks
@pytest.mark.parametrize("to_stages", [False, True])
def test_pieces_of_one_parameter_on_two_stages(to_stages: bool, tmp_path: Path) -> None:
    """Each stage stores its slices; checkpoints between them and a program of one device that stores the whole."""
    torch.manual_seed(0)
    model, batch = OneForAll(), {"x": torch.randn(4, 8)}
    plain = trace(model, batch)
    own = packed(plain)
    assert len(own.packed) == 6
    stages = program_of(own, model, {"pp": 2, "microbatches": 2})
    assert "columns_part_0" in stages.plan.stages[0].storage and "columns_part_3" in stages.plan.stages[1].storage
    results = pool(2).run(run_rank, stages.source, model.state_dict(), batch, ("adamw",))
    assert not differences(run_single(model, batch, ("adamw",)), results[0])
    first, second = (program_of(plain, model, {}), stages)[:: 1 if to_stages else -1]
    state, world = model.state_dict(), (first.plan.mesh.num_devices, second.plan.mesh.num_devices)
    expected, weights = pool(world[0]).run(save, first.source, state, batch, str(tmp_path))[0]
    for losses, found in pool(world[1]).run(resume, second.source, batch, str(tmp_path)):
        torch.testing.assert_close(losses, expected, rtol=1e-5, atol=0)
        torch.testing.assert_close(found, weights, rtol=1e-5, atol=1e-6)
