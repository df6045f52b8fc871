"""Parts of models that people call in loops of their own: towers and decoders of the transformers library, buffers that
forward updates, dropout; under dp, tp and ZeRO-3 equal to one device, with what is before and behind them."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

import autopar
from autopar import runtime as rt
from autopar.planned_part import PlannedPart, Structure
from autopar.program import load_source
from autopar.runtime.part import PartRank, build_part
from tests.rank_pool import RankPool

BATCH, LENGTH, WIDTH = 8, 6, 16


class Normed(nn.Module):
    """Statistics of the batch, which buffers follow."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Conv1d(WIDTH, 24, 3, padding=1), nn.BatchNorm1d(24), nn.Linear(24, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.relu(self.norm(self.first(x.transpose(1, 2)))).transpose(1, 2))


class Dropped(nn.Module):
    """Dropout between two linear layers."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.drop, self.down = nn.Linear(WIDTH, 64), nn.Dropout(0.5), nn.Linear(64, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.drop(torch.relu(self.up(x))))


def _sizes() -> dict[str, Any]:
    return {"num_hidden_layers": 2, "num_attention_heads": 4, "hidden_size": WIDTH, "intermediate_size": 32}


def _llama() -> nn.Module:
    config = transformers.LlamaConfig(**_sizes(), num_key_value_heads=2, vocab_size=32, use_cache=False)
    return transformers.LlamaModel(config)


def _vision() -> nn.Module:
    config = transformers.CLIPVisionConfig(**_sizes(), image_size=16, patch_size=8, projection_dim=8)
    return transformers.CLIPVisionModel(config)


def _decoder() -> nn.Module:
    config = transformers.BartConfig(
        vocab_size=32, d_model=WIDTH, decoder_layers=2, decoder_attention_heads=4, decoder_ffn_dim=32, dropout=0.0,
        max_position_embeddings=32, use_cache=False,
    )  # fmt: skip
    return transformers.models.bart.modeling_bart.BartDecoder(config)


def _rows(x: Tensor) -> dict[str, Tensor]:
    return {"x": x}


def _embedded(x: Tensor) -> dict[str, Tensor]:
    return {"inputs_embeds": x}


def _image(x: Tensor) -> dict[str, Tensor]:
    return {"pixel_values": x.flatten(1)[:, :64].reshape(BATCH, 1, 8, 8).expand(BATCH, 3, 8, 8).repeat(1, 1, 2, 2)}


def _with_memory(x: Tensor) -> dict[str, Tensor]:
    return {"inputs_embeds": x, "encoder_hidden_states": x.flip(1) * 0.5}


KINDS: dict[str, tuple[Callable[[], nn.Module], Callable[[Tensor], dict[str, Tensor]]]] = {
    "batch norm": (Normed, _rows),
    "llama": (_llama, _embedded),
    "vision": (_vision, _image),
    "decoder": (_decoder, _with_memory),
}
PLANS = {"dp": {"dp": 2}, "tp": {"tp": 2}, "zero3": {"dp": 2, "zero": 3}, "both": {"dp": 2, "tp": 2, "zero": 3}}


class Around(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.before, self.behind = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 5)

    def loss(self, part: Any, given: Callable[[Tensor], dict[str, Tensor]], data: Tensor, labels: Tensor) -> Tensor:
        made = part(**given(torch.tanh(self.before(data))))
        rows = made if isinstance(made, Tensor) else made["last_hidden_state"]
        return nn.functional.cross_entropy(self.behind(rows.mean(1)), labels)


def seeded(make: Callable[[], nn.Module]) -> Any:
    torch.manual_seed(3)
    return make()


def example(kind: str) -> dict[str, Tensor]:
    return {name: x.detach() for name, x in KINDS[kind][1](torch.randn(BATCH, LENGTH, WIDTH)).items()}


@cache
def planned(kind: str, template: str) -> PlannedPart:
    made, mesh = seeded(KINDS[kind][0]), autopar.Mesh("cpu", devices_per_node=2 if template != "both" else 4)
    plan = autopar.template_plan(made, mesh, example(kind), part=True, **PLANS[template])
    found = autopar.parallelize(made, mesh, example(kind), plan=plan, part=True)
    assert isinstance(found, PlannedPart)
    return found


def part_on(source: str, kind: str) -> PartRank:
    structure = Structure.of(seeded(KINDS[kind][0]), example(kind))
    part = build_part(load_source(source).Program, None, None, structure.restored)
    part.init_from(seeded(KINDS[kind][0]), broadcast=False)
    return part


def trained(kind: str, part: Any, state: Callable[[], dict[str, Tensor]]) -> dict[str, Tensor]:
    """Losses, and all weights and buffers after three steps."""
    around, generator = seeded(Around), torch.Generator().manual_seed(1)
    optimizer = torch.optim.SGD([*around.parameters(), *part.parameters()], lr=0.1, momentum=0.9)
    found: dict[str, Tensor] = {}
    for step in range(3):
        data = torch.randn(BATCH, LENGTH, WIDTH, generator=generator)
        labels = torch.randint(5, (BATCH,), generator=generator)
        optimizer.zero_grad()
        loss = around.loss(part, KINDS[kind][1], data, labels)
        loss.backward()
        optimizer.step()
        found[f"loss {step}"] = loss.detach()
    found |= {f"around.{name}": x.detach() for name, x in around.named_parameters()}
    return found | {f"part.{name}": x.detach().float() for name, x in state().items()}


def on_ranks(rank: int, world: int, source: str, kind: str) -> dict[str, Tensor]:
    part = part_on(source, kind)
    return trained(kind, part, part.full_state_dict)


@cache
def alone(kind: str) -> dict[str, Tensor]:
    made = seeded(KINDS[kind][0]).train()
    return trained(kind, made, made.state_dict)


@pytest.mark.sampled(only=("batch norm-dp", "llama-both", "vision-tp", "decoder-zero3"))
@pytest.mark.parametrize("template", PLANS)
@pytest.mark.parametrize("kind", KINDS)
def test_a_part_of_this_kind_trains_as_on_one_device(
    kind: str, template: str, rank_pool: Callable[[int], RankPool]
) -> None:  # fmt: skip
    program, wanted = planned(kind, template), alone(kind)
    for found in rank_pool(2 if template != "both" else 4).run(on_ranks, program.source, kind):
        assert found.keys() == wanted.keys()
        for name, x in wanted.items():
            torch.testing.assert_close(
                found[name], x, rtol=2e-4, atol=2e-5, msg=lambda text, name=name: f"{name}: {text}"
            )


def dropped(rank: int, world: int, source: str) -> tuple[Tensor, Tensor, Tensor]:
    """Outputs of two calls of a part with dropout, and the gradient of its input."""
    rt.seed_dropout(7)
    made = seeded(Dropped)
    x = torch.ones(BATCH, LENGTH, WIDTH, requires_grad=True)
    part = build_part(load_source(source).Program, None, None, Structure.of(made, {"x": x.detach()}).restored)
    part.init_from(made, broadcast=False)
    first = part(x)
    first.sum().backward()
    assert x.grad is not None
    return first.detach(), part(x.detach()).detach(), x.grad


def test_dropout_of_a_part_is_one_for_all_ranks_and_another_in_each_call(
    rank_pool: Callable[[int], RankPool],
) -> None:
    made, mesh = seeded(Dropped), autopar.Mesh("cpu", devices_per_node=2)
    given = {"x": torch.ones(BATCH, LENGTH, WIDTH)}
    for template in ({"dp": 2}, {"tp": 2}):
        plan = autopar.template_plan(made, mesh, given, part=True, **template)
        program = autopar.parallelize(made, mesh, given, plan=plan, part=True)
        (first, second, gradient), other = rank_pool(2).run(dropped, program.source)
        assert all(torch.equal(x, y) for x, y in zip((first, second, gradient), other, strict=True))
        assert not torch.equal(first, second)
        assert not torch.allclose(first[0], first[1])  # rows are alike but for what is dropped
