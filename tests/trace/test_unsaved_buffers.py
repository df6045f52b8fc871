"""Buffers that no state_dict holds come with the program, also of a model that was made on meta."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autopar
from autopar import runtime as rt
from autopar.program import load_source
from autopar.trace.buffers import unsaved_buffers


class Scaled(nn.Module):
    """With a table, a count, and a mask that its state_dict does not hold."""

    def __init__(self, init: str = "whole") -> None:
        super().__init__()
        self.up, self.init = nn.Linear(4, 4), init
        self.register_buffer("table", torch.linspace(0.1, 1.3, 4), persistent=False)
        self.register_buffer("shift", torch.arange(4), persistent=False)
        self.register_buffer("mask", torch.tensor([True, False, True, True]), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return ((self.up(x) * self.table + self.shift) * self.mask).pow(2).mean()

    def _init_weights(self, module: nn.Module) -> None:
        if module is not self and self.init == "whole":
            module.table.copy_(torch.linspace(0.1, 1.3, 4))
            module.shift.copy_(torch.arange(4))
            module.mask.copy_(torch.tensor([True, False, True, True]))
        elif self.init == "drawn":
            module.table.normal_()
        elif self.init == "halves":
            module.table[0].fill_(1.0)
        else:
            raise NotImplementedError


def batch() -> dict[str, Tensor]:
    return {"x": torch.randn(4, 4, generator=torch.Generator().manual_seed(0))}


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_a_state_dict_is_enough(device: str) -> None:
    model = Scaled()
    with torch.device(device):
        planned: Any = Scaled()
    program = autopar.parallelize(planned, autopar.Mesh("h100"), batch(), search="fast")
    rank = rt.build(load_source(program.source).Program, device="cpu")
    rank.load_full_state_dict(model.state_dict())
    assert rank.train_step(**batch()).item() == pytest.approx(model(**batch()).item(), rel=1e-6)


@pytest.mark.parametrize("init", ["drawn", "halves", "none"])
def test_what_is_not_initialised_whole_and_alike_is_no_value(init: str) -> None:
    with torch.device("meta"):
        model = Scaled(init)
    assert not unsaved_buffers(model)
    assert model.table.is_meta and model.up.weight.is_meta


def test_rotary_frequencies_of_transformers_are_those_of_a_real_model() -> None:
    transformers = pytest.importorskip("transformers")
    sizes = {
        "hidden_size": 32,
        "num_attention_heads": 2,
        "num_hidden_layers": 1,
        "intermediate_size": 64,
        "vocab_size": 64,
    }
    for name, more in (("Llama", {"num_key_value_heads": 2}), ("GPTNeoX", {}), ("Gemma", {"head_dim": 16})):
        config = getattr(transformers, f"{name}Config")(**sizes, **more)
        real = getattr(transformers, f"{name}ForCausalLM")(config)
        with torch.device("meta"):
            model = getattr(transformers, f"{name}ForCausalLM")(config)
        wanted, found = unsaved_buffers(real), unsaved_buffers(model)
        assert found.keys() == wanted.keys() != set()
        assert all(torch.equal(found[key], wanted[key]) for key in wanted), name
