"""Lengths that do not divide, heads that are fewer than ranks, batches that are odd: planned, run, and equal."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autopar import errors
from autopar.ir.mesh import make_axes
from autopar.ir.placement import R, S
from autopar.ops import admits
from autopar.trace import trace
from models import llama
from tests.equivalence.hard import assert_equal, operands_of, pin, planned, stored, template

pytestmark = pytest.mark.ranks
SPLIT_CLASSES = {"aten.cross_entropy_loss.default": ("S(1)", "R")}


class Classifier(nn.Module):
    """Two layers with bias and a cross-entropy over classes."""

    def __init__(self, width: int = 32, hidden: int = 250, classes: int = 10) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up = nn.Linear(width, hidden)
        self.down = nn.Linear(hidden, width)
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, classes)

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(self.head(self.norm(x + self.down(F.gelu(self.up(x))))), target)


def samples(count: int, classes: int = 10, width: int = 32) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(count, width, generator=generator)
    return {"x": x, "target": torch.randint(0, classes, (count,), generator=generator)}


def test_hidden_250_with_bias_on_4_ranks() -> None:
    """The pair of columns and rows: slices of 63, 63, 63 and 61, of the bias too."""
    program = template(Classifier(), samples(8), tp=4)
    assert stored(program.plan, "up.weight") == "S(0)" and stored(program.plan, "up.bias") == "S(0)"
    assert stored(program.plan, "down.weight") == "S(1)"
    assert_equal(Classifier(), samples(8), program)


def test_width_250_with_norms_and_bias_is_stored_uneven_by_zero_3() -> None:
    """Model width 250: each parameter that is cut is gathered from slices of 63, 63, 63 and 61."""
    model, batch = Classifier(width=250, hidden=254), samples(8, width=250)
    program = template(model, batch, dp=4, zero=3)
    assert stored(program.plan, "norm.weight") == "S(0)" and stored(program.plan, "up.bias") == "S(0)"
    assert_equal(model, batch, program)


def test_hidden_250_on_two_axes_is_cut_twice() -> None:
    """125 divides by none of 4: on 2 × 2 ranks 250 becomes 63, 62, 63, 62."""
    program = planned(Classifier(), samples(8), {"x": 2, "y": 2}, *pin("up.weight", "S(0)"))
    assert stored(program.plan, "up.weight") == "S(0) S(0)"
    assert_equal(Classifier(), samples(8), program)


class LanguageModel(nn.Module):
    """An embedding and a head over an odd vocabulary, tied or not."""

    def __init__(self, vocabulary: int, width: int = 16, tied: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(vocabulary, width)
        self.middle = nn.Linear(width, width)
        self.head = nn.Linear(width, vocabulary, bias=not tied)
        if tied:
            self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        x = torch.tanh(self.middle(self.embedding(tokens)))
        return F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


def text(vocabulary: int, count: int = 4, length: int = 6) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(2)
    tokens = torch.randint(0, vocabulary, (count, length), generator=generator)
    labels = torch.randint(0, vocabulary, (count, length), generator=generator)
    tokens[0, 0] = labels[0, 1] = vocabulary - 1  # the last rank's last row
    return {"tokens": tokens, "labels": labels}


@pytest.mark.sampled(only=("tied",))
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_vocabulary_50257_on_4_ranks(tied: bool) -> None:
    """Vocabulary-parallel embedding, head and loss: 12,565 rows on three ranks, 12,562 on the last."""
    model, batch = LanguageModel(50_257, tied=tied), text(50_257)
    names = ["embedding.weight"] if tied else ["embedding.weight", "head.weight", "head.bias"]
    rules = [rule for name in names for rule in pin(name, "S(0)")]
    program = planned(model, batch, {"tp": 4}, *rules, only=SPLIT_CLASSES)
    for name in names:
        assert stored(program.plan, name) == "S(0)"
    assert operands_of(program, "aten.embedding.default") == [["S(0)", "R"]]
    assert operands_of(program, "aten.cross_entropy_loss.default")[0][0] == "S(1)"
    assert_equal(model, batch, program)


def test_10_classes_on_4_ranks() -> None:
    """3, 3, 3 and 1 classes: the loss is computed over split classes."""
    model, batch = Classifier(), samples(8)
    program = planned(model, batch, {"tp": 4}, *pin("head.*", "S(0)"), only=SPLIT_CLASSES)
    assert stored(program.plan, "head.weight") == "S(0)" and stored(program.plan, "head.bias") == "S(0)"
    assert operands_of(program, "aten.cross_entropy_loss.default") == [["S(1)", "R"]]
    assert_equal(model, batch, program)


class FusedAttention(nn.Module):
    """One matrix for queries, keys and values, split after the product."""

    def __init__(self, width: int = 32, heads: int = 4) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width)
        self.output = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        parts = [part.unflatten(2, (self.heads, -1)).transpose(1, 2) for part in self.qkv(x).chunk(3, dim=-1)]
        mixed = F.scaled_dot_product_attention(*parts, is_causal=True)
        return self.output(mixed.transpose(1, 2).flatten(2)).square().mean()


def test_fused_qkv_split_on_4_ranks() -> None:
    """Slices of the fused matrix are not heads of each part: heads split after the parts are whole."""
    model, batch = FusedAttention(), {"x": torch.randn(2, 6, 32)}
    only = {"aten.scaled_dot_product_attention.default": ["S(1)"] * 3}
    program = planned(model, batch, {"tp": 4}, *pin("qkv.*", "S(0)"), *pin("output.weight", "S(1)"), only=only)
    assert stored(program.plan, "qkv.weight") == "S(0)"
    assert operands_of(program, "aten.scaled_dot_product_attention.default") == [["S(1)"] * 3]
    assert_equal(model, batch, program)


def test_5_heads_on_4_ranks_are_not_split() -> None:
    """A rank without a head is no plan: the attention runs whole, the products around it split unevenly."""
    model, batch = FusedAttention(width=50, heads=5), {"x": torch.randn(2, 6, 50)}
    program = planned(model, batch, {"tp": 4}, *pin("qkv.*", "S(0)"))
    attention = operands_of(program, "aten.scaled_dot_product_attention.default")[0]
    assert "S(1)" not in attention
    assert_equal(model, batch, program)


def test_7_heads_on_4_ranks_split_2_2_2_1() -> None:
    model, batch = FusedAttention(width=28, heads=7), {"x": torch.randn(2, 6, 28)}
    program = planned(model, batch, {"tp": 4}, only={"aten.scaled_dot_product_attention.default": ["S(1)"] * 3})
    assert operands_of(program, "aten.scaled_dot_product_attention.default") == [["S(1)"] * 3]
    assert_equal(model, batch, program)


@pytest.mark.sampled
@pytest.mark.parametrize(("count", "dp"), [(10, 4), (7, 4), (5, 2)])
@pytest.mark.parametrize("zero", [0, 3])
def test_batch_that_does_not_divide(count: int, dp: int, zero: int) -> None:
    """The last rank holds fewer samples, and the mean is over all."""
    model, batch = Classifier(), samples(count)
    program = template(model, batch, dp=dp, zero=zero)
    assert program.input_layout == {"x": "S(0)", "target": "S(0)"}
    assert_equal(model, batch, program)


def test_batch_of_tokens_that_does_not_divide() -> None:
    """Rows of tokens in uneven slices do not flatten: they are joined before, and the result is right."""
    model, batch = LanguageModel(40), text(40, count=10)
    program = template(model, batch, dp=4)
    assert program.input_layout["tokens"] == "S(0)"
    assert_equal(model, batch, program)


def test_batch_that_does_not_divide_in_microbatches() -> None:
    """Two microbatches of 5 samples, each cut 3 and 2."""
    model, batch = Classifier(), samples(10)
    program = template(model, batch, dp=2, microbatches=2)
    assert program.plan.microbatches == 2 and program.input_layout["x"] == "S(0) S(0)"
    assert_equal(model, batch, program)


def test_batch_that_leaves_a_rank_without_samples_is_refused() -> None:
    message = r"one sample on each of 4 ranks.*batch of 6.*Use a batch of 4 or 8"
    with pytest.raises(errors.InfeasibleError, match=message):
        template(Classifier(), samples(6), dp=4)


def test_microbatches_that_do_not_divide_the_batch_are_refused() -> None:
    with pytest.raises(errors.PlanError, match=r"divides the batch of 10, found 4"):
        template(Classifier(), samples(10), dp=2, microbatches=4)


class Grouped(nn.Module):
    """Query heads in groups, each with one key and value head."""

    def __init__(self, heads: int, kv_heads: int, size: int = 4) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.size = size
        self.query = nn.Linear(32, heads * size)
        self.key, self.value = nn.Linear(32, kv_heads * size), nn.Linear(32, kv_heads * size)
        self.output = nn.Linear(heads * size, 32)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (f(x).unflatten(2, (-1, self.size)).transpose(1, 2) for f in (self.query, self.key, self.value))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.output(mixed.transpose(1, 2).flatten(2)).square().mean()


@pytest.mark.sampled(
    only=(
        "8-1-{'tp': 4}-['S(1)', 'R', 'R']",
        "6-2-{'tp': 4}-None",
        "8-2-{'x': 2, 'y': 2}-['S(1) S(1)', 'S(1) R', 'S(1) R']",
        "8-4-{'tp': 4}-['S(1)', 'S(1)', 'S(1)']",
    )
)
@pytest.mark.parametrize(
    ("heads", "kv_heads", "axes", "expected"),
    [
        (8, 2, {"tp": 4}, ["S(1)", "R", "R"]),  # ranks 0 and 1 share a head, ranks 2 and 3 the other
        (8, 1, {"tp": 4}, ["S(1)", "R", "R"]),
        (6, 2, {"tp": 4}, None),  # 2, 2, 2 and none: refused, so the attention runs whole
        (14, 2, {"tp": 4}, ["S(1)", "R", "R"]),  # 4, 4, 4 and 2: the second rank has heads of both groups
        (8, 2, {"x": 2, "y": 2}, ["S(1) S(1)", "S(1) R", "S(1) R"]),  # groups split first, then their queries
        (8, 4, {"tp": 4}, ["S(1)", "S(1)", "S(1)"]),
    ],
    ids=str,
)
def test_kv_heads_fewer_than_the_axis(heads: int, kv_heads: int, axes: dict[str, int], expected: list[str]) -> None:
    model, batch = Grouped(heads, kv_heads), {"x": torch.randn(2, 5, 32, generator=torch.Generator().manual_seed(4))}
    only = {} if expected is None else {"aten.scaled_dot_product_attention.default": expected}
    program = planned(model, batch, axes, only=only)
    found = operands_of(program, "aten.scaled_dot_product_attention.default")[0]
    assert found == expected or (expected is None and "S(1)" not in found)
    assert ("rt.heads_of" in program.source) == (expected is not None and "R" in expected[1] and kv_heads > 1)
    assert_equal(model, batch, program)


def test_queries_split_outside_of_their_groups_are_refused() -> None:
    """Split by an outer axis alone, queries would meet ranks that hold other groups."""
    graph = trace(Grouped(8, 2), {"x": torch.randn(2, 5, 32)})
    node = next(node for node in graph.nodes if "scaled_dot" in node.op)
    query = (S(1), S(1))
    axes = make_axes(("x", "y"), (2, 2))
    assert admits(graph, node, (query, (S(1), R), (S(1), R)), (query,), axes) is None
    reason = admits(graph, node, (query, (R, S(1)), (R, S(1))), (query,), axes)
    assert reason is not None and "axis x splits queries alone, outside of axis y's groups" in reason


def test_llama_with_2_kv_heads_on_4_ranks() -> None:
    """Tensor parallel over query heads, and every rank makes the keys and values that all ranks share."""
    config = llama.Config(num_layers=1, batch_size=2, seq_len=16)
    torch.manual_seed(0)
    model, batch = llama.build(config), llama.example_inputs(config)
    only = {"aten.scaled_dot_product_attention.default": ["S(1)", "R", "R"]}
    program = planned(model, batch, {"tp": 4}, *pin("layers.*.query.weight", "S(0)"), only=only)
    assert stored(program.plan, "layers.0.attention.query.weight") == "S(0)"
    assert_equal(model, batch, program)
