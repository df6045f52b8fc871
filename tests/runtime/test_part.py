"""A part of a model in a loop of the user's own: equal to one device in outputs, in gradients of the inputs, of the
part's weights and of the modules around it, and in weights after steps; under dp, tp and ZeRO-3, on 2 and 4 ranks."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

import autopar
from autopar.errors import PlanError
from autopar.planned_part import PlannedPart, Structure
from autopar.program import load_source
from autopar.runtime.errors import ProgramError
from autopar.runtime.part import PartRank, build_part
from autopar.runtime.placement import local_slices, parse_placement
from tests.rank_pool import RankPool

BATCH, LENGTH, WIDTH = 8, 4, 16


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 32), nn.Linear(32, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


class Tower(nn.Module):
    """Two inputs that have gradients, one of integers; a dict of a tensor of rows, a pooled one, and a number."""

    def __init__(self) -> None:
        super().__init__()
        self.kinds = nn.Embedding(3, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(3))

    def forward(self, x: Tensor, scale: Tensor, kinds: Tensor) -> dict[str, Any]:
        x = x + self.kinds(kinds)[:, None]
        for block in self.blocks:
            x = block(x)
        return {"rows": x * scale, "more": (x.mean(1), x.square().mean())}


class Around(nn.Module):
    """The user's own modules before and behind the tower."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.behind = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 5)
        self.scale = nn.Parameter(torch.ones(WIDTH))

    def loss(self, tower: Any, data: Tensor, kinds: Tensor, labels: Tensor, **how: Any) -> Tensor:
        found = tower(torch.tanh(self.before(data)), self.scale, kinds, **how)
        pooled, number = found["more"]
        return nn.functional.cross_entropy(self.behind(found["rows"].sum(1) + pooled), labels) + 0.1 * number


def seeded(module: Callable[[], nn.Module]) -> Any:
    torch.manual_seed(3)
    return module()


