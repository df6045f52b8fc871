"""What users do with a rank beside its own methods: hooks, copies, other tensors, torch's clipping, autocast."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import autopar
from autopar import runtime as rt
from autopar.emit import emit
from autopar.pipeline import template_of_graph
from autopar.profiler import profiles_of
from autopar.program import load_source
from autopar.staging import cut
from autopar.trace import trace
from tests.rank_pool import RankPool, pool
from tests.runtime.test_optimizers import Sharded, start

MESH = autopar.Mesh("cpu", devices_per_node=2)
HALF = torch.tensor(0.5)


def hooked(rank: int, world: int) -> tuple[dict[str, Tensor], list[str]]:
    """An optimizer in the backward pass, and gradients scaled by hooks, over two steps."""
    part = rt.build(Sharded)
    part.load_full_state_dict(start())
    seen: list[str] = []
    for name, parameter in part.named_parameters():
        step = torch.optim.SGD([parameter], lr=0.1).step

        def act(parameter: Tensor, name: str = name, step: Callable[[], Any] = step) -> None:
            seen.append(name)
            step()
            parameter.grad = None

        parameter.register_hook(lambda gradient: gradient * 2)
        parameter.register_post_accumulate_grad_hook(act)
    for _ in range(2):
        part.train_step(HALF)
    return part.full_state_dict(), seen


def test_hooks_of_parameters_run_once_a_step(rank_pool: Callable[[int], RankPool]) -> None:
    from tests.runtime.test_optimizers import loss_of

    expected = {name: nn.Parameter(tensor) for name, tensor in start().items()}
    optimizer = torch.optim.SGD(expected.values(), lr=0.2)
    for _ in range(2):
        optimizer.zero_grad()
        loss_of(expected, HALF).backward()
        optimizer.step()
    for found, seen in rank_pool(2).run(hooked):
        torch.testing.assert_close(found, {name: p.detach() for name, p in expected.items()})
        assert sorted(seen) == sorted([*expected, *expected])


class Alone(rt.Program):
    """On one rank, over two microbatches, with the parameter itself as the leaf of autograd."""

    AXES = {}  # noqa: RUF012
    MICROBATCHES = 2
    INPUTS = (rt.Input("x", (4,), torch.float32, microbatch_dim=0),)

    def __init__(self, mesh: rt.RankMesh) -> None:
        super().__init__(mesh)
        self.inner = rt.Parameters(weight=rt.Parameter((2,)), table=rt.Buffer((2,)))

    def forward(self, x: Tensor) -> Tensor:
        return (self.inner.weight * x * self.inner.table).sum()


def alone() -> rt.Rank:
    part = rt.build(Alone)
    part.load_full_state_dict({"inner.weight": torch.tensor([1.0, -1.0]), "inner.table": torch.ones(2)})
    return part


def test_hooks_see_the_gradient_of_a_step_not_of_a_microbatch() -> None:
    part, seen = alone(), []
    (parameter,) = part.parameters()
    part.train_step(torch.tensor([1.0, 2.0, 3.0, 4.0]))
    parameter.register_hook(lambda gradient: seen.append(gradient.clone()))
    parameter.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.clone()))
    part.train_step(torch.tensor([1.0, 2.0, 3.0, 4.0]))
    assert [tensor.tolist() for tensor in seen] == [[4.0, 6.0], [8.0, 12.0]]


def _replace(part: rt.Rank) -> None:
    part.get_submodule("inner").weight = nn.Parameter(torch.zeros(2))


def _set_data(part: rt.Rank) -> None:
    next(part.parameters()).data = torch.zeros(2)


def _set_buffer(part: rt.Rank) -> None:
    part.get_submodule("inner").table = torch.zeros(2)


def _replace_module(part: rt.Rank) -> None:
    part.inner = nn.Linear(2, 2)


def _take_module(part: rt.Rank) -> None:
    del part.inner


def _add(part: rt.Rank) -> None:
    part.get_submodule("inner").register_parameter("weight_2", nn.Parameter(torch.zeros(2)))


@pytest.mark.parametrize("act", [_replace, _set_data, _set_buffer, _replace_module, _take_module, _add])
def test_tensors_that_were_replaced_are_refused(act: Callable[[rt.Rank], object]) -> None:
    part = alone()
    act(part)
    with pytest.raises(rt.ProgramError, match=r"places of inner(\.(weight|table|weight_2))?, .*Copy values into"):
        part.train_step(torch.ones(4))
    with pytest.raises(rt.ProgramError, match=r"found others in the places of"):
        part(torch.ones(4))


def test_what_puts_the_same_tensors_in_place_is_not() -> None:
    part = alone()
    part.to("cpu").float()
    part.load_state_dict({name: tensor * 2 for name, tensor in part.state_dict().items()})
    assert part.train_step(torch.ones(4)) == 0
    part.load_state_dict({name: tensor.clone() for name, tensor in part.state_dict().items()}, assign=True)
    with pytest.raises(rt.ProgramError, match=r"load_state_dict\(assign=True\)"):
        part.train_step(torch.ones(4))


def converted(rank: int, world: int) -> None:
    """What torch does to the modules of a rank; each `Couldn't swap` or silence before."""
    part = rt.build(Sharded)
    part.load_full_state_dict(start())
    loss = part.train_step(HALF)
    refused: list[Callable[[], object]] = [
        part.double, part.half, part.bfloat16, part.share_memory, lambda: part.to(torch.bfloat16),
        lambda: part.to("meta"), lambda: part.to_empty(device="cpu"), lambda: nn.ModuleDict({"inner": part}).double(),
    ]  # fmt: skip
    for act in refused:
        with pytest.raises(rt.ProgramError, match=r"expected parameters and buffers to stay torch\.float32 on cpu"):
            act()
    for wrapper in (nn.DataParallel, nn.parallel.DistributedDataParallel):
        with pytest.raises(rt.ProgramError, match=rf"expected a rank by itself, found {wrapper.__name__} around it"):
            wrapper(part)
    assert part.float() is part.to("cpu") is part.cpu() is part
    assert part.train_step(HALF) == loss
    for parameter in part.parameters():
        parameter.grad = torch.zeros(parameter.shape)
    with pytest.raises(rt.ProgramError, match=r"expected a gradient as train_step leaves it.*set by hand"):
        part.train_step(HALF)
    part.zero_grad()
    nn.utils.vector_to_parameters(torch.zeros(sum(p.numel() for p in part.parameters())), part.parameters())
    with pytest.raises(rt.ProgramError, match=r"parameter\.data = "):
        part.train_step(HALF)


def test_conversions_are_refused_before_anything_is_converted(rank_pool: Callable[[int], RankPool]) -> None:
    rank_pool(2).run(converted)


def test_modules_inside_stay_in_the_mode_that_was_planned_for() -> None:
    part = alone()
    inner = part.get_submodule("inner")
    assert inner.train() is inner
    with pytest.raises(rt.ProgramError, match=r"expected to stay in training mode.*after model\.eval\(\)"):
        inner.eval()
    inner.training = False
    with pytest.raises(rt.ProgramError, match="found a change to evaluation"):
        part.train_step(torch.ones(4))


def _grow(*seen: object) -> None:
    raise AssertionError("it ran")


@pytest.mark.parametrize("kind", ["forward", "forward_pre", "full_backward", "full_backward_pre"])
@pytest.mark.parametrize("path", ["", "inner"])
def test_hooks_of_modules_are_refused_where_they_would_not_run(path: str, kind: str) -> None:
    part = alone()
    hook = getattr(part.get_submodule(path), f"register_{kind}_hook")(_grow)
    with pytest.raises(rt.ProgramError, match=f"no hook of {path or 'the rank'} that would not run, found _grow"):
        part.train_step(torch.ones(4))
    runs = not path and kind.startswith("forward")
    with pytest.raises(AssertionError if runs else rt.ProgramError, match="it ran" if runs else "would not run"):
        part(torch.ones(4))
    hook.remove()
    part.train_step(torch.ones(4))


def averaged(rank: int, world: int) -> list[dict[str, Tensor]]:
    part = rt.build(Sharded)
    part.load_full_state_dict(start())
    average = AveragedModel(part, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    optimizer = torch.optim.SGD(part.parameters(), lr=0.1)
    average.update_parameters(part)
    part.train_step(HALF)
    optimizer.step()
    average.update_parameters(part)
    other = copy.deepcopy(part)
    assert other.train_step(HALF) == part.train_step(HALF)
    return [part.full_state_dict(), average.module.full_state_dict(), other.full_state_dict()]


def test_copies_and_averages_of_ranks(rank_pool: Callable[[int], RankPool]) -> None:
    for found, average, other in rank_pool(2).run(averaged):
        torch.testing.assert_close(other, found, rtol=0, atol=0)
        expected = {name: 0.9 * tensor + 0.1 * found[name] for name, tensor in start().items()}
        torch.testing.assert_close(average, expected)


def test_a_rank_is_not_pickled() -> None:
    with pytest.raises(rt.ProgramError, match=r"save rank.full_state_dict\(\), or use rt.save_checkpoint"):
        pickle.dumps(alone())


# Stages ----------------------------------------


class Head(nn.Module):
    """Of two stages, one has a parameter and the other has the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 5)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(self.second(self.first(x).tanh()), y)


