"""Indexing by counting is a reshape; indexing that skips, turns round or takes a diagonal is not."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import autopar
from autopar.trace import trace

BATCH, LENGTH = 4, 6


class Masked(nn.Module):
    """Attention under a mask of which keys each sample has, read in some way."""

    def __init__(self, read: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.read, self.project = read, nn.Linear(8, 24)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        q, k, v = self.project(x).unflatten(-1, (3, 1, 8)).permute(2, 0, 3, 1, 4)
        return nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=self.read(mask)).square().mean()


def by_sample_and_key(mask: Tensor) -> Tensor:
    samples, keys = torch.arange(mask.shape[0]), torch.arange(mask.shape[1]) + 0
    return mask[samples[:, None, None, None], keys[None, None, None, :]]


def by_sample(mask: Tensor) -> Tensor:
    return mask[torch.arange(mask.shape[0])].unsqueeze(1).unsqueeze(1)


def backwards(mask: Tensor) -> Tensor:
    samples, keys = torch.arange(mask.shape[0]), torch.arange(mask.shape[1])
    return mask[keys.flip(0)[None, None, None, :] * 0 + samples[:, None, None, None], keys.flip(0)]


def of_the_second_key_on(mask: Tensor) -> Tensor:
    samples, keys = torch.arange(mask.shape[0]), torch.arange(1, mask.shape[1])
    seen = mask[samples[:, None, None, None], keys]
    return torch.cat([seen, seen[..., :1]], -1)


def of_one_key_each(mask: Tensor) -> Tensor:
    samples = torch.arange(mask.shape[0])
    return mask[samples, samples][:, None, None, None].expand(-1, 1, LENGTH, LENGTH)


def inputs() -> dict[str, Tensor]:
    mask = torch.ones(BATCH, LENGTH, dtype=torch.bool).triu(-1)  # unlike if rows or columns are exchanged
    return {"x": torch.randn(BATCH, LENGTH, 8), "mask": mask}


@pytest.mark.parametrize(
    ("read", "is_reshape"),
    [(by_sample_and_key, True), (by_sample, True), (backwards, False), (of_the_second_key_on, False),
     (of_one_key_each, False)],
)  # fmt: skip
def test_only_counting_to_the_end_in_order_is_a_reshape(read: Callable[[Tensor], Tensor], is_reshape: bool) -> None:
    ops = {node.op for node in trace(Masked(read), inputs()).nodes}
    taken = bool(ops & {"aten.index.Tensor", "aten.gather.default"})
    assert (taken, "aten.arange.default" in ops) == (not is_reshape, not is_reshape)


def test_a_padded_batch_can_be_divided_into_microbatches() -> None:
    torch.manual_seed(0)
    model, batch = Masked(by_sample_and_key), inputs()
    plan = autopar.template_plan(model, autopar.Mesh("cpu", devices_per_node=1), batch, microbatches=2)
    rank = autopar.parallelize(model, plan.mesh, batch, plan=plan).build()
    torch.testing.assert_close(rank.train_step(**batch), model(**batch).detach())


def of_each_token(z: Tensor, y: Tensor) -> Tensor:
    samples, tokens = torch.arange(z.shape[0])[:, None], torch.arange(z.shape[1])
    return z[samples, tokens, y]


def of_each_sample(z: Tensor, y: Tensor) -> Tensor:
    return z[torch.arange(len(z)), y[:, 0]]


def of_samples_turned_round(z: Tensor, y: Tensor) -> Tensor:
    return z[torch.arange(len(z)).flip(0), y[:, 0]]


def of_some_samples(z: Tensor, y: Tensor) -> Tensor:
    return z[torch.arange(2), y[:2, 0]]


class Picking(nn.Module):
    """Takes an element by an index, which may count from the end."""

    def __init__(self, pick: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.pick, self.project = pick, nn.Linear(8, 5)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return self.pick(self.project(x).tanh(), y).square().mean()


@pytest.mark.parametrize(
    ("pick", "is_gather"),
    [(of_each_token, True), (of_each_sample, True), (of_samples_turned_round, False), (of_some_samples, False)],
)
def test_one_element_of_each_sample_is_gathered(pick: Callable[[Tensor, Tensor], Tensor], is_gather: bool) -> None:
    """Also with several microbatches, and indices from the end."""
    torch.manual_seed(0)
    model, y = Picking(pick), torch.tensor([[0, -1, 2, -4, 4, 1]] * BATCH) - torch.arange(BATCH)[:, None] % 2
    batch = {"x": torch.randn(BATCH, LENGTH, 8), "y": y}
    ops = {node.op for node in trace(model, batch).nodes}
    assert ("aten.gather.default" in ops, "aten.index.Tensor" in ops) == (is_gather, not is_gather)
    if is_gather:
        plan = autopar.template_plan(model, autopar.Mesh("cpu", devices_per_node=1), batch, microbatches=2)
        rank = autopar.parallelize(model, plan.mesh, batch, plan=plan).build()
        loss = model(**batch)
        loss.backward()
        torch.testing.assert_close(rank.train_step(**batch), loss.detach())
        for name, parameter in model.named_parameters():
            torch.testing.assert_close(rank.full_gradients()[name], parameter.grad)
