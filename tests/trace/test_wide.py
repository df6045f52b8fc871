"""In bf16, buffers that the model computes with in float32 stay float32; all else is as in the cast model."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import autopar
from autopar.ir.graph import Graph
from autopar.trace import trace


class Statistics(nn.Module):
    """A counter, a running mean that is also read, a table that is moved alone, frequencies, a batch norm."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.norm, self.head = nn.BatchNorm1d(8), nn.Linear(8, 4)
        self.register_buffer("steps", torch.tensor(0.0))
        self.register_buffer("average", torch.zeros(8))
        self.register_buffer("table", torch.rand(16, 8), persistent=False)
        self.register_buffer("frequencies", 1.0 / 10_000 ** (torch.arange(4) / 4), persistent=False)
        self.register_buffer("slope", torch.tensor([0.5, 0.25, 0.125, 0.0625]))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        h = self.norm(x) + self.table[: len(x)]
        with torch.no_grad():
            self.steps += 1
            self.average.mul_(0.9).add_(h.mean(0), alpha=0.1)
        positions = torch.arange(1000, 1000 + len(x)).type_as(self.frequencies)
        angles = torch.outer(positions, self.frequencies).cos()
        return F.cross_entropy(self.head(h - self.average) * angles * self.slope, y)


def batch() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return {"x": torch.randn(16, 8, generator=generator), "y": torch.randint(4, (16,), generator=generator)}


def dtypes(graph: Graph) -> dict[str, str]:
    return {item.name: graph.tensors[item.tensor].dtype for item in graph.stored if item.kind == "buffer"}


def test_what_is_computed_with_stays_float32() -> None:
    graph = trace(Statistics(), batch(), compute_dtype=torch.bfloat16)
    found = dtypes(graph)
    wide = {"steps", "average", "frequencies", "norm.running_mean", "norm.running_var"}
    assert {name for name, dtype in found.items() if dtype == "float32"} == wide
    assert {name for name, dtype in found.items() if dtype == "bfloat16"} == {"table", "slope"}
    updates = {name: graph.tensors[value].dtype for name, value in graph.mutations.items() if name in wide}
    assert updates == dict.fromkeys(wide - {"frequencies"}, "float32")
    cos, linear = (next(node for node in graph.nodes if name in node.op) for name in ("cos", "linear"))
    assert graph.tensors[cos.operands[0]].dtype == "float32", "positions are rounded"
    assert {graph.tensors[name].dtype for name in linear.operands} == {"bfloat16"}


def test_statistics_go_on_where_bfloat16_would_stand_still() -> None:
    model = Statistics()
    model.steps.fill_(512.0)  # 513 is no bfloat16
    rank = autopar.parallelize(model, autopar.Mesh("cpu"), batch(), precision="bf16", search="fast").build()
    for _ in range(3):
        rank.train_step(**batch())
    state = rank.full_state_dict()
    assert state["steps"].item() == 515.0
    with torch.no_grad():
        for _ in range(3):
            model(**batch())
    for name in ("average", "norm.running_mean", "norm.running_var"):
        torch.testing.assert_close(state[name], dict(model.named_buffers())[name], rtol=1e-2, atol=2e-3)
    assert state["norm.running_mean"].bfloat16().float().ne(state["norm.running_mean"]).any(), "it was rounded"


def test_other_precisions_are_left_alone() -> None:
    graph = trace(Statistics().bfloat16(), {**batch(), "x": batch()["x"].bfloat16()})
    assert set(dtypes(graph).values()) == {"bfloat16", "int64"}


def rotary() -> dict[str, tuple[str, dict[str, object]]]:
    gqa = {"num_key_value_heads": 1, "head_dim": 64}
    return {
        "llama": ("Llama", {**gqa, "rope_theta": 5e5}),
        "mistral": ("Mistral", gqa),
        "qwen2": ("Qwen2", {"num_key_value_heads": 1}),
        "gemma2": ("Gemma2", gqa),
        "gpt_neox": ("GPTNeoX", {"rotary_pct": 0.5}),
        "phi": ("Phi", {}),
        "olmo2": ("Olmo2", {"num_key_value_heads": 2}),
    }


@pytest.mark.sampled(only=("llama", "gemma2", "gpt_neox"))
@pytest.mark.sweep
@pytest.mark.parametrize("name", rotary())
def test_rotary_models_are_as_near_to_float32_as_transformers_own_bf16(name: str, tmp_path: object) -> None:
    """At length 2,048, with attention that looks at places: rounded frequencies are off several times as far."""
    theirs, ours = errors_of(name, str(tmp_path))
    assert ours <= 1.02 * theirs


def errors_of(name: str, folder: str) -> tuple[float, float]:
    """How far the logits of a model are from float32: of transformers' own bf16, of a program's.

    folder: where the model is saved, for transformers to read it in bf16.
    """
    transformers = pytest.importorskip("transformers")
    length, (kind, more) = 2048, rotary()[name]
    config = getattr(transformers, f"{kind}Config")(
        vocab_size=512, hidden_size=128, intermediate_size=256, num_hidden_layers=2, num_attention_heads=2,
        max_position_embeddings=length, use_cache=False, **more,
    )  # fmt: skip
    torch.manual_seed(0)
    model = getattr(transformers, f"{kind}ForCausalLM")(config).eval()
    with torch.no_grad():
        for path, parameter in model.named_parameters():
            if path.endswith(("q_proj.weight", "k_proj.weight", "query_key_value.weight")):
                parameter.mul_(4 if "query_key" in path else 8)
    ids = torch.randint(512, (1, length))
    inputs = {"input_ids": ids, "labels": ids}
    model.save_pretrained(folder)
    theirs = type(model).from_pretrained(folder, dtype=torch.bfloat16).eval()
    program = autopar.parallelize(
        model, autopar.Mesh("cpu"), inputs, mode="inference", precision="bf16", search="fast"
    ).build()
    with torch.no_grad():
        right = model(**inputs).logits
        return _error(theirs(**inputs).logits, right), _error(_logits(program(**inputs)), right)


def _logits(outputs: tuple[Tensor, ...]) -> Tensor:
    return next(output for output in outputs if output.dim() == 3)


def _error(found: Tensor, right: Tensor) -> float:
    """Of the far half of positions, relative, in the mean."""
    difference = (found.float() - right).norm(dim=-1) / right.norm(dim=-1)
    return float(difference[:, right.shape[1] // 2 :].mean())
