"""The routing of models.moe: slots, capacity, weights, and equality with a loop over tokens."""

from __future__ import annotations

import dataclasses

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from models import moe

ROOMY = moe.Config(capacity_factor=4.0)
TIGHT = moe.Config(capacity_factor=0.5)


def routed(config: moe.Config, seed: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Random x, and what a random router gives for it."""
    torch.manual_seed(seed)
    router = moe.Router(config)
    x = torch.randn(3, config.seq_len, config.hidden_size)
    return x, *router(x)


@pytest.mark.parametrize("config", [ROOMY, TIGHT, moe.Config()], ids=["roomy", "tight", "default"])
@pytest.mark.parametrize("seed", range(3))
def test_a_slot_holds_one_token_and_a_token_takes_two_slots_at_most(config: moe.Config, seed: int) -> None:
    _, dispatch, combine, _ = routed(config, seed)
    assert dispatch.shape == (3, config.seq_len, config.num_experts, config.capacity)
    assert dispatch.sum(dim=1).max() <= 1
    assert dispatch.sum(dim=(2, 3)).max() <= 2
    assert ((combine > 0) == (dispatch > 0)).all()


def test_with_room_for_all_each_token_takes_two_slots_and_its_weights_sum_to_one() -> None:
    _, dispatch, combine, _ = routed(ROOMY, seed=0)
    assert (dispatch.sum(dim=(2, 3)) == 2).all()
    torch.testing.assert_close(combine.sum(dim=(2, 3)), torch.ones(3, ROOMY.seq_len))


def test_first_choices_are_served_before_second_choices_and_early_tokens_before_late() -> None:
    first = F.one_hot(torch.tensor([[0, 1, 0, 0]]), 2).bool()
    second = ~first
    first_slots = moe.take_slots(first, 0, capacity=2)
    second_slots = moe.take_slots(second, first.sum(dim=1, keepdim=True), capacity=2)
    assert first_slots.any(dim=3)[0].tolist() == [[True, False], [False, True], [True, False], [False, False]]
    assert second_slots.any(dim=3)[0].tolist() == [
        [False, True],
        [False, False],
        [False, False],
        [False, False],
    ]


def test_mixture_equals_a_loop_over_tokens() -> None:
    torch.manual_seed(0)
    mixture = moe.MixtureOfExperts(ROOMY)
    torch.nn.init.normal_(mixture.up)
    torch.nn.init.normal_(mixture.down)
    x = torch.randn(2, ROOMY.seq_len, ROOMY.hidden_size)
    output, _ = mixture(x)
    expected = torch.stack([token_by_token(mixture, sequence) for sequence in x])
    torch.testing.assert_close(output, expected, rtol=1e-4, atol=1e-4)


def token_by_token(mixture: moe.MixtureOfExperts, sequence: Tensor) -> Tensor:
    """sequence (s, m) → (s, m), each token through its two experts by itself."""
    outputs = []
    for token in sequence:
        weights, experts = mixture.router.scores(token).softmax(dim=-1).topk(2)
        each = [F.gelu(token @ mixture.up[e], approximate="tanh") @ mixture.down[e] for e in experts]
        outputs.append((weights[0] * each[0] + weights[1] * each[1]) / weights.sum())
    return torch.stack(outputs)


def test_balance_loss_is_one_when_even_and_the_number_of_experts_when_one_has_all() -> None:
    even = torch.eye(4).expand(3, 4, 4)
    lopsided = torch.eye(4)[:1].expand(3, 4, 4)
    assert moe.balance_loss(even, even.bool()) == 1
    assert moe.balance_loss(lopsided, lopsided.bool()) == 4


def test_dropped_tokens_keep_their_residual_path() -> None:
    _, dispatch, combine, _ = routed(TIGHT, seed=0)
    dropped = dispatch.sum(dim=(2, 3)) == 0
    assert dropped.any()
    assert (combine.sum(dim=(2, 3))[dropped] == 0).all()


def test_an_odd_number_of_layers_is_refused() -> None:
    with pytest.raises(ValueError, match=r"come in pairs.*num_layers is 3"):
        dataclasses.replace(ROOMY, num_layers=3)
