"""What torch registers while it decomposes is kept from one program to the next, and taken back each time."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses import fake_impls
from torch.export import exported_program

from autopar.trace import decompose as room
from autopar.trace import registrations, trace


class Composite(nn.Module):
    """Of composite operators: some stay whole, some are taken apart, some are inside of others."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Bilinear(8, 8, 4)

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)[None, None]
        h = nn.functional.scaled_dot_product_attention(h, h, h)[0, 0]
        return nn.functional.huber_loss(self.second(h, x.tile(1, 1)), h[:, :4])


def nodes() -> list[str]:
    torch.manual_seed(0)
    return [str(node) for node in trace(Composite(), (torch.randn(4, 8),)).nodes]


def test_a_program_is_decomposed_as_torch_does(monkeypatch: pytest.MonkeyPatch) -> None:
    found = [nodes() for _ in range(3)]
    monkeypatch.setattr(room, "registrations_kept", nullcontext)
    assert found == [nodes()] * 3


def test_what_is_registered_is_what_torch_registers_and_is_taken_back() -> None:
    nodes(), nodes()
    given = dict(next(iter(registrations._KNOWN)))

    def read() -> list[tuple[object, set[object], object, bool]]:
        composite = torch._C.DispatchKey.CompositeImplicitAutograd
        return [
            (op, {*op.py_kernels}, op.py_kernels.get(composite), op in fake_impls.op_implementations_dict)
            for op in given
        ]

    before = read()
    with exported_program._override_composite_implicit_decomp(given):
        expected = read()
    with registrations.registrations_kept(), exported_program._override_composite_implicit_decomp(given):
        assert read() == expected != before
    assert read() == before


def test_where_kernels_have_changed_torch_registers_anew() -> None:
    nodes(), nodes()
    known = next(iter(registrations._KNOWN.values()))
    op, key = known[0].op, torch._C.DispatchKey.CPU
    op.py_kernels[key] = print
    try:
        given = dict(next(iter(registrations._KNOWN)))
        with registrations.registrations_kept(), exported_program._override_composite_implicit_decomp(given):
            assert op.py_kernels[key] is print
        assert op.py_kernels == {**known[0].before, key: print}
    finally:
        del op.py_kernels[key]
        op._dispatch_cache.clear()