def two_stages(first: set[str]) -> tuple[nn.Module, dict[str, Tensor], str]:
    """The model; all operators but those named run on the second of two stages."""
    torch.manual_seed(0)
    model, batch = Head(), {"x": torch.randn(8, 6), "y": torch.arange(8) % 5}
    graph = trace(model, batch)
    plan = template_of_graph(graph, autopar.Mesh("cpu", devices_per_node=1))
    members = {node.name: (int(node.name not in first),) for node in graph.nodes}
    return model, batch, emit(graph, cut(graph, plan, members, [0, 1], "gpipe", MESH, profiles_of(MESH)))


ALL_BUT_THE_LOSS = {"linear", "tanh", "linear_1"}


def empty_stage(rank: int, world: int, source: str, state: Any, batch: Any, folder: str) -> dict[str, Tensor]:
    part = rt.build(load_source(source).Program)
    part.init_from(state, broadcast=False)
    assert bool(list(part.named_parameters())) == (rank == 0)
    optimizer = torch.optim.AdamW(part.parameters(), lr=0.1)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    for step in range(4):
        optimizer.zero_grad()
        part.train_step(**batch)
        part.clip_grad_norm_(0.1)
        optimizer.step()
        schedule.step()
        if step == 1:
            rt.save_checkpoint(folder, part, optimizer, step=step, extra={"schedule": schedule})
            part = copy.deepcopy(part)
            part.load_full_state_dict({name: torch.zeros_like(tensor) for name, tensor in state.items()})
            optimizer = torch.optim.AdamW(part.parameters(), lr=0.3)
            schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1)
            rt.load_checkpoint(folder, part, optimizer, extra={"schedule": schedule})
    return part.full_state_dict()


