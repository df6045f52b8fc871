"""Plans and checkpoints travel: saved under one plan, read under another and by the model itself, trained on alike.

Losses are those of one uninterrupted run on one device within 1e-4, weights after all steps within 1e-3: AdamW's
tolerance in the harness.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

from tests.equivalence import planned, zoo
from tests.equivalence.travel import AFTER, BEFORE, Tensors, optimizer_of, resume, save
from tests.rank_pool import pool


def train(model: nn.Module, optimizer: torch.optim.Optimizer, batch: Tensors, count: int) -> list[float]:
    losses = []
    for _ in range(count):
        optimizer.zero_grad()
        output = model(**batch)
        loss = output if isinstance(output, torch.Tensor) else output["loss"]
        loss.backward()
        losses.append(loss.item())
        optimizer.step()
    return losses


@cache
def uninterrupted(name: str) -> tuple[list[float], Tensors]:
    model, batch = zoo.build(name)
    losses = train(model, optimizer_of(model.parameters()), batch, BEFORE + AFTER)
    return losses, dict(model.state_dict())


OWN: dict[str, dict[str, int]] = {
    "one": {}, "pp": {"pp": 2, "microbatches": 2}, "pp_dp": {"pp": 2, "dp": 2, "microbatches": 2}
}  # fmt: skip


def emitted(model_name: str, plan_name: str) -> tuple[str, int]:
    """The program's source and its number of ranks; "one" is for one device."""
    own = OWN.get(plan_name)
    plan = planned.plan(model_name, plan_name) if own is None else planned.template(model_name, **own)
    return planned.program(model_name, plan).source, plan.mesh.num_devices


def check(name: str, losses: list[float], weights: Tensors) -> None:
    expected, tensors = uninterrupted(name)
    torch.testing.assert_close(losses, expected[BEFORE:], rtol=1e-4, atol=0)
    total = torch.stack([tensor.norm() for tensor in tensors.values() if tensor.is_floating_point()]).norm()
    for key, value in weights.items():
        scale = max(tensors[key].norm(), 1e-4 * total)
        assert (value - tensors[key]).norm() <= 1e-3 * scale, key


@pytest.mark.sampled(only=("hf_gpt2-zero3_tp", "hf_gpt2-pp_dp"))
@pytest.mark.ranks
@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize(("model_name", "saved"), [("hf_gpt2", "zero3_tp"), ("hf_gpt2", "pp_dp"), ("moe", "searched")])
def test_checkpoint_of_four_ranks_goes_on_elsewhere(model_name: str, saved: str, tmp_path: Path) -> None:
    source, world = emitted(model_name, saved)
    model, batch = zoo.build(model_name)
    state = {**model.state_dict(), **dict(model.named_buffers())}
    folder = str(tmp_path)
    losses = pool(world).run(save, source, state, batch, folder)[0]
    assert world == 4
    torch.testing.assert_close(losses, uninterrupted(model_name)[0][:BEFORE], rtol=1e-4, atol=0)
    elsewhere = ("zero2_microbatches", "tp", "one") if saved != "pp_dp" else ("pp", "zero3_tp", "one")
    for plan_name in elsewhere:
        source, world = emitted(model_name, plan_name)
        for found in pool(world).run(resume, source, batch, folder):
            check(model_name, *found)
    read_by_the_model(model_name, tmp_path)


def read_by_the_model(model_name: str, folder: Path) -> None:
    """torch's own functions on the single-device model, which has tied weights under two names."""
    from autopar import runtime as rt

    model, batch = zoo.build(model_name)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    optimizer = optimizer_of(model.parameters())
    tensors, optimizer_state = get_state_dict(model, optimizer)
    kept = {name: tensor for name, tensor in tensors.items() if name not in planned.graph(model_name).tied}
    state = {"model": kept, "optimizer": optimizer_state}
    with pytest.warns(UserWarning, match="single process"):
        dcp.load(state, checkpoint_id=rt.last_checkpoint(folder))
    set_state_dict(model, optimizer, model_state_dict=tensors, optim_state_dict=state["optimizer"])
    check(model_name, train(model, optimizer, batch, AFTER), dict(model.state_dict()))
