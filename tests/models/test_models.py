"""Every model of models/ builds, trains and exports, on real and on meta tensors."""

from __future__ import annotations

from types import ModuleType

import pytest
import torch
from torch import nn
from torch.export import ExportedProgram

from models import (
    bert,
    dit,
    dlrm,
    gpt,
    inception,
    llama,
    llama_lora,
    lstm,
    mlp,
    moe,
    nas_rnn,
    squeezenet,
    two_towers,
    unet,
    vgg,
    wide_resnet,
)

MODULES = [
    bert, dit, dlrm, gpt, inception, llama, llama_lora, lstm, mlp, moe, nas_rnn, squeezenet, two_towers, unet, vgg,
    wide_resnet,
]  # fmt: skip

# Known sizes: counted from the published models, or the round figures of the papers.
PARAMETER_COUNTS = [
    (bert, bert.bert_base, 109_514_298),
    (bert, bert.bert_large, 335_174_458),
    (dit, dit.dit_s2, pytest.approx(33e6, rel=0.03)),
    (dit, dit.dit_b2, pytest.approx(130e6, rel=0.03)),
    (dit, dit.dit_xl2, pytest.approx(675e6, rel=0.03)),
    (dlrm, dlrm.criteo_kaggle, pytest.approx(540e6, rel=0.03)),
    (gpt, gpt.gpt2, 124_439_808),
    (gpt, gpt.gpt2_xl, 1_557_611_200),
    (gpt, gpt.gpt_2_6b, pytest.approx(2.6e9, rel=0.03)),
    (gpt, gpt.gpt_39b, pytest.approx(39e9, rel=0.03)),
    (inception, inception.inception_v3, 23_834_568),  # torchvision's 27,161,264 without its second head's 3,326,696
    (llama, llama.llama2_7b, 6_738_415_616),
    (llama, llama.llama3_8b, 8_030_261_248),
    (llama, llama.llama3_70b, 70_553_706_496),
    (llama_lora, llama_lora.llama2_7b, 6_738_415_616 + 39_976_960),
    (lstm, lstm.zaremba_medium, pytest.approx(20e6, rel=0.03)),
    (lstm, lstm.zaremba_large, pytest.approx(66e6, rel=0.03)),
    (moe, moe.moe_380m, pytest.approx(380e6, rel=0.03)),
    (moe, moe.moe_2_4b, pytest.approx(2.4e9, rel=0.03)),
    (moe, moe.moe_70b, pytest.approx(70e9, rel=0.03)),
    (nas_rnn, nas_rnn.nas_rnn_taso, 16 * 512**2),
    (squeezenet, squeezenet.squeezenet1_0, 1_248_424),
    (squeezenet, squeezenet.squeezenet1_1, 1_235_496),
    (unet, unet.ddpm_cifar10, 35_746_307),
    (vgg, vgg.vgg19, 143_667_240),
    (wide_resnet, wide_resnet.resnext50, 25_028_904),
    (wide_resnet, wide_resnet.wide_resnet50_2, 68_883_240),
    (wide_resnet, wide_resnet.wide_resnet101_2, 126_886_696),
]


@pytest.fixture(params=MODULES, ids=lambda module: module.__name__)
def module(request: pytest.FixtureRequest) -> ModuleType:
    """One of the modules of models/."""
    return request.param


def build_on(device: str, module: ModuleType) -> tuple[nn.Module, dict[str, torch.Tensor]]:
    """The module's default model and batch, seeded, on `device`."""
    torch.manual_seed(0)
    config = module.Config()
    with torch.device(device):
        return module.build(config), module.example_inputs(config)


def exported(model: nn.Module, inputs: dict[str, torch.Tensor]) -> ExportedProgram:
    """The functional graph that planning starts from."""
    return torch.export.export(model, (), inputs, strict=False).run_decompositions({})


def test_loss_is_a_finite_scalar_and_every_trained_parameter_has_a_gradient(module: ModuleType) -> None:
    model, inputs = build_on("cpu", module)
    loss = model(**inputs)
    loss.backward()
    assert loss.shape == ()
    assert loss.isfinite()
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        assert parameter.grad is not None, name
        assert parameter.grad.isfinite().all(), name
        assert parameter.grad.any(), name


def test_few_steps_on_one_batch_lower_the_loss(module: ModuleType) -> None:
    model, inputs = build_on("cpu", module)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    losses = []
    for _ in range(5):
        optimizer.zero_grad()
        losses.append(model(**inputs))
        losses[-1].backward()
        optimizer.step()
    assert losses[-1] < losses[0]


@pytest.mark.sampled(
    only=("models.gpt", "models.moe", "models.lstm", "models.llama_lora", "models.two_towers", "models.wide_resnet")
)
def test_exports_on_meta(module: ModuleType) -> None:
    model, inputs = build_on("meta", module)
    graph_module = exported(model, inputs).graph_module
    (output,) = graph_module.graph.output_node().args[0][-1:]
    assert output.meta["val"].shape == ()


@pytest.mark.sampled(
    only=(
        "models.bert",
        "models.inception",
        "models.llama_lora",
        "models.nas_rnn",
        "models.squeezenet",
        "models.two_towers",
        "models.vgg",
    )
)
def test_exported_program_computes_what_the_model_computes(module: ModuleType) -> None:
    model, inputs = build_on("cpu", module)
    program = exported(model, inputs).module(check_guards=False)
    assert torch.equal(program(**inputs), model(**inputs))


def test_names_are_equal_in_each_build_and_on_meta(module: ModuleType) -> None:
    real, _ = build_on("cpu", module)
    meta, _ = build_on("meta", module)
    assert real.state_dict().keys() == meta.state_dict().keys()
    assert [name for name, _ in real.named_modules()] == [name for name, _ in meta.named_modules()]


def test_inputs_depend_on_the_seed_only(module: ModuleType) -> None:
    config = module.Config()
    first, again, other = (module.example_inputs(config, seed) for seed in (0, 0, 1))
    for name in first:
        assert torch.equal(first[name], again[name])
        assert not torch.equal(first[name], other[name])


@pytest.mark.parametrize(
    ("module", "preset", "count"), PARAMETER_COUNTS, ids=lambda value: getattr(value, "__name__", "")
)
def test_preset_has_the_published_number_of_parameters(module: ModuleType, preset: object, count: int) -> None:
    with torch.device("meta"):
        model = module.build(preset())
    assert sum(parameter.numel() for parameter in model.parameters()) == count
