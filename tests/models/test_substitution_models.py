"""What is particular to the models of the substitution benchmark, and that their plans compute what they compute."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import pytest
import torch

import autopar
from models import bert, llama, llama_lora, nas_rnn, squeezenet, vgg, wide_resnet
from tests.equivalence.step import compare, step_alone, step_on_rank
from tests.rank_pool import pool

CASES: dict[str, tuple[ModuleType, Any, dict[str, int]]] = {
    "bert": (bert, bert.Config(num_layers=1), {"tp": 2}),
    "llama_lora": (llama_lora, llama_lora.Config(num_layers=1), {"tp": 2}),
    "llama_lora_weight": (llama_lora, llama_lora.Config(num_layers=1, adapts="weight"), {"tp": 2}),
    "nas_rnn": (nas_rnn, nas_rnn.Config(num_steps=2), {"tp": 2}),
    "resnext": (wide_resnet, wide_resnet.Config(depths=(1,), bottleneck=True, groups=4), {"dp": 2}),
    "squeezenet": (squeezenet, squeezenet.Config(), {"dp": 2}),
    "vgg": (vgg, vgg.Config(), {"tp": 2}),
}


@pytest.mark.sampled(only=("nas_rnn", "llama_lora_weight", "resnext"))
@pytest.mark.ranks
@pytest.mark.parametrize("name", CASES)
def test_a_plan_of_two_ranks_computes_what_the_model_computes(name: str) -> None:
    module, config, choices = CASES[name]
    torch.manual_seed(0)
    model, batch = module.build(config), module.example_inputs(config)
    plan = autopar.template_plan(model, autopar.Mesh("cpu", devices_per_node=2), batch, **choices)
    program = autopar.parallelize(model, plan.mesh, batch, plan=plan)
    split = plan.stage.inputs if "dp" in choices else {n: s.placement for n, s in plan.stage.storage.items()}
    assert any(str(placement[0]).startswith("S") for placement in split.values())
    state = {**model.state_dict(), **dict(model.named_buffers())}
    ranks = pool(2).run(step_on_rank, program.source, state, batch)
    faults = compare(step_alone(model, batch), ranks, plan.predicted.comm_bytes).faults()
    assert not faults, "\n".join(faults)


def test_adapters_that_start_at_zero_leave_the_model_as_it_is() -> None:
    config = llama_lora.Config(initial_std=0.0)
    torch.manual_seed(0)
    adapted, plain = llama_lora.build(config), llama.build(config)
    frozen = {name.replace(".base", ""): p for name, p in adapted.state_dict().items()}
    plain.load_state_dict({name: frozen[name] for name in plain.state_dict()})
    batch = llama_lora.example_inputs(config)
    torch.testing.assert_close(adapted(**batch), plain(**batch))


def test_only_adapters_are_trained_and_all_linears_of_layers_have_one() -> None:
    config = llama_lora.Config()
    model = llama_lora.build(config)
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert all(name.endswith(("down.weight", "up.weight")) and "base" not in name for name in trained)
    assert len(trained) == config.num_layers * 7 * 2


def test_adapters_on_weights_compute_what_those_on_outputs_do() -> None:
    """With the names that parametrizations give them."""
    beside, within = (llama_lora.build(llama_lora.Config(adapts=adapts)) for adapts in ("output", "weight"))
    names = {".base.weight": "original", ".down.weight": "0.down", ".up.weight": "0.up"}

    def named(name: str) -> str:
        ending = next((ending for ending in names if name.endswith(ending)), None)
        return f"{name.removesuffix(ending)}.parametrizations.weight.{names[ending]}" if ending else name

    within.load_state_dict({named(name): tensor for name, tensor in beside.state_dict().items()})
    batch = llama_lora.example_inputs(llama_lora.Config())
    losses = [model(**batch) for model in (beside, within)]
    torch.testing.assert_close(*losses)
    for loss in losses:
        loss.backward()
    gradients = [{n: p.grad for n, p in model.named_parameters() if p.grad is not None} for model in (beside, within)]
    torch.testing.assert_close({named(name): gradient for name, gradient in gradients[0].items()}, gradients[1])


def test_resnext_blocks_have_groups_in_the_middle() -> None:
    block, _ = wide_resnet.block(wide_resnet.Config(bottleneck=True, groups=4), channels_in=6, channels=8, stride=1)
    assert [convolution.conv.groups for convolution in block.convolutions] == [1, 4, 1]


def test_squeezenet_pools_before_the_fires_it_says() -> None:
    config = squeezenet.Config(image_size=32, pooled=(0, 1))
    sizes: list[int] = []
    model = squeezenet.build(config)
    for fire in model.fires:
        fire.register_forward_hook(lambda _, inputs, __: sizes.append(inputs[0].shape[2]))
    model(**squeezenet.example_inputs(config))
    assert sizes == [7, 3]
