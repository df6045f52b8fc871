"""What depends on how memory is laid out, or on when what a backward pass reads is written to: carried or refused."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from autopar.errors import TraceError
from autopar.trace import trace
from tests.equivalence.on_threads import planned, program_differences

Part = Callable[["Net", Tensor], Tensor]


class Net(nn.Module):
    """A linear layer, then a part, whose squares are averaged."""

    def __init__(self, part: Part) -> None:
        super().__init__()
        self.part, self.linear, self.norm = part, nn.Linear(8, 8), nn.BatchNorm1d(8)
        self.register_buffer("scale", torch.full((8,), 1.5))

    def forward(self, x: Tensor) -> Tensor:
        return self.part(self, self.linear(x)).square().mean()


def _filled(_: Net, h: Tensor) -> Tensor:
    return (h * 1).fill_diagonal_(0.5)


def _wrapped(_: Net, h: Tensor) -> Tensor:
    return h.repeat(3, 1).fill_diagonal_(0.5, wrap=True)


def _written(_: Net, h: Tensor) -> Tensor:
    h = h * 1
    h.as_strided((4, 4), (16, 2)).mul_(3)
    return h


def _windows(_: Net, h: Tensor) -> Tensor:
    return h.as_strided((8, 6, 3), (8, 1, 1))


def _turned(_: Net, h: Tensor) -> Tensor:
    return h.t().as_strided((8, 2), (8, 1))


def _expanded(_: Net, h: Tensor) -> Tensor:
    return h.unsqueeze(1).expand(8, 2, 8).as_strided((8, 2, 4), (8, 0, 1))


def _gaps(_: Net, h: Tensor) -> Tensor:
    return h[:, ::2].as_strided((4,), (2,))


def _outside(_: Net, h: Tensor) -> Tensor:
    return h[2:].as_strided((3, 8), (8, 1), 8)


@pytest.mark.sampled
@pytest.mark.parametrize("how", ["dp=2", "tp=2"])
@pytest.mark.parametrize("part", [_filled, _wrapped, _written, _windows, _turned, _expanded])
def test_as_strided_is_of_the_whole_tensor(part: Part, how: str) -> None:
    torch.manual_seed(0)
    model, batch = Net(part), {"x": torch.randn(8, 8)}
    assert not program_differences(model, batch, planned(model, batch, how))


@pytest.mark.parametrize("part", [_gaps, _outside])
def test_as_strided_of_other_memory_is_refused_with_its_line(part: Part) -> None:
    with pytest.raises(TraceError, match=r"test_memory\.py:\d+: .*\n.*expected as_strided"):
        trace(Net(part), (torch.randn(8, 8),))


def _data_scaled(net: Net, h: Tensor) -> Tensor:
    h = h * net.scale
    net.scale.data.mul_(0.5)
    return h


def _data_set(net: Net, h: Tensor) -> Tensor:
    h = h * net.scale
    net.scale.detach().copy_(h.detach().mean(0))
    return h


def _normalized_first(net: Net, h: Tensor) -> Tensor:
    net.norm.eval()
    h = net.norm(h)
    net.norm.train()
    return h + net.norm(h)


@pytest.mark.sampled
@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize("part", [_data_scaled, _data_set, _normalized_first])
def test_a_buffer_that_is_written_to_while_a_backward_pass_waits_for_it_is_refused(part: Part, device: str) -> None:
    """One device would read the new value there, without a word."""
    with pytest.raises(
        TraceError, match=r"before what reads its value in the backward pass, found that aten\..*\n.*: "
    ):
        trace(Net(part).to(device), (torch.randn(8, 8, device=device),))


def _assigned(net: Net, h: Tensor) -> Tensor:
    h = h * net.scale
    net.scale = net.scale * 0.5
    return h


def _only_chosen_by(net: Net, h: Tensor) -> Tensor:
    chosen = (h * net.scale).argmax(-1)
    net.scale.data.mul_(0.9)
    return h * chosen[:, None]


def _added(net: Net, h: Tensor) -> Tensor:
    h = h + net.scale
    net.scale.data.mul_(0.5)
    return h


def _normalized_last(net: Net, h: Tensor) -> Tensor:
    h = net.norm(h)
    net.norm.eval()
    h = net.norm(h)
    net.norm.train()
    return h


@pytest.mark.parametrize("part", [_assigned, _only_chosen_by, _added, _normalized_last])
def test_a_buffer_whose_earlier_value_no_backward_pass_reads_may_be_written_to(part: Part) -> None:
    torch.manual_seed(0)
    model, batch = Net(part), {"x": torch.randn(8, 8)}
    assert not program_differences(model, batch, planned(model, batch, "dp=2"))


def _data_after_product(net: Net, h: Tensor) -> Tensor:
    y = h * net.norm.weight
    h.data.clamp_(-0.1, 0.1)
    return y


def _data_of_a_result(net: Net, h: Tensor) -> Tensor:
    h = torch.sigmoid(h)
    h.detach().clamp_(0.4, 0.6)
    return h


def _data_of_a_view(net: Net, h: Tensor) -> Tensor:
    h = h.exp()
    h[0].data.zero_()
    return h


def _data_of_a_mask(net: Net, h: Tensor) -> Tensor:
    mask = torch.ones(8, device=h.device)
    y = h * mask
    mask.data.mul_(2)
    return y


def _data_read_detached(net: Net, h: Tensor) -> Tensor:
    y = net.norm.weight * h.detach()
    h.data.mul_(2)
    return y + h


def _data_assigned(net: Net, h: Tensor) -> Tensor:
    y = net.norm.weight * h.view(-1, 8)
    h.data = h.data.clamp(-0.1, 0.1)
    return y


def _data_in_place(net: Net, h: Tensor) -> Tensor:
    h = (h * 1).relu_()
    h.data.add_(-0.1)
    return h


KEPT = (
    _data_after_product, _data_of_a_result, _data_of_a_view, _data_of_a_mask, _data_read_detached, _data_assigned,
    _data_in_place,
)  # fmt: skip


@pytest.mark.sampled
@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize("part", KEPT)
def test_an_activation_that_is_written_to_while_a_backward_pass_waits_is_refused(part: Part, device: str) -> None:
    """One device would read the new value there, without a word. Both lines are told."""
    model, inputs = Net(part).to(device), (torch.randn(8, 8, device=device),)
    with pytest.raises(TraceError, match="to an activation before what reads its value in the back") as caught:
        trace(model, inputs)
    assert len(re.findall(r"test_memory\.py:\d+: return self\.part", str(caught.value))) == 2
    trace(model, inputs, mode="inference")


def _made_by_linear(net: Net, h: Tensor) -> Tensor:
    h.data.clamp_(-0.1, 0.1)
    return h * net.norm.weight


def _kept_by_what_leads_nowhere(net: Net, h: Tensor) -> Tensor:
    scale, index = (h * h).detach().mean(), h.square().argmax()
    h.data.clamp_(-0.1, 0.1)
    return h * scale + index


def _kept_in_another_memory(net: Net, h: Tensor) -> Tensor:
    h = torch.nn.functional.silu(h)
    h.data.clamp_(-0.1, 0.1)
    return h


class Blocks(Net):
    """Equal blocks, of which one is exported for all."""

    def __init__(self, part: Part) -> None:
        super().__init__(part)
        self.blocks = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8)) for _ in range(4)))


def _between_blocks(net: Net, h: Tensor) -> Tensor:
    assert isinstance(net, Blocks)
    for block in net.blocks:
        h = block(h)
        h.data.mul_(0.5)
    return h


@pytest.mark.sampled
@pytest.mark.parametrize(
    "part", [_made_by_linear, _kept_by_what_leads_nowhere, _kept_in_another_memory, _between_blocks]
)
@pytest.mark.parametrize("how", ["dp=2", "tp=2"])
def test_an_activation_whose_earlier_value_no_backward_pass_reads_may_be_written_to(part: Part, how: str) -> None:
    torch.manual_seed(0)
    model, batch = Blocks(part), {"x": torch.randn(8, 8)}
    assert not program_differences(model, batch, planned(model, batch, how))


def _inverse(net: Net, h: Tensor) -> Tensor:
    return h @ torch.linalg.inv(net.linear.weight + 8 * torch.eye(8))


def _solved(net: Net, h: Tensor) -> Tensor:
    return torch.linalg.solve(net.linear.weight + 8 * torch.eye(8), h.t())


def _triangle(_: Net, h: Tensor) -> Tensor:
    return torch.linalg.cholesky(h.t() @ h + 8 * torch.eye(8))


def _factored(net: Net, h: Tensor) -> Tensor:
    return torch.linalg.lu_solve(*torch.linalg.lu_factor(net.linear.weight + 8 * torch.eye(8)), h.t())


def _inverse_of_more_dims(net: Net, h: Tensor) -> Tensor:
    return h + torch.linalg.tensorinv((net.linear.weight + 8 * torch.eye(8)).view(4, 2, 8)).sum()


@pytest.mark.parametrize("part", [_inverse, _solved, _triangle, _factored, _inverse_of_more_dims])
def test_inverses_and_triangles_are_taken_to_exist(part: Part) -> None:
    torch.manual_seed(0)
    model, batch = Net(part), {"x": torch.randn(8, 8)}
    assert not program_differences(model, batch, planned(model, batch, "dp=2"))


def _turned_by_a_number(_: Net, h: Tensor) -> Tensor:
    return (torch.complex(h, h) * 1j).real


def test_complex_numbers_are_arguments_like_others() -> None:
    model, batch = Net(_turned_by_a_number), {"x": torch.randn(8, 8)}
    assert not program_differences(model, batch, planned(model, batch, "dp=2"))


def _scattered(_: Net, h: Tensor) -> Tensor:
    return torch.as_strided_scatter(h, torch.ones(8), (8,), (9,))


def test_as_strided_scatter_itself_is_refused_with_its_line() -> None:
    with pytest.raises(TraceError, match=r"found as_strided_scatter.*\n.*test_memory\.py:\d+: "):
        trace(Net(_scattered), (torch.randn(8, 8),))
