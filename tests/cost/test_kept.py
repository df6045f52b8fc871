"""No operator keeps more for its backward pass than its row says, over all sample calls that rules are proved with."""

from __future__ import annotations

import warnings
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn

from autopar.cost.memory import saved_values
from autopar.ops.saved import Extra
from tests.ops.interpreter import call, make_case
from tests.ops.long_tail_samples import long_tail
from tests.ops.samples import Sample, close, registry_samples, table_samples

RUN_BY_OTHERS = (
    "autopar.routed_experts.default", "autopar.context_attention.default", "autopar.window_attention.default",
)  # fmt: skip
"""On ranks a function of the runtime runs in their place, whose memory tests of their own measure."""
SLACK_BYTES = 160
"""Statistics of channels, biases and numbers, which are large beside samples alone."""


def _samples() -> list[Sample]:
    torch.manual_seed(0)
    found = (*table_samples(), *registry_samples(), *long_tail())
    return [sample for sample in found if sample.op not in RUN_BY_OTHERS]


def test_no_operator_keeps_more_than_its_row_says() -> None:
    """A gather kept what it reads, an index_add what it adds, recurrent layers their gates: none was counted."""
    samples = _samples()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        compared = [(sample, *found) for sample in samples for found in _kept_and_said(sample)]
    assert len(compared) > 350
    wrong = [f"{sample} keeps {kept}, {said} said" for sample, kept, said in compared if kept > said + SLACK_BYTES]
    assert not wrong, "\n".join(wrong)


def _kept_and_said(sample: Sample) -> Iterator[tuple[int, int]]:
    """Bytes of the storages that a sample's operator keeps, and those that are said; nothing where it keeps nothing."""
    case = make_case(*sample)
    tensors, node = case.graph.tensors, case.node
    pairs = zip(node.operands, case.operands, strict=True)
    operands = [x.clone().requires_grad_(tensors[name].differentiable) for name, x in pairs]
    if not any(x.requires_grad for x in operands):
        return
    kept = dict[int, Tensor]()  # alive, so that no address is used twice
    with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.setdefault(x.untyped_storage().data_ptr(), x), _same):
        results = call(sample.op, node.args, node.kwargs, operands)
    if any(x.requires_grad for x in results):
        said = saved_values(node, case.graph, "cpu")
        extras = sum(one.num_bytes(tensors[one.like].shape) for one in said if isinstance(one, Extra))
        named = sum(tensors[one].num_bytes for one in said if isinstance(one, str))
        yield sum(x.untyped_storage().nbytes() for x in kept.values()), extras + named


def _same(x: Tensor) -> Tensor:
    return x


@pytest.mark.parametrize("both", [False, True])
@pytest.mark.parametrize("kind", ["lstm", "gru", "rnn_tanh"])
def test_recurrent_layers(kind: str, both: bool) -> None:
    """In float32, for which CPUs have other kernels of an LSTM; outputs, gates and states of each position."""
    made = {"lstm": nn.LSTM, "gru": nn.GRU, "rnn_tanh": nn.RNN}[kind](48, 32, 2, bidirectional=both)
    state = torch.randn(4 if both else 2, 8, 32)
    states = [state, state.clone()] if kind == "lstm" else state
    given = torch.randn(24, 8, 48, requires_grad=True), states, list(made._flat_weights)
    _assert_not_above(close(f"{kind}.input", *given, True, 2, 0.0, True, both, False), 5.5)


@pytest.mark.parametrize(("query", "keys"), [((6,), (6,)), ((2, 4), (1, 4)), ((2, 4), (2, 1)), ((2, 4), (2, 4))])
def test_attention_of_rows_without_heads_and_of_broadcast_keys(query: tuple[int, ...], keys: tuple[int, ...]) -> None:
    """CPUs have no fused kernel for those: all scores are kept, which were not counted."""
    x, key, value = (torch.randn(*batch, 64, 8, requires_grad=True) for batch in (query, keys, keys))
    _assert_not_above(close("scaled_dot_product_attention.default", x, key, value), 1.6)


def test_a_product_of_stacks_keeps_what_it_broadcasts_as_a_copy() -> None:
    left, right = torch.randn(1, 4, 32, 16, requires_grad=True), torch.randn(6, 1, 16, 16, requires_grad=True)
    _assert_not_above(close("matmul.default", left, right), 1.1)


def _assert_not_above(sample: Sample, most: float) -> None:
    """What an operator keeps is no more than its row says, which is at most so many times as much."""
    ((kept, said),) = _kept_and_said(sample)
    assert kept <= said <= most * kept