@pytest.mark.ranks
@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_a_rank_without_parameters_trains(tmp_path: Any) -> None:
    model, batch, source = two_stages(ALL_BUT_THE_LOSS)
    found = pool(2).run(empty_stage, source, model.state_dict(), batch, str(tmp_path))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    for _ in range(4):
        optimizer.zero_grad()
        model(**batch).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        schedule.step()
    for tensors in found:
        torch.testing.assert_close(tensors, dict(model.state_dict()))


def around(rank: int, world: int, source: str, state: Any, batch: Any) -> tuple[list[float], str]:
    """Losses under what users put around a step; what torch's clipping is told."""
    part = rt.build(load_source(source).Program)
    part.init_from(state, broadcast=False)
    losses = [part.train_step(**batch).item()]
    with torch.autocast("cpu", torch.bfloat16), pytest.warns(UserWarning, match='plan with precision="bf16"'):
        losses.append(part.train_step(**batch).item())
    with torch.autocast("cpu", torch.bfloat16), pytest.warns(UserWarning, match='plan with precision="bf16"'):
        losses.append(part(**batch).item())
    with torch.no_grad():
        losses.append(part.train_step(**batch).item())
    with torch.inference_mode():
        losses.append(part.train_step(**{name: value.clone() for name, value in batch.items()}).item())
    norm = part.clip_grad_norm_(1e9)
    own = [parameter.grad.clone() for parameter in part.parameters()]
    with pytest.raises(rt.ProgramError) as raised:
        torch.nn.utils.clip_grad_norm_(part.parameters(), 0.1)
    with pytest.raises(rt.ProgramError, match="or get_total_norm"):
        torch.nn.utils.get_total_norm([parameter.grad for parameter in part.parameters()])
    assert all(torch.equal(p.grad, held) for p, held in zip(part.parameters(), own, strict=True)), "as it was"
    return [*losses, norm.item()], str(raised.value)


@pytest.mark.ranks
def test_steps_under_other_modes_and_clipping_by_torch() -> None:
    model, batch, source = two_stages({"linear", "tanh"})
    loss = model(**batch)
    loss.backward()
    norm = 4 * torch.nn.utils.clip_grad_norm_(model.parameters(), 1e9).item()
    for found, told in pool(2).run(around, source, model.state_dict(), batch):
        assert found == pytest.approx([loss.item()] * 5 + [norm], rel=1e-5)
        assert "expected rank.clip_grad_norm_(max_norm), found torch.nn.utils.clip_grad_norm_" in told


def numbers_of(tensors: Iterable[Tensor]) -> list[float]:
    """What training loops log of gradients and weights, and decide by."""
    return [
        number
        for x in (tensor.detach() for tensor in tensors)
        for number in (
            x.norm().item(), float(x.sum()), x.abs().max().item(), float(x.mean()), float(bool(x.norm() > 1.5)),
            int((x > 0).sum()), (x - x.mean(-1, keepdim=True)).abs().sum().item(), x.square().sum().sqrt().item(),
        )
    ]  # fmt: skip


def numbers_taken_out(rank: int, world: int) -> list[float]:
    part = rt.build(Sharded)
    part.load_full_state_dict(start())
    part.train_step(HALF)
    every = dict(part.named_parameters())
    even = [every[f"inner.{name}"] for name in ("even", "uneven", "columns", "whole", "vector")]
    return numbers_of([*(parameter.grad for parameter in even), *even])


def test_numbers_taken_out_of_gradients_are_those_of_one_device(rank_pool: Callable[[int], RankPool]) -> None:
    """`p.grad.norm().item()` of a shard was a part of the norm, another one on each rank, and nobody was told."""
    from tests.runtime.test_optimizers import loss_of

    every = {name: nn.Parameter(tensor) for name, tensor in start().items()}
    loss_of(every, HALF).backward()
    even = [every[f"inner.{name}"] for name in ("even", "uneven", "columns", "whole", "vector")]
    expected = numbers_of([*(parameter.grad for parameter in even), *even])
    for found in rank_pool(2).run(numbers_taken_out):
        assert found == pytest.approx(expected, rel=1e-5)
