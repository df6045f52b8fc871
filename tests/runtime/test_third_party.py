"""Optimizers that nobody here knows, on shards, stages and packed parameters: five steps equal those of one device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import autopar
from autopar import runtime as rt
from autopar.program import load_source
from autopar.runtime.optimizers import memory
from tests.rank_pool import RankPool
from tests.runtime.test_packed_state import CROSSED, MERGED, SEPARATE, SHAPES, crossed, merged, program, separate
from tests.runtime.third_party import KINDS, Foreach, Lamb, Lion, grouped
from tests.traced import traced_once

PLANS: dict[str, dict[str, int]] = {
    "zero3": {"dp": 2, "zero": 3},
    "tp": {"tp": 2},
    "pp": {"pp": 2, "microbatches": 2},
    "zero1": {"dp": 2, "zero": 1},
    "dp×tp": {"dp": 2, "tp": 2},
    "zero3×pp": {"dp": 2, "zero": 3, "pp": 2, "microbatches": 2},
}
IN_SUITE = ("zero3", "tp", "pp")
ON_ALL = ("lamb", "muon", "adafactor", "torch adafactor", "shampoo", "torch muon")
WITH_CLOSURES = ("sam", "lbfgs")
Weights = dict[str, Tensor]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(8), nn.Linear(8, 16), nn.Linear(16, 8)
        self.scale = nn.Parameter(torch.tensor(1.5))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x)))) * self.scale


class Model(nn.Module):
    """Rows that two ranks do not divide, a number alone, and a weight that the first and the last stage share."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.layers = nn.Embedding(13, 8), nn.ModuleList([Block(), Block()])
        self.head = nn.Linear(8, 13, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x)
        return F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


def model(is_frozen: bool = False) -> Model:
    """is_frozen: the last stage of two has nothing to train."""
    torch.manual_seed(0)
    made = Model().double()
    if is_frozen:
        made.head.weight = nn.Parameter(torch.randn(13, 8, dtype=torch.float64), requires_grad=False)
        made.layers[1].requires_grad_(False)
    return made


