"""What blocks save waits on the host: each piece of memory once, what is needed anyway not at all."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from autopar.runtime import copied_out, copying, offloading
from autopar.runtime.constants import computed_once
from autopar.runtime.host_link import HostCopy, HostLink

SIZE = 64, 64
BYTES = 64 * 64 * 4


class CountingLink(HostLink):
    """Notes the bytes of each copy; `order`: of copies and their ends."""

    def __init__(self) -> None:
        super().__init__(torch.device("cpu"))
        self.sent: dict[str, list[int]] = {"down": [], "up": []}

    def _start(self, pairs: Any, is_up: bool) -> HostCopy:
        self.sent["up" if is_up else "down"].append(sum(source.numel() for _, source in pairs))
        return super()._start(pairs, is_up)


class Toy:
    """Stands for a program."""

    def __init__(self, forward: Callable[..., Tensor], own: tuple[Tensor, ...] = ()) -> None:
        self.link = CountingLink()
        self.mesh, self.microbatch, self._forward = SimpleNamespace(host_link=self.link), 0, forward
        copying.note_stored(self, {x.untyped_storage()._cdata for x in own})

    @offloading
    def forward(self, *inputs: Tensor) -> Tensor:
        return self._forward(*inputs)

    def gradients(self, *inputs: Tensor) -> list[Tensor]:
        """Of all inputs that want some, of the sum of what forward returns."""
        wanting = [x for x in inputs if x.requires_grad]
        loss = self.forward(*inputs).sum()
        copying.begin_backward(self, 0)
        return list(torch.autograd.grad(loss, wanting))


def tensors(count: int) -> list[Tensor]:
    torch.manual_seed(count)
    return [torch.randn(SIZE, requires_grad=True) for _ in range(count)]


def check(forward: Callable[..., Tensor], *inputs: Tensor) -> CountingLink:
    """Gradients are those without copies, bit for bit, twice; returns the link of the second time."""
    plain = torch.autograd.grad(forward(*inputs).sum(), [x for x in inputs if x.requires_grad])
    toy = Toy(forward, tuple(x for x in inputs if x.is_leaf))
    for _ in range(2):
        toy.link.sent = {"down": [], "up": []}
        found = toy.gradients(*inputs)
        assert all(map(torch.equal, found, plain))
    return toy.link


def test_what_a_block_saves_goes_to_the_host_and_comes_back_once() -> None:
    """Both factors of a product are views of one piece of memory, which another operator saves as well."""

    def block(x: Tensor) -> Tensor:
        y = torch.exp(x)  # saves its result
        a, b = y.chunk(2)
        return torch.cat((a * b, b)).tanh() * 1.5  # tanh saves its result, the products the halves of y

    def forward(x: Tensor) -> Tensor:
        x = copied_out(block, x * 0.5)
        return copied_out(block, x).relu()

    link = check(forward, *tensors(1))
    assert link.sent["down"] == [2 * BYTES, 2 * BYTES] == link.sent["up"]


def test_what_is_stored_given_or_constant_stays() -> None:
    class Holder:
        @computed_once
        def table(self) -> tuple[Tensor, ...]:
            return (torch.ones(SIZE),)

        def modules(self) -> list[Any]:
            return []

    holder = Holder()

    def block(x: Tensor, weight: Tensor) -> Tensor:
        (table,) = holder.table()
        return (x @ weight) * table

    def forward(x: Tensor, weight: Tensor) -> Tensor:
        return copied_out(block, x, weight)

    link = check(forward, *tensors(2))
    assert link.sent == {"down": [], "up": []}


def test_what_is_saved_outside_stays() -> None:
    """Before the call: not copied. After it: copied in vain, and kept."""

    def block(x: Tensor) -> Tensor:
        return torch.exp(torch.tanh(x).sin())  # sin saves what tanh made and keeps itself; exp its result

    def before(x: Tensor) -> Tensor:
        y = torch.exp(x)
        return copied_out(lambda y: y.sin(), y)

    def after(x: Tensor) -> Tensor:
        return copied_out(block, x.cos()).sin()

    assert check(before, *tensors(1)).sent == {"down": [], "up": []}
    link = check(after, *tensors(1))
    assert link.sent["down"] == [2 * BYTES] and link.sent["up"] == [BYTES]


def test_what_several_blocks_save_is_brought_back_by_the_last() -> None:
    def forward(x: Tensor) -> Tensor:
        x = copied_out(torch.exp, x * 0.25)  # saves its result
        x = copied_out(torch.sin, x)  # saves the same
        return copied_out(torch.sigmoid, x)  # saves its result

    link = check(forward, *tensors(1))
    assert link.sent == {"down": [BYTES, BYTES], "up": [BYTES, BYTES]}


def test_memory_leaves_the_device_a_block_later() -> None:
    """With a block under way: after the second block's call the first's memory is not there any more."""
    alive: list[Any] = []

    def block(x: Tensor) -> Tensor:
        y = torch.tanh(x)
        alive.append(torch.multiprocessing.reductions.StorageWeakRef(y.untyped_storage()))
        return y * 0.5

    def forward(x: Tensor) -> Tensor:
        for number in range(3):
            x = copied_out(block, x)
            assert [one.expired() for one in alive] == [True] * number + [False]
        return x

    toy = Toy(forward)
    (x,) = tensors(1)
    loss = toy.forward(x * 1).sum()
    assert all(one.expired() for one in alive)
    copying.begin_backward(toy, 0)
    assert torch.autograd.grad(loss, x)[0].isfinite().all()


def test_small_pieces_stay_and_no_gradient_is_a_plain_call() -> None:
    def forward(x: Tensor) -> Tensor:
        return copied_out(torch.exp, x * 2)

    small = torch.randn(8, requires_grad=True)
    assert check(forward, small).sent["down"] == []
    toy = Toy(forward)
    with torch.no_grad():
        assert torch.equal(toy.forward(small), torch.exp(small * 2))
