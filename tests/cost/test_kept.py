"""No operator keeps more for its backward pass than its row says, over all sample calls that rules are proved with."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from torch import nn

from tests.cost.kept import BY_THE_RUNTIME, Held, held, held_in
from tests.ops.interpreter import make_case
from tests.ops.long_tail_samples import long_tail
from tests.ops.samples import Sample, close, registry_samples, table_samples
from tests.random_programs.kinds.row import subject_of
from tests.random_programs.kinds.table import KINDS


def _samples() -> list[Sample]:
    torch.manual_seed(0)
    found = (*table_samples(), *registry_samples(), *long_tail())
    return [sample for sample in found if not sample.op.startswith(BY_THE_RUNTIME)]


@pytest.mark.parametrize(("each_alone", "least"), [(False, 350), (True, 150)])
def test_no_operator_keeps_more_than_its_row_says(each_alone: bool, least: int) -> None:
    """A gather kept what it reads, an index_add what it adds, recurrent layers their gates, a frozen convolution its
    input: none was counted. A mean over all of an image keeps nothing, so that it never runs again; bytes of a second
    run were foretold."""
    compared = [found for sample in _samples() for found in _held(sample, each_alone)]
    assert len(compared) > least
    wrong = [str(one) for one in compared if one.is_wrong]
    assert not wrong, "\n".join(wrong)


def _held(sample: Sample, each_alone: bool = False) -> Iterator[Held]:
    """With gradients of all operands, or of each alone where there are several; nothing where none reaches a result."""
    case = make_case(*sample)
    tensors, names = case.graph.tensors, case.node.operands
    every = tuple(dict.fromkeys(name for name in names if tensors[name].differentiable))
    for trained in [(name,) for name in every if len(every) > 1] if each_alone else [every]:
        known = {name: replace(tensor, differentiable=(tensor.differentiable and name not in every) or name in trained)
                 for name, tensor in tensors.items()}  # fmt: skip
        graph, values = replace(case.graph, tensors=known), dict(zip(names, case.operands, strict=True))
        found, _ = held(f"{sample} for {trained}", case.node, graph, values)
        if found is not None:
            yield found


@pytest.mark.parametrize("name", ["max ties", "cummax", "msort", "fft", "logdet", "layer norm 2dims"])
def test_results_that_nothing_reads_are_kept_all_the_same(name: str) -> None:
    """The positions of maxima along a dim, of what is sorted, the factors of a determinant: none was counted where the
    model has no use for them."""
    found = list(held_in(name, subject_of(KINDS[name], 1)))
    assert len(found) > 10
    assert not [str(one) for one in found if one.is_wrong]


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


def test_put_keeps_indices_and_what_it_puts() -> None:
    made, given = torch.randn(40, 30, requires_grad=True), torch.randn(20, requires_grad=True)
    _assert_not_above(close("put.default", made, torch.arange(20), given), 1.01)


def _assert_not_above(sample: Sample, most: float) -> None:
    """What an operator keeps is no more than its row says, which is at most so many times as much."""
    (held,) = _held(sample)
    kept, said = held.kept_bytes, held.said_bytes
    assert kept <= said <= most * kept