def batches(count: int = 3) -> list[tuple[Tensor, Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    return [
        (
            torch.randn(BATCH, LENGTH, WIDTH, generator=generator),
            torch.randint(3, (BATCH,), generator=generator),
            torch.randint(5, (BATCH,), generator=generator),
        )
        for _ in range(count)
    ]


def example() -> tuple[Tensor, Tensor, Tensor]:
    return torch.randn(BATCH, LENGTH, WIDTH), torch.ones(WIDTH), torch.zeros(BATCH, dtype=torch.long)


@cache
def planned(ranks: int, **template: int) -> PlannedPart:
    mesh, tower = autopar.Mesh("cpu", devices_per_node=ranks), seeded(Tower)
    plan = autopar.template_plan(tower, mesh, example(), part=True, **template)
    found = autopar.parallelize(tower, mesh, example(), plan=plan, part=True)
    assert isinstance(found, PlannedPart) and found.plan.checked_against_eager == "yes"
    return found


def part_on(source: str) -> PartRank:
    restored = Structure.of(seeded(Tower), example()).restored
    part = build_part(load_source(source).Program, None, None, restored)
    part.init_from(seeded(Tower), broadcast=False)
    return part


def trained(around: Around, tower: Any, weights: Callable[[], dict[str, Tensor]], **how: Any) -> dict[str, Tensor]:
    """Losses, gradients of the last step and weights after all."""
    optimizer = torch.optim.SGD([*around.parameters(), *tower.parameters()], lr=0.1, momentum=0.9)
    found: dict[str, Tensor] = {}
    for number, batch in enumerate(batches()):
        optimizer.zero_grad()
        loss = around.loss(tower, *batch, **how)
        loss.backward()
        found[f"loss {number}"] = loss.detach()
        found |= {f"gradient {name}": p.grad.clone() for name, p in around.named_parameters() if p.grad is not None}
        optimizer.step()
    found |= {name: x.detach() for name, x in around.named_parameters()}
    return found | {f"tower.{name}": x.detach() for name, x in weights().items()}


def on_ranks(rank: int, world: int, source: str) -> dict[str, Tensor]:
    part = part_on(source)
    return trained(seeded(Around), part, part.full_state_dict)


def assert_equal(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> None:
    assert found.keys() == wanted.keys()
    for name, x in wanted.items():
        torch.testing.assert_close(found[name], x, rtol=2e-4, atol=2e-5, msg=lambda text, name=name: f"{name}: {text}")


@cache
def alone() -> dict[str, Tensor]:
    tower = seeded(Tower)
    return trained(seeded(Around), tower, tower.state_dict)


PLANS = [
    (2, {"dp": 2}),
    (2, {"tp": 2}),
    (2, {"dp": 2, "zero": 3}),
    (4, {"dp": 2, "tp": 2}),
    (4, {"dp": 2, "tp": 2, "zero": 3}),
]


@pytest.mark.sampled(only=("2 {'tp': 2}", "4 {'dp': 2, 'tp': 2, 'zero': 3}"))
@pytest.mark.parametrize(("ranks", "template"), PLANS, ids=[f"{n} {t}" for n, t in PLANS])
def test_a_part_trains_as_on_one_device(
    ranks: int, template: dict[str, int], rank_pool: Callable[[int], RankPool]
) -> None:  # fmt: skip
    program = planned(ranks, **template)
    for found in rank_pool(ranks).run(on_ranks, program.source):
        assert_equal(found, alone())


# Layouts ----------------------------------------


def in_layouts(rank: int, world: int, source: str) -> dict[str, Any]:
    """DTensors, and local slices, against whole tensors: outputs, and gradients of inputs, put together again."""
    part = part_on(source)
    mesh = part._mesh.device_mesh
    data, kinds, _ = batches(1)[0]
    found: dict[str, Any] = {}
    for name in ("whole", "DTensor", "other DTensor", "local"):
        x, scale = data.clone().requires_grad_(), torch.ones(WIDTH, requires_grad=True)
        if "DTensor" in name:
            cut = [Shard(0), Replicate()] if name == "DTensor" else [Replicate(), Shard(2)]
            own = distribute_tensor(x, mesh, cut).detach().requires_grad_()
            others = [distribute_tensor(t, mesh, [Replicate()] * 2) for t in (scale, kinds)]
            result = part(own, *others)
            rows = result["rows"].full_tensor()
            assert result["rows"].placements == (Shard(0), Replicate())
            result["rows"].full_tensor().square().sum().backward()
            gradient = own.grad.full_tensor()
        elif name == "local":
            program, axes = part._locals[0].program, part._mesh.axes
            types = {spec.name: (spec.shape, parse_placement(spec.placement, 2)) for spec in program.INPUTS}
            slices = {name: local_slices(*told, axes) for name, told in types.items()}
            own = x.detach()[slices["x"]].clone().requires_grad_()
            result = part(own, scale.detach()[slices["scale"]], kinds[slices["kinds"]], local=True)
            rows = result["rows"]
            rows.square().sum().backward()
            gradient = own.grad
            found["own"] = slices["x"]
        else:
            result = part(x, scale, kinds)
            rows = result["rows"]
            rows.square().sum().backward()
            gradient = x.grad
        found[name] = rows.detach(), gradient, part.full_gradients()["blocks.1.up.weight"].clone()
        for parameter in part.parameters():
            parameter.grad = None
    with torch.no_grad():
        found["without gradients"] = part(data, torch.ones(WIDTH), kinds)["rows"]
    return found


def test_inputs_and_outputs_as_dtensors_and_local_slices(rank_pool: Callable[[int], RankPool]) -> None:
    program = planned(4, dp=2, tp=2)
    tower, (data, kinds, _) = seeded(Tower), batches(1)[0]
    x = data.clone().requires_grad_()
    rows = tower(x, torch.ones(WIDTH), kinds)["rows"]
    rows.square().sum().backward()
    wanted = rows.detach(), x.grad, tower.blocks[1].up.weight.grad
    for found in rank_pool(4).run(in_layouts, program.source):
        half = found.pop("own")
        torch.testing.assert_close(found.pop("without gradients"), wanted[0], rtol=1e-4, atol=1e-5)
        for name, (made, gradient, of_weight) in found.items():
            place = half if name == "local" else slice(None)
            own = wanted[0][place], wanted[1][place], wanted[2]
            for one, other in zip((made, gradient, of_weight), own, strict=True):
                torch.testing.assert_close(
                    one, other, rtol=1e-4, atol=1e-5, msg=lambda text, name=name: f"{name}: {text}"
                )


def refused(rank: int, world: int, source: str) -> list[str]:
    part = part_on(source)
    data, kinds, _ = batches(1)[0]
    scale, mesh = torch.ones(WIDTH), part._mesh.device_mesh
    other = init_device_mesh("cpu", (world,))
    spread = [distribute_tensor(t, mesh, [Replicate()] * 2) for t in (data, scale, kinds)]
    calls: list[Callable[[], Any]] = [
        lambda: part(data[:4], scale, kinds),
        lambda: part(data, scale, kinds, local=True),
        lambda: part(data.double(), scale, kinds),
        lambda: part(distribute_tensor(data, other, [Shard(0)]), *spread[1:]),
        lambda: part(spread[0], scale, spread[2]),
        lambda: part(DTensor.from_local(data, mesh, [Partial(), Replicate()]), *spread[1:]),
        lambda: part(*spread, local=True),
        lambda: part.train_step(data, scale, kinds),
        lambda: [part(data, scale, kinds), part(data, scale, kinds)],
    ]
    return [told(call) for call in calls]


def told(call: Callable[[], Any]) -> str:
    try:
        call()
    except ProgramError as error:
        return str(error)
    return "nothing"


def test_other_layouts_are_refused_in_words(rank_pool: Callable[[int], RankPool]) -> None:
    program = planned(4, dp=2, tp=2)
    wanted = (
        "whole tensor", "this rank's shard", "float32", "the program's mesh", "all as DTensors", "Shard or Replicate",
        "a DTensor says itself", "call it", "backward pass of the last call",
    )  # fmt: skip
    for found in rank_pool(4).run(refused, program.source):
        assert [part for part, text in zip(wanted, found, strict=True) if part not in text or "found" not in text] == []


def test_what_no_part_can_be_is_refused() -> None:
    mesh, tower = autopar.Mesh("cpu", devices_per_node=2), seeded(Tower)
    for wrong in (
        {"pp": 2},
        {"dp": 2, "microbatches": 2},
        {"dp": 2, "loss_fn": lambda made: made["more"][1]},
        {"dp": 2, "mode": "inference"},
    ):
        with pytest.raises(PlanError, match="a part of a model"):
            autopar.template_plan(tower, mesh, example(), part=True, **wrong)


def test_a_search_plans_a_part(tmp_path: Any) -> None:
    program = autopar.parallelize(
        seeded(Tower), autopar.Mesh("cpu", devices_per_node=2), example(), part=True, search="fast"
    )
    assert len(program.plan.stages) == program.plan.microbatches == 1
    assert sorted(path.name for path in program.save(tmp_path).iterdir()) == ["plan.json", "program.py", "weights.pt"]
    with pytest.raises(PlanError, match="a loop of the user's own"):
        program.save_traced(tmp_path)