def batch(step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    tokens, labels = (torch.randint(13, (4, 6), generator=generator) for _ in range(2))
    return tokens, labels


def made(name: str, params: list[Tensor]) -> Any:
    if name == "torch muon":
        return torch.optim.Muon([p for p in params if p.dim() == 2], lr=0.02)
    return KINDS[name](params)


def train(name: str, params: list[Tensor], step_of: Callable[[int], Any]) -> None:
    optimizer = made(name, params)
    torch.manual_seed(7)
    for step in range(5):

        def closure(step: int = step) -> Any:
            optimizer.zero_grad()
            return step_of(step)

        if name != "lbfgs":
            closure()
        optimizer.step(*([closure] if name in WITH_CLOSURES else []))
    if hasattr(optimizer, "eval"):
        optimizer.eval()


def trained(rank: int, world: int, source: str, weights: Weights, names: list[str], resident_bytes: int) -> Any:
    """All of them, one after the other, with little room for whole tensors."""
    found = {}
    before, memory.RESIDENT_BYTES = memory.RESIDENT_BYTES, resident_bytes
    try:
        for name in names:
            part = rt.build(load_source(source).Program)
            part.load_full_state_dict(weights)
            torch.manual_seed(rank)
            train(
                name,
                [p for p in part.parameters() if p.requires_grad],
                lambda step, part=part: part.train_step(*batch(step)),
            )
            found[name] = part.full_state_dict()
    finally:
        memory.RESIDENT_BYTES = before
    return found


def on_one_device(name: str, is_frozen: bool = False) -> Weights:
    whole = model(is_frozen)

    def step_of(step: int) -> Tensor:
        loss = whole(*batch(step))
        loss.backward()
        return loss.detach()

    train(name, [p for p in whole.parameters() if p.requires_grad], step_of)
    return {key: value.detach() for key, value in whole.state_dict().items()}


def names_on(how: str) -> list[str]:
    """Some on every plan; each of the others on shards, on stages, or on both."""
    others = [name for name in KINDS if name not in ON_ALL]
    chosen = {"zero3": others[::2], "pp": others[1::2], "zero3×pp": ["sam", "lbfgs", "prodigy"]}
    unlike = [] if how in ("zero3", "tp", "zero1", "dp×tp") else ["adam-mini"]
    return [*ON_ALL, *(name for name in dict.fromkeys(chosen.get(how, [])) if name not in unlike)]


def source_of(how: str, is_frozen: bool = False) -> tuple[str, int]:
    options = PLANS[how]
    count = options.get("dp", 1) * options.get("tp", 1) * options.get("pp", 1)
    mesh = autopar.Mesh("cpu", devices_per_node=count)
    with traced_once():
        plan = autopar.template_plan(model(is_frozen), mesh, batch(0), **options)  # type: ignore[arg-type] # all numbers
        return autopar.parallelize(model(is_frozen), mesh, batch(0), plan=plan).source, count


@pytest.mark.sampled(only=("zero3", "tp"))
@pytest.mark.parametrize(
    "how", [how if how in IN_SUITE else pytest.param(how, marks=pytest.mark.whole) for how in PLANS]
)
def test_five_steps_equal_those_of_one_device(how: str, rank_pool: Callable[[int], RankPool]) -> None:
    source, count = source_of(how)
    weights, names = {key: value.clone() for key, value in model().state_dict().items()}, names_on(how)
    every = rank_pool(count).run(trained, source, weights, names, 0 if "pp" in how else 4096)
    for name in names:
        expected = on_one_device(name)
        assert any((expected[key] - weights[key]).abs().max() > 1e-6 for key in weights), name
        for found in every:
            torch.testing.assert_close(found[name], expected, rtol=1e-9, atol=1e-10, msg=lambda m, n=name: f"{n}: {m}")


def test_a_stage_without_trained_parameters_steps_with_the_others(rank_pool: Callable[[int], RankPool]) -> None:
    source, count = source_of("pp", is_frozen=True)
    weights = {key: value.clone() for key, value in model(is_frozen=True).state_dict().items()}
    expected = on_one_device("lamb", is_frozen=True)
    for found in rank_pool(count).run(trained, source, weights, ["lamb"], 0):
        torch.testing.assert_close(found["lamb"], expected, rtol=1e-9, atol=1e-10)


# Packed parameters, and checkpoints ----------------------------------------


def start() -> Weights:
    generator = torch.Generator().manual_seed(0)
    return {f"inner.{name}": torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}


def packed_program(how: str) -> Any:
    declared, of_model = {"separate": (SEPARATE, separate), "merged": (MERGED, merged), "crossed": (CROSSED, crossed)}[
        how
    ]
    stored = {name: "S(1)" if len(shape) == 2 and name in ("c_1", "ab", "q") else "S(0)"
              for name, (shape, _) in declared.items() if len(shape)}  # fmt: skip
    return program({"dp": 2}, declared, stored, of_model)


def packed_steps(rank: int, world: int, hows: list[str], name: str, folder: str) -> Weights:
    """Two steps in each program, in turn, by checkpoints."""
    for turn, how in enumerate(hows):
        part = rt.build(packed_program(how))
        optimizer = KINDS[name](list(part.parameters()))
        if turn:
            rt.load_checkpoint(folder, part, optimizer)
        else:
            part.load_full_state_dict({**start(), "again": start()["inner.k"]})
        for step in range(2):
            optimizer.zero_grad()
            part.train_step(torch.tensor(0.1 * (1 + step + 2 * turn)))
            optimizer.step()
        rt.save_checkpoint(folder, part, optimizer, step=2 * turn + 2)
    return part.full_state_dict()


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize("name", ["lamb", "adafactor", "shampoo", "muon of state"])
def test_packed_parameters_are_stepped_as_the_model_has_them(
    name: str, rank_pool: Callable[[int], RankPool], tmp_path: Any
) -> None:
    expected = {key: nn.Parameter(value) for key, value in start().items()}
    optimizer = KINDS[name](list(expected.values()))
    for step in range(6):
        optimizer.zero_grad()
        terms = [(value * (i + 1)).square().sum() for i, value in enumerate(expected.values())]
        (torch.stack(terms).sum() * torch.tensor(0.1 * (1 + step))).backward()
        optimizer.step()
    for found in rank_pool(2).run(packed_steps, ["merged", "separate", "crossed"], name, str(tmp_path)):
        own = {key: found[key] for key in expected}
        torch.testing.assert_close(own, {key: p.detach() for key, p in expected.items()}, rtol=2e-3, atol=2e-4)


# Refused, and told ----------------------------------------


class Communicates(Lion):
    def update(self, p: Tensor, group: Any) -> None:
        torch.distributed.all_reduce(p.grad)
        super().update(p, group)


class KeepsItself(Lion):
    def update(self, p: Tensor, group: Any) -> None:
        super().update(p, group)
        self.state[p]["same"] = p.data


class NotElementwise(Lamb):
    pass


def refusals(rank: int, world: int) -> list[str]:
    found = []
    rt.declare_optimizer(NotElementwise, looks_at="elements")
    for kind in (Communicates, KeepsItself, NotElementwise):
        part = rt.build(packed_program("separate"))
        part.load_full_state_dict({**start(), "again": start()["inner.k"]})
        optimizer = kind(list(part.parameters()))
        part.train_step(torch.tensor(0.1))
        with pytest.raises(rt.ProgramError) as raised:
            optimizer.step()
        found.append(str(raised.value))
    return found


def test_what_cannot_be_right_is_refused(rank_pool: Callable[[int], RankPool]) -> None:
    for communicates, itself, elementwise in rank_pool(2).run(refusals):
        assert "found Communicates, whose step communicates by itself" in communicates
        assert "found ('same',) of inner.q in KeepsItself, which has the memory of the parameter itself" in itself
        assert "expected NotElementwise to compute each element by itself" in elementwise


def declared(rank: int, world: int, kinds: dict[str, Any]) -> dict[str, tuple[Weights, int]]:
    """Weights after three steps, and bytes that were gathered, of optimizers of which something was told."""
    found = {}
    for looks_at, kind in kinds.items():
        own = type(f"Own{kind.__name__}", (kind,), {})
        if looks_at != "nothing":
            rt.declare_optimizer(own, looks_at=looks_at)
        part = rt.build(packed_program("separate"))
        part.load_full_state_dict({**start(), "again": start()["inner.k"]})
        optimizer = grouped(own)(list(part.parameters()))
        num_bytes = 0
        for _ in range(3):
            optimizer.zero_grad()
            part.train_step(torch.tensor(0.1))
            with rt.count_bytes() as counted:
                optimizer.step()
            num_bytes += sum(counted.values())
        found[looks_at] = part.full_state_dict(), num_bytes
    return found


def test_what_is_told_to_be_elementwise_gathers_nothing(rank_pool: Callable[[int], RankPool]) -> None:
    for found in rank_pool(2).run(declared, {"elements": Lion, "nothing": Lion}):
        torch.testing.assert_close(found["elements"][0], found["nothing"][0])
        assert found["elements"][1] == 0 < found["nothing"][1]


def test_a_step_over_lists_of_parameters_needs_no_word(rank_pool: Callable[[int], RankPool]) -> None:
    for found in rank_pool(2).run(declared, {"nothing": Foreach, "parameters": Foreach}):
        torch.testing.assert_close(found["parameters"][0], found["nothing"][0])
